"""Where a search starts on a CUDA device: at the size that a trace of the step predicts."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from linnaeus.autobatch import nest
from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.trial import step_with_zero_gradients

if TYPE_CHECKING:
    from linnaeus.autobatch.predict.prediction import Prediction
    from linnaeus.autobatch.predict.trace import Buckets

START_FRACTION = 0.94
"""Fraction of the budget that the first size is predicted to need: a trial above the budget leaves no peak,
so that the search goes on as if there had been no prediction."""

logger = logging.getLogger("linnaeus.autobatch")


def predict_step(
    step: Callable[[Any], object],
    make_batch: Callable[[int], Any],
    *,
    state: Sequence[Any],
    mode: Mode,
    train_once: Callable[[], object] | None = None,
    buckets: Buckets | None = None,
    base_bytes: int | None = 0,
) -> Prediction:
    """Trace a step in the state that its trials run in, and predict its peak.

    Args:
        mode: `train`, or `val`, where the state of the optimizers is allocated too.
        train_once: runs one training step before validation, as for `BatchSizeFinder`.
        buckets: of DistributedDataParallel.
        base_bytes: in use beside the allocator; None measures it, or assumes it where there is no device.

    Raises:
        UntraceableError: names the operation that needs values, or the step differs at another batch size.
    """
    from linnaeus.autobatch.predict.prediction import predict  # it imports much of torch

    modules = [part for part in state if isinstance(part, nn.Module)]

    def prepare() -> None:
        if mode == "val":
            for module in modules:
                module.train()
            if train_once is not None:
                train_once()
            for part in state:
                if isinstance(part, torch.optim.Optimizer):
                    step_with_zero_gradients(part, lambda error: False)
        for module in modules:
            module.train(mode == "train")

    return predict(
        step, make_batch, state=state, buckets=buckets, base_bytes=base_bytes, before=prepare
    )


def moments_bytes(state: Sequence[Any]) -> int:
    """Bytes that the state of the optimizers takes."""
    optimizers = (part for part in state if isinstance(part, torch.optim.Optimizer))
    values = (entry for part in optimizers for entry in getattr(part, "state", {}).values())
    return nest.num_bytes(list(values))


def traced(trace: Callable[[], Prediction], mode: Mode) -> tuple[Prediction | None, float]:
    """The prediction of a step for the allocator alone, None where it fails, and the seconds it took."""
    began, found = time.monotonic(), None
    try:
        found = trace()
        if found.is_constant:
            raise ValueError("more samples are to need no more memory")
    except Exception as error:  # of the caller's step too, which runs without its device here
        found = None
        reason = str(error).partition("\n")[0] or type(error).__name__
        logger.info("AutoBatch %s: no prediction, the search starts without one: %s", mode, reason)
        logger.debug("%s", "".join(traceback.format_exception(error)))
    return found, time.monotonic() - began
