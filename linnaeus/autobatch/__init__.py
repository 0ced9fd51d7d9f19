"""AutoBatch: the largest memory-safe batch size, found before training."""

from typing import TYPE_CHECKING, Any

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.result import AutoBatchResult

if TYPE_CHECKING:
    from linnaeus.autobatch.api import auto_find_batch_size, predict_memory
    from linnaeus.autobatch.lengths import longest

__all__ = ["AutoBatchError", "AutoBatchResult", "auto_find_batch_size", "longest", "predict_memory"]


def __getattr__(name: str) -> Any:
    """Import the functions, and torch with them, on first use: the pure search needs neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from linnaeus.autobatch import api, lengths

    return getattr(lengths if name == "longest" else api, name)
