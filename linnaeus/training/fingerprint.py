"""What all ranks must have in common before the first collective."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from linnaeus import __version__
from linnaeus.data.bundle import DataBundle, dataset_length
from linnaeus.training.build import Assembly


def fingerprint(config: Mapping[str, Any], data: DataBundle, assembly: Assembly) -> dict[str, str]:
    """What a run depends on, by what it is, short enough to be read in an error.

    Args:
        config: the whole configuration, as nested plain values.
        data: the datasets of this rank.
        assembly: the model of this rank.
    """
    parameters = [(name, list(p.shape)) for name, p in assembly.model.named_parameters()]
    classes = {} if data.taxonomy is None else {level.name: level.classes for level in data.taxonomy.levels}
    return {
        "version of Linnaeus": __version__,
        "version of torch": torch.__version__,
        "training samples": str(dataset_length(data.train)),
        "validation samples": str(dataset_length(data.val)),
        "classes": f"{[len(names) for names in classes.values()]} {_digest(classes)}",
        "parameters": f"{len(parameters)} {_digest(parameters)}",
        **_leaves(config),
    }


def _leaves(node: Any, key: str = "") -> dict[str, str]:
    if isinstance(node, Mapping) and node:
        return {
            k: v for name, part in node.items() for k, v in _leaves(part, f"{key}.{name}".lstrip(".")).items()
        }
    return {key: json.dumps(node, default=str)}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:8]
