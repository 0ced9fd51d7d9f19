"""The documented import path of AutoBatch for use in any training loop."""

from linnaeus.autobatch.api import auto_find_batch_size, predict_memory
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.integrations.samples import longest

__all__ = ["AutoBatchResult", "auto_find_batch_size", "longest", "predict_memory"]
