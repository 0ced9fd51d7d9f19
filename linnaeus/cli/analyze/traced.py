"""The run's training and validation step, traced on `meta`: predictions of their memory without a GPU."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from linnaeus.autobatch.finder import smallest_size, upper_bound
from linnaeus.autobatch.predict.prediction import Prediction
from linnaeus.autobatch.predict.trace import UntraceableError
from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.search import Candidates
from linnaeus.cli.analyze.breakdown import counting
from linnaeus.cli.session import Setup
from linnaeus.config.instantiate import is_target
from linnaeus.data.bundle import dataset_length
from linnaeus.errors import AutoBatchError, ConfigError
from linnaeus.sizing.bounds import max_batch_sizes
from linnaeus.sizing.sizes import SizeSearch, keys
from linnaeus.training.state_bytes import StateBytes
from linnaeus.words import counted

logger = logging.getLogger("linnaeus.analysis")

META = torch.device("meta")
CAUSES = (
    "What commonly needs values: logging or printing of them (`.item()`, f-strings), checks such as "
    "`torch.isnan(x).any()` in an `if`, `clip_grad_norm_(error_if_nonfinite=True)`, and boolean masks "
    "(`x[x > 0]`)."
)
LARGEST = 1 << 20
"""No batch is predicted to be larger, unless the bounds allow it."""


@dataclass(frozen=True)
class PredictedStep:
    """What is known of one step without running it.

    Attributes:
        mode: which step.
        prediction: its peak at any batch size, the base of the device included.
        state: the tensors that it keeps.
        candidates: the batch sizes that are allowed, ascending.
        all_sizes: those that would be allowed without bounds: from the smallest that runs to `LARGEST`.
        multiple_of: what both are multiples of.
        bound: why there is none above the candidates, as in `AutoBatchResult.limited_by`.
        data: the samples of one process, for people.
        has_buckets: whether the gradients are views of buckets of DistributedDataParallel.
    """

    mode: Mode
    prediction: Prediction
    state: StateBytes
    candidates: Candidates
    all_sizes: Candidates
    multiple_of: int
    bound: str
    data: str
    has_buckets: bool


def build_on_meta(setup: Setup) -> SizeSearch:
    """The model and the steps of a run, without data where the model can be built so.

    Weights are not loaded and nothing is compiled: neither changes the memory that is predicted.

    Raises:
        ConfigError: a node that cannot be built.
    """
    config = setup.config
    if config.TRAIN.COMPILE:
        logger.info("TRAIN.COMPILE is left out: what is predicted is the step without it")
    model = config.MODEL if is_target(config.MODEL) else replace(config.MODEL, WEIGHTS=None, PRETRAINED=False)
    train = replace(config.TRAIN, COMPILE=False)
    setup = replace(setup, config=replace(config, MODEL=model, TRAIN=train))
    try:
        with META:
            return setup.search()
    except Exception:  # a model may need numbers while it is built, and a real mistake comes again
        logger.debug("cannot be built on meta", exc_info=True)
        return setup.search()


def predicted_step(search: SizeSearch, mode: Mode, base_bytes: int) -> PredictedStep:
    """Trace one step at two batch sizes.

    Args:
        search: from `build_on_meta`.
        mode: which step.
        base_bytes: in use on the device beside the allocator.

    Raises:
        AutoBatchError: the bounds leave no size.
        ConfigError: the step cannot be traced; the message names the operation.
    """
    bound, candidates = _candidates(search, mode)
    multiple_of = search.config.AUTOBATCH.MULTIPLE_OF
    largest = max(candidates[len(candidates) - 1], LARGEST)
    smallest = smallest_size(search.assembly.state, mode, 1, largest)
    all_sizes = Candidates(smallest, largest, multiple_of)
    try:
        with counting(search.assembly, META) as state:
            prediction = search.predict(mode, base_bytes)
    except UntraceableError as error:
        name = {"train": "training", "val": "validation"}[mode]
        raise ConfigError(
            f"--predict: the {name} step cannot be traced without a GPU: {error}. {CAUSES} "
            "Measure it instead: leave --predict out on a machine with the GPU"
        ) from error
    return PredictedStep(
        mode, prediction, state, candidates, all_sizes, multiple_of, bound, _samples(search, mode),
        search.world.is_distributed,
    )  # fmt: skip


def _samples(search: SizeSearch, mode: Mode) -> str:
    """The samples of one process, for people: `31 samples, 62 / 2 processes`."""
    dataset, suffix = (search.data.train, "") if mode == "train" else (search.data.val, "_VAL")
    total, num = dataset_length(dataset), search.world.world_size
    own = total // num if mode == "train" else -(-total // num)
    text = counted(own, "sample") + ("" if num == 1 else f", {total} / {num} processes")
    node = search.config.DATASET
    is_synthetic = not is_target(node) and node.NAME == "synthetic"
    return text + (f" (DATA.DATASET.NUM_SAMPLES{suffix})" if is_synthetic else "")


def _candidates(search: SizeSearch, mode: Mode) -> tuple[str, Candidates]:
    """The sizes that a search on the device may try, and what bounds them.

    Host memory bounds nothing here: that of this machine need not be that of the device's.
    """
    config = search.config.AUTOBATCH
    suffix = "" if mode == "train" else "_VAL"
    low, high = (getattr(config, f"{bound}_BATCH_SIZE{suffix}") for bound in ("MIN", "MAX"))
    low = smallest_size(search.assembly.state, mode, low, high)
    spec = search.spec(mode)
    of_data = max_batch_sizes(search.config, search.data, mode, search.world, tensor_bytes=spec.tensor_bytes)
    bound, high = upper_bound(mode, low, high, {"dataset": of_data["dataset"]}, keys(mode))
    candidates = Candidates(low, high, config.MULTIPLE_OF)
    if not len(candidates):
        raise AutoBatchError(
            f"prediction ({mode}): DATA.AUTOBATCH.MULTIPLE_OF is {config.MULTIPLE_OF}; it has no multiple "
            f"from {low} to {high}"
        )
    return bound, candidates
