"""Accuracy per taxonomic rank, agreement with the taxonomy, and losses, over all processes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from linnaeus.data.batch import Batch, batch_size
from linnaeus.data.taxonomy import UNKNOWN, Taxonomy
from linnaeus.dist import World
from linnaeus.errors import LinnaeusError
from linnaeus.training.losses import logits_per_level

TOP5_BYTES = 20
"""Bytes for each sample and class that top-5 accuracy of torchmetrics holds at its peak: one-hot labels and
predictions. Counted from its tensors on the CPU."""


class ClassificationMetrics(nn.Module):
    """Loss, accuracy per level and taxonomic consistency over a validation pass.

    `top1/<level>` and `top5/<level>` (for levels with more than five classes) are fractions of the samples
    whose label is known at that level. `consistent` is the fraction of samples where each predicted class is
    a child of the class predicted one level above. Samples with a predicted class of unknown parent are not
    counted; if a level has no known parents, the metric is left out.

    torchmetrics would gather each state of each metric by itself. Here it leaves the processes alone, and
    `compute` adds all states up in one vector.

    Args:
        taxonomy: levels and parents; None computes the loss only.
    """

    def __init__(self, taxonomy: Taxonomy | None) -> None:
        super().__init__()
        # By default, NaN would be ignored.
        self.loss = MeanMetric(nan_strategy=math.nan, sync_on_compute=False)
        self.level_names = [] if taxonomy is None else list(taxonomy.names)
        counts = [] if taxonomy is None else list(taxonomy.num_classes.values())
        self.top1 = [_accuracy(count, 1) for count in counts]
        self.top5 = {level: _accuracy(count, 5) for level, count in enumerate(counts) if count > 5}
        # Registered as submodules too, so that `to(device)` moves them.
        self._accuracies = nn.ModuleList([*self.top1, *self.top5.values()])
        self.consistent = MeanMetric(sync_on_compute=False)
        self._parents: Sequence[Sequence[int]] = [] if taxonomy is None else taxonomy.parents
        self._has_parents = bool(self._parents) and all(max(row) != UNKNOWN for row in self._parents)
        for level, parents in enumerate(self._parents, start=1):
            self.register_buffer(f"parents_{level}", torch.tensor(parents), persistent=False)

    @torch.no_grad()
    def update(self, outputs: Any, targets: Any, loss: Tensor) -> None:
        """Add one batch.

        Args:
            outputs: the model's outputs.
            targets: labels [B, R], -1 where unknown.
            loss: mean loss of the batch.
        """
        self.loss.update(loss.float(), batch_size(Batch(outputs, targets)))
        if not self.level_names:
            return
        logits = logits_per_level(outputs, self.level_names)
        predictions = [level_logits.argmax(dim=1) for level_logits in logits]
        for level, predicted in enumerate(predictions):
            self.top1[level].update(predicted, targets[:, level])
            if level in self.top5:
                self.top5[level].update(logits[level].float(), targets[:, level])
        if self._has_parents:
            self.consistent.update(*self._consistency(predictions))

    def compute(self, world: World, *, aborted: bool = False) -> dict[str, float] | None:
        """The metrics over all batches of all processes, in one collective. Every process must call this.

        Args:
            world: the processes.
            aborted: whether this process has broken its validation off.

        Returns:
            The values, equal on all processes; None if any process has broken its validation off.
        """
        metrics = self._by_name()
        states = [state for metric in metrics.values() for state in _states(metric).values()]
        states.append(torch.tensor(float(aborted)))
        # Float64 keeps counts exact below 2^53.
        total = world.sum(torch.cat([state.cpu().double().flatten() for state in states]))
        *sums, num_aborted = total.split([state.numel() for state in states])
        if num_aborted:
            return None
        rest = iter(sums)
        return {name: _value(metric, rest) for name, metric in metrics.items()}

    def reset(self) -> None:
        """Forget all batches."""
        for metric in self._by_name().values():
            metric.reset()

    def _by_name(self) -> dict[str, Metric]:
        """The metrics by the name of their value, in the order in which they are shown."""
        metrics: dict[str, Metric] = {"loss": self.loss}
        for level, name in enumerate(self.level_names):
            metrics[f"top1/{name}"] = self.top1[level]
            if level in self.top5:
                metrics[f"top5/{name}"] = self.top5[level]
        if self._has_parents:
            metrics["consistent"] = self.consistent
        return metrics

    def _consistency(self, predictions: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Whether the predicted classes are consistent, and all their parents known: [B] each, 0 or 1."""
        consistent = torch.ones_like(predictions[0], dtype=torch.bool)
        known = torch.ones_like(consistent)
        for level in range(1, len(predictions)):
            parents = self.get_buffer(f"parents_{level}")[predictions[level]]
            consistent &= parents == predictions[level - 1]
            known &= parents != UNKNOWN
        return consistent.float(), known.float()


def headline(metrics: dict[str, float], criterion: nn.Module) -> tuple[str, float]:
    """Name and value of the metric that decides which checkpoint is best; larger is better.

    It is top-1 of the finest level that the loss counts (LOSS.RANK_WEIGHTS), or the negated loss where there
    are no classes.

    Args:
        metrics: what `ClassificationMetrics.compute` gave.
        criterion: the run's loss; one without `level_weights` counts every level.
    """
    top1 = [name for name in metrics if name.startswith("top1/")]
    if not top1:
        return "-loss", -metrics["loss"]
    weights = getattr(criterion, "level_weights", (1.0,) * len(top1))
    name = [name for name, weight in zip(top1, weights, strict=True) if weight > 0][-1]
    return name, metrics[name]


class MetricsMemory:
    """Holds what the metrics of a validation batch hold; torchmetrics itself looks at values.

    Args:
        metrics: those of the run.
    """

    def __init__(self, metrics: ClassificationMetrics) -> None:
        self._names, self._top5 = metrics.level_names, metrics.top5

    def __call__(self, outputs: Any, targets: Any, loss: Tensor) -> None:
        """Allocate and release it for one batch; arguments as for `ClassificationMetrics.update`."""
        if not self._names:
            return
        for level, logits in enumerate(logits_per_level(outputs, self._names)):
            logits.argmax(dim=1)
            if level in self._top5:
                torch.empty(TOP5_BYTES * logits.numel(), dtype=torch.uint8, device=logits.device)


def _accuracy(num_classes: int, top_k: int) -> MulticlassAccuracy:
    return MulticlassAccuracy(
        num_classes, top_k=top_k, average="micro", ignore_index=UNKNOWN, validate_args=False,
        sync_on_compute=False,
    )  # fmt: skip


def _states(metric: Metric) -> dict[str, Tensor]:
    """The states of a metric by name; each adds up over batches and processes."""
    return {name: state for name, state in metric.metric_state.items() if isinstance(state, Tensor)}


def _value(metric: Metric, sums: Iterator[Tensor]) -> float:
    """The metric's value for the next of these sums in place of its own states, which it keeps."""
    total = metric.clone()
    for name, state in _states(metric).items():
        setattr(total, name, next(sums).view(state.shape))
    return float(total.compute())


class LossMeter:
    """Sums the loss on the device and reads it only when asked, so that no step waits for it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._total: torch.Tensor | None = None
        self._count = 0

    def add(self, loss: torch.Tensor) -> None:
        """Add one optimizer step's mean loss."""
        self._total = loss if self._total is None else self._total + loss
        self._count += 1

    def drain(self) -> float:
        """The same as `mean`; the next mean starts after this call."""
        mean = self.mean()
        self._total, self._count = None, 0
        return mean

    def state(self) -> tuple[float, int]:
        """The sum and the number of steps, on this rank, for a checkpoint."""
        return 0.0 if self._total is None else float(self._total), self._count

    def load_states(self, states: Sequence[tuple[float, int]]) -> None:
        """Go on from what `state` gave on each rank; on another number of ranks, from their mean."""
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
            LinnaeusError: the loss is not finite.
        """
        if self._total is None:
            return math.nan
        mean = float(self._world.mean(self._total / self._count))
        if not math.isfinite(mean):
            raise LinnaeusError(
                f"the training loss is {mean}. Lower OPTIMIZER.LR, raise SCHEDULE.WARMUP_EPOCHS, set "
                "TRAIN.CLIP_GRAD_NORM, or use TRAIN.AMP bf16 or off; the last checkpoint is kept"
            )
        return mean
