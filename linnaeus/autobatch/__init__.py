"""AutoBatch: the largest memory-safe batch size, found before training."""

from linnaeus.autobatch.find import auto_find_batch_size
from linnaeus.autobatch.result import AutoBatchResult

__all__ = ["AutoBatchResult", "auto_find_batch_size"]
