"""A model of PyTorch's caching allocator for CUDA: which bytes it reserves for a sequence of requests.

It follows c10/cuda/CUDACachingAllocator.cpp of torch 2.8 to 2.15 with the native backend and one stream.
Sizes are rounded up to 512 bytes. Requests up to 1 MiB come from segments of 2 MiB, those below 10 MiB from
segments of 20 MiB, larger ones from a segment of their own, rounded up to 2 MiB. The smallest free block
that is large enough is taken, and split where enough of it remains. With expandable segments, each of the
two pools is one segment that grows by 2 or 20 MiB.

>>> allocator = CachingAllocator()
>>> block = allocator.allocate(30 * MIB)
>>> allocator.free(block)
>>> _ = allocator.allocate(12 * MIB)  # from the block that was freed
>>> allocator.reserved_bytes // MIB
30
"""

from __future__ import annotations

import bisect
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

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
    """The setting of the allocator that is followed; others are ignored."""

    expandable_segments: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> AllocatorSettings:
        """The setting in `PYTORCH_ALLOC_CONF`, or else in `PYTORCH_CUDA_ALLOC_CONF`."""
        text = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        return cls(re.search(r"\bexpandable_segments\s*:\s*True\b", text) is not None)


class Block:
    """A part of a segment, or all of it.

    Attributes:
        address: decides between free blocks of one size.
        size: bytes.
        pool: the pool of its segment.
        before: the block that ends where this one begins; None at the start of the segment.
        after: the block that begins where this one ends; None at the end of the segment.
        is_free: whether it is cached.
    """

    __slots__ = ("address", "after", "before", "is_free", "pool", "size")

    def __init__(
        self, address: int, size: int, pool: Pool, before: Block | None = None, after: Block | None = None
    ) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.before, self.after = before, after
        self.is_free = False


class Pool:
    """Free blocks, ascending by size and then by address.

    Attributes:
        entries: size, address and block; no two have the same address, so blocks are never compared.
        last: with expandable segments, the block at the end of the pool's one segment.
    """

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.entries: list[tuple[int, int, Block]] = []
        self.last: Block | None = None

    def add(self, block: Block) -> None:
        """Put a block in its place."""
        bisect.insort(self.entries, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Take a block out."""
        index = bisect.bisect_left(self.entries, (block.size, block.address))
        assert self.entries[index][2] is block
        del self.entries[index]

    def smallest(self, num_bytes: int) -> Block | None:
        """The smallest block of at least so many bytes; the one that can grow, only if there is no other."""
        index = bisect.bisect_left(self.entries, (num_bytes,))
        if index == len(self.entries):
            return None
        block = self.entries[index][2]
        if block is self.last and index + 1 < len(self.entries):
            return self.entries[index + 1][2]
        return block


class CachingAllocator:
    """The allocator of one process on an endless device.

    What expandable segments give back in the middle of a segment is not modelled, only what is free at its
    end.

    Attributes:
        reserved_bytes, peak_reserved_bytes: bytes of all segments, and the most of them so far.
    """

    def __init__(self, settings: AllocatorSettings = AllocatorSettings()) -> None:
        self.settings = settings
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self._small, self._large = Pool(is_small=True), Pool(is_small=False)
        self._next_address = 0

    def allocate(self, num_bytes: int) -> Block:
        """Serve a request of at least one byte."""
        size = -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        pool = self._small if size <= SMALL_BYTES else self._large
        block = pool.smallest(size)
        if block is not None:
            pool.remove(block)
        elif self.settings.expandable_segments:
            block = self._grown(pool, size)
        else:
            block = self._segment(pool, size)
        block.is_free = False
        rest_bytes = block.size - size
        is_fine = pool.is_small or self.settings.expandable_segments
        if rest_bytes >= MIN_BLOCK_BYTES if is_fine else rest_bytes > SMALL_BYTES:
            self._split(block, size)
        return block

    def free(self, block: Block) -> None:
        """Put a block in the cache, merged with free neighbours."""
        assert not block.is_free
        pool, before, after = block.pool, block.before, block.after
        block.is_free = True
        if before is not None and before.is_free:
            pool.remove(before)
            block.address, block.size = before.address, before.size + block.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.is_free:
            pool.remove(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
            if after is pool.last:
                pool.last = block
        pool.add(block)

    def empty_cache(self) -> None:
        """Give all segments without a block in use back to the device; of expandable ones, the free end."""
        for pool in (self._small, self._large):
            if self.settings.expandable_segments:
                self._trim(pool)
                continue
            for _, _, block in list(pool.entries):
                if block.before is None and block.after is None:
                    pool.remove(block)
                    self.release(block.size)

    def reserve(self, num_bytes: int) -> None:
        """Take bytes from the device."""
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def release(self, num_bytes: int) -> None:
        """Give bytes back to the device."""
        self.reserved_bytes -= num_bytes

    def _segment(self, pool: Pool, size: int) -> Block:
        if pool.is_small:
            segment_bytes = SMALL_SEGMENT_BYTES
        elif size < OWN_SEGMENT_BYTES:
            segment_bytes = LARGE_SEGMENT_BYTES
        else:
            segment_bytes = -(-size // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
        self.reserve(segment_bytes)
        block = Block(self._next_address, segment_bytes, pool)
        self._next_address += segment_bytes
        return block

    def _grown(self, pool: Pool, size: int) -> Block:
        """The pool's one segment, longer by as many steps as the request needs beyond its free end."""
        last, step_bytes = pool.last, SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES
        missing_bytes = size - (last.size if last is not None and last.is_free else 0)
        grown_bytes = -(-missing_bytes // step_bytes) * step_bytes
        self.reserve(grown_bytes)
        if last is not None and last.is_free:
            pool.remove(last)
            last.size += grown_bytes
            return last
        # The two pools lie in address spaces of their own; only the order within a pool counts.
        block = Block(0 if last is None else last.address + last.size, grown_bytes, pool, before=last)
        if last is not None:
            last.after = block
        pool.last = block
        return block

    def _trim(self, pool: Pool) -> None:
        """Give the whole steps at the free end of an expandable segment back."""
        last = pool.last
        if last is None or not last.is_free:
            return
        step_bytes = SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES
        freed_bytes = last.size // step_bytes * step_bytes
        if not freed_bytes:
            return
        pool.remove(last)
        last.size -= freed_bytes
        self.release(freed_bytes)
        if last.size:
            pool.add(last)
            return
        pool.last = last.before
        if last.before is not None:
            last.before.after = None

    def _split(self, block: Block, size: int) -> None:
        """Cut the block down to a size; what remains is free."""
        pool = block.pool
        rest = Block(block.address + size, block.size - size, pool, block, block.after)
        rest.is_free = True
        if block.after is not None:
            block.after.before = rest
        if block is pool.last:
            pool.last = rest
        block.after, block.size = rest, size
        pool.add(rest)
