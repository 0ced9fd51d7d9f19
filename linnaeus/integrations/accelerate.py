"""AutoBatch for loops with accelerate.

batch_size = find_batch_size(accelerator, model, optimizer, loss_fn, dataset)     after `prepare`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch.utils.data import default_collate

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.ranks.group import joined_ranks
from linnaeus.autobatch.settings import kind_of
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
    if not isinstance(accelerator, Accelerator):
        raise TypeError(
            f"accelerator is {kind_of(accelerator)}; it must be an accelerate.Accelerator"
        )
    search["target_memory_fraction"] = target_memory_fraction
    search = checked_options("find_batch_size()", search)
    with joined_ranks() as control:  # the error of one rank ends all of them
        kind = str(accelerator.distributed_type).rpartition(".")[2]
        is_split = accelerator.split_batches and kind not in _SHARDED
        if kind in _SHARDED or (is_split and accelerator.num_processes > 1):
            what = "split_batches over several ranks" if is_split else kind
            raise AutoBatchError(
                f"AutoBatch: with {what} no rank can take a step alone, as one does in a search; give a "
                "batch size of your own"
            )
        device = accelerator.device
        look = Largest(
            dataset,
            collate_fn,
            remedy=_REMEDY,
            timeout_minutes=search["timeout_minutes"],
            device=device,
            num_workers=num_workers,
        )
        num_batches = min(accelerator.gradient_accumulation_steps, 2)

        def make_batches(size: int) -> Iterator[Any]:
            following = look.batch(size)
            for _ in range(num_batches):  # as accelerate's loader, which reads ahead
                batch, following = send_to_device(following, device), look.batch(size)
                yield batch

        def step(batches: Iterator[Any]) -> None:
            for number, batch in enumerate(batches, start=1):
                loss = loss_fn(model, batch)
                accelerator.backward(loss)
                if number == num_batches:
                    optimizer.step()
                    optimizer.zero_grad()

        result = find_size(
            step,
            make_batches,
            search,
            control=control,
            looks=[look],
            state=[model, optimizer, accelerator.scaler, *state],
            device=device,
        )
    return result.batch_size
