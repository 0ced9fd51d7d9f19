"""AutoBatch: the largest memory-safe batch size, found before training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.result import AutoBatchResult

if TYPE_CHECKING:
    from linnaeus.autobatch.api import auto_find_batch_size, predict_memory

__all__ = [
    "AutoBatchError",
    "AutoBatchResult",
    "BudgetBatchSampler",
    "auto_find_batch_size",
    "find_budget",
    "longest",
    "predict_memory",
]

_INTEGRATIONS = {"longest": "samples", "find_budget": "budget", "BudgetBatchSampler": "budget"}
"""Functions that are imported from here, although the library imports no integration."""


def __getattr__(name: str) -> Any:
    """Import the functions, and torch with them, on first use: the pure search needs neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = f"integrations.{_INTEGRATIONS[name]}" if name in _INTEGRATIONS else "autobatch.api"
    return getattr(import_module(f"linnaeus.{home}"), name)
