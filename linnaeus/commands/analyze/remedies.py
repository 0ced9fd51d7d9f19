"""What the common remedies against a lack of memory really save: each is built and run, none is estimated.

The configuration as it is runs again beside them, so that before and after come from the same process in the
same state: on the CPU a process does not go back to holding as little as when it began.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from linnaeus.autobatch.find import BatchSizeFinder
from linnaeus.autobatch.protocol import Status
from linnaeus.autobatch.sizes import SizeSearch
from linnaeus.batching.sizes import micro_batches_held
from linnaeus.commands.analyze.options import Mode
from linnaeus.commands.analyze.results import Analysis, Remedy
from linnaeus.config.schema import Config, TrainConfig
from linnaeus.data.bundle import DataBundle
from linnaeus.dist import World
from linnaeus.errors import ConfigError
from linnaeus.memory.device import GIB
from linnaeus.training.build import assemble

logger = logging.getLogger("linnaeus.analysis")


@dataclass(frozen=True)
class _Change:
    """One remedy.

    Attributes:
        name: of the remedy.
        keys: keys of TRAIN and their new values, from the node as it is.
        obstacle: why the remedy does not apply to a mode on a device, or None.
        divisor: what the size of a micro-batch is divided by.
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


def measure_remedies(
    config: Config, data: DataBundle, world: World, analysis: Analysis, status: Status, *, timed: bool
) -> None:
    """Try each remedy at each size found, and put what it does into the rows as soon as it is known.

    Args:
        config: as it is.
        data: of both splits.
        world: this process.
        analysis: its rows take the remedies.
        status: told what is being tried.
        timed: measure samples per second too.
    """
    run = partial(_run, data, world, status, timed)
    for mode in analysis.curves:
        sizes = sorted({row.batch_size for row in analysis.sorted_rows(mode) if row.batch_size is not None})
        if not sizes:
            continue
        logger.info("remedies, %s: measuring the configuration as it is again", mode)
        before = run(config, mode, sizes)
        for change in CHANGES:
            outcomes = _try(change, config, world.device, mode, before, run)
            for row in analysis.sorted_rows(mode):
                if row.batch_size is not None:
                    row.remedies.append(outcomes[row.batch_size])


def _try(
    change: _Change, config: Config, device: torch.device, mode: Mode, before: Mapping[int, _Measured],
    run: Callable[[Config, Mode, list[int]], dict[int, _Measured]],
) -> dict[int, Remedy]:  # fmt: skip
    """What one remedy does to each size of a mode."""
    keys = change.keys(config.TRAIN)
    obstacle = change.obstacle(config.TRAIN, mode, device)
    after: dict[int, _Measured] = {}
    if obstacle is None:
        logger.info("remedies, %s: %s", mode, change.name)
        changed = replace(config, TRAIN=replace(config.TRAIN, **keys))
        sizes = [size // change.divisor for size in before if size >= change.divisor]
        after = run(changed, mode, sizes)
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


def _run(
    data: DataBundle, world: World, status: Status, timed: bool, config: Config, mode: Mode,
    sizes: Sequence[int],
) -> dict[int, _Measured]:  # fmt: skip
    """Measure sizes under a configuration. One that cannot run is a reason, and ends nothing else."""
    found: dict[int, _Measured] = {}
    try:
        assembly = assemble(config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, data, world)
        search = SizeSearch(
            config.DATA, data, assembly, world, micro_batches_held(config.TRAIN), config.EXPERIMENT.SEED
        )
        with search.finder(mode, status) as finder:
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
