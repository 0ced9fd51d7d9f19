"""Validation metrics over all processes: accuracy per taxonomic rank, and agreement with the taxonomy.

In names and comments here, `rank` means taxonomic rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from linnaeus.data.batch import Batch, batch_size
from linnaeus.data.taxonomy import Taxonomy
from linnaeus.training.losses import UNKNOWN, logits_per_rank


class ClassificationMetrics(nn.Module):
    """Loss, accuracy per rank and taxonomic consistency over a validation pass.

    `top1/<rank>` and `top5/<rank>` (for ranks with more than five classes) are fractions of the samples whose
    label is known at that rank. `consistent` is the fraction of samples where each predicted class is a child
    of the class predicted one rank above. Samples with a predicted class of unknown parent are not counted;
    if a rank has no known parents, the metric is left out.

    Args:
        taxonomy: ranks and parents; None computes the loss only.
    """

    def __init__(self, taxonomy: Taxonomy | None) -> None:
        super().__init__()
        self.loss = MeanMetric(nan_strategy=math.nan)  # by default NaN would be ignored
        self.rank_names = [] if taxonomy is None else list(taxonomy.names)
        counts = [] if taxonomy is None else list(taxonomy.num_classes.values())
        self.top1 = [_accuracy(count, 1) for count in counts]
        self.top5 = {rank: _accuracy(count, 5) for rank, count in enumerate(counts) if count > 5}
        # Registered as submodules too, so that `to(device)` moves them.
        self._accuracies = nn.ModuleList([*self.top1, *self.top5.values()])
        self.consistent = MeanMetric()
        self._parents: Sequence[Sequence[int]] = [] if taxonomy is None else taxonomy.parents
        self._has_parents = bool(self._parents) and all(max(row) != UNKNOWN for row in self._parents)
        for rank, parents in enumerate(self._parents, start=1):
            self.register_buffer(f"parents_{rank}", torch.tensor(parents), persistent=False)

    @torch.no_grad()
    def update(self, outputs: Any, targets: Any, loss: Tensor) -> None:
        """Add one batch.

        Args:
            outputs: the model's outputs.
            targets: labels [B, R], -1 where unknown.
            loss: mean loss of the batch.
        """
        self.loss.update(loss.float(), batch_size(Batch(outputs, targets)))
        if not self.rank_names:
            return
        logits = logits_per_rank(outputs, self.rank_names)
        predictions = [rank_logits.argmax(dim=1) for rank_logits in logits]
        for rank, predicted in enumerate(predictions):
            self.top1[rank].update(predicted, targets[:, rank])
            if rank in self.top5:
                self.top5[rank].update(logits[rank].float(), targets[:, rank])
        if self._has_parents:
            self.consistent.update(*self._consistency(predictions))

    def compute(self) -> dict[str, float]:
        """The metrics over all batches of all processes. Every process must call this."""
        values = {"loss": float(self.loss.compute())}
        for rank, name in enumerate(self.rank_names):
            values[f"top1/{name}"] = float(self.top1[rank].compute())
            if rank in self.top5:
                values[f"top5/{name}"] = float(self.top5[rank].compute())
        if self._has_parents:
            values["consistent"] = float(self.consistent.compute())
        return values

    def reset(self) -> None:
        """Forget all batches."""
        for metric in (self.loss, self.consistent, *self.top1, *self.top5.values()):
            metric.reset()

    def _consistency(self, predictions: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Whether the predicted classes are consistent, and all their parents known: [B] each, 0 or 1."""
        consistent = torch.ones_like(predictions[0], dtype=torch.bool)
        known = torch.ones_like(consistent)
        for rank in range(1, len(predictions)):
            parents = self.get_buffer(f"parents_{rank}")[predictions[rank]]
            consistent &= parents == predictions[rank - 1]
            known &= parents != UNKNOWN
        return consistent.float(), known.float()


def headline(metrics: dict[str, float]) -> tuple[str, float]:
    """Name and value of the metric that decides which checkpoint is best; larger is better.

    It is top-1 of the finest rank, or the negated loss where there are no classes.
    """
    top1 = [name for name in metrics if name.startswith("top1/")]
    return (top1[-1], metrics[top1[-1]]) if top1 else ("-loss", -metrics["loss"])


def _accuracy(num_classes: int, top_k: int) -> MulticlassAccuracy:
    return MulticlassAccuracy(
        num_classes, top_k=top_k, average="micro", ignore_index=UNKNOWN, validate_args=False
    )
