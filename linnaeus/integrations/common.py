"""What the integrations share: the options that they pass on, and the split of an effective batch."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch.distributed as torch_dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from linnaeus.autobatch.api import auto_find_batch_size
from linnaeus.autobatch.arguments import UNBOUNDED, check_count
from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.observer import check_observer
from linnaeus.autobatch.ranks.control import group_of_this_rank
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.autobatch.settings import SearchSettings
from linnaeus.autobatch.split import MANY_ACCUMULATION_STEPS, Split, nearest, split_samples

SET_BY_TRAINER = frozenset({"step", "make_batch", "state", "mode", "device", "bounds", "start", "group"})
"""Arguments of `auto_find_batch_size` that an integration with a framework's trainer sets itself."""

logger = logging.getLogger("linnaeus.autobatch")


def search_options(refused: Collection[str] = SET_BY_TRAINER) -> frozenset[str]:
    """The arguments of `auto_find_batch_size` that the user of an integration may give.

    Args:
        refused: those that it sets itself.
    """
    return frozenset(inspect.signature(auto_find_batch_size).parameters) - frozenset(refused)


def checked_options(
    name: str,
    options: Mapping[str, Any],
    *,
    own: Collection[str] = (),
    refused: Collection[str] = SET_BY_TRAINER,
) -> dict[str, Any]:
    """The options for a search, as a dictionary of their own, after a check of their names and counts.

    >>> checked_options("val_options", {"tolerance": 0.1})
    {'tolerance': 0.1}

    Args:
        name: what the user has given them to, such as `autobatch()` or `val_options`.
        options: by the names of arguments of `auto_find_batch_size`.
        own: further names that an error lists, since they may be given beside these options.
        refused: arguments that the integration sets itself.

    Raises:
        TypeError: a name that is none of those, or is refused; a size that is no integer.
        ValueError: a size below 1.
    """
    allowed = search_options(refused)
    for option in options:
        if option in refused:
            raise TypeError(f"{name} takes no {option!r}: the integration sets it itself")
        if option not in allowed:
            listed = ", ".join(sorted(allowed | set(own)))
            raise TypeError(f"{name} has no argument {option!r}; it takes {listed}")
    checked = dict(options)
    if "max_batch_size" in options and options["max_batch_size"] is None:
        checked["max_batch_size"] = UNBOUNDED
    for size in ("min_batch_size", "max_batch_size"):
        if size in options:
            check_count(size if size in own else f"{name}[{size!r}]", checked[size])
    return checked


def check_values(options: Mapping[str, Any]) -> None:
    """Check the values of options, as the search that they are for will.

    Args:
        options: by the names of arguments of `auto_find_batch_size`, after `checked_options`.

    Raises:
        TypeError, ValueError: a value of the wrong type, or out of its range.
    """
    SearchSettings.of(options)
    check_observer(options.get("observer"))


def options_at_most(options: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Options of a search that runs one size, and looks below it only if it does not fit.

    >>> found = options_at_most({"min_batch_size": 8, "multiple_of": 4}, 6)
    >>> found["start"], found["min_batch_size"], found["multiple_of"]
    (6, 6, 1)

    Args:
        options: of the search that was asked for.
        limit: the size.
    """
    return {**options, **dataclasses.asdict(SearchSettings.of(options).at_most(limit))}


def find_size(
    step: Callable[[Any], object],
    make_batch: Callable[[int], Any],
    options: Mapping[str, Any],
    earlier: int | None,
    **arguments: Any,
) -> AutoBatchResult:
    """Search; where an earlier run has used a size, run this once, and search below it only if it must be.

    Args:
        step, make_batch, arguments: as for `auto_find_batch_size`.
        options: of the user, with `max_batch_size`.
        earlier: size of the run that is resumed; the same on every rank.

    Raises:
        AutoBatchError: no size fits.
    """
    if earlier is not None:
        options = options_at_most(options, min(earlier, options["max_batch_size"]))
    result = auto_find_batch_size(step, make_batch, **{**arguments, **options})
    if earlier is not None and result.batch_size < earlier:
        logger.warning(
            "AutoBatch (%s): the run that is resumed had batch size %d; going on with %d: %s",
            result.mode, earlier, result.batch_size,
            "that no longer fits" if result.limited_by == "memory" else f"limited by {result.limited_by}",
        )  # fmt: skip
    return result


def check_effective_batch(effective_batch_size: int, world_size: int) -> None:
    """Check that every process can take the same part of an effective batch.

    Raises:
        TypeError, ValueError: it is no integer, or is below 1.
        AutoBatchError: it does not divide by the number of processes.
    """
    check_count("effective_batch_size", effective_batch_size)
    if effective_batch_size % world_size:
        raise AutoBatchError(
            f"AutoBatch: effective_batch_size is {effective_batch_size}, which does not divide by "
            f"{world_size} processes; {-(-effective_batch_size // world_size) * world_size} would"
        )


def min_samples(module: nn.Module) -> int:
    """Fewest samples of a micro-batch in training: BatchNorm needs two."""
    return 2 if any(isinstance(part, _BatchNorm) for part in module.modules()) else 1


def check_divisors(
    effective_batch_size: int, world_size: int, largest: int, smallest: int = 1, multiple_of: int = 1
) -> None:
    """Check that some micro-batch that is asked for divides the part of each process; memory aside.

    Args:
        effective_batch_size: samples per optimizer step of all processes, a multiple of their number.
        world_size: number of processes.
        largest, smallest: most and fewest samples of a micro-batch, inclusive.
        multiple_of: micro-batches from here on are multiples of it.

    Raises:
        AutoBatchError: there is none.
    """

    def suits(samples: int) -> bool:
        split = _split_in_multiples(samples, largest, multiple_of)
        return split is not None and split.micro_batch_size >= smallest

    part = effective_batch_size // world_size
    if suits(part):
        return
    kind = f" is a multiple of {multiple_of} and" if multiple_of > 1 else ""
    better = " or ".join(str(samples * world_size) for samples in nearest(part, 2 * part + largest, suits))
    raise AutoBatchError(
        f"AutoBatch: effective_batch_size is {effective_batch_size}, {part} for each process, and no divisor "
        f"of {part}{kind} has at least {smallest} samples and at most {largest}, the bounds of the search; "
        f"{better or 'another size'} would do"
    )


def _split_in_multiples(samples_per_rank: int, largest: int, multiple_of: int) -> Split | None:
    """As `split_samples`, with a multiple of this unless `largest` is below it; None if there is none."""
    if largest < multiple_of:
        return split_samples(samples_per_rank, largest)
    if samples_per_rank % multiple_of:
        return None
    split = split_samples(samples_per_rank // multiple_of, largest // multiple_of)
    return Split(split.micro_batch_size * multiple_of, split.accumulation_steps)


def split_effective_batch(
    effective_batch_size: int, world_size: int, largest: int, smallest: int = 1, multiple_of: int = 1
) -> Split:
    """Split an effective batch with the largest micro-batch that fits and divides the part of each process.

    Where that takes more steps than the memory asks for, a warning names better effective batch sizes.

    >>> split_effective_batch(96, 2, 40)
    Split(micro_batch_size=24, accumulation_steps=2)

    Args:
        effective_batch_size: samples per optimizer step of all processes, a multiple of their number.
        world_size: number of processes.
        largest: most samples of a micro-batch that fit.
        smallest: fewest samples that a micro-batch may have.
        multiple_of: the micro-batch is a multiple of it, unless `largest` is below it.

    Raises:
        AutoBatchError: only micro-batches of fewer samples than `smallest`, or none that are multiples,
            divide the part of each process.
    """
    split = _split_in_multiples(effective_batch_size // world_size, largest, multiple_of)
    if split is None:
        check_divisors(effective_batch_size, world_size, largest, smallest, multiple_of)
    assert split is not None  # or the check has raised
    few = split.accumulation_steps <= max(MANY_ACCUMULATION_STEPS, -(-split.samples_per_rank // largest))
    if few and split.micro_batch_size >= smallest:
        return split

    def suits(samples: int) -> bool:
        other = _split_in_multiples(samples, largest, multiple_of)
        if other is None:
            return False
        return other.accumulation_steps <= MANY_ACCUMULATION_STEPS and other.micro_batch_size >= smallest

    sizes = nearest(split.samples_per_rank, 2 * effective_batch_size, suits)
    better = " or ".join(str(samples * world_size) for samples in sizes)
    text = (
        f"effective_batch_size is {effective_batch_size}, {split.samples_per_rank} for each process, of "
        f"which {largest} fit at once, and the largest part that divides it is {split.micro_batch_size}; "
        f"{better or 'a smaller size'} would do better"
    )
    if split.micro_batch_size < smallest:
        raise AutoBatchError(f"AutoBatch: {text}, because a batch must have at least {smallest} samples")
    logger.warning("AutoBatch: %d accumulation steps are slow: %s", split.accumulation_steps, text)
    return split


@contextlib.contextmanager
def group_of_this_process(backend: str | None = None) -> Iterator[torch_dist.ProcessGroup | None]:
    """A process group of this process alone, that no other has a part in, not even in making it.

    None where there is no other process anyway.

    Args:
        backend: by default that of the default group.
    """
    if not torch_dist.is_initialized() or torch_dist.get_world_size() == 1:
        yield None
        return
    group = group_of_this_rank(backend)
    try:
        yield group
    finally:
        torch_dist.destroy_process_group(group)
