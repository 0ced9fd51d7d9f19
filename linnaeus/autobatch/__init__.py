"""AutoBatch: the largest memory-safe batch size, found before training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.result import AutoBatchResult

if TYPE_CHECKING:
    from linnaeus.autobatch.api import auto_find_batch_size, predict_memory

__all__ = ["AutoBatchError", "AutoBatchResult", "auto_find_batch_size", "longest", "predict_memory"]


def __getattr__(name: str) -> Any:
    """Import the functions, and torch with them, on first use: the pure search needs neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # `longest` had this path before it moved out of the library, which imports no integration.
    home = "integrations.samples" if name == "longest" else "autobatch.api"
    return getattr(import_module(f"linnaeus.{home}"), name)
