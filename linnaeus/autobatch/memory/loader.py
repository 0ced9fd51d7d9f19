"""Host memory that the batches of a loader take."""

from __future__ import annotations

import shutil
from pathlib import Path

from linnaeus.autobatch.memory.host import available_host_bytes

HOST_MEMORY_FRACTION = 0.5
"""Fraction of the available host memory that the loaders of all ranks on a machine may fill with batches."""

_SHARED_MEMORY = Path("/dev/shm")


def num_host_batches(workers: int, prefetch_factor: int) -> int:
    """The most batches that one loader holds in host memory, without pinned copies.

    A worker holds `prefetch_factor` finished batches, and the samples and the collated tensors of the next
    one. The step uses one more.

    Args:
        workers: loader processes.
        prefetch_factor: batches that a worker makes ahead.

    >>> num_host_batches(0, 2), num_host_batches(4, 2)
    (3, 17)
    """
    return workers * (prefetch_factor + 2) + 1 if workers else 3


def largest_host_batch(
    sample_bytes: float,
    workers: int,
    prefetch_factor: int | None = None,
    *,
    pinned: bool = False,
    num_ranks: int = 1,
) -> int:
    """The largest batch, at least 1, of which all that a loader holds at once fit into host memory.

    A rank may use its part of `HOST_MEMORY_FRACTION` of what is available; with workers, also of `/dev/shm`.

    Args:
        sample_bytes: of the tensors of one collated sample.
        workers, prefetch_factor: as for `num_host_batches`; None is 2, as in a `DataLoader`.
        pinned: whether each batch has a pinned copy, which is up to twice as large: its allocator rounds each
            tensor up to a power of two.
        num_ranks: ranks on this machine.
    """
    available = available_bytes(workers) * HOST_MEMORY_FRACTION / num_ranks
    num_batches = num_host_batches(workers, prefetch_factor or 2)
    return max(1, int(available / num_batches / max(1, sample_bytes * (3 if pinned else 1))))


def available_bytes(workers: int) -> int:
    """Host memory available for batches; batches of workers also have to fit into shared memory."""
    available = available_host_bytes()
    if workers and _SHARED_MEMORY.is_dir():
        available = min(available, shutil.disk_usage(_SHARED_MEMORY).free)
    return available
