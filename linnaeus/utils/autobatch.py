"""The documented import path of AutoBatch for use in any training loop."""

from linnaeus.autobatch.api import auto_find_batch_size, predict_memory
from linnaeus.autobatch.lengths import longest
from linnaeus.autobatch.result import AutoBatchResult

__all__ = ["AutoBatchResult", "auto_find_batch_size", "longest", "predict_memory"]
