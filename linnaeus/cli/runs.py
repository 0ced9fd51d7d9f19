"""Runs side by side, as their folders tell them."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from rich.table import Table

from linnaeus.cli.tables import cell
from linnaeus.config.dump import PLAN
from linnaeus.config.keys import KEYS, dotted
from linnaeus.metrics import larger_is_better, score
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.files import (
    CONFIG,
    METRICS,
    RESULT,
    finite,
    read_json,
    read_text,
    write_text_atomically,
)
from linnaeus.runtime.run_folder import OUTPUT, RUN, State, last_line, read_result, read_state
from linnaeus.sweep.folder import ASKED, flattened

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
_MOST_KEYS = 8
"""Differing keys that have a column on the screen; a preset may change dozens."""
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


@dataclass
class Row:
    """One run.

    Attributes:
        folder: where its files are.
        state: how far it has come.
        config: its configuration by dotted key; None where that is not known.
        planned: figures of its batch plan, and of `result.json` where it has ended well.
        history: validation metrics by epochs trained; NaN for a value that is not finite.
        problems: what cannot be read.
        values: the text of each key in which the runs differ.
        name: what the table calls it; empty where the values do.
    """

    folder: Path
    state: State = field(default_factory=lambda: State("not run"))
    config: Mapping[str, Any] | None = None
    planned: Mapping[str, Any] = field(default_factory=dict)
    history: pd.DataFrame = field(default_factory=pd.DataFrame)
    problems: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    name: str = ""

    @property
    def title(self) -> str:
        """Its name, or the values as they are typed on a command line."""
        return self.name or " ".join(f"{key}={value}" for key, value in self.values.items())

    @property
    def metrics(self) -> list[str]:
        """The names of its validation metrics."""
        return list(dict.fromkeys([*self.planned.get("metrics", {}), *self.history.columns]))

    @property
    def headline(self) -> str | None:
        """The metric that decides which checkpoint is best: top-1 of the finest level, or the loss."""
        levels = [name for name in self.metrics if name.startswith(("top1/", "map/"))]
        names = levels or self.metrics[:1]
        headline: str | None = self.planned.get("headline", names[-1] if names else None)
        return headline

    def curve(self, metric: str) -> pd.Series[float]:
        """The values of a metric by epoch."""
        return self.history.get(metric, pd.Series(dtype=float))

    def best(self, metric: str) -> tuple[float, int] | None:
        """The best value and the first epoch that has it; None where no value is finite."""
        values = self.curve(metric).dropna()
        if values.empty:
            return None
        epoch = values.map(partial(score, metric)).idxmax()
        return float(values[epoch]), int(epoch)

    def figure(self, name: str) -> float | None:
        """A metric of the last validation, `best METRIC`, or a number of the plan or the result."""
        metrics = self.planned.get("metrics", {})
        if name.startswith("best "):
            found = self.best(name.removeprefix("best "))
            return None if found is None else found[0]
        if name in self.history:
            last = self.history[name].iloc[-1]
            return finite(metrics.get(name, None if pd.isna(last) else float(last)))
        value: float | None = metrics.get(name, self.planned.get(name))
        return value

    def figures(self, metrics: Sequence[str]) -> dict[str, Any]:
        """The row of the files."""
        best = {name: self.best(name) or (None, None) for name in metrics}
        return {
            **({"run": self.name} if self.name else {}),
            **self.values,
            "status": self.state.status,
            "exit_code": self.state.exit_code,
            **{name: self.planned.get(name) for name in _PLANNED.values()},
            "epoch": int(self.history.index[-1]) if len(self.history) else None,
            **{name: self.figure(name) for name in metrics},
            **{f"best {name}": found[0] for name, found in best.items()},
            **{f"best {name} epoch": found[1] for name, found in best.items()},
            **{name: self.planned.get(name) for name in ("training_s", "images_per_s")},
            "seconds": self.state.seconds,
            "folder": str(self.folder),
            "reason": self.state.reason,
        }


@dataclass
class Comparison:
    """Runs side by side, finished or not, in the order shown; the notes say what the figures do not."""

    rows: list[Row] = field(default_factory=list)
    wanted_metric: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> list[str]:
        """All metrics of the runs, in their order."""
        return list(dict.fromkeys(name for row in self.rows for name in row.metrics))

    @property
    def metric(self) -> str:
        """The metric that is compared: the wanted one if a run has it, else the headline of most runs."""
        if self.wanted_metric is not None and self.wanted_metric in self.metrics:
            return self.wanted_metric
        headlines = pd.Series([row.headline for row in self.rows], dtype=object).dropna()
        return str(headlines.value_counts().index[0]) if len(headlines) else "loss"

    @property
    def unknown_metric(self) -> str | None:
        """A sentence for a wanted metric that no run has; None where one has it, or none is wanted."""
        wanted, known = self.wanted_metric, self.metrics
        if wanted is None or wanted in known:
            return None
        found = f"they have {', '.join(known)}" if known else "no run has been validated yet"
        return f"no run has {wanted!r}; {found}"

    @property
    def frame(self) -> pd.DataFrame:
        """One line for each run."""
        metrics = self.metrics
        found = [row.figures(metrics) for row in self.rows]
        return (
            pd.DataFrame.from_records(found).astype(object).where(lambda frame: frame.notna(), None)
        )

    def lines(self) -> list[tuple[str, list[Row]]]:
        """Runs that differ in the seed alone, with what to call them; the best first."""
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            others = tuple(item for item in row.values.items() if item[0] != SEED)
            groups.setdefault(others if SEED in row.values else (str(row.folder),), []).append(row)

        def place(line: tuple[str, list[Row]]) -> float:
            values = pd.Series([row.figure(f"best {self.metric}") for row in line[1]], dtype=float)
            mean = values.mean()
            return float("inf") if pd.isna(mean) else -score(self.metric, mean)

        names = short_names(list(self.rows[0].values))
        lines = [
            (
                rows[0].title
                if len(rows) == 1
                else ", ".join(
                    [f"{names[key]}={text}" for key, text in rows[0].values.items() if key != SEED]
                    + [f"{len(rows)} seeds"]
                ),
                rows,
            )
            for rows in groups.values()
        ]
        return sorted(lines, key=place)

    def sort(self, key: str) -> None:
        """Sort the rows: by a metric from its best value to the worst, by anything else ascending.

        Rows without a value come last. A `-` before the key reverses the others.

        Raises:
            ConfigError: there is no such key; the message names those there are.
        """
        wanted, frame = key.removeprefix("-"), self.frame
        full = {short: full for full, short in short_names(list(self.rows[0].values)).items()}
        name = self.metric if wanted == "metric" else full.get(wanted, wanted)
        is_metric = name in self.metrics
        column = f"best {name}" if is_metric else name
        if column not in frame:
            raise ConfigError(
                f"--sort: {wanted!r} is no metric, column or key that differs; use "
                f"{', '.join(['metric', *self.metrics, *full])}, or a column such as training_s, epoch or "
                "effective_batch"
            )
        is_ascending = key.startswith("-") == (is_metric and larger_is_better(name))
        order = frame[column].replace("", None)
        numbers = pd.to_numeric(order, errors="coerce")
        order = (
            numbers
            if (numbers.notna() == order.notna()).all()
            else order.map(str, na_action="ignore")
        )
        self.rows = [
            self.rows[n] for n in order.sort_values(ascending=is_ascending, kind="stable").index
        ]

    def save(self, path: Path) -> None:
        """Write a file, atomically, in the format that its ending names: `.json`, `.jsonl` or `.csv`."""
        frame, ending, metric = self.frame, path.suffix.lower(), self.metric
        if ending == ".csv":
            return write_text_atomically(path, frame.to_csv(index=False, lineterminator="\n"))
        records = frame.to_dict(orient="records")
        if ending == ".jsonl":
            return write_text_atomically(path, "".join(f"{json.dumps(row)}\n" for row in records))
        for row, record in zip(self.rows, records, strict=True):
            record["curve"] = [
                [int(epoch), None if pd.isna(value) else float(value)]
                for epoch, value in row.curve(metric).items()
            ]
        content = {
            "metric": metric,
            "differences": list(self.rows[0].values),
            "notes": self.notes + self.problems,
            "runs": records,
        }
        write_text_atomically(path, json.dumps(content, indent=2) + "\n")

    @property
    def problems(self) -> list[str]:
        """What cannot be read of the runs."""
        return [f"{row.title}: {problem}" for row in self.rows for problem in row.problems]

    def table(self) -> Table:
        """One line per run: what differs, the batch plan, the metric at the end and at its best."""
        keys = list(self.rows[0].values)
        keys, hidden = keys[:_MOST_KEYS], keys[_MOST_KEYS:]
        names, metric = short_names(keys), self.metric
        # The names of a sweep's runs are their values.
        has_names = (
            bool(hidden) or not keys or any("=" not in (row.name or "=") for row in self.rows)
        )
        columns: dict[str, Callable[[Row], str]] = (
            {"run": lambda row: row.title} if has_names else {}
        )
        for key in keys:
            columns[names[key]] = lambda row, key=key: row.values[key]  # type: ignore[misc]
        is_split = any(
            row.planned.get("batch_size") != row.planned.get("effective_batch") for row in self.rows
        )

        def best(row: Row) -> str:
            found = row.best(metric)
            return "" if found is None else f"{found[0]:.4f} @{found[1]}"

        figures: dict[str, Callable[[Row], str]] = {
            "size": lambda row: cell(row.planned.get("batch_size"), ".0f") if is_split else "",
            "batch": lambda row: cell(row.planned.get("effective_batch"), ".0f"),
            "rate": lambda row: cell(row.planned.get("learning_rate"), ".3g"),
            "warm-up": lambda row: cell(row.planned.get("warmup_steps"), ".0f"),
            metric: lambda row: cell(row.figure(metric), ".4f"),
            "best": best,
            "training s": lambda row: cell(row.planned.get("training_s"), ".1f"),
            "images/s": lambda row: cell(row.planned.get("images_per_s"), ".0f"),
        }
        columns |= {name: text for name, text in figures.items() if any(map(text, self.rows))}
        table = Table(title="Runs", title_justify="left")
        for heading in (*columns, "status"):
            table.add_column(
                heading, justify="right" if heading in figures else "left", overflow="fold"
            )
        for row in self.rows:
            table.add_row(*(text(row) for text in columns.values()), row.state.status)
        if hidden:
            table.caption = f"more keys that differ: {', '.join(hidden)}"
        return table

    def sentences(self) -> list[str]:
        """What limits the comparison, who runs what, and why runs have not ended well."""
        said = [f"note: {note}" for note in self.notes + self.problems]
        for row in self.rows:
            text = row.state.reason or ""
            if row.state.status == "running":
                text = ": ".join(filter(None, (str(row.state.holder), last_line(row.folder))))
            elif text and (row.folder / OUTPUT).is_file():
                text += f" ({row.folder / OUTPUT})"
            if text and row.state.status != "pruned":
                said.append(f"{row.state.status}: {row.title}: {text}")
        return said


def compared(rows: Sequence[Row], names: Sequence[str], metric: str | None = None) -> Comparison:
    """Put runs side by side, in their order, with their names and values; `metric` is that of --metric."""
    keys = differing_keys([row.config for row in rows if row.config is not None])
    for row, name in zip(rows, names, strict=True):
        row.name, row.values = name, {key: _shown(row, key) for key in keys}
    found = Comparison(list(rows), metric)
    shown = found.metric
    data = [key for key in keys if key.startswith("DATA.DATASET.") and "NUM_SAMPLES" not in key]
    if data:
        found.notes.append(
            f"the runs have different data ({', '.join(data)}): a metric of one cannot be compared with "
            "that of another"
        )
    if without := [row.name for row in rows if row.metrics and shown not in row.metrics]:
        found.notes.append(
            f"{shown}: not measured by {', '.join(without)}; --metric compares another one"
        )
    return found


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys that were set to different values, in the order of the schema.

    Sizes that AutoBatch found were not set. A key that an older version did not write counts as its default.
    A key that follows another one, as validation's batch size does, is left out where it does so in all runs.

    >>> differing_keys([{"OPTIMIZER.LR": 0.1, "TRAIN.AMP": "off"}, {"OPTIMIZER.LR": 0.2}])
    ['OPTIMIZER.LR']
    """
    keys = dict.fromkeys([*_DEFAULTS, *(key for config in configs for key in config)])
    texts = {key: [_comparable(config, key) for config in configs] for key in keys}
    return [
        key
        for key, found in texts.items()
        if key not in _NOT_COMPARED
        and len({*found} - {None}) > 1
        and not all(_follows(config, key) for config in configs)
    ]


def _is_searched(config: Mapping[str, Any], key: str) -> bool:
    """Whether AutoBatch writes a batch size: then it is a result, not a setting."""
    switch = key.replace("BATCH_SIZE", "AUTOBATCH.ENABLED")
    return key in ("DATA.BATCH_SIZE", "DATA.BATCH_SIZE_VAL") and config.get(switch) is True


def _comparable(config: Mapping[str, Any], key: str) -> str | None:
    """Equal texts for equal values; None for a value that was not set."""
    value = config.get(key, _DEFAULTS.get(key, "(absent)"))
    if _is_searched(config, key) or str(value).startswith("${"):
        return None
    value = float(value) if type(value) is int and finite(value) is not None else value  # 1 is 1.0
    return json.dumps(value, sort_keys=True, default=str)


def _follows(config: Mapping[str, Any], key: str) -> bool:
    """Whether validation has the setting of training, or twice its size."""
    of_training = config.get(key.removesuffix("_VAL"))
    twice = of_training * 2 if isinstance(of_training, int) else of_training
    return key.endswith("_VAL") and config.get(key, of_training) in (of_training, twice)


def _shown(row: Row, key: str) -> str:
    """The value of a key as it is typed on a command line; empty where it is not known.

    A size that AutoBatch searches is the size found.
    """
    config = row.config or {}
    if key not in config:
        return ""
    value = config[key]
    return value if isinstance(value, str) else json.dumps(value, default=str)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key; the whole key where another one ends so too.

    >>> short_names(["OPTIMIZER.LR", "MODEL.NAME", "OPTIMIZER.NAME"])
    {'OPTIMIZER.LR': 'LR', 'MODEL.NAME': 'MODEL.NAME', 'OPTIMIZER.NAME': 'OPTIMIZER.NAME'}
    """
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}


# Reading. A file is read again only when it has changed.


def read_run(folder: Path) -> Row:
    """Read a run. A file that is missing or damaged leaves its part unknown."""
    row = Row(folder, read_state(folder))
    names = (CONFIG, ASKED)  # the second is all that a run of a sweep has before its first step
    file = next((folder / name for name in names if (folder / name).exists()), folder / CONFIG)
    row.config, row.planned, problem = _config(file, _version(file))
    row.problems += [problem] if problem else []
    if row.state.status == "finished":
        row.planned = {**row.planned, **read_result(folder)}
    row.history, is_damaged = _history(folder / METRICS, _version(folder / METRICS))
    there = [name for name in (RUN, RESULT) if os.path.lexists(folder / name)]
    damaged = [name for name in there if read_json(folder / name) is None]
    row.problems += [
        f"{name}: skipped: damaged, or not a run's file"
        for name in damaged + [METRICS] * is_damaged
    ]
    return row


def _version(path: Path) -> tuple[int, int, bool] | None:
    """Time and size of a file, and whether it is a regular one; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except OSError:  # a loop of links
        return 0, 0, False
    return found.st_mtime_ns, found.st_size, stat.S_ISREG(found.st_mode)


@lru_cache(maxsize=4096)
def _config(
    path: Path, version: tuple[int, int, bool] | None
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any], str]:
    """A configuration by dotted key, the figures of its batch plan, and why they are not known."""
    if version is None:
        return None, {}, f"there is no {path.name}; what differs is not known of it"
    try:
        # The parser in C, where PyYAML has it.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        content = yaml.load(read_text(path), Loader=loader)
        if not isinstance(content, dict):
            raise ValueError("it holds no keys")
        plan = content.pop(PLAN, None)
        config = flattened(content)
        if plan is None:  # a size that is searched is not found yet
            config = {k: value for k, value in config.items() if not _is_searched(config, k)}
        json.dumps(config, sort_keys=True, default=str)  # as values are compared
    except (OSError, ValueError, TypeError, OverflowError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        return None, {}, f"{path.name} cannot be read: {reason}; what differs is not known of it"
    plan = plan if isinstance(plan, Mapping) else {}
    return (
        config,
        {name: finite(plan.get(key)) for key, name in _PLANNED.items() if key in plan},
        "",
    )


@lru_cache(maxsize=4096)
def _history(path: Path, version: tuple[int, int, bool] | None) -> tuple[pd.DataFrame, bool]:
    """The validations in a `metrics.jsonl`, and whether it is damaged; foreign lines count as they can."""
    records: dict[int, dict[str, float | None]] = {}
    if version is None or not version[2]:
        return pd.DataFrame(), version is not None
    is_damaged = False
    try:
        with path.open("rb") as lines:
            for line in iter(partial(lines.readline, _LINE_BYTES), b""):
                if b'"split": "train"' in line:
                    continue
                try:
                    record = json.loads(line)
                    epoch = record.get("epoch", record.get("step"))
                except (ValueError, AttributeError, RecursionError):
                    # One without its end may be just being written.
                    is_damaged |= line.endswith(b"\n") or len(line) == _LINE_BYTES
                    if len(line) == _LINE_BYTES:
                        break
                    continue
                if (
                    record.get("split", "val") == "val"
                    and type(epoch) is int
                    and 0 <= epoch < 1 << 31
                ):
                    others = ("step", "epoch", "split", "time")
                    records[epoch] = records.get(epoch, {}) | {
                        name: finite(value)
                        for name, value in record.items()
                        if name not in others and (value is None or type(value) in (int, float))
                    }
    except OSError:
        is_damaged = True
    frame = pd.DataFrame.from_dict(records, orient="index").sort_index().astype(float)
    return frame, is_damaged
