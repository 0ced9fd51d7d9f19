"""Linnaeus: config-driven PyTorch training that finds the largest memory-safe batch size before it starts.

The search is a library too: `from linnaeus import auto_find_batch_size, predict_memory, longest`. It needs
torch and psutil alone.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linnaeus.autobatch import AutoBatchResult, auto_find_batch_size, longest, predict_memory

__version__ = "0.1.0"

__all__ = ["AutoBatchResult", "auto_find_batch_size", "longest", "predict_memory"]


def __getattr__(name: str) -> Any:
    """Import the library, and torch with it, on first use: reading a configuration needs neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from linnaeus import autobatch

    return getattr(autobatch, name)
