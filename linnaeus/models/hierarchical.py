"""A backbone and a head for the levels of the taxonomy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from timm.models._manipulate import group_with_matcher
from torch import Tensor, nn

from linnaeus.models.marginal import MarginalHead

_BACKBONE = "backbone."
_HEADS = "~"  # a name that no backbone's matcher knows: timm's place for a classifier


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

    Attributes:
        always_eval: names of the submodules that stay in eval mode, since they are frozen.
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
        self.always_eval: tuple[str, ...] = ()

    @property
    def gives_log_probabilities(self) -> bool:
        """Whether outputs are log-probabilities, to which a sigmoid must not be applied, and not logits."""
        return self.heads.gives_log_probabilities

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Logits or log-probabilities [B, num_classes[r]] of each level r, coarse to fine."""
        outputs: tuple[Tensor, ...] = self.heads(self.dropout(self.backbone(images)))
        return outputs

    def train(self, mode: bool = True) -> HierarchicalClassifier:
        """Set the mode of all submodules but those of `always_eval`."""
        super().train(mode)
        for name in self.always_eval:
            self.get_submodule(name).eval()
        return self

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm's optimizers do not decay, beside biases and norms: the backbone's own."""
        names: Callable[[], set[str]] = getattr(self.backbone, "no_weight_decay", set)
        return {f"{_BACKBONE}{name}" for name in names()}

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """The layer of each parameter, from the first to the last, for timm's layer-wise learning rates.

        The heads are in the last layer, where timm has its own classifier.

        Args:
            coarse: whether a stage counts as one layer.

        Raises:
            AttributeError: the backbone does not say what its layers are.
        """
        matcher: Any = self.backbone.group_matcher(coarse=coarse)  # type: ignore[operator]
        names = [*(name for name, _ in self.backbone.named_parameters()), _HEADS]
        layers = group_with_matcher(((name, None) for name in names), matcher, reverse=True)

        def layer_of(name: str) -> int:
            is_inside = name.startswith(_BACKBONE)
            return int(layers[name.removeprefix(_BACKBONE) if is_inside else _HEADS])

        return layer_of
