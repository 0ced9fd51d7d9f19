"""AutoBatch: the largest memory-safe batch size, found before training."""

from linnaeus.autobatch.find import AutoBatchResult, auto_find_batch_size

__all__ = ["AutoBatchResult", "auto_find_batch_size"]
