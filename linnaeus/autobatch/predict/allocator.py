"""A model of PyTorch's caching allocator for CUDA: which bytes it reserves for a sequence of requests.

It follows c10/cuda/CUDACachingAllocator.cpp of torch 2.11 to 2.15 with the native backend.
Sizes are rounded up to 512 bytes. Requests up to 1 MiB come from segments of 2 MiB, those below 10 MiB from
segments of 20 MiB, larger ones from a segment of their own, rounded up to 2 MiB. The smallest free block
that is large enough is taken, of equal ones the oldest (torch 2.11: the one at the lowest address), and
split where enough of it remains. Where the device is full, all free segments are given back, and the request
is tried once more. Each stream has its own pools. Expandable segments, which usually reserve less, are not
modeled.

>>> allocator = CachingAllocator()
>>> block = allocator.allocate(30 * MIB)
>>> allocator.free(block)
>>> _ = allocator.allocate(12 * MIB)  # from the block that was freed
>>> allocator.reserved_bytes // MIB
30
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from linnaeus.autobatch.search import OutOfMemory

MIB = 1 << 20
MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB
"""The largest request that the pool of small blocks serves."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
"""The smallest request that gets its own segment."""
SEGMENT_STEP_BYTES = 2 * MIB

Pool = list[tuple[int, int, "Block"]]
"""Size, address and block of all free blocks, ascending; no two have the same address."""


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment, or all of it.

    Attributes:
        address, size: in bytes; the address decides between free blocks of one size.
        pool: the free blocks of its kind.
        before, after: its neighbours; None at the start and at the end of the segment.
        is_free: whether it is cached.
    """

    address: int
    size: int
    pool: Pool
    before: Block | None = None
    after: Block | None = None
    is_free: bool = True


class CachingAllocator:
    """The allocator of one process.

    Attributes:
        limit_bytes: most bytes that it may reserve.
        reserved_bytes, peak_reserved_bytes: bytes of all segments, and the most of them so far.
    """

    def __init__(self, limit_bytes: float = math.inf) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._next_address = 0

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        """Serve a request of at least one byte on a stream.

        Raises:
            OutOfMemory: it does not fit within the limit, even with an empty cache.
        """
        size = -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        is_small = size <= SMALL_BYTES
        pool = self._pools.setdefault((stream, is_small), [])
        index = bisect.bisect_left(pool, (size,))
        block = pool.pop(index)[2] if index < len(pool) else self._new_segment(pool, size)
        block.is_free = False
        if block.size - size >= (MIN_BLOCK_BYTES if is_small else SMALL_BYTES + 1):
            rest = Block(block.address + size, block.size - size, pool, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            _add(rest)
        return block

    def free(self, block: Block) -> None:
        """Put a block in the cache, merged with free neighbours."""
        assert not block.is_free
        block.is_free = True
        for other in (block.before, block.after):
            if other is None or not other.is_free:
                continue
            _remove(other)
            block.size += other.size
            if other is block.before:
                block.address, block.before = other.address, other.before
            else:
                block.after = other.after
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        _add(block)

    def empty_cache(self) -> None:
        """Return unused segments to the device."""
        for pool in self._pools.values():
            for _, _, block in list(pool):
                if block.before is None and block.after is None:
                    _remove(block)
                    self.reserved_bytes -= block.size

    def _new_segment(self, pool: Pool, size: int) -> Block:
        """Take a segment from the device, if necessary after emptying the cache."""
        if size <= SMALL_BYTES:
            size = SMALL_SEGMENT_BYTES
        elif size < OWN_SEGMENT_BYTES:
            size = LARGE_SEGMENT_BYTES
        else:
            size = -(-size // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
        if self.reserved_bytes + size > self.limit_bytes:
            self.empty_cache()
            if self.reserved_bytes + size > self.limit_bytes:
                raise OutOfMemory(f"a segment of {size} bytes")
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self._next_address += size
        return Block(self._next_address - size, size, pool)


def _add(block: Block) -> None:
    bisect.insort(block.pool, (block.size, block.address, block))


def _remove(block: Block) -> None:
    del block.pool[bisect.bisect_left(block.pool, (block.size, block.address))]
