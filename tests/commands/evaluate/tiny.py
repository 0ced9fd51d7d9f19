"""Models and data that train in milliseconds, for runs of the tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class HungryNet(nn.Module):
    """A model that runs out of memory with more than 30 samples, or rows of pixels, when it is evaluated."""

    def __init__(self, num_classes: Mapping[str, int], in_chans: int) -> None:
        super().__init__()
        self.inner = TinyNet(num_classes, in_chans)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Logits of each rank."""
        if not torch.is_grad_enabled() and (len(images) > 30 or images.shape[2] > 30):
            torch.empty(2**62, dtype=torch.uint8)
        outputs: tuple[Tensor, ...] = self.inner(images)
        return outputs


class Wolves(Dataset[Any]):
    """Tensors of wolves and of foxes, for runs with the rank `level2`."""

    taxonomy: Mapping[str, list[str]] = {"level2": ["wolf", "fox"]}

    def __init__(self, split: str, *, num_samples: int = 4) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(3, 8, 8), index % 2


class Pairs(Dataset[Any]):
    """Vectors and their doubles, without classes."""

    def __init__(self, split: str) -> None:
        self.values = torch.arange(24.0).view(8, 3) / (24 if split == "train" else 20)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.values[index], 2 * self.values[index]


class TinyNet(nn.Module):
    """A convolution, BatchNorm and a linear layer for each rank, on images of any size.

    Args:
        num_classes: of each rank, or of the only one.
        in_chans: channels of an image.
    """

    def __init__(self, num_classes: Mapping[str, int] | int, in_chans: int) -> None:
        super().__init__()
        counts = [num_classes] if isinstance(num_classes, int) else list(num_classes.values())
        self.features = nn.Sequential(
            nn.Conv2d(in_chans, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )  # fmt: skip
        self.heads = nn.ModuleList(nn.Linear(32, count) for count in counts)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Logits of each rank."""
        features = self.features(images)
        return tuple(head(features) for head in self.heads)
