"""The settings of a search: each with its default, and a check of what it may be. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from linnaeus.autobatch.arguments import check_choice, check_count, check_number
from linnaeus.autobatch.search import STRATEGIES

Objective = Literal["memory", "throughput"]


@dataclass(frozen=True)
class SearchSettings:
    """How a batch size is searched. `auto_find_batch_size` describes each of the settings.

    Raises:
        TypeError, ValueError: a setting of the wrong type, or out of its range.
    """

    target_memory_fraction: float = 0.8
    min_batch_size: int = 1
    max_batch_size: int | None = 512
    steps_per_trial: int = 2
    strategy: str = "guided"
    tolerance: float = 0.01
    multiple_of: int = 1
    memory_limit_gb: float | None = None
    max_trials: int = 25
    timeout_minutes: float = 60.0
    objective: Objective = "memory"
    start: int | None = None
    predict: bool = True

    def __post_init__(self) -> None:
        for name in ("min_batch_size", "multiple_of", "steps_per_trial", "max_trials"):
            check_count(name, getattr(self, name))
        if self.max_batch_size is not None:
            check_count("max_batch_size", self.max_batch_size)
            if self.max_batch_size < self.min_batch_size:
                raise ValueError(
                    f"max_batch_size is {self.max_batch_size}; it must be at least min_batch_size, "
                    f"{self.min_batch_size}"
                )
        if self.start is not None:
            check_count("start", self.start)
        fraction = self.target_memory_fraction
        check_number("target_memory_fraction", fraction, "in (0, 1]", lambda number: 0 < number <= 1)
        if self.memory_limit_gb is not None:
            allowed, bytes_per_gb = "of GiB, above 0 and finite", 2**30
            check_number(
                "memory_limit_gb", self.memory_limit_gb, allowed,
                lambda number: 0 < number * bytes_per_gb < math.inf,
            )  # fmt: skip
        check_number("tolerance", self.tolerance, "in [0, 1)", lambda number: 0 <= number < 1)
        check_number("timeout_minutes", self.timeout_minutes, "above 0", lambda number: number > 0)
        check_choice("strategy", self.strategy, STRATEGIES)
        check_choice("objective", self.objective, get_args(Objective))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SearchSettings:
        """The settings among arguments of `auto_find_batch_size`; the others are left out."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in options.items() if name in names})

    def at_most(self, size: int) -> SearchSettings:
        """The settings to run a size chosen earlier, and to search below it only if it does not fit.

        >>> settings = SearchSettings(min_batch_size=8, multiple_of=4).at_most(6)
        >>> settings.start, settings.min_batch_size, settings.multiple_of
        (6, 6, 1)
        """
        return replace(
            self, min_batch_size=min(self.min_batch_size, size), max_batch_size=size, start=size,
            multiple_of=self.multiple_of if size % self.multiple_of == 0 else 1, strategy="guided",
            objective="memory", predict=False,
        )  # fmt: skip
