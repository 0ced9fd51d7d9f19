"""A backbone and a head for the levels of the taxonomy."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from linnaeus.models.marginal import MarginalHead


class LinearHeads(nn.ModuleList):
    """One linear layer per level, which know nothing of each other.

    Args:
        num_features: F, number of features.
        num_classes: number of classes of each level, coarse to fine.
    """

    gives_log_probabilities = False

    def __init__(self, num_features: int, num_classes: Sequence[int]) -> None:
        super().__init__(nn.Linear(num_features, count) for count in num_classes)

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """Logits [B, num_classes[r]] of each level r, coarse to fine, from features [B, F]."""
        return tuple(head(features) for head in self)


class HierarchicalClassifier(nn.Module):
    """A backbone with a head for all levels on its pooled features.

    Args:
        backbone: maps images [B, C, H, W] to pooled features [B, F].
        num_features: F.
        num_classes: number of classes of each level, coarse to fine.
        drop_rate: probability of dropout on the features before the head.
        parents: of a `Taxonomy`, for a `MarginalHead`; None is `LinearHeads`.
    """

    def __init__(
        self,
        backbone: nn.Module,
        num_features: int,
        num_classes: Sequence[int],
        drop_rate: float = 0.0,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.dropout = nn.Dropout(drop_rate)
        self.heads: LinearHeads | MarginalHead = (
            LinearHeads(num_features, num_classes)
            if parents is None
            else MarginalHead(num_features, num_classes, parents)
        )

    @property
    def gives_log_probabilities(self) -> bool:
        """Whether outputs are log-probabilities, to which a sigmoid must not be applied, and not logits."""
        return self.heads.gives_log_probabilities

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Logits or log-probabilities [B, num_classes[r]] of each level r, coarse to fine."""
        outputs: tuple[Tensor, ...] = self.heads(self.dropout(self.backbone(images)))
        return outputs
