"""The searches of a training run: both modes, on all ranks, with the run's own steps, data and bounds."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as torch_dist
from rich.console import Console

from linnaeus.autobatch.errors import TooSmallError
from linnaeus.autobatch.finder import BatchSizeFinder
from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.predict.prediction import Prediction, predict
from linnaeus.autobatch.predict.trace import Buckets
from linnaeus.autobatch.ranks.collectives import warm_up_collectives
from linnaeus.autobatch.ranks.protocol import RankStatus, confirm_jointly, search_on_ranks
from linnaeus.autobatch.ranks.single_rank import stepping_alone
from linnaeus.autobatch.result import AutoBatchResult, Mode
from linnaeus.autobatch.settings import SearchSettings
from linnaeus.autobatch.state.sharded import is_sharded
from linnaeus.config.schema import AutoBatchConfig, DataConfig, TrainConfig
from linnaeus.data.batch import Batch, BatchSpec, CopiedAhead
from linnaeus.data.bundle import DataBundle
from linnaeus.runtime.console import StatusLine
from linnaeus.runtime.distributed import World
from linnaeus.size_search.bounds import max_batch_sizes
from linnaeus.size_search.keys import messages_in_keys
from linnaeus.size_search.report import SearchProgress
from linnaeus.size_search.trial_step import TrialStep, on_meta
from linnaeus.training.build import Assembly

LIMITS_VARIABLE = "LINNAEUS_MEMORY_LIMIT_GB"
"""Environment variable with one memory limit per rank, such as `2.0,1.5`, to test ranks of unequal memory."""

_SAMPLES_BEFORE = 2
"""Samples of the training step that is traced before validation. The memory that it leaves does not depend on
their number, but BatchNorm needs more than one."""

logger = logging.getLogger("linnaeus.autobatch")


@dataclass(frozen=True)
class SizeSearch:
    """Searches for the batch sizes of a run, on one rank and without a collective.

    Attributes:
        config: the DATA node.
        train: the TRAIN node.
        data: the datasets.
        assembly: the model without a wrapper, and its steps.
        world: the ranks.
        seed: chooses the samples that batches are made from.
        max_samples_per_rank: upper bound of the training size; samples that each rank takes per optimizer
            step. None without a bound.
        find_unused_parameters: as training's wrapper is built, for models with unused parameters.
        console: rank 0's, shows the trials; None shows nothing.
        wanted: with a smaller training size, unless a bound is the reason, ranks raise a `TooSmallError`.
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
    wanted: int | None = None
    _progress: dict[Mode, SearchProgress] = dataclasses.field(default_factory=dict)

    def settings(self, mode: Mode) -> SearchSettings:
        """The settings of a mode's search, each from the key of its name."""
        config = self.config.AUTOBATCH
        names = (field.name for field in dataclasses.fields(SearchSettings))
        values = {name: _setting(config, name.upper(), mode) for name in names}
        if limits := os.environ.get(LIMITS_VARIABLE):
            values["memory_limit_gb"] = float(limits.split(",")[self.world.rank])
        return SearchSettings(**values)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the model."""
        return is_sharded(self.assembly.state)

    @contextmanager
    def finder(
        self,
        mode: Mode,
        status: RankStatus,
        settings: SearchSettings | None = None,
        trained_at: int | None = None,
        *,
        alone: bool = True,
    ) -> Iterator[BatchSizeFinder]:
        """The finder for one mode, on this rank; without a collective unless `alone` is False.

        Args:
            mode: which step.
            status: told each size that is tried.
            settings: search settings; None reads them from the configuration.
            trained_at: for validation, the micro-batch size of training; see `BatchSizeFinder.train_once`.
            alone: whether a sharded model communicates with no other rank; else all ranks step together.
        """
        spec = self.spec(mode)
        training = TrialStep(self)

        def train_once() -> None:
            training.discard_wrapper()
            training.step(training.batches(self.spec("train"), trained_at or 1))

        def validations(size: int) -> Iterator[None]:
            return map(self.assembly.validation_step, self.batches(spec, size))

        is_training = mode == "train"
        sharded_state = (
            self.assembly.state if self.is_sharded else ()
        )  # others wrap it in each trial
        with (
            stepping_alone(sharded_state) if alone else nullcontext(),
            self._frozen_as_in_last_epoch(),
            log_level(self.config.AUTOBATCH, mode),
            messages_in_keys(mode),
            BatchSizeFinder(
                training.step if is_training else next,  # with no frame of its own
                partial(training.batches, spec) if is_training else validations,
                settings or self.settings(mode),
                state=self.assembly.state,
                mode=mode,
                device=self.world.device,
                bounds=self._bounds(mode, spec),
                batches_per_step=training.num_micro_batches if is_training else 1,
                train_once=None if trained_at is None else train_once,
                before_trial=lambda size: training.discard_wrapper() if is_training else None,
                observer=self._observer(mode, status),
                empties_cache=True,  # before and after each validation
            ) as finder,
        ):
            yield finder
        training.discard_wrapper()
        gc.collect()  # frees the wrapper with its hooks on the parameters

    @contextmanager
    def on_ranks(
        self, mode: Mode, trained_at: int | None = None
    ) -> Iterator[Callable[..., AutoBatchResult]]:
        """`search_on_ranks` for one mode, with all but `found` and `size` given; every rank must enter it."""
        if self.world.is_distributed:
            warm_up_collectives(torch_dist.group.WORLD, self.world.device)
        with (
            log_level(self.config.AUTOBATCH, mode) as is_shown,
            messages_in_keys(mode),
            StatusLine(self.console if is_shown else None) as line,
        ):
            yield partial(
                search_on_ranks,
                partial(self.finder, mode, trained_at=trained_at),
                self.settings(mode),
                self.world.control,
                show=line.update,
                agree=mode == "train" and self.wanted is not None,
            )

    def predict(self, mode: Mode) -> Prediction:
        """Predict a mode's step, for the allocator alone; the wrapper around it is described by its buckets.

        Raises:
            UntraceableError: the step needs the values of a tensor; the message names the operation.
        """
        has_buckets = self.world.is_distributed and not self.is_sharded
        alone = dataclasses.replace(
            self, world=World(torch.device("meta")), assembly=on_meta(self.assembly)
        )
        specs = {each: self.spec(each) for each in ("train", mode)}
        training, validation_step = TrialStep(alone), alone.assembly.validation_step

        def train(size: int) -> None:
            training.step(training.batches(specs["train"], size))
            training.discard_wrapper()

        def validate(size: int) -> None:
            next(map(validation_step, alone.batches(specs["val"], size)))

        with self._frozen_as_in_last_epoch():
            return predict(
                train if mode == "train" else validate,
                int,  # both make their own batches, one at a time: they take the size
                state=(*self.assembly.state, self.assembly.train_step.distillation),
                mode=mode,
                train_once=partial(train, _SAMPLES_BEFORE),
                # As in the wrapper of `linnaeus.training.ddp.wrap`.
                buckets=Buckets(as_view=True) if has_buckets else None,
                base_bytes=0,
            )

    def _frozen_as_in_last_epoch(self) -> AbstractContextManager[None]:
        """Context in which parameters are frozen or not as in the last epoch, when most memory is needed."""
        freezing = self.assembly.freezing
        return freezing.unfrozen(only_if=freezing.ends_within(self.train.most_epochs))

    def batches(self, spec: BatchSpec, size: int, num_batches: int = 1) -> Iterator[Batch]:
        """Make each batch on request: as in training, only one exists at a time.

        On a GPU there is one more, which the loader copies there during the step.
        """
        device = self.world.device
        if device.type == "cpu":
            # Loading in this process takes memory of the device.
            make = partial(spec.make, device=device) if self.config.NUM_WORKERS else spec.load
            return (make(size) for _ in range(num_batches))
        return CopiedAhead((spec.make(size, device) for _ in range(num_batches + 1)), device)

    def spec(self, mode: Mode) -> BatchSpec:
        """Describe the batches of a mode."""
        num_samples, data = self.config.AUTOBATCH.NUM_SPEC_SAMPLES, self.data
        if mode == "val":
            return BatchSpec(data.val, data.collate, num_samples, self.seed)
        choose = partial(data.on_device.choose, always=True)
        return BatchSpec(data.train, data.collate, num_samples, self.seed, choose)

    def _observer(self, mode: Mode, status: RankStatus) -> SearchProgress:
        """One for all searches of a mode: the bounds are told once, and trials have one count."""
        progress = self._progress.setdefault(mode, SearchProgress(mode, status, self.console))
        progress.status = status
        return progress

    def _bounds(self, mode: Mode, spec: BatchSpec) -> dict[str, int]:
        """Upper bounds of a mode's size beside device memory and MAX_BATCH_SIZE, by name."""
        bounds = max_batch_sizes(
            self.config, self.train, self.data, mode, self.world, tensor_bytes=spec.tensor_bytes
        )
        wanted = self.max_samples_per_rank
        # A bound below the smallest size would end the search; the plan splits the size found instead.
        if (
            mode == "train"
            and wanted is not None
            and wanted >= max(2, self.config.AUTOBATCH.MIN_BATCH_SIZE)
        ):
            bounds["effective_batch"] = wanted
        return bounds


def find_sizes(
    search: SizeSearch, earlier: Mapping[str, int] | None = None
) -> dict[str, AutoBatchResult]:
    """Search each mode that the configuration requires; see `search_on_ranks`. Every rank must call this.

    Args:
        search: the search of this run.
        earlier: by mode, the size in the checkpoint of the run being resumed: it is tried first, and no
            larger one is.

    Raises:
        LinnaeusError: the same on every rank.
    """
    found: dict[str, AutoBatchResult] = {}
    config, modes = search.config.AUTOBATCH, get_args(Mode)
    for mode in (mode for mode in modes if _setting(config, "ENABLED", mode)):
        trained_at = None
        if mode == "val":
            trained_at = found["train"].batch_size if "train" in found else search.config.BATCH_SIZE
        found[mode] = find_size(search, mode, (earlier or {}).get(mode), trained_at)
    search.assembly.metrics.reset()
    return found


def find_size(
    search: SizeSearch, mode: Mode, size: int | None, trained_at: int | None = None
) -> AutoBatchResult:
    """Search one mode; see `find_sizes`. `trained_at` is the training size, for validation."""
    most = _setting(search.config.AUTOBATCH, "MAX_BATCH_SIZE", mode)
    with search.on_ranks(mode, trained_at) as search_all:
        result = search_all(size=None if size is None else min(size, most or size))
        if search.is_sharded:
            status = RankStatus(control=search.world.control)
            make_finder = partial(search.finder, mode, status, trained_at=trained_at, alone=False)
            result = confirm_jointly(
                result,
                make_finder,
                search_all,
                status,
                search.settings(mode),
                agree=mode == "train" and search.wanted is not None,
            )
    if mode == "train" and result.limited_by in ("memory", "max_trials", "timeout", "throughput"):
        is_fast = result.limited_by == "throughput"  # then larger ones may fit
        sizes_run = (trial.size for trial in result.trials if is_fast and trial.status == "fits")
        if (largest := max([result.batch_size, *sizes_run])) < (search.wanted or 0):
            raise TooSmallError(
                f"largest {largest} within {result.budget_bytes / GIB:.2f} GiB", largest
            )
    if size is not None:
        is_kept = result.batch_size == size
        limited_by = "checkpoint" if is_kept else result.limited_by
        result = dataclasses.replace(result, limited_by=limited_by, max_batch_size=most)
        if not is_kept:
            logger.info(
                "AutoBatch %s: the checkpoint's batch size %d cannot be kept; resuming with %d (limited by "
                "%s)",
                mode,
                size,
                result.batch_size,
                limited_by,
            )
    return result


@contextmanager
def log_level(config: AutoBatchConfig, mode: Mode) -> Iterator[bool]:
    """Set the logger to the level of a mode inside the context; the value says if trials are shown."""
    before = logger.level
    logger.setLevel(_setting(config, "LOG_LEVEL", mode))
    try:
        yield logger.isEnabledFor(logging.INFO)
    finally:
        logger.setLevel(before)


def _setting(config: AutoBatchConfig, name: str, mode: Mode) -> Any:
    """Return the value of a key, or of its own key for validation if there is one."""
    value = getattr(config, name)
    return value if mode == "train" else getattr(config, f"{name}_VAL", value)
