"""Values of each class that a loss takes, from the training samples of the class or from a file."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

import torch
import yaml
from torch import Tensor

from linnaeus.config.keys import suggest
from linnaeus.config.schema import WEIGHTINGS, LossConfig
from linnaeus.data.bundle import DataBundle, training_targets
from linnaeus.data.taxonomy import Taxonomy
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.words import several

_KEY = "LOSS.CLASS_WEIGHTS"


def class_statistics(node: LossConfig, data: DataBundle) -> dict[str, list[Tensor]]:
    """The values that LOSS needs, by the name of their buffers: for each level float32 [C].

    * `class_weights`: see `class_weights`.
    * `logit_offsets`: `LOGIT_ADJUSTMENT * log(n / N)` for a class with n of the N known labels of its level;
      a class without a training sample counts as if it had one.
    * `pos_weights`: the number POS_WEIGHT, or the number of known labels that are absent over those that are
      present; 1 for a class that is always or never present.

    Raises:
        ConfigError: a value needs labels that the dataset does not give, or a file cannot be used.
    """
    taxonomy, found = data.taxonomy, {}
    assert taxonomy is not None
    if node.CLASS_WEIGHTS is not None:
        targets = training_targets(data, f"{_KEY} {node.CLASS_WEIGHTS}")
        found["class_weights"] = class_weights(
            node.CLASS_WEIGHTS, taxonomy, targets, node.EFFECTIVE_BETA
        )
    if node.LOGIT_ADJUSTMENT:
        targets = training_targets(data, f"LOSS.LOGIT_ADJUSTMENT {node.LOGIT_ADJUSTMENT}")
        found["logit_offsets"] = [
            (node.LOGIT_ADJUSTMENT * (counts / counts.sum()).log()).float()
            for counts in (each.clamp_min(1) for each in _counts(taxonomy, targets))
        ]
    if node.POS_WEIGHT == "balanced":
        targets = training_targets(data, "LOSS.POS_WEIGHT balanced", takes_several=True)
        if taxonomy.is_multilabel:
            pairs = [((targets == 1).sum(0), (targets == 0).sum(0))]
        else:
            pairs = [(counts, counts.sum() - counts) for counts in _counts(taxonomy, targets)]
        found["pos_weights"] = [
            torch.where((present > 0) & (absent > 0), absent / present, 1.0).float()
            for present, absent in pairs
        ]
    elif node.POS_WEIGHT is not None:
        sizes = taxonomy.num_classes.values()
        found["pos_weights"] = [torch.full([size], float(node.POS_WEIGHT)) for size in sizes]
    return found


def class_weights(
    source: str, taxonomy: Taxonomy, targets: Tensor, beta: float = 0.0
) -> list[Tensor]:
    """The weights of all classes; in each level, their mean over the training samples with a label is 1.

    Args:
        source: `balanced` for 1 / n, where n are the training samples of a class: scikit-learn's weights
            N / (K n), for the N labels of a level that shows K classes. `effective` for
            (1 - beta) / (1 - beta ** n), the inverse of the effective number of Cui et al. 2019
            (arXiv:1901.05555). Else a file, where a class without an entry has the weight 1.
        taxonomy: levels and classes.
        targets: labels [N, L] of all training samples, -1 where unknown.
        beta: in [0, 1).

    Returns:
        For each level, float32 [C]. A class without a training sample has the weight 1, unless a file gives
        one.

    Raises:
        ConfigError: a file that cannot be read or used; the message names the file and the closest class.
    """
    given = None if source in WEIGHTINGS else _weights_of_file(Path(source).expanduser(), taxonomy)
    found = []
    for level, counts in enumerate(_counts(taxonomy, targets)):
        if given is not None:
            weights = given[level]
        elif source == "balanced":
            weights = 1 / counts
        else:
            weights = (1 - beta) / (1 - beta**counts)
        if counts.sum():
            present = counts > 0
            weights = weights / ((weights * counts)[present].sum() / counts.sum())
        if given is None:
            weights[counts == 0] = 1
        if not weights.isfinite().all():
            raise ConfigError(
                f"{_KEY}: {source}: the weight of every training sample is 0 at level "
                f"{taxonomy.names[level]!r}; to leave a level out, set its LOSS.LEVEL_WEIGHTS to 0"
            )
        found.append(weights.float())
    return found


def _counts(taxonomy: Taxonomy, targets: Tensor) -> list[Tensor]:
    """Training samples of each class of each level, float64 [C]."""
    sizes = taxonomy.num_classes.values()
    return [
        labels[labels >= 0].bincount(minlength=size).double()
        for labels, size in zip(targets.unbind(dim=1), sizes, strict=True)
    ]


def _weights_of_file(path: Path, taxonomy: Taxonomy) -> list[Tensor]:
    """The weights [C] of each level, float64, 1 where the file has none."""
    labels = {
        level.name: {name: i for i, name in enumerate(level.classes)} for level in taxonomy.levels
    }
    weights = {name: torch.ones(len(classes)).double() for name, classes in labels.items()}
    try:
        # JSON is YAML, but for tabs, which stand between its tokens only. All is text: a class may be named
        # 1 or yes.
        tree = yaml.load(path.read_text("utf-8-sig").expandtabs(), yaml.BaseLoader)
        entries = [
            (level, name, float(weight))
            for level, classes in tree.items()
            for name, weight in classes.items()
        ]
    except OSError as error:
        raise ConfigError(f"{_KEY}: cannot read {path}: {error.strerror}") from error
    except (ValueError, AttributeError, TypeError, yaml.YAMLError) as error:
        found = "no mapping" if isinstance(error, AttributeError) else " ".join(str(error).split())
        raise ConfigError(
            f"{_KEY}: {path}: must map the names of levels to weights by class name, "
            f"{{level: {{class: weight}}}}; it is broken: {found}"
        ) from error
    if not entries:
        raise ConfigError(f"{_KEY}: {path}: has no weight")
    for level, name, value in entries:
        _check_name(level, labels, f"{path}: no level")
        _check_name(name, labels[level], f"{path}: level {level!r} has no class")
        if not 0 <= value < math.inf:
            raise ConfigError(
                f"{_KEY}: {path}: class {name!r} of level {level!r} has the weight {value}; it must be a "
                "number of 0 or more"
            )
        weights[level][labels[level][name]] = value
    return [*weights.values()]


def _check_name(name: str, names: Collection[str], problem: str) -> None:
    if name not in names:
        hint = suggest(name, names, cutoff=0.6) or f"; there are {several([*names])}"
        raise ConfigError(f"{_KEY}: {problem} {name!r}{hint}")
