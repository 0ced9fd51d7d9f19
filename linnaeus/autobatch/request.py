"""What `auto_find_batch_size` was asked for, searched by one process or by several ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch

from linnaeus.autobatch.arguments import (
    check_bounds,
    check_choice,
    check_count,
    check_fraction,
    check_functions,
    check_memory_limit,
    check_number,
    kind_of,
)
from linnaeus.autobatch.finder import BatchSizeFinder, listed
from linnaeus.autobatch.observer import Purpose, SearchLimits, SearchLog, SearchObserver, doing
from linnaeus.autobatch.predicted import predict_step
from linnaeus.autobatch.ranks import protocol
from linnaeus.autobatch.ranks.control import ControlPlane
from linnaeus.autobatch.ranks.group import check_equal
from linnaeus.autobatch.ranks.protocol import RankStatus, exchange
from linnaeus.autobatch.ranks.single_rank import (
    check_silenceable,
    refusing_collectives,
    silenced,
)
from linnaeus.autobatch.result import AutoBatchResult, Mode, Timing
from linnaeus.autobatch.search import STRATEGIES, TrialRecord

Objective = Literal["memory", "throughput"]

_OF_ONE_RANK = (
    "step",
    "make_batch",
    "state",
    "device",
    "observer",
    "memory_limit_gb",
    "bounds",
    "before_trial",
)
"""Arguments that may differ between ranks."""


@dataclass(frozen=True)
class Request:
    """The arguments of `auto_find_batch_size`; see there."""

    step: Callable[[Any], object]
    make_batch: Callable[[int], Any]
    _: dataclasses.KW_ONLY
    state: Iterable[Any]
    mode: Mode
    device: torch.device | str | None
    target_memory_fraction: float
    min_batch_size: int
    max_batch_size: int | None
    steps_per_trial: int
    strategy: str
    tolerance: float
    multiple_of: int
    memory_limit_gb: float | None
    max_trials: int
    timeout_minutes: float
    objective: Objective
    bounds: Mapping[str, int] | None
    start: int | None
    observer: SearchObserver | None
    predict: bool
    before_trial: Callable[[], object] = lambda: None

    def checked(self) -> Request:
        """The same with `state` as a tuple.

        Raises:
            TypeError, ValueError: an argument of the wrong type, or out of its range.
        """
        check_functions(self.step, self.make_batch)
        if not isinstance(self.observer, SearchObserver | None):
            raise TypeError(f"observer is {kind_of(self.observer)}; it must be a SearchObserver")
        for name in ("min_batch_size", "multiple_of", "steps_per_trial", "max_trials"):
            check_count(name, getattr(self, name))
        if self.max_batch_size is not None:
            check_count("max_batch_size", self.max_batch_size)
        if self.max_batch_size is not None and self.max_batch_size < self.min_batch_size:
            raise ValueError(
                f"max_batch_size is {self.max_batch_size}; it must be at least min_batch_size, "
                f"{self.min_batch_size}"
            )
        if self.max_batch_size is None and self.strategy == "binary":
            raise ValueError("strategy is 'binary', which needs max_batch_size; 'binsearch' does not")
        if self.start is not None:
            check_count("start", self.start)
        check_bounds(self.bounds)
        check_fraction(self.target_memory_fraction)
        check_memory_limit(self.memory_limit_gb)
        check_number("tolerance", self.tolerance, "in [0, 1)", lambda number: 0 <= number < 1)
        check_number("timeout_minutes", self.timeout_minutes, "above 0", lambda number: number > 0)
        check_choice("mode", self.mode, get_args(Mode))
        check_choice("strategy", self.strategy, STRATEGIES)
        check_choice("objective", self.objective, get_args(Objective))
        return dataclasses.replace(self, state=listed(self.state))

    def search(self, neighbours: Sequence[int] = ()) -> AutoBatchResult:
        """Search on this rank alone.

        Args:
            neighbours: see `BatchSizeFinder`.

        Raises:
            AutoBatchError: no size fits.
        """
        predict = partial(predict_step, self.step, self.make_batch, state=self._parts, mode=self.mode)
        with BatchSizeFinder(
            self.step, self.make_batch, state=self.state, mode=self.mode, device=self.device,
            min_batch_size=self.min_batch_size, max_batch_size=self.max_batch_size,
            steps_per_trial=self.steps_per_trial, multiple_of=self.multiple_of,
            memory_limit_gb=self.memory_limit_gb, bounds=self.bounds, observer=self.observer,
            predict=predict if self.predict else None, neighbours=neighbours,
            before_trial=self.before_trial,
        ) as finder:  # fmt: skip
            result = finder.find(
                self.target_memory_fraction, strategy=self.strategy, tolerance=self.tolerance,
                max_trials=self.max_trials, timeout_minutes=self.timeout_minutes, start=self.start,
            )  # fmt: skip
            if self.objective == "memory":
                return result
            return finder.prefer_throughput(
                result, timeout_minutes=self.timeout_minutes - result.seconds / 60
            )

    def search_together(self, control: ControlPlane) -> AutoBatchResult:
        """Search on rank 0, then run the size found on every rank. Every rank must call this.

        Raises:
            AutoBatchError: no size fits, or `state` cannot step on one rank alone.
            LinnaeusError: another rank has failed, or its arguments differ; on every rank.
        """
        state = self._parts
        check_equal(control, self._shared(), ", ".join(_OF_ONE_RANK))
        request = dataclasses.replace(self, bounds=_lowest(control.gather(dict(self.bounds or {}))))
        check_silenceable(state)
        neighbours = control.neighbours()
        exchange_all = partial(exchange, control, timeout_minutes=self.timeout_minutes)
        with silenced(state) as renew:
            alone = dataclasses.replace(request._refusing_collectives(), before_trial=renew)
            result = protocol.search_on_main(
                exchange_all, control.rank, lambda status: alone._told(status).search(neighbours)
            )
            run = partial(
                protocol.run_on_every_rank, exchange_all,
                lambda status, size: alone._told(status)._at_most(size).search(neighbours),
                name_of=control.name_of,
            )  # fmt: skip
            return protocol.agreed(result, run)

    @property
    def _parts(self) -> tuple[Any, ...]:
        """`state`, once checked."""
        assert isinstance(self.state, tuple)
        return self.state

    def _refusing_collectives(self) -> Request:
        """The same, whose functions refuse collectives in the first trial."""
        step = refusing_collectives(self.step, self.steps_per_trial, "the step")
        make_batch = refusing_collectives(self.make_batch, self.steps_per_trial, "make_batch")
        return dataclasses.replace(self, step=step, make_batch=make_batch)

    def _shared(self) -> dict[str, Any]:
        """What must be the same on every rank."""
        shared = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in _OF_ONE_RANK
        }
        return shared | {"the kinds of objects in state": [type(part).__name__ for part in self.state]}

    def _told(self, status: RankStatus) -> Request:
        """The same, whose observer also tells the other ranks what this one does."""
        observer = _StatusObserver(self.mode, self.observer or SearchLog(self.mode), status)
        return dataclasses.replace(self, observer=observer)

    def _at_most(self, size: int) -> Request:
        """The request to run a size found by rank 0, and to search below it if it does not fit."""
        return dataclasses.replace(
            self, min_batch_size=min(self.min_batch_size, size), max_batch_size=size, start=size,
            multiple_of=self.multiple_of if size % self.multiple_of == 0 else 1, strategy="guided",
            objective="memory", predict=False,
        )  # fmt: skip


def _lowest(bounds: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Of each upper bound that a rank has, the lowest: it holds for all."""
    lowest: dict[str, int] = {}
    for each in bounds:
        for name, bound in each.items():
            lowest[name] = min(bound, lowest.get(name, bound))
    return lowest


class _StatusObserver(SearchObserver):
    """Hands all on to an observer, and tells the status of this rank."""

    def __init__(self, mode: Mode, observer: SearchObserver, status: RankStatus) -> None:
        self._mode, self._observer, self._status = mode, observer, status

    def search_started(self, limits: SearchLimits) -> None:
        self._observer.search_started(limits)

    def trial_started(self, size: int, purpose: Purpose) -> None:
        self._status.update(doing(self._mode, size, purpose))
        self._observer.trial_started(size, purpose)

    def trial_finished(self, trial: TrialRecord, budget_bytes: int) -> None:
        self._observer.trial_finished(trial, budget_bytes)

    def size_timed(self, timing: Timing) -> None:
        self._observer.size_timed(timing)
