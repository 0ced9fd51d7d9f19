"""Prediction for an image: classes with probabilities, and the best path through the taxonomy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linnaeus.data.taxonomy import UNKNOWN, Taxonomy
from linnaeus.inference.figures import not_finite
from linnaeus.runtime.errors import LinnaeusError
from linnaeus.training.losses import log_probabilities, logits_per_level


@dataclass(frozen=True)
class ConsistentPath:
    """One class of each level, each the parent of the next.

    Attributes:
        classes: the class of each level, coarse to fine.
        probability: the product of the probabilities that the levels give these classes; with
            MODEL.HEAD marginal, the probability of the finest class, which includes the ones above it.
        differs: whether some level on its own gives another class more probability.
    """

    classes: dict[str, str]
    probability: float
    differs: bool

    def __str__(self) -> str:
        note = " (differs from the best class of each level)" if self.differs else ""
        return f"{' > '.join(self.classes.values())} {percent(self.probability)}{note}"


@dataclass(frozen=True)
class Prediction:
    """Classes of one image, with their probabilities.

    Attributes:
        source: the path, or the position of an image that came without one.
        levels: for each level, coarse to fine, the most probable classes with their probabilities, the best
            one first. Where images have several labels, those from the threshold on, perhaps none.
        path: the most probable consistent path; None if not requested.
        separator: of the names in a table where images have several labels; None is one label each.
        certain: the finest level whose best class reaches the threshold, that class and its probability;
            empty names where no level does. None without a threshold.
        features: the embedding [F] before the head, float32 on the CPU; None if not requested.
    """

    source: str | int
    levels: dict[str, list[tuple[str, float]]]
    path: ConsistentPath | None = None
    separator: str | None = None
    certain: tuple[str, str, float] | None = None
    features: Tensor | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        shown = {
            name: classes if self.separator else classes[:1]
            for name, classes in self.levels.items()
        }
        best = ", ".join(
            f"{name}: {' '.join(f'{label} {percent(p)}' for label, p in classes) or 'none'}"
            for name, classes in shown.items()
        )
        path = "" if self.path is None else f", path: {self.path}"
        return f"Prediction({self.source!r}, {best}{path})"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as they stand in a JSON file."""
        levels = {
            name: [{"class": label, "probability": probability} for label, probability in classes]
            for name, classes in self.levels.items()
        }
        content: dict[str, Any] = {"path": self.source, "levels": levels}
        if self.path is not None:
            content["consistent"] = asdict(self.path)
        if self.certain is not None:
            names = ("level", "class", "probability")
            is_any = bool(self.certain[0])
            content["certain"] = dict(zip(names, self.certain, strict=True)) if is_any else None
        return content


def percent(probability: float) -> str:
    """Return a probability for people.

    >>> percent(0.97131), percent(0.00002)
    ('97.1 %', '<0.1 %')
    """
    return f"{probability:.1%}".replace("%", " %") if probability >= 0.001 else "<0.1 %"


def log_probabilities_of(outputs: Any, taxonomy: Taxonomy, *, are_logs: bool) -> list[Tensor]:
    """Return the log-probabilities [B, classes] of each level, coarse to fine.

    Args:
        outputs: of the model, in any supported form.
        taxonomy: levels and classes.
        are_logs: see `linnaeus.training.losses.log_probabilities`.

    Raises:
        ConfigError: the outputs have another form.
        LinnaeusError: they are not finite, or not one for each class.
    """
    found: list[Tensor] = []
    for level, logits in zip(
        taxonomy.levels, logits_per_level(outputs, taxonomy.names), strict=True
    ):
        if logits.ndim != 2 or logits.shape[1] != len(level.classes):
            raise LinnaeusError(
                f"the model gives outputs {list(logits.shape)} for the {len(level.classes)} classes of level "
                f"{level.name!r}; [B, {len(level.classes)}] is needed"
            )
        log = log_probabilities(logits, are_logs=are_logs, is_multilabel=taxonomy.is_multilabel)
        if bool(log.isnan().any()):
            raise not_finite(level.name)
        found.append(log)
    return found


def predictions_of(
    logs: Sequence[Tensor],
    sources: Sequence[str | int],
    taxonomy: Taxonomy,
    *,
    top: int | None,
    path: bool = False,
    threshold: float | None = None,
    are_logs: bool = False,
) -> list[Prediction]:
    """Return the predictions of a batch.

    Args:
        logs: log-probabilities [B, classes] of each level.
        sources: where each image came from.
        taxonomy: levels, classes and parents.
        top: number of classes of each level; a level with fewer gives all, None all of several labels.
        path: whether to look for the most probable consistent path.
        threshold: the least probability of the finest class that is certain; where images have several
            labels, of each label, and None is 0.5.
        are_logs: whether the probabilities of levels are of nested events, as with a marginal head.
    """
    is_multilabel = taxonomy.is_multilabel
    best: list[list[list[tuple[str, float]]]] = []  # by level and image
    for level, log in zip(taxonomy.levels, logs, strict=True):
        found = log.topk(min(top or log.shape[1], log.shape[1]), dim=1)
        rows = zip(found.indices.tolist(), found.values.exp().tolist(), strict=True)
        least = (0.5 if threshold is None else threshold) if is_multilabel else 0.0
        named = ([(level.classes[label], p) for label, p in zip(*row, strict=True)] for row in rows)
        best.append([[(name, p) for name, p in row if p >= least] for row in named])
    labels, probabilities = _best_paths(logs, taxonomy, are_logs=are_logs) if path else ([], [])
    predictions = []
    for i, source in enumerate(sources):
        levels = {name: rows[i] for name, rows in zip(taxonomy.names, best, strict=True)}
        consistent = None
        if path:
            pairs = zip(taxonomy.levels, labels[i], strict=True)
            classes = {level.name: level.classes[label] for level, label in pairs}
            differs = any(levels[name][0][0] != label for name, label in classes.items())
            consistent = ConsistentPath(classes, probabilities[i], differs)
        certain = None
        if threshold is not None and not is_multilabel:
            best_of = {name: rows[0] for name, rows in levels.items()}
            sure = [(name, *row) for name, row in best_of.items() if row[1] >= threshold]
            certain = sure[-1] if sure else ("", "", 0.0)
        predictions.append(Prediction(source, levels, consistent, taxonomy.separator, certain))
    return predictions


def _best_paths(
    logs: Sequence[Tensor], taxonomy: Taxonomy, *, are_logs: bool
) -> tuple[list[list[int]], list[float]]:
    """Labels [B, L] and probabilities [B] of the best paths, found from coarse to fine.

    For each class it keeps the log-probability of the best path that ends there. A class of unknown parent
    stands below the best one. The probabilities of a marginal head are of nested events, a species being part
    of its genus, so a path's probability is its last class's.
    """
    total, above = logs[0], []  # for each level after the first: parents [C], best class above [B]
    for log, row in zip(logs[1:], taxonomy.parents, strict=True):
        best, label = total.max(dim=1)
        parents = torch.from_numpy(np.fromiter(row, np.int64, len(row))).to(log.device)
        above.append((parents, label))
        if are_logs:
            total = log
            continue
        total = total.index_select(1, parents.clamp_min(0))
        if UNKNOWN in row:
            total = torch.where(parents == UNKNOWN, best[:, None], total)
        total = log + total
    value, label = total.max(dim=1)
    labels = [label]
    for parents, best_label in reversed(above):
        label = torch.where(parents[label] == UNKNOWN, best_label, parents[label])
        labels.insert(0, label)
    return torch.stack(labels, dim=1).tolist(), value.exp().tolist()
