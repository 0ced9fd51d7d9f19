"""Writes a `Config` as YAML."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

import yaml

from linnaeus.config.schema import DATASET_KEYS, Config, DatasetConfig
from linnaeus.config.values import escape
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.files import write_atomically

PLAN = "PLAN"
"""The node of a run's `config.yaml` that holds its batch plan. Reading a file ignores the node."""
_MISREAD = re.compile(r"none|null|[-+]?[\d_.]+e[-+]?\d+", re.IGNORECASE)
"""Texts that are null or a number to OmegaConf, although not to YAML 1.1."""


class _Dumper(yaml.SafeDumper):
    """Writes YAML that OmegaConf reads back as the same values."""


class _FastDumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """The same with libyaml, where PyYAML has it: four times as fast, but not for any text."""


def _represent_str(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # Line breaks and the like survive only in double quotes.
    needs_quotes = not text.isprintable() or _MISREAD.fullmatch(text)
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style='"' if needs_quotes else None
    )


def _represent_list(dumper: _Dumper, items: list[Any]) -> yaml.SequenceNode:
    is_flat = not any(isinstance(item, (list, dict)) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=is_flat)


for _dumper in (_Dumper, _FastDumper):
    _dumper.add_representer(str, _represent_str)
    _dumper.add_representer(list, _represent_list)
    _dumper.ignore_aliases = lambda self, data: True  # type: ignore[method-assign]


def _dump(plain: Any) -> str:
    layout: Any = {"sort_keys": False, "allow_unicode": True, "width": 2**31 - 1}
    try:
        text: str = yaml.dump(plain, Dumper=_FastDumper, **layout)
    except UnicodeEncodeError:  # the name of a file that is no UTF-8
        text = yaml.dump(plain, Dumper=_Dumper, **layout)
    return text


def to_yaml(config: Config, plan: Mapping[str, Any] | None = None) -> str:
    """Return the configuration as YAML, in the schema's order.

    Every value is written out, but for keys that the kind of dataset does not read and that nothing has set.
    `--cfg` reads the text back to an equal configuration; the plan is written below it for people to read.
    """
    nodes = dataclasses.asdict(config)
    if isinstance(dataset := config.DATA.DATASET, DatasetConfig):
        defaults = dataclasses.asdict(DatasetConfig())
        for name, kinds in DATASET_KEYS.items():
            if dataset.NAME not in kinds and getattr(dataset, name) == defaults[name]:
                del nodes["DATA"]["DATASET"][name]
    text = _dump(escape(nodes))
    if plan is not None:
        text += "# Worked out for this run. `--cfg` leaves it out, and works it out again.\n"
        text += _dump({PLAN: escape(dict(plan))})
    return text


def save_config(
    config: Config, path: str | os.PathLike[str], plan: Mapping[str, Any] | None = None
) -> None:
    """Write the configuration as YAML, atomically; arguments as for `to_yaml`.

    Raises:
        ConfigError: the file cannot be written.
    """
    target = FilePath(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, lambda file: file.write(to_yaml(config, plan).encode()))
    except OSError as error:
        raise ConfigError(
            f"{target}: cannot be written: {error.strerror} (EXPERIMENT.OUTPUT_DIR)"
        ) from error


def with_batch_sizes(config: Config, train: int | None = None, val: int | None = None) -> Config:
    """Return a copy of the configuration with other batch sizes; None keeps a size."""
    sizes = {"BATCH_SIZE": train, "BATCH_SIZE_VAL": val}
    changed: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    return dataclasses.replace(config, DATA=dataclasses.replace(config.DATA, **changed))
