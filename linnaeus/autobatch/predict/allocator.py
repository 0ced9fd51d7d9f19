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
>>> allocator.reserved_bytes // MIB, allocator.allocated_bytes // MIB
(30, 12)
"""

from __future__ import annotations

import bisect
import os
import re
from collections.abc import Callable, Mapping
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
    """The settings of the allocator that change how much it reserves.

    Attributes:
        max_split_bytes: `max_split_size_mb` in bytes; None without that setting.
        expandable_segments: as the setting.
    """

    max_split_bytes: int | None = None
    expandable_segments: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> AllocatorSettings:
        """The settings in `PYTORCH_ALLOC_CONF`, or else in `PYTORCH_CUDA_ALLOC_CONF`; other keys are ignored.

        >>> AllocatorSettings.from_environment({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}).max_split_bytes
        67108864

        Raises:
            ValueError: one of the settings that count here has a value that torch refuses too.
        """
        text = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        pairs = dict(re.findall(r"([a-z_0-9]+)\s*:\s*(\[[^\]]*\]|[^,\[\]]+)", text))
        try:
            split_mib = pairs.get("max_split_size_mb")
            return cls(
                max_split_bytes=None if split_mib is None else int(split_mib) * MIB,
                expandable_segments=pairs.get("expandable_segments", "False").strip() == "True",
            )
        except ValueError as error:
            raise ValueError(f"the settings of the CUDA allocator, {text!r}: {error}") from None


class Refused(Exception):  # noqa: N818 - the device turns it into torch's error
    """The allocator can serve a request neither from its cache nor with a new segment.

    Attributes:
        segment_bytes: size of the segment that it asked the device for.
    """

    def __init__(self, segment_bytes: int) -> None:
        super().__init__(f"no segment of {segment_bytes} bytes")
        self.segment_bytes = segment_bytes


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

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its segment; only such a block can go back to the device."""
        return self.before is None and self.after is None


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

    def blocks(self) -> list[Block]:
        """The free blocks, smallest first."""
        return [block for _, _, block in self.entries]

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
    """The allocator of one process on one device.

    What expandable segments give back in the middle of a segment is not modelled, only what is free at its
    end: near the cap, the device has a little more room than here.

    Args:
        settings: the allocator's settings.
        device_malloc: takes bytes from the device; False where it has no more. The device is endless without.
        device_free: gives them back.
        allowed_bytes: the cap on reserved bytes, which may be changed later; None without one.

    Attributes:
        reserved_bytes, peak_reserved_bytes: bytes of all segments, and the most of them since `reset_peaks`.
        allocated_bytes, peak_allocated_bytes: the same of all blocks in use.
        num_alloc_retries: how often the cache was emptied to serve a request.
        num_ooms: requests refused.
    """

    def __init__(
        self,
        settings: AllocatorSettings = AllocatorSettings(),
        *,
        device_malloc: Callable[[int], bool] = lambda num_bytes: True,
        device_free: Callable[[int], None] = lambda num_bytes: None,
        allowed_bytes: int | None = None,
    ) -> None:
        self.settings = settings
        self._device_malloc, self._device_free = device_malloc, device_free
        self.allowed_bytes = allowed_bytes
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
        block = self._cached(pool, size)
        if block is None:
            block = (
                self._grown(pool, size) if self.settings.expandable_segments else self._segment(pool, size)
            )
        block.is_free = False
        if block.size != size and self._should_split(block, size):
            self._split(block, size)
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block) -> None:
        """Put a block in the cache, merged with free neighbours."""
        assert not block.is_free
        pool, before, after = block.pool, block.before, block.after
        self.allocated_bytes -= block.size
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
            for block in pool.blocks():
                if block.is_whole:
                    self._release(block)

    def reset_peaks(self) -> None:
        """Set both peaks to what is held now."""
        self.peak_reserved_bytes, self.peak_allocated_bytes = self.reserved_bytes, self.allocated_bytes

    def _cached(self, pool: Pool, size: int) -> Block | None:
        block, limit = pool.smallest(size), self.settings.max_split_bytes
        if block is None:
            return None
        if limit is not None and size < limit <= block.size:
            return None
        if limit is not None and size >= limit and block.size >= size + LARGE_SEGMENT_BYTES:
            return None
        pool.remove(block)
        return block

    def _segment(self, pool: Pool, size: int) -> Block:
        if pool.is_small:
            segment_bytes = SMALL_SEGMENT_BYTES
        elif size < OWN_SEGMENT_BYTES:
            segment_bytes = LARGE_SEGMENT_BYTES
        else:
            segment_bytes = -(-size // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
        self._take(pool, size, segment_bytes)
        block = Block(self._next_address, segment_bytes, pool)
        self._next_address += segment_bytes
        return block

    def _grown(self, pool: Pool, size: int) -> Block:
        """The pool's one segment, longer by as many steps as the request needs beyond its free end."""
        step_bytes = SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES
        for is_retry in (False, True):
            last = pool.last
            missing_bytes = size - (last.size if last is not None and last.is_free else 0)
            grown_bytes = -(-missing_bytes // step_bytes) * step_bytes
            # Of the cap, the whole request counts, not the growth of the segment.
            is_allowed = self.allowed_bytes is None or self.reserved_bytes + size <= self.allowed_bytes
            if is_allowed and self._reserve(grown_bytes):
                break
            if is_retry:
                self.num_ooms += 1
                raise Refused(size)
            self.empty_cache()
            self.num_alloc_retries += 1
        if last is not None and last.is_free:
            pool.remove(last)
            last.size += grown_bytes
            return last
        # The two pools lie in address spaces of their own; only the order within a pool counts.
        address = 0 if last is None else last.address + last.size
        block = Block(address, grown_bytes, pool, before=last)
        if last is not None:
            last.after = block
        pool.last = block
        return block

    def _take(self, pool: Pool, size: int, segment_bytes: int) -> None:
        """Reserve bytes for a request, if need be in place of what is cached.

        Raises:
            Refused: there are none.
        """
        if not (
            self._reserve(segment_bytes)
            or (self._release_oversized(pool, size) and self._reserve(segment_bytes))
            or self._retry(segment_bytes)
        ):
            self.num_ooms += 1
            raise Refused(segment_bytes)

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
        self.reserved_bytes -= freed_bytes
        self._device_free(freed_bytes)
        if last.size:
            pool.add(last)
            return
        pool.last = last.before
        if last.before is not None:
            last.before.after = None

    def _should_split(self, block: Block, size: int) -> bool:
        remaining = block.size - size
        if block.pool.is_small or self.settings.expandable_segments:
            return remaining >= MIN_BLOCK_BYTES
        limit = self.settings.max_split_bytes
        return remaining > SMALL_BYTES and (limit is None or size < limit)

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

    def _release_oversized(self, pool: Pool, size: int) -> bool:
        """With `max_split_bytes`: release free blocks above it, no more than needed; not counted as retry."""
        limit = self.settings.max_split_bytes
        if limit is None or self.settings.expandable_segments:
            return False
        wanted_bytes = max(size, limit)
        block = pool.smallest(wanted_bytes)
        if block is not None:
            if block.is_whole:
                self._release(block)
            return block.is_whole
        released_bytes = 0
        for block in reversed(pool.blocks()):
            if released_bytes >= wanted_bytes or block.size < limit:
                break
            if block.is_whole:
                released_bytes += block.size
                self._release(block)
        return released_bytes >= wanted_bytes
