"""AutoBatch: the largest memory-safe batch size, found before training."""

from typing import TYPE_CHECKING, Any

from linnaeus.autobatch.result import AutoBatchResult

if TYPE_CHECKING:
    from linnaeus.autobatch.api import auto_find_batch_size

__all__ = ["AutoBatchResult", "auto_find_batch_size"]


def __getattr__(name: str) -> Any:
    """Import `auto_find_batch_size`, and torch with it, on first use: the pure search needs neither."""
    if name != "auto_find_batch_size":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from linnaeus.autobatch.api import auto_find_batch_size

    return auto_find_batch_size
