"""AutoBatch for loops with accelerate, after `prepare`.

batch_size = find_batch_size(accelerator, model, optimizer, loss_fn, dataset)
loader = budget_loader(accelerator, model, optimizer, loss_fn, DataLoader(dataset), cost="length")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply, send_to_device
from torch.utils.data import DataLoader, default_collate

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.ranks.group import joined_ranks
from linnaeus.autobatch.settings import kind_of
from linnaeus.integrations.budget import Cost, Ends, ends_of_loader, search_within, with_budget
from linnaeus.integrations.common import checked_options, find_size
from linnaeus.integrations.samples import Largest

_SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TP")
_REMEDY = (
    "give a list of the largest samples as dataset, or a collate_fn that makes the largest batch"
)


def find_batch_size(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: Any,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    dataset: Any,
    target_memory_fraction: float = 0.8,
    *,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    num_workers: int = 0,
    state: Iterable[Any] = (),
    **search: Any,
) -> int:
    """Find the batch size for a loader of a dataset, after `prepare(model, optimizer)` and before the loader.

    A trial takes optimizer steps as the loop will: with `accelerator.backward`, its mixed precision, and with
    gradient accumulation two batches for each. In a process group every rank must call this.

    Args:
        accelerator: as the loop uses it.
        model: prepared.
        optimizer: prepared.
        loss_fn: the loss of a batch, from the model and the batch.
        dataset: read by index. Where the collate function gives batches of different shapes for its samples,
            a batch of n is made of the n largest: see `docs/accelerate.md`. Fewer samples than n repeat.
        target_memory_fraction: fraction of the device's total memory that may be in use, in (0, 1].
        collate_fn: the loader's.
        num_workers: the loader's. Workers bound the size by host memory and `/dev/shm`.
        state: other objects that a step changes, as for `auto_find_batch_size`.
        search: further arguments of `auto_find_batch_size`: `min_batch_size`, `max_batch_size` (None is no
            upper bound), `memory_limit_gb`, `multiple_of` and others.

    Returns:
        The `batch_size` of the loader, for each rank.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of its range.
        AutoBatchError: no size fits; another rank failed; FSDP, DeepSpeed and the like, or `split_batches`
            over several ranks.
    """
    search["target_memory_fraction"] = target_memory_fraction
    loop = _Loop(accelerator, model, optimizer, loss_fn)
    search = checked_options("find_batch_size()", search)
    with joined_ranks() as control:  # the error of one rank ends all of them
        loop.check()
        device = accelerator.device
        look = Largest(
            dataset,
            collate_fn,
            remedy=_REMEDY,
            timeout_minutes=search["timeout_minutes"],
            device=device,
            num_workers=num_workers,
        )

        def make_batches(size: int) -> Iterator[Any]:
            following = look.batch(size)
            for _ in range(loop.num_batches):  # as accelerate's loader, which reads ahead
                batch, following = send_to_device(following, device), look.batch(size)
                yield batch

        result = find_size(
            loop.step,
            make_batches,
            search,
            control=control,
            looks=[look],
            state=[*loop.state, *state],
            device=device,
        )
    return result.batch_size


def budget_loader(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: Any,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    loader: DataLoader[Any],
    target_memory_fraction: float = 0.8,
    *,
    cost: Cost,
    seed: int = 0,
    state: Iterable[Any] = (),
    **search: Any,
) -> Any:
    """Find a budget for batches, and return the loader with batches within it, as `prepare` would return it.

    Args:
        accelerator, model, optimizer, loss_fn, target_memory_fraction, state: as for `find_batch_size`.
        loader: gives the dataset, the collate function and the workers; its batches are replaced.
        cost: as for `find_budget`. Whether the collate function pads is seen from its batches.
        seed: of the shuffling.
        search: as for `find_batch_size`; `max_batch_size` bounds the budget.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of its range.
        AutoBatchError: the longest sample does not fit, or as for `find_batch_size`.
    """
    search = {"max_batch_size": None, "target_memory_fraction": target_memory_fraction, **search}
    loop = _Loop(accelerator, model, optimizer, loss_fn)
    search = checked_options("budget_loader()", search)
    with joined_ranks() as control:
        loop.check()
        ends = ends_of_loader(loader, cost)

        def step(batch: Any) -> None:
            copies = (recursively_apply(torch.clone, batch) for _ in range(loop.num_batches))
            loop.step(send_to_device(each, accelerator.device) for each in copies)

        state, device = [*loop.state, *state], accelerator.device
        run = partial(ends.run, step)
        found = search_within(ends, run, search, control=control, state=state, device=device)
    return loader_of_rank(accelerator, loader, ends, found.batch_size, seed=seed)


def loader_of_rank(
    accelerator: Accelerator, loader: Any, ends: Ends, budget: int, *, seed: int
) -> Any:
    """Return a loader of this rank's batches within a budget; `prepare` would share them out once more."""
    ranks = {"num_replicas": accelerator.num_processes, "rank": accelerator.process_index}
    return prepare_data_loader(
        with_budget(loader, ends, budget, seed=seed, **ranks),
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
    )


@dataclass
class _Loop:
    """The user's loop: an optimizer step of one or two micro-batches."""

    accelerator: Accelerator
    model: torch.nn.Module
    optimizer: Any
    loss_fn: Callable[[Any, Any], torch.Tensor]

    def __post_init__(self) -> None:
        if not isinstance(self.accelerator, Accelerator):
            raise TypeError(
                f"accelerator is {kind_of(self.accelerator)}; it must be an accelerate.Accelerator"
            )

    @property
    def num_batches(self) -> int:
        """Micro-batches of a step in a trial."""
        return int(min(self.accelerator.gradient_accumulation_steps, 2))

    @property
    def state(self) -> list[Any]:
        """Everything that a step changes."""
        return [self.model, self.optimizer, self.accelerator.scaler]

    def check(self) -> None:
        """Raise `AutoBatchError` where no rank can take a step alone."""
        accelerator = self.accelerator
        kind = str(accelerator.distributed_type).rpartition(".")[2]
        is_split = accelerator.split_batches and kind not in _SHARDED
        if kind in _SHARDED or (is_split and accelerator.num_processes > 1):
            what = "split_batches over several ranks" if is_split else kind
            raise AutoBatchError(
                f"AutoBatch: with {what} no rank can take a step alone, as one does in a search; give a "
                "batch size of your own"
            )

    def step(self, batches: Iterable[Any]) -> None:
        """Take a step of batches on the device."""
        for number, batch in enumerate(batches, start=1):
            loss = self.loss_fn(self.model, batch)
            self.accelerator.backward(loss)
            if number == self.num_batches:
                self.optimizer.step()
                self.optimizer.zero_grad()
