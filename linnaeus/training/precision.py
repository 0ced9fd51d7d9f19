"""Number format and memory format of a run: `TRAIN.AMP` and `TRAIN.CHANNELS_LAST`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from linnaeus.autobatch import nest
from linnaeus.config.schema import TrainConfig
from linnaeus.data.batch import Batch, is_image_batch, to_device
from linnaeus.data.mixing import DeviceTransform

AUTOCAST_DTYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Number format of the forward pass by the value of `TRAIN.AMP`; None for no autocast."""


@dataclass(frozen=True)
class Precision:
    """Number format and memory format of the forward pass.

    Attributes:
        autocast_dtype: bfloat16, float16, or None for no autocast.
        channels_last: whether the model gets images in channels-last memory format.
        transform: makes inputs and targets of a batch.
    """

    device: torch.device
    autocast_dtype: torch.dtype | None = None
    channels_last: bool = False
    transform: DeviceTransform = field(default_factory=DeviceTransform)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which to compute the forward pass and the loss."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype)

    def place(self, batch: Batch) -> tuple[Any, Any]:
        """Inputs and targets of a batch, on the device and in the model's memory format."""
        if self.device.type != "cpu":
            batch = to_device(batch, self.device, non_blocking=True)
        inputs, targets = self.transform(batch)
        if self.channels_last:
            inputs = nest.map_leaves(
                lambda leaf: (
                    leaf.contiguous(memory_format=torch.channels_last)
                    if is_image_batch(leaf)
                    else leaf
                ),
                inputs,
            )
        return inputs, targets


def build_precision(
    config: TrainConfig, device: torch.device, transform: DeviceTransform
) -> Precision:
    """Number format and memory format of the steps, from the TRAIN node."""
    return Precision(device, AUTOCAST_DTYPES[config.AMP], config.CHANNELS_LAST, transform)
