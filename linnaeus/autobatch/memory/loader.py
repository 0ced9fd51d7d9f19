"""Host memory that the batches of a loader take."""

from __future__ import annotations

import shutil
from pathlib import Path

from linnaeus.autobatch.memory.host import available_host_bytes

HOST_MEMORY_FRACTION = 0.5
"""Fraction of the available host memory that the loaders of all ranks on a machine may fill with batches."""

_SHARED_MEMORY = Path("/dev/shm")


def largest_host_batch(
    sample_bytes: float,
    workers: int,
    prefetch_factor: int | None = None,
    *,
    pinned: bool = False,
    num_ranks: int = 1,
) -> int:
    """Return the largest batch, at least 1, for which host memory holds all batches of a loader at once.

    A worker holds `prefetch_factor` finished batches, and the samples and the collated tensors of the next
    one. The step uses one more. A rank may use its part of `HOST_MEMORY_FRACTION` of the available memory;
    with workers, also of `/dev/shm`.

    Args:
        sample_bytes: of the tensors of one collated sample.
        workers: loader processes.
        prefetch_factor: batches that a worker makes ahead; None is 2, as in a `DataLoader`.
        pinned: whether each batch has a pinned copy, which is up to twice as large: its allocator rounds each
            tensor up to a power of two.
        num_ranks: ranks on this machine.
    """
    available_bytes = available_host_bytes()
    if workers and _SHARED_MEMORY.is_dir():
        available_bytes = min(available_bytes, shutil.disk_usage(_SHARED_MEMORY).free)
    num_batches = workers * ((prefetch_factor or 2) + 2) + 1 if workers else 3
    rank_bytes = available_bytes * HOST_MEMORY_FRACTION / num_ranks
    return max(1, int(rank_bytes / num_batches / max(1, sample_bytes * (3 if pinned else 1))))
