"""The searches of a training run: both modes, on all ranks, with the run's own steps, batches and bounds."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from linnaeus.autobatch.bounds import max_batch_size_for
from linnaeus.autobatch.find import BatchSizeFinder
from linnaeus.autobatch.protocol import Status, exchange
from linnaeus.autobatch.result import AutoBatchResult, Mode
from linnaeus.config.schema import AutoBatchConfig, DataConfig
from linnaeus.data.batch import Batch, BatchSpec
from linnaeus.data.bundle import DataBundle
from linnaeus.dist import World, wrap
from linnaeus.training.build import Assembly

LIMITS_VARIABLE = "LINNAEUS_MEMORY_LIMIT_GB"
"""Environment variable with a memory limit for each rank, such as `2.0,1.5`; for tests of unequal devices."""

logger = logging.getLogger("linnaeus.autobatch")


def modes_to_search(config: AutoBatchConfig) -> list[Mode]:
    """The modes that the configuration asks for."""
    wanted: list[tuple[Mode, bool]] = [("train", config.ENABLED), ("val", config.ENABLED_VAL)]
    return [mode for mode, enabled in wanted if enabled]


@dataclass(frozen=True)
class SizeSearch:
    """All that a rank needs to search by itself.

    Attributes:
        config: the DATA node.
        bundle: the datasets.
        assembly: the model without a wrapper, and its steps.
        world: the processes; no collective runs in a search.
        accumulation_steps: micro-batches per optimizer step; a trial runs two of them at most, which hold as
            much as any number.
        seed: chooses the samples that batches are made from.
        max_samples_per_rank: samples that a rank takes per optimizer step at most; nothing larger is tried
            for
            training. None where that follows from what fits.
    """

    config: DataConfig
    bundle: DataBundle
    assembly: Assembly
    world: World
    accumulation_steps: int
    seed: int
    max_samples_per_rank: int | None = None

    def run(self, mode: Mode, status: Status, at_most: int | None = None) -> AutoBatchResult:
        """Search one mode on this rank alone.

        Args:
            mode: `train` or `val`.
            status: told what is being tried.
            at_most: a size that is already chosen; tried first, and not exceeded.

        Raises:
            AutoBatchError: no size fits.
        """
        config = self.config.AUTOBATCH
        logger.setLevel(_setting(config, "LOG_LEVEL", mode))
        with self.finder(mode, status, at_most) as finder:
            result = finder.find(
                _setting(config, "TARGET_MEMORY_FRACTION", mode),
                strategy=config.STRATEGY if at_most is None else "guided",
                max_trials=config.MAX_TRIALS,
                timeout_minutes=config.TIMEOUT_MINUTES,
                start=at_most,
            )
            if config.OBJECTIVE == "throughput" and at_most is None:
                rest_minutes = config.TIMEOUT_MINUTES - result.seconds / 60
                result = finder.prefer_throughput(result, timeout_minutes=rest_minutes)
        return result

    @contextmanager
    def finder(self, mode: Mode, status: Status, at_most: int | None = None) -> Iterator[BatchSizeFinder]:
        """Searches of one mode on this rank alone; arguments as for `run`."""
        config = self.config.AUTOBATCH
        dataset = self.bundle.train if mode == "train" else self.bundle.val
        spec = BatchSpec.from_dataset(dataset, self.bundle.collate, config.NUM_SPEC_SAMPLES, self.seed)
        trial = _TrainTrial(self) if mode == "train" else _ValidationTrial(self)
        low, high = (_setting(config, f"{bound}_BATCH_SIZE", mode) for bound in ("MIN", "MAX"))
        multiple_of = config.MULTIPLE_OF
        if at_most is not None:  # it may be a share of an effective batch, which nobody rounds
            low, high = min(low, at_most), at_most
            multiple_of = multiple_of if at_most % multiple_of == 0 else 1

        def announce(size: int) -> None:
            status.text = f"{mode}: trying batch size {size}"
            logger.debug(status.text)
            trial.renew()

        with BatchSizeFinder(
            trial.step,
            partial(self._batches, spec, num=trial.num_micro_batches),
            state=self.assembly.state,
            mode=mode,
            device=self.world.device,
            min_batch_size=low,
            max_batch_size=high,
            steps_per_trial=_setting(config, "STEPS_PER_TRIAL", mode),
            multiple_of=multiple_of,
            memory_limit_gb=_memory_limit_gb(config, self.world.rank),
            bounds=self._bounds(mode, spec),
            batches_per_step=trial.num_micro_batches,
            on_start=announce,
        ) as finder:
            yield finder
        trial.renew()
        gc.collect()  # the last wrapper's hooks on the parameters go with it

    def _batches(self, spec: BatchSpec, size: int, *, num: int) -> Iterator[Batch]:
        """Made one by one: a micro-batch is gone before the next one comes, as in training."""
        device = self.world.device
        if device.type == "cpu" and self.config.NUM_WORKERS == 0:  # the loader's memory is the device's
            return (spec.load(size) for _ in range(num))
        return (spec.make(size, device) for _ in range(num))

    def _bounds(self, mode: Mode, spec: BatchSpec) -> dict[str, int]:
        bounds = max_batch_size_for(
            self.bundle,
            train=mode == "train",
            bytes_per_sample=spec.bytes_per_sample,
            data_config=self.config,
            device=self.world.device,
            world_size=self.world.world_size,
            local_world_size=self.world.local_world_size,
        )
        share = self.max_samples_per_rank
        # A smaller share is no reason to fail: the plan divides what is found.
        if mode == "train" and share is not None and share >= max(2, self.config.AUTOBATCH.MIN_BATCH_SIZE):
            bounds["effective_batch"] = share
        return bounds


def find_sizes(search: SizeSearch) -> dict[str, AutoBatchResult]:
    """Rank 0 searches each mode, then all ranks agree. Every rank must call this.

    Raises:
        LinnaeusError: the same on every rank; see `exchange`.
    """
    found: dict[str, AutoBatchResult] = {}
    search.world.warm_up_collectives()
    for mode in modes_to_search(search.config.AUTOBATCH):
        result = _exchange(search, f"search/{mode}", partial(_search_on_main, search, mode))[0]
        found[mode] = _agree(search, mode, AutoBatchResult.from_dict(mode, result))
    search.assembly.metrics.reset()
    return found


def confirm(search: SizeSearch, result: AutoBatchResult, size: int) -> AutoBatchResult:
    """Run one more training size, below the one found, on every rank. Every rank must call this.

    Memory is not quite monotone in the size: a smaller one need not fit before it has run.

    Returns:
        The result with the new trials. Where a rank does not fit the size, its own is the new batch size.

    Raises:
        LinnaeusError: the same on every rank; see `exchange`.
    """
    search.world.warm_up_collectives()
    entries = _exchange(search, f"confirm/train/{size}", partial(_try_here, search, "train", size))
    verdicts = [AutoBatchResult.from_dict("train", entry) for entry in entries]
    result = dataclasses.replace(result, trials=(*result.trials, *verdicts[0].trials))
    smallest = min(verdicts, key=lambda verdict: verdict.batch_size)
    if smallest.batch_size == size:
        return result
    return dataclasses.replace(
        result,
        batch_size=smallest.batch_size,
        certified=smallest.certified,
        limited_by=smallest.limited_by,
    )


def _agree(search: SizeSearch, mode: Mode, result: AutoBatchResult) -> AutoBatchResult:
    """The largest size that every rank has run; ranks where it does not fit look for their own."""
    while search.world.is_distributed:
        size = result.batch_size
        entries = _exchange(search, f"agree/{mode}/{size}", partial(_try_here, search, mode, size))
        verdicts = [AutoBatchResult.from_dict(mode, entry) for entry in entries]
        smallest = min(verdicts, key=lambda verdict: verdict.batch_size)
        result = dataclasses.replace(result, trials=(*result.trials, *verdicts[0].trials))
        if smallest.batch_size == size:
            return result
        rank = verdicts.index(smallest)
        logger.info("rank %d fits no more than %d (%s)", rank, smallest.batch_size, mode)
        result = dataclasses.replace(
            result,
            batch_size=smallest.batch_size,
            certified=smallest.certified,
            limited_by=smallest.limited_by,
        )
    return result


def _exchange(search: SizeSearch, name: str, work: Callable[[Status], Any]) -> list[Any]:
    timeout_minutes = search.config.AUTOBATCH.TIMEOUT_MINUTES
    return exchange(search.world, f"autobatch/{name}", work, timeout_minutes=timeout_minutes)


def _search_on_main(search: SizeSearch, mode: Mode, status: Status) -> dict[str, Any] | None:
    if not search.world.is_main:
        status.text = "waiting"
        return None
    return search.run(mode, status).as_dict()


def _try_here(search: SizeSearch, mode: Mode, size: int, status: Status) -> dict[str, Any]:
    return search.run(mode, status, at_most=size).as_dict()


class _TrainTrial:
    """The training step as a trial runs it: in training's wrapper, over a group of this rank alone."""

    def __init__(self, search: SizeSearch) -> None:
        self._step = search.assembly.train_step
        self._model = search.assembly.model
        self._world = search.world
        self.num_micro_batches = min(search.accumulation_steps, 2)

    def renew(self) -> None:
        """Forget the wrapper: one that was left in the middle of a step cannot go on."""
        self._step = dataclasses.replace(self._step, model=self._model)

    def step(self, batches: Iterator[Batch]) -> None:
        """One optimizer step."""
        if self._step.model is self._model:
            self._step = dataclasses.replace(self._step, model=wrap(self._model, self._world, alone=True))
        self._step(batches, self.num_micro_batches)


class _ValidationTrial:
    """The validation step as a trial runs it."""

    num_micro_batches = 1

    def __init__(self, search: SizeSearch) -> None:
        self._step = search.assembly.validation_step

    def renew(self) -> None:
        """Nothing is kept from trial to trial."""

    def step(self, batches: Iterator[Batch]) -> None:
        """One validation batch."""
        self._step(next(batches))


def _setting(config: AutoBatchConfig, name: str, mode: Mode) -> Any:
    return getattr(config, name if mode == "train" else f"{name}_VAL")


def _memory_limit_gb(config: AutoBatchConfig, rank: int) -> float | None:
    limits = os.environ.get(LIMITS_VARIABLE)
    return float(limits.split(",")[rank]) if limits else config.MEMORY_LIMIT_GB
