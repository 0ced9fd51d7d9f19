"""What the integrations share: the options that they pass on, and the split of an effective batch."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # no public class is the base of all

from linnaeus.autobatch.api import auto_find_batch_size
from linnaeus.autobatch.arguments import UNBOUNDED
from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.observer import check_observer
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.autobatch.settings import SearchSettings
from linnaeus.autobatch.split import MANY_ACCUMULATION_STEPS, Split, nearest, split_samples

SET_BY_TRAINER = frozenset({"step", "make_batch", "state", "mode", "device", "bounds", "group"})
"""Arguments of `auto_find_batch_size` that an integration with a framework's trainer sets itself."""

logger = logging.getLogger("linnaeus.autobatch")


def checked_options(
    name: str, options: Mapping[str, Any], refused: Collection[str] = SET_BY_TRAINER
) -> dict[str, Any]:
    """The options for a search, after a check of their names and values, with the bounds that a split needs.

    >>> checked_options("val_options", {"tolerance": 0.1, "max_batch_size": None})
    {'min_batch_size': 1, 'max_batch_size': 2147483648, 'multiple_of': 1, 'tolerance': 0.1}

    Args:
        name: what the user has given them to, such as `autobatch()` or `val_options`.
        options: by the names of arguments of `auto_find_batch_size`.
        refused: those that the integration sets itself.

    Raises:
        TypeError, ValueError: a name that is none of those, or is refused; a value of the wrong type, or out
            of its range.
    """
    allowed = inspect.signature(auto_find_batch_size).parameters.keys() - refused
    for option in options:
        if option not in allowed:
            listed = ", ".join(sorted(allowed))
            raise TypeError(
                f"{name} has no argument {option!r}; options of the search are {listed}"
            )
    names = ("min_batch_size", "max_batch_size", "multiple_of")
    checked = {**{name: getattr(SearchSettings, name) for name in names}, **options}
    if "max_batch_size" in options and options["max_batch_size"] is None:
        checked["max_batch_size"] = UNBOUNDED
    try:
        SearchSettings.of(checked)
        check_observer(options.get("observer"))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    return checked


def find_size(
    step: Callable[[Any], object],
    make_batch: Callable[[int], Any],
    options: Mapping[str, Any],
    known: int | None,
    source: str,
    **arguments: Any,
) -> AutoBatchResult:
    """Search; where a size is known, run this once, and search below it only if it must be.

    Args:
        step, make_batch, arguments: as for `auto_find_batch_size`.
        options: of the user, with `max_batch_size`.
        known: a size, the same on every rank.
        source: what has the known size, for the warning of a smaller one.

    Raises:
        AutoBatchError: no size fits.
    """
    if known is not None:
        settings = SearchSettings.of(options).at_most(min(known, options["max_batch_size"]))
        options = {**options, **dataclasses.asdict(settings)}
    result = auto_find_batch_size(step, make_batch, **{**arguments, **options})
    if known is not None and result.batch_size < known:
        logger.warning(
            "AutoBatch (%s): going on with batch size %d, limited by %s, instead of %d, that of %s",
            result.mode,
            result.batch_size,
            result.limited_by,
            known,
            source,
        )
    return result


def split_effective_batch(
    effective_batch_size: int,
    world_size: int,
    largest: int,
    model: nn.Module,
    options: Mapping[str, Any],
    epoch: int | None = None,
) -> Split:
    """Split an effective batch with the largest micro-batch that fits and divides the part of each process.

    >>> options = {"min_batch_size": 1, "multiple_of": 16}
    >>> split_effective_batch(96, 2, 40, nn.Linear(1, 1), options)
    Split(micro_batch_size=16, accumulation_steps=3)

    Args:
        effective_batch_size: samples per optimizer step of all processes.
        world_size: number of processes.
        largest: most samples of a micro-batch.
        model: needs micro-batches of at least two samples in training where it has BatchNorm.
        options: with `min_batch_size` and `multiple_of`, which hold unless `largest` is below them.
        epoch: samples of an epoch on each process; None is no limit.

    Raises:
        AutoBatchError: it is above an epoch, or no micro-batch within the bounds divides it.
    """
    has_batchnorm = any(isinstance(part, _BatchNorm) for part in model.modules())
    smallest = max(min(options["min_batch_size"], largest), 1 + has_batchnorm)
    text = f"AutoBatch: effective_batch_size is {effective_batch_size}"
    if epoch is not None and effective_batch_size > epoch * world_size:
        raise AutoBatchError(
            f"{text}, above what an epoch holds, {epoch * world_size} samples; lower it"
        )
    multiple_of = options["multiple_of"] if largest >= options["multiple_of"] else 1

    def split_of(samples: int) -> Split | None:
        multiples, rest = divmod(samples, world_size * multiple_of)
        if rest:
            return None
        split = split_samples(multiples, largest // multiple_of)
        split = dataclasses.replace(split, micro_batch_size=split.micro_batch_size * multiple_of)
        return split if split.micro_batch_size >= smallest else None

    split = split_of(effective_batch_size)
    if split is None:
        most = 2 * (effective_batch_size + largest * world_size)
        sizes = nearest(effective_batch_size, most, lambda samples: split_of(samples) is not None)
        raise AutoBatchError(
            f"{text}, {effective_batch_size / world_size:g} for each process, which no batch size from "
            f"{smallest} to {largest}{f' in multiples of {multiple_of}' if multiple_of > 1 else ''} divides; "
            f"{' or '.join(map(str, sizes)) or 'another size'} would do"
        )
    return split


def warn_of_many_steps(split: Split, world_size: int, largest: int) -> None:
    """Warn of a split that takes many more steps than the memory asks for."""
    if split.accumulation_steps > max(
        MANY_ACCUMULATION_STEPS, -(-split.samples_per_rank // largest)
    ):
        logger.warning(
            "AutoBatch: %d accumulation steps are slow: no divisor of %d, the samples of each process, is "
            "near %d, which fit at once; an effective_batch_size that is a multiple of %d takes fewest",
            split.accumulation_steps,
            split.samples_per_rank,
            largest,
            largest * world_size,
        )
