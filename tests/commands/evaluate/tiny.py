"""A model that trains in milliseconds, for runs of the tests."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


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
