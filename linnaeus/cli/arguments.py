"""Translate arguments of Python functions in error messages to command-line options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from linnaeus.runtime.errors import ConfigError, LinnaeusError

_ARGUMENT = re.compile(
    r"(?<![\w./-])(checkpoint|device|features|format|half|opset|outputs?|path|preprocessing|tta|unknown)"
    r"=([^\s;,:)]+)"
)
"""An argument in a message of `linnaeus.inference`, such as `format=onnx`."""


@contextmanager
def naming_options() -> Iterator[None]:
    """Name options instead of arguments in errors raised inside: `--format onnx`, not `format=onnx`."""
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
