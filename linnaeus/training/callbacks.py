"""Callbacks: the user's own objects, called after optimizer steps, validations and epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from linnaeus.config.instantiate import call_target
from linnaeus.errors import ConfigError

MOMENTS = ("on_step_end", "on_validation_end", "on_epoch_end")
"""The methods that a callback may have. An epoch ends after its validation and before its checkpoint."""


@dataclass(frozen=True)
class CallbackState:
    """What a callback is told. Model and optimizer are the run's own.

    Attributes:
        epoch: counted from 1.
        step: optimizer steps done.
        loss: in `on_step_end` this rank's mean loss, a detached scalar on the device; else None.
        metrics: of the last validation; empty before the first.
        model: without DistributedDataParallel.
        is_main: whether this is rank 0, which alone should write files.
        folder: of the run.
    """

    epoch: int
    step: int
    loss: Tensor | None
    metrics: Mapping[str, float]
    model: nn.Module
    optimizer: Optimizer
    is_main: bool
    folder: Path


def build_callbacks(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The objects of TRAIN.CALLBACKS, by key.

    Raises:
        ConfigError: one cannot be built, or has none of `MOMENTS`.
    """
    callbacks = {}
    for number, node in enumerate(nodes):
        key = f"TRAIN.CALLBACKS[{number}]"
        callbacks[key] = call_target(node, key)
        if not any(hasattr(callbacks[key], name) for name in MOMENTS):
            raise ConfigError(f"{key}: {node['_target_']} has no method {' or '.join(MOMENTS)}")
    return callbacks


def call_back(callbacks: Mapping[str, Any], method: str, *arguments: Any) -> dict[str, Any]:
    """Call a method of all that have it; an exception gets a note that names the callback."""
    results = {}
    for key, callback in callbacks.items():
        try:
            if hasattr(callback, method):
                results[key] = getattr(callback, method)(*arguments)
        except Exception as error:
            error.add_note(f"{key}: {type(callback).__name__}.{method}")
            raise
    return results
