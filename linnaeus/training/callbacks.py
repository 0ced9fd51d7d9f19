"""Callbacks: objects, the user's or Linnaeus's own, whose methods are called at the moments of a run."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from linnaeus.config.instantiate import call_target, is_target
from linnaeus.runtime.errors import ConfigError, first_line

logger = logging.getLogger("linnaeus.trainer")

MOMENTS = (
    "on_step_start",
    "on_backward",
    "on_update",
    "on_step_end",
    "on_validation_end",
    "on_epoch_end",
)
"""The methods that a callback may have. Trials of AutoBatch call only Linnaeus's own callbacks.

A step starts, has a backward pass for each micro-batch, updates the parameters unless the gradient scaler
skips that, and ends when it is counted. An epoch ends after its validation and before its checkpoint.
"""


class MicroBatch(NamedTuple):
    """Micro-batch of a backward pass, on this rank.

    Attributes:
        number: counted from 1.
        total: micro-batches of the optimizer step.
        num_samples: samples on this rank.
        divisor: of its loss.
    """

    number: int
    total: int
    num_samples: int
    divisor: float


@dataclass(frozen=True)
class CallbackState:
    """State of a run, as each callback receives it. Model and optimizer are the run's own, not copies.

    Attributes:
        model: without its DistributedDataParallel wrapper.
        optimizer: the run's.
        epoch: counted from 1.
        step: optimizer steps done.
        loss: in `on_step_end`, this rank's mean: a detached scalar on the device.
        metrics: of the last validation.
        is_main: whether this is rank 0, which alone should write files.
        folder: the run directory.
        micro_batch: in `on_backward`.
    """

    model: nn.Module
    optimizer: Optimizer
    epoch: int = 1
    step: int = 0
    loss: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_main: bool = True
    folder: Path = Path()
    micro_batch: MicroBatch | None = None


def build_callbacks(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The objects of TRAIN.CALLBACKS, by key; `ConfigError` where one cannot be built, or has no method."""
    callbacks = {}
    for number, node in enumerate(nodes):
        key = f"TRAIN.CALLBACKS[{number}]"
        callbacks[key] = call_target(node, key) if is_target(node) else None
        if not any(hasattr(callbacks[key], name) for name in MOMENTS):
            methods = " or ".join(MOMENTS)
            form = "{_target_: my_package.MyCallback}"
            raise ConfigError(
                f"{key}: {node!r} must be a node such as {form}, of an object with {methods}"
            )
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


def callback_states(callbacks: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return class name and state of each callback, by key.

    Raises:
        ConfigError: a checkpoint could not give a state back.
    """
    states = call_back(callbacks, "state_dict")
    for key, state in states.items():
        copy = io.BytesIO()
        try:
            torch.save(state, copy)
            copy.seek(0)
            torch.load(copy, weights_only=True)
        except (pickle.PickleError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{key}: a checkpoint takes tensors, numbers, strings, lists and dicts of its state_dict(): "
                f"{first_line(error)}"
            ) from error
    return {key: (_class_name(callbacks[key]), state) for key, state in states.items()}


def load_callback_states(callbacks: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Give callbacks the states that `callback_states` returned, where their class is the same."""
    for key in callbacks.keys() & states.keys():
        (before, state), now = states[key], _class_name(callbacks[key])
        if before == now:
            call_back({key: callbacks[key]}, "load_state_dict", state)
        else:
            logger.info(
                "%s: class changed from %s to %s; its saved state is not loaded", key, before, now
            )


def _class_name(callback: Any) -> str:
    return f"{type(callback).__module__}.{type(callback).__qualname__}"
