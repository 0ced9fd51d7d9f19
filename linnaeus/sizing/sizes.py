"""The searches of a training run: both modes, on all ranks, with the run's own steps, data and bounds."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from rich.console import Console
from torch import nn

from linnaeus.autobatch.finder import BatchSizeFinder
from linnaeus.autobatch.names import Names
from linnaeus.autobatch.predict.prediction import Prediction
from linnaeus.autobatch.predict.trace import Buckets
from linnaeus.autobatch.predicted import predict_step
from linnaeus.autobatch.ranks import protocol
from linnaeus.autobatch.ranks.protocol import RankStatus, Work, exchange
from linnaeus.autobatch.result import AutoBatchResult, Mode
from linnaeus.batching.sizes import micro_batches_held
from linnaeus.config.schema import AutoBatchConfig, DataConfig, TrainConfig
from linnaeus.console import StatusLine
from linnaeus.data.batch import Batch, BatchSpec
from linnaeus.data.bundle import DataBundle
from linnaeus.data.loader import num_workers
from linnaeus.dist import World, wrap
from linnaeus.sizing.bounds import max_batch_sizes
from linnaeus.sizing.progress import SearchProgress
from linnaeus.training.build import Assembly
from linnaeus.training.metrics import MetricsMemory
from linnaeus.training.noise_scale import GradientProbe
from linnaeus.training.step import TrainStep

LIMITS_VARIABLE = "LINNAEUS_MEMORY_LIMIT_GB"
"""Environment variable with one memory limit per rank, such as `2.0,1.5`, to test ranks of unequal memory."""

_SAMPLES_BEFORE = 2
"""Samples of the training step that is traced before validation: what it leaves does not depend on them, and
BatchNorm takes no single one."""

logger = logging.getLogger("linnaeus.autobatch")


@dataclass(frozen=True)
class SizeSearch:
    """Searches for the batch sizes of a run, on one rank and without a collective.

    Attributes:
        config: the DATA node.
        train: the TRAIN node.
        data: the datasets.
        assembly: the model without a wrapper, and its steps.
        world: the processes.
        seed: chooses the samples that batches are made from.
        max_samples_per_rank: upper bound of the training size; samples that each rank takes per optimizer
            step. None without a bound.
        find_unused_parameters: as training's wrapper is built, for models with unused parameters.
        console: rank 0's, shows the trials; None shows nothing.
    """

    config: DataConfig
    train: TrainConfig
    data: DataBundle
    assembly: Assembly
    world: World
    seed: int
    max_samples_per_rank: int | None = None
    find_unused_parameters: bool = False
    console: Console | None = None

    def run(
        self, mode: Mode, status: RankStatus, at_most: int | None = None, trained_at: int | None = None
    ) -> AutoBatchResult:
        """Search one mode.

        Args:
            mode: `train` or `val`.
            status: told each size that is tried.
            at_most: a size chosen earlier; it is tried first, and no larger one is.
            trained_at: for validation, the micro-batch size of training; see `BatchSizeFinder.train_once`.

        Raises:
            AutoBatchError: no size fits.
        """
        config = self.config.AUTOBATCH
        with self.finder(mode, status, at_most, trained_at) as finder:
            result = finder.find(
                _setting(config, "TARGET_MEMORY_FRACTION", mode),
                strategy=config.STRATEGY if at_most is None else "guided",
                tolerance=config.TOLERANCE,
                max_trials=config.MAX_TRIALS,
                timeout_minutes=config.TIMEOUT_MINUTES,
                start=_setting(config, "START", mode) if at_most is None else at_most,
            )
            if config.OBJECTIVE == "throughput" and at_most is None:
                rest = config.TIMEOUT_MINUTES - result.seconds / 60
                result = finder.prefer_throughput(result, timeout_minutes=rest)
        return result

    @contextmanager
    def finder(
        self, mode: Mode, status: RankStatus, at_most: int | None = None, trained_at: int | None = None
    ) -> Iterator[BatchSizeFinder]:
        """The finder for one mode; arguments as for `run`."""
        config = self.config.AUTOBATCH
        spec = self.spec(mode)
        train_step = _TrialTrainStep(self)
        num_batches = train_step.num_micro_batches if mode == "train" else 1
        low, high = (_setting(config, f"{bound}_BATCH_SIZE", mode) for bound in ("MIN", "MAX"))
        multiple_of = config.MULTIPLE_OF
        if at_most is not None:  # it may come from splitting the effective batch, and so be no multiple
            low, high = min(low, at_most), at_most
            multiple_of = multiple_of if at_most % multiple_of == 0 else 1

        def train_once() -> None:
            train_step.discard_wrapper()
            num_micro_batches = train_step.num_micro_batches
            train_step(self._batches(self.spec("train"), trained_at or 1, num_batches=num_micro_batches))

        # The finder measures what training has left when validation is searched.
        predict = partial(self.predict, mode, with_training=mode == "train")
        with self._frozen_as_in_last_epoch(), log_level(config, mode), BatchSizeFinder(
            train_step if mode == "train" else self._validate,
            partial(self._batches, spec, num_batches=num_batches),
            state=self.assembly.state,
            mode=mode,
            device=self.world.device,
            min_batch_size=low,
            max_batch_size=high,
            steps_per_trial=_setting(config, "STEPS_PER_TRIAL", mode),
            multiple_of=multiple_of,
            memory_limit_gb=_memory_limit_gb(config, self.world.rank),
            bounds=self._bounds(mode, spec),
            batches_per_step=num_batches,
            train_once=None if trained_at is None else train_once,
            before_trial=train_step.discard_wrapper if mode == "train" else lambda: None,
            observer=SearchProgress(mode, status, self.console),
            names=keys(mode),
            predict=predict if config.PREDICT and at_most is None else None,
            empties_cache=True,  # before and after each validation
        ) as finder:  # fmt: skip
            yield finder
        train_step.discard_wrapper()
        gc.collect()  # frees the wrapper with its hooks on the parameters

    def predict(self, mode: Mode, base_bytes: int = 0, *, with_training: bool = True) -> Prediction:
        """Predict the peak of a mode's step; the wrapper that it runs in is described by its buckets.

        Args:
            mode: which step.
            base_bytes: in use on the device beside the allocator.
            with_training: whether everything that training keeps is there, the buckets of its wrapper too;
                without, what `assembly` holds now.

        Raises:
            UntraceableError: the step needs the values of a tensor; the message names the operation.
        """
        alone = dataclasses.replace(self, world=World(torch.device("meta")), assembly=_on_meta(self.assembly))
        specs = {each: self.spec(each) for each in ("train", mode)}
        train_step, validation_step = _TrialTrainStep(alone), alone.assembly.validation_step

        def train(size: int) -> None:
            num_batches = train_step.num_micro_batches
            train_step(alone._batches(specs["train"], size, num_batches=num_batches))
            train_step.discard_wrapper()

        def validate(size: int) -> None:
            validation_step(next(alone._batches(specs["val"], size, num_batches=1)))

        with self._frozen_as_in_last_epoch():
            return predict_step(
                train if mode == "train" else validate,
                int,  # both make their own batches, one at a time: they take the size
                state=self.assembly.state,
                mode=mode,
                train_once=partial(train, _SAMPLES_BEFORE) if with_training else None,
                # Those of the wrapper that `linnaeus.dist.wrap` makes.
                buckets=Buckets(as_view=True) if self.world.is_distributed and with_training else None,
                base_bytes=base_bytes,
            )

    def _frozen_as_in_last_epoch(self) -> AbstractContextManager[None]:
        """Context in which parameters are frozen or not as in the last epoch, when most memory is needed."""
        freezing = self.assembly.freezing
        return freezing.unfrozen(only_if=freezing.ends_within(self.train.EPOCHS))

    def _batches(self, spec: BatchSpec, size: int, *, num_batches: int) -> Iterator[Batch]:
        """Makes each batch when it is asked for: as in training, only one exists at a time."""
        device, channels_last = self.world.device, self.train.CHANNELS_LAST
        workers = num_workers(self.config, self.world.local_world_size)
        if device.type == "cpu" and workers == 0:  # loading takes memory of the device
            return (spec.load(size) for _ in range(num_batches))
        return (spec.make(size, device, channels_last=channels_last) for _ in range(num_batches))

    def spec(self, mode: Mode) -> BatchSpec:
        """What a mode's batches look like."""
        data = self.data
        dataset, collate, mix = data.train if mode == "train" else data.val, data.collate, None
        if mode == "train" and data.mixing is not None:
            # Mixed batches have the shapes and types of soft ones, which can be filled on the device.
            collate, mix = data.mixing.soft_collate(collate), data.mixing.mix
        return BatchSpec.from_dataset(
            dataset, collate, self.config.AUTOBATCH.NUM_SPEC_SAMPLES, self.seed, mix
        )

    def _validate(self, batches: Iterator[Batch]) -> None:
        self.assembly.validation_step(next(batches))

    def _bounds(self, mode: Mode, spec: BatchSpec) -> dict[str, int]:
        """Upper bounds of a mode's size beside device memory and MAX_BATCH_SIZE, by name."""
        bounds = max_batch_sizes(self.config, self.data, mode, self.world, tensor_bytes=spec.tensor_bytes)
        wanted = self.max_samples_per_rank
        # A bound below the smallest size would end the search; the plan splits the size found instead.
        if mode == "train" and wanted is not None and wanted >= max(2, self.config.AUTOBATCH.MIN_BATCH_SIZE):
            bounds["effective_batch"] = wanted
        return bounds


def find_sizes(search: SizeSearch, earlier: Mapping[str, int] | None = None) -> dict[str, AutoBatchResult]:
    """Search each mode that the configuration asks for on rank 0, then run the size found on every rank.

    A rank where the size does not fit searches for its own, and all try again with the smallest. Every rank
    must call this.

    Args:
        search: the search of this run.
        earlier: by mode, the size in the checkpoint of the run being resumed: it is tried first, and no
            larger one is.

    Raises:
        LinnaeusError: the same on every rank; see `exchange`.
    """
    found: dict[str, AutoBatchResult] = {}
    search.world.warm_up_collectives()
    for mode in get_args(Mode):
        if not _setting(search.config.AUTOBATCH, "ENABLED", mode):
            continue
        trained_at = _trained_at(search, found) if mode == "val" else None
        size = (earlier or {}).get(mode)
        if size is None:
            found[mode] = _find(search, mode, trained_at)
            continue
        most = _setting(search.config.AUTOBATCH, "MAX_BATCH_SIZE", mode)
        result = _find(search, mode, trained_at, min(size, most or size))
        if result.batch_size == size:
            result = dataclasses.replace(result, limited_by="checkpoint")
        else:
            logger.info(
                "AutoBatch %s: the checkpoint's batch size %d is not kept, going on with %d (limited by %s)",
                mode, size, result.batch_size, result.limited_by,
            )  # fmt: skip
        found[mode] = dataclasses.replace(result, max_batch_size=most)
    search.assembly.metrics.reset()
    return found


def find_evaluation_size(search: SizeSearch) -> AutoBatchResult:
    """Search for the validation size where nothing is trained. Every rank must call this.

    Raises:
        LinnaeusError: the same on every rank; see `exchange`.
    """
    search.world.warm_up_collectives()
    return _find(search, "val", None)


def _find(
    search: SizeSearch, mode: Mode, trained_at: int | None, at_most: int | None = None
) -> AutoBatchResult:
    """Search one mode on rank 0, then run the size found on every rank; see `SizeSearch.run`."""
    result: AutoBatchResult = protocol.search_on_main(
        partial(_exchange, search, mode),
        search.world.rank,
        partial(search.run, mode, at_most=at_most, trained_at=trained_at),
    )
    if search.world.is_distributed:
        result = protocol.agreed(result, partial(run_on_every_rank, search, trained_at=trained_at))
    return result


def _trained_at(search: SizeSearch, found: Mapping[str, AutoBatchResult]) -> int:
    return found["train"].batch_size if "train" in found else search.config.BATCH_SIZE


def run_on_every_rank(
    search: SizeSearch, result: AutoBatchResult, size: int, trained_at: int | None = None
) -> AutoBatchResult:
    """Run the size found, or one below it, on every rank. Every rank must call this.

    Memory does not always grow with the size: a smaller size may not fit.

    Returns:
        The result with the new trials. If the size fits on every rank, it is among those that ran there; if
        not, the largest size that fits on the rank with the smallest is the new batch size.

    Raises:
        LinnaeusError: the same on every rank; see `exchange`.
    """
    search.world.warm_up_collectives()
    mode = result.mode

    def run(status: RankStatus, size: int) -> AutoBatchResult:
        return search.run(mode, status, size, trained_at)

    with log_level(search.config.AUTOBATCH, mode):
        return protocol.run_on_every_rank(partial(_exchange, search, mode), run, result, size)


@contextmanager
def log_level(config: AutoBatchConfig, mode: Mode) -> Iterator[bool]:
    """Set the logger to the level of a mode inside the context; the value says if trials are shown."""
    before = logger.level
    logger.setLevel(_setting(config, "LOG_LEVEL", mode))
    try:
        yield logger.isEnabledFor(logging.INFO)
    finally:
        logger.setLevel(before)


def _exchange(search: SizeSearch, mode: Mode, work: Work) -> list[Any]:
    config = search.config.AUTOBATCH
    with (
        log_level(config, mode) as is_shown,
        StatusLine(search.console if is_shown else None) as line,
    ):
        return exchange(
            search.world.control, work, timeout_minutes=config.TIMEOUT_MINUTES, show=line.update,
            names=keys(mode),
        )  # fmt: skip


class _TrialTrainStep:
    """The training step as trials run it: in training's wrapper, over a process group of this rank alone.

    The wrapper is made inside the trial, since its buckets belong to the peak.
    """

    def __init__(self, search: SizeSearch) -> None:
        self.num_micro_batches = micro_batches_held(search.train)
        self._search = search
        self._wrapped: TrainStep | None = None

    def discard_wrapper(self) -> None:
        """Let the next trial make its own: a wrapper is unusable after an error in the middle of a step."""
        self._wrapped = None

    def __call__(self, batches: Iterator[Batch]) -> None:
        if self._wrapped is None:
            search = self._search
            model = wrap(
                search.assembly.model, search.world, single_rank=True,
                find_unused_parameters=search.find_unused_parameters,
            )  # fmt: skip
            self._wrapped = dataclasses.replace(
                search.assembly.train_step, model=model, probe=self._probe(model)
            )
        if self._wrapped.probe is not None:
            self._wrapped.probe.arm()  # a step that measures needs more memory than others
        self._wrapped(batches, self.num_micro_batches)

    def _probe(self, model: nn.Module) -> GradientProbe | None:
        """A probe that measures as with all ranks, over the group of this rank alone."""
        config = self._search.train.NOISE_SCALE
        if not config.ENABLED:
            return None
        num_ranks, scaler = self._search.world.world_size, self._search.assembly.scaler
        return GradientProbe(model, scaler, decay=config.DECAY, num_ranks=num_ranks)


def _on_meta(assembly: Assembly) -> Assembly:
    """With steps that run on `meta`; validation holds what metrics hold, and runs none."""
    precision = dataclasses.replace(assembly.train_step.precision, device=torch.device("meta"))
    return dataclasses.replace(
        assembly,
        train_step=dataclasses.replace(assembly.train_step, precision=precision),
        validation_step=dataclasses.replace(
            assembly.validation_step,
            precision=precision,
            update_metrics=MetricsMemory(assembly.metrics),
        ),
    )


def keys(mode: Mode) -> Names:
    """The keys of the configuration that a search of this mode takes its settings from."""
    node, suffix = "DATA.AUTOBATCH", "_VAL" if mode == "val" else ""
    return Names(
        target_memory_fraction=f"{node}.TARGET_MEMORY_FRACTION{suffix}",
        memory_limit_gb=f"{node}.MEMORY_LIMIT_GB",
        min_batch_size=f"{node}.MIN_BATCH_SIZE{suffix}",
        max_batch_size=f"{node}.MAX_BATCH_SIZE{suffix}",
        max_trials=f"{node}.MAX_TRIALS",
        timeout_minutes=f"{node}.TIMEOUT_MINUTES",
        sample_size="DATA.IMG_SIZE",
        checkpointing="TRAIN.GRADIENT_CHECKPOINTING True",
        half_precision="TRAIN.AMP bf16",
        model="MODEL.NAME",
        optimizer="OPTIMIZER.NAME",
        batch_maker="the collate function",
        smaller_training=(
            f"lower DATA.BATCH_SIZE, or {node}.MAX_BATCH_SIZE where AutoBatch chose the training size"
        ),
        without_search=f"switch {node}.ENABLED{suffix} off and set DATA.BATCH_SIZE{suffix}",
    )


def _setting(config: AutoBatchConfig, name: str, mode: Mode) -> Any:
    return getattr(config, name if mode == "train" else f"{name}_VAL")


def _memory_limit_gb(config: AutoBatchConfig, rank: int) -> float | None:
    limits = os.environ.get(LIMITS_VARIABLE)
    return float(limits.split(",")[rank]) if limits else config.MEMORY_LIMIT_GB
