"""What a model says about an image: classes with probabilities, and the best path through the taxonomy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linnaeus.data.taxonomy import UNKNOWN, Taxonomy
from linnaeus.errors import LinnaeusError
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
    """What the model says about one image.

    Attributes:
        source: the path, or the position of an image that came without one.
        levels: for each level, coarse to fine, the most probable classes with their probabilities, the best
            one first.
        path: the most probable consistent path; None where it was not asked for.
    """

    source: str | int
    levels: dict[str, list[tuple[str, float]]]
    path: ConsistentPath | None = None

    def __repr__(self) -> str:
        best = ", ".join(f"{name}: {_named(classes[0])}" for name, classes in self.levels.items())
        path = "" if self.path is None else f", path: {self.path}"
        return f"Prediction({self.source!r}, {best}{path})"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as they stand in a JSON file."""
        levels = {
            name: [{"class": label, "probability": probability} for label, probability in classes]
            for name, classes in self.levels.items()
        }
        content: dict[str, Any] = {"path": self.source, "levels": levels}
        if self.path is not None:
            content["consistent"] = {
                "classes": self.path.classes,
                "probability": self.path.probability,
                "differs": self.path.differs,
            }
        return content


def percent(probability: float) -> str:
    """A probability for people.

    >>> percent(0.97131), percent(0.00002)
    ('97.1 %', '<0.1 %')
    """
    return f"{probability:.1%}".replace("%", " %") if probability >= 0.001 else "<0.1 %"


def _named(pair: tuple[str, float]) -> str:
    return f"{pair[0]} {percent(pair[1])}"


@dataclass(frozen=True)
class Scores:
    """What `Interpreter.scores` takes from a batch: all that predictions need, on the host.

    Attributes:
        labels, probabilities: for each level, [B, k], best first.
        paths: labels [B, R] of the most probable consistent path; None where it was not asked for.
        path_probabilities: [B].
    """

    labels: list[Tensor]
    probabilities: list[Tensor]
    paths: Tensor | None = None
    path_probabilities: Tensor | None = None


class Interpreter(nn.Module):
    """Turns outputs of a model into predictions.

    Args:
        taxonomy: levels, classes and parents.
        top: number of classes of each level; a level with fewer gives all.
        path: whether to look for the most probable consistent path.
        are_logs: whether outputs are log-probabilities, each the sum of those below it, and not logits.
    """

    def __init__(self, taxonomy: Taxonomy, *, top: int, path: bool, are_logs: bool = False) -> None:
        super().__init__()
        self._taxonomy = taxonomy
        self._are_logs = are_logs
        self._top = top
        self._path = path
        for level, parents in enumerate(taxonomy.parents, start=1):
            self.register_buffer(f"parents_{level}", torch.tensor(parents), persistent=False)

    @torch.no_grad()
    def scores(self, outputs: Any) -> Scores:
        """The best classes of a batch. Level by level and a path at a time, it takes memory for [B, classes].

        Args:
            outputs: of the model, in any supported form.

        Raises:
            ConfigError: the outputs have another form.
            LinnaeusError: they are not finite, or not one for each class.
        """
        logs = log_probabilities_per_level(outputs, self._taxonomy, are_logs=self._are_logs)
        best = [log.topk(min(self._top, log.shape[1]), dim=1) for log in logs]
        scores = Scores([found.indices.cpu() for found in best], [found.values.exp().cpu() for found in best])
        if not self._path:
            return scores
        path_logs, paths = self._best_paths(logs)
        return Scores(scores.labels, scores.probabilities, paths.cpu(), path_logs.exp().cpu())

    def _best_paths(self, logs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Log-probability [B] and labels [B, R] of the best path, found from coarse to fine.

        Of each class it keeps the log-probability of the best path that ends there. Nothing is known against
        a path through an unknown parent, so any class above is taken for it. Log-probabilities of a marginal
        head are of nested events, a species being part of its genus: that of a path is that of its end.
        """
        total = logs[0]
        above: list[Tensor] = []  # for each level after the first, [B, classes]: the label above each class
        for level, log in enumerate(logs[1:], start=1):
            parents = getattr(self, f"parents_{level}")
            best = total.max(dim=1, keepdim=True)
            is_known = parents != UNKNOWN
            parents = torch.where(is_known, parents.clamp(min=0), best.indices)
            total = log if self._are_logs else log + total.gather(1, parents)
            above.append(parents)
        value, label = total.max(dim=1)
        labels = [label]
        for parents in reversed(above):
            label = parents.gather(1, label[:, None])[:, 0]
            labels.insert(0, label)
        return value, torch.stack(labels, dim=1)

    def predictions(self, sources: Sequence[str | int], scores: Scores) -> list[Prediction]:
        """The predictions of a batch.

        Args:
            sources: where each image came from.
            scores: of the batch.
        """
        levels = self._taxonomy.levels
        labels = [tensor.tolist() for tensor in scores.labels]
        probabilities = [tensor.tolist() for tensor in scores.probabilities]
        paths = self._paths(scores)
        return [
            Prediction(
                source,
                {
                    level.name: [
                        (level.classes[label], probability)
                        for label, probability in zip(labels[r][i], probabilities[r][i], strict=True)
                    ]
                    for r, level in enumerate(levels)
                },
                paths[i] if paths else None,
            )
            for i, source in enumerate(sources)
        ]

    def _paths(self, scores: Scores) -> list[ConsistentPath]:
        if scores.paths is None or scores.path_probabilities is None:
            return []
        best = torch.stack([labels[:, 0] for labels in scores.labels], dim=1)
        differs = (best != scores.paths).any(dim=1).tolist()
        return [
            ConsistentPath(
                {
                    level.name: level.classes[label]
                    for level, label in zip(self._taxonomy.levels, row, strict=True)
                },
                probability,
                is_other,
            )
            for row, probability, is_other in zip(
                scores.paths.tolist(), scores.path_probabilities.tolist(), differs, strict=True
            )
        ]


def log_probabilities_per_level(outputs: Any, taxonomy: Taxonomy, *, are_logs: bool) -> list[Tensor]:
    """Logarithms of the probabilities [B, classes] of each level, float32.

    Args:
        outputs: of a model, in any supported form.
        taxonomy: levels and classes.
        are_logs: see `linnaeus.training.losses.log_probabilities`.

    Raises:
        ConfigError: the outputs have another form.
        LinnaeusError: they are not finite, or not one for each class.
    """
    logs = []
    for level, logits in zip(taxonomy.levels, logits_per_level(outputs, taxonomy.names), strict=True):
        if logits.ndim != 2 or logits.shape[1] != len(level.classes):
            raise LinnaeusError(
                f"the model gives outputs {list(logits.shape)} for the {len(level.classes)} classes of rank "
                f"{level.name!r}; [B, {len(level.classes)}] is needed"
            )
        log = log_probabilities(logits, are_logs=are_logs)
        if bool(log.isnan().any()):
            raise LinnaeusError(
                f"the model's outputs for rank {level.name!r} are not finite: its weights are not, or its "
                "number format (TRAIN.AMP) overflows"
            )
        logs.append(log)
    return logs
