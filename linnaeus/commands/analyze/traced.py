"""The run's training and validation step, traced on `meta`: predictions of their memory without a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linnaeus.autobatch.bounds import max_batch_sizes
from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.search import Candidates
from linnaeus.autobatch.sizes import SizeSearch, keys
from linnaeus.batching.sizes import micro_batches_held
from linnaeus.commands.analyze.breakdown import counting
from linnaeus.commands.session import Setup
from linnaeus.config.instantiate import is_target
from linnaeus.data.batch import Batch, BatchSpec
from linnaeus.errors import AutoBatchError, LinnaeusError
from linnaeus.memory.predict import BATCH_SIZES, Prediction
from linnaeus.memory.trace import Buckets, Trace, UntraceableError, trace
from linnaeus.models.build import batchnorm_kind
from linnaeus.training.losses import logits_per_level
from linnaeus.training.metrics import ClassificationMetrics
from linnaeus.training.noise_scale import GradientProbe
from linnaeus.training.state_bytes import StateBytes

logger = logging.getLogger("linnaeus.analysis")

META = torch.device("meta")
SAMPLES_BEFORE = 2
"""Samples of the training step before validation: its state does not depend on them, and BatchNorm takes no
single one."""
TOP5_BYTES = 20
"""Bytes for each sample and class that top-5 accuracy of torchmetrics holds at its peak: one-hot labels and
predictions. Counted from its tensors on the CPU."""


@dataclass(frozen=True)
class PredictedStep:
    """What is known of one step without running it.

    Attributes:
        mode: which step.
        prediction: its peak at any batch size, the base of the device included.
        state: the tensors that it keeps.
        candidates: the batch sizes that are allowed, ascending.
        bound: why there is none above them, as in `AutoBatchResult.limited_by`.
    """

    mode: Mode
    prediction: Prediction
    state: StateBytes
    candidates: list[int]
    bound: str


def build_on_meta(setup: Setup) -> SizeSearch:
    """The model and the steps of a run, without data where the model can be built so.

    Weights are not loaded and nothing is compiled: neither changes the memory that is predicted.

    Raises:
        ConfigError: a node that cannot be built.
    """
    config = setup.config
    if config.TRAIN.COMPILE:
        logger.info("TRAIN.COMPILE is left out: what is predicted is the step without it")
    model = config.MODEL if is_target(config.MODEL) else replace(config.MODEL, WEIGHTS=None)
    train = replace(config.TRAIN, COMPILE=False)
    setup = replace(setup, config=replace(config, MODEL=model, TRAIN=train))
    try:
        with META:
            return setup.search()
    except Exception:  # a model may need numbers while it is built, and a real mistake comes again
        logger.debug("cannot be built on meta", exc_info=True)
        return setup.search()


def predict_step(search: SizeSearch, mode: Mode, base_bytes: int) -> PredictedStep:
    """Trace one step at two batch sizes.

    Args:
        search: from `build_on_meta`.
        mode: which step.
        base_bytes: in use on the device beside the allocator.

    Raises:
        AutoBatchError: the bounds leave no size.
        LinnaeusError: the step cannot be traced; the message names the operation.
    """
    spec = _spec(search, mode)
    bound, candidates = _candidates(search, mode, spec)
    try:
        with counting(search.assembly, META) as state:
            traces = _trace_training(search, spec) if mode == "train" else _trace_validation(search, spec)
        prediction = Prediction.of(*traces, base_bytes=base_bytes)
        prediction.check_paired()
    except UntraceableError as error:
        name = {"train": "training", "val": "validation"}[mode]
        raise LinnaeusError(
            f"--predict: the {name} step cannot be traced without a GPU: {error}. Measure it instead: leave "
            "--predict out on a machine with the GPU"
        ) from error
    return PredictedStep(mode, prediction, state, candidates, bound)


def _trace_training(search: SizeSearch, spec: BatchSpec) -> Sequence[Trace]:
    step = _TrainingStep(search, spec)
    search.assembly.model.train()
    search.assembly.criterion.train()
    return [
        trace(step, int, size, state=search.assembly.state, buckets=_buckets(search)) for size in BATCH_SIZES
    ]


def _trace_validation(search: SizeSearch, spec: BatchSpec) -> Sequence[Trace]:
    """With everything that training keeps allocated, as in a run."""
    assembly = search.assembly
    train = _TrainingStep(search, _spec(search, "train"))
    validate = replace(assembly.validation_step, update_metrics=MetricsMemory(assembly.metrics))

    def before() -> None:
        assembly.model.train()
        assembly.criterion.train()
        train(SAMPLES_BEFORE)
        assembly.model.eval()
        assembly.criterion.eval()

    def step(size: int) -> None:
        validate(_batch(search, spec, size))

    state, buckets = assembly.state, _buckets(search)
    return [trace(step, int, size, state=state, buckets=buckets, before=before) for size in BATCH_SIZES]


class _TrainingStep:
    """One optimizer step at a micro-batch size, as a trial of the batch-size search runs it."""

    def __init__(self, search: SizeSearch, spec: BatchSpec) -> None:
        self._search, self._spec = search, spec
        self._num_micro_batches = micro_batches_held(search.train)
        step, noise_scale = search.assembly.train_step, search.train.NOISE_SCALE
        self._probe = (
            GradientProbe(step.model, step.scaler, decay=noise_scale.DECAY) if noise_scale.ENABLED else None
        )
        self._step = replace(step, probe=self._probe)

    def __call__(self, size: int) -> None:
        if self._probe is not None:
            self._probe.arm()  # a step that measures needs more memory than others
        self._step(self._batches(size), self._num_micro_batches)

    def _batches(self, size: int) -> Iterator[Batch]:
        """Each is made when it is asked for: as in training, only one exists at a time."""
        return (_batch(self._search, self._spec, size) for _ in range(self._num_micro_batches))


class MetricsMemory:
    """Holds what the metrics of a validation batch hold; torchmetrics itself looks at values.

    Args:
        metrics: those of the run.
    """

    def __init__(self, metrics: ClassificationMetrics) -> None:
        self._names, self._top5 = metrics.level_names, metrics.top5

    def __call__(self, outputs: Any, targets: Any, loss: Tensor) -> None:
        """Allocate and release it for one batch; arguments as for `ClassificationMetrics.update`."""
        if not self._names:
            return
        for level, logits in enumerate(logits_per_level(outputs, self._names)):
            logits.argmax(dim=1)
            if level in self._top5:
                torch.empty(TOP5_BYTES * logits.numel(), dtype=torch.uint8, device=logits.device)


def _batch(search: SizeSearch, spec: BatchSpec, size: int) -> Batch:
    return spec.make(size, META, channels_last=search.train.CHANNELS_LAST)


def _spec(search: SizeSearch, mode: Mode) -> BatchSpec:
    data = search.data
    dataset = data.train if mode == "train" else data.val
    return BatchSpec.from_dataset(
        dataset, data.collate, search.config.AUTOBATCH.NUM_SPEC_SAMPLES, search.seed
    )


def _buckets(search: SizeSearch) -> Buckets | None:
    """Those of the wrapper that `linnaeus.dist.wrap` makes."""
    return Buckets(as_view=True) if search.world.is_distributed else None


def _candidates(search: SizeSearch, mode: Mode, spec: BatchSpec) -> tuple[str, list[int]]:
    """The sizes that a search on the device may try, and what bounds them.

    Host memory bounds nothing here: that of this machine need not be that of the device's.
    """
    config, names = search.config.AUTOBATCH, keys(mode)
    suffix = "" if mode == "train" else "_VAL"
    low, high = (getattr(config, f"{bound}_BATCH_SIZE{suffix}") for bound in ("MIN", "MAX"))
    if mode == "train" and batchnorm_kind(search.assembly.model) != "none":
        low = max(low, min(2, high))
    of_data = max_batch_sizes(search.config, search.data, mode, search.world, tensor_bytes=spec.tensor_bytes)
    bounds = {"max_batch_size": high, "dataset": of_data["dataset"]}
    bound = min(bounds, key=lambda name: bounds[name])
    candidates = list(Candidates(low, bounds[bound], config.MULTIPLE_OF))
    if not candidates:
        what = names.max_batch_size if bound == "max_batch_size" else bound
        raise AutoBatchError(
            f"prediction ({mode}): {names.min_batch_size} is {low}, but {what} allows no more than "
            f"{bounds[bound]}"
        )
    return bound, candidates
