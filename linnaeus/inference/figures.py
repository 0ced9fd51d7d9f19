"""The metrics of an evaluation: counted batch by batch, then computed for each level and class.

Shapes: B samples in a batch, N samples in all, L levels, C classes of a level, K pairs of classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linnaeus.data.taxonomy import UNKNOWN, Level, Taxonomy
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import LinnaeusError
from linnaeus.runtime.words import counted
from linnaeus.training.accuracy import ClassificationMetrics, figures_of_sets
from linnaeus.training.losses import log_probabilities, logits_per_level

NUM_BINS = 15
"""Bins of equal width over the confidences 0 to 1."""
HELD_ON_DEVICE = 8192
"""Samples whose predictions wait on the device, so that few batches synchronize with the host."""


class EvaluationMetrics:
    """Results of each batch: the logged metrics, and 16 bytes on the host per sample and level.

    Args:
        taxonomy: levels and classes; None keeps the logged metrics only.
        device: of the model.
        are_logs: see `linnaeus.training.losses.log_probabilities`.

    Attributes:
        logged: the metrics that training logs.
        samples: of all ranks, one after another, on rank 0 after `figures`: [N, L, 2] labels and
            predictions, their log-probabilities, and the number of samples of each rank.
    """

    samples: tuple[Tensor, Tensor, list[int]] | None = None

    def __init__(
        self, taxonomy: Taxonomy | None, device: torch.device, *, are_logs: bool = False
    ) -> None:
        self.logged = ClassificationMetrics(taxonomy).to(device)
        self._taxonomy, self._are_logs = taxonomy, are_logs
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self.logged.reset()
        self._on_device: list[tuple[Tensor, Tensor]] = []
        self._on_host: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def update(self, outputs: Any, targets: Any, loss: Tensor) -> None:
        """Add one batch; arguments as for `ClassificationMetrics.update`."""
        self.logged.update(outputs, targets, loss)
        if self._taxonomy is None:
            return
        if self._taxonomy.is_multilabel:
            return  # the logged metrics keep all that they need
        logits = logits_per_level(outputs, self._taxonomy.names)
        predicted = torch.stack([each.argmax(dim=1) for each in logits], dim=1)
        labels = torch.stack([targets, predicted], dim=2)
        log_p = [
            log_probabilities(each, are_logs=self._are_logs).gather(
                1, labels[:, level].clamp_min(0)
            )
            for level, each in enumerate(logits)
        ]
        self._on_device.append((labels, torch.stack(log_p, dim=1)))
        if sum(len(part) for part, _ in self._on_device) >= HELD_ON_DEVICE:
            self._move_to_host()

    def _move_to_host(self) -> None:
        if self._on_device:
            labels, log_p = (torch.cat(parts).cpu() for parts in zip(*self._on_device, strict=True))
            self._on_host.append((labels.int(), log_p))
            self._on_device = []

    def figures(self, world: World) -> list[LevelFigures | SetFigures] | None:
        """Return the metrics of all levels, coarse to fine, over the samples of all ranks.

        A collective, which every rank must call; None except on rank 0.

        Raises:
            LinnaeusError: outputs are not finite; on rank 0.
        """
        if self._taxonomy is not None and self._taxonomy.is_multilabel:
            sets = self.logged.gather_sets(world)
            return None if sets is None else [SetFigures.of(self._taxonomy.levels[0], *sets)]
        self._move_to_host()
        gathered = world.gather_on_host(self._on_host)
        if gathered is None or self._taxonomy is None:
            return None if gathered is None else []
        samples = [part for parts in gathered for part in parts]
        labels, log_p = (torch.cat(parts) for parts in zip(*samples, strict=True))  # [N, L, 2] each
        self.samples = labels, log_p, [sum(len(part) for part, _ in parts) for parts in gathered]
        return [
            LevelFigures.of(level, labels[:, position], log_p[:, position])
            for position, level in enumerate(self._taxonomy.levels)
        ]


@dataclass(frozen=True)
class Confusion:
    """Samples of one class that were taken for another one.

    Attributes:
        true, predicted: names of the classes.
        samples: how many.
        share: fraction of the samples of the true class.
    """

    true: str
    predicted: str
    samples: int
    share: float


@dataclass(frozen=True)
class ClassFigures:
    """The classes of one level, each attribute [C], by label.

    Attributes:
        num_samples: samples of the class.
        num_predicted: samples that were taken for it.
        num_correct: samples of the class that were taken for it.
    """

    num_samples: Tensor
    num_predicted: Tensor
    num_correct: Tensor

    @property
    def recall(self) -> Tensor:
        """Fraction of the samples of a class that were taken for it; NaN without a sample."""
        return self.num_correct.double() / self.num_samples

    @property
    def precision(self) -> Tensor:
        """Fraction of the samples taken for a class that are of it; NaN where none was."""
        return self.num_correct.double() / self.num_predicted

    @property
    def f1(self) -> Tensor:
        """Harmonic mean of precision and recall; NaN where there is neither a sample nor a prediction."""
        return 2 * self.num_correct.double() / (self.num_samples + self.num_predicted)


@dataclass(frozen=True)
class LevelFigures:
    """The metrics of one level. Fractions are of the samples with a label; None without any.

    Attributes:
        level: its name and classes.
        num_samples: samples with a label.
        num_unlabelled: samples without one, which are left out.
        top1: fraction of correct predictions.
        macro_recall: mean recall of the classes that have samples, also called macro or balanced accuracy.
        macro_precision, macro_f1: means over the same classes; the precision of a class that was never
            predicted counts as 0.
        calibration_error: expected calibration error over 15 bins of the largest softmax probability
            (Guo et al. 2017, arXiv:1706.04599), as torchmetrics' MulticlassCalibrationError with norm l1.
        cross_entropy: mean negative log-probability of the true class.
        bins: [3, 15], float64: samples, mean confidence and accuracy of each bin; NaN in empty ones.
        classes: metrics of each class.
        pairs: [K], the pairs of classes that occurred, as true * C + predicted, ascending. Of the C * C
            pairs, most never occur.
        pair_counts: [K], samples of each pair.
    """

    level: Level
    num_samples: int
    num_unlabelled: int
    top1: float | None
    macro_recall: float | None
    macro_precision: float | None
    macro_f1: float | None
    calibration_error: float | None
    cross_entropy: float | None
    bins: Tensor
    classes: ClassFigures
    pairs: Tensor
    pair_counts: Tensor

    @classmethod
    def of(cls, level: Level, labels: Tensor, log_p: Tensor) -> LevelFigures:
        """Return the metrics of a level from its samples.

        Args:
            level: its name and classes.
            labels: [N, 2], true and predicted; a true one is -1 if unknown.
            log_p: [N, 2], log-probabilities of the true and of the predicted class.

        Raises:
            LinnaeusError: a log-probability is not a number.
        """
        num_not_finite = int(log_p[:, 1].isnan().sum())
        if num_not_finite:
            raise not_finite(level.name, f", for {counted(num_not_finite, 'sample')}")
        is_known = labels[:, 0] != UNKNOWN
        true, predicted = labels[is_known].long().unbind(dim=1)
        log_true, log_predicted = log_p[is_known].double().unbind(dim=1)
        is_correct, num_samples, num_classes = true == predicted, len(true), len(level.classes)
        classes = ClassFigures(
            *(part.bincount(minlength=num_classes) for part in (true, predicted, true[is_correct]))
        )
        pairs, pair_counts = torch.unique(true * num_classes + predicted, return_counts=True)
        sums = _binned(log_predicted.exp(), is_correct)

        def mean(values: Tensor) -> float | None:
            values = values[classes.num_samples > 0].nan_to_num(0.0)
            return float(values.mean()) if num_samples else None

        def per_sample(total: Tensor) -> float | None:
            return float(total) / num_samples if num_samples else None

        return cls(
            level,
            num_samples,
            int((~is_known).sum()),
            top1=per_sample(is_correct.sum()),
            macro_recall=mean(classes.recall),
            macro_precision=mean(classes.precision),
            macro_f1=mean(classes.f1),
            calibration_error=per_sample((sums[1] - sums[2]).abs().sum()),
            cross_entropy=per_sample(-log_true.sum()),
            bins=torch.stack([sums[0], sums[1] / sums[0], sums[2] / sums[0]]),
            classes=classes,
            pairs=pairs,
            pair_counts=pair_counts,
        )

    def confusions(self, limit: int) -> list[Confusion]:
        """Return the largest confusions, by number of samples, then by share."""
        names = self.level.classes
        true, predicted = self.pairs // len(names), self.pairs % len(names)
        shares = self.pair_counts.double() / self.classes.num_samples[true]
        # by number; the share, at most 1, only breaks ties
        score = torch.where(true == predicted, -1.0, self.pair_counts + shares / 2)
        order = torch.argsort(score, descending=True, stable=True)[:limit].tolist()
        return [
            Confusion(
                names[true[i]], names[predicted[i]], int(self.pair_counts[i]), float(shares[i])
            )
            for i in order
            if score[i] > 0
        ]

    def worst(self, limit: int) -> list[int]:
        """Return labels of the classes with the lowest recall, of those with samples and a mistake."""
        recall = self.classes.recall.nan_to_num(2.0)
        order = torch.argsort(recall, stable=True)[:limit].tolist()
        return [label for label in order if recall[label] < 1]


@dataclass(frozen=True)
class SetFigures:
    """The metrics of a level where samples have several labels; an unknown label is left out.

    Attributes:
        level: its name and classes.
        num_samples: samples with a known label.
        num_unlabelled: samples without one.
        classes: metrics of each class, with the labels whose probability is above 0.5 as predictions.
        average_precision, best_f1, best_threshold: [C], see `figures_of_sets`. The threshold is chosen on
            these samples, so that others show a lower F1.
    """

    level: Level
    num_samples: int
    num_unlabelled: int
    classes: ClassFigures
    average_precision: Tensor
    best_f1: Tensor
    best_threshold: Tensor

    @classmethod
    def of(cls, level: Level, scores: Tensor, targets: Tensor) -> SetFigures:
        """Return the metrics from probabilities and targets, [N, C] each.

        Raises:
            LinnaeusError: a probability is not a number.
        """
        if scores.isnan().any():
            raise not_finite(level.name)
        num_samples = int((targets != UNKNOWN).any(dim=1).sum())
        figures = figures_of_sets(scores, targets)
        classes = ClassFigures(*figures[:3].long())
        return cls(level, num_samples, len(targets) - num_samples, classes, *figures[3:])

    def mean(self, values: Tensor) -> float | None:
        """The mean over the classes with a positive sample, where a precision without a prediction is 0."""
        has_samples = self.classes.num_samples > 0
        return float(values[has_samples].nan_to_num(0.0).mean()) if has_samples.any() else None


def not_finite(level_name: str, extent: str = "") -> LinnaeusError:
    """Return the error for outputs of a model that are NaN or infinite."""
    return LinnaeusError(
        f"the model's outputs for level {level_name!r} are not finite{extent}: its weights are not, or its "
        "number format (TRAIN.AMP) overflows"
    )


def _binned(confidences: Tensor, is_correct: Tensor) -> Tensor:
    """Samples, sum of confidences and correct ones [3, NUM_BINS] by confidence [N], float64.

    A bin has its lower edge and not its upper one, as in torchmetrics; the last one has both. Edges are
    rounded to float32, like the confidences.
    """
    edges = torch.linspace(0, 1, NUM_BINS + 1)
    bins = (torch.bucketize(confidences.float(), edges, right=True) - 1).clamp(0, NUM_BINS - 1)
    columns = torch.stack([torch.ones_like(confidences), confidences, is_correct.double()])
    return torch.zeros(3, NUM_BINS, dtype=torch.float64).index_add_(1, bins, columns)


@dataclass(frozen=True)
class Distance:
    """Distance of mistakes at the finest level in the taxonomy.

    The distance of a mistake is the number of edges from the finest level up to the lowest common ancestor
    of the true and the predicted class: 1 for two species of a genus, and the number of levels for two that
    share only the root. It is the height of Deng et al. (2010, What does classifying more than 10,000 image
    categories tell us?) and of Bertinetto et al. (2020, Making better mistakes, arXiv:1912.09393).

    Attributes:
        mean_over_mistakes: mean over the mistakes; None without any.
        mean_over_samples: mean over all samples, where a correct one is 0.
        num_mistakes: mistakes that are counted.
        num_left_out: mistakes with an unknown ancestor, which are left out of both.
    """

    mean_over_mistakes: float | None
    mean_over_samples: float | None
    num_mistakes: int
    num_left_out: int


def distance_of_mistakes(taxonomy: Taxonomy, finest: LevelFigures) -> Distance | None:
    """Return the mean distance; None for a single level, or where no parent is known.

    Args:
        taxonomy: levels and parents.
        finest: the metrics of its finest level.
    """
    if not any(parent != UNKNOWN for row in taxonomy.parents for parent in row):
        return None
    num_classes, counts = len(finest.level.classes), finest.pair_counts
    a, b = finest.pairs // num_classes, finest.pairs % num_classes
    heights = torch.where(a == b, 0, UNKNOWN)
    is_open = a != b
    for height, row in enumerate(reversed(taxonomy.parents), start=1):
        parents = torch.tensor([*row, UNKNOWN])  # the last one is the parent of an unknown class
        a, b = parents[a], parents[b]
        is_open &= (a != UNKNOWN) & (b != UNKNOWN)
        heights[is_open & (a == b)] = height
        is_open &= a != b
    heights[is_open] = len(taxonomy.levels)
    total = int((heights * counts)[heights > 0].sum())
    num_mistakes, num_known = int(counts[heights > 0].sum()), int(counts[heights != UNKNOWN].sum())
    return Distance(
        total / num_mistakes if num_mistakes else None,
        total / num_known if num_known else None,
        num_mistakes,
        int(counts[heights == UNKNOWN].sum()),
    )
