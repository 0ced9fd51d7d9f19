"""How much memory the common remedies really save: each is built and run, none is estimated.

The unchanged configuration is measured again beside them, so that before and after come from the same process
in the same state: on the CPU a process does not give back all the memory that it has taken.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from linnaeus.autobatch.find import BatchSizeFinder
from linnaeus.autobatch.result import Mode
from linnaeus.commands.analyze.results import Analysis, Remedy
from linnaeus.commands.session import Setup
from linnaeus.config.schema import TrainConfig
from linnaeus.errors import ConfigError
from linnaeus.memory.device import GIB

logger = logging.getLogger("linnaeus.analysis")


@dataclass(frozen=True)
class _Change:
    """One remedy for one mode.

    Attributes:
        name: as in `Remedy`.
        keys: the changed keys of TRAIN with their new values.
        obstacle: why the remedy does not apply; None where it does.
        divisor: divides the micro-batch size.
    """

    name: str
    keys: dict[str, Any]
    obstacle: str | None
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
    for mode in analysis.speeds:
        sizes = sorted({row.batch_size for row in analysis.sorted_rows(mode) if row.batch_size is not None})
        if not sizes:
            continue
        logger.info("remedies, %s: measuring the configuration as it is again", mode)
        before = _run(setup, mode, sizes, timed)
        for change in _changes(setup.config.TRAIN, mode, setup.world.device):
            outcomes = _try(setup, change, mode, before, timed)
            for row in analysis.sorted_rows(mode):
                if row.batch_size is not None:
                    row.remedies.append(outcomes[row.batch_size])


def _changes(train: TrainConfig, mode: Mode, device: torch.device) -> Iterator[_Change]:
    """The remedies, in order."""
    obstacle = None if train.AMP == "off" else f"TRAIN.AMP is {train.AMP} already"
    if obstacle is None and device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        obstacle = None if has_bf16 else f"{torch.cuda.get_device_name(device)} has no bf16"
    yield _Change("bf16", {"AMP": "bf16"}, obstacle)

    obstacle = "TRAIN.GRADIENT_CHECKPOINTING is on already" if train.GRADIENT_CHECKPOINTING else None
    if mode == "val":
        obstacle = "validation keeps no activations for a backward pass"
    yield _Change("gradient_checkpointing", {"GRADIENT_CHECKPOINTING": True}, obstacle)

    obstacle = "validation has no optimizer step to split" if mode == "val" else None
    yield _Change("accumulation", {"ACCUMULATION_STEPS": 2 * train.ACCUMULATION_STEPS}, obstacle, divisor=2)


def _try(
    setup: Setup, change: _Change, mode: Mode, before: Mapping[int, _Measured], timed: bool
) -> dict[int, Remedy]:
    """The effect of one change on each size of a mode."""
    after: dict[int, _Measured] = {}
    if change.obstacle is None:
        logger.info("remedies, %s: %s", mode, change.name)
        train = replace(setup.config.TRAIN, **change.keys)
        changed = replace(setup, config=replace(setup.config, TRAIN=train))
        sizes = [size // change.divisor for size in before if size >= change.divisor]
        after = _run(changed, mode, sizes, timed)
    skipped = _Measured(reason=change.obstacle or "a single sample cannot be halved")
    outcomes = {}
    for size, reference in before.items():
        measured = after.get(size // change.divisor, skipped)
        outcomes[size] = Remedy(
            change.name,
            {f"TRAIN.{name}": value for name, value in change.keys.items()},
            batch_size=size // change.divisor,
            peak_bytes_before=reference.peak_bytes,
            **asdict(measured),
        )
    return outcomes


def _run(setup: Setup, mode: Mode, sizes: Sequence[int], timed: bool) -> dict[int, _Measured]:
    """Measure sizes under a configuration. Where it cannot run, each size gets the reason."""
    found: dict[int, _Measured] = {}
    try:
        with setup.search().finder(mode, setup.status) as finder:
            for size in sizes:
                found[size] = _measure(finder, size, timed)
    except Exception as error:  # a user's model may not take every precision
        logger.debug("a remedy failed", exc_info=True)
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if isinstance(error, ConfigError):
            reason = "; ".join(error.problems)
        found |= dict.fromkeys(set(sizes) - found.keys(), _Measured(reason=reason))
    gc.collect()
    return found


def _measure(finder: BatchSizeFinder, size: int, timed: bool) -> _Measured:
    trial = finder.measure(size)
    if trial.peak_bytes is None:
        return _Measured(reason=f"needs more than {finder.budget_bytes / GIB:.3f} GiB")
    speed = finder.time(size).samples_per_s if timed else 0.0
    return _Measured(trial.peak_bytes, speed or None)
