"""The model of the allocator on a device that is full at some point, with what torch counts of it."""

from __future__ import annotations

from collections.abc import Callable

from linnaeus.autobatch.predict.allocator import Block, CachingAllocator


class Refused(Exception):
    """The allocator can serve a request neither from its cache nor with a new segment.

    Attributes:
        segment_bytes: size of the segment that it asked the device for.
    """

    def __init__(self, segment_bytes: int) -> None:
        super().__init__(f"no segment of {segment_bytes} bytes")
        self.segment_bytes = segment_bytes


class CappedAllocator(CachingAllocator):
    """An allocator without expandable segments that the device or a cap may refuse a segment.

    Args:
        has_room: whether the device has so many bytes more.
        allowed_bytes: the cap on reserved bytes; None without one.

    Attributes:
        allowed_bytes: as given; may be changed.
        allocated_bytes, peak_allocated_bytes: bytes of blocks in use, and the most of them since the reset.
        num_alloc_retries: how often the cache was emptied to serve a request.
        num_ooms: requests refused.
    """

    def __init__(self, has_room: Callable[[int], bool], allowed_bytes: int | None = None) -> None:
        super().__init__()
        self._has_room, self.allowed_bytes = has_room, allowed_bytes
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.num_alloc_retries = self.num_ooms = 0

    def allocate(self, num_bytes: int) -> Block:
        block = super().allocate(num_bytes)
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        self.allocated_bytes -= block.size
        super().free(block)

    def reset_peaks(self) -> None:
        self.peak_reserved_bytes, self.peak_allocated_bytes = self.reserved_bytes, self.allocated_bytes

    def reserve(self, num_bytes: int) -> None:
        if not self._may_reserve(num_bytes):
            self.empty_cache()
            self.num_alloc_retries += 1
            if not self._may_reserve(num_bytes):
                self.num_ooms += 1
                raise Refused(num_bytes)
        super().reserve(num_bytes)

    def _may_reserve(self, num_bytes: int) -> bool:
        is_allowed = self.allowed_bytes is None or self.reserved_bytes + num_bytes <= self.allowed_bytes
        return is_allowed and self._has_room(num_bytes)
