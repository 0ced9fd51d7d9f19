"""Number format and memory format of a run: `TRAIN.AMP` and `TRAIN.CHANNELS_LAST`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from linnaeus.config.schema import TrainConfig
from linnaeus.data.batch import Batch, to_device

AUTOCAST_DTYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Number format of the forward pass by the value of `TRAIN.AMP`; None for no autocast."""


@dataclass(frozen=True)
class Precision:
    """Number format and memory format of the forward pass.

    Attributes:
        autocast_dtype: bfloat16, float16, or None for no autocast.
        channels_last: whether the model gets images in channels-last memory format.
    """

    device: torch.device
    autocast_dtype: torch.dtype | None = None
    channels_last: bool = False

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which to compute the forward pass and the loss."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype)

    def place(self, batch: Batch) -> Batch:
        """Move a batch to the device, in the model's memory format."""
        return to_device(batch, self.device, non_blocking=True, channels_last=self.channels_last)


def build_precision(config: TrainConfig, device: torch.device) -> Precision:
    """Number format and memory format of the steps, from the TRAIN node."""
    return Precision(device, AUTOCAST_DTYPES[config.AMP], channels_last=config.CHANNELS_LAST)
