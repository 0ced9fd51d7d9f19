"""What a test process holds, and what the operations of a test allocate."""

import psutil
import torch

from linnaeus.autobatch.memory.device import GIB, device_memory
from linnaeus.autobatch.memory.storages import StorageTracer


def resident_bytes():
    """The resident set of this process."""
    return int(psutil.Process().memory_info().rss)


def held_bytes():
    """Bytes that this process holds, without what the C library keeps of earlier tests."""
    memory = device_memory(torch.device("cpu"))
    memory.clean()
    memory.settle()
    return memory.in_use()


def limit_with_room_for(extra_mib):
    """A `MEMORY_LIMIT_GB` so much above what this process holds, without what is kept of earlier tests."""
    return (held_bytes() + extra_mib * 1024**2) / GIB


def room(extra_mib, **options):
    """Arguments of a search that leave so much above what this process holds, and others."""
    return {
        "target_memory_fraction": 1.0,
        "memory_limit_gb": limit_with_room_for(extra_mib),
        **options,
    }


class Ledger:
    """Bytes of the storages that were allocated in this context and are not freed yet.

    Args:
        limit_bytes: an operation that takes the sum above it raises a `MemoryError`.

    Attributes:
        live: bytes of each storage, by the number that the tracer gave it.
        peak_bytes: the largest sum so far.
    """

    def __init__(self, limit_bytes=float("inf")):
        self.live = {}
        self.peak_bytes, self._limit_bytes = 0, limit_bytes
        self._tracer = StorageTracer(self._allocate, self._free)

    def __enter__(self):
        self._tracer.__enter__()
        return self

    def __exit__(self, *exception):
        self._tracer.__exit__(*exception)

    @property
    def live_bytes(self):
        """The sum now."""
        return sum(self.live.values())

    def _allocate(self, number, num_bytes):
        assert number not in self.live
        self.live[number] = num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self.live_bytes > self._limit_bytes:
            raise MemoryError

    def _free(self, number, num_bytes):
        self.live.pop(number, None)
