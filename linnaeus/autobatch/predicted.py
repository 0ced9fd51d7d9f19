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
from linnaeus.autobatch.result import Mode, PredictedStart
from linnaeus.autobatch.search import PredictedPoint
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
        step, make_batch, state: as for `auto_find_batch_size`.
        mode: `train`, or `val`, where the state of the optimizers is allocated too.
        train_once: runs one training step before validation, as for `BatchSizeFinder`.
        buckets: of DistributedDataParallel.
        base_bytes: in use beside the allocator; None measures it, or assumes it where there is no device.

    Raises:
        UntraceableError: names the operation that needs values, or the step differs at another batch size.
    """
    from linnaeus.autobatch.predict.prediction import (
        predict,  # it imports more of torch than a search without it needs
    )

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

    return predict(step, make_batch, state=state, buckets=buckets, base_bytes=base_bytes, before=prepare)


def moments_bytes(state: Sequence[Any]) -> int:
    """Bytes that the state of the optimizers takes."""
    optimizers = (part for part in state if isinstance(part, torch.optim.Optimizer))
    values = (entry for part in optimizers for entry in getattr(part, "state", {}).values())
    return sum(tensor.nbytes for entry in values for tensor in nest.tensors(entry))


class StartPredictor:
    """Predicts where the searches of one finder start. The step is traced once, when the first search asks.

    The trace leaves random number generators as they were.

    Args:
        trace: gives the prediction for the allocator alone; None predicts nothing.
        mode: begins the log line.
    """

    def __init__(self, trace: Callable[[], Prediction] | None, mode: Mode) -> None:
        self._trace = trace
        self._mode = mode
        self._seconds = 0.0
        self._prediction: Prediction | None = None

    def start(
        self, budget_bytes: int, other_bytes: int, min_size: int, max_size: int
    ) -> PredictedStart | None:
        """The size to try first, and the slope there; None without a prediction, or if nothing is to fit.

        Args:
            budget_bytes: what the process may hold on the device.
            other_bytes: what it holds beside the state of the step.
            min_size, max_size: bounds of the search.
        """
        if (prediction := self._predicted()) is None:
            return None
        limit_bytes = int(START_FRACTION * budget_bytes) - other_bytes
        size = prediction.largest(limit_bytes, smallest=min_size, largest=max_size)
        if size is None:
            return None
        slope = max(prediction.slope(size), 0.0)
        return PredictedStart(size, slope, other_bytes, round(self._seconds, 3))

    def point(self, start: PredictedStart) -> PredictedPoint | None:
        """What `start` says, for `find_largest`; None if a sample more is to need no memory."""
        peak_bytes = self.peak_bytes(start.batch_size, start.other_bytes)
        if peak_bytes is None or not start.bytes_per_sample:
            return None
        return PredictedPoint(start.batch_size, peak_bytes, start.bytes_per_sample)

    def peak_bytes(self, size: int, other_bytes: int) -> int | None:
        """What the process is predicted to hold at its peak; None where no search has asked for a start."""
        prediction = self._prediction
        return None if prediction is None else prediction.reserved_bytes(size) + other_bytes

    def _predicted(self) -> Prediction | None:
        if self._trace is None:
            return self._prediction
        trace, self._trace = self._trace, None
        began = time.monotonic()
        try:
            found = trace()
            if found.is_constant:
                raise ValueError("more samples are to need no more memory")
            self._prediction = found
        except Exception as error:  # of the caller's step too, which runs without its device here
            reason = str(error).partition("\n")[0] or type(error).__name__
            logger.info("AutoBatch %s: no prediction, the search starts without one: %s", self._mode, reason)
            logger.debug("%s", "".join(traceback.format_exception(error)))
        self._seconds = time.monotonic() - began
        return self._prediction
