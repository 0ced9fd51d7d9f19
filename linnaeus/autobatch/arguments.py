"""Checks of arguments: each raises a TypeError or ValueError with what was given and what is allowed."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any


def kind_of(value: Any) -> str:
    """The type of a value, with its article.

    >>> kind_of(3), kind_of({}), kind_of(None)
    ('an int', 'a dict', 'None')
    """
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIOU' else 'a'} {name}"


UNBOUNDED = 2**31
"""The largest size of a search without `max_batch_size`: no device holds as many samples."""


def check_integer(name: str, value: Any) -> None:
    """Check that it is an integer; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}; it must be an integer")


def check_count(name: str, value: Any) -> None:
    """Check that it is an integer from 1 upwards."""
    check_integer(name, value)
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1")


_COMPARISONS = {
    "gt": ("above", operator.gt),
    "ge": ("at least", operator.ge),
    "lt": ("below", operator.lt),
    "le": ("at most", operator.le),
}


def check_number(name: str, value: Any, **bounds: float) -> None:
    """Check that it is a real number within `gt`, `ge`, `lt` and `le`; a bool is none."""
    allowed = " and ".join(f"{_COMPARISONS[bound][0]} {limit}" for bound, limit in bounds.items())
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}; it must be a number {allowed}")
    if not all(_COMPARISONS[bound][1](float(value), limit) for bound, limit in bounds.items()):
        raise ValueError(f"{name} is {value}; it must be a number {allowed}")


def check_bounds(bounds: Any) -> None:
    """Check `bounds`, a dictionary of integers by name, or None."""
    if bounds is None:
        return
    if not isinstance(bounds, Mapping):
        raise TypeError(
            f"bounds is {kind_of(bounds)}; it must be a dictionary, such as {{'dataset': 1437}}"
        )
    for name, bound in bounds.items():
        if not isinstance(name, str):
            raise TypeError(f"bounds has the key {name!r}; its keys must be text")
        check_integer(f"bounds[{name!r}]", bound)


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Check that it is one of the choices."""
    if value not in tuple(choices):
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")


def check_functions(step: Any, make_batch: Any) -> None:
    """Check that `step` and `make_batch` can be called."""
    for name, function in (("step", step), ("make_batch", make_batch)):
        if not callable(function):
            raise TypeError(f"{name} is {kind_of(function)}; it must be a function")
