"""Linnaeus: config-driven PyTorch training that finds the largest memory-safe batch size before it starts.

The search is a library too: `from linnaeus import auto_find_batch_size, find_budget, longest`. It needs
torch and psutil alone. `load_run` reads a trained run back.
"""

from typing import TYPE_CHECKING, Any

from linnaeus.version import __version__ as __version__

if TYPE_CHECKING:
    from linnaeus.autobatch import (
        AutoBatchError,
        AutoBatchResult,
        auto_find_batch_size,
        predict_memory,
    )
    from linnaeus.inference.trained import load_run
    from linnaeus.integrations.budget import BudgetBatchSampler, find_budget
    from linnaeus.integrations.samples import longest

__all__ = [
    "AutoBatchError",
    "AutoBatchResult",
    "BudgetBatchSampler",
    "auto_find_batch_size",
    "find_budget",
    "load_run",
    "longest",
    "predict_memory",
]


def __getattr__(name: str) -> Any:
    """Import the library, and torch with it, on first use: reading a configuration needs neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "load_run":
        from linnaeus.inference.trained import load_run

        return load_run
    from linnaeus import autobatch

    return getattr(autobatch, name)
