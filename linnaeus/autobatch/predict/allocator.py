"""A model of PyTorch's caching allocator for CUDA: which bytes it reserves for a sequence of requests.

It follows c10/cuda/CUDACachingAllocator.cpp of torch 2.11 to 2.15 with the native backend.
Sizes are rounded up to 512 bytes. Requests up to 1 MiB come from segments of 2 MiB, those below 10 MiB from
segments of 20 MiB, larger ones from a segment of their own, rounded up to 2 MiB. The smallest free block
that is large enough is taken, and split where enough of it remains. With expandable segments, each of the
two pools is one segment, mapped in pages of 2 or 20 MiB. Where the device is full, all free
segments or pages are given back, and the request is tried once more. Each stream has pools of its own.

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
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from linnaeus.autobatch.search import OutOfMemory

MIB = 1 << 20
MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB
"""The largest request that the pool of small blocks serves."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
"""The smallest request that gets a segment of its own."""
SEGMENT_STEP_BYTES = 2 * MIB


@dataclass(frozen=True)
class AllocatorSettings:
    """Settings of the allocator that this model follows; it ignores others."""

    expandable_segments: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> AllocatorSettings:
        """Read the setting from `PYTORCH_ALLOC_CONF`, or else from `PYTORCH_CUDA_ALLOC_CONF`."""
        text = (
            environment.get("PYTORCH_ALLOC_CONF")
            or environment.get("PYTORCH_CUDA_ALLOC_CONF")
            or ""
        )
        return cls(re.search(r"\bexpandable_segments\s*:\s*True\b", text) is not None)


class Block:
    """A part of a segment, or all of it.

    Attributes:
        address, size: in bytes; the address decides between free blocks of one size.
        pool: the pool of its segment.
        before, after: its neighbours; None at the start and at the end of the segment.
        is_free: whether it is cached, or not mapped.
        is_mapped: whether the device has memory for it; always, but in expandable segments.
    """

    __slots__ = ("address", "after", "before", "is_free", "is_mapped", "pool", "size")

    def __init__(
        self,
        address: int,
        size: int,
        pool: Pool,
        before: Block | None = None,
        after: Block | None = None,
    ) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.before, self.after = before, after
        self.is_free = self.is_mapped = True

    @property
    def room(self) -> int:
        """Bytes to which it can grow."""
        return self.size + (0 if self.after is None or self.after.is_mapped else self.after.size)


class Pool:
    """Free blocks, ascending by size and then by address, and blocks that are not mapped.

    Attributes:
        entries: size, address and block; no two have the same address, so blocks are never compared.
        unmapped: the same, with 0 for the size.
        page_bytes: size of the pages of an expandable segment.
    """

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.page_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        self.entries: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, int, Block]] = []

    def add(self, block: Block) -> None:
        """Put a block in its place."""
        entries, size = (self.entries, block.size) if block.is_mapped else (self.unmapped, 0)
        bisect.insort(entries, (size, block.address, block))

    def remove(self, block: Block) -> None:
        """Take a block out."""
        entries, size = (self.entries, block.size) if block.is_mapped else (self.unmapped, 0)
        index = bisect.bisect_left(entries, (size, block.address))
        assert entries[index][2] is block
        del entries[index]

    def smallest(self, num_bytes: int) -> Block | None:
        """Return the smallest block of at least `num_bytes`; or the next, if it can grow less."""
        index = bisect.bisect_left(self.entries, (num_bytes,))
        blocks = [
            block for _, _, block in self.entries[index : None if self.unmapped else index + 1]
        ]
        while blocks[1:] and blocks[1].room < blocks[0].room:
            del blocks[0]
        return blocks[0] if blocks else None


class CachingAllocator:
    """The allocator of one process.

    Attributes:
        limit_bytes: most bytes that it may reserve.
        reserved_bytes, peak_reserved_bytes: bytes of all segments, and the most of them so far.
    """

    def __init__(
        self, settings: AllocatorSettings = AllocatorSettings(), limit_bytes: float = math.inf
    ) -> None:
        self.settings, self.limit_bytes = settings, limit_bytes
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._next_address = 0

    def _pool(self, stream: int, *, is_small: bool) -> Pool:
        if (stream, is_small) not in self._pools:
            pool = self._pools[stream, is_small] = Pool(is_small=is_small)
            if self.settings.expandable_segments:
                # The pools lie in endless address spaces of their own; only the order within a pool counts.
                segment = Block(0, 1 << 60, pool)
                segment.is_mapped = False
                pool.add(segment)
        return self._pools[stream, is_small]

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        """Serve a request of at least one byte on a stream.

        Raises:
            OutOfMemory: it does not fit within the limit, even with an empty cache.
        """
        size = -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        pool = self._pool(stream, is_small=size <= SMALL_BYTES)
        block = pool.smallest(size) or self._taken(pool, size)
        if block is None:
            self.empty_cache()
            block = self._taken(pool, size)
            if block is None:
                raise OutOfMemory(f"{num_bytes} bytes")
        pool.remove(block)
        block.is_free = False
        rest_bytes = block.size - size
        is_fine = pool.is_small or self.settings.expandable_segments
        if rest_bytes >= MIN_BLOCK_BYTES if is_fine else rest_bytes > SMALL_BYTES:
            pool.add(self._split(block, size))
        return block

    def free(self, block: Block) -> None:
        """Put a block in the cache, merged with free neighbours."""
        assert not block.is_free
        block.is_free = True
        self._join(block)

    def empty_cache(self) -> None:
        """Return unused segments, and free pages of expandable segments, to the device."""
        for pool in self._pools.values():
            for _, _, block in list(pool.entries):
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.release(block.size)

    def reserve(self, num_bytes: int) -> bool:
        """Take bytes from the device; return whether they fit within the limit."""
        if self.reserved_bytes + num_bytes > self.limit_bytes:
            return False
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def release(self, num_bytes: int) -> None:
        """Return bytes to the device."""
        self.reserved_bytes -= num_bytes

    def _taken(self, pool: Pool, size: int) -> Block | None:
        """Return a free block in a new segment; None where that does not fit within the limit."""
        if self.settings.expandable_segments:
            return self._grown(pool, size)
        if pool.is_small or size < OWN_SEGMENT_BYTES:
            segment_bytes = pool.page_bytes
        else:
            segment_bytes = -(-size // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
        if not self.reserve(segment_bytes):
            return None
        block = Block(self._next_address, segment_bytes, pool)
        self._next_address += segment_bytes
        pool.add(block)
        return block

    def _grown(self, pool: Pool, size: int) -> Block | None:
        """Return the first place with room in the pool's one segment, mapped as far as the request needs."""
        for _, _, hole in pool.unmapped:
            block = hole.before if hole.before is not None and hole.before.is_free else hole
            room, end = block.size, block.after
            while room < size and end is not None and end.is_free:
                room, end = room + end.size, end.after
            if room >= size:
                break
        while not block.is_mapped or block.size < size:
            hole = block.after if block.is_mapped and block.after is not None else block
            missing_bytes = min(size - block.size * block.is_mapped, hole.size)
            num_bytes = -(-missing_bytes // pool.page_bytes) * pool.page_bytes
            if not self.reserve(num_bytes):
                return None
            pool.remove(hole)
            if hole.size > num_bytes:
                pool.add(self._split(hole, num_bytes))
            hole.is_mapped = True
            block = self._join(hole)
        return block

    def _unmap(self, block: Block) -> None:
        """Return the whole pages of a free block to the device."""
        pool, end = block.pool, block.address + block.size
        first, last = -(-block.address // pool.page_bytes), end // pool.page_bytes
        if first >= last:
            return
        pool.remove(block)
        if end > last * pool.page_bytes:
            pool.add(self._split(block, last * pool.page_bytes - block.address))
        if block.address < first * pool.page_bytes:
            head, block = block, self._split(block, first * pool.page_bytes - block.address)
            pool.add(head)
        block.is_mapped = False
        self.release(block.size)
        self._join(block)

    def _join(self, block: Block) -> Block:
        """Merge a free block with its free neighbours, and put it in its place."""
        for other in (block.before, block.after):
            if other is None or not other.is_free or other.is_mapped is not block.is_mapped:
                continue
            block.pool.remove(other)
            block.size += other.size
            if other is block.before:
                block.address, block.before = other.address, other.before
            else:
                block.after = other.after
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        block.pool.add(block)
        return block

    def _split(self, block: Block, size: int) -> Block:
        """Cut a block down to a size; return the free rest."""
        rest = Block(block.address + size, block.size - size, block.pool, block, block.after)
        rest.is_mapped = block.is_mapped
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        return rest
