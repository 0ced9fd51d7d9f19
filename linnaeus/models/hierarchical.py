"""A backbone and a head for the levels of the taxonomy: independent ones, or one whose levels agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch
import torch.nn.functional as functional
from timm.models._manipulate import group_with_matcher  # `group_parameters` needs a module
from torch import Tensor, nn

from linnaeus.data.taxonomy import UNKNOWN

_BACKBONE = "backbone."
_HEADS = "~"  # a name that no backbone's matcher knows: timm's place for a classifier


class LinearHeads(nn.ModuleList):
    """One linear layer per level, which know nothing of each other."""

    def __init__(self, num_features: int, num_classes: Sequence[int]) -> None:
        super().__init__(nn.Linear(num_features, count) for count in num_classes)

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """Logits [B, num_classes[r]] of each level r, coarse to fine, from features [B, F]."""
        return tuple(head(features) for head in self)


class MarginalHead(nn.Module):
    """One linear layer over the leaves of the taxonomy; a class has the probability of all leaves below it.

    With a softmax over the leaves, p(class) = sum of p(child) over its children holds at every level. A leaf
    is a class without children, at any level. A class whose parent is unknown counts in its own level and in
    no coarser one. With such classes or coarse leaves, the probabilities of a level add up to less than 1.
    The rest belongs to samples without a class at this level.

    `num_classes` lists the number of classes of each level, coarse to fine. `parents` is as in `Taxonomy`.
    """

    def __init__(
        self, num_features: int, num_classes: Sequence[int], parents: Sequence[Sequence[int]]
    ) -> None:
        super().__init__()
        self.num_classes = tuple(num_classes)
        leaves = [
            sorted(set(range(count)) - set(row))
            for count, row in zip(num_classes, parents, strict=False)
        ]
        self.num_leaves = [*map(len, leaves), num_classes[-1]]
        self.leaves = nn.Linear(num_features, sum(self.num_leaves))
        for level, (own, row) in enumerate(zip(leaves, parents, strict=True)):
            below = [num_classes[level] if parent == UNKNOWN else parent for parent in row]
            # Not persistent: they follow from the taxonomy, and a checkpoint needs the weights alone.
            self.register_buffer(f"classes_{level}", torch.tensor([*own, *below]), persistent=False)

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """Log-probabilities [B, C_r] of each level, coarse to fine, from features [B, F].

        They are float32 where the features have fewer bits.
        """
        logits = self.leaves(features)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_probabilities = functional.log_softmax(logits, dim=1, dtype=dtype)
        *coarse_leaves, finest = log_probabilities.split(
            [count for count in self.num_leaves if count], dim=1
        )
        levels = [finest]
        for level in reversed(range(len(self.num_leaves) - 1)):
            has_leaves = self.num_leaves[level] > 0
            members = (
                torch.cat([coarse_leaves.pop(), levels[-1]], dim=1) if has_leaves else levels[-1]
            )
            classes = self.get_buffer(f"classes_{level}")
            levels.append(segment_logsumexp(members, classes, self.num_classes[level]))
        return tuple(reversed(levels))


def segment_logsumexp(values: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """Log of the summed exponentials of each segment, without overflow or underflow.

    `values` are [B, N] and finite, the result is [B, num_segments]. `segments` [N] has the segment of each
    column; `num_segments` leaves it out. Each segment has a column.

    >>> segment_logsumexp(torch.tensor([[0.2, 0.3, 0.5]]).log(), torch.tensor([0, 0, 1]), 2).exp()
    tensor([[0.5000, 0.5000]])
    """
    shape = (values.shape[0], num_segments + 1)  # the last column takes the omitted values
    # A shift by the largest value of each segment, which cancels out: it needs no gradient.
    shift = values.new_full(shape, -inf).scatter_reduce(
        1, segments.expand_as(values), values.detach(), "amax"
    )
    scaled = (values - shift.index_select(1, segments)).exp()
    sums = values.new_zeros(shape).index_add(1, segments, scaled)
    return sums[:, :-1].log() + shift[:, :-1]


class HierarchicalClassifier(nn.Module):
    """A backbone with a head for all levels on its pooled features.

    Args:
        backbone: maps images [B, C, H, W] to pooled features [B, num_features].
        num_classes: number of classes of each level, coarse to fine.
        drop_rate: probability of dropout on the features before the head.
        parents: of a `Taxonomy`, for a `MarginalHead`; None is `LinearHeads`.

    Attributes:
        always_eval: names of the submodules that stay in eval mode, since they are frozen.
        gives_log_probabilities: whether outputs are log-probabilities, to which a sigmoid must not be
            applied, and not logits.
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
        self.gives_log_probabilities = parents is not None

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Logits or log-probabilities [B, num_classes[r]] of each level r, coarse to fine."""
        outputs: tuple[Tensor, ...] = self.heads(self.dropout(self.backbone(images)))
        return outputs

    def train(self, mode: bool = True) -> HierarchicalClassifier:
        """Set the mode of all submodules except `always_eval`."""
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

        The heads are in the last layer. With `coarse`, a stage counts as one layer. An `AttributeError` where
        the backbone does not name its layers.
        """
        matcher: Any = self.backbone.group_matcher(coarse=coarse)  # type: ignore[operator]
        names = [*(name for name, _ in self.backbone.named_parameters()), _HEADS]
        layers = group_with_matcher(((name, None) for name in names), matcher, reverse=True)

        def layer_of(name: str) -> int:
            is_inside = name.startswith(_BACKBONE)
            return int(layers[name.removeprefix(_BACKBONE) if is_inside else _HEADS])

        return layer_of
