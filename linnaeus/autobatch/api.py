"""`auto_find_batch_size` and `predict_memory`: AutoBatch as functions, for any training loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn
from torch.distributed import ProcessGroup

from linnaeus.autobatch.arguments import check_bounds, check_choice, check_functions, kind_of
from linnaeus.autobatch.finder import BatchSizeFinder
from linnaeus.autobatch.observer import SearchObserver, check_observer
from linnaeus.autobatch.optimizers import unlisted_optimizers_refused
from linnaeus.autobatch.ranks.control import ControlPlane
from linnaeus.autobatch.ranks.group import check_equal, together
from linnaeus.autobatch.ranks.protocol import RankStatus, confirm_jointly, search_on_ranks
from linnaeus.autobatch.ranks.single_rank import (
    check_silenceable,
    refusing_collectives,
    stepping_alone,
)
from linnaeus.autobatch.result import AutoBatchResult, Mode
from linnaeus.autobatch.settings import Objective, SearchSettings
from linnaeus.autobatch.sharded import is_sharded
from linnaeus.autobatch.snapshot import Snapshot

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
) -> AutoBatchResult:
    """Find the largest batch size, or one at most 1 % below it, that runs within a fraction of the memory.

    Every size is really run, and the size found fits a budget that is read again. Afterwards parameters,
    buffers, gradients, plain attributes, hooks, modes, optimizers, scalers, global random number generators
    and the allocator's cap are bit for bit what they were.

    Args:
        step: runs one full training (or validation) step on a batch.
        make_batch: makes a batch of n samples on the device.
        state: every object with `state_dict` and `load_state_dict` that a step may change: model, optimizer,
            scaler, average; and the random number generators (`torch.Generator`, `numpy.random.Generator`)
            that it draws from. If the optimizer is among them, validation is measured with its state
            allocated.
        mode: `train` or `val`; modules in `state` are put in the matching mode.
        device: the device whose memory counts. By default the accelerator that parameters in `state` are on,
            else the device of these parameters, else torch's current accelerator, else the CPU.
        bounds: further upper bounds by the name that `limited_by` reports, such as {"dataset": 1437}. They
            may differ between ranks: the lowest of each name holds.
        observer: told what the search does; by default a `SearchLog`, which logs a line for each trial.
        group: the ranks that search together; every one of them must call this, with the same arguments. Rank
            0 of the group searches while the others wait, then all run the size found, and all return the
            largest that fits on each. So `step` must do without collectives; DistributedDataParallel in
            `state` does without its own meanwhile. With a sharded model (`fully_shard`) each rank steps alone
            in fake groups of the same size, and a joint step of all confirms the size. None is the default
            process group if one is initialised; False searches on this rank alone.
        target_memory_fraction and the others: settings of the search, as `SearchSettings` describes them.

    Raises:
        AutoBatchError: no size fits, `state` lacks an optimizer that the step uses or has parameters on two
            accelerators, or something in it cannot be restored (parameters without values, `LazyLinear`) or
            cannot step on one rank alone (FullyShardedDataParallel); another rank has failed, died or not
            called this.
        TypeError, ValueError: an argument of the wrong type, or out of its range.
    """
    with together(group) as control:
        check_functions(step, make_batch)
        check_observer(observer)
        check_bounds(bounds)
        check_choice("mode", mode, get_args(Mode))
        if max_batch_size is None and strategy == "binary":
            raise ValueError(
                "strategy is 'binary', which needs max_batch_size; 'binsearch' does not"
            )
        settings = SearchSettings(
            target_memory_fraction,
            min_batch_size,
            max_batch_size,
            steps_per_trial,
            strategy,
            tolerance,
            multiple_of,
            memory_limit_gb,
            max_trials,
            timeout_minutes,
            objective,
            start,
        )
        state = listed(state)
        neighbours: Sequence[int] = ()
        if control is not None:
            bounds = _agreed_bounds(control, settings, mode, state, bounds or {})
            neighbours = control.neighbours()
        make_finder = partial(
            BatchSizeFinder,
            state=state,
            mode=mode,
            device=device,
            bounds=bounds,
            observer=observer,
            neighbours=neighbours,
        )

        def search(**chosen: Any) -> AutoBatchResult:
            alone, makes_alone = step, make_batch
            if control is not None:
                alone = refusing_collectives(step, steps_per_trial, "the step")
                makes_alone = refusing_collectives(make_batch, steps_per_trial, "make_batch")

            def finder_for(status: RankStatus, settings: SearchSettings) -> BatchSizeFinder:
                def before_trial(size: int) -> None:
                    status.update(f"{mode}: trying batch size {size}")
                    renew_wrappers()

                return make_finder(alone, makes_alone, settings, before_trial=before_trial)

            with stepping_alone(() if control is None else state) as renew_wrappers:
                return search_on_ranks(finder_for, settings, control, **chosen)

        found = search()
        if control is None or not is_sharded(state):
            return found
        status = RankStatus(control=control)
        return confirm_jointly(
            found, partial(make_finder, step, make_batch), search, status, settings
        )


def _agreed_bounds(
    control: ControlPlane,
    settings: SearchSettings,
    mode: Mode,
    state: Sequence[Any],
    bounds: Mapping[str, int],
) -> dict[str, int]:
    """Check that all ranks ask for the same and can step alone; of each upper bound, the lowest."""
    shared = asdict(replace(settings, memory_limit_gb=None))
    kinds = [type(part).__name__ for part in state]
    check_equal(control, {"mode": mode, **shared, "the kinds of objects in state": kinds})
    lowest: dict[str, int] = {}
    for name, bound in (item for each in control.gather(dict(bounds)) for item in each.items()):
        lowest[name] = min(bound, lowest.get(name, bound))
    check_silenceable(state)
    return lowest


def listed(state: Any) -> tuple[Any, ...]:
    """The objects in `state`; modules and dictionaries can be iterated over too, but not to this end."""
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

    The step is called four times, on tensors without data: nothing is computed. Afterwards what is in `state`
    is what it was.

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
    state = listed(state)
    snapshot = Snapshot(state, torch.device("cpu"))  # of what the step holds by itself too
    try:
        with unlisted_optimizers_refused(state, snapshot):
            buckets = Buckets.of(state)
            prediction = predict(step, make_batch, state=state, mode=mode, buckets=buckets)
    finally:
        snapshot.restore()
    if prediction.is_constant:
        logger.warning(
            "warning: the step needs no more memory with more samples. Check that make_batch returns as many "
            "samples as it is asked for"
        )
    return prediction
