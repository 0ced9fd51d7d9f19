"""Read run directories and compare them side by side."""

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
"""Runs that differ only in this key are repetitions of one measurement."""
_NOT_COMPARED = (
    "EXPERIMENT.NAME",
    "EXPERIMENT.OUTPUT_DIR",
    "TRAIN.AUTO_RESUME",
    "DATA.AUTOBATCH.START",
    "DATA.AUTOBATCH.START_VAL",
)
"""Keys that a sweep sets for each run and that do not affect results."""
_OF_WEIGHTS = {
    f"DATA.AUGMENT.{name}" for name in ("RESIZE", "CROP_FRACTION", "INTERPOLATION", "MEAN", "STD")
}
"""Keys that pretrained weights set. They come last, because a table has no room for all keys."""
_MOST_LETTERS = 24
"""Maximum number of letters of a value in the table."""
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
"""Entries of the plan in `config.yaml`, with their names in `result.json`."""


@dataclass
class Row:
    """One run.

    Attributes:
        folder: the run directory.
        state: its status.
        config: its configuration by dotted key; None if unknown.
        planned: numbers of its batch plan, and of `result.json` after success.
        history: validation metrics by epochs trained, ascending; None for a value that is not finite.
        problems: files that cannot be read.
        values: the text of each key in which the runs differ.
        name: name in the table; empty if the values identify the run.
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
        """Its name, or else its values as on a command line."""
        return self.name or title_of(self.values)

    @property
    def metrics(self) -> dict[str, float | None]:
        """Its validation metrics, from the result or else from the last validation that has them."""
        found: dict[str, float | None] = {}
        result = self.planned.get("metrics", {})
        for values in (result, *self.history.values(), result):
            found |= values
        return found

    @property
    def headline(self) -> str | None:
        """The metric that selects the best checkpoint: by default top-1 of the finest level."""
        names = [*self.metrics]
        levels = [name for name in names if name.startswith(("top1/", "map/"))]
        own = (self.config or {}).get("TRAIN.BEST_METRIC") or next(
            iter([*levels[::-1], *names]), None
        )
        headline: str | None = self.planned.get("headline", own)
        return headline

    def curve(self, metric: str) -> dict[float, float | None]:
        """Return the values of a metric by epoch."""
        return {epoch: values[metric] for epoch, values in self.history.items() if metric in values}

    def best(self, metric: str) -> tuple[float, float] | None:
        """Return the best value and its epoch, compared as in the run; None if no value is finite."""
        keys = (sort_key(metric, values, epoch) for epoch, values in self.history.items())
        best = max(filter(None, keys), default=None)
        return None if best is None else (score(metric, best[0]), best[2])

    def figures(self, metrics: Sequence[str]) -> dict[str, Any]:
        """Return the run's row for the output files."""
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
    """Runs side by side, finished or not, in the order shown, with notes that limit the comparison."""

    rows: list[Row] = field(default_factory=list)
    wanted_metric: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> list[str]:
        """All metrics of the runs, in their order."""
        return list(dict.fromkeys(name for row in self.rows for name in row.metrics))

    @property
    def metric(self) -> str:
        """The metric to compare: the wanted one if a run has it, else the headline of most runs."""
        if self.wanted_metric is not None and self.wanted_metric in self.metrics:
            return self.wanted_metric
        headlines = Counter(filter(None, (row.headline for row in self.rows)))
        return headlines.most_common(1)[0][0] if headlines else "loss"

    @property
    def unknown_metric(self) -> str | None:
        """A sentence if no run has the wanted metric, else None."""
        wanted, known = self.wanted_metric, self.metrics
        if wanted is None or wanted in known:
            return None
        found = f"they have {', '.join(known)}" if known else "no run has been validated yet"
        return f"no run has {wanted!r}; {found}"

    @property
    def problems(self) -> list[str]:
        """Files of the runs that cannot be read."""
        return [f"{row.title}: {problem}" for row in self.rows for problem in row.problems]

    @property
    def records(self) -> list[dict[str, Any]]:
        """The row of each run for the output files."""
        metrics = self.metrics
        return [row.figures(metrics) for row in self.rows]

    def lines(self) -> list[tuple[str, list[Row]]]:
        """Group runs that differ only in the seed. Return each group with a label, the best first."""
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
        """Return the name of a run, or the values that several runs share."""
        first, is_mean = rows[0], len(rows) > 1
        short = short_names(list(first.values))
        words = [f"{short[k]}={v}" for k, v in first.values.items() if not (is_mean and k == SEED)]
        words += [f"{len(rows)}\N{NO-BREAK SPACE}seeds"] if is_mean else []
        has_name = not is_mean and "=" not in (first.name or "=")
        return first.title if has_name or not words else ", ".join(words)

    def sort(self, key: str) -> None:
        """Sort the rows by a metric, best first, or by another column, ascending.

        A `-` before the key reverses the order. Rows without a value come last.

        Raises:
            ConfigError: there is no such key; the message lists the keys.
        """
        wanted, records, metrics = key.removeprefix("-"), self.records, self.metrics
        full = {short: full for full, short in short_names(list(self.rows[0].values)).items()}
        name = self.metric if wanted == "metric" else full.get(wanted, wanted)
        column = f"best {name}" if name in metrics else name
        if column not in records[0]:
            known = ["metric", *metrics, *full]
            raise ConfigError(
                f"--sort: {wanted!r} is not a metric, column or differing key{suggest(wanted, known)}; use "
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
        """Write a file atomically, in the format of its ending: `.json`, `.jsonl` or `.csv`."""
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
        """Print the table, the keys that do not fit in it, and the notes."""
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
        """Return the columns of the table by heading: keys, batch size, last and best metric, time."""
        rows, metric = self.rows, self.metric
        texts = {
            name: [shortened(row.values[key], _MOST_LETTERS) for row in rows]
            for key, name in names.items()
        }
        # A sweep's runs are named after their values.
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
        """Return the notes, the holder of each running run, and the reason of each failed run."""
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
    """Compare runs in their order, with their names. `metric` is the value of `--metric`."""
    keys = differing_keys([row.config for row in rows if row.config is not None])
    for row, name in zip(rows, names, strict=True):
        row.name, row.values = name, {key: _shown(row.config or {}, key) for key in keys}
    found = Comparison(list(rows), metric)
    shown = found.metric
    data = [key for key in keys if key.startswith("DATA.DATASET.") and "NUM_SAMPLES" not in key]
    if data:
        found.notes.append(
            f"the runs have different data ({', '.join(data)}): their metrics cannot be compared with each "
            "other"
        )
    if without := [row.name for row in rows if row.metrics and shown not in row.metrics]:
        found.notes.append(
            f"{shown}: not measured by {', '.join(without)}; use --metric to compare another one"
        )
    return found


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that were set to different values, in the order of the schema; keys of weights last.

    Sizes found by AutoBatch do not count as set. A key that an older version did not write has its default. A
    key that follows another one in all runs, such as validation's batch size, is omitted.

    >>> differing_keys([{"OPTIMIZER.LR": 0.1, "TRAIN.AMP": "off"}, {"OPTIMIZER.LR": 0.2}])
    ['OPTIMIZER.LR']
    """
    found = []
    keys = dict.fromkeys([*_DEFAULTS, *(key for config in configs for key in config)])
    for key in [key for key in keys if key not in _NOT_COMPARED]:
        default = _DEFAULTS.get(key, "(absent)")
        values = [config.get(key, default) for config in configs]
        if all(value is values[0] for value in values):  # usually true: runs share equal objects
            continue
        texts = {
            None if _is_searched(config, key) else _comparable(value)
            for config, value in zip(configs, values, strict=True)
        }
        if len(texts - {None}) > 1 and not all(_follows(config, key) for config in configs):
            found.append(key)
    return sorted(found, key=_OF_WEIGHTS.__contains__)


def _is_searched(config: Mapping[str, Any], key: str) -> bool:
    """Whether AutoBatch writes the batch size, which is then a result and not a setting."""
    switch = key.replace("BATCH_SIZE", "AUTOBATCH.ENABLED")
    return key in ("DATA.BATCH_SIZE", "DATA.BATCH_SIZE_VAL") and config.get(switch) is True


def _comparable(value: Any) -> str | None:
    """Return equal texts for equal values, and None for a reference to another key."""
    if str(value).startswith("${"):
        return None
    value = float(value) if type(value) is int and finite(value) is not None else value  # 1 is 1.0
    return json.dumps(value, sort_keys=True, default=str)


def _follows(config: Mapping[str, Any], key: str) -> bool:
    """Whether validation has the same setting as training, or twice its size."""
    of_training = config.get(key.removesuffix("_VAL"))
    twice = of_training * 2 if isinstance(of_training, int) else of_training
    return key.endswith("_VAL") and config.get(key, of_training) in (of_training, twice)


def _shown(config: Mapping[str, Any], key: str) -> str:
    """Return the value of a key as on a command line; empty if unknown.

    With AutoBatch, a batch size is the size found.
    """
    value = config.get(key, "")
    return value if isinstance(value, str) else json.dumps(value, default=str)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each key, or the whole key if two keys end alike.

    >>> short_names(["OPTIMIZER.LR", "MODEL.NAME", "OPTIMIZER.NAME"])
    {'OPTIMIZER.LR': 'LR', 'MODEL.NAME': 'MODEL.NAME', 'OPTIMIZER.NAME': 'OPTIMIZER.NAME'}
    """
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}


# Reading. A file is read again only after it has changed.


def read_run(folder: Path, values: dict[str, str] | None = None) -> Row:
    """Read a run. The content of a missing or damaged file is unknown.

    `values` holds the swept values of a sweep's run. The configuration is then optional.
    """
    row = Row(folder, read_state(folder), values=values or {})
    names = (CONFIG, ASKED)  # before its first step, a run of a sweep has only the second
    file = next((folder / name for name in names if (folder / name).exists()), folder / CONFIG)
    row.config, row.planned, problem = _config(file, _version(file))
    row.problems += [problem] if problem and values is None else []
    result = read_result(folder) if row.state.status == "finished" else {}
    row.planned = {**row.planned, **result}
    row.history, is_damaged = _history(folder / METRICS, _version(folder / METRICS))
    # Read a file again only if it gave nothing.
    unread = [*[RUN] * (row.state.holder is None), *[RESULT] * (not result)]
    there = [folder / name for name in unread if os.path.lexists(folder / name)]
    damaged = [file.name for file in there if read_json(file) is None]
    row.problems += [
        f"{name}: skipped: damaged, or not a file of a run"
        for name in damaged + [METRICS] * is_damaged
    ]
    return row


def _version(path: Path) -> tuple[int, int] | None:
    """Return time and size of a file; None if it does not exist."""
    with suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size
    return None


@lru_cache(maxsize=4096)
def _config(
    path: Path, version: tuple[int, int] | None
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any], str]:
    """Return a configuration by dotted key, the numbers of its batch plan, and the problem with the file."""
    config: dict[str, Any] = {}
    try:
        for section in re.split(r"\n(?=[A-Z]+:\n)", read_text(path)):
            config |= _section(section)
    except FileNotFoundError:
        return None, {}, f"there is no {path.name}, so its keys are unknown"
    except (OSError, ValueError, TypeError, OverflowError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        return None, {}, f"{path.name} cannot be read, so its keys are unknown: {reason}"
    numbers = {name: finite(config.get(f"{PLAN}.{key}")) for key, name in _PLANNED.items()}
    config = {key: value for key, value in config.items() if key.partition(".")[0] != PLAN}
    return config, {name: number for name, number in numbers.items() if number is not None}, ""


@lru_cache(maxsize=4096)
def _section(text: str) -> dict[str, Any]:
    """Return a part of a configuration by dotted key. Runs of a sweep share most parts."""
    # Use the C parser if PyYAML has it.
    content = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    if not isinstance(content, dict):
        raise ValueError("it holds no keys")
    found = flattened(content)
    json.dumps(found, sort_keys=True, default=str)  # raises if values cannot be compared
    return found


@lru_cache(maxsize=4096)
def _history(
    path: Path, version: tuple[int, int] | None
) -> tuple[Mapping[float, Mapping[str, float | None]], bool]:
    """Return the validations in a `metrics.jsonl`, and whether the file is damaged."""
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
            is_damaged |= line.endswith("\n")  # an unfinished line may be in progress
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
