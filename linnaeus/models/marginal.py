"""A head whose probabilities agree from coarse to fine: coarse ones are sums over the classes below."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from linnaeus.data.taxonomy import UNKNOWN


class MarginalHead(nn.Module):
    """One linear layer over the leaves of the taxonomy; a class has the probability of all leaves below it.

    With a softmax over the leaves, p(class) = sum of p(child) over its children holds at every level, and a
    label of a coarse class alone trains all leaves below it. A leaf is a class without children: every class
    of the finest level, and coarser ones below which the taxonomy has nothing. A class whose parent is
    unknown lies below none of the named classes: it counts in its own level and in no coarser one. Where
    there are such classes or coarse leaves, the probabilities of a level add up to less than 1; the rest is
    that of samples that have no class at this level.

    Args:
        num_features: F, number of features.
        num_classes: number of classes C_r of each of R levels, coarse to fine.
        parents: for each level after the first, the label of each class's parent in the level above, or
            `UNKNOWN`.
    """

    gives_log_probabilities = True

    def __init__(
        self, num_features: int, num_classes: Sequence[int], parents: Sequence[Sequence[int]]
    ) -> None:
        super().__init__()
        self.num_classes = tuple(num_classes)
        leaves = [
            sorted(set(range(count)) - set(row)) for count, row in zip(num_classes, parents, strict=False)
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
        *coarse_leaves, finest = log_probabilities.split([count for count in self.num_leaves if count], dim=1)
        levels = [finest]
        for level in reversed(range(len(self.num_leaves) - 1)):
            has_leaves = self.num_leaves[level] > 0
            members = torch.cat([coarse_leaves.pop(), levels[-1]], dim=1) if has_leaves else levels[-1]
            classes = self.get_buffer(f"classes_{level}")
            levels.append(segment_logsumexp(members, classes, self.num_classes[level]))
        return tuple(reversed(levels))


def segment_logsumexp(values: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """Log of the summed exponentials of each segment, without overflow or underflow.

    Args:
        values: [B, N], finite.
        segments: [N], the segment of each column; `num_segments` leaves it out. Each segment has a column.
        num_segments: S.

    Returns:
        [B, S].

    >>> segment_logsumexp(torch.tensor([[0.2, 0.3, 0.5]]).log(), torch.tensor([0, 0, 1]), 2).exp()
    tensor([[0.5000, 0.5000]])
    """
    shape = (values.shape[0], num_segments + 1)  # the last column takes what is left out
    # A shift by the largest value of each segment, which cancels out: it needs no gradient.
    shift = values.new_full(shape, -inf).scatter_reduce(
        1, segments.expand_as(values), values.detach(), "amax"
    )
    scaled = (values - shift.index_select(1, segments)).exp()
    sums = values.new_zeros(shape).index_add(1, segments, scaled)
    return sums[:, :-1].log() + shift[:, :-1]
