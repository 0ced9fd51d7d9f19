"""`auto_find_batch_size`: snapshot, search by trials, confirmation, restoration.

A search reads the budget, tries sizes until the largest one that fits is known, reads the budget once more
and runs the size found under it. The second reading is needed because trials load kernels and open
connections, and because other processes may allocate memory while sizes are tried.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Literal, Self, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from linnaeus.autobatch.observer import Purpose, SearchLimits, SearchLog, SearchObserver
from linnaeus.autobatch.optimizers import check_restorable, check_restored, strangers_refused
from linnaeus.autobatch.result import AutoBatchResult, Mode, Timing
from linnaeus.autobatch.search import (
    Candidates,
    OutOfMemory,
    SearchResult,
    TrialRecord,
    carry_over,
    find_largest,
)
from linnaeus.autobatch.snapshot import Snapshot
from linnaeus.autobatch.throughput import sizes_by_speed
from linnaeus.autobatch.trial import TrialRunner, existing_objects_frozen
from linnaeus.errors import AutoBatchError
from linnaeus.memory.device import GIB, device_memory

FULL_FRACTION = 0.97
"""Above this fraction of the device, a search warns that its budget leaves no room for anything else."""
NOTABLE_GROWTH = 0.01
"""Fraction of the device by which the budget has to shrink during a search to be logged."""

Objective = Literal["memory", "throughput"]
logger = logging.getLogger("linnaeus.autobatch")


class BatchSizeFinder:
    """Searches the batch size of one step function. Later searches reuse the trials of earlier ones.

    Use it as a context. On leaving, parameters, buffers, gradients, optimizers, scalers, random number
    generators, modes and the allocator's cap are bit for bit what they were on entering.

    Args:
        batches_per_step: batches that one call of `step` takes; needed for samples per second.
        train_once: runs one training step before the first validation trial, so that validation is measured
            with everything that training keeps allocated. Without it, only optimizer state is allocated.
        step, make_batch, and the others: as for `auto_find_batch_size`.

    Attributes:
        memory: the device's memory.
        total_bytes: the device's memory, or the limit set for it if that is less.
        trials: all trials so far, each added as soon as it has run.
        min_size: the smallest size that is tried: `min_batch_size`, or 2 where BatchNorm needs two samples.
        budget_bytes: what the process may hold on the device, as last read; 0 before the first search.

    Raises:
        AutoBatchError: the bounds leave no size to try.
        ValueError: an argument out of its range.
    """

    def __init__(
        self,
        step: Callable[[Any], object],
        make_batch: Callable[[int], Any],
        *,
        state: Iterable[Any] = (),
        mode: Mode = "train",
        device: torch.device | str | None = None,
        min_batch_size: int = 1,
        max_batch_size: int = 512,
        steps_per_trial: int = 2,
        multiple_of: int = 1,
        memory_limit_gb: float | None = None,
        bounds: Mapping[str, int] | None = None,
        batches_per_step: int = 1,
        train_once: Callable[[], object] | None = None,
        observer: SearchObserver | None = None,
    ) -> None:
        if mode not in ("train", "val"):
            raise ValueError(f"mode is {mode!r}; it must be 'train' or 'val'")
        state = _listed(state)
        self.mode = mode
        self.memory = device_memory(_device(state, device))
        self.trials: list[TrialRecord] = []
        self.budget_bytes = 0
        self._outside_bytes = 0  # outside the allocator when the search began
        self._known: dict[int, TrialRecord] = {}
        self._min_batch_size = min_batch_size
        self.min_size = _min_size(state, mode, min_batch_size, max_batch_size)
        self._bound, self._max_size = _upper_bound(mode, self.min_size, max_batch_size, bounds or {})
        self._multiple_of = multiple_of
        self._limit_bytes = None if memory_limit_gb is None else int(memory_limit_gb * GIB)
        self.total_bytes = min(self.memory.total_bytes, self._limit_bytes or self.memory.total_bytes)
        self._is_limited = self.total_bytes < self.memory.total_bytes
        self._batches_per_step = batches_per_step
        self._observer = observer or SearchLog(mode)
        self._step, self._make_batch, self._state = step, make_batch, state
        self._train_once = train_once
        self._steps_per_trial = steps_per_trial
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(strangers_refused(self._state))
            stack.enter_context(existing_objects_frozen())
            self._snapshot = Snapshot(self._state, self.memory.device)
            self._runner = TrialRunner(
                self._step, self._make_batch, state=self._state, memory=self.memory, budget_bytes=0,
                num_steps=self._steps_per_trial, training=self.mode == "train", snapshot=self._snapshot,
                train_once=self._train_once,
            )  # fmt: skip
            stack.callback(self.memory.reset_peak)  # the last callback runs first
            stack.callback(self._runner.clean)
            stack.callback(self._snapshot.restore)
            check_restorable(self._state, self._snapshot)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def find(
        self,
        target_memory_fraction: float = 0.8,
        *,
        strategy: str = "guided",
        tolerance: float = 0.0,
        max_trials: int = 25,
        timeout_minutes: float = 60.0,
        start: int | None = None,
        confirm: bool = True,
    ) -> AutoBatchResult:
        """Find the largest size within a fraction of the device's memory.

        Args:
            target_memory_fraction, strategy, tolerance, max_trials, timeout_minutes, start: as for
                `auto_find_batch_size`. They do not bound the confirmation.
            confirm: run the size found once more, under a budget that is read again after the search.

        Raises:
            AutoBatchError: no size fits.
            ValueError: an argument out of its range.
        """
        if not 0 < target_memory_fraction <= 1:
            raise ValueError(f"target_memory_fraction is {target_memory_fraction}; it must lie in (0, 1]")
        self._warn_about_promise(target_memory_fraction)
        started = time.monotonic()
        num_before = len(self.trials)
        self._set_budget(self._first_budget(target_memory_fraction))
        self._outside_bytes = self.memory.outside()
        self._observer.search_started(self._limits(target_memory_fraction))
        found = find_largest(
            self._runner,
            budget_bytes=self.budget_bytes,
            min_size=self.min_size,
            max_size=self._max_size,
            multiple_of=self._multiple_of,
            strategy=strategy,
            tolerance=tolerance,
            max_trials=max_trials,
            start=start,
            deadline_s=timeout_minutes * 60 - (time.monotonic() - started),
            known=self._known.values(),
            fixed_bytes=self.held_bytes,
            on_start=self._starting("trial"),
            on_trial=self._record,
        )
        if confirm:
            found = self._confirmed(found, target_memory_fraction, tolerance)
        return self._result(found, target_memory_fraction, strategy, num_before, started)

    def _confirmed(self, found: SearchResult, fraction: float, tolerance: float) -> SearchResult:
        """Run the size found under a budget that is read again; if it no longer fits, search below it.

        The size that ran last needs no further trial. After a search below, the budget is read once more,
        until the size found fits what was read after it ran.
        """
        self._read_budget_again(fraction)
        if found.size is not None and self.trials[-1].size != found.size:
            self._one_trial(found.size, "confirmation")
        while found.size is not None:
            newest = next(trial for trial in reversed(self.trials) if trial.size == found.size)
            if _fits(newest, self.budget_bytes):
                break
            logger.info("batch size %d no longer fits: %s", found.size, self._outside())
            found = self._search_below(newest, found, tolerance)
            self._read_budget_again(fraction)
        return found

    def _search_below(self, newest: TrialRecord, found: SearchResult, tolerance: float) -> SearchResult:
        """Find the largest size below one that no longer fits.

        Sizes are tried one candidate lower (or by the tolerance, if that is more), then twice and four times
        as far, until one fits; the search is then repeated between the two. What trials before the
        confirmation say does not count.
        """
        candidates, known = Candidates(self.min_size, newest.size, self._multiple_of), [newest]
        index = len(candidates) - 1
        step = max(1, int(tolerance * index))
        while not _fits(known[-1], self.budget_bytes):
            if index == 0:
                return replace(found, size=None, limited_by="memory")
            index, step = max(index - step, 0), 2 * step
            known.append(self._one_trial(candidates[index], "confirmation"))
        return find_largest(
            self._runner, budget_bytes=self.budget_bytes, min_size=known[-1].size, max_size=newest.size,
            multiple_of=self._multiple_of, tolerance=tolerance, known=known,
            on_start=self._starting("trial"),
            on_trial=self._record,
        )  # fmt: skip

    def _read_budget_again(self, fraction: float) -> None:
        """Lower the budget by what has come into memory outside the allocator since the search began."""
        before_bytes = self.budget_bytes
        self._set_budget(min(before_bytes, self.memory.budget(fraction, self._limit_bytes)))
        if before_bytes - self.budget_bytes > NOTABLE_GROWTH * self.memory.total_bytes:
            logger.info("the budget is %.2f GiB now: %s", self.budget_bytes / GIB, self._outside())

    def _outside(self) -> str:
        """What is held outside the allocator now, and was when the search began."""
        return (
            f"{self.memory.outside() / GIB:.2f} GiB of {self.memory.device} are held by other processes and "
            f"outside the allocator of this one, {self._outside_bytes / GIB:.2f} GiB when the search began"
        )

    def _warn_about_promise(self, fraction: float) -> None:
        """Warn, once for each cause, that training may need more memory than a trial of its size."""
        for caveat in () if self.trials else self.memory.caveats():
            _warn_once(f"warning: training may need more memory than AutoBatch measures, because {caveat}")
        total_bytes = self.memory.total_bytes
        if fraction * min(self._limit_bytes or total_bytes, total_bytes) > FULL_FRACTION * total_bytes:
            _warn_once(
                f"warning: TARGET_MEMORY_FRACTION is {fraction:g}: above {FULL_FRACTION} the budget leaves "
                "no room for what kernels, library handles and fragmentation may add during training"
            )

    def _result(
        self, found: SearchResult, fraction: float, strategy: str, num_before: int, started: float
    ) -> AutoBatchResult:
        if found.size is None:
            raise AutoBatchError(self._nothing_fits(found.limited_by, fraction))
        self.trials[num_before:] = carry_over(
            self.trials[num_before:], old_budget_bytes=self.budget_bytes, budget_bytes=self.budget_bytes
        )
        return AutoBatchResult(
            mode=self.mode,
            batch_size=found.size,
            certified=found.certified,
            limited_by=self._bound if found.limited_by == "max_batch_size" else found.limited_by,
            target_memory_fraction=fraction,
            budget_bytes=self.budget_bytes,
            held_bytes=self.held_bytes,
            total_bytes=self.total_bytes,
            total_is_limit=self._is_limited,
            strategy=strategy,
            seconds=time.monotonic() - started,
            trials=tuple(self.trials[num_before:]),
            within=found.within,
        )

    def prefer_throughput(self, result: AutoBatchResult, *, timeout_minutes: float = 60.0) -> AutoBatchResult:
        """Reduce the size found to the smallest one that is within 5 % of the best samples per second."""
        started = time.monotonic()
        self._set_budget(result.budget_bytes)
        sizes = list(Candidates(self.min_size, result.batch_size, self._multiple_of))
        fast, medians = sizes_by_speed(self._time_steps, sizes, deadline_s=timeout_minutes * 60)
        num_before = len(self.trials)
        size = next(filter(self._fits_now, fast), result.batch_size)
        return replace(
            result,
            batch_size=size,
            limited_by="throughput" if size < result.batch_size else result.limited_by,
            seconds=result.seconds + time.monotonic() - started,
            trials=(*result.trials, *self.trials[num_before:]),
            timings=tuple(self._timing(size, medians[size]) for size in sorted(medians)),
        )

    @property
    def held_bytes(self) -> int:
        """Bytes that the process holds now, between two trials."""
        return self._runner.held_bytes

    def measure(self, size: int) -> TrialRecord:
        """Run one size with the whole device, or the memory limit, as its budget."""
        self._set_budget(self._first_budget(1.0))
        return self._one_trial(size)

    def time(self, size: int) -> Timing:
        """Time a size that is known to fit."""
        return self._timing(size, statistics.median(self._time_steps(size)))

    def _timing(self, size: int, seconds: float) -> Timing:
        return Timing(size, seconds, size * self._batches_per_step / seconds)

    def _time_steps(self, size: int) -> list[float]:
        self._observer.trial_started(size, "timing")
        try:
            seconds = self._runner.time(size)
        except OutOfMemory:  # less memory is free than when the size ran
            seconds = [math.inf]
        self._observer.size_timed(self._timing(size, statistics.median(seconds)))
        return seconds

    def _fits_now(self, size: int) -> bool:
        """Whether the size fits according to its newest trial; a size without one is run."""
        return _fits(self._known.get(size) or self._one_trial(size), self.budget_bytes)

    def _one_trial(self, size: int, purpose: Purpose = "trial") -> TrialRecord:
        found = find_largest(
            self._runner, budget_bytes=self.budget_bytes, min_size=size, max_size=size,
            on_start=self._starting(purpose), on_trial=self._record,
        )  # fmt: skip
        return found.trials[0]

    def _starting(self, purpose: Purpose) -> Callable[[int], None]:
        return lambda size: self._observer.trial_started(size, purpose)

    def _record(self, trial: TrialRecord) -> None:
        self.trials.append(trial)
        self._known[trial.size] = trial
        self._observer.trial_finished(trial, self.budget_bytes)

    def _first_budget(self, fraction: float) -> int:
        """The budget at the start of a search, read after libraries and kernels have been loaded."""
        if not self.trials:
            self._runner.budget_bytes = self.memory.budget(fraction, self._limit_bytes)
            self._observer.trial_started(self.min_size, "warm-up")
            with contextlib.suppress(OutOfMemory):  # the search will find that out
                self._runner(self.min_size)
            self.memory.settle(self._snapshot.host_bytes)
            check_restored(self._snapshot)
        return self.memory.budget(fraction, self._limit_bytes)

    def _set_budget(self, budget_bytes: int) -> None:
        """Set the budget of the trials to come, and keep of earlier trials what they say about it."""
        kept = carry_over(self._known.values(), old_budget_bytes=self.budget_bytes, budget_bytes=budget_bytes)
        self._known = {trial.size: trial for trial in kept}
        self.budget_bytes = self._runner.budget_bytes = budget_bytes

    def _own_cap(self) -> str:
        """A cap that the caller has set, where it bounds the budget."""
        allowed_bytes = self.memory.budget(1.0, None)
        if allowed_bytes + self.memory.outside() >= self.memory.total_bytes:
            return ""
        return f", and no more than the {allowed_bytes / GIB:.2f} GiB of the allocator's own cap"

    def _limits(self, fraction: float) -> SearchLimits:
        return SearchLimits(
            min_size=self.min_size, max_size=self._max_size, budget_bytes=self.budget_bytes,
            target_memory_fraction=fraction, total_bytes=self.total_bytes, total_is_limit=self._is_limited,
            total_name="" if self._is_limited else self.memory.total_name,
        )  # fmt: skip

    def _nothing_fits(self, limited_by: str, fraction: float) -> str:
        """The message of the error: what was tried, the budget, and the keys to change."""
        tried = ", ".join(f"{trial.size} ({_peak(trial)})" for trial in self.trials)
        reason = {
            "timeout": "the time ran out (DATA.AUTOBATCH.TIMEOUT_MINUTES) before a batch size fitted",
            "max_trials": "the trials ran out (DATA.AUTOBATCH.MAX_TRIALS) before a batch size fitted",
        }.get(limited_by, "no batch size fits")
        limit = " (DATA.AUTOBATCH.MEMORY_LIMIT_GB)" if self._is_limited else f" on {self.memory.device}"
        return (
            f"AutoBatch ({self.mode}): {reason}. Budget {self.budget_bytes / GIB:.2f} GiB for this process: "
            f"{fraction:.0%} of {self.total_bytes / GIB:.2f} GiB{limit}{self._used_by_others(fraction)}"
            f"{self._own_cap()}; {self.held_bytes / GIB:.2f} GiB are held before the first sample. "
            f"Tried: {tried or 'nothing'}. "
            f"What helps: {'; '.join(self._remedies(limited_by, fraction))}."
        )

    def _used_by_others(self, fraction: float) -> str:
        others_bytes = int(fraction * self.total_bytes) - self.budget_bytes
        if others_bytes <= GIB // 100 or self._own_cap():
            return ""
        return f", less {others_bytes / GIB:.2f} GiB that others use ({self._outside()})"

    def _remedies(self, limited_by: str, fraction: float) -> Iterator[str]:
        """What the user can do so that a size fits; only what would have an effect here."""
        suffix = "_VAL" if self.mode == "val" else ""
        if limited_by in ("timeout", "max_trials"):
            key = "TIMEOUT_MINUTES" if limited_by == "timeout" else "MAX_TRIALS"
            yield f"raise DATA.AUTOBATCH.{key}"
        if self.held_bytes < self.budget_bytes:  # otherwise no sample is small enough
            sizes = [f"DATA.AUTOBATCH.MIN_BATCH_SIZE{suffix}"] if self._min_batch_size > 1 else []
            yield f"lower {' or '.join([*sizes, 'DATA.IMG_SIZE'])}"
            checkpointing = ["TRAIN.GRADIENT_CHECKPOINTING True"] if self.mode == "train" else []
            yield f"set {' or '.join([*checkpointing, 'TRAIN.AMP bf16'])}"
        yield "choose a smaller MODEL.NAME"
        raised = [f"DATA.AUTOBATCH.TARGET_MEMORY_FRACTION{suffix}"] if fraction < 1 else []
        if self._is_limited:
            raised.append("DATA.AUTOBATCH.MEMORY_LIMIT_GB")
        if raised:
            yield f"raise {' or '.join(raised)}"
        if self._used_by_others(fraction):
            yield f"free memory on {self.memory.device}"


def auto_find_batch_size(
    step: Callable[[Any], object],
    make_batch: Callable[[int], Any],
    *,
    state: Iterable[Any] = (),
    mode: Mode = "train",
    device: torch.device | str | None = None,
    target_memory_fraction: float = 0.8,
    min_batch_size: int = 1,
    max_batch_size: int = 512,
    steps_per_trial: int = 2,
    strategy: str = "guided",
    tolerance: float = 0.01,
    multiple_of: int = 1,
    memory_limit_gb: float | None = None,
    max_trials: int = 25,
    timeout_minutes: float = 60.0,
    objective: Objective = "memory",
    bounds: Mapping[str, int] | None = None,
    start: int | None = None,
    observer: SearchObserver | None = None,
) -> AutoBatchResult:
    """Find the largest batch size, or one at most 1 % below it, that runs within a fraction of the memory.

    Every size is really run, and the size found once more under a budget that is read again, unless it was
    the last one tried. Afterwards parameters, buffers, gradients, optimizers, scalers, random number
    generators, modes and the allocator's cap are bit for bit what they were.

    Args:
        step: runs one full training (or validation) step on a batch.
        make_batch: makes a batch of n samples on the device.
        state: every object with `state_dict` and `load_state_dict` that a step may change: model, optimizer,
            scaler, average. If the optimizer is among them, validation is measured with its state allocated.
        mode: `train` or `val`; modules in `state` are put in the matching mode.
        device: the device whose memory counts. By default that of the first parameter in `state`, else
            torch's current accelerator, else the CPU.
        target_memory_fraction: fraction of the device's total memory that may be in use, in (0, 1].
        min_batch_size: smallest size tried, inclusive. With BatchNorm, training starts at 2.
        max_batch_size: largest size tried, inclusive.
        steps_per_trial: steps that one trial runs.
        strategy: `guided`, `binary`, `power` or `binsearch`.
        tolerance: the search ends when the size found is proven to be within this fraction of the largest, in
            [0, 1): a size that does not fit is known, and all that may fit are at most `1 + tolerance` times
            the size found. Below `1 / tolerance` samples this is exact; 0 always is.
        multiple_of: only multiples of this are tried; sizes below it stay exact.
        memory_limit_gb: GiB; this process may hold the target fraction of it, whatever others use.
        max_trials: most trials to run; the best size so far is used then.
        timeout_minutes: deadline of the search; the best size so far is used then.
        objective: `memory` for the largest size that fits, `throughput` for the smallest of those that fit
            whose samples per second come within 5 % of the best.
        bounds: further upper bounds by the name that `limited_by` reports, such as {"dataset": 1437}.
        start: a size to try first, such as the answer of an earlier run.
        observer: told what the search does; by default a `SearchLog`, which logs a line for each trial.

    Raises:
        AutoBatchError: no size fits, `state` lacks an optimizer that the step uses, or something in it cannot
            be restored.
        TypeError, ValueError: an argument of the wrong type, or out of its range.
    """
    for name, function in (("step", step), ("make_batch", make_batch)):
        if not callable(function):
            raise TypeError(f"{name} is a {type(function).__name__}; it must be a function")
    if not isinstance(observer, SearchObserver | None):
        raise TypeError(f"observer is a {type(observer).__name__}; it must be a SearchObserver")
    counts = {
        "min_batch_size": min_batch_size, "max_batch_size": max_batch_size, "multiple_of": multiple_of,
        "steps_per_trial": steps_per_trial, "max_trials": max_trials,
    }  # fmt: skip
    for name, count in counts.items():
        _check_count(name, count)
    if max_batch_size < min_batch_size:
        raise ValueError(
            f"max_batch_size is {max_batch_size}; it must be at least min_batch_size, {min_batch_size}"
        )
    for name, number in (("timeout_minutes", timeout_minutes), ("memory_limit_gb", memory_limit_gb)):
        if number is not None and not number > 0:
            raise ValueError(f"{name} is {number}; it must be above 0")
    if objective not in get_args(Objective):
        raise ValueError(f"objective is {objective!r}; it must be 'memory' or 'throughput'")
    with BatchSizeFinder(
        step, make_batch, state=state, mode=mode, device=device, min_batch_size=min_batch_size,
        max_batch_size=max_batch_size, steps_per_trial=steps_per_trial, multiple_of=multiple_of,
        memory_limit_gb=memory_limit_gb, bounds=bounds, observer=observer,
    ) as finder:  # fmt: skip
        result = finder.find(
            target_memory_fraction, strategy=strategy, tolerance=tolerance, max_trials=max_trials,
            timeout_minutes=timeout_minutes, start=start,
        )  # fmt: skip
        if objective == "memory":
            return result
        return finder.prefer_throughput(result, timeout_minutes=timeout_minutes - result.seconds / 60)


@functools.cache
def _warn_once(message: str) -> None:
    """Log a warning, but not the same one for each mode and for each of several searches."""
    logger.warning(message)


def _check_count(name: str, count: Any) -> None:
    if not isinstance(count, Integral):
        raise TypeError(f"{name} is {count!r}; it must be an integer")
    if count < 1:
        raise ValueError(f"{name} is {count}; it must be at least 1")


def _listed(state: Any) -> Sequence[Any]:
    """The objects in `state`; modules and dictionaries can be iterated over too, but not to this end."""
    if isinstance(state, nn.Module | Mapping | str) or not isinstance(state, Iterable):
        raise TypeError(
            f"state is a {type(state).__name__}; it must be a sequence of all objects that the step changes, "
            "such as state=(model, optimizer)"
        )
    return tuple(state)


def _device(state: Sequence[Any], device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    for part in state:
        if isinstance(part, nn.Module):
            for parameter in part.parameters():
                return parameter.device
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _min_size(state: Sequence[Any], mode: Mode, min_batch_size: int, max_batch_size: int) -> int:
    """The smallest size to try: 2 for training with BatchNorm, which refuses one value per channel."""
    modules = [module for part in state if isinstance(part, nn.Module) for module in part.modules()]
    has_batchnorm = any(isinstance(module, _BatchNorm) for module in modules)
    if mode == "train" and has_batchnorm:
        return max(min_batch_size, min(2, max_batch_size))
    return min_batch_size


def _upper_bound(
    mode: Mode, min_size: int, max_batch_size: int, bounds: Mapping[str, int]
) -> tuple[str, int]:
    """The lowest upper bound: its name and its size."""
    upper_bounds = {"max_batch_size": max_batch_size, **bounds}
    bound = min(upper_bounds, key=lambda name: upper_bounds[name])
    if upper_bounds[bound] < min_size:
        raise AutoBatchError(
            f"AutoBatch ({mode}): MIN_BATCH_SIZE is {min_size}, but {bound} allows no more than "
            f"{upper_bounds[bound]}"
        )
    return bound, upper_bounds[bound]


def _fits(trial: TrialRecord, budget_bytes: int) -> bool:
    return trial.peak_bytes is not None and trial.peak_bytes <= budget_bytes


def _peak(trial: TrialRecord) -> str:
    return "out of memory" if trial.peak_bytes is None else f"{trial.peak_bytes / GIB:.2f} GiB"
