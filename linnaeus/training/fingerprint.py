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


def of_configuration(config: Mapping[str, Any]) -> dict[str, str]:
    """The configuration, as nested plain values, by key; and the versions of what runs it."""
    return {
        "version of Linnaeus": __version__,
        "version of torch": torch.__version__,
        **_leaves(config),
    }


def of_data_and_model(data: DataBundle, assembly: Assembly) -> dict[str, str]:
    """What this rank has built, short enough to be read in an error."""
    parameters = [(name, list(p.shape)) for name, p in assembly.model.named_parameters()]
    classes = {} if data.taxonomy is None else {level.name: level.classes for level in data.taxonomy.levels}
    return {
        "training samples": str(dataset_length(data.train)),
        "validation samples": str(dataset_length(data.val)),
        "classes": f"{[len(names) for names in classes.values()]} {_digest(classes)}",
        "parameters": f"{len(parameters)} {_digest(parameters)}",
    }


def _leaves(node: Any, key: str = "") -> dict[str, str]:
    if isinstance(node, Mapping) and node:
        return {
            k: v for name, part in node.items() for k, v in _leaves(part, f"{key}.{name}".lstrip(".")).items()
        }
    return {key: json.dumps(node, default=str)}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:8]
