"""The figures of an evaluation, from its counts: per level, per class, confusions, distances of mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linnaeus.data.taxonomy import UNKNOWN, Level, Taxonomy
from linnaeus.inference.tally import LevelCounts


@dataclass(frozen=True)
class Confusion:
    """Samples of one class that were taken for another one.

    Attributes:
        true, predicted: names of the classes.
        samples: how many.
        share: as a fraction of the samples of the true class.
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

    @classmethod
    def of(cls, counts: LevelCounts) -> ClassFigures:
        """The figures of all classes, those without a sample too."""
        true, predicted = counts.pairs // counts.num_classes, counts.pairs % counts.num_classes
        is_correct = true == predicted

        def total(labels: Tensor, numbers: Tensor) -> Tensor:
            return torch.zeros(counts.num_classes, dtype=torch.int64).index_add_(0, labels, numbers)

        return cls(
            total(true, counts.counts),
            total(predicted, counts.counts),
            total(true[is_correct], counts.counts[is_correct]),
        )

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
    """The figures of one level. Fractions are of the samples with a label; None without any.

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
        classes: figures of each class.
        counts: numbers of (true, predicted).
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
    counts: LevelCounts

    @classmethod
    def of(cls, level: Level, counts: LevelCounts) -> LevelFigures:
        """The figures of a level from its counts."""
        classes, num_samples = ClassFigures.of(counts), counts.num_samples
        has_samples = classes.num_samples > 0
        bins = torch.stack([counts.bins[0], counts.bins[1] / counts.bins[0], counts.bins[2] / counts.bins[0]])

        def mean(values: Tensor) -> float | None:
            return float(values[has_samples].nan_to_num(0.0).mean()) if num_samples else None

        gaps = (counts.bins[1] - counts.bins[2]).abs().sum()
        return cls(
            level, num_samples, counts.num_unlabelled,
            top1=int(classes.num_correct.sum()) / num_samples if num_samples else None,
            macro_recall=mean(classes.recall),
            macro_precision=mean(classes.precision),
            macro_f1=mean(classes.f1),
            calibration_error=float(gaps) / num_samples if num_samples else None,
            cross_entropy=counts.cross_entropy / num_samples if num_samples else None,
            bins=bins, classes=classes, counts=counts,
        )  # fmt: skip

    @property
    def num_classes_with_samples(self) -> int:
        """Classes that the macro figures are means over."""
        return int((self.classes.num_samples > 0).sum())

    def confusions(self, limit: int) -> list[Confusion]:
        """The largest confusions, by number of samples, then by share."""
        count = self.counts.num_classes
        true, predicted = self.counts.pairs // count, self.counts.pairs % count
        wrong = true != predicted
        true, predicted, numbers = true[wrong], predicted[wrong], self.counts.counts[wrong]
        shares = numbers.double() / self.classes.num_samples[true]
        # by number; the share, at most 1, only breaks ties
        order = torch.argsort(numbers.double() + shares / 2, descending=True, stable=True)[:limit].tolist()
        names = self.level.classes
        return [
            Confusion(names[true[i]], names[predicted[i]], int(numbers[i]), float(shares[i])) for i in order
        ]

    def worst(self, limit: int) -> list[int]:
        """Labels of the classes with the lowest recall, of those with samples."""
        recall = self.classes.recall.nan_to_num(2.0)
        order = torch.argsort(recall, stable=True)[:limit].tolist()
        return [label for label in order if self.classes.num_samples[label] and recall[label] < 1]


@dataclass(frozen=True)
class Distance:
    """How far mistakes at the finest level are off in the taxonomy.

    The distance of a mistake is the number of edges from the finest level up to the lowest common ancestor
    of the true and the predicted class: 1 for two species of a genus, 2 for two of a family, and the number
    of levels for two that have nothing but the root in common. It is the height of Deng et al. (2010, What
    does classifying more than 10,000 image categories tell us?) and of Bertinetto et al. (2020, Making better
    mistakes, arXiv:1912.09393).

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


def distance_of_mistakes(taxonomy: Taxonomy, finest: LevelCounts) -> Distance | None:
    """The mean distance; None for a single level, or where no parent is known.

    Args:
        taxonomy: levels and parents.
        finest: the counts of its finest level.
    """
    if not any(parent != UNKNOWN for row in taxonomy.parents for parent in row):
        return None
    heights = pair_heights(taxonomy, finest.pairs // finest.num_classes, finest.pairs % finest.num_classes)
    counts, is_known = finest.counts, heights != UNKNOWN
    is_mistake = heights > 0
    total = int((heights * counts)[is_mistake].sum())
    num_mistakes, num_known = int(counts[is_mistake].sum()), int(counts[is_known].sum())
    return Distance(
        total / num_mistakes if num_mistakes else None,
        total / num_known if num_known else None,
        num_mistakes,
        int(counts[~is_known].sum()),
    )


def pair_heights(taxonomy: Taxonomy, a: Tensor, b: Tensor) -> Tensor:
    """Edges [N] from classes [N] of the finest level up to their lowest common ancestor.

    0 for equal classes, -1 where an ancestor below the common one is unknown.
    """
    heights = torch.where(a == b, 0, UNKNOWN)
    is_open = a != b
    for height, row in enumerate(reversed(taxonomy.parents), start=1):
        parents = torch.tensor([*row, UNKNOWN])
        a, b = parents[a], parents[b]
        is_open &= (a != UNKNOWN) & (b != UNKNOWN)
        heights[is_open & (a == b)] = height
        is_open &= a != b
    heights[is_open] = len(taxonomy.levels)
    return heights


def figures_of(taxonomy: Taxonomy | None, counts: Sequence[LevelCounts]) -> list[LevelFigures]:
    """The figures of all levels, coarse to fine."""
    levels = () if taxonomy is None else taxonomy.levels
    return [LevelFigures.of(level, each) for level, each in zip(levels, counts, strict=True)]
