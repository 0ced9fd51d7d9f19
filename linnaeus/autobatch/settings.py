"""The settings of a search: default, meaning, what each may be, and its name in messages. Free of torch."""

# ruff: noqa: RUF009 (`_setting` is `dataclasses.field` with a sentence and bounds)
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from linnaeus.autobatch.arguments import check_choice, check_count, check_number
from linnaeus.autobatch.search import STRATEGIES

Objective = Literal["memory", "throughput"]


def _setting(
    default: Any, doc: str, *, choices: tuple[str, ...] | None = None, **bounds: float
) -> Any:
    """Declare a setting: its default, one sentence, and the strings or the range that it may be in."""
    return field(default=default, metadata={"doc": doc, "choices": choices, "bounds": bounds})


@dataclass(frozen=True)
class SearchSettings:
    """How a batch size is searched. With BatchNorm, training starts at 2 samples.

    Raises:
        TypeError, ValueError: a setting of the wrong type, or out of its range.
    """

    target_memory_fraction: float = _setting(
        0.8, "fraction of the device's total memory that all processes together may use", gt=0, le=1
    )
    min_batch_size: int = _setting(1, "smallest batch size that the search may try", ge=1)
    max_batch_size: int | None = _setting(
        512, "largest size tried; None: what bounds and memory allow", ge=1
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
    multiple_of: int = _setting(
        1, "above this, only its multiples are tried; below it, every size may be", ge=1
    )
    memory_limit_gb: float | None = _setting(
        None,
        "GiB; this process may hold the target fraction of it, whatever others use",
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
    start: int | None = _setting(
        None, "size to try first, such as the answer of an earlier run", ge=1
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            value, kind, limits = getattr(self, each.name), str(each.type), each.metadata
            if value is None and kind.endswith("None"):
                continue
            if limits["choices"]:
                check_choice(each.name, value, limits["choices"])
            elif kind.startswith("int"):
                check_count(each.name, value)
            elif kind.startswith("float"):
                check_number(each.name, value, **limits["bounds"])
        if self.max_batch_size is not None and self.max_batch_size < self.min_batch_size:
            raise ValueError(
                f"max_batch_size is {self.max_batch_size}; it must be at least min_batch_size, "
                f"{self.min_batch_size}"
            )

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
            self,
            min_batch_size=min(self.min_batch_size, size),
            max_batch_size=size,
            start=size,
            multiple_of=self.multiple_of if size % self.multiple_of == 0 else 1,
            strategy="guided",
            objective="memory",
        )


@dataclass(frozen=True)
class Names:
    """What messages call settings and remedies: a library call has arguments, the framework has keys.

    Attributes:
        batch_maker: must return as many samples as it is asked for.
        outputs: grow with the batches of a validation; empty where nothing does.
        smaller_training: how the training before a validation takes less memory.
    """

    target_memory_fraction: str = "target_memory_fraction"
    memory_limit_gb: str = "memory_limit_gb"
    min_batch_size: str = "min_batch_size"
    max_batch_size: str = "max_batch_size"
    multiple_of: str = "multiple_of"
    max_trials: str = "max_trials"
    timeout_minutes: str = "timeout_minutes"
    sample_size: str = "the size of a sample"
    checkpointing: str = "gradient checkpointing"
    half_precision: str = "bf16 autocast"
    model: str = "model"
    optimizer: str = "optimizer"
    batch_maker: str = "make_batch(n)"
    outputs: str = "each batch until validation ends, such as outputs and metric states"
    smaller_training: str = "choose a smaller model"
    without_search: str = "train with a batch size of your own"


ARGUMENTS = Names()


def last_part(name: str) -> str:
    """The name without the nodes that it lies in, for log lines.

    >>> last_part("DATA.AUTOBATCH.MEMORY_LIMIT_GB"), last_part("memory_limit_gb")
    ('MEMORY_LIMIT_GB', 'memory_limit_gb')
    """
    return name.rpartition(".")[2]
