"""The validation metrics of a run over its epochs, from `metrics.jsonl`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linnaeus.files import METRICS

_NOT_METRICS = ("step", "epoch", "split", "time")
_MARK = b'"val"'
_SMALLER_IS_BETTER = ("loss", "error", "ece", "nll", "perplexity")


def is_smaller_better(metric: str) -> bool:
    """Whether a lower value of a metric is a better one.

    >>> is_smaller_better("loss"), is_smaller_better("top1/digit"), is_smaller_better("calibration_error")
    (True, False, True)
    """
    return any(part.endswith(_SMALLER_IS_BETTER) for part in metric.split("/"))


@dataclass(frozen=True)
class Best:
    """The best validation of a run: the value and the number of epochs after which it was measured."""

    value: float
    epoch: int


@dataclass
class History:
    """Validation metrics by name, each as (epochs trained, value) in order; None for a value not finite."""

    points: dict[str, list[tuple[int, float | None]]] = field(default_factory=dict)

    def last(self, metric: str) -> float | None:
        """The value of the last validation; None without one."""
        points = self.points.get(metric)
        return points[-1][1] if points else None

    def best(self, metric: str) -> Best | None:
        """The best value, and the first epoch that has it; None where no value is finite."""
        sign = -1 if is_smaller_better(metric) else 1
        finite = self.finite(metric)
        if not finite:
            return None
        epoch, value = max(finite, key=lambda point: (sign * point[1], -point[0]))
        return Best(value, epoch)

    def finite(self, metric: str) -> list[tuple[int, float]]:
        """The points that can be drawn."""
        return [(epoch, value) for epoch, value in self.points.get(metric, []) if value is not None]

    @property
    def epoch(self) -> int:
        """Epochs trained before the last validation; 0 before the first."""
        return max((points[-1][0] for points in self.points.values() if points), default=0)


def history_version(folder: Path) -> tuple[int, int]:
    """Changes when there is more to read."""
    try:
        status = (folder / METRICS).stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def read_history(folder: Path) -> History:
    """Read the validations of a run, a line at a time; empty where there is no such file.

    Lines that are no record, such as one that is being written, are left out.
    """
    by_epoch: dict[int, dict[str, float | None]] = {}
    try:
        with (folder / METRICS).open("rb") as file:
            for line in file:
                if _MARK in line and (record := _validation(line)) is not None:
                    by_epoch[record["epoch"]] = {
                        name: value for name, value in numbers_in(record).items() if name not in _NOT_METRICS
                    }
    except OSError:
        pass
    history = History()
    for epoch in sorted(by_epoch):
        for name, value in by_epoch[epoch].items():
            history.points.setdefault(name, []).append((epoch, value))
    return history


def _validation(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_record = isinstance(record, dict) and record.get("split") == "val"
    return record if is_record and type(record.get("epoch")) is int and record["epoch"] >= 0 else None


def numbers_in(record: object) -> dict[str, float | None]:
    """The numbers of a record by name, None for one not finite; nothing else that a damaged file may hold."""
    if not isinstance(record, Mapping):
        return {}
    return {
        name: value if value is not None and abs(value) <= sys.float_info.max else None
        for name, value in record.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }
