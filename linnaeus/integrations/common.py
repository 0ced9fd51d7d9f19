"""Shared parts of the integrations: the options that they pass on, and the split of an effective batch."""

from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import nn

from linnaeus.autobatch import nest
from linnaeus.autobatch.api import auto_find_batch_size
from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.finder import smallest_size
from linnaeus.autobatch.observer import check_observer, sized
from linnaeus.autobatch.ranks.group import of_main
from linnaeus.autobatch.ranks.heartbeat import ControlPlane
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.autobatch.settings import UNBOUNDED, SearchSettings
from linnaeus.autobatch.split import nearest
from linnaeus.autobatch.state.snapshot import is_optimizer, parameters_of
from linnaeus.integrations.samples import Largest

SET_BY_ADAPTER = {"step", "make_batch", "state", "mode", "device", "bounds", "group", "unit"}
"""Arguments of `auto_find_batch_size` that an adapter sets itself."""

NOTABLE_GROWTH = 4
"""A batch that has grown by more than this factor may need another learning rate."""

NOTABLE_BYTES = 2**20
"""Smallest outputs kept by a loop that count."""

logger = logging.getLogger("linnaeus.autobatch")


def checked_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Check names and values of options for a search, and return them with the defaults of the others.

    >>> checked_options("val_options", {"max_batch_size": None})["max_batch_size"] == UNBOUNDED
    True

    Args:
        name: receiver of the options, such as `autobatch()` or `val_options`.
        options: by the names of arguments of `auto_find_batch_size`.

    Raises:
        TypeError, ValueError: a name that is not one of them, or is in `SET_BY_ADAPTER`; a value of the wrong
            type, or out of its range.
    """
    allowed = inspect.signature(auto_find_batch_size).parameters.keys() - SET_BY_ADAPTER
    for option in options:
        if option not in allowed:
            listed = ", ".join(sorted(allowed))
            raise TypeError(
                f"{name} has no argument {option!r}; options of the search are {listed}"
            )
    try:
        check_observer(options.get("observer"))
        settings = SearchSettings.of(options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    largest = settings.max_batch_size or UNBOUNDED
    return {**options, **asdict(settings), "max_batch_size": largest}


def find_size(
    step: Callable[[Any], object],
    make_batch: Callable[[int], Any],
    options: Mapping[str, Any],
    known: int | None = None,
    source: str = "the resumed run",
    *,
    control: ControlPlane | None,
    looks: Collection[Largest],
    device: torch.device,
    bounds: Mapping[str, int] | None = None,
    **arguments: Any,
) -> AutoBatchResult:
    """Search for a size. Run a known size once, and search below it only if it does not fit.

    If larger samples may exist than the samples looked at, the size found is divided by the estimated margin
    and the smaller size is run.

    Args:
        step, make_batch, device, bounds, arguments: as for `auto_find_batch_size`. The model is first in
            `state`.
        options: of the user, with `max_batch_size`.
        known: a size, the same on every rank.
        source: origin of the known size, for the warning of a smaller one.
        control: of the ranks that search together.
        looks: samples examined for the largest batch; they bound the size by host memory.

    Raises:
        AutoBatchError: no size fits.
    """
    num_ranks = 1 if control is None else max(len(control.neighbours()), 1)
    most = min((look.host_bound(device, num_ranks) for look in looks), default=UNBOUNDED)
    bounds = {**(bounds or {}), "host_memory": most}
    parameters = parameters_of(arguments["state"][0])
    num_frozen = sum(each.numel() for each in parameters if not each.requires_grad)
    if num_frozen and arguments.get("mode") != "val":
        logger.info(
            "AutoBatch: %d parameters are frozen now; sizes hold while they stay frozen", num_frozen
        )
    options, margin = {**options, **arguments}, 1.0
    if known is None:  # the ranks look for as long as they may
        margin = of_main(control, max((look.margin for look in looks), default=1.0))
    else:
        settings = SearchSettings.of(options)
        options |= asdict(settings.at_most(min(known, options["max_batch_size"])))
    search = partial(auto_find_batch_size, step, make_batch, device=device)
    result = search(**options, bounds=bounds)
    smallest = (options["state"], result.mode, options["min_batch_size"], result.batch_size)
    size = max(int(result.batch_size / margin), smallest_size(*smallest))
    if size < result.batch_size:
        logger.warning(
            "warning: the largest batch of all samples is estimated at %.2f times the largest of the samples "
            "looked at: batch size %d is reduced to %d",
            margin,
            result.batch_size,
            size,
        )
        options["start"] = size
        result = search(**options, bounds={**bounds, "unread_samples": size})
    if result.batch_size < (known or 0):
        logger.warning(
            "AutoBatch (%s): continuing with %s, limited by %s, instead of %d, the size of %s",
            result.mode,
            sized(result.batch_size, arguments.get("unit")),
            result.limited_by,
            known,
            source,
        )
    return result


class WholeLoop:
    """Runs the last step of a loop beside as much memory as the loop keeps of its batches by then.

    Two steps run first: the second one shows the tensors that each step leaves behind. A call runs one step.

    Args:
        device: whose tensors count.
        name: of the loop, for the warning.
        joins: whether the loop joins its outputs, for which it takes as much again.
        state: modules and optimizers, whose gradients and state come once.
    """

    def __init__(
        self, device: torch.device, name: str, state: Sequence[Any] = (), *, joins: bool = False
    ) -> None:
        self._device, self._name, self._state, self._joins = device, name, state, joins
        self._held_bytes, self._is_told = 0, False

    def __call__(self, run: Callable[[], Any], number: int, num_steps: int) -> Any:
        """Run a step, and after the second one the loop's last one too if the loop keeps a notable amount.

        Args:
            run: the step; returns objects that the loop keeps in addition to the step's own.
            number: of the step in its trial, from 1.
            num_steps: of the loop.

        Returns:
            The value of `run`. The caller holds it until the next step.
        """
        kept = run()
        if number == 1:
            self._held_bytes = self._tensor_bytes()
        elif number == 2 < num_steps:
            self._run_last(run, num_steps)
        return kept

    def _run_last(self, run: Callable[[], Any], num_steps: int) -> None:
        kept_bytes = self._tensor_bytes() - self._held_bytes
        total_bytes = kept_bytes * num_steps
        if total_bytes < NOTABLE_BYTES:
            return
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "warning: %s keeps %.0f MiB of its batches until its end. The search counts them%s",
                self._name,
                total_bytes / 2**20,
                "" if self._joins else ", but not as much again that joining them takes",
            )
        empty = partial(torch.empty, dtype=torch.uint8, device=self._device)
        kept = [empty(total_bytes - 3 * kept_bytes)]
        kept.append(run())
        if self._joins:
            empty(total_bytes)

    def _tensor_bytes(self) -> int:
        """Bytes of the tensors on the device that have come since the search began."""
        gc.collect()
        once = {id(each.grad) for part in self._state for each in parameters_of(part)}
        for part in filter(is_optimizer, self._state):
            once |= {*map(id, nest.tensors(list(part.state.values())))}
        sizes = dict[int, int]()
        for each in gc.get_objects():  # the search has frozen earlier objects
            if type(each) is not torch.Tensor or id(each) in once:
                continue
            if each.device.type == self._device.type and each.layout is torch.strided:
                storage = each.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
        return sum(sizes.values())


def warn_of_growth(before: int, after: int) -> None:
    """Warn if the samples of a step have grown so much that the learning rate may be wrong."""
    if after > NOTABLE_GROWTH * before:
        logger.warning(
            "warning: a step takes %d samples, %.3g times as many as before (%d): check the learning rate",
            after,
            after / before,
            before,
        )


def divisor_of(
    effective_batch_size: int,
    world_size: int,
    largest: int,
    model: nn.Module,
    options: Mapping[str, Any],
    epoch: int | None = None,
) -> int:
    """The largest batch size that divides the part of an effective batch that each rank has.

    >>> options = {"min_batch_size": 1, "multiple_of": 16}
    >>> divisor_of(96, 2, 40, nn.Linear(1, 1), options)
    16

    Args:
        effective_batch_size: samples per optimizer step of all ranks.
        world_size: number of ranks.
        largest: the largest size that may be.
        model: needs batches of at least two samples in training where it has BatchNorm.
        options: with `min_batch_size` and `multiple_of`, which hold unless `largest` is below them.
        epoch: samples of an epoch on each rank; None is no limit.

    Raises:
        AutoBatchError: it is above an epoch, or no size within the bounds divides it.
    """
    text = f"AutoBatch: effective_batch_size is {effective_batch_size}"
    if epoch is not None and effective_batch_size > epoch * world_size:
        raise AutoBatchError(
            f"{text}, above the {epoch * world_size} samples of an epoch; lower it"
        )
    smallest = smallest_size([model], "train", min(options["min_batch_size"], largest), largest)
    multiple = options["multiple_of"] if largest >= options["multiple_of"] else 1

    def divisor(samples: int) -> int:
        own, rest = divmod(samples, world_size)
        sizes = () if rest else range(min(own, largest) // multiple * multiple, 0, -multiple)
        return next((size for size in sizes if size >= smallest and own % size == 0), 0)

    if size := divisor(effective_batch_size):
        return size
    most = 2 * (effective_batch_size + largest * world_size)
    near = nearest(effective_batch_size, most, lambda samples: divisor(samples) > 0)
    raise AutoBatchError(
        f"{text}, {effective_batch_size / world_size:g} for each rank, which no batch size from "
        f"{smallest} to {largest}{f' in multiples of {multiple}' if multiple > 1 else ''} divides; "
        f"{' or '.join(map(str, near)) or 'another size'} would fit"
    )
