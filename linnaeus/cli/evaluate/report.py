"""What an evaluation has found: files for programs, and tables for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from linnaeus.cli.tables import Figures, cell, table
from linnaeus.inference.figures import NUM_BINS, Distance, LevelFigures, SetFigures
from linnaeus.runtime.words import counted

NUM_CONFUSIONS = 100
"""Confusions of each level in the JSON file."""
NUM_SHOWN = 5
"""Classes and confusions in a table."""
SET_COLUMNS = ("average_precision", "best_threshold", "best_f1")
"""Columns of a class where samples have several labels."""


@dataclass
class Evaluation(Figures):
    """All that an evaluation has found.

    Attributes:
        about: what was evaluated, and how, by its name in the JSON file.
        metrics: those that training logs.
        levels: the figures of each level, coarse to fine.
        distance: of mistakes in the taxonomy; None without one.
        logged: the figures of training; None where the checkpoint has none for this data.
    """

    about: dict[str, Any]
    metrics: dict[str, float]
    levels: list[LevelFigures | SetFigures]
    distance: Distance | None
    logged: dict[str, float] | None

    @property
    def data_title(self) -> str:
        """What was evaluated, for people."""
        data = self.about["data"]
        return f"{counted(data['samples'], 'sample')} of {data['source']} ({data['part']})"

    def scalars(self) -> list[dict[str, Any]]:
        """One row per level and class."""
        rows = []
        for each in self.levels:
            names = [
                "label",
                "class",
                "samples",
                "predicted",
                "correct",
                "recall",
                "precision",
                "f1",
            ]
            found = each.classes
            counts = found.num_samples, found.num_predicted, found.num_correct
            tensors = [*counts, found.recall, found.precision, found.f1]
            if isinstance(each, SetFigures):
                names += SET_COLUMNS
                tensors += each.average_precision, each.best_threshold, each.best_f1
            columns = (
                range(len(each.level.classes)),
                each.level.classes,
                *(t.tolist() for t in tensors),
            )
            rows += [
                _finite({"level": each.level.name, **dict(zip(names, row, strict=True))})
                for row in zip(*columns, strict=True)
            ]
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Content of the JSON file."""
        return {
            **self.about,
            "metrics": _finite(self.metrics),
            "levels": {level.level.name: self._level(level) for level in self.levels},
            "distance_of_mistakes": self.distance and asdict(self.distance),
            "logged": self.logged and _finite(self.logged),
            "classes": self.scalars(),
        }

    def level_row(self, level: LevelFigures | SetFigures) -> dict[str, Any]:
        """The figures of a level that are single numbers."""
        if isinstance(level, SetFigures):
            found = level.classes
            return _finite(
                {
                    "samples": level.num_samples,
                    "unlabelled": level.num_unlabelled,
                    "classes": len(level.level.classes),
                    "classes_with_samples": int((found.num_samples > 0).sum()),
                    "map": level.mean(level.average_precision),
                    "macro_recall": level.mean(found.recall),
                    "macro_precision": level.mean(found.precision),
                    "macro_f1": level.mean(found.f1),
                    "best_macro_f1": level.mean(level.best_f1),
                }
            )
        return _finite(
            {
                "samples": level.num_samples,
                "unlabelled": level.num_unlabelled,
                "classes": len(level.level.classes),
                "classes_with_samples": level.num_classes_with_samples,
                "top1": level.top1,
                "top5": self.metrics.get(f"top5/{level.level.name}") if level.num_samples else None,
                "macro_recall": level.macro_recall,
                "macro_precision": level.macro_precision,
                "macro_f1": level.macro_f1,
                "calibration_error": level.calibration_error,
                "cross_entropy": level.cross_entropy,
            }
        )

    def _level(self, level: LevelFigures | SetFigures) -> dict[str, Any]:
        if isinstance(level, SetFigures):
            return self.level_row(level)
        bins = [
            {"from": n / NUM_BINS, "to": (n + 1) / NUM_BINS, "samples": int(samples)}
            | _finite({"confidence": confidence, "accuracy": accuracy})
            for n, (samples, confidence, accuracy) in enumerate(level.bins.T.tolist())
        ]
        confusions = [asdict(confusion) for confusion in level.confusions(NUM_CONFUSIONS)]
        return {**self.level_row(level), "calibration_bins": bins, "confusions": confusions}


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with None in place of numbers that are not finite, which JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


# Tables.


def show(evaluation: Evaluation, console: Console) -> None:
    """Print the tables and the notes."""
    headings = {
        "samples": "samples",
        "unlabelled": "unlabelled",
        "top1": "top-1",
        "top5": "top-5",
        "map": "mAP",
        "macro_recall": "macro recall",
        "macro_precision": "precision",
        "macro_f1": "F1",
        "best_macro_f1": "best F1",
        "calibration_error": "calib. error",
        "cross_entropy": "cross-entropy",
    }
    rows = []
    known = {name for level in evaluation.levels for name in evaluation.level_row(level)}
    headings = {name: heading for name, heading in headings.items() if name in known}
    for level in evaluation.levels:
        row = evaluation.level_row(level)
        cells = [cell(row[name], "d" if isinstance(row[name], int) else ".4f") for name in headings]
        rows.append([level.level.name, *cells])
    if rows:
        console.print(
            table(evaluation.data_title, ["level", *headings.values()], rows, left=("level",))
        )
    finest = next((level for level in reversed(evaluation.levels) if level.num_samples), None)
    if isinstance(finest, SetFigures):
        values = finest.average_precision, finest.best_threshold, finest.best_f1
        order = finest.average_precision.argsort(stable=True)[:NUM_SHOWN].tolist()
        rows = [
            [finest.level.classes[n], str(int(finest.classes.num_samples[n]))]
            + [f"{each[n]:.4f}".replace("nan", "") for each in (finest.classes.f1, *values)]
            for n in order
        ]
        columns = ["class", "samples", "F1", "average precision", "best threshold", "F1 there"]
        title = f"Lowest average precision: {finest.level.name}"
        console.print(table(title, columns, rows, left=("class",)))
    elif finest is not None and (worst := finest.worst(NUM_SHOWN)):
        name, found = finest.level.name, finest.classes
        rows = [
            [finest.level.classes[n], str(int(found.num_samples[n]))]
            + [f"{values[n]:.4f}".replace("nan", "") for values in (found.recall, found.precision)]
            for n in worst
        ]
        columns = ["class", "samples", "recall", "precision"]
        console.print(table(f"Lowest recall: {name}", columns, rows, left=("class",)))
        rows = [
            [each.true, each.predicted, str(each.samples), f"{each.share:.1%}"]
            for each in finest.confusions(NUM_SHOWN)
        ]
        columns = ["class", "taken for", "samples", "of the class"]
        console.print(
            table(f"Largest confusions: {name}", columns, rows, left=("class", "taken for"))
        )
    for note in notes(evaluation):
        console.print(note, soft_wrap=True)


def notes(evaluation: Evaluation) -> list[str]:
    """Notes below the tables: loss, consistency, distance of mistakes, the comparison with training."""
    metrics, distance = evaluation.metrics, evaluation.distance
    found = [f"loss {metrics['loss']:.4f}"]
    if "consistent" in metrics:
        found[0] += (
            f"; of the samples whose predicted classes have known parents, {metrics['consistent']:.2%} agree "
            "with the taxonomy"
        )
    if distance is not None and distance.mean_over_mistakes is not None:
        found.append(
            f"mean distance of {counted(distance.num_mistakes, 'mistake')} to the lowest common ancestor: "
            f"{distance.mean_over_mistakes:.3f} levels ({distance.mean_over_samples:.3f} over all samples, "
            "correct ones as 0)"
        )
    if evaluation.logged is not None:
        found.append(logged_sentence(evaluation.logged, metrics))
    return found


def logged_sentence(logged: Mapping[str, float], metrics: Mapping[str, float]) -> str:
    """The comparison with the figures of training."""
    names = dict.fromkeys([*logged, *metrics])
    texts = {
        name: [cell(values.get(name), ".6g") or "absent" for values in (metrics, logged)]
        for name in names
    }
    unequal = [name for name in names if _finite(metrics).get(name) != _finite(logged).get(name)]
    if not unequal:
        return "same figures as in training, to the last digit"
    found = ", ".join(f"{name} {texts[name][0]} ({texts[name][1]} in training)" for name in unequal)
    return (
        f"figures differ from training: {found}; the last digits depend on preprocessing, batch size, "
        "precision, processes, device and torch"
    )
