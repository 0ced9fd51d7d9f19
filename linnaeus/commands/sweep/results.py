"""The results of a sweep, as objects and as plain data for files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from linnaeus.commands.tables import Figures
from linnaeus.launchers.interface import Job
from linnaeus.launchers.outcome import Outcome

RunStatus = Literal["finished", "failed", "interrupted", "pruned", "running", "pending", "unknown", "not run"]
PLANNED = ("effective_batch", "learning_rate", "warmup_steps", "total_steps")
"""Figures of a run's batch plan."""
SEED = "EXPERIMENT.SEED"
"""Runs that differ in it alone are repetitions of one measurement."""


@dataclass
class Row:
    """One run.

    Attributes:
        values: the text of each swept key's value.
        folder: where its files are.
        outcome: how its process ended; None before it has.
        job: who runs it; None while nobody does.
        pruned: whether a search has ended it before its end.
    """

    values: dict[str, str]
    folder: Path
    outcome: Outcome | None = None
    job: Job | None = None
    pruned: bool = False

    @property
    def title(self) -> str:
        """The values as they are typed on a command line."""
        return " ".join(f"{key}={value}" for key, value in self.values.items())

    @property
    def status(self) -> RunStatus:
        """How far the run has come."""
        if self.job is not None:
            return self.job.kind
        if self.outcome is None:
            return "not run"
        if self.outcome.finished:
            return "finished"
        if self.pruned:
            return "pruned"
        return "interrupted" if self.outcome.was_stopped else "failed"

    @property
    def result(self) -> Mapping[str, Any]:
        """The content of the run's `result.json`; empty for a run that has not ended well."""
        return (self.outcome and self.outcome.result) or {}

    def value(self, name: str) -> float | None:
        """A metric of the last validation, or `training_s`; None for a run without it."""
        values: dict[str, float | None] = {**self.result.get("metrics", {})}
        return self.result.get(name) if name == "training_s" else values.get(name)

    def scalars(self, metrics: Sequence[str]) -> dict[str, Any]:
        """The row of the table, with these metrics."""
        outcome = self.outcome
        return {
            **self.values,
            "status": self.status,
            "exit_code": None if outcome is None else outcome.exit_code,
            **{name: self.result.get(name) for name in PLANNED},
            **{name: self.value(name) for name in metrics},
            "training_s": self.result.get("training_s"),
            "images_per_s": self.result.get("images_per_s"),
            "seconds": None if outcome is None else outcome.seconds,
            "folder": str(self.folder),
            "reason": self.job.reason or None if self.job else outcome and outcome.reason,
        }

    def as_dict(self) -> dict[str, Any]:
        """The entry of the JSON file."""
        fields = self.scalars([])
        values = {key: fields.pop(key) for key in self.values}
        return {"values": values, **fields, "metrics": dict(self.result.get("metrics", {}))}


@dataclass
class Sweep(Figures):
    """All runs, finished or not.

    Attributes:
        rows: in the order of the grid.
        wanted_metric: from `--metric`.
    """

    rows: list[Row] = field(default_factory=list)
    wanted_metric: str | None = None

    @property
    def metric(self) -> str:
        """The metric that is compared: the wanted one if the runs have it, else their own headline."""
        known = self.metrics
        if self.wanted_metric in known:
            return str(self.wanted_metric)
        return next((row.result["headline"] for row in self.rows if row.result), "loss")

    @property
    def metrics(self) -> list[str]:
        """All metrics of the runs, in their order."""
        names = (name for row in self.rows for name in row.result.get("metrics", {}))
        return list(dict.fromkeys(names))

    def scalars(self) -> list[dict[str, Any]]:
        """Rows of the table."""
        return [row.scalars(self.metrics) for row in self.rows]

    def as_dict(self) -> dict[str, Any]:
        """Content of the JSON file."""
        return {"metric": self.metric, "runs": [row.as_dict() for row in self.rows]}

    def with_status(self, *wanted: RunStatus) -> list[Row]:
        """The rows with one of these statuses."""
        return [row for row in self.rows if row.status in wanted]


@dataclass
class Series:
    """Finished runs that form one line of a picture: they differ only in size and seed.

    Attributes:
        label: the values of the other keys; empty when there are none.
        rows: by ascending effective batch size.
    """

    label: str
    rows: list[Row]

    def means(self, name: str) -> list[tuple[int, float]]:
        """(effective batch size, mean over the runs of that size) of a metric, or of `training_s`."""
        by_size: dict[int, list[float]] = {}
        for row in self.rows:
            value = row.value(name)
            if value is not None:
                by_size.setdefault(row.result["effective_batch"], []).append(value)
        return [(size, sum(values) / len(values)) for size, values in by_size.items()]


def series_of(rows: Sequence[Row]) -> list[Series]:
    """Group the finished runs into lines over the effective batch size, in the order of the grid."""
    finished = sorted((row for row in rows if row.result), key=lambda row: row.result["effective_batch"])
    size_keys = {key for row in finished[:1] for key in row.values if _changes_size(key, finished)}
    labels = dict.fromkeys(_label(row, size_keys) for row in rows if row.result)
    return [Series(label, [row for row in finished if _label(row, size_keys) == label]) for label in labels]


def _label(row: Row, size_keys: set[str]) -> str:
    shown = {key: value for key, value in row.values.items() if key not in size_keys and key != SEED}
    return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in shown.items())


def _changes_size(key: str, finished: Sequence[Row]) -> bool:
    """Whether runs that differ only in this key have different effective batch sizes."""
    sizes: dict[tuple[tuple[str, str], ...], set[int]] = {}
    for row in finished:
        others = tuple(item for item in row.values.items() if item[0] != key)
        sizes.setdefault(others, set()).add(row.result["effective_batch"])
    return any(len(found) > 1 for found in sizes.values())
