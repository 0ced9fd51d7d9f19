"""`auto_find_batch_size`: snapshot, trials, search, restore; with a result that can be written to a file."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from linnaeus.autobatch.search import SearchResult, TrialRecord, find_largest
from linnaeus.autobatch.snapshot import Snapshot
from linnaeus.autobatch.trial import TrialRunner, only_new_garbage
from linnaeus.errors import AutoBatchError
from linnaeus.memory import GIB, DeviceMemory, device_memory

Mode = Literal["train", "val"]
logger = logging.getLogger("linnaeus.autobatch")


@dataclass(frozen=True)
class AutoBatchResult:
    """What a search found.

    Attributes:
        mode: `train` or `val`.
        batch_size: the largest size that ran within the budget.
        certified: the next candidate ran and did not fit, or there is none.
        limited_by: `memory`, `max_batch_size`, `dataset`, `host_memory`, `max_trials` or `timeout`.
        target_memory_fraction: share of the device's memory that may be in use.
        budget_bytes: what this process may hold on the device.
        total_bytes: the device's memory.
        strategy: how sizes were chosen.
        seconds: length of the search.
        trials: every trial, in order.
    """

    mode: Mode
    batch_size: int
    certified: bool
    limited_by: str
    target_memory_fraction: float
    budget_bytes: int
    total_bytes: int
    strategy: str
    seconds: float
    trials: tuple[TrialRecord, ...]

    @property
    def peak_bytes(self) -> int:
        """Peak of the trial at the size found."""
        peaks = [trial.peak_bytes for trial in self.trials if trial.size == self.batch_size]
        assert peaks[0] is not None  # it fitted, so it left a peak
        return peaks[0]

    def as_dict(self) -> dict[str, Any]:
        """The entry of `autobatch.json`."""
        return {
            "batch_size": self.batch_size,
            "certified": self.certified,
            "limited_by": self.limited_by,
            "target_memory_fraction": self.target_memory_fraction,
            "budget_bytes": self.budget_bytes,
            "total_bytes": self.total_bytes,
            "strategy": self.strategy,
            "seconds": round(self.seconds, 3),
            "trials": [
                {
                    "batch_size": trial.size,
                    "status": trial.status,
                    "peak_bytes": trial.peak_bytes,
                    "seconds": round(trial.seconds, 3),
                }
                for trial in self.trials
            ],
        }

    @classmethod
    def from_dict(cls, mode: Mode, entry: Mapping[str, Any]) -> AutoBatchResult:
        """The inverse of `as_dict`."""
        trials = tuple(
            TrialRecord(trial["batch_size"], trial["status"], trial["peak_bytes"], trial["seconds"])
            for trial in entry["trials"]
        )
        return cls(mode=mode, **{**entry, "trials": trials})


@only_new_garbage()
def auto_find_batch_size(
    step: Callable[[Any], object],
    make_batch: Callable[[int], Any],
    *,
    state: Sequence[Any] = (),
    mode: Mode = "train",
    device: torch.device | str | None = None,
    target_memory_fraction: float = 0.8,
    min_batch_size: int = 1,
    max_batch_size: int = 512,
    steps_per_trial: int = 2,
    strategy: str = "guided",
    multiple_of: int = 1,
    memory_limit_gb: float | None = None,
    max_trials: int = 25,
    timeout_minutes: float = 60.0,
    bounds: Mapping[str, int] | None = None,
    start: int | None = None,
    on_start: Callable[[int], None] | None = None,
) -> AutoBatchResult:
    """Find the largest batch size that runs within a fraction of the device's memory.

    Every size is really run; afterwards parameters, buffers, gradients, optimizers, scalers, random number
    generators, modes and the allocator's cap are bit for bit what they were.

    On the CPU this fixes glibc's threshold for own mappings (see `linnaeus.memory.CpuMemory`): for the rest
    of the process peaks are exact and large allocations slower.

    Args:
        step: runs one full training (or validation) step on a batch.
        make_batch: gives a batch of n samples on the device.
        state: everything with `state_dict` and `load_state_dict` that a step may change: model, optimizer,
            scaler, average. With the optimizer among it, a validation search has training's state resident.
        mode: `train` or `val`; modules in `state` are in the mode that goes with it.
        device: whose memory counts; the one of the first parameter in `state`, else torch's accelerator.
        target_memory_fraction: share of the device's total memory that may be in use, in (0, 1].
        min_batch_size: smallest size tried, inclusive. With BatchNorm, training tries no single sample.
        max_batch_size: largest size tried, inclusive.
        steps_per_trial: steps that one trial runs.
        strategy: `guided`, `binary`, `power` or `binsearch`.
        multiple_of: only multiples of this are tried; sizes below it stay exact.
        memory_limit_gb: GiB; treat the device as if it had no more than this.
        max_trials: bound on trials; the best size so far is used.
        timeout_minutes: deadline of the search; the best size so far is used.
        bounds: further upper bounds by the name that `limited_by` reports, such as {"dataset": 1437}.
        start: a size known from an earlier run, tried first.
        on_start: called with each size before it is tried, the small one that warms up included.

    Raises:
        AutoBatchError: no size fits.
        ValueError: an argument out of its range.
    """
    if not 0 < target_memory_fraction <= 1:
        raise ValueError(f"target_memory_fraction is {target_memory_fraction}; it must lie in (0, 1]")
    if mode not in ("train", "val"):
        raise ValueError(f"mode is {mode!r}; it must be 'train' or 'val'")
    started = time.monotonic()
    min_size = _min_size(state, mode, min_batch_size, max_batch_size)
    upper_bounds = {"max_batch_size": max_batch_size, **(bounds or {})}
    bound = min(upper_bounds, key=lambda name: upper_bounds[name])
    max_size = upper_bounds[bound]
    if max_size < min_size:
        raise AutoBatchError(
            f"AutoBatch ({mode}): MIN_BATCH_SIZE is {min_size}, but {bound} allows no more than {max_size}"
        )
    memory = device_memory(_device(state, device))
    limit_bytes = None if memory_limit_gb is None else int(memory_limit_gb * GIB)
    snapshot = Snapshot(state, memory.device)
    runner = TrialRunner(
        step, make_batch, state=state, memory=memory, budget_bytes=0, num_steps=steps_per_trial,
        training=mode == "train", snapshot=snapshot,
    )  # fmt: skip
    try:
        runner.budget_bytes = memory.budget(target_memory_fraction, limit_bytes)
        if on_start is not None:
            on_start(min_size)
        runner.warm_up(min_size)
        runner.budget_bytes = memory.budget(target_memory_fraction, limit_bytes)
        floor_bytes = runner.floor_bytes
        found = find_largest(
            lambda size: runner(size) - floor_bytes,  # above the floor memory grows with the size
            budget_bytes=runner.budget_bytes - floor_bytes,
            min_size=min_size,
            max_size=max_size,
            multiple_of=multiple_of,
            strategy=strategy,
            max_trials=max_trials,
            start=start,
            deadline_s=timeout_minutes * 60 - (time.monotonic() - started),
            on_start=on_start,
            on_trial=lambda trial: _log_trial(_above(floor_bytes, trial)),
        )
    finally:
        snapshot.restore()
        runner.clean()
        memory.reset_peak()
    found = replace(found, trials=tuple(_above(floor_bytes, trial) for trial in found.trials))
    if found.size is None:
        raise AutoBatchError(_nothing_fits(mode, found, runner.budget_bytes, memory, target_memory_fraction))
    return AutoBatchResult(
        mode=mode,
        batch_size=found.size,
        certified=found.certified,
        limited_by=bound if found.limited_by == "max_batch_size" else found.limited_by,
        target_memory_fraction=target_memory_fraction,
        budget_bytes=runner.budget_bytes,
        total_bytes=memory.total_bytes,
        strategy=strategy,
        seconds=time.monotonic() - started,
        trials=found.trials,
    )


def _device(state: Sequence[Any], device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    for part in state:
        if isinstance(part, nn.Module):
            for parameter in part.parameters():
                return parameter.device
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _min_size(state: Sequence[Any], mode: Mode, min_batch_size: int, max_batch_size: int) -> int:
    """BatchNorm refuses to train on one value per channel, so one sample is not tried with it."""
    modules = [module for part in state if isinstance(part, nn.Module) for module in part.modules()]
    has_batchnorm = any(isinstance(module, _BatchNorm) for module in modules)
    if mode == "train" and has_batchnorm:
        return max(min_batch_size, min(2, max_batch_size))
    return min_batch_size


def _above(floor_bytes: int, trial: TrialRecord) -> TrialRecord:
    """The record with the whole peak."""
    return trial if trial.peak_bytes is None else replace(trial, peak_bytes=trial.peak_bytes + floor_bytes)


def _log_trial(trial: TrialRecord) -> None:
    logger.debug("batch size %d: %s, %s, %.1f s", trial.size, trial.status, _peak(trial), trial.seconds)


def _peak(trial: TrialRecord) -> str:
    return "out of memory" if trial.peak_bytes is None else f"{trial.peak_bytes / GIB:.2f} GiB"


def _nothing_fits(
    mode: Mode, found: SearchResult, budget_bytes: int, memory: DeviceMemory, fraction: float
) -> str:
    suffix = "_VAL" if mode == "val" else ""
    tried = ", ".join(f"{trial.size} ({_peak(trial)})" for trial in found.trials)
    reason = {
        "timeout": "the time ran out (DATA.AUTOBATCH.TIMEOUT_MINUTES) before a batch size fitted",
        "max_trials": "the trials ran out (DATA.AUTOBATCH.MAX_TRIALS) before a batch size fitted",
    }.get(found.limited_by, "no batch size fits")
    return (
        f"AutoBatch ({mode}): {reason}. Budget {budget_bytes / GIB:.2f} GiB for this process: "
        f"{fraction:.0%} of {memory.total_bytes / GIB:.2f} GiB on {memory.device}, less what others use"
        f" (or of DATA.AUTOBATCH.MEMORY_LIMIT_GB). Tried: {tried or 'nothing'}. "
        f"Lower DATA.AUTOBATCH.MIN_BATCH_SIZE{suffix} or DATA.IMG_SIZE, choose a smaller MODEL.NAME, set "
        f"TRAIN.GRADIENT_CHECKPOINTING or TRAIN.AMP bf16, raise "
        f"DATA.AUTOBATCH.TARGET_MEMORY_FRACTION{suffix}, or free memory on the device."
    )
