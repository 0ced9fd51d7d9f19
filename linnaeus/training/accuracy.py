"""Accuracy per level, agreement with the taxonomy, and losses, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linnaeus.data.batch import Batch, batch_size
from linnaeus.data.taxonomy import UNKNOWN, Taxonomy
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import LinnaeusError
from linnaeus.training.losses import logits_per_level


class ClassificationMetrics(nn.Module):
    """Loss, accuracy per level and taxonomic consistency over a validation pass.

    `top1/<level>` and `top5/<level>` (for levels with more than five classes) are fractions of the samples
    whose label is known at that level. `macro/<level>` and `f1/<level>` are macro accuracy and macro F1:
    means over the classes that have such a sample. All are NaN without one. `consistent` is the fraction of
    samples where each predicted class is a child of the class predicted one level above. Samples with a
    predicted class of unknown parent are not counted; if a level has no known parents, the metric is left
    out.

    Where samples have several labels there are, in place of these, `map/<level>`, the average precision, and
    `f1/<level>`, with probabilities above 0.5: means over the classes with a positive sample, from all
    samples, whose probabilities [N, C] wait on the host. An unknown label is left out.

    Args:
        taxonomy: levels and parents; None computes the loss only.

    Attributes:
        names: of the metrics.
    """

    def __init__(self, taxonomy: Taxonomy | None) -> None:
        super().__init__()
        self._set_level = (
            taxonomy.names[0] if taxonomy is not None and taxonomy.is_multilabel else None
        )
        self._sets: list[tuple[Tensor, Tensor]] = []
        counts = {} if taxonomy is None or self._set_level else taxonomy.num_classes
        parents: Sequence[Sequence[int]] = () if taxonomy is None else taxonomy.parents
        self.level_names = list(counts)
        self.total_loss: Tensor
        self.counts: Tensor
        self.class_counts: Tensor
        self._num_classes = list(counts.values())
        top5 = {name: f"top5/{name}" for name, count in counts.items() if count > 5}
        self._averaged = ["loss", *top5.values()]
        self.names = ["loss"]
        for name in counts:
            self.names += [f"top1/{name}", *filter(None, [top5.get(name)])]
            self.names += [f"macro/{name}", f"f1/{name}"]
        if parents and all(max(row) != UNKNOWN for row in parents):
            self._averaged.append("consistent")
            self.names.append("consistent")
        if self._set_level is not None:
            self.names += [f"map/{self._set_level}", f"f1/{self._set_level}"]
        for level, row in enumerate(parents, start=1):
            self.register_buffer(f"parents_{level}", torch.tensor(row), persistent=False)
        self.num_samples = 0
        self.register_buffer("total_loss", torch.zeros(()), persistent=False)
        self.register_buffer(
            "counts", torch.zeros(len(self._averaged) - 1, 2).long(), persistent=False
        )
        # Of each class of all levels: samples, predictions, correct predictions.
        class_counts = torch.zeros(3, sum(self._num_classes)).long()
        self.register_buffer("class_counts", class_counts, persistent=False)

    @torch.no_grad()
    def update(self, outputs: Any, targets: Any, loss: Tensor) -> None:
        """Add one batch.

        Args:
            outputs: the model's outputs.
            targets: labels [B, L], -1 where unknown; [B, C] where samples have several.
            loss: mean loss of the batch.
        """
        size = batch_size(Batch(outputs, targets))
        self.num_samples += size
        self.total_loss += loss.float() * size
        if self._set_level is not None and not loss.is_meta:
            scores = logits_per_level(outputs, (self._set_level,))[0].float().sigmoid()
            self._sets.append((scores.cpu(), targets.to(torch.int8).cpu()))
        if not self.level_names:
            return
        counts = []  # of each metric: samples that count for it, of how many
        logits = logits_per_level(outputs, self.level_names)
        predictions = [level_logits.argmax(dim=1) for level_logits in logits]
        class_counts = self.class_counts.split(self._num_classes, dim=1)
        for level, name in enumerate(self.level_names):
            labels, predicted = targets[:, level], predictions[level]
            is_known = labels != UNKNOWN
            classes = labels.clamp(min=0)
            num_samples, num_predicted, num_correct = class_counts[level]
            num_samples.index_add_(0, classes, is_known.long())
            num_predicted.index_add_(0, predicted, is_known.long())
            num_correct.index_add_(0, classes, (predicted == labels).long())
            if f"top5/{name}" in self._averaged:
                top5 = logits[level].float().topk(5, dim=1).indices
                counts += [(top5 == labels[:, None]).sum(), is_known.sum()]
        if "consistent" in self._averaged:
            consistent = known = torch.ones_like(predictions[0], dtype=torch.bool)
            for level in range(1, len(predictions)):
                parents = self.get_buffer(f"parents_{level}")[predictions[level]]
                consistent = consistent & (parents == predictions[level - 1])
                known = known & (parents != UNKNOWN)
            counts += [(consistent & known).sum(), known.sum()]
        if counts:
            self.counts += torch.stack(counts).view(-1, 2)

    def compute(self, world: World, *, aborted: bool = False) -> dict[str, float] | None:
        """The metrics over all batches of all ranks, in one collective. Every rank must call this.

        Several labels per sample take two more.

        Args:
            world: the ranks.
            aborted: whether this rank has broken its validation off.

        Returns:
            The values, equal on all ranks; None if any rank has broken its validation off.
        """
        totals = [
            aborted,
            float(self.total_loss),
            self.num_samples,
            *self.counts.flatten().tolist(),
        ]
        flat = self.class_counts.flatten().cpu().double()
        sums = world.reduce(torch.cat([torch.tensor(totals, dtype=torch.float64), flat]))
        num_aborted, *pairs = sums[: len(totals)].tolist()
        if num_aborted:
            return None
        values = {}
        for name, total, count in zip(self._averaged, pairs[::2], pairs[1::2], strict=True):
            values[name] = total / count if count else math.nan
        class_counts = sums[len(totals) :].view(3, -1).split(self._num_classes, dim=1)
        for name, each in zip(self.level_names, class_counts, strict=False):
            num_samples, num_predicted, num_correct = each[:, each[0] > 0]
            values[f"top1/{name}"] = float(num_correct.sum() / num_samples.sum())
            values[f"macro/{name}"] = float((num_correct / num_samples).mean())
            f1 = 2 * num_correct / (num_samples + num_predicted)
            values[f"f1/{name}"] = float(f1.mean())
        if self._set_level is not None:
            sets = self.gather_sets(world)
            means = world.on_main(lambda: _map_and_f1(*(sets or ())))
            values |= dict(zip(self.names[1:], means, strict=True))
        return {name: values[name] for name in self.names}

    def gather_sets(self, world: World) -> tuple[Tensor, Tensor] | None:
        """Probabilities and targets, [N, C] each, of all ranks on rank 0; None on the others."""
        gathered = world.gather_on_host(self._sets)
        if gathered is None:
            return None
        scores, targets = zip(*chain.from_iterable(gathered), strict=True)
        return torch.cat(scores), torch.cat(targets)

    def reset(self) -> None:
        """Forget all batches."""
        self.num_samples = 0
        self.total_loss.zero_()
        self.counts.zero_()
        self.class_counts.zero_()
        self._sets = []


def _map_and_f1(scores: Tensor, targets: Tensor) -> tuple[float, float]:
    """Means over the classes with a positive sample; NaN without any, and where a probability is.

    Arguments as for `figures_of_sets`.
    """
    if scores.isnan().any():
        return math.nan, math.nan
    figures = figures_of_sets(scores, targets)
    num_positive, num_predicted, num_correct, average_precision = figures[:4, figures[0] > 0]
    return float(average_precision.mean()), float(
        (2 * num_correct / (num_positive + num_predicted)).mean()
    )


def figures_of_sets(scores: Tensor, targets: Tensor) -> Tensor:
    """The metrics of each class where samples have several labels, over the samples whose label is known.

    Args:
        scores, targets: as from `gather_sets`; probabilities are finite.

    Returns:
        [6, C], float64: positive samples, those predicted with a probability above 0.5, and those that are
        both; average precision, the best F1, and the threshold for it, midway between two probabilities. The
        last three are NaN for a class without a positive sample.
    """
    is_known, is_positive = targets != UNKNOWN, targets == 1
    is_predicted = (scores > 0.5) & is_known
    counts = [each.sum(dim=0) for each in (is_positive, is_predicted, is_positive & is_predicted)]
    curves = map(_figures_of_curve, scores.T.double().numpy(), targets.T.numpy())
    return torch.cat([torch.stack(counts).double(), torch.tensor([*curves]).double().T])


def _figures_of_curve(scores: Any, targets: Any) -> tuple[float, float, float]:
    """The last three of `figures_of_sets`, for one class."""
    from sklearn.metrics import precision_recall_curve  # here: it takes a second

    if not (targets == 1).any():
        return math.nan, math.nan, math.nan
    known = targets != UNKNOWN
    precision, recall, thresholds = precision_recall_curve(targets[known], scores[known])
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-300)
    best = f1[:-1].round(12).argmax()  # the lowest threshold of equal values
    below = thresholds[best - 1] if best else 0.0
    average_precision = -np.sum(np.diff(recall) * precision[:-1])
    return average_precision, f1[best], (thresholds[best] + below) / 2


def headline(names: Sequence[str], criterion: nn.Module) -> str:
    """The metric that decides which checkpoint is best.

    It is top-1 of the finest level that the loss counts (LOSS.LEVEL_WEIGHTS), mean average precision where
    samples have several labels, or the loss without classes.

    Args:
        names: of the metrics of a validation.
        criterion: the run's loss; one without `level_weights` counts every level.
    """
    top1 = [name for name in names if name.startswith(("top1/", "map/"))]
    weights = getattr(criterion, "level_weights", (1.0,) * len(top1))
    return ["loss", *(name for name, weight in zip(top1, weights, strict=True) if weight > 0)][-1]


MIN_LOSS_SCALE = 2**-4
"""A gradient scaler halves its scale in a step that overflows. A smaller scale ends the run."""


class LossMeter:
    """Sums the loss on the device and reads it only when asked, so that no step waits for it.

    Args:
        world: the ranks.
        scaler: the training step's. If enabled, it skips steps whose loss is not finite, and the mean leaves
            them out.
    """

    def __init__(self, world: World, scaler: torch.amp.GradScaler) -> None:
        self._world = world
        self._scaler = scaler
        self._total: torch.Tensor | None = None
        self._count: torch.Tensor | int = 0

    def add(self, loss: torch.Tensor) -> None:
        """Add one optimizer step's mean loss."""
        is_counted: torch.Tensor | int = 1
        if self._scaler.is_enabled():
            is_counted = loss.isfinite()
            loss = loss.where(is_counted, 0.0)
        self._total = loss if self._total is None else self._total + loss
        self._count = self._count + is_counted

    def drain(self) -> float:
        """The same as `mean`; the next mean starts after this call."""
        mean = self.mean()
        self._total, self._count = None, 0
        return mean

    def state(self) -> tuple[float, int]:
        """The sum and the number of steps, on this rank, for a checkpoint."""
        return 0.0 if self._total is None else float(self._total), int(self._count)

    def load_states(self, states: Sequence[tuple[float, int]]) -> None:
        """Restore the states of all ranks; on another number of ranks, their mean."""
        if len(states) == self._world.world_size:
            states = [states[self._world.rank]]
        totals, counts = [total for total, _ in states], [count for _, count in states]
        if any(counts):
            self._total = torch.tensor(sum(totals) / len(totals), device=self._world.device)
            self._count = counts[0]

    def mean(self) -> float:
        """The mean over the steps since the last `drain` and over all ranks; NaN without steps.

        Every rank must call this.

        Raises:
            LinnaeusError: the loss is not finite, or the scale fell below `MIN_LOSS_SCALE`.
        """
        if self._total is None:
            return math.nan
        count = torch.as_tensor(self._count, dtype=self._total.dtype, device=self._total.device)
        total, count = self._world.reduce(torch.stack([self._total, count]))
        mean = float(total / count)
        problem = "" if self._scaler.is_enabled() or math.isfinite(mean) else f"is {mean}"
        if (scale := self._scaler.get_scale()) < MIN_LOSS_SCALE:
            problem = f"cannot be used: the gradient scaler fell to {scale:.3g} because every step overflows"
        if problem:
            raise LinnaeusError(
                f"the training loss {problem}. Lower OPTIMIZER.LR, raise SCHEDULE.WARMUP_EPOCHS, set "
                "TRAIN.CLIP_GRAD_NORM, or use TRAIN.AMP bf16 or off. Earlier checkpoints are kept"
            )
        return mean
