"""Errors of a user's own code, told in one sentence that says whose code it was."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor

from linnaeus.errors import DataError


def locate(path: str) -> Any:
    """The object that a dotted path names; unlike Hydra's function for it, this one logs nothing.

    Raises:
        Exception: whatever importing a module on the way raises; `AttributeError` where a name is missing.
    """
    first, *names = path.split(".")
    found: Any = importlib.import_module(first)
    name_so_far = first
    for name in names:
        name_so_far = f"{name_so_far}.{name}"
        if isinstance(found, ModuleType) and not hasattr(found, name):
            try:
                importlib.import_module(name_so_far)
            except ModuleNotFoundError as error:
                # Only when this very module is missing is there nothing of that name.
                if error.name != name_so_far:
                    raise
        found = getattr(found, name)
    return found


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
