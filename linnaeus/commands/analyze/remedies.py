"""How much memory the common remedies really save: each is built and run, none is estimated.

The unchanged configuration is measured again beside them, so that before and after come from the same process
in the same state: on the CPU a process does not give back all the memory that it has taken.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from linnaeus.autobatch.find import BatchSizeFinder
from linnaeus.commands.analyze.options import Mode
from linnaeus.commands.analyze.results import Analysis, Remedy
from linnaeus.commands.session import Setup
from linnaeus.config.schema import TrainConfig
from linnaeus.errors import ConfigError
from linnaeus.memory.device import GIB
from linnaeus.training.build import assemble_for

logger = logging.getLogger("linnaeus.analysis")


@dataclass(frozen=True)
class _Change:
    """One remedy.

    Attributes:
        name: as in `Remedy`.
        keys: gives the changed keys of TRAIN with their new values.
        obstacle: gives why the remedy does not apply to a mode on a device, or None where it does.
        divisor: divides the micro-batch size.
    """

    name: str
    keys: Callable[[TrainConfig], dict[str, Any]]
    obstacle: Callable[[TrainConfig, Mode, torch.device], str | None]
    divisor: int = 1


@dataclass(frozen=True)
class _Measured:
    """A size under one configuration; without a peak the reason says why."""

    peak_bytes: int | None = None
    samples_per_s: float | None = None
    reason: str | None = None


def measure_remedies(setup: Setup, analysis: Analysis, *, timed: bool) -> None:
    """Try each remedy at each size found, and add its effect to the rows as soon as it is known.

    Args:
        setup: with the unchanged configuration.
        analysis: its rows take the remedies.
        timed: whether samples per second are measured too.
    """
    for mode in analysis.curves:
        sizes = sorted({row.batch_size for row in analysis.sorted_rows(mode) if row.batch_size is not None})
        if not sizes:
            continue
        logger.info("remedies, %s: measuring the configuration as it is again", mode)
        before = _run(setup, mode, sizes, timed)
        for change in CHANGES:
            outcomes = _try(setup, change, mode, before, timed)
            for row in analysis.sorted_rows(mode):
                if row.batch_size is not None:
                    row.remedies.append(outcomes[row.batch_size])


def _try(
    setup: Setup, change: _Change, mode: Mode, before: Mapping[int, _Measured], timed: bool
) -> dict[int, Remedy]:
    """The effect of one change on each size of a mode."""
    train = setup.config.TRAIN
    keys = change.keys(train)
    obstacle = change.obstacle(train, mode, setup.world.device)
    after: dict[int, _Measured] = {}
    if obstacle is None:
        logger.info("remedies, %s: %s", mode, change.name)
        changed = replace(setup, config=replace(setup.config, TRAIN=replace(train, **keys)))
        sizes = [size // change.divisor for size in before if size >= change.divisor]
        after = _run(changed, mode, sizes, timed)
    skipped = _Measured(reason=obstacle or "a single sample cannot be halved")
    outcomes = {}
    for size, reference in before.items():
        measured = after.get(size // change.divisor, skipped)
        outcomes[size] = Remedy(
            change.name,
            {f"TRAIN.{name}": value for name, value in keys.items()},
            batch_size=size // change.divisor,
            peak_bytes_before=reference.peak_bytes,
            peak_bytes=measured.peak_bytes,
            samples_per_s=measured.samples_per_s,
            reason=measured.reason,
        )
    return outcomes


def _run(setup: Setup, mode: Mode, sizes: Sequence[int], timed: bool) -> dict[int, _Measured]:
    """Measure sizes under a configuration. Where it cannot run, each size gets the reason."""
    found: dict[int, _Measured] = {}
    try:
        assembly = assemble_for(setup.config, setup.data, setup.world.device)
        with setup.search(assembly).finder(mode, setup.status) as finder:
            for size in sizes:
                found[size] = _measure(finder, size, timed)
    except ConfigError as error:
        found |= dict.fromkeys(set(sizes) - found.keys(), _Measured(reason="; ".join(error.problems)))
    except Exception as error:  # a user's model may not take every precision
        logger.debug("a remedy failed", exc_info=True)
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        found |= dict.fromkeys(set(sizes) - found.keys(), _Measured(reason=reason))
    gc.collect()
    return found


def _measure(finder: BatchSizeFinder, size: int, timed: bool) -> _Measured:
    trial = finder.measure(size)
    if trial.peak_bytes is None:
        return _Measured(reason=f"needs more than {finder.budget_bytes / GIB:.3f} GiB")
    speed = finder.time(size).samples_per_s if timed else 0.0
    return _Measured(trial.peak_bytes, speed or None)


def _no_bf16(train: TrainConfig, mode: Mode, device: torch.device) -> str | None:
    if train.AMP != "off":
        return f"TRAIN.AMP is {train.AMP} already"
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return f"{torch.cuda.get_device_name(device)} has no bf16"
    return None


def _no_checkpointing(train: TrainConfig, mode: Mode, device: torch.device) -> str | None:
    if mode == "val":
        return "validation keeps no activations for a backward pass"
    return "TRAIN.GRADIENT_CHECKPOINTING is on already" if train.GRADIENT_CHECKPOINTING else None


def _no_accumulation(train: TrainConfig, mode: Mode, device: torch.device) -> str | None:
    return "validation has no optimizer step to split" if mode == "val" else None


CHANGES = (
    _Change("bf16", lambda train: {"AMP": "bf16"}, _no_bf16),
    _Change("gradient_checkpointing", lambda train: {"GRADIENT_CHECKPOINTING": True}, _no_checkpointing),
    _Change(
        "accumulation",
        lambda train: {"ACCUMULATION_STEPS": 2 * train.ACCUMULATION_STEPS},
        _no_accumulation,
        divisor=2,
    ),
)
