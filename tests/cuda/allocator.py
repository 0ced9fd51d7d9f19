"""A model of PyTorch's caching allocator for CUDA: which bytes it reserves for a sequence of requests.

It follows c10/cuda/CUDACachingAllocator.cpp of torch 2.8 to 2.15 with the native backend, one stream and no
expandable segments. Sizes are rounded up to 512 bytes. Requests up to 1 MiB come from segments of 2 MiB,
those below 10 MiB from segments of 20 MiB, larger ones from a segment of their own, rounded up to 2 MiB. The
smallest free block that is large enough is taken, and split where enough of it remains.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

MIB = 1 << 20
MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB
"""The largest request that the pool of small blocks serves."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
"""The smallest request that gets a segment of its own."""
SEGMENT_STEP_BYTES = 2 * MIB


class Refused(Exception):  # the device turns it into torch's error
    """The allocator can serve a request neither from its cache nor with a new segment.

    Attributes:
        segment_bytes: size of the segment that it asked the device for.
    """

    def __init__(self, segment_bytes: int) -> None:
        super().__init__(f"no segment of {segment_bytes} bytes")
        self.segment_bytes = segment_bytes


@dataclass(eq=False)
class Block:
    """A part of a segment, or all of it.

    Attributes:
        address: decides between free blocks of one size.
        size: bytes.
        pool: the pool of its segment.
        before: the block that ends where this one begins; None at the start of the segment.
        after: the block that begins where this one ends; None at the end of the segment.
        is_free: whether it is cached.
        idle_since: searches of the pool when it was freed.
    """

    address: int
    size: int
    pool: Pool
    before: Block | None = None
    after: Block | None = None
    is_free: bool = False
    idle_since: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its segment; only such a block can go back to the device."""
        return self.before is None and self.after is None


@dataclass
class Pool:
    """Free blocks, ascending by size and then by address."""

    is_small: bool
    blocks: list[Block] = field(default_factory=list)
    num_searches: int = 0

    def __iter__(self) -> Iterator[Block]:
        return iter(tuple(self.blocks))

    def add(self, block: Block) -> None:
        bisect.insort(self.blocks, block, key=_order)

    def remove(self, block: Block) -> None:
        index = bisect.bisect_left(self.blocks, _order(block), key=_order)
        assert self.blocks[index] is block
        del self.blocks[index]

    def smallest(self, num_bytes: int) -> Block | None:
        """The smallest block of at least so many bytes."""
        index = bisect.bisect_left(self.blocks, (num_bytes, 0), key=_order)
        return self.blocks[index] if index < len(self.blocks) else None


def _order(block: Block) -> tuple[int, int]:
    return block.size, block.address


class CachingAllocator:
    """The allocator of one process on one device.

    Args:
        device_malloc: takes bytes from the device; False where it has no more.
        device_free: gives them back.
        max_split_bytes: `max_split_size_mb` in bytes; None without that setting.
        garbage_collection_threshold: as the setting; 0 is off.

    Attributes:
        allowed_bytes: the cap on reserved bytes; None without one.
        reserved_bytes: bytes of all segments.
        allocated_bytes: bytes of all blocks in use.
        num_alloc_retries: how often the cache was emptied to serve a request.
        num_ooms: requests refused.
    """

    def __init__(
        self,
        device_malloc: Callable[[int], bool],
        device_free: Callable[[int], None],
        *,
        max_split_bytes: int | None = None,
        garbage_collection_threshold: float = 0.0,
    ) -> None:
        self._device_malloc, self._device_free = device_malloc, device_free
        self.max_split_bytes = max_split_bytes
        self.garbage_collection_threshold = garbage_collection_threshold
        self.allowed_bytes: int | None = None
        self.reserved_bytes = self.allocated_bytes = 0
        self.peak_reserved_bytes = self.peak_allocated_bytes = 0
        self.num_alloc_retries = self.num_ooms = 0
        self._small, self._large = Pool(is_small=True), Pool(is_small=False)
        self._next_address = 0

    def allocate(self, num_bytes: int) -> Block:
        """Serve a request of at least one byte.

        Raises:
            Refused: neither the cache nor the device nor the cap has room for it.
        """
        size = -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self._cached(pool, size) or self._new_segment(pool, size)
        block.is_free = False
        if self._is_split(block, size):
            self._split(block, size)
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Put a block in the cache, merged with free neighbours."""
        assert not block.is_free
        self.allocated_bytes -= block.size
        block.is_free = True
        if block.before is not None and block.before.is_free:
            block.pool.remove(block.before)
            block.address, block.size = block.before.address, block.before.size + block.size
            block.before = block.before.before
            if block.before is not None:
                block.before.after = block
        if block.after is not None and block.after.is_free:
            block.pool.remove(block.after)
            block.size += block.after.size
            block.after = block.after.after
            if block.after is not None:
                block.after.before = block
        block.idle_since = block.pool.num_searches
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give all segments without a block in use back to the device."""
        for pool in (self._small, self._large):
            for block in pool:
                if block.is_whole:
                    self._release(block)

    def reset_peaks(self) -> None:
        """Set both peaks to what is held now."""
        self.peak_reserved_bytes, self.peak_allocated_bytes = self.reserved_bytes, self.allocated_bytes

    def _cached(self, pool: Pool, size: int) -> Block | None:
        if self._collects_garbage:
            pool.num_searches += 1
        block, limit = pool.smallest(size), self.max_split_bytes
        if block is None:
            return None
        if limit is not None and size < limit <= block.size:
            return None
        if limit is not None and size >= limit and block.size >= size + LARGE_SEGMENT_BYTES:
            return None
        pool.remove(block)
        return block

    def _new_segment(self, pool: Pool, size: int) -> Block:
        if pool.is_small:
            segment_bytes = SMALL_SEGMENT_BYTES
        elif size < OWN_SEGMENT_BYTES:
            segment_bytes = LARGE_SEGMENT_BYTES
        else:
            segment_bytes = -(-size // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
        if self._collects_garbage:
            self._collect_garbage()
        if not (
            self._reserve(segment_bytes)
            or (self._release_oversized(pool, size) and self._reserve(segment_bytes))
            or self._retry(segment_bytes)
        ):
            self.num_ooms += 1
            raise Refused(segment_bytes)
        block = Block(self._next_address, segment_bytes, pool)
        self._next_address += segment_bytes
        return block

    def _reserve(self, segment_bytes: int) -> bool:
        """Take a segment from the device; a cap that it would exceed counts like a device that is full."""
        if self.allowed_bytes is not None and self.reserved_bytes + segment_bytes > self.allowed_bytes:
            return False
        if not self._device_malloc(segment_bytes):
            return False
        self.reserved_bytes += segment_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _retry(self, segment_bytes: int) -> bool:
        self.empty_cache()
        self.num_alloc_retries += 1
        return self._reserve(segment_bytes)

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved_bytes -= block.size
        self._device_free(block.size)

    def _is_split(self, block: Block, size: int) -> bool:
        remaining = block.size - size
        if block.pool.is_small:
            return remaining >= MIN_BLOCK_BYTES
        return remaining > SMALL_BYTES and (self.max_split_bytes is None or size < self.max_split_bytes)

    def _split(self, block: Block, size: int) -> None:
        """Cut the block down to a size; what remains is free."""
        rest = Block(block.address + size, block.size - size, block.pool, block, block.after, is_free=True)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        rest.idle_since = rest.pool.num_searches
        rest.pool.add(rest)

    def _release_oversized(self, pool: Pool, size: int) -> bool:
        """With `max_split_bytes`: release free blocks above it, no more than needed; not counted as retry."""
        if self.max_split_bytes is None:
            return False
        wanted_bytes = max(size, self.max_split_bytes)
        block = pool.smallest(wanted_bytes)
        if block is not None:
            if block.is_whole:
                self._release(block)
            return block.is_whole
        released_bytes = 0
        for block in reversed(tuple(pool)):
            if released_bytes >= wanted_bytes or block.size < self.max_split_bytes:
                break
            if block.is_whole:
                released_bytes += block.size
                self._release(block)
        return released_bytes >= wanted_bytes

    @property
    def _collects_garbage(self) -> bool:
        return self.allowed_bytes is not None and self.garbage_collection_threshold > 0

    def _collect_garbage(self) -> None:
        """Release large blocks that have been idle for longest, until reserved bytes are at the threshold."""
        assert self.allowed_bytes is not None
        to_reclaim = self.reserved_bytes - int(self.garbage_collection_threshold * self.allowed_bytes)
        pool = self._large
        ages = {block: pool.num_searches - block.idle_since for block in pool if block.is_whole}
        while to_reclaim > 0 and ages:
            mean_age = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= mean_age]:
                to_reclaim -= block.size
                del ages[block]
                self._release(block)
