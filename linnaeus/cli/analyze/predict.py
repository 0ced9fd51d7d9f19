"""Batch sizes for GPUs that need not be there: both steps traced once, and all sizes from these traces."""

from __future__ import annotations

import itertools
import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace

import torch

from linnaeus.autobatch.finder import smallest_size, upper_bound
from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.predict.gpus import Gpu, device_that_would_do
from linnaeus.autobatch.predict.prediction import MARGIN, Prediction
from linnaeus.autobatch.predict.trace import UntraceableError
from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.search import Candidates
from linnaeus.autobatch.state.sharded import fake_job
from linnaeus.cli.analyze.measure import (
    Setup,
    add_reason,
    run_settings,
    sentence,
    with_variant,
)
from linnaeus.cli.analyze.options import CONFIGURED, AnalyzeOptions
from linnaeus.cli.analyze.results import Analysis, Row
from linnaeus.config.instantiate import is_target
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import AutoBatchError, ConfigError
from linnaeus.size_search.bounds import max_batch_sizes
from linnaeus.size_search.keys import messages_in_keys
from linnaeus.size_search.searches import SizeSearch
from linnaeus.training.sharding import check_sharding, shards_model

logger = logging.getLogger("linnaeus.analysis")

META = torch.device("meta")
LARGEST = 1 << 20
"""No batch is predicted to be larger, unless MAX_BATCH_SIZE allows it."""
GPUS_PER_NODE = 8
"""Of a run of more ranks."""


def predict_sizes(setup: Setup, options: AnalyzeOptions, analysis: Analysis) -> None:
    """Predict the size for each variant, number of ranks, device, mode and fraction."""
    numbers, sharding = options.world_size, setup.config.DIST.SHARDING
    for name in (CONFIGURED, *options.variants):
        try:
            changed = with_variant(setup, name)
            if name == "compile":
                raise ConfigError("compiled models are measured only: leave --predict out")
            for num in numbers:
                _predict_variant(replace(changed, world=world_of(num)), name, options, analysis)
        except Exception as error:
            add_reason(analysis, options, name, error)
    if sharding != "none" and 1 in numbers:
        logger.info(
            "DIST.SHARDING %s with one rank is the same as none; see --world-size", sharding
        )


def _predict_variant(setup: Setup, name: str, options: AnalyzeOptions, analysis: Analysis) -> None:
    """Predict the sizes of one variant with one number of ranks."""
    num, numbers, gpus = setup.world.world_size, options.world_size, options.gpu
    with job_of(setup):
        search = build_on_meta(setup)
        if not analysis.environment:
            analysis.environment = {
                "predicted": True,
                "device_name": ", ".join(gpu.name for gpu in gpus),
                "devices": [asdict(gpu) for gpu in gpus],
                "margin": MARGIN,
                "torch": torch.__version__,
                "world_size": numbers,
                "sharding": setup.config.DIST.SHARDING,
                **run_settings(setup.config.MODEL, search),
            }
            logger.info(
                "predicted, not measured; see docs/prediction.md for the accuracy: %s",
                sentence(analysis.environment),
            )
        if len(numbers) > 1:
            gpus = [replace(gpu, name=f"{num} × {gpu.name}") for gpu in gpus]
        for mode in options.modes:
            setup.status.update(f"{mode}: tracing the step")
            step, reason = None, None
            try:
                step = predicted_step(search, mode)
            except AutoBatchError as error:  # the bounds leave no size
                reason = str(error)
            for gpu, fraction in itertools.product(gpus, options.fractions):
                row = Row(mode, fraction, name, device=gpu.name, reason=reason)
                analysis.rows.append(row)
                if step is not None:
                    fill(row, step, gpu, setup.config.DATA.AUTOBATCH.MEMORY_LIMIT_GB)


def world_of(num: int) -> World:
    """Return the ranks of a run on full nodes."""
    return World(META, world_size=num, local_world_size=min(num, GPUS_PER_NODE))


def job_of(setup: Setup) -> AbstractContextManager[None]:
    """Context with the groups of a sharded model, to build it and to trace its steps.

    Raises:
        ConfigError: `hybrid` has nodes that are not full.
    """
    num, sharding = setup.world.world_size, setup.config.DIST
    if not shards_model(sharding, setup.world):
        return nullcontext()
    if sharding.SHARDING == "hybrid" and num % setup.world.local_world_size:
        raise ConfigError(
            f"--world-size: {num} ranks do not fill nodes of {GPUS_PER_NODE}, which DIST.SHARDING hybrid "
            f"is predicted for; give a multiple of {GPUS_PER_NODE}"
        )
    return fake_job(num)


# A step, without running it.


@dataclass(frozen=True)
class PredictedStep:
    """Prediction of one step, without running it.

    Attributes:
        prediction: its peak at any batch size, without the base of a device.
        candidates: the batch sizes that are allowed, ascending.
        bound: why there is none above the candidates, as in `AutoBatchResult.limited_by`.
    """

    prediction: Prediction
    candidates: Candidates
    bound: str


def build_on_meta(setup: Setup) -> SizeSearch:
    """Return the model and the steps of a run, without data where the model can be built so.

    Weights are not loaded, nothing is compiled, and BatchNorm is not synchronized, which needs a GPU: none
    of that changes the memory that is predicted.

    Raises:
        ConfigError: a node that cannot be built.
    """
    config = setup.config
    check_sharding(config.DIST, config.TRAIN, setup.world)
    if config.TRAIN.COMPILE:
        logger.info("TRAIN.COMPILE is ignored: the prediction is of the step without it")
    model = (
        config.MODEL
        if is_target(config.MODEL)
        else replace(config.MODEL, WEIGHTS=None, PRETRAINED=False)
    )
    train = replace(config.TRAIN, COMPILE=False, SYNC_BATCHNORM=False)
    setup = replace(setup, config=replace(config, MODEL=model, TRAIN=train))
    try:
        with META:
            return setup.search()
    except Exception:  # a model may need numbers while it is built, and a real mistake comes again
        logger.debug("cannot be built on meta", exc_info=True)
        return setup.search()


def predicted_step(search: SizeSearch, mode: Mode) -> PredictedStep:
    """Trace one step of a search from `build_on_meta` at two batch sizes.

    Host memory is no bound, because the device may be in another machine.

    Raises:
        AutoBatchError: the bounds leave no size.
        ConfigError: the step cannot be traced; the message names the operation.
    """
    config, state = search.config.AUTOBATCH, search.assembly.state
    suffix = "" if mode == "train" else "_VAL"
    low, high = (getattr(config, f"{bound}_BATCH_SIZE{suffix}") for bound in ("MIN", "MAX"))
    high = LARGEST if high is None else high
    low = smallest_size(state, mode, low, high)
    tensor_bytes = search.spec(mode).tensor_bytes
    bounds = max_batch_sizes(
        search.config, search.train, search.data, mode, search.world, tensor_bytes=tensor_bytes
    )
    del bounds["host_memory"]
    with messages_in_keys(mode):
        bound, high = upper_bound(mode, low, high, bounds)
    candidates = Candidates(low, high, config.MULTIPLE_OF)
    if not len(candidates):
        raise AutoBatchError(
            f"prediction ({mode}): DATA.AUTOBATCH.MULTIPLE_OF is {config.MULTIPLE_OF}; it has no multiple "
            f"from {low} to {high}"
        )
    try:
        prediction = search.predict(mode)
    except UntraceableError as error:
        raise ConfigError(
            f"--predict: the step ({mode}) cannot be traced without a GPU: {error}. See docs/prediction.md, "
            "or measure it: leave --predict out on a machine with the GPU"
        ) from error
    return PredictedStep(prediction, candidates, bound)


# The sizes that fit.


def fill(row: Row, step: PredictedStep, gpu: Gpu, limit_gb: float | None) -> None:
    """Find the maximum batch size within the row's fraction of its device, with the margin and without.

    They may exceed the results of a search, see `Prediction.largest`. `limit_gb` is MEMORY_LIMIT_GB. If
    nothing fits, the row has the reason.
    """
    prediction = replace(step.prediction, base_bytes=int(gpu.base_mib[0] * 2**20))
    limits = {row.memory: int(row.memory_fraction * gpu.total_bytes)}
    if limit_gb is not None:
        name = f"{row.memory_fraction:.0%} of DATA.AUTOBATCH.MEMORY_LIMIT_GB, {limit_gb:g} GiB"
        limits[name] = prediction.base_bytes + int(row.memory_fraction * limit_gb * GIB)
    origin = min(limits, key=limits.__getitem__)
    row.budget_bytes = budget_bytes = limits[origin]
    row.batch_size = prediction.largest_of(step.candidates, budget_bytes / MARGIN)
    largest = prediction.largest_of(step.candidates, budget_bytes)
    row.size_without_margin = max(filter(None, (largest, row.batch_size)), default=None)
    if row.batch_size is None:
        size = step.candidates[0]
        margin = f", with the margin of {100 * (MARGIN - 1):.3g} %"
        remedy = "raise that limit"
        if origin == row.memory:
            remedy = device_that_would_do(prediction.safe_bytes(size) / row.memory_fraction, margin)
        row.reason = (
            f"prediction ({row.mode}): no batch size fits{margin}. The budget is "
            f"{budget_bytes / GIB:.2f} GiB, {origin}; batch size {size} takes "
            f"{prediction.peak_bytes(size) / GIB:.2f} GiB, including {prediction.base_bytes / GIB:.2f} GiB "
            f"outside the allocator; {remedy}"
        )
        return
    row.limited_by = (
        step.bound if row.batch_size == step.candidates[len(step.candidates) - 1] else "memory"
    )
    row.peak_bytes = prediction.peak_within(row.batch_size, budget_bytes / MARGIN)
