"""How much memory the common remedies save: each is built and run, or traced where sizes are predicted.

The unchanged configuration is measured again beside them, so that before and after come from the same process
in the same state: on the CPU a process does not give back all the memory that it has taken.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from linnaeus.autobatch.finder import BatchSizeFinder
from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.result import Mode
from linnaeus.cli.analyze.results import Analysis, Remedy, Row
from linnaeus.cli.session import Setup
from linnaeus.config.schema import Config
from linnaeus.errors import ConfigError, LinnaeusError

logger = logging.getLogger("linnaeus.analysis")


@dataclass(frozen=True)
class Change:
    """One remedy for one mode.

    Attributes:
        name: as in `Remedy`.
        keys: the changed keys with their new values.
        obstacle: why the remedy does not apply; None where it does.
        divisor: divides the micro-batch size.
    """

    name: str
    keys: dict[str, Any]
    obstacle: str | None
    divisor: int = 1


@dataclass(frozen=True)
class Outcome:
    """A size under one configuration.

    Attributes:
        peak_bytes: its peak; None where there is none.
        samples_per_s: its speed, where it was timed.
        reason: why there is no peak.
        largest: the largest size within the memory of a row, with the margin; None if measured.
    """

    peak_bytes: int | None = None
    samples_per_s: float | None = None
    reason: str | None = None
    largest: Callable[[Row], int | None] | None = None


Run = Callable[[Setup, Mode, Sequence[int]], Mapping[int, Outcome]]
"""Finds the peaks of sizes of a mode under a configuration."""


def show_so_far(setup: Setup, analysis: Analysis) -> None:
    """Write and show the sizes: remedies take longer, and somebody may end the process meanwhile."""
    if analysis.has_sizes:
        setup.write()
        analysis.is_shown = True


def measure_remedies(setup: Setup, analysis: Analysis, *, timed: bool) -> None:
    """Try each remedy at each size found, and add its effect to the rows as soon as it is known.

    Args:
        setup: with the unchanged configuration.
        analysis: its rows take the remedies.
        timed: whether samples per second are measured too.
    """
    try_remedies(setup, analysis, partial(_run, timed=timed), common_changes)


def try_remedies(
    setup: Setup, analysis: Analysis, run: Run, changes: Callable[[Setup, Mode], Iterable[Change]]
) -> None:
    """Find the effect of each change at each size found, and add it to the rows as soon as it is known.

    Args:
        setup: with the unchanged configuration.
        analysis: its rows take the remedies.
        run: finds peaks.
        changes: the changes to try.
    """
    for mode in analysis.speeds:
        peaks = {row.batch_size: row.peak_bytes for row in analysis.sorted_rows(mode)}
        sizes = sorted(size for size in peaks if size is not None)
        if not sizes:
            continue
        if analysis.is_predicted:  # and would be predicted again just so
            before: Mapping[int, Outcome] = {size: Outcome(peaks[size]) for size in sizes}
        else:
            logger.info("remedies, %s: measuring the configuration as it is again", mode)
            before = run(setup, mode, sizes)
        for change in changes(setup, mode):
            outcomes = _try(setup, change, mode, before, run)
            for row in analysis.sorted_rows(mode):
                if row.batch_size is not None:
                    row.remedies.append(
                        _remedy(row, change, before[row.batch_size], outcomes[row.batch_size])
                    )


def common_changes(setup: Setup, mode: Mode) -> Iterator[Change]:
    """The remedies, in order."""
    train, device = setup.config.TRAIN, setup.world.device
    obstacle = None if train.AMP == "off" else f"TRAIN.AMP is {train.AMP} already"
    if obstacle is None and device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        obstacle = None if has_bf16 else f"{torch.cuda.get_device_name(device)} has no bf16"
    yield Change("bf16", {"TRAIN.AMP": "bf16"}, obstacle)

    obstacle = "TRAIN.GRADIENT_CHECKPOINTING is on already" if train.GRADIENT_CHECKPOINTING else None
    if mode == "val":
        obstacle = "validation keeps no activations for a backward pass"
    yield Change("gradient_checkpointing", {"TRAIN.GRADIENT_CHECKPOINTING": True}, obstacle)

    obstacle = "validation has no optimizer step to split" if mode == "val" else None
    yield Change(
        "accumulation", {"TRAIN.ACCUMULATION_STEPS": 2 * train.ACCUMULATION_STEPS}, obstacle, divisor=2
    )


def _try(
    setup: Setup, change: Change, mode: Mode, before: Mapping[int, Outcome], run: Run
) -> dict[int, Outcome]:
    """Each size of a mode under one change, by the size without it."""
    after: Mapping[int, Outcome] = {}
    if change.obstacle is None:
        logger.info("remedies, %s: %s", mode, change.name)
        setup.status.update(f"remedies, {mode}: {change.name}")
        changed = replace(setup, config=_changed(setup.config, change.keys))
        sizes = [size // change.divisor for size in before if size >= change.divisor]
        after = run(changed, mode, sizes)
    skipped = Outcome(reason=change.obstacle or "a single sample cannot be halved")
    return {size: after.get(size // change.divisor, skipped) for size in before}


def _remedy(row: Row, change: Change, before: Outcome, after: Outcome) -> Remedy:
    """The effect of one change on a row's size."""
    assert row.batch_size is not None
    return Remedy(
        change.name,
        change.keys,
        batch_size=row.batch_size // change.divisor,
        peak_bytes_before=before.peak_bytes,
        peak_bytes=after.peak_bytes,
        samples_per_s=after.samples_per_s,
        reason=after.reason,
        safe_batch_size=None if after.largest is None else after.largest(row),
    )


def _changed(config: Config, keys: Mapping[str, Any]) -> Config:
    """The configuration with other values for keys such as `TRAIN.AMP`."""
    for key, value in keys.items():
        node, name = key.split(".")
        config = replace(config, **{node: replace(getattr(config, node), **{name: value})})
    return config


def _run(setup: Setup, mode: Mode, sizes: Sequence[int], timed: bool) -> dict[int, Outcome]:
    """Measure sizes under a configuration. Where it cannot run, each size gets the reason."""
    found: dict[int, Outcome] = {}
    try:
        with setup.search().finder(mode, setup.status) as finder:
            for size in sizes:
                found[size] = _measure(finder, size, timed)
    except Exception as error:  # a user's model may not take every precision
        logger.debug("a remedy failed", exc_info=True)
        found |= dict.fromkeys(set(sizes) - found.keys(), Outcome(reason=why(error)))
    gc.collect()
    return found


def why(error: Exception) -> str:
    """Why a configuration cannot run, on one line."""
    if isinstance(error, ConfigError):
        return "; ".join(error.problems)
    kind = "" if isinstance(error, LinnaeusError) else f"{type(error).__name__}: "
    return f"{kind}{str(error).partition(chr(10))[0]}"


def _measure(finder: BatchSizeFinder, size: int, timed: bool) -> Outcome:
    trial = finder.measure(size)
    if trial.peak_bytes is None:
        return Outcome(reason=f"needs more than {finder.budget_bytes / GIB:.3f} GiB")
    speed = finder.time(size).samples_per_s if timed else 0.0
    return Outcome(trial.peak_bytes, speed or None)
