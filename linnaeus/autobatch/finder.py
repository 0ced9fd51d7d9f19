"""Find the batch size of one step function: snapshot, search by trials, confirmation, restoration.

The bytes of a device during a search:

    |--- outside ---|----------------- budget ----------------|-- left free --|
                    |--- held ---|--- growth of a trial ---|
                    |---------------- peak ----------------|
    |----------- target_memory_fraction x total --------------|
    |---------------------------------- total --------------------------------|

*Outside* are other processes, and the context and libraries of this one. *Held* is in use in the allocator of
this process between two trials. A size fits if the peak of its trial is within the budget. Both may grow
during a search: other processes allocate, trials load kernels and open connections. So the budget is read
again after the search, and the size found has to fit it as well. On the CPU, context and libraries are this
process's own memory, which the budget does not subtract.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch.nn.modules.batchnorm import _BatchNorm  # no public class is the base of all

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.memory.device import GIB, device_memory
from linnaeus.autobatch.observer import (
    EARLY_ENDS,
    Purpose,
    SearchLimits,
    SearchLog,
    SearchObserver,
    in_units,
    nothing_fits,
    sized,
)
from linnaeus.autobatch.result import AutoBatchResult, Mode, Timing
from linnaeus.autobatch.search import (
    Candidates,
    LimitedBy,
    OutOfMemory,
    SearchResult,
    TrialRecord,
    find_largest,
    status_of,
)
from linnaeus.autobatch.settings import UNBOUNDED, SearchSettings
from linnaeus.autobatch.state.optimizers import unlisted_state_noticed
from linnaeus.autobatch.state.sharded import modules_of
from linnaeus.autobatch.state.snapshot import Snapshot, parameters_of
from linnaeus.autobatch.throughput import sizes_by_speed
from linnaeus.autobatch.trial import (
    NEARLY_FULL,
    NoMoreSamples,
    TrialRunner,
    existing_objects_frozen,
)

FULL_FRACTION = 0.97
"""Above this fraction of the device, or of a limit, a search warns that its budget leaves no room."""
CONFIRMATION_GRACE_S = 30.0
"""Time beyond the deadline of a search in which the size found is confirmed, or others below it tried."""
LEAK_TRIALS = 4
"""Trials of the smallest size that all have to keep tensors before a step is said to leak."""
NOTABLE_VARIATION = 0.02
"""Fraction by which peaks of equal steps have to differ, or the peak of a larger size to be smaller, for the
memory of a step to be called varying."""
NUM_CONFIRMATIONS = 2
"""Further runs of the size found where memory varies; the largest peak counts."""
NOTABLE_GROWTH = 0.01
"""Fraction of the device by which the budget has to shrink during a search to be logged. Also the fraction of
the budget, less the memory held at the start, by which the memory held has to grow for a warning."""

logger = logging.getLogger("linnaeus.autobatch")


class BatchSizeFinder:
    """Searches the batch size of one step function. Later searches reuse the trials of earlier ones.

    Use it as a context. On leaving, parameters, buffers, gradients, optimizers, scalers, random number
    generators, modes and the allocator's cap are bit for bit as on entering.

    Args:
        settings: defaults of its searches; `find` lists what one search may override.
        batches_per_step: batches that one call of `step` takes; needed for samples per second.
        train_once: runs one training step before the first validation trial, so that validation is measured
            with everything that training keeps allocated. Without it, only optimizer state is allocated.
        before_trial: called with the size before each trial and each timing.
        empties_cache: whether training empties the cache between its steps, as around a validation.
        unit: of the sizes in messages, where they do not count samples, such as `tokens`.
        neighbours: process ids of all ranks on this machine; needed where LOCAL_WORLD_SIZE is not set.
        excluded_bytes: of host memory that the search's caller holds, and training does not.
        step, make_batch, and the others: as for `auto_find_batch_size`.

    Attributes:
        total_bytes: the device's memory, or the limit set for it if that is less.
        trials: all trials so far, each added as soon as it has run.
        min_size: the smallest size that is tried: `min_batch_size`, or 2 where BatchNorm needs two samples.
        budget_bytes: most bytes that the process may hold, as last read; 0 before the first search.

    Raises:
        AutoBatchError: the bounds leave no size to try.
    """

    def __init__(
        self,
        step: Callable[[Any], object],
        make_batch: Callable[[int], Any],
        settings: SearchSettings,
        *,
        state: Sequence[Any] = (),
        mode: Mode = "train",
        device: torch.device | str | None = None,
        bounds: Mapping[str, int] | None = None,
        batches_per_step: int = 1,
        train_once: Callable[[], object] | None = None,
        before_trial: Callable[[int], object] = lambda size: None,
        observer: SearchObserver | None = None,
        empties_cache: bool = False,
        neighbours: Sequence[int] = (),
        unit: str | None = None,
        excluded_bytes: int = 0,
    ) -> None:
        self.mode, self.settings, self._unit = mode, settings, unit
        self._excluded_bytes = excluded_bytes
        try:
            self.memory = device_memory(device_of(state, device, mode), neighbours)
        except NotImplementedError as error:
            raise AutoBatchError(
                f"AutoBatch ({mode}): {error}. Set the batch size by hand."
            ) from error
        self.trials: list[TrialRecord] = []
        self.budget_bytes = 0
        self._current = settings  # of the search in progress
        self._known: dict[int, TrialRecord] = {}
        largest = UNBOUNDED if settings.max_batch_size is None else settings.max_batch_size
        self.min_size = smallest_size(state, mode, settings.min_batch_size, largest)
        self._bound, self._max_size = upper_bound(mode, self.min_size, largest, bounds or {})
        limit_gb = settings.memory_limit_gb
        self._limit_bytes = None if limit_gb is None else int(limit_gb * GIB)
        self.total_bytes = min(
            self.memory.total_bytes, self._limit_bytes or self.memory.total_bytes
        )
        self._is_limited = self.total_bytes < self.memory.total_bytes
        self._batches_per_step = batches_per_step
        self._observer = observer or SearchLog(mode, unit)
        self._state = state
        self._make_runner = partial(
            TrialRunner,
            step,
            make_batch,
            state=state,
            memory=self.memory,
            num_steps=settings.steps_per_trial,
            training=mode == "train",
            train_once=train_once,
            before_trial=before_trial,
            empties_cache=empties_cache,
            unit=unit,
        )
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._snapshot = Snapshot(self._state, self.memory.device)
            stack.enter_context(unlisted_state_noticed(self._state, self._snapshot))
            stack.enter_context(existing_objects_frozen())
            self._runner = self._make_runner(snapshot=self._snapshot)
            stack.callback(self.memory.reset_peak)  # the last callback runs first
            stack.callback(self._runner.clean)
            stack.callback(self._snapshot.restore)
            self._runner.clean()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def find(
        self, settings: SearchSettings | None = None, *, confirm: bool = True
    ) -> AutoBatchResult:
        """Find the largest size within a fraction of the device's memory, or the size of another objective.

        Args:
            settings: of this search; the finder's by default. They may differ in `target_memory_fraction`,
                `strategy`, `tolerance`, `max_trials`, `timeout_minutes`, `objective` and `start`.
            confirm: read the budget again after the search; the size found has to fit it. No
                trial for it begins later than `CONFIRMATION_GRACE_S` after the deadline.

        Raises:
            AutoBatchError: no size fits.
        """
        self._current = settings = settings or self.settings
        fraction = settings.target_memory_fraction
        self._warn_about_promise(fraction)
        started = time.monotonic()
        self._deadline = started + settings.timeout_minutes * 60
        self._num_before, self._num_repeats = len(self.trials), 0
        before_bytes = self.budget_bytes
        self._set_budget(self._first_budget(fraction))
        if self._runner.empties_cache:
            # A size that nearly fills this budget has not emptied the cache under a larger one.
            low, high = NEARLY_FULL * self.budget_bytes, NEARLY_FULL * before_bytes
            self._forget(lambda trial: low < (trial.peak_bytes or 0) <= high)
        self._outside_at_start, self._held_at_start = self.memory.outside(), self.held_bytes
        self._kept_at_start = self.memory.tensor_bytes(), self._runner.num_calls
        self._observer.search_started(self._limits(fraction))
        found: SearchResult | None = None
        while found is None:
            # Not `_search`: the fewer frames lie above a trial, the easier is its traceback to read.
            try:
                found = find_largest(
                    self._runner,
                    **self._arguments(
                        known=self._known.values(),
                        strategy=settings.strategy,
                        max_trials=self._num_left,
                        start=settings.start,
                        deadline_s=self._deadline - time.monotonic(),
                    ),
                )
            except NoMoreSamples as error:
                self._bound, self._max_size = "dataset", error.num_samples
                logger.info("AutoBatch %s: %s", self.mode, error)
        if confirm:
            self._deadline += CONFIRMATION_GRACE_S
            found = self._confirmed(found)
            if found.size is not None and found.limited_by in EARLY_ENDS:
                logger.warning(
                    "warning: the search ended early. %s ran within the budget, but it is not "
                    "certified: a larger one may fit. Raise %s to search on",
                    sized(found.size, self._unit).capitalize(),
                    EARLY_ENDS[found.limited_by],
                )
        if found.size is not None and (variation := self._variation(found.size)):
            logger.warning(
                "warning: the memory of a step varies from call to call, by %.0f %% in trials. %s "
                "is not certified: a training step may need more. Let make_batch(n) return the largest "
                "batch, and do not drop layers or draw random sizes in the step during the search, or lower "
                "target_memory_fraction",
                100 * variation,
                sized(found.size, self._unit).capitalize(),
            )
            found = replace(found, certified=False)
        if self._has_grown():  # no part of `state` holds it
            self._check_leak()
        if self._has_grown():  # by more than the last batch
            logger.warning(
                "warning: the process holds %s more than when the search began, although each trial is "
                "undone: the step keeps tensors from call to call, like a cache. Tensors that it keeps "
                "only in training add to the peak of a trial",
                in_units(self.held_bytes - self._held_at_start),
            )
        result = self._result(found, time.monotonic() - started)
        if settings.objective == "throughput":
            rest = settings.timeout_minutes - result.seconds / 60
            result = self.prefer_throughput(result, timeout_minutes=rest)
        return result

    @property
    def _num_left(self) -> int:
        """Trials that this search may still run."""
        num_trials = len(self.trials) - self._num_before - self._num_repeats
        return max(self._current.max_trials - num_trials, 0)

    def _confirmed(self, found: SearchResult) -> SearchResult:
        """Check the size found against the budget as read again; search below it if it no longer fits.

        The size runs again only if memory in use has grown and another size ran after it. The budget is read
        again after each search, until the size found fits a budget that was read after it ran. Peaks of
        earlier trials guide it, unless the process holds more since then.
        """
        if self._read_budget_again() and found.size not in (None, self.trials[-1].size):
            found = self._run_again(found)
        while (size := found.size) is not None:
            varies = bool(self._variation(size))
            if varies or self._current.repeats:
                num_runs = max(self._current.repeats, NUM_CONFIRMATIONS * varies)
                return self._confirmed_by_runs(found, size, num_runs)
            newest = self._known[size]
            if newest.fits(self.budget_bytes):
                break
            logger.info("%s no longer fits: %s", sized(size, self._unit), self._outside())
            candidates = Candidates(self.min_size, size, self.settings.multiple_of)
            last = len(candidates) - 1
            further = max(1, int(self._current.tolerance * last))
            found = self._search(
                "confirmation",
                max_size=size,
                known=[newest] if self._has_grown() else self._known.values(),
                start=None if newest.peak_bytes else candidates[max(last - further, 0)],
                max_trials=self._num_left,
                deadline_s=self._deadline - time.monotonic(),
            )
            if found.size is None and found.limited_by in EARLY_ENDS:
                found = self._largest_known(found.limited_by)
            self._read_budget_again()
        return found

    def _confirmed_by_runs(self, found: SearchResult, size: int, num_left: int) -> SearchResult:
        """Run the size so often. If a run does not fit, the runs that are left try smaller sizes."""
        while num_left and found.size == size and self._known[size].fits(self.budget_bytes):
            found, num_left = self._run_again(found), num_left - 1
            self._num_repeats += self._current.repeats > 0
        if found.size != size or self._known[size].fits(self.budget_bytes):
            return found
        logger.info("%s no longer fits: its memory varies", sized(size, self._unit))
        self._read_budget_again()
        found = self._search(
            "confirmation",
            max_size=size,
            known=[self._known[size]],
            start=None if self._known[size].peak_bytes else size * 2 // 3,
            max_trials=min(num_left + 1, self._num_left),
            deadline_s=self._deadline - time.monotonic(),
        )
        if found.size is None:
            return self._largest_known("memory")
        if self._current.repeats:
            found = self._confirmed_by_runs(found, found.size, self._current.repeats)
        return replace(found, certified=False, limited_by="memory")

    def _variation(self, size: int) -> float:
        """Return the fraction by which peaks of equal steps differ, or are below the peak of a smaller size.

        It is 0 if it is small, or if twice the growth of the size fits.
        """
        held_bytes, trial = self.held_bytes, self._known.get(size)
        if (
            trial
            and 2 * ((trial.peak_bytes or math.inf) - held_bytes) <= self.budget_bytes - held_bytes
        ):
            return 0.0
        trials = sorted(self._known.values(), key=lambda trial: trial.size)
        peaks = [trial.peak_bytes for trial in trials if trial.peak_bytes]
        most = itertools.accumulate(peaks, max)
        falls = (1 - peak / largest for peak, largest in zip(peaks, most, strict=True))
        largest = max(self._runner.varies_by.get(size, 0.0), *falls, 0.0)
        return largest if largest > NOTABLE_VARIATION else 0.0

    def _run_again(self, found: SearchResult) -> SearchResult:
        """Run the size found again, and let the larger peak count where memory varies.

        If no trial or no time is left, return the largest size that fits beside the memory held now.
        """
        size = found.size
        if size is None or not self._num_left or time.monotonic() >= self._deadline:
            return self._largest_known("timeout" if self._num_left else "max_trials")
        variation = self._variation(size)
        before, newest = self._known[size], self._one_trial(size, "confirmation")
        variation = max(variation, self._variation(size))
        if variation:
            self._runner.varies_by[size] = variation
        if variation or self._current.repeats:
            self._known[size] = max(before, newest, key=lambda run: run.peak_bytes or math.inf)
        return found

    def _largest_known(self, limited_by: LimitedBy) -> SearchResult:
        """Return the largest size that fits by its newest trial, beside the memory held since then."""
        grown_bytes = max(self.held_bytes - self._held_at_start, 0)
        found = self._search(
            budget_bytes=self.budget_bytes - grown_bytes, known=self._known.values(), max_trials=0
        )
        return replace(found, certified=False, limited_by=limited_by)

    def _read_budget_again(self) -> bool:
        """Lower the budget by new use outside the allocator; return whether any use has notably grown."""
        before_bytes, fraction = self.budget_bytes, self._current.target_memory_fraction
        self._set_budget(min(before_bytes, self.memory.budget(fraction, self._limit_bytes)))
        is_lower = before_bytes - self.budget_bytes > NOTABLE_GROWTH * self.memory.total_bytes
        if is_lower:
            logger.info("the budget is %s now: %s", in_units(self.budget_bytes), self._outside())
        return is_lower or self._has_grown()

    def _outside(self) -> str:
        """Say how much is in use outside the allocator, now and when the search began."""
        return (
            f"{in_units(self.memory.outside())} of {self.memory.device} are held by other processes and "
            f"outside the allocator of this one, {in_units(self._outside_at_start)} when the search began"
        )

    def _has_grown(self) -> bool:
        """Whether the process holds notably more than when the search began."""
        grown_bytes = self.held_bytes - self._held_at_start
        room_bytes = max(self.budget_bytes - self._held_at_start, 0)
        return grown_bytes > NOTABLE_GROWTH * room_bytes + self.memory.placement_bytes

    def _check_leak(self) -> None:
        """Raise if the step keeps more tensors with every call: in training, no size fits for long.

        A cache that is full grows no more. So the smallest size runs again, with the whole device as its
        budget. A leak grows by as much per sample as in the search, or by as much per call. Growth that is
        less, as by losses in a list, does not explain the memory held.
        """
        kept_bytes, num_calls = self._kept_at_start
        num_calls = max(self._runner.num_calls - num_calls, 1)
        per_call = (self.memory.tensor_bytes() - kept_bytes) / num_calls
        largest = max((trial.size for trial in self.trials), default=self.min_size)
        self._runner.budget_bytes = self.memory.budget(1.0, None)
        for _ in range(LEAK_TRIALS):
            kept_bytes, num_calls = self.memory.tensor_bytes(), self._runner.num_calls
            self._observer.trial_started(self.min_size, "warm-up")
            try:
                self._runner(self.min_size)
            except OutOfMemory:  # the device is full: no size is left to find
                continue
            grown = self.memory.tensor_bytes() - kept_bytes
            num_calls = self._runner.num_calls - num_calls
            if grown <= 0 or grown / num_calls * largest < per_call * self.min_size:
                self._runner.budget_bytes = self.budget_bytes
                return
        raise AutoBatchError(
            f"AutoBatch ({self.mode}): the step keeps {in_units(per_call)} of tensors more after each "
            "call (the mean over all trials), so no batch size fits for long. It may append outputs or "
            "losses to a list: append .item() or .detach().cpu() instead, or clear the list. Fill a cache of "
            "bounded size before the search."
        )

    def _warn_about_promise(self, fraction: float) -> None:
        """Warn, once for each cause, that training may need more memory than a trial of its size."""
        for caveat in () if self.trials else self.memory.caveats():
            _warn_once(
                f"warning: training may need more memory than AutoBatch measures, because {caveat}"
            )
        if fraction > FULL_FRACTION:
            within = " within memory_limit_gb" if self._is_limited else ""
            _warn_once(
                f"warning: target_memory_fraction is {fraction:g}: above "
                f"{FULL_FRACTION} the budget leaves no room{within} for memory that kernels, library handles "
                "and fragmentation may add during training"
            )

    def _warn_about_equal_peaks(self) -> None:
        """Warn where a much larger size needs no more memory: its batches may be no larger."""
        peaks = {size: trial.peak_bytes for size, trial in self._known.items() if trial.peak_bytes}
        smallest, largest = min(peaks, default=1), max(peaks, default=1)
        if largest >= 2 * smallest and peaks[largest] <= peaks[smallest]:
            _warn_once(
                f"warning: {sized(largest, self._unit)} needs no more memory than {smallest}. Check that "
                + (
                    "make_batch(n) returns n samples"
                    if self._unit is None
                    else f"the cost of a sample counts its {self._unit}"
                )
            )

    def _result(self, found: SearchResult, seconds: float) -> AutoBatchResult:
        settings, num_before = self._current, self._num_before
        fraction = settings.target_memory_fraction
        if found.size is None:
            raise AutoBatchError(
                nothing_fits(
                    self.mode,
                    self._limits(fraction),
                    self.memory.device,
                    trials=self.trials,
                    limited_by=found.limited_by,
                    min_batch_size=settings.min_batch_size,
                    held_bytes=self.held_bytes,
                    outside=self._outside(),
                    unit=self._unit,
                )
            )
        self._runner.check_batches()
        self._warn_about_equal_peaks()
        self.trials[num_before:] = [
            replace(trial, status=status_of(trial.peak_bytes, self.budget_bytes, trial.status))
            for trial in self.trials[num_before:]
        ]
        at_bound = found.limited_by == "max_batch_size"
        return AutoBatchResult(
            mode=self.mode,
            batch_size=found.size,
            certified=found.certified,
            limited_by=self._bound if at_bound else found.limited_by,
            target_memory_fraction=fraction,
            budget_bytes=self.budget_bytes,
            held_bytes=self.held_bytes,
            total_bytes=self.total_bytes,
            total_is_limit=self._is_limited,
            strategy=settings.strategy,
            seconds=seconds,
            trials=tuple(self.trials[num_before:]),
            within=found.within,
            tolerance=settings.tolerance,
            multiple_of=settings.multiple_of,
            min_batch_size=settings.min_batch_size,
            max_batch_size=settings.max_batch_size,
        )

    def prefer_throughput(
        self, result: AutoBatchResult, *, timeout_minutes: float = 60.0
    ) -> AutoBatchResult:
        """Reduce the size found to the smallest one that is within 5 % of the best samples per second."""
        started = time.monotonic()
        self._set_budget(result.budget_bytes)
        sizes = list(Candidates(self.min_size, result.batch_size, self.settings.multiple_of))
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
        return self.memory.in_use()

    def measure_jointly(self, size: int, lockstep: AbstractContextManager[object]) -> int:
        """Run one size together with all ranks; return its peak's excess over the budget, in bytes.

        Steps with the smallest size come before: they load kernels and open connections.

        Args:
            size: the batch size.
            lockstep: the context of the steps; see `TrialRunner.run_jointly`.

        Raises:
            OutOfMemory: the device is full.
        """
        self._observer.trial_started(self.min_size, "warm-up")
        self._runner.run_jointly(self.min_size, lockstep)
        self._settle()
        self._set_budget(self.memory.budget(1.0, None))
        self._observer.trial_started(size, "trial")
        started = time.monotonic()
        peak_bytes = self._runner.run_jointly(size, lockstep)
        status = status_of(peak_bytes, self.budget_bytes)
        self._record(TrialRecord(size, status, peak_bytes, time.monotonic() - started))
        fraction = self.settings.target_memory_fraction
        return peak_bytes - self.memory.budget(fraction, self._limit_bytes)

    def time(self, size: int) -> Timing:
        """Time a size that is known to fit."""
        return self._timing(size, statistics.median(self._time_steps(size)))

    def _timing(self, size: int, seconds: float) -> Timing:
        return Timing(size, seconds, size * self._batches_per_step / seconds)

    def _time_steps(self, size: int) -> list[float]:
        self._observer.trial_started(size, "timing")
        seconds = self._runner.time(size)
        self._observer.size_timed(self._timing(size, statistics.median(seconds)))
        return seconds

    def _fits_now(self, size: int) -> bool:
        """Whether the size fits by its newest trial; one without is run, if a trial is left."""
        if size not in self._known and self._num_left:
            self._one_trial(size)
        return size in self._known and self._known[size].fits(self.budget_bytes)

    def _one_trial(self, size: int, purpose: Purpose = "trial") -> TrialRecord:
        return self._search(purpose, min_size=size, max_size=size, multiple_of=1).trials[0]

    def _search(self, purpose: Purpose = "trial", **others: Any) -> SearchResult:
        return find_largest(self._runner, **self._arguments(purpose, **others))

    def _arguments(self, purpose: Purpose = "trial", **others: Any) -> dict[str, Any]:
        """Arguments of `find_largest`, unless given: the bounds and the budget of this finder."""
        return {
            "budget_bytes": self.budget_bytes,
            "min_size": self.min_size,
            "max_size": self._max_size,
            "multiple_of": self.settings.multiple_of,
            "tolerance": self._current.tolerance,
            "fixed_bytes": self.held_bytes,
            "clock": time.monotonic,
            "on_trial": self._record,
            "on_start": lambda size: self._observer.trial_started(size, purpose),
            **others,
        }

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
                self._runner.warm_up(self.min_size)
            self._settle()
        return self.memory.budget(fraction, self._limit_bytes)

    def _settle(self) -> None:
        """Read the process's memory after the first steps, and check that they can be undone."""
        self.memory.settle(self._snapshot.host_bytes + self._excluded_bytes)
        self._snapshot.check_restored()

    def _set_budget(self, budget_bytes: int) -> None:
        """Set the budget of later trials. Sizes that ran out of memory under a smaller one may fit."""
        if budget_bytes > self.budget_bytes:
            self._forget(lambda trial: trial.peak_bytes is None)
        self.budget_bytes = self._runner.budget_bytes = budget_bytes

    def _forget(self, is_outdated: Callable[[TrialRecord], bool]) -> None:
        self._known = {size: trial for size, trial in self._known.items() if not is_outdated(trial)}

    def _limits(self, fraction: float) -> SearchLimits:
        return SearchLimits(
            min_size=self.min_size,
            max_size=self._max_size,
            budget_bytes=self.budget_bytes,
            target_memory_fraction=fraction,
            total_bytes=self.total_bytes,
            total_name="memory_limit_gb" if self._is_limited else "",
        )


@functools.cache
def _warn_once(message: str) -> None:
    """Log a warning, but not the same one for each mode and for each of several searches."""
    logger.warning(message)


def device_of(state: Sequence[Any], device: torch.device | str | None, mode: Mode) -> torch.device:
    """Return the device to measure: the one given, else the accelerator that holds parameters."""
    devices = {parameter.device for part in state for parameter in parameters_of(part)}
    accelerators = sorted(str(each) for each in devices if each.type not in ("cpu", "meta"))
    if len(accelerators) > 1:
        raise AutoBatchError(
            f"AutoBatch ({mode}): parameters in state are on {' and '.join(accelerators)}, but a search "
            "measures one device. Put the model on one device, or set the batch size by hand."
        )
    if device is not None:
        return _check_device(device)
    for each in (*map(torch.device, accelerators), *devices):
        return each
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _check_device(device: torch.device | str) -> torch.device:
    """Return a requested device.

    Raises:
        ValueError: it is not there.
    """
    with contextlib.suppress(RuntimeError, TypeError, AttributeError):  # torch has no such kind
        found = torch.device(device)
        module = torch.get_device_module(found)
        if found.type == "cpu" or (found.index or 0) < module.device_count():
            return found
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    others = f"cpu or {accelerator.type}" if accelerator else "cpu"
    raise ValueError(
        f"device {str(device)!r} is not available on this machine with torch {torch.__version__}; use "
        f"{others}, or omit device"
    )


def smallest_size(
    state: Sequence[Any], mode: Mode, min_batch_size: int, max_batch_size: int
) -> int:
    """The smallest size to try: 2 for training with BatchNorm, which refuses one value per channel."""
    if mode == "train" and any(isinstance(module, _BatchNorm) for module in modules_of(state)):
        return max(min_batch_size, min(2, max_batch_size))
    return min_batch_size


def upper_bound(
    mode: Mode, min_size: int, max_batch_size: int, bounds: Mapping[str, int]
) -> tuple[str, int]:
    """The lowest upper bound: its name and its size."""
    upper_bounds = {"max_batch_size": max_batch_size, **bounds}
    bound = min(upper_bounds, key=lambda name: upper_bounds[name])
    if upper_bounds[bound] < min_size:
        raise AutoBatchError(
            f"AutoBatch ({mode}): min_batch_size is {min_size}, but {bound} allows no more than "
            f"{upper_bounds[bound]}"
        )
    return bound, upper_bounds[bound]
