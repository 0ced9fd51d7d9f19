"""A backbone and one linear head per rank of the taxonomy."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class HierarchicalClassifier(nn.Module):
    """One linear head per rank on the backbone's pooled features.

    Args:
        backbone: from images [B, C, H, W] to pooled features [B, F].
        num_features: F.
        num_classes: classes of each rank, coarse to fine.
        drop_rate: dropout on the features before the heads.
    """

    def __init__(
        self, backbone: nn.Module, num_features: int, num_classes: Sequence[int], drop_rate: float = 0.0
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.dropout = nn.Dropout(drop_rate)
        self.heads = nn.ModuleList(nn.Linear(num_features, count) for count in num_classes)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Logits [B, num_classes[r]] of each rank r, coarse to fine."""
        features = self.dropout(self.backbone(images))
        return tuple(head(features) for head in self.heads)
