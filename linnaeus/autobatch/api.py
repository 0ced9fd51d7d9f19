"""`auto_find_batch_size` and `predict_memory`: AutoBatch as functions, for any training loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn
from torch.distributed import ProcessGroup

from linnaeus.autobatch.finder import BatchSizeFinder, device_of
from linnaeus.autobatch.observer import SearchObserver, check_observer, sized
from linnaeus.autobatch.ranks.collectives import warm_up_collectives
from linnaeus.autobatch.ranks.group import check_equal, joined_ranks, members
from linnaeus.autobatch.ranks.heartbeat import ControlPlane
from linnaeus.autobatch.ranks.protocol import RankStatus, confirm_jointly, search_on_ranks
from linnaeus.autobatch.ranks.single_rank import (
    check_can_step_alone,
    check_members,
    reducers_renewed,
    stepping_alone,
    wrappers_in,
)
from linnaeus.autobatch.result import AutoBatchResult, Mode
from linnaeus.autobatch.settings import (
    Objective,
    SearchSettings,
    check_bounds,
    check_choice,
    check_functions,
    check_phases,
    kind_of,
)
from linnaeus.autobatch.state.optimizers import unlisted_state_noticed
from linnaeus.autobatch.state.sharded import is_sharded
from linnaeus.autobatch.state.snapshot import Snapshot

if TYPE_CHECKING:
    from linnaeus.autobatch.predict.prediction import Prediction

logger = logging.getLogger("linnaeus.autobatch")


def auto_find_batch_size(
    step: Callable[[Any], object],
    make_batch: Callable[[int], Any],
    *,
    state: Iterable[Any] = (),
    mode: Mode = "train",
    device: torch.device | str | None = None,
    target_memory_fraction: float = SearchSettings.target_memory_fraction,
    min_batch_size: int = SearchSettings.min_batch_size,
    max_batch_size: int | None = SearchSettings.max_batch_size,
    steps_per_trial: int = SearchSettings.steps_per_trial,
    strategy: str = SearchSettings.strategy,
    tolerance: float = SearchSettings.tolerance,
    multiple_of: int = SearchSettings.multiple_of,
    memory_limit_gb: float | None = SearchSettings.memory_limit_gb,
    max_trials: int = SearchSettings.max_trials,
    timeout_minutes: float = SearchSettings.timeout_minutes,
    objective: Objective = SearchSettings.objective,
    bounds: Mapping[str, int] | None = None,
    start: int | None = SearchSettings.start,
    observer: SearchObserver | None = None,
    group: ProcessGroup | Literal[False] | None = None,
    phases: Sequence[Callable[[], object]] = (),
    repeats: int = SearchSettings.repeats,
    unit: str | None = None,
) -> AutoBatchResult:
    """Find the maximum batch size within `target_memory_fraction` of the memory, to within `tolerance`.

    The search runs every size that it reports. Afterwards parameters, buffers, gradients, plain attributes,
    hooks, modes, optimizers, scalers, global random number generators and the allocator's cap are
    bit-identical to before. `docs/search_options.md` explains the arguments that are not listed here.

    Examples:
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> def step(batch):
        ...     model(batch).sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> def make_batch(n):
        ...     return torch.randn(n, 8)
        >>> result = auto_find_batch_size(
        ...     step, make_batch, state=(model, optimizer), max_batch_size=64, group=False
        ... )
        >>> result.batch_size, result.limited_by
        (64, 'max_batch_size')

    Args:
        step: runs one full training (or validation) step on a batch.
        make_batch: makes a batch of n samples on the device.
        state: every object with `state_dict` and `load_state_dict` that a step may change: model, optimizer,
            scaler, average. Also the random number generators (`torch.Generator`, `numpy.random.Generator`)
            that it draws from. If the optimizer is among them, validation is measured with its state
            allocated.
        mode: `train` or `val`; modules in `state` are put in the matching mode.
        device: the device whose memory counts. By default the accelerator that parameters in `state` are on,
            else the device of these parameters, else torch's current accelerator, else the CPU.
        bounds: further upper bounds by the name that `limited_by` reports, such as {"dataset": 1437}. The
            name of another limit, such as `max_batch_size`, is refused. Bounds may differ between ranks: the
            lowest of each name holds.
        observer: told of each event; by default a `SearchLog`, which logs a line for each trial.
        group: ranks that search together. Every rank must call this with the same arguments. Rank 0 of the
            group searches while the others wait. Then all ranks run the size found, and all return the
            largest size that fits on every rank. `step` must do without collectives. A
            DistributedDataParallel wrapper in `state` uses a one-rank group during the search, a sharded
            model (`fully_shard`) fake groups of the same size. Then a joint step of all ranks, with the
            wrapper and its communication hooks, confirms the size. None is the default process group if one
            is initialized. False searches on this rank alone.
        phases: functions that prepare phases of a run: parameters that begin to train, a second model that
            joins, longer samples. Each is called before its trials, and its changes to `state` are undone
            after them. The size found holds in all phases. Put the phase that needs most memory first: the
            search runs there, and each later phase runs the size once. To include the present state as a
            phase, put a function that does nothing first.
        unit: of n in messages, such as "tokens", where `make_batch` does not count samples.

    Raises:
        AutoBatchError: no size fits, `state` lacks an optimizer that the step uses or has parameters on two
            accelerators, or something in it cannot be restored (parameters without values, `LazyLinear`) or
            cannot step on one rank alone (FullyShardedDataParallel); another rank has failed, died or not
            called this.
        TypeError, ValueError: an argument of the wrong type, or out of its range.
    """
    with joined_ranks(group) as control:
        check_functions(step, make_batch)
        check_observer(observer)
        check_bounds(bounds)
        check_choice("mode", mode, get_args(Mode))
        if max_batch_size is None and strategy == "binary":
            raise ValueError(
                "strategy is 'binary', which needs max_batch_size; 'binsearch' does not"
            )
        check_phases(phases)
        settings = SearchSettings.of(locals())  # each argument by its name
        state = as_tuple(state)
        make_finder = partial(
            BatchSizeFinder,
            step,
            make_batch,
            state=state,
            mode=mode,
            device=device,
            observer=observer,
            unit=unit,
        )
        if control is None:
            make_finder = partial(make_finder, bounds=bounds)
        else:
            bounds = _agreed_bounds(control, settings, mode, state, bounds or {}, len(phases))
            make_finder = partial(make_finder, bounds=bounds, neighbours=control.neighbours())

        def search(settings: SearchSettings, **excluded: int) -> AutoBatchResult:
            if control is None:
                with make_finder(settings, **excluded) as finder:
                    return finder.find()
            finders = partial(make_finder, **excluded)
            ranks = _GroupSearch(control, members(group), mode, state, settings, finders, unit)
            ranks.warm_up()
            return ranks.confirm(ranks.search())

        if not phases:
            return search(settings)
        snapshot = Snapshot(state, device_of(state, device, mode))
        return _find_in_phases(phases, search, settings, snapshot)


def _find_in_phases(
    phases: Sequence[Callable[[], object]],
    search: Callable[..., AutoBatchResult],
    settings: SearchSettings,
    snapshot: Snapshot,
) -> AutoBatchResult:
    """Search in the first phase; run the size found in each other phase, and search below it if need be."""
    best: AutoBatchResult | None = None
    for number, prepare in enumerate(phases, 1):
        name = getattr(prepare, "__name__", type(prepare).__name__)
        logger.info("AutoBatch: phase %d of %d (%s)", number, len(phases), name)
        try:
            prepare()
            known = settings if best is None else settings.at_most(best.batch_size)
            found = search(known, excluded_bytes=snapshot.host_bytes)
        finally:
            snapshot.restore()
        if best is not None:
            smaller = min(best, found, key=lambda result: result.batch_size)
            trials, seconds = (*best.trials, *found.trials), best.seconds + found.seconds
            found = replace(smaller, trials=trials, seconds=seconds)
        best = found
    assert best is not None
    return best


@dataclass
class _GroupSearch:
    """The search of several ranks: rank 0 alone, then each rank alone, then all ranks together."""

    control: ControlPlane
    group: Any
    mode: Mode
    state: Sequence[Any]
    settings: SearchSettings
    make_finder: Callable[..., BatchSizeFinder]
    unit: str | None = None

    def __post_init__(self) -> None:
        self.wrappers = wrappers_in(self.state)
        self.status = RankStatus(control=self.control)

    def warm_up(self) -> None:
        """Let backends allocate the buffers of training's collectives before a budget is read."""
        check_members(self.wrappers, self.group)
        device = self.make_finder(self.settings).memory.device
        groups = [wrapper.process_group for wrapper in self.wrappers] or [self.group]
        with self.status.joint_steps() as lockstep, lockstep:
            for group in dict.fromkeys(groups):
                warm_up_collectives(group, device)

    def search(self, **chosen: Any) -> AutoBatchResult:
        """Search on rank 0, and run the size found on every rank, each of them alone."""
        with stepping_alone(self.state) as self._renew:
            return search_on_ranks(self._finder, self.settings, self.control, **chosen)

    def confirm(self, found: AutoBatchResult) -> AutoBatchResult:
        """Run the size found in a joint step of all ranks, if the model communicates."""
        if not self.wrappers and not is_sharded(self.state):
            return found
        return confirm_jointly(
            found, self._joint_finder, self.search, self.status, self.settings, unit=self.unit
        )

    def _finder(self, status: RankStatus, settings: SearchSettings) -> BatchSizeFinder:
        return self.make_finder(settings, before_trial=partial(self._begin_trial, status))

    def _begin_trial(self, status: RankStatus, size: int) -> None:
        status.update(f"{self.mode}: trying {sized(size, self.unit)}")
        self._renew()

    @contextmanager
    def _joint_finder(self, settings: SearchSettings) -> Iterator[BatchSizeFinder]:
        with (
            reducers_renewed(self.wrappers) as renew,
            self.make_finder(settings, before_trial=lambda size: renew()) as finder,
        ):
            yield finder


def _agreed_bounds(
    control: ControlPlane,
    settings: SearchSettings,
    mode: Mode,
    state: Sequence[Any],
    bounds: Mapping[str, int],
    num_phases: int,
) -> dict[str, int]:
    """Check that all ranks pass equal arguments and can step alone.

    Returns:
        The minimum of each bound over the ranks.
    """
    shared = asdict(replace(settings, memory_limit_gb=None))
    kinds = [type(part).__name__ for part in state]
    check_equal(
        control,
        {
            "mode": mode,
            **shared,
            "the kinds of objects in state": kinds,
            "the number of phases": num_phases,
        },
    )
    lowest: dict[str, int] = {}
    for name, bound in (item for each in control.gather(dict(bounds)) for item in each.items()):
        lowest[name] = min(bound, lowest.get(name, bound))
    check_can_step_alone(state)
    return lowest


def as_tuple(state: Any) -> tuple[Any, ...]:
    """Return the objects in `state`.

    A single module or dict is refused: iterating over it does not give the objects to restore.
    """
    if isinstance(state, nn.Module | Mapping | str) or not isinstance(state, Iterable):
        raise TypeError(
            f"state is {kind_of(state)}; it must be a sequence of all objects that the step changes, "
            "such as state=(model, optimizer)"
        )
    return tuple(state)


def predict_memory(
    step: Callable[[Any], object],
    make_batch: Callable[[int], Any],
    *,
    state: Iterable[Any] = (),
    mode: Mode = "train",
) -> Prediction:
    """Predict the peak memory of a step on a CUDA device, at any batch size, without a device.

    The step is called four times, on tensors without data: nothing is computed, and no weights are copied.
    Afterwards the objects in `state` are unchanged.

    Examples:
        >>> model = torch.nn.Linear(1024, 1024)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> def step(batch):
        ...     model(batch).sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> def make_batch(n):
        ...     return torch.randn(n, 1024)
        >>> prediction = predict_memory(step, make_batch, state=(model, optimizer))
        >>> prediction.peak_bytes(100_000) < 2**31 < prediction.peak_bytes(200_000)
        True

    Args:
        step: runs one full training (or validation) step on a batch. It may move tensors to a CUDA device and
            use `torch.autocast` for it.
        make_batch: makes a batch of n samples, on any device.
        state: every object that a step changes; model and optimizer.
        mode: `train`, or `val`: then modules are put in evaluation mode, and the optimizer's state counts.

    Raises:
        UntraceableError: the step needs the values of a tensor (`.item()`, boolean indexing); the message
            names the operation.
        AutoBatchError: the step uses an optimizer that is not in `state`.
        TypeError, ValueError: an argument of the wrong type, or out of its range.
    """
    # It imports more of torch than a search needs.
    from linnaeus.autobatch.predict.prediction import predict
    from linnaeus.autobatch.predict.trace import Buckets

    check_functions(step, make_batch)
    check_choice("mode", mode, get_args(Mode))
    state = as_tuple(state)
    snapshot = Snapshot(state, torch.device("cpu"), without_tensors=True)  # a trace writes to none
    try:
        with unlisted_state_noticed(state, snapshot):
            buckets = Buckets.of(state)
            prediction = predict(step, make_batch, state=state, mode=mode, buckets=buckets)
    finally:
        snapshot.restore()
    if prediction.is_constant:
        logger.warning(
            "warning: the step needs no more memory with more samples. Check that make_batch returns as many "
            "samples as requested"
        )
    return prediction
