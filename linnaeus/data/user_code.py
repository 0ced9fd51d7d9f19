"""Errors of a user's own code, told in one sentence that says whose code it was."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from linnaeus.errors import DataError


@contextmanager
def naming_errors(where: str) -> Iterator[None]:
    """Turn any error of a user's code into a `DataError` that says where it came from.

    The full traceback goes along as a note, which Python shows but a one-line message does not.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise user_error(where, error) from error


def user_error(where: str, error: BaseException) -> DataError:
    """A `DataError` for an error of a user's code, with its type, its text and the line that raised it."""
    text = " ".join([f"{type(error).__name__}:", *str(error).split()]).removesuffix(":")
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    wrapped = DataError(f"{where}: {text}{at}")
    wrapped.add_note("".join(traceback.format_exception(error)))
    return wrapped


def describe(value: Any) -> str:
    """Type and size of a value, for messages."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple | list | Mapping):
        return f"a {kind} of {len(value)}"
    return f"{value!r}" if isinstance(value, int | float | str) else f"a {kind}"
