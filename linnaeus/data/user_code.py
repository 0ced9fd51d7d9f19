"""Error messages about a user's own code, in one sentence that names the code."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from linnaeus.errors import DataError


@contextmanager
def naming_errors(where: str) -> Iterator[None]:
    """Turn any error of a user's code into a `DataError` with its type, its text and the line that raised it.

    The full traceback goes along as a note, which Python shows but a one-line message does not.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        text = " ".join([f"{type(error).__name__}:", *str(error).split()]).removesuffix(":")
        last = traceback.extract_tb(error.__traceback__)[-1]
        wrapped = DataError(f"{where}: {text} ({last.filename}, line {last.lineno})")
        wrapped.add_note("".join(traceback.format_exception(error)))
        raise wrapped from error


def describe(value: Any) -> str:
    """Type and size of a value, for messages."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple | list | Mapping):
        return f"a {kind} of {len(value)}"
    return f"{value!r}" if isinstance(value, int | float | str) else f"a {kind}"
