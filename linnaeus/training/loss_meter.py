"""The mean training loss between two log lines, over all ranks."""

from __future__ import annotations

import math

import torch

from linnaeus.dist import World
from linnaeus.errors import LinnaeusError


class LossMeter:
    """Sums the loss on the device and reads it only when asked, so that no step waits for it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._total: torch.Tensor | None = None
        self._count = 0

    def add(self, loss: torch.Tensor) -> None:
        """Add one optimizer step's mean loss."""
        self._total = loss if self._total is None else self._total + loss
        self._count += 1

    def drain(self) -> float:
        """The same as `mean`; the next mean starts after this call."""
        mean = self.mean()
        self._total, self._count = None, 0
        return mean

    def mean(self) -> float:
        """The mean over the steps since the last `drain` and over all ranks; NaN without steps.

        Every rank must call this.

        Raises:
            LinnaeusError: the loss is not finite.
        """
        if self._total is None:
            return math.nan
        mean = float(self._world.mean(self._total / self._count))
        if not math.isfinite(mean):
            raise LinnaeusError(
                f"the training loss is {mean}. Lower OPTIMIZER.LR, raise SCHEDULE.WARMUP_EPOCHS, set "
                "TRAIN.CLIP_GRAD_NORM, or use TRAIN.AMP bf16 or off; the last checkpoint is kept"
            )
        return mean
