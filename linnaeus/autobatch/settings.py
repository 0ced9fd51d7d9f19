"""Settings of a search with default, meaning and range, and checks of arguments. Free of torch."""

# ruff: noqa: RUF009 (`_setting` is `dataclasses.field` with a sentence and bounds)
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, get_args

from linnaeus.autobatch.search import STRATEGIES, LimitedBy

Objective = Literal["memory", "throughput"]

UNBOUNDED = 2**31
"""The largest size of a search without `max_batch_size`: no device holds as many samples."""


def _setting(
    default: Any, doc: str, *, choices: tuple[str, ...] | None = None, **bounds: float
) -> Any:
    """Declare a setting: its default, one sentence, and its choices or range."""
    return field(default=default, metadata={"doc": doc, "choices": choices, "bounds": bounds})


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search. With BatchNorm, training starts at 2 samples.

    Raises:
        TypeError, ValueError: a setting of the wrong type, or out of its range.
    """

    target_memory_fraction: float = _setting(
        0.8, "fraction of the device's total memory that all processes together may use", gt=0, le=1
    )
    min_batch_size: int = _setting(1, "smallest batch size that the search may try", ge=1)
    max_batch_size: int | None = _setting(
        512, "largest size tried; None: bounds and memory alone limit it", ge=1
    )
    steps_per_trial: int = _setting(2, "optimizer steps that one trial runs", ge=1)
    strategy: str = _setting(
        "guided",
        "how sizes are chosen: `guided` by the memory measured, `binary` by bisection, `power` by "
        "doubling, `binsearch` by doubling and then bisection",
        choices=tuple(STRATEGIES),
    )
    tolerance: float = _setting(
        0.01,
        "the search ends when the size found is proven to be within this fraction of the largest; 0 "
        "finds the largest",
        ge=0,
        lt=1,
    )
    multiple_of: int = _setting(1, "only its multiples, and sizes below it, are tried", ge=1)
    memory_limit_gb: float | None = _setting(
        None,
        "GiB; this process may hold the target fraction of it, regardless of others",
        gt=0,
        lt=math.inf,
    )
    max_trials: int = _setting(
        25, "trials after which the search ends with the largest size that fitted", ge=1
    )
    timeout_minutes: float = _setting(
        60.0, "deadline of the search, and how long the other ranks wait for it", gt=0
    )
    objective: Objective = _setting(
        "memory",
        "`memory` finds the largest size that fits; `throughput` the smallest size within 5 % of "
        "the highest number of samples per second",
        choices=get_args(Objective),
    )
    repeats: int = _setting(
        0,
        "further runs of the size found, for steps whose memory is random: the largest peak counts",
        ge=0,
    )
    start: int | None = _setting(
        None, "size to try first, such as the answer of an earlier run", ge=1
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            value, kind = getattr(self, each.name), str(each.type)
            if value is None and kind.endswith("None"):
                continue
            if choices := each.metadata["choices"]:
                check_choice(each.name, value, choices)
            else:
                number = Integral if kind.startswith("int") else Real
                check_number(each.name, value, number, **each.metadata["bounds"])
        if self.max_batch_size is not None and self.max_batch_size < self.min_batch_size:
            raise ValueError(
                f"max_batch_size is {self.max_batch_size}; it must be at least min_batch_size, "
                f"{self.min_batch_size}"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SearchSettings:
        """Return the settings among arguments of `auto_find_batch_size`; the others are left out."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in options.items() if name in names})

    def at_most(self, size: int) -> SearchSettings:
        """Return settings that run a size chosen earlier and search below it only if it does not fit.

        >>> settings = SearchSettings(min_batch_size=8, multiple_of=4).at_most(6)
        >>> settings.start, settings.min_batch_size, settings.multiple_of
        (6, 6, 1)
        """
        return replace(
            self,
            min_batch_size=min(self.min_batch_size, size),
            max_batch_size=size,
            start=size,
            multiple_of=self.multiple_of if size % self.multiple_of == 0 else 1,
            strategy="guided",
            objective="memory",
        )


def kind_of(value: Any) -> str:
    """Return the type of a value, with its article.

    >>> kind_of(3), kind_of({}), kind_of(None)
    ('an int', 'a dict', 'None')
    """
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIOU' else 'a'} {name}"


_COMPARISONS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "gt": ("above", operator.gt),
    "ge": ("at least", operator.ge),
    "lt": ("below", operator.lt),
    "le": ("at most", operator.le),
}


def check_number(name: str, value: Any, kind: type = Real, **bounds: float) -> None:
    """Check that it is a real number, or an `Integral`, within `gt`, `ge`, `lt` and `le`, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, kind):
        kind_name = "an integer" if kind is Integral else "a number"
        raise TypeError(f"{name} is {value!r}; it must be {kind_name}")
    if not all(_COMPARISONS[bound][1](value, limit) for bound, limit in bounds.items()):
        limits = (f"{_COMPARISONS[bound][0]} {limit}" for bound, limit in bounds.items())
        raise ValueError(f"{name} is {value}; it must be {' and '.join(limits)}")


def check_count(name: str, value: Any) -> None:
    """Check that it is an integer from 1 upwards."""
    check_number(name, value, Integral, ge=1)


def check_bounds(bounds: Any) -> None:
    """Check `bounds`: a dictionary of integers, or None. Its names are no other reasons of `limited_by`."""
    if not isinstance(bounds, Mapping | None):
        raise TypeError(
            f"bounds is {kind_of(bounds)}; it must be a dictionary, such as {{'dataset': 1437}}"
        )
    for name, bound in (bounds or {}).items():
        if not isinstance(name, str):
            raise TypeError(f"bounds has the key {name!r}; its keys must be text")
        if name in (*get_args(LimitedBy), "throughput"):
            raise ValueError(
                f"bounds has the key {name!r}, which `limited_by` reports for another reason; choose "
                "another name. The largest size to try is the argument max_batch_size"
            )
        check_number(f"bounds[{name!r}]", bound, Integral)


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Check that it is one of the choices."""
    if value not in tuple(choices):
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")


def check_functions(step: Any, make_batch: Any) -> None:
    """Check that `step` and `make_batch` can be called."""
    for name, function in (("step", step), ("make_batch", make_batch)):
        if not callable(function):
            raise TypeError(f"{name} is {kind_of(function)}; it must be a function")


def check_phases(phases: Any) -> None:
    """Check that it is a sequence of functions."""
    is_sequence = isinstance(phases, list | tuple)
    for value in phases if is_sequence else [phases]:
        if not is_sequence or not callable(value):
            raise TypeError(f"phases has {kind_of(value)}; it must be a list of functions")
