"""The results of runs, as objects and as plain data for files."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from linnaeus.cli.compare.differences import (
    DATASET,
    LOSS,
    OF_TRAINING_ALONE,
    differing_keys,
    settings_of,
    shown,
)
from linnaeus.cli.compare.history import (
    History,
    history_version,
    is_smaller_better,
    numbers_in,
    read_history,
)
from linnaeus.cli.tables import Figures
from linnaeus.config.keys import suggest
from linnaeus.launchers.interface import Job, JobKind
from linnaeus.launchers.outcome import Outcome

RunStatus = JobKind | Literal["finished", "failed", "interrupted", "pruned", "running?", "not run"]
"""`running?`: another machine holds the lock, and its process cannot be checked here."""
PLANNED = {
    "MICRO_BATCH": "batch_size", "ACCUMULATION_STEPS": "accumulation_steps", "WORLD_SIZE": "world_size",
    "EFFECTIVE_BATCH": "effective_batch", "LEARNING_RATE": "learning_rate", "WARMUP_STEPS": "warmup_steps",
    "TOTAL_STEPS": "total_steps",
}  # fmt: skip
"""Entries of the plan in `config.yaml`, and what `result.json` calls them."""


@dataclass
class Row:
    """One run.

    Attributes:
        values: the text of each key in which the runs differ.
        folder: where its files are.
        outcome: how its process ended; None for a run that goes on, or whose end nobody saw.
        job: who runs it, if a launcher has started it and it goes on.
        pruned: whether a search has ended it before its end.
        name: what the table calls it; empty where the values do.
        file_status: its status while there is neither a job nor an outcome.
        plan: figures of its batch plan with the names of `result.json`, for a run without a result.
        failure: why it failed, where there is no outcome to say so.
        config: its configuration by dotted key; None where that is not known.
        problem: why the configuration is not known; empty where it is.
    """

    values: dict[str, str]
    folder: Path
    outcome: Outcome | None = None
    job: Job | None = None
    pruned: bool = False
    name: str = ""
    file_status: RunStatus = "not run"
    plan: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None
    config: dict[str, Any] | None = None
    problem: str = ""
    _read: tuple[object, History] | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, run: Row, values: dict[str, str], name: str = "") -> Row:
        """The row of a run that was read, with the values of a table."""
        return dataclasses.replace(run, values=values, name=name)

    @property
    def title(self) -> str:
        """Its name, or the values as they are typed on a command line."""
        return self.name or " ".join(f"{key}={value}" for key, value in self.values.items())

    @property
    def status(self) -> RunStatus:
        """How far the run has come: as its job, its outcome or else its files say.

        A run that somebody stopped, or whose process was ended, is the same to a sweep, which resumes both.
        """
        if self.job is not None:
            return self.job.kind
        if self.outcome is None:
            return self.file_status
        if self.outcome.finished:
            return "finished"
        if self.pruned:
            return "pruned"
        return "interrupted" if self.outcome.was_interrupted else "failed"

    @property
    def reason(self) -> str | None:
        """Why the run has not ended well, or waits; None for one that does not say."""
        if self.job is not None:
            return self.job.reason or None
        return self.failure if self.outcome is None else self.outcome.reason

    @property
    def result(self) -> Mapping[str, Any]:
        """The numbers, metrics and headline of the run's `result.json`; empty where it has not ended well."""
        content = (self.outcome and self.outcome.result) or {}
        metrics, headline = numbers_in(content.get("metrics")), content.get("headline")
        return numbers_in(content) | {"metrics": metrics, "headline": headline} if content else {}

    @property
    def history(self) -> History:
        """The validations so far; empty for a run that has not begun."""
        if self.status == "not run":
            return History()
        version = history_version(self.folder)
        if self._read is None or self._read[0] != version:
            self._read = version, read_history(self.folder)
        return self._read[1]

    @property
    def metrics(self) -> list[str]:
        """The names of its validation metrics."""
        return list(dict.fromkeys([*self.result.get("metrics", {}), *self.history.points]))

    @property
    def headline(self) -> str | None:
        """The metric that decides which checkpoint is best: top-1 of the finest rank, or the loss."""
        if isinstance(headline := self.result.get("headline"), str):
            return headline
        metrics = self.metrics
        finest = [name for name in metrics if name.startswith("top1/")]
        return finest[-1] if finest else next(iter(metrics), None)

    def planned(self, name: str) -> Any:
        """A figure of its batch plan; None where it is not known."""
        return self.result.get(name, self.plan.get(name))

    def value(self, name: str, history: History | None = None) -> float | None:
        """A metric of the last validation, or `training_s`; None for a run without it.

        Args:
            name: of the metric.
            history: the run's, where the caller has read it.
        """
        if name == "training_s":
            return self.result.get(name)
        values: Mapping[str, float | None] = self.result.get("metrics", {})
        return values[name] if name in values else (history or self.history).last(name)

    def scalars(self, metrics: Sequence[str]) -> dict[str, Any]:
        """The row of the table, with these metrics."""
        outcome, history = self.outcome, self.history
        best = {name: history.best(name) for name in metrics}
        return {
            **({"run": self.name} if self.name else {}),
            **self.values,
            "status": self.status,
            "exit_code": None if outcome is None else outcome.exit_code,
            **{name: self.planned(name) for name in PLANNED.values()},
            "epoch": history.epoch or None,
            **{name: self.value(name, history) for name in metrics},
            **{f"best {name}": found and found.value for name, found in best.items()},
            **{f"best {name} epoch": found and found.epoch for name, found in best.items()},
            "training_s": self.result.get("training_s"),
            "images_per_s": self.result.get("images_per_s"),
            "seconds": None if outcome is None else outcome.seconds,
            "folder": str(self.folder),
            "reason": self.reason,
        }

    def as_dict(self) -> dict[str, Any]:
        """The entry of the JSON file."""
        fields = self.scalars([])
        values = {key: fields.pop(key) for key in self.values}
        metrics, history = self.metrics, self.history
        best = {name: found for name in metrics if (found := history.best(name)) is not None}
        return {
            "values": values,
            **fields,
            "metrics": {name: self.value(name, history) for name in metrics},
            "best": {name: {"value": found.value, "epoch": found.epoch} for name, found in best.items()},
        }


@dataclass
class Comparison(Figures):
    """Runs side by side, finished or not.

    Attributes:
        rows: in the order in which they are shown.
        wanted_metric: from `--metric`.
        notes: sentences about what the figures do not say.
    """

    rows: list[Row] = field(default_factory=list)
    wanted_metric: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def keys(self) -> list[str]:
        """The keys in which the runs differ."""
        return list(self.rows[0].values)

    @property
    def metric(self) -> str:
        """The metric that is compared: the wanted one if a run has it, else the headline of most runs."""
        if self.wanted_metric is not None and self.wanted_metric in self.metrics:
            return self.wanted_metric
        headlines = Counter(row.headline for row in self.rows if row.headline is not None)
        return headlines.most_common(1)[0][0] if headlines else "loss"

    @property
    def metrics(self) -> list[str]:
        """All metrics of the runs, in their order."""
        return list(dict.fromkeys(name for row in self.rows for name in row.metrics))

    @property
    def unknown_metric(self) -> str | None:
        """A sentence for a wanted metric that no run has; None where one has it, or none is wanted."""
        wanted, known = self.wanted_metric, self.metrics
        if wanted is None or wanted in known:
            return None
        there_are = ", ".join(known) or "none yet: no run has been validated"
        return f"no run has {wanted!r}{suggest(wanted, known)}; there are {there_are}"

    def with_status(self, *wanted: RunStatus) -> list[Row]:
        """The rows with one of these statuses."""
        return [row for row in self.rows if row.status in wanted]

    def scalars(self) -> list[dict[str, Any]]:
        """Rows of the table."""
        metrics = self.metrics
        return [row.scalars(metrics) for row in self.rows]

    @property
    def columns(self) -> list[str]:
        """Columns of the table, in order."""
        return list(self.rows[0].scalars(self.metrics))

    def as_dict(self) -> dict[str, Any]:
        """Content of the JSON file."""
        metric = self.metric
        return {
            "metric": metric,
            "differences": self.keys,
            "notes": self.notes,
            "runs": [row.as_dict() | {"curve": row.history.points.get(metric, [])} for row in self.rows],
        }


def compared(runs: Sequence[Row], names: Sequence[str], metric: str | None = None) -> Comparison:
    """Put runs side by side, in their order.

    Args:
        runs: as they were read.
        names: what to call each.
        metric: the metric that is compared; None for the one of most runs.
    """
    settings = [None if run.config is None else settings_of(run.config) for run in runs]
    keys = differing_keys([each for each in settings if each is not None])
    rows = [
        Row.of(run, {key: shown(known or {}, key) for key in keys}, name)
        for run, known, name in zip(runs, settings, names, strict=True)
    ]
    comparison = Comparison(rows, metric)
    comparison.notes = [*_of_configurations(runs, names), *_of_metrics(comparison)]
    return comparison


def _of_configurations(runs: Sequence[Row], names: Sequence[str]) -> list[str]:
    return [
        f"{name}: {run.problem}; what differs is not known of it"
        for run, name in zip(runs, names, strict=True)
        if run.problem
    ]


def _of_metrics(comparison: Comparison) -> list[str]:
    """Why the metrics of the runs cannot be compared, or not all of them."""
    rows, metric, keys = comparison.rows, comparison.metric, comparison.keys
    notes = []
    of_data = [key for key in keys if key.startswith(DATASET) and key not in OF_TRAINING_ALONE]
    if of_data:
        notes.append(
            f"the runs have different data ({', '.join(of_data)}): a metric of one cannot be compared with "
            "that of another"
        )
    of_loss = [key for key in keys if key.startswith(LOSS)]
    if of_loss and is_smaller_better(metric):
        notes.append(
            f"the runs have different losses ({', '.join(of_loss)}): their {metric} is not the same figure"
        )
    without = [row.name for row in rows if row.metrics and metric not in row.metrics]
    if without:
        most = ", ".join(without[:3]) + (f" and {len(without) - 3} more" if len(without) > 3 else "")
        notes.append(
            f"{metric}: not measured by {most}; --metric compares another one of "
            f"{', '.join(comparison.metrics)}"
        )
    return notes
