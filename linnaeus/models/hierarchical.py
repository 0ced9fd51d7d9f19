"""A backbone and one linear head per level of the taxonomy."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class HierarchicalClassifier(nn.Module):
    """A backbone with one linear head per level on its pooled features.

    Args:
        backbone: maps images [B, C, H, W] to pooled features [B, F].
        num_features: F.
        num_classes: number of classes of each level, coarse to fine.
        drop_rate: probability of dropout on the features before the heads.
    """

    def __init__(
        self, backbone: nn.Module, num_features: int, num_classes: Sequence[int], drop_rate: float = 0.0
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.dropout = nn.Dropout(drop_rate)
        self.heads = nn.ModuleList(nn.Linear(num_features, count) for count in num_classes)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Logits [B, num_classes[r]] of each level r, coarse to fine."""
        features = self.dropout(self.backbone(images))
        return tuple(head(features) for head in self.heads)
