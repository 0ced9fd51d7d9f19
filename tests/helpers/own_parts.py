"""What a user writes: a dataset and a model of their own."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset


class Points(Dataset[tuple[torch.Tensor, int]]):
    """Points in the plane, labelled by their quadrant."""

    classes = ("I", "II", "III", "IV")

    def __init__(self, split: str, length: int = 64) -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.points = torch.randn(length, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x, y = (self.points[index] > 0).long().tolist()
        return self.points[index], 2 * x + y


class Perceptron(nn.Sequential):
    """Takes what the framework offers by name."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, num_classes))
