"""Values of options that need a package, and arguments of Python functions in errors, as options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from linnaeus.cli.parser import read_path
from linnaeus.runtime.errors import ConfigError, LinnaeusError


def read_columns(ending: str, text: str) -> Path:
    """A file with this ending or `.parquet`; `ValueError` for another, or without pyarrow."""
    path = read_path((ending, ".parquet"), text)
    if path.suffix.lower() == ".parquet" and find_spec("pyarrow") is None:
        raise ValueError(f"a .parquet file needs pyarrow: pip install pyarrow, or write {ending}")
    return path


_ARGUMENT = re.compile(
    r"(?<![\w./-])(checkpoint|device|features|format|half|opset|outputs?|path|preprocessing|tta|unknown)"
    r"=([^\s;,:)]+)"
)
"""An argument in a message of `linnaeus.inference`, such as `format=onnx`."""


@contextmanager
def naming_options() -> Iterator[None]:
    """Name options in errors from inside the context: `--format onnx` for `format=onnx`."""
    try:
        yield
    except ConfigError as error:
        ConfigError.__init__(error, [_as_option(problem) for problem in error.problems])
        raise
    except LinnaeusError as error:
        error.args = (_as_option(str(error)), *error.args[1:])
        raise


def _as_option(text: str) -> str:
    return _ARGUMENT.sub(
        lambda found: f"--{found[1]}" + (f" {found[2]}" if found[2] != "True" else ""), text
    )
