"""Events of a search, their log lines, and the message where no batch size fits."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.result import Mode, Timing
from linnaeus.autobatch.search import TrialRecord
from linnaeus.autobatch.settings import kind_of

Purpose = Literal["warm-up", "trial", "confirmation", "timing"]
"""Why a size is run: to load kernels, to find the size, to run the size found again, or to time it."""

_DOING = {
    "warm-up": "warming up with",
    "trial": "trying",
    "confirmation": "confirming",
    "timing": "timing",
}
EARLY_ENDS = {"max_trials": "max_trials", "timeout": "timeout_minutes"}
"""Reasons that end a search early, each with its setting."""

logger = logging.getLogger("linnaeus.autobatch")


@dataclass(frozen=True)
class SearchLimits:
    """Bounds of a search.

    Attributes:
        min_size, max_size: smallest and largest size that may be tried.
        budget_bytes: most bytes that the process may hold on the device.
        target_memory_fraction: fraction of `total_bytes` that may be in use on the device.
        total_bytes: the device's memory, or the limit set for it.
        total_name: name of the limit that `total_bytes` is; empty if it is the device's memory.
    """

    min_size: int
    max_size: int
    budget_bytes: int
    target_memory_fraction: float
    total_bytes: int
    total_name: str = ""


class SearchObserver:
    """Receives the events of a search. Each method does nothing unless overridden.

    A search begins with the `warm-up` of a size, which has no result. Each `trial` and `confirmation` that
    has started is also finished, unless an exception ends the search.
    """

    def search_started(self, limits: SearchLimits) -> None:
        """The budget has been read; trials follow."""

    def trial_started(self, size: int, purpose: Purpose) -> None:
        """A size is about to run."""

    def trial_finished(self, trial: TrialRecord, budget_bytes: int) -> None:
        """A size has run under this budget, or has failed to."""

    def size_timed(self, timing: Timing) -> None:
        """Steps of a size have been timed; its speed is 0 if it no longer fits."""


def check_observer(observer: Any) -> None:
    """Raise TypeError unless it is an observer or None."""
    if not isinstance(observer, SearchObserver | None):
        raise TypeError(f"observer is {kind_of(observer)}; it must be a SearchObserver")


class SearchLog(SearchObserver):
    """Logs one line for each search, each trial that has ended and each size timed.

    Attributes:
        extra: attributes of the log records of trials.
        num_trials: trials that have ended.
        note: marks the result of a confirmation; empty for other trials.
    """

    extra: Mapping[str, Any] = {}

    def __init__(self, mode: Mode, unit: str | None = None) -> None:
        self.mode, self.unit = mode, unit
        self.num_trials = 0
        self.note = ""
        self._fraction: float | None = None

    def search_started(self, limits: SearchLimits) -> None:
        """Log bounds and budget, once for each fraction of the memory."""
        if limits.target_memory_fraction != self._fraction:
            self._fraction = limits.target_memory_fraction
            logger.info(
                "AutoBatch %s: trying %s to %d; budget %s",
                self.mode,
                sized(limits.min_size, self.unit, many=True),
                limits.max_size,
                budget_of_total(limits.budget_bytes, limits.total_bytes, limits.total_name),
            )

    def trial_started(self, size: int, purpose: Purpose) -> None:
        """Log the size at DEBUG."""
        self.note = "confirmation" if purpose == "confirmation" else ""
        logger.debug("%s", doing(self.mode, size, purpose, self.unit))

    def trial_finished(self, trial: TrialRecord, budget_bytes: int) -> None:
        """Log the result."""
        self.num_trials += 1
        peak = (
            ""
            if trial.peak_bytes is None
            else f", {gib(trial.peak_bytes)} of {gib(budget_bytes)} GiB"
        )
        logger.info(
            "%s, trial %d: %s %s%s, %.1f s%s",
            self.mode,
            self.num_trials,
            sized(trial.size, self.unit),
            trial.status,
            peak,
            trial.seconds,
            self.note and f", {self.note}",
            extra=self.extra,
        )

    def size_timed(self, timing: Timing) -> None:
        """Log the speed."""
        logger.info(
            "%s, timing: %s: %s",
            self.mode,
            sized(timing.batch_size, self.unit),
            speed(timing, self.unit),
            extra=self.extra,
        )


def doing(mode: Mode, size: int, purpose: Purpose, unit: str | None = None) -> str:
    """Such as `train: trying batch size 128`."""
    return f"{mode}: {_DOING[purpose]} {sized(size, unit)}"


def sized(size: int, unit: str | None = None, *, many: bool = False) -> str:
    """Such as `batch size 128`, or `batch of 4096 tokens`; `batch sizes from 128` for many."""
    if unit is None:
        return f"batch sizes from {size}" if many else f"batch size {size}"
    return f"batches from {size} {unit}" if many else f"batch of {size} {unit}"


def gib(num_bytes: int) -> str:
    """Such as `0.912`: with enough digits to tell a peak that is just above the budget."""
    return f"{num_bytes / GIB:.3f}"


def in_units(num_bytes: float) -> str:
    """Such as `2.66 GiB` or `18.5 MiB`."""
    if abs(num_bytes) < GIB / 10:
        return f"{num_bytes / 1024**2:.3g} MiB"
    return f"{num_bytes / GIB:.2f} GiB"


def speed(timing: Timing, unit: str | None = None) -> str:
    """Such as `205.3 samples/s`."""
    if not timing.samples_per_s:
        return "no longer fits"
    return f"{timing.samples_per_s:.4g} {unit or 'samples'}/s"


def budget_of_total(budget_bytes: int, total_bytes: int, total_name: str = "") -> str:
    """Such as `1.20 GiB of 1.50 GiB (MEMORY_LIMIT_GB)`; `total_name` as in `SearchLimits`."""
    name = f" ({total_name})" if total_name else ""
    return f"{in_units(budget_bytes)} of {in_units(total_bytes)}{name}"


def nothing_fits(
    mode: Mode,
    limits: SearchLimits,
    device: torch.device,
    *,
    trials: Sequence[TrialRecord],
    limited_by: str,
    min_batch_size: int,
    held_bytes: int,
    outside: str,
    unit: str | None = None,
) -> str:
    """The message of a search without a result.

    Args:
        limited_by: why the search ended.
        min_batch_size: the smallest size requested; with BatchNorm, the smallest size tried may be larger.
        held_bytes: bytes that the process holds between two trials.
        outside: sentence on the memory in use outside the allocator.
        unit: of the sizes, where they do not count samples; the smallest one is then a single sample.
    """
    setting = EARLY_ENDS.get(limited_by)
    kind = "batch size" if unit is None else "batch"
    reason = (
        f"the search ended ({setting}) before a {kind} fitted" if setting else f"no {kind} fits"
    )
    if is_held := held_bytes >= limits.budget_bytes:  # then no size is small enough
        reason += ", because the process already holds more than the budget"
    origin = "(memory_limit_gb)" if limits.total_name else f"on {device}"
    sizes = limits.budget_bytes, limits.total_bytes, held_bytes
    budget, total, held = map(in_units, sizes)
    others_bytes = int(limits.target_memory_fraction * limits.total_bytes) - limits.budget_bytes
    has_others = others_bytes > GIB // 100
    others = f", less {in_units(others_bytes)} for others or a cap of the allocator ({outside})"
    tried = ", ".join(
        f"{trial.size} ({trial.status}{', ' + gib(trial.peak_bytes) + ' GiB' if trial.peak_bytes else ''})"
        for trial in trials
    )
    remedies = [f"raise {setting}"] if setting else []
    if not is_held:
        smallest = "min_batch_size or " if min_batch_size > 1 else ""
        checkpointing = "gradient checkpointing or " if mode == "train" else ""
        lower = f"lower {smallest}the size of a sample"
        if unit is not None:
            lower = f"leave out the longest samples, of up to {limits.min_size} {unit}"
        remedies += [lower, f"use {checkpointing}bf16 autocast"]
        if mode == "val":
            remedies.append(
                "keep less of each batch until validation ends, such as outputs and metric states"
            )
    if is_held and limits.total_name:
        needed = in_units(held_bytes / limits.target_memory_fraction)
        remedies.append(f"raise memory_limit_gb above {needed}, plus the memory of a step")
    else:
        remedies.append("choose a smaller model")
        raised = ["target_memory_fraction"] if limits.target_memory_fraction < 1 else []
        raised += ["memory_limit_gb"] if limits.total_name else []
        remedies += [f"raise {' or '.join(raised)}"] if raised else []
    if has_others:
        remedies.append(f"free memory on {device}")
    return (
        f"AutoBatch ({mode}): {reason}. Budget {budget} for this process: "
        f"{limits.target_memory_fraction:.0%} of {total} {origin}{others if has_others else ''}; "
        f"{held} are held before the first sample. Tried: {tried or 'nothing'}. "
        f"Remedies: {'; '.join(remedies)}."
    )
