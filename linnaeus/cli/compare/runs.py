"""Runs as their folders tell them, and what differs between them. Imports no torch."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from linnaeus.cli.tables import Figures
from linnaeus.config.aliases import renamed
from linnaeus.config.dump import PLAN
from linnaeus.config.keys import KEYS, dotted
from linnaeus.metrics import score
from linnaeus.runtime.files import CONFIG, METRICS, RESULT, finite, read_json, read_text
from linnaeus.runtime.run_folder import RUN, RunStatus, State, read_result, read_state
from linnaeus.sweep.folder import ASKED, flattened

Flat = Mapping[str, Any]
"""A configuration as values by dotted key."""

SEED = "EXPERIMENT.SEED"
"""Runs that differ in it alone are repetitions of one measurement."""
_NOT_COMPARED = (
    "EXPERIMENT.NAME",
    "EXPERIMENT.OUTPUT_DIR",
    "TRAIN.AUTO_RESUME",
    "DATA.AUTOBATCH.START",
    "DATA.AUTOBATCH.START_VAL",
)
"""Where a run is and whether it may be resumed: no result depends on it, and a sweep sets it by itself."""
_LINE_BYTES = 1 << 20
"""No line of a run is as long: what follows is not read."""
_DEFAULTS = {dotted(path): key.default for path, key in KEYS.items()}
_PLANNED = {
    "MICRO_BATCH": "batch_size",
    "ACCUMULATION_STEPS": "accumulation_steps",
    "WORLD_SIZE": "world_size",
    "EFFECTIVE_BATCH": "effective_batch",
    "LEARNING_RATE": "learning_rate",
    "WARMUP_STEPS": "warmup_steps",
    "TOTAL_STEPS": "total_steps",
}
"""Entries of the plan in `config.yaml`, and what `result.json` calls them."""


# What differs.


def differing_keys(configs: Sequence[Flat]) -> list[str]:
    """The keys that were set to different values, in the order of the schema.

    Sizes that AutoBatch found were not set. A key that an older version did not write counts as its default.
    A key that follows another one, as validation's batch size does, is left out where it does so in all runs.

    >>> differing_keys([{"OPTIMIZER.LR": 0.1, "TRAIN.AMP": "off"}, {"OPTIMIZER.LR": 0.2}])
    ['OPTIMIZER.LR']
    """
    return [
        key
        for key in dict.fromkeys([*_DEFAULTS, *(key for config in configs for key in config)])
        if key not in _NOT_COMPARED
        and len({_comparable(config, key) for config in configs} - {None}) > 1
        and not all(_follows(config, key) for config in configs)
    ]


def _is_searched(config: Flat, key: str) -> bool:
    """Whether AutoBatch writes a batch size: then it is a result, not a setting."""
    switch = key.replace("BATCH_SIZE", "AUTOBATCH.ENABLED")
    return key in ("DATA.BATCH_SIZE", "DATA.BATCH_SIZE_VAL") and config.get(switch) is True


def _comparable(config: Flat, key: str) -> str | None:
    """Equal texts for equal values; None for a value that was not set."""
    value = config.get(key, _DEFAULTS.get(key, "(absent)"))
    if _is_searched(config, key) or str(value).startswith("${"):
        return None
    value = float(value) if type(value) is int and finite(value) is not None else value  # 1 is 1.0
    return json.dumps(value, sort_keys=True, default=str)


def _follows(config: Flat, key: str) -> bool:
    """Whether validation has the setting of training, or twice its size."""
    of_training = config.get(key.removesuffix("_VAL"))
    twice = of_training * 2 if isinstance(of_training, int) else of_training
    return key.endswith("_VAL") and config.get(key, of_training) in (of_training, twice)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key; the whole key where another one ends so too.

    >>> short_names(["OPTIMIZER.LR", "MODEL.NAME", "OPTIMIZER.NAME"])
    {'OPTIMIZER.LR': 'LR', 'MODEL.NAME': 'MODEL.NAME', 'OPTIMIZER.NAME': 'OPTIMIZER.NAME'}
    """
    counts = Counter(key.rpartition(".")[2] for key in keys)
    return {key: last if counts[last := key.rpartition(".")[2]] == 1 else key for key in keys}


# Validations.


class Best(NamedTuple):
    """The best validation of a run: the value and the number of epochs after which it was measured."""

    value: float
    epoch: int


@dataclass
class History:
    """Validation metrics by name, each as (epochs trained, value) in order; None for a value not finite."""

    points: dict[str, list[tuple[int, float | None]]] = field(default_factory=dict)
    is_damaged: bool = False

    def finite(self, metric: str) -> list[tuple[int, float]]:
        """The points that can be drawn."""
        return [(epoch, value) for epoch, value in self.points.get(metric, []) if value is not None]

    def best(self, metric: str) -> Best | None:
        """The best value, and the first epoch that has it; None where no value is finite."""
        found = max(
            ((score(metric, value), -epoch) for epoch, value in self.finite(metric)), default=None
        )
        return None if found is None else Best(score(metric, found[0]), -found[1])

    @property
    def epoch(self) -> int:
        """Epochs trained before the last validation; 0 before the first."""
        return max((points[-1][0] for points in self.points.values()), default=0)


def _read_history(file: Path) -> History:
    """The validations in `metrics.jsonl`; other lines than those of a run are passed over."""
    by_epoch: dict[int, dict[str, Any]] = {}
    history = History()
    with file.open("rb") as lines:
        for line in iter(partial(lines.readline, _LINE_BYTES), b""):
            is_whole = line.endswith(b"\n")  # else it may be the last one, just being written
            history.is_damaged |= is_whole and not line.startswith(b"{")
            if len(line) == _LINE_BYTES:
                history.is_damaged = True
                break
            if b'"val"' in line:
                try:
                    record = json.loads(line)
                    if record["split"] == "val":
                        by_epoch[_epoch(record["epoch"])] = record
                except (ValueError, LookupError, TypeError, RecursionError):
                    history.is_damaged |= is_whole
    for epoch, record in sorted(by_epoch.items()):
        for name, value in record.items():
            is_metric = name not in ("step", "epoch", "split", "time")
            if is_metric and (value is None or isinstance(value, int | float)):
                history.points.setdefault(name, []).append((epoch, finite(value)))
    return history


def _epoch(value: object) -> int:
    """A number of epochs; `ValueError` for anything else."""
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError(f"{value!r} is no number of epochs")
    return value


# Runs.


@dataclass
class Row:
    """One run.

    Attributes:
        values: the text of each key in which the runs differ.
        folder: where its files are.
        state: how far it has come.
        result: content of its `result.json`; empty where it has not ended well.
        name: what the table calls it; empty where the values do.
        plan: figures of its batch plan with the names of `result.json`, for a run without a result.
        config: its configuration by dotted key; None where that is not known.
        problem: why the configuration is not known; empty where it is.
    """

    values: dict[str, str]
    folder: Path
    state: State = field(default_factory=lambda: State("not run"))
    result: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    problem: str = ""
    _read: tuple[object, History] = field(
        default=(None, History()), init=False, repr=False, compare=False
    )

    @property
    def title(self) -> str:
        """Its name, or the values as they are typed on a command line."""
        return self.name or " ".join(f"{key}={value}" for key, value in self.values.items())

    @property
    def history(self) -> History:
        """The validations so far, the same object until there are more; none of a run that has not begun."""
        if self.state.status == "not run":
            return History()
        try:
            found = (self.folder / METRICS).stat()
            version = found.st_mtime_ns, found.st_size
            if not stat.S_ISREG(found.st_mode):
                self._read = version, History(is_damaged=True)
            elif self._read[0] != version:
                self._read = version, _read_history(self.folder / METRICS)
        except FileNotFoundError:  # not validated yet
            pass
        except OSError:
            self._read = None, History(is_damaged=True)
        return self._read[1]

    @cached_property
    def damaged(self) -> list[str]:
        """Names of run files that exist but cannot be read."""
        there = [name for name in (RUN, RESULT) if os.path.lexists(self.folder / name)]
        found = [name for name in there if read_json(self.folder / name) is None]
        return found + [METRICS] * self.history.is_damaged

    @property
    def metrics(self) -> list[str]:
        """The names of its validation metrics."""
        return list(dict.fromkeys([*self.result.get("metrics", {}), *self.history.points]))

    @property
    def headline(self) -> str | None:
        """The metric that decides which checkpoint is best: top-1 of the finest level, or the loss."""
        levels = [
            name for name in self.metrics if name.startswith(("top1/", "map/"))
        ] or self.metrics[:1]
        headline: str | None = self.result.get("headline", levels[-1] if levels else None)
        return headline

    def planned(self, name: str) -> Any:
        """A figure of its batch plan; None where it is not known."""
        return self.result.get(name, self.plan.get(name))

    def value(self, name: str) -> float | None:
        """A metric of the last validation, or `training_s`; None for a run without it."""
        if name == "training_s":
            return self.result.get(name)
        points = self.history.points.get(name, [(0, None)])
        value: float | None = self.result.get("metrics", {}).get(name, points[-1][1])
        return value

    def scalars(self, metrics: Sequence[str]) -> dict[str, Any]:
        """The row of the table, with these metrics."""
        best = {name: self.history.best(name) for name in metrics}
        return {
            **({"run": self.name} if self.name else {}),
            **self.values,
            "status": self.state.status,
            "exit_code": self.state.exit_code,
            **{name: self.planned(name) for name in _PLANNED.values()},
            "epoch": self.history.epoch or None,
            **{name: self.value(name) for name in metrics},
            **{f"best {name}": found and found.value for name, found in best.items()},
            **{f"best {name} epoch": found and found.epoch for name, found in best.items()},
            "training_s": self.result.get("training_s"),
            "images_per_s": self.result.get("images_per_s"),
            "seconds": self.state.seconds,
            "folder": str(self.folder),
            "reason": self.state.reason,
        }

    def as_dict(self) -> dict[str, Any]:
        """The entry of the JSON file."""
        fields = self.scalars([])
        values = {key: fields.pop(key) for key in self.values}
        best = {
            name: found for name in self.metrics if (found := self.history.best(name)) is not None
        }
        return {
            "values": values,
            **fields,
            "metrics": {name: self.value(name) for name in self.metrics},
            "best": {name: found._asdict() for name, found in best.items()},
        }


@dataclass
class Comparison(Figures):
    """Runs side by side, finished or not, in the order shown; the notes say what the figures do not."""

    rows: list[Row] = field(default_factory=list)
    wanted_metric: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def keys(self) -> list[str]:
        """The keys in which the runs differ."""
        return list(self.rows[0].values)

    @property
    def damage(self) -> list[str]:
        """A sentence for each run with files that are not what a run writes."""
        return [
            f"{row.title}: {', '.join(row.damaged)}: skipped: damaged, or not a run's file"
            for row in self.rows
            if row.damaged
        ]

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
        close = get_close_matches(wanted, known, 5, cutoff=0)
        found = f"closest are {', '.join(close)}" if known else "no run has been validated yet"
        return f"no run has {wanted!r}; {found}"

    def with_status(self, *wanted: RunStatus) -> list[Row]:
        """The rows with one of these statuses."""
        return [row for row in self.rows if row.state.status in wanted]

    def scalars(self) -> list[dict[str, Any]]:
        """Rows of the table."""
        metrics = self.metrics
        return [row.scalars(metrics) for row in self.rows]

    def as_dict(self) -> dict[str, Any]:
        """Content of the JSON file."""
        metric = self.metric
        return {
            "metric": metric,
            "differences": self.keys,
            "notes": self.notes + self.damage,
            "runs": [
                row.as_dict() | {"curve": row.history.points.get(metric, [])} for row in self.rows
            ],
        }


def compared(runs: Sequence[Row], names: Sequence[str], metric: str | None = None) -> Comparison:
    """Put runs side by side, in their order, with their names and values; `metric` is that of --metric."""
    keys = differing_keys([run.config for run in runs if run.config is not None])
    for run, name in zip(runs, names, strict=True):
        run.name, run.values = name, {key: _shown(run, key) for key in keys}
    comparison = Comparison(list(runs), metric)
    notes, shown = comparison.notes, comparison.metric
    notes += [
        f"{run.name}: {run.problem}; what differs is not known of it" for run in runs if run.problem
    ]
    of_data = [
        key for key in keys if key.startswith("DATA.DATASET.") and not key.endswith(".NUM_SAMPLES")
    ]
    if of_data:
        notes.append(
            f"the runs have different data ({', '.join(of_data)}): a metric of one cannot be compared with "
            "that of another"
        )
    if without := [run.name for run in runs if run.metrics and shown not in run.metrics]:
        notes.append(
            f"{shown}: not measured by {', '.join(without)}; --metric compares another one"
        )
    return comparison


def _shown(run: Row, key: str) -> str:
    """The value of a key as it is typed on a command line; empty where it is not known.

    That of a size that AutoBatch searches is the size found, which `config.yaml` has with the batch plan.
    """
    config = run.config or {}
    if key not in config or (_is_searched(config, key) and not run.plan):
        return ""
    value = config[key]
    return value if isinstance(value, str) else json.dumps(value, default=str)


# Reading.


def read_runs(folders: Sequence[Path]) -> list[Row]:
    """Read everything but the metrics. A file that is missing or damaged leaves its part unknown."""
    rows = [Row({}, folder, read_state(folder)) for folder in folders]
    for row in rows:
        _read_config(row)
        if row.state.status == "finished":
            row.result = read_result(row.folder)
    return rows


def _read_config(run: Row) -> None:
    folder = run.folder
    path = folder / CONFIG
    try:
        if not path.exists() and (folder / ASKED).exists():
            path = folder / ASKED  # all that a run of a sweep has before its first step
        loader = getattr(
            yaml, "CSafeLoader", yaml.SafeLoader
        )  # the parser in C, where PyYAML has it
        content = yaml.load(read_text(path), Loader=loader)
        if not isinstance(content, dict):
            raise ValueError("it holds no keys")
        plan = content.pop(PLAN, None)
        config = flattened(renamed(content))
        json.dumps(config, sort_keys=True, default=str)  # as values are compared
    except FileNotFoundError:
        run.problem = f"there is no {CONFIG}"
    except (
        OSError,
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
        yaml.YAMLError,
    ) as error:
        run.problem = f"{path.name} cannot be read: {' '.join(str(error).split())}"
    else:
        run.config = config
        if isinstance(plan, Mapping):
            run.plan = {name: finite(plan.get(key)) for key, name in _PLANNED.items()}
