"""`LOSS.CLASS_WEIGHTS`: weights of classes from their training samples or from a file."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from pathlib import Path

import torch
import yaml
from torch import Tensor

from linnaeus.data.taxonomy import Taxonomy
from linnaeus.errors import ConfigError

_KEY = "LOSS.CLASS_WEIGHTS"
_COLUMNS = ("rank", "class", "weight")


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
        ConfigError: a file that cannot be read or used; the message names the file, the line and the closest
            class name.
    """
    counts = [
        torch.bincount(labels[labels >= 0], minlength=len(level.classes)).double()
        for labels, level in zip(targets.unbind(dim=1), taxonomy.levels, strict=True)
    ]
    if source == "balanced":
        return [
            torch.where(count > 0, count.sum() / ((count > 0).sum() * count), 1.0).float() for count in counts
        ]
    parts = zip(_weights_of_file(Path(source).expanduser(), taxonomy), counts, taxonomy.names, strict=True)
    return [_normalised(weights, count, name, source).float() for weights, count, name in parts]


def _normalised(weights: Tensor, counts: Tensor, rank: str, source: str) -> Tensor:
    if not counts.sum():
        return weights
    mean = (weights * counts).sum() / counts.sum()
    if not mean:
        raise ConfigError(
            f"{_KEY}: {source}: the weight of every training sample is 0 at rank {rank!r}; to leave a rank "
            "out, set its weight in LOSS.RANK_WEIGHTS to 0"
        )
    return weights / mean


def _weights_of_file(path: Path, taxonomy: Taxonomy) -> list[Tensor]:
    """The weights [C] of each level, float64, 1 where the file has none."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # a quoted name keeps its line breaks
            text = file.read()
        rows = list((_csv_rows if path.suffix.lower() == ".csv" else _yaml_rows)(text))
    except OSError as error:
        raise ConfigError(f"{_KEY}: cannot read {path}: {error.strerror}") from error
    except (ValueError, csv.Error, yaml.YAMLError) as error:  # not UTF-8 either
        raise ConfigError(f"{_KEY}: {path}: {' '.join(str(error).split())}") from error
    if not rows:
        raise ConfigError(f"{_KEY}: {path}: no weight in it")
    weights = {level.name: dict.fromkeys(level.classes, 1.0) for level in taxonomy.levels}
    seen: dict[tuple[str, str], int] = {}
    for line, rank, name, text in rows:
        place = f"{_KEY}: {path}, line {line}:"
        if rank not in weights:
            raise ConfigError(f"{place} no taxonomic rank {rank!r}; {_closest(rank, weights)}")
        if name not in weights[rank]:
            raise ConfigError(f"{place} rank {rank!r} has no class {name!r}; {_closest(name, weights[rank])}")
        if (rank, name) in seen:
            raise ConfigError(
                f"{place} class {name!r} of rank {rank!r} has a weight already (line {seen[rank, name]}); "
                "remove one of both"
            )
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not 0 <= weight < math.inf:
            raise ConfigError(
                f"{place} class {name!r} of rank {rank!r} has the weight {text!r}; it must be a number of 0 "
                "or more"
            )
        seen[rank, name], weights[rank][name] = line, weight
    return [torch.tensor(list(row.values()), dtype=torch.float64) for row in weights.values()]


def _closest(name: str, names: Collection[str]) -> str:
    close = get_close_matches(name, names, 1)
    return (
        f"did you mean {close[0]!r}?" if close else f"there are {len(names)}, such as {next(iter(names))!r}"
    )


def _csv_rows(text: str) -> Iterator[tuple[int, str, str, str]]:
    """Line, rank, class and weight of each entry."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    if sorted(reader.fieldnames or ()) != sorted(_COLUMNS):
        raise ValueError(f"the columns must be {', '.join(_COLUMNS)}")
    for row in reader:
        if None in row or None in row.values():
            raise ValueError(f"line {reader.line_num} must have {len(_COLUMNS)} cells")
        yield reader.line_num, row["rank"], row["class"], row["weight"]


def _yaml_rows(text: str) -> Iterator[tuple[int, str, str, str]]:
    """Line, rank, class and weight of each entry. JSON is YAML, but for tabs."""
    root = yaml.compose(text.expandtabs(), yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("must map the names of taxonomic ranks to weights by class name")
    for rank, classes in root.value:
        if not isinstance(classes, yaml.MappingNode):
            raise ValueError(f"line {rank.start_mark.line + 1}: {rank.value} must map class names to weights")
        for name, weight in classes.value:  # the text of a node: a class may be named 1 or yes
            yield name.start_mark.line + 1, str(rank.value), str(name.value), str(weight.value)
