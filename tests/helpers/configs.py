"""Configurations as a command line loads them, and the files that it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from linnaeus.config.load import load_config
from linnaeus.config.schema import Config
from linnaeus.errors import ConfigError


def load(*argv: str) -> Config:
    return load_config(argv).config


def problems(*argv: str) -> list[str]:
    """What is wrong with a command line."""
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    assert caught.value.exit_code == 2
    return caught.value.problems


def write(files: Mapping[str, str]) -> None:
    """Write YAML files below the current folder; names have no ending."""
    for name, text in files.items():
        path = Path(f"{name}.yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
