"""The results of an evaluation as plain data: JSON with everything, CSV with a row per class."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linnaeus.cli.tables import Figures
from linnaeus.inference.figures import ClassFigures, Distance, LevelFigures
from linnaeus.inference.tally import NUM_BINS

NUM_CONFUSIONS = 100
"""Confusions of each level in the JSON file."""


@dataclass(frozen=True)
class Logged:
    """The figures that training has logged for this checkpoint, beside those of an evaluation.

    Attributes:
        values: the logged ones, by name.
        settings: what the evaluation does otherwise than the run did, as text.
        unequal: names of the figures that are not equal to the last digit, or that only one of both has.
    """

    values: dict[str, float]
    settings: Sequence[str]
    unequal: Sequence[str]

    @classmethod
    def of(cls, values: dict[str, float], metrics: dict[str, float], settings: Sequence[str]) -> Logged:
        """Compare the figures of an evaluation, `metrics`, with the logged ones."""
        unequal = [name for name in {**values, **metrics} if not _same(metrics.get(name), values.get(name))]
        return cls(values, settings, unequal)

    def sentence(self, metrics: dict[str, float]) -> str:
        """The comparison, for people."""
        shown = ", ".join(
            f"{name} {_shown(metrics.get(name))} ({_shown(self.values.get(name))} in training)"
            for name in self.unequal
        )
        with_settings = f" with {', '.join(self.settings)}" if self.settings else ""
        if not self.unequal:
            return f"same figures as in training, to the last digit{with_settings}"
        reason = (
            with_settings
            or ", although data, sizes and device are the run's: the files may have changed since training, "
            "or the device does not repeat its sums"
        )
        return f"figures differ from training{reason}: {shown}"


@dataclass
class Evaluation(Figures):
    """All that an evaluation has found.

    Attributes:
        checkpoint: file, run, epoch and step.
        data: what was evaluated.
        settings: batch size, processes, device, precision.
        versions: of what ran it.
        metrics: those that training logs.
        levels: the figures of each level, coarse to fine.
        distance: of mistakes in the taxonomy; None without one.
        logged: the comparison with training; None where the checkpoint has no figures for this data.
        duration_s: of the pass over the data.
    """

    checkpoint: dict[str, Any]
    data: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, Any]
    metrics: dict[str, float]
    levels: list[LevelFigures]
    distance: Distance | None
    logged: Logged | None
    duration_s: float
    notes: list[str] = field(default_factory=list)

    COLUMNS = ("level", "label", "class", "samples", "predicted", "correct", "recall", "precision", "f1")

    @property
    def columns(self) -> list[str]:
        """Columns of the CSV file."""
        return list(self.COLUMNS)

    def scalars(self) -> list[dict[str, Any]]:
        """One row per level and class."""
        return [row for level in self.levels for row in _class_rows(level)]

    def as_dict(self) -> dict[str, Any]:
        """Content of the JSON file."""
        distance = self.distance
        logged = self.logged
        return {
            "checkpoint": self.checkpoint,
            "data": self.data,
            "settings": self.settings,
            "versions": self.versions,
            "metrics": {name: _finite(value) for name, value in self.metrics.items()},
            "logged": None
            if logged is None
            else {
                "metrics": {name: _finite(value) for name, value in logged.values.items()},
                "same": not logged.unequal,
                "unequal": list(logged.unequal),
                "other_settings": list(logged.settings),
            },
            "distance_of_mistakes": None
            if distance is None
            else {
                "mean_over_mistakes": distance.mean_over_mistakes,
                "mean_over_samples": distance.mean_over_samples,
                "num_mistakes": distance.num_mistakes,
                "num_left_out": distance.num_left_out,
            },
            "levels": {level.level.name: self._level(level) for level in self.levels},
            "classes": self.scalars(),
            "notes": self.notes,
            "duration_s": self.duration_s,
        }

    def level_row(self, level: LevelFigures) -> dict[str, Any]:
        """The figures of a level that are single numbers."""
        name = level.level.name
        return {
            "samples": level.num_samples,
            "unlabelled": level.num_unlabelled,
            "classes": len(level.level.classes),
            "classes_with_samples": level.num_classes_with_samples,
            "top1": level.top1,
            "top5": self.metrics.get(f"top5/{name}") if level.num_samples else None,
            "macro_recall": level.macro_recall,
            "macro_precision": level.macro_precision,
            "macro_f1": level.macro_f1,
            "calibration_error": level.calibration_error,
            "cross_entropy": _finite(level.cross_entropy),
        }

    def _level(self, level: LevelFigures) -> dict[str, Any]:
        bins = [
            {
                "from": number / NUM_BINS, "to": (number + 1) / NUM_BINS, "samples": int(samples),
                "confidence": _finite(confidence), "accuracy": _finite(accuracy),
            }
            for number, (samples, confidence, accuracy) in enumerate(level.bins.T.tolist())
        ]  # fmt: skip
        confusions = [dataclasses.asdict(confusion) for confusion in level.confusions(NUM_CONFUSIONS)]
        return {**self.level_row(level), "calibration_bins": bins, "confusions": confusions}


def files_of(output: Path) -> tuple[Path, Path, Path]:
    """The JSON file, the CSV file and the picture by default, from the beginning of their names."""
    return tuple(output.with_name(output.name + end) for end in (".json", "_classes.csv", ".png"))  # type: ignore[return-value]


def _class_rows(level: LevelFigures) -> list[dict[str, Any]]:
    classes: ClassFigures = level.classes
    columns = (classes.num_samples, classes.num_predicted, classes.num_correct)
    fractions = (classes.recall, classes.precision, classes.f1)
    rows = zip(level.level.classes, *(c.tolist() for c in (*columns, *fractions)), strict=True)
    return [
        dict(zip(Evaluation.COLUMNS, (level.level.name, label, *map(_finite, row)), strict=True))
        for label, row in enumerate(rows)
    ]


def _finite(value: Any) -> Any:
    """None in place of a number that is not finite, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _same(value: float | None, other: float | None) -> bool:
    if value is None or other is None:
        return value is other
    return value == other or (math.isnan(value) and math.isnan(other))


def _shown(value: float | None) -> str:
    return "absent" if value is None else f"{value:.6g}"
