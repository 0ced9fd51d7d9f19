"""Upper bounds of the batch size besides device memory: the dataset, its steps, host memory of the loader."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from linnaeus.autobatch.memory.host import available_host_bytes
from linnaeus.autobatch.result import Mode
from linnaeus.batching.sizes import keeps_rest
from linnaeus.config.schema import DataConfig, TrainConfig
from linnaeus.data.bundle import DataBundle, dataset_length
from linnaeus.dist import World

HOST_MEMORY_FRACTION = 0.5
"""Fraction of the available host memory that the loaders of all ranks on a machine may fill with batches."""

SMALLEST = 2
"""The steps of an epoch bound no size below this one: BatchNorm takes no single sample."""

_SHARED_MEMORY = Path("/dev/shm")


def max_batch_sizes(
    config: DataConfig,
    train: TrainConfig,
    data: DataBundle,
    mode: Mode,
    world: World,
    *,
    tensor_bytes: Sequence[int],
) -> dict[str, int]:
    """Upper bounds of the batch size, each at least 1, by the name that `limited_by` reports.

    Args:
        config, train: the nodes DATA and TRAIN.
        data: the datasets.
        mode: `train` or `val`.
        world: the processes.
        tensor_bytes: host bytes of each tensor of one collated sample.

    Returns:
        `dataset`: samples of one rank. `host_memory`: the largest size at which all batches that the loader
        holds at once fit in this rank's part of `HOST_MEMORY_FRACTION` of the available host memory.
        `steps_per_epoch`: see `max_for_steps`; for training alone.
    """
    length = dataset_length(data.train if mode == "train" else data.val)
    samples_per_rank = (
        length // world.world_size if mode == "train" else -(-length // world.world_size)
    )
    pinned = config.PIN_MEMORY and world.device.type == "cuda"
    workers = config.NUM_WORKERS or 0
    num_copies = data.mixing.num_copies if mode == "train" and data.mixing is not None else 0
    num_batches = num_host_batches(workers, config.PREFETCH_FACTOR, num_copies)
    bytes_per_rank = HOST_MEMORY_FRACTION * _available_bytes(workers) / world.local_world_size
    # A pinned copy may be twice as large: its allocator rounds up to a power of two (CachingHostAllocator.h).
    copies, sample_bytes = 3 if pinned else 1, max(1, sum(tensor_bytes))
    bounds = {
        "dataset": max(1, samples_per_rank),
        "host_memory": max(1, int(bytes_per_rank // (num_batches * copies * sample_bytes))),
    }
    min_steps = config.AUTOBATCH.MIN_STEPS_PER_EPOCH
    # Without the rest of an epoch as a step of its own, the user has said how many samples a step takes.
    if mode == "train" and min_steps > 1 and keeps_rest(train):
        size = max_for_steps(samples_per_rank, min_steps, train.ACCUMULATION_STEPS)
        bounds["steps_per_epoch"] = max(SMALLEST, size, config.AUTOBATCH.MIN_BATCH_SIZE)
    return bounds


def max_for_steps(samples_per_rank: int, min_steps: int, accumulation_steps: int = 1) -> int:
    """The largest micro-batch with which an epoch has so many optimizer steps; 0 where none has.

    The last step of an epoch may have fewer micro-batches than the others.

    >>> max_for_steps(1437, 10), max_for_steps(1437, 10, accumulation_steps=2), max_for_steps(9, 10)
    (143, 75, 0)
    """
    return samples_per_rank // ((min_steps - 1) * accumulation_steps + 1)


def num_host_batches(workers: int, prefetch_factor: int, num_copies: int = 0) -> int:
    """The most batches that one loader holds in host memory, without pinned copies.

    A worker holds `prefetch_factor` finished batches, and the samples and the collated tensors of the next
    one. The step uses one more.

    Args:
        workers: loader processes.
        prefetch_factor: DATA.PREFETCH_FACTOR.
        num_copies: further copies that making a batch holds for a while, such as `Mixing.num_copies`.

    >>> num_host_batches(0, 2), num_host_batches(4, 2), num_host_batches(4, 2, num_copies=2)
    (3, 17, 25)
    """
    making = 2 + num_copies
    return workers * (prefetch_factor + making) + 1 if workers else making + 1


def _available_bytes(workers: int) -> int:
    """Host memory available for batches; those of workers also have to fit into shared memory."""
    available = available_host_bytes()
    if workers and _SHARED_MEMORY.is_dir():
        available = min(available, shutil.disk_usage(_SHARED_MEMORY).free)
    return available
