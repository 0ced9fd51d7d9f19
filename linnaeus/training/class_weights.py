"""`LOSS.CLASS_WEIGHTS`: weights of classes from their training samples or from a file."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from linnaeus.data.taxonomy import Taxonomy
from linnaeus.errors import ConfigError

_KEY = "LOSS.CLASS_WEIGHTS"
_COLUMNS = ["rank", "class", "weight"]


@dataclass(frozen=True)
class _Entry:
    """One weight of a file.

    Attributes:
        place: file, and line where it is known, for messages.
        rank, name: names of the level and of the class.
        value: the weight as the file has it.
    """

    place: str
    rank: str
    name: str
    value: Any


def class_weights(source: str, taxonomy: Taxonomy, targets: Tensor) -> list[Tensor]:
    """The weights of all classes; in each level, their mean over the training samples with a label is 1.

    Args:
        source: `balanced`, where a class with n of the N labels of a level that shows K classes has the
            weight N / (K n), as scikit-learn's `compute_class_weight`; or a file. There, a class without an
            entry has the weight 1 before the weights are normalised.
        taxonomy: levels and classes.
        targets: labels [N, R] of all training samples, -1 where unknown.

    Returns:
        For each level, float32 [C]. A class without a training sample has the weight 1, unless a file gives
        one.

    Raises:
        ConfigError: a file that cannot be read or used; the message names the file, the line where the
            format has lines, and the closest class name.
    """
    counts = [
        torch.bincount(labels[labels >= 0], minlength=len(level.classes)).double()
        for labels, level in zip(targets.unbind(dim=1), taxonomy.levels, strict=True)
    ]
    if source == "balanced":
        return [_balanced(count).float() for count in counts]
    given = _weights_of_file(_read(Path(source)), taxonomy)
    parts = zip(given, counts, taxonomy.names, strict=True)
    return [_normalised(weights, count, name, source).float() for weights, count, name in parts]


def _balanced(counts: Tensor) -> Tensor:
    num_classes = int((counts > 0).sum())
    return torch.where(counts > 0, counts.sum() / (num_classes * counts), torch.ones_like(counts))


def _normalised(weights: Tensor, counts: Tensor, rank: str, source: str) -> Tensor:
    if not counts.sum():
        return weights
    mean = (weights * counts).sum() / counts.sum()
    if not mean:
        raise ConfigError(
            f"{_KEY}: {source}: the weight of every training sample is 0 at rank {rank!r}; to leave a rank "
            "out, set its weight in LOSS.RANK_WEIGHTS to 0"
        )
    normalised = weights / mean
    single = normalised.float()
    if not single.isfinite().all() or ((weights > 0) & (single == 0)).any():
        raise ConfigError(
            f"{_KEY}: {source}: the weights of rank {rank!r} lie too far apart for float32, between "
            f"{weights.min():g} and {weights.max():g}"
        )
    return normalised


def _weights_of_file(entries: Iterable[_Entry], taxonomy: Taxonomy) -> list[Tensor]:
    """The weights [C] of each level, float64, 1 where the file has none."""
    weights = [torch.ones(len(level.classes), dtype=torch.float64) for level in taxonomy.levels]
    labels = [{name: label for label, name in enumerate(level.classes)} for level in taxonomy.levels]
    levels = {name: level for level, name in enumerate(taxonomy.names)}
    seen: dict[tuple[int, int], str] = {}
    for entry in entries:
        _check_name(entry.rank, levels, f"{entry.place}: no taxonomic rank")
        level = levels[entry.rank]
        _check_name(entry.name, labels[level], f"{entry.place}: rank {entry.rank!r} has no class")
        label = labels[level][entry.name]
        if (level, label) in seen:
            raise ConfigError(
                f"{_KEY}: {entry.place}: class {entry.name!r} of rank {entry.rank!r} has a weight already "
                f"({seen[level, label]}); remove one of both"
            )
        seen[level, label] = entry.place
        weights[level][label] = _number(entry)
    return weights


def _check_name(name: str, names: Mapping[str, int], problem: str) -> None:
    """Refuse a name that is not among names, with the closest one."""
    if name in names:
        return
    close = get_close_matches(name, names, 1)
    hint = (
        f"did you mean {close[0]!r}?" if close else f"there are {len(names)}, such as {next(iter(names))!r}"
    )
    raise ConfigError(f"{_KEY}: {problem} {name!r}; {hint}")


def _number(entry: _Entry) -> float:
    try:
        value = math.nan if isinstance(entry.value, bool) else float(entry.value)
    except (TypeError, ValueError):
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(
            f"{_KEY}: {entry.place}: class {entry.name!r} of rank {entry.rank!r} has the weight "
            f"{entry.value!r}; it must be a number of 0 or more"
        )
    return value


def _read(path: Path) -> list[_Entry]:
    path = path.expanduser()
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # a quoted name keeps its line breaks
            text = file.read()
    except OSError as error:
        raise ConfigError(f"{_KEY}: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_KEY}: {path}: not UTF-8 text") from error
    # JSON is YAML, but for tabs, which stand between its tokens only.
    entries = (_read_csv if path.suffix.lower() == ".csv" else _read_yaml)(str(path), text)
    if not entries:
        raise ConfigError(f"{_KEY}: {path}: no weight in it")
    return entries


def _read_csv(path: str, text: str) -> list[_Entry]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        rows = [(reader.line_num, row) for row in reader if any(row)]
    except csv.Error as error:
        raise ConfigError(f"{_KEY}: {path}, line {reader.line_num}: broken CSV: {error}") from error
    header = [name.strip() for name in rows[0][1]] if rows else []
    if sorted(header) != sorted(_COLUMNS):
        raise ConfigError(f"{_KEY}: {path}, line 1: the columns must be {', '.join(_COLUMNS)}")
    for line, cells in rows[1:]:
        if len(cells) != len(header):
            raise ConfigError(f"{_KEY}: {path}, line {line}: {len(cells)} cells instead of {len(header)}")
    order = [header.index(column) for column in _COLUMNS]
    return [_Entry(f"{path}, line {line}", *(cells[i] for i in order)) for line, cells in rows[1:]]


def _read_yaml(path: str, text: str) -> list[_Entry]:
    try:
        root = yaml.compose(text.expandtabs() if path.lower().endswith(".json") else text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = path if mark is None else f"{path}, line {mark.line + 1}"
        raise ConfigError(f"{_KEY}: {place}: broken: {getattr(error, 'problem', error)}") from error
    if not isinstance(root, yaml.MappingNode):
        raise _wrong_form(path)
    entries = []
    for rank, classes in root.value:
        if not isinstance(classes, yaml.MappingNode):
            raise _wrong_form(f"{path}, line {classes.start_mark.line + 1}")
        for name, weight in classes.value:
            place = f"{path}, line {name.start_mark.line + 1}"
            # The text of a node: a class may be named 1 or yes.
            entries.append(_Entry(place, str(rank.value), str(name.value), weight.value))
    return entries


def _wrong_form(place: str) -> ConfigError:
    return ConfigError(
        f"{_KEY}: {place}: must map the names of taxonomic ranks to weights by class name, "
        "{rank: {class: weight}}"
    )
