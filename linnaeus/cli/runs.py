"""Runs side by side, as their folders tell them."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import yaml
from rich.cells import cell_len

from linnaeus.cli.tables import cell, save_figures, shortened, table
from linnaeus.config.dump import PLAN
from linnaeus.config.keys import KEYS, dotted, suggest
from linnaeus.metrics import larger_is_better, score, sort_key
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.files import CONFIG, METRICS, RESULT, finite, read_json, read_text
from linnaeus.runtime.run_folder import OUTPUT, RUN, State, last_line, read_result, read_state
from linnaeus.sweep.folder import ASKED, flattened
from linnaeus.sweep.space import title_of

if TYPE_CHECKING:
    from rich.console import Console

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
_MOST_LETTERS = 24
"""Letters of a value in the table."""
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
        planned: numbers of its batch plan, and of `result.json` where it has ended well.
        history: validation metrics by epochs trained, ascending; None for a value that is not finite.
        problems: what cannot be read.
        values: the text of each key in which the runs differ.
        name: what the table calls it; empty where the values do.
    """

    folder: Path
    state: State = field(default_factory=lambda: State("not run"))
    config: Mapping[str, Any] | None = None
    planned: Mapping[str, Any] = field(default_factory=dict)
    history: Mapping[float, Mapping[str, float | None]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    name: str = ""

    @property
    def title(self) -> str:
        """Its name, or the values as they are typed on a command line."""
        return self.name or title_of(self.values)

    @property
    def metrics(self) -> dict[str, float | None]:
        """Its validation metrics: of the result, else of the last validation that has them."""
        found: dict[str, float | None] = {}
        result = self.planned.get("metrics", {})
        for values in (result, *self.history.values(), result):
            found |= values
        return found

    @property
    def headline(self) -> str | None:
        """The metric that decides which checkpoint is best: by default top-1 of the finest level."""
        names = [*self.metrics]
        levels = [name for name in names if name.startswith(("top1/", "map/"))]
        own = (self.config or {}).get("TRAIN.BEST_METRIC") or next(
            iter([*levels[::-1], *names]), None
        )
        headline: str | None = self.planned.get("headline", own)
        return headline

    def curve(self, metric: str) -> dict[float, float | None]:
        """The values of a metric by epoch."""
        return {epoch: values[metric] for epoch, values in self.history.items() if metric in values}

    def best(self, metric: str) -> tuple[float, float] | None:
        """The best value and its epoch, as the run ranks them; None where no value is finite."""
        keys = (sort_key(metric, values, epoch) for epoch, values in self.history.items())
        best = max(filter(None, keys), default=None)
        return None if best is None else (score(metric, best[0]), best[2])

    def figures(self, metrics: Sequence[str]) -> dict[str, Any]:
        """The row of the files."""
        best = {name: self.best(name) or (None, None) for name in metrics}
        return {
            **({"run": self.name} if self.name else {}),
            **self.values,
            "status": self.state.status,
            "exit_code": self.state.exit_code,
            **{name: self.planned.get(name) for name in _PLANNED.values()},
            "epoch": max(self.history, default=None),
            **{**dict.fromkeys(metrics), **self.metrics},
            **{f"best {name}": found[0] for name, found in best.items()},
            **{f"best {name} epoch": found[1] for name, found in best.items()},
            **{name: self.planned.get(name) for name in ("training_s", "images_per_s")},
            "seconds": self.state.seconds,
            "folder": str(self.folder),
            "reason": self.state.reason,
        }


@dataclass
class Comparison:
    """Runs side by side, finished or not, in the order shown; the notes say what the metrics do not."""

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
        headlines = Counter(filter(None, (row.headline for row in self.rows)))
        return headlines.most_common(1)[0][0] if headlines else "loss"

    @property
    def unknown_metric(self) -> str | None:
        """A sentence for a wanted metric that no run has; None where one has it, or none is wanted."""
        wanted, known = self.wanted_metric, self.metrics
        if wanted is None or wanted in known:
            return None
        found = f"they have {', '.join(known)}" if known else "no run has been validated yet"
        return f"no run has {wanted!r}; {found}"

    @property
    def problems(self) -> list[str]:
        """What cannot be read of the runs."""
        return [f"{row.title}: {problem}" for row in self.rows for problem in row.problems]

    @property
    def records(self) -> list[dict[str, Any]]:
        """One line of the files for each run."""
        metrics = self.metrics
        return [row.figures(metrics) for row in self.rows]

    def lines(self) -> list[tuple[str, list[Row]]]:
        """Runs that differ in the seed alone, with what to call them; the best first."""
        metric = self.metric
        groups: dict[object, list[Row]] = {}
        for row in self.rows:
            others = tuple(item for item in row.values.items() if item[0] != SEED)
            groups.setdefault(others if SEED in row.values else row.folder, []).append(row)

        def place(line: tuple[str, list[Row]]) -> float:
            values = [found[0] for row in line[1] if (found := row.best(metric)) is not None]
            return -score(metric, statistics.fmean(values)) if values else float("inf")

        return sorted(((self._label(rows), rows) for rows in groups.values()), key=place)

    def _label(self, rows: Sequence[Row]) -> str:
        """The name of a run, or the values that some runs have in common."""
        first, is_mean = rows[0], len(rows) > 1
        short = short_names(list(first.values))
        words = [f"{short[k]}={v}" for k, v in first.values.items() if not (is_mean and k == SEED)]
        words += [f"{len(rows)}\N{NO-BREAK SPACE}seeds"] if is_mean else []
        has_name = not is_mean and "=" not in (first.name or "=")
        return first.title if has_name or not words else ", ".join(words)

    def sort(self, key: str) -> None:
        """Sort the rows: by a metric from its best value to the worst, by anything else ascending.

        Rows without a value come last. A `-` before the key reverses the others.

        Raises:
            ConfigError: there is no such key; the message names those there are.
        """
        wanted, records, metrics = key.removeprefix("-"), self.records, self.metrics
        full = {short: full for full, short in short_names(list(self.rows[0].values)).items()}
        name = self.metric if wanted == "metric" else full.get(wanted, wanted)
        column = f"best {name}" if name in metrics else name
        if column not in records[0]:
            known = ["metric", *metrics, *full]
            raise ConfigError(
                f"--sort: {wanted!r} is no metric, column or key that differs{suggest(wanted, known)}; use "
                f"{', '.join(known)}, or a column such as training_s, epoch or effective_batch"
            )
        is_ascending = key.startswith("-") == (name in metrics and larger_is_better(name))
        values = pd.Series([record[column] for record in records], dtype=object).replace("", None)
        numbers = pd.to_numeric(values, errors="coerce")
        if numbers.count() < values.count():
            numbers = values.map(str, na_action="ignore")
        order = numbers.sort_values(ascending=is_ascending, kind="stable").index
        self.rows = [self.rows[n] for n in order]

    def save(self, path: Path) -> None:
        """Write a file, atomically, in the format that its ending names: `.json`, `.jsonl` or `.csv`."""
        metric, records = self.metric, self.records
        curves = [[*row.curve(metric).items()] for row in self.rows]
        content = {
            "metric": metric,
            "differences": list(self.rows[0].values),
            "notes": self.notes + self.problems,
            "runs": [{**run, "curve": c} for run, c in zip(records, curves, strict=True)],
        }
        save_figures(path, content, records)

    def show(self, console: Console) -> None:
        """Print the table, the keys that have no room in it, and the sentences."""
        if not self.rows:
            console.print("no run has begun")
            return
        names = short_names(list(self.rows[0].values))
        for num_keys in range(len(names), -1, -1):
            columns = self._columns(dict([*names.items()][:num_keys]))
            widths = [max(map(cell_len, [name, *texts])) for name, texts in columns.items()]
            if sum(widths) + 3 * len(widths) + 1 <= console.width:  # with the lines between them
                break
        lines = zip(*columns.values(), strict=True)
        console.print(table("Runs", [*columns], lines, left={"run", "status", *names.values()}))
        if hidden := [*names.values()][num_keys:]:
            console.print(f"not shown: {', '.join(hidden)}", soft_wrap=True)
        for sentence in self.sentences():
            console.print(sentence, soft_wrap=True)

    def _columns(self, names: Mapping[str, str]) -> dict[str, list[str]]:
        """The table by heading: these keys, the batch size, the metric last and at its best, and the time."""
        rows, metric = self.rows, self.metric
        texts = {
            name: [shortened(row.values[key], _MOST_LETTERS) for row in rows]
            for key, name in names.items()
        }
        # The names of a sweep's runs are their values.
        is_whole = 0 < len(names) == len(rows[0].values)
        if not is_whole or any("=" not in (row.name or "=") for row in rows):
            texts = {"run": [row.title for row in rows], **texts}
        best = [row.best(metric) for row in rows]
        numbers = {
            "batch": [cell(row.planned.get("effective_batch"), ".0f") for row in rows],
            metric: [cell(row.metrics.get(metric), ".4f") for row in rows],
            "best": [f"{found[0]:.4f} @{found[1]}" if found else "" for found in best],
            "training s": [cell(row.planned.get("training_s"), ".1f") for row in rows],
        }
        return {
            **texts,
            **{name: found for name, found in numbers.items() if any(found)},
            "status": [row.state.status for row in rows],
        }

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
        row.name, row.values = name, {key: _shown(row.config or {}, key) for key in keys}
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
    found = []
    keys = dict.fromkeys([*_DEFAULTS, *(key for config in configs for key in config)])
    for key in [key for key in keys if key not in _NOT_COMPARED]:
        default = _DEFAULTS.get(key, "(absent)")
        values = [config.get(key, default) for config in configs]
        if all(
            value is values[0] for value in values
        ):  # mostly: runs share what they have in common
            continue
        texts = {
            None if _is_searched(config, key) else _comparable(value)
            for config, value in zip(configs, values, strict=True)
        }
        if len(texts - {None}) > 1 and not all(_follows(config, key) for config in configs):
            found.append(key)
    return found


def _is_searched(config: Mapping[str, Any], key: str) -> bool:
    """Whether AutoBatch writes a batch size: then it is a result, not a setting."""
    switch = key.replace("BATCH_SIZE", "AUTOBATCH.ENABLED")
    return key in ("DATA.BATCH_SIZE", "DATA.BATCH_SIZE_VAL") and config.get(switch) is True


def _comparable(value: Any) -> str | None:
    """Equal texts for equal values; None for the default of a key that follows another one."""
    if str(value).startswith("${"):
        return None
    value = float(value) if type(value) is int and finite(value) is not None else value  # 1 is 1.0
    return json.dumps(value, sort_keys=True, default=str)


def _follows(config: Mapping[str, Any], key: str) -> bool:
    """Whether validation has the setting of training, or twice its size."""
    of_training = config.get(key.removesuffix("_VAL"))
    twice = of_training * 2 if isinstance(of_training, int) else of_training
    return key.endswith("_VAL") and config.get(key, of_training) in (of_training, twice)


def _shown(config: Mapping[str, Any], key: str) -> str:
    """The value of a key as it is typed on a command line; empty where it is not known.

    A size that AutoBatch searches is the size found.
    """
    value = config.get(key, "")
    return value if isinstance(value, str) else json.dumps(value, default=str)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key; the whole key where another one ends so too.

    >>> short_names(["OPTIMIZER.LR", "MODEL.NAME", "OPTIMIZER.NAME"])
    {'OPTIMIZER.LR': 'LR', 'MODEL.NAME': 'MODEL.NAME', 'OPTIMIZER.NAME': 'OPTIMIZER.NAME'}
    """
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}


# Reading. A file is read again only when it has changed.


def read_run(folder: Path, values: dict[str, str] | None = None) -> Row:
    """Read a run. A file that is missing or damaged leaves its part unknown.

    `values` are those of a sweep's run, which does not need its configuration then.
    """
    row = Row(folder, read_state(folder), values=values or {})
    names = (CONFIG, ASKED)  # the second is all that a run of a sweep has before its first step
    file = next((folder / name for name in names if (folder / name).exists()), folder / CONFIG)
    row.config, row.planned, problem = _config(file, _version(file))
    row.problems += [problem] if problem and values is None else []
    result = read_result(folder) if row.state.status == "finished" else {}
    row.planned = {**row.planned, **result}
    row.history, is_damaged = _history(folder / METRICS, _version(folder / METRICS))
    # Only a file that has given nothing is read again.
    unread = [*[RUN] * (row.state.holder is None), *[RESULT] * (not result)]
    there = [folder / name for name in unread if os.path.lexists(folder / name)]
    damaged = [file.name for file in there if read_json(file) is None]
    row.problems += [
        f"{name}: skipped: damaged, or not a run's file"
        for name in damaged + [METRICS] * is_damaged
    ]
    return row


def _version(path: Path) -> tuple[int, int] | None:
    """Time and size of a file; None where there is none."""
    with suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size
    return None


@lru_cache(maxsize=4096)
def _config(
    path: Path, version: tuple[int, int] | None
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any], str]:
    """A configuration by dotted key, the numbers of its batch plan, and why they are not known."""
    config: dict[str, Any] = {}
    try:
        for section in re.split(r"\n(?=[A-Z]+:\n)", read_text(path)):
            config |= _section(section)
    except FileNotFoundError:
        return None, {}, f"there is no {path.name}; what differs is not known of it"
    except (OSError, ValueError, TypeError, OverflowError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        return None, {}, f"{path.name} cannot be read: {reason}; what differs is not known of it"
    numbers = {name: finite(config.get(f"{PLAN}.{key}")) for key, name in _PLANNED.items()}
    config = {key: value for key, value in config.items() if key.partition(".")[0] != PLAN}
    return config, {name: number for name, number in numbers.items() if number is not None}, ""


@lru_cache(maxsize=4096)
def _section(text: str) -> dict[str, Any]:
    """A part of a configuration by dotted key; the runs of a sweep have most parts in common."""
    # The parser in C, where PyYAML has it.
    content = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    if not isinstance(content, dict):
        raise ValueError("it holds no keys")
    found = flattened(content)
    json.dumps(found, sort_keys=True, default=str)  # as values are compared
    return found


@lru_cache(maxsize=4096)
def _history(
    path: Path, version: tuple[int, int] | None
) -> tuple[Mapping[float, Mapping[str, float | None]], bool]:
    """The validations in a `metrics.jsonl`, and whether it is damaged; foreign lines count as they can."""
    records: dict[float, dict[str, float | None]] = {}
    try:
        lines = read_text(path).splitlines(keepends=True)
    except FileNotFoundError:
        return {}, False
    except (OSError, ValueError):
        return {}, True
    is_damaged = False
    for line in lines:
        if '"split": "train"' in line:
            continue
        try:
            record = json.loads(line)
            epoch = record.get("epoch", record.get("step"))
        except (ValueError, AttributeError, RecursionError):
            is_damaged |= line.endswith("\n")  # one without its end may be just being written
            continue
        is_validation = record.get("split", "val") == "val" and type(epoch) in (int, float)
        if is_validation and 0 <= epoch < 1 << 31:
            records[epoch] = records.get(epoch, {}) | {
                name: finite(value)
                for name, value in record.items()
                if name not in ("step", "epoch", "split", "time")
                and (value is None or type(value) in (int, float))
            }
    return dict(sorted(records.items())), is_damaged
