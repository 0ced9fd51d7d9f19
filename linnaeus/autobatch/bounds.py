"""How large a batch the data itself allows: its length, and the host memory that loading needs."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from linnaeus.config.schema import DataConfig
from linnaeus.data.bundle import DataBundle, dataset_length
from linnaeus.memory.host import available_host_bytes

HOST_MEMORY_FRACTION = 0.5
"""Share of the available host memory that the loaders of one machine may fill with batches."""

_SHARED_MEMORY = Path("/dev/shm")


def max_batch_size_for(
    bundle: DataBundle,
    *,
    train: bool,
    bytes_per_sample: int,
    data_config: DataConfig,
    device: torch.device,
    world_size: int = 1,
    local_world_size: int = 1,
    available_bytes: int | None = None,
) -> dict[str, int]:
    """Upper bounds of the batch size, by name; the smallest holds.

    Args:
        bundle: the datasets.
        train: training or validation.
        bytes_per_sample: host bytes of one collated sample, as `BatchSpec.bytes_per_sample`.
        data_config: the `DATA` node; workers, prefetching and pinning are read from it.
        device: device of training.
        world_size: processes of the run.
        local_world_size: processes on this machine, which share its memory.
        available_bytes: host memory to share; by default what the machine and its cgroups have available.

    Returns:
        `dataset`: samples that one process has. `host_memory`: samples per batch with which all batches that
        the loader holds at once fill at most `HOST_MEMORY_FRACTION` of the host's memory. Each is 1 at least.
    """
    length = dataset_length(bundle.train if train else bundle.val)
    per_rank = length // world_size if train else -(-length // world_size)
    pinned = data_config.PIN_MEMORY and device.type == "cuda"
    batches = num_host_batches(data_config.NUM_WORKERS, data_config.PREFETCH_FACTOR, pinned=pinned)
    if available_bytes is None:
        available_bytes = _available_bytes(data_config.NUM_WORKERS)
    share = HOST_MEMORY_FRACTION * available_bytes / local_world_size
    return {
        "dataset": max(1, per_rank),
        "host_memory": max(1, int(share / (batches * max(1, bytes_per_sample)))),
    }


def num_host_batches(num_workers: int, prefetch_factor: int, *, pinned: bool) -> int:
    """Batches that one loader holds in host memory at most.

    Each worker has `prefetch_factor` batches waiting and one in the making, whose samples and collated
    tensors exist side by side; one is in use. Pinning copies each.

    >>> num_host_batches(0, 2, pinned=False), num_host_batches(4, 2, pinned=True)
    (3, 34)
    """
    held = num_workers * (prefetch_factor + 2) + 1 if num_workers else 3
    return held * 2 if pinned else held


def _available_bytes(num_workers: int) -> int:
    """Host memory that is free to use; batches of workers also have to fit into shared memory."""
    available = available_host_bytes()
    if num_workers and _SHARED_MEMORY.is_dir():
        available = min(available, shutil.disk_usage(_SHARED_MEMORY).free)
    return available
