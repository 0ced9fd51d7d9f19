"""`LOSS.CLASS_WEIGHTS`: weights of classes from their training samples or from a file."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import Tensor

from linnaeus.data.taxonomy import Taxonomy
from linnaeus.runtime.errors import ConfigError

_KEY = "LOSS.CLASS_WEIGHTS"
_COLUMNS = ("level", "class", "weight")


def class_weights(source: str, taxonomy: Taxonomy, targets: Tensor) -> list[Tensor]:
    """The weights of all classes; in each level, their mean over the training samples with a label is 1.

    Args:
        source: `balanced` for scikit-learn's weights: N / (K n) for a class with n of the N labels of a level
            that shows K classes; or a file. There, a class without an
            entry has the weight 1 before the weights are normalised.
        taxonomy: levels and classes.
        targets: labels [N, L] of all training samples, -1 where unknown.

    Returns:
        For each level, float32 [C]. A class without a training sample has the weight 1, unless a file gives
        one.

    Raises:
        ConfigError: a file that cannot be read or used; the message names the file and the closest class.
    """
    from sklearn.utils.class_weight import compute_class_weight

    given = None if source == "balanced" else _weights_of_file(Path(source).expanduser(), taxonomy)
    found = []
    for level, labels in enumerate(targets.unbind(dim=1)):
        counts = (
            labels[labels >= 0].bincount(minlength=len(taxonomy.levels[level].classes)).double()
        )
        if given is None:
            weights, known = torch.ones_like(counts), labels[labels >= 0].numpy()
            if present := counts.nonzero().flatten().tolist():
                balanced = compute_class_weight("balanced", classes=np.array(present), y=known)
                weights[present] = torch.from_numpy(balanced)
        else:
            weights = given[level]
            if counts.sum():
                weights = weights / ((weights * counts).sum() / counts.sum())
            if not weights.isfinite().all():
                raise ConfigError(
                    f"{_KEY}: {source}: the weight of every training sample is 0 at level "
                    f"{taxonomy.names[level]!r}; to leave a level out, set its LOSS.LEVEL_WEIGHTS to 0"
                )
        found.append(weights.float())
    return found


def _weights_of_file(path: Path, taxonomy: Taxonomy) -> list[Tensor]:
    """The weights [C] of each level, float64, 1 where the file has none."""
    labels = {
        level.name: {name: i for i, name in enumerate(level.classes)} for level in taxonomy.levels
    }
    weights = {
        name: torch.full([len(classes)], math.nan).double() for name, classes in labels.items()
    }
    entries = _read(path)
    if not entries:
        raise ConfigError(f"{_KEY}: {path}: has no weight")
    for place, level, name, text in entries:
        _check_name(level, labels, f"{place}: no level")
        _check_name(name, labels[level], f"{place}: level {level!r} has no class")
        try:
            value = float(text)
        except (TypeError, ValueError):
            value = math.nan
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(
                f"{_KEY}: {place}: class {name!r} of level {level!r} has the weight {text!r}; it must be a "
                "number of 0 or more"
            )
        label = labels[level][name]
        if not weights[level][label].isnan():
            raise ConfigError(
                f"{_KEY}: {place}: class {name!r} of level {level!r} has two weights, "
                f"{weights[level][label]:g} and {value:g}; remove one"
            )
        weights[level][label] = value
    return [values.nan_to_num(1.0) for values in weights.values()]


def _check_name(name: str, names: Collection[str], problem: str) -> None:
    if name not in names:
        close = get_close_matches(str(name), names, 1)
        others = f"there are {len(names)}, such as {next(iter(names))!r}"
        hint = f"did you mean {close[0]!r}?" if close else others
        raise ConfigError(f"{_KEY}: {problem} {name!r}; {hint}")


def _read(path: Path) -> list[tuple[str, str, str, str]]:
    """Place, level, class and weight of each entry, as text: a class may be named 1 or yes."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".csv":
            reader = csv.DictReader(io.StringIO(text), strict=True, skipinitialspace=True)
            if set(reader.fieldnames or ()) != set(_COLUMNS):
                raise ConfigError(
                    f"{_KEY}: {path}, line 1: the columns must be {', '.join(_COLUMNS)}"
                )
            rows = [(f"{path}, line {reader.line_num}", row) for row in reader]
            return [(place, row["level"], row["class"], row["weight"]) for place, row in rows]
        # JSON is YAML, but for tabs, which stand between its tokens only.
        content = yaml.load(text.expandtabs(), yaml.BaseLoader)
        return [
            (str(path), level, name, weight)
            for level, classes in content.items()
            for name, weight in classes.items()
        ]
    except OSError as error:
        raise ConfigError(f"{_KEY}: cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error, yaml.YAMLError) as error:
        raise ConfigError(f"{_KEY}: {path}: broken: {' '.join(str(error).split())}") from error
    except AttributeError as error:
        raise ConfigError(
            f"{_KEY}: {path}: must map the names of levels to weights by class name, "
            "{level: {class: weight}}"
        ) from error
