"""Results of an evaluation: files for programs, and tables for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from linnaeus.cli.tables import cell, save_figures, table
from linnaeus.inference.figures import NUM_BINS, Distance, LevelFigures, SetFigures
from linnaeus.runtime.words import counted

NUM_CONFUSIONS = 100
"""Confusions of each level in the JSON file."""
NUM_SHOWN = 5
"""Classes and confusions in a table."""
OF_CLASS = ("class", "samples", "recall", "precision")
OF_CLASS_OF_SETS = ("class", "samples", "f1", "average_precision", "best_threshold", "best_f1")
"""Columns of the tables."""


@dataclass
class Evaluation:
    """All that an evaluation has found.

    Attributes:
        about: the evaluated data and settings, by their names in the JSON file.
        metrics: those that training logs.
        levels: the metrics of each level, coarse to fine.
        distance: of mistakes in the taxonomy; None without one.
        logged: the metrics of training; None where the checkpoint has none for this data.
    """

    about: dict[str, Any]
    metrics: dict[str, float]
    levels: list[LevelFigures | SetFigures]
    distance: Distance | None
    logged: dict[str, float] | None

    @property
    def data_title(self) -> str:
        """Describe the evaluated data, for people."""
        data = self.about["data"]
        return f"{counted(data['samples'], 'sample')} of {data['source']} ({data['part']})"

    def save(self, path: Path) -> None:
        """Write the metrics of all classes, and as JSON all others too; the ending is the format."""
        classes = [row for level in self.levels for row in class_rows(level)]
        content = {
            **self.about,
            "metrics": _finite(self.metrics),
            "levels": {level.level.name: self._level(level) for level in self.levels},
            "distance_of_mistakes": self.distance and asdict(self.distance),
            "logged": self.logged and _finite(self.logged),
            "classes": classes,
        }
        save_figures(path, content, classes)

    def level_row(self, level: LevelFigures | SetFigures) -> dict[str, Any]:
        """Return the metrics of a level that are single numbers."""
        found = level.classes
        row: dict[str, Any] = {
            "samples": level.num_samples,
            "unlabelled": level.num_unlabelled,
            "classes": len(level.level.classes),
            "classes_with_samples": int((found.num_samples > 0).sum()),
        }
        if isinstance(level, SetFigures):
            of_classes = {
                "map": level.average_precision,
                "macro_recall": found.recall,
                "macro_precision": found.precision,
                "macro_f1": found.f1,
                "best_macro_f1": level.best_f1,
            }
            row |= {name: level.mean(values) for name, values in of_classes.items()}
        else:
            names = ("macro_recall", "macro_precision", "macro_f1", "calibration_error")
            row |= {
                "top1": level.top1,
                "top5": self.metrics.get(f"top5/{level.level.name}") if level.num_samples else None,
                **{name: getattr(level, name) for name in (*names, "cross_entropy")},
            }
        return _finite(row)

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

    def show(self, console: Console) -> None:
        """Print the tables and the notes."""
        if self.levels:
            rows = [{"level": each.level.name, **self.level_row(each)} for each in self.levels]
            names = [name for name in rows[0] if not name.startswith("classes")]
            _print(console, self.data_title, names, rows)
        finest = next((level for level in reversed(self.levels) if level.num_samples), None)
        if isinstance(finest, SetFigures):
            worst = finest.average_precision.argsort(stable=True)[:NUM_SHOWN].tolist()
            rows, title = class_rows(finest), f"Lowest average precision: {finest.level.name}"
            _print(console, title, OF_CLASS_OF_SETS, [rows[n] for n in worst])
        elif finest is not None and (worst := finest.worst(NUM_SHOWN)):
            rows, title = class_rows(finest), f"Lowest recall: {finest.level.name}"
            _print(console, title, OF_CLASS, [rows[n] for n in worst])
            confusions = [
                {**asdict(each), "class": each.true} for each in finest.confusions(NUM_SHOWN)
            ]
            title = f"Largest confusions: {finest.level.name}"
            _print(console, title, ("class", "predicted", "samples", "share"), confusions)
        for note in self._notes():
            console.print(note, soft_wrap=True)

    def _notes(self) -> list[str]:
        """Notes below the tables: loss, consistency, distance of mistakes, the comparison with training."""
        metrics, distance = self.metrics, self.distance
        found = [f"loss {metrics['loss']:.4f}"]
        if "consistent" in metrics:
            found[0] += (
                f"; of the samples whose predicted classes have known parents, {metrics['consistent']:.2%} "
                "agree with the taxonomy"
            )
        if distance is not None and distance.mean_over_mistakes is not None:
            found.append(
                f"mean distance of {counted(distance.num_mistakes, 'mistake')} to the lowest common "
                f"ancestor: {distance.mean_over_mistakes:.3f} levels ({distance.mean_over_samples:.3f} over "
                "all samples, correct ones as 0)"
            )
        if self.logged is not None:
            now, then = _finite(metrics), _finite(self.logged)
            unequal = [
                f"{name} {now.get(name)} ({then.get(name)} in training)"
                for name in {**then, **now}
                if now.get(name) != then.get(name)
            ]
            found.append(
                f"metrics differ from training: {', '.join(unequal)}; the last digits depend on "
                "preprocessing, batch size, precision, ranks, device and torch"
                if unequal
                else "same metrics as in training, to the last digit"
            )
        return found


def class_rows(level: LevelFigures | SetFigures) -> list[dict[str, Any]]:
    """Return one row for each class of a level."""
    found, names = level.classes, level.level.classes
    columns: dict[str, Any] = {
        "samples": found.num_samples,
        "predicted": found.num_predicted,
        "correct": found.num_correct,
        "recall": found.recall,
        "precision": found.precision,
        "f1": found.f1,
    }
    if isinstance(level, SetFigures):
        columns |= {name: getattr(level, name) for name in OF_CLASS_OF_SETS[3:]}
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [
        {"level": level.level.name, "label": label, "class": name}
        | _finite(dict(zip(columns, row, strict=True)))
        for label, (name, row) in enumerate(zip(names, rows, strict=True))
    ]


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with None in place of numbers that are not finite, which JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _print(console: Console, title: str, names: Sequence[str], rows: list[dict[str, Any]]) -> None:
    """Print a table of some metrics of the rows."""
    cells = [
        [cell(row.get(name), ".4f" if isinstance(row.get(name), float) else "") for name in names]
        for row in rows
    ]
    headings = [name.replace("_", "\n") for name in names]
    console.print(table(title, headings, cells, left=("level", "class", "predicted")))
