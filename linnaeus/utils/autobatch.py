"""The documented import path of AutoBatch for use in any training loop."""

from linnaeus.autobatch.find import AutoBatchResult, auto_find_batch_size

__all__ = ["AutoBatchResult", "auto_find_batch_size"]
