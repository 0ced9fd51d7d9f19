"""The allocator's documented rules, each with its figures."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from linnaeus.autobatch.predict.allocator import MIB, AllocatorSettings, Block, CachingAllocator, Refused


class Device:
    """Counts the bytes that the allocator holds, and has no more than its size."""

    def __init__(self, size: int) -> None:
        self.size, self.held, self.segments = size, 0, list[int]()

    def malloc(self, num_bytes: int) -> bool:
        if self.held + num_bytes > self.size:
            return False
        self.held += num_bytes
        self.segments.append(num_bytes)
        return True

    def free(self, num_bytes: int) -> None:
        self.held -= num_bytes
        self.segments.remove(num_bytes)


def allocator_on(size: int = 1 << 40, **settings: Any) -> tuple[CachingAllocator, Device]:
    device = Device(size)
    allocator = CachingAllocator(
        AllocatorSettings(**settings), device_malloc=device.malloc, device_free=device.free
    )
    return allocator, device


@pytest.mark.parametrize(
    ("request_bytes", "block_bytes", "segment_bytes"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of 1 MiB is not split off
        (21 * MIB, 22 * MIB, 22 * MIB),
    ],
)
def test_requests_are_rounded_to_blocks_of_segments(
    request_bytes: int, block_bytes: int, segment_bytes: int
) -> None:
    allocator, device = allocator_on()
    block = allocator.allocate(request_bytes)
    assert block.size == allocator.allocated_bytes == block_bytes
    assert device.segments == [segment_bytes]
    assert allocator.reserved_bytes == segment_bytes


def test_small_blocks_are_split_down_to_512_bytes() -> None:
    allocator, device = allocator_on()
    blocks = [allocator.allocate(512) for _ in range(4096)]
    assert device.segments == [2 * MIB]
    assert len({block.address for block in blocks}) == 4096
    allocator.allocate(1)
    assert device.segments == [2 * MIB] * 2


def test_a_large_block_is_split_only_where_more_than_one_mebibyte_remains() -> None:
    for rest_bytes, is_split in ((MIB, False), (MIB + 512, True)):
        allocator, _ = allocator_on()
        first = allocator.allocate(40 * MIB)
        allocator.free(first)
        assert allocator.allocate(40 * MIB - rest_bytes).size == 40 * MIB - (rest_bytes if is_split else 0)


def test_the_pools_do_not_mix() -> None:
    allocator, device = allocator_on()
    allocator.free(allocator.allocate(64 * MIB))
    allocator.allocate(MIB)
    assert device.segments == [64 * MIB, 2 * MIB]
    allocator.allocate(MIB + 512)
    assert device.segments == [64 * MIB, 2 * MIB]


def test_the_smallest_block_that_fits_is_taken_and_of_equal_ones_the_first() -> None:
    allocator, _ = allocator_on()
    blocks = [allocator.allocate(mib * MIB) for mib in (40, 20, 30, 20)]
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.allocate(20 * MIB).address == blocks[1].address
    assert allocator.allocate(20 * MIB).address == blocks[3].address
    assert allocator.allocate(20 * MIB).address == blocks[2].address


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_free_neighbours_merge_in_any_order(order: tuple[int, ...]) -> None:
    allocator, device = allocator_on()
    blocks = [allocator.allocate(mib * MIB) for mib in (4, 6, 8)]
    assert device.segments == [20 * MIB]
    for index in order:
        allocator.free(blocks[index])
    assert allocator.allocate(20 * MIB).size == 20 * MIB
    assert device.segments == [20 * MIB]


def test_blocks_of_two_segments_do_not_merge() -> None:
    allocator, device = allocator_on()
    for block in [allocator.allocate(20 * MIB) for _ in range(2)]:
        allocator.free(block)
    allocator.allocate(40 * MIB)
    assert device.segments == [20 * MIB, 20 * MIB, 40 * MIB]


def test_the_cap_counts_whole_segments_and_is_inclusive() -> None:
    allocator, _ = allocator_on()
    allocator.allowed_bytes = 40 * MIB
    allocator.allocate(20 * MIB)
    allocator.allocate(19 * MIB)  # its segment has 20
    with pytest.raises(Refused) as refused:
        allocator.allocate(1)
    assert refused.value.segment_bytes == 2 * MIB
    assert allocator.reserved_bytes == 40 * MIB


@pytest.mark.parametrize("capped", [False, True])
def test_a_cap_and_a_full_device_flush_the_cache_before_they_refuse(capped: bool) -> None:
    allocator, device = allocator_on(1 << 40 if capped else 64 * MIB)
    allocator.allowed_bytes = 64 * MIB if capped else None
    kept = allocator.allocate(20 * MIB)
    allocator.free(allocator.allocate(40 * MIB))
    assert (allocator.reserved_bytes, allocator.num_alloc_retries) == (60 * MIB, 0)
    allocator.allocate(44 * MIB)
    assert (allocator.num_alloc_retries, allocator.num_ooms) == (1, 0)
    assert device.segments == [20 * MIB, 44 * MIB]
    with pytest.raises(Refused):
        allocator.allocate(2 * MIB)
    assert (allocator.num_alloc_retries, allocator.num_ooms) == (2, 1)
    allocator.free(kept)
    assert allocator.allocate(2 * MIB).size == 2 * MIB, "a refusal leaves the allocator usable"


def test_a_segment_with_a_block_in_use_stays_when_the_cache_is_emptied() -> None:
    allocator, device = allocator_on()
    first, second = allocator.allocate(4 * MIB), allocator.allocate(6 * MIB)
    allocator.free(allocator.allocate(32 * MIB))
    allocator.free(second)
    allocator.empty_cache()
    assert device.segments == [20 * MIB]
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (20 * MIB, 4 * MIB)
    allocator.free(first)
    allocator.empty_cache()
    assert device.held == allocator.reserved_bytes == allocator.allocated_bytes == 0


def test_peaks_stay_until_they_are_reset() -> None:
    allocator, _ = allocator_on()
    allocator.free(allocator.allocate(32 * MIB))
    kept = allocator.allocate(12 * MIB)
    allocator.empty_cache()
    assert (allocator.peak_reserved_bytes, allocator.peak_allocated_bytes) == (32 * MIB, 32 * MIB)
    allocator.reset_peaks()
    assert (allocator.peak_reserved_bytes, allocator.peak_allocated_bytes) == (32 * MIB, 12 * MIB)
    allocator.free(kept)
    allocator.empty_cache()
    allocator.reset_peaks()
    assert (allocator.peak_reserved_bytes, allocator.peak_allocated_bytes) == (0, 0)


def test_blocks_above_the_split_limit_are_neither_split_nor_given_to_small_requests() -> None:
    allocator, device = allocator_on(max_split_bytes=32 * MIB)
    allocator.free(allocator.allocate(64 * MIB))
    allocator.allocate(24 * MIB)
    assert device.segments == [64 * MIB, 24 * MIB]
    assert allocator.allocate(45 * MIB).size == 64 * MIB, "up to 20 MiB more than asked for"
    allocator.free(allocator.allocate(80 * MIB))
    allocator.allocate(60 * MIB)
    assert device.segments == [64 * MIB, 24 * MIB, 80 * MIB, 60 * MIB]


def test_blocks_above_the_split_limit_are_released_without_a_retry() -> None:
    allocator, device = allocator_on(max_split_bytes=32 * MIB)
    allocator.allowed_bytes = 100 * MIB
    allocator.free(allocator.allocate(60 * MIB))
    allocator.free(allocator.allocate(34 * MIB))
    allocator.allocate(90 * MIB)
    assert device.segments == [90 * MIB]
    assert allocator.num_alloc_retries == 0


def test_any_sequence_keeps_the_books_in_order() -> None:
    draw = random.Random(0)
    allocator, device = allocator_on(300 * MIB)
    live: list[tuple[Block, int]] = []
    for number in range(5000):
        if live and draw.random() < 0.5:
            allocator.free(live.pop(draw.randrange(len(live)))[0])
        else:
            num_bytes = int(2 ** draw.uniform(0, 24))
            try:
                block = allocator.allocate(num_bytes)
            except Refused:
                while live:
                    allocator.free(live.pop()[0])
                continue
            assert num_bytes <= block.size <= num_bytes + MIB + 511
            live.append((block, num_bytes))
        if number % 500 == 0:
            allocator.empty_cache()
        spans = sorted((block.address, block.size) for block, _ in live)
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
        assert allocator.allocated_bytes == sum(block.size for block, _ in live)
        assert allocator.allocated_bytes <= allocator.reserved_bytes == device.held <= device.size
    for block, _ in live:
        allocator.free(block)
    allocator.empty_cache()
    assert device.segments == []


def test_any_sequence_keeps_the_books_in_order_with_expandable_segments() -> None:
    draw = random.Random(1)
    held = [0]

    def device_malloc(num_bytes: int) -> bool:
        fits = held[0] + num_bytes <= 600 * MIB
        held[0] += fits * num_bytes
        return fits

    def device_free(num_bytes: int) -> None:
        held[0] -= num_bytes

    settings = AllocatorSettings(expandable_segments=True)
    allocator = CachingAllocator(settings, device_malloc=device_malloc, device_free=device_free)
    live: list[Block] = []
    for number in range(3000):
        if live and draw.random() < 0.5:
            allocator.free(live.pop(draw.randrange(len(live))))
        else:
            try:
                live.append(allocator.allocate(int(2 ** draw.uniform(0, 25))))
            except Refused:
                while live:
                    allocator.free(live.pop())
        if number % 300 == 0:
            allocator.empty_cache()
        for is_small in (False, True):
            spans = sorted((b.address, b.size) for b in live if b.pool.is_small == is_small)
            assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
        assert allocator.allocated_bytes == sum(block.size for block in live)
        assert allocator.allocated_bytes <= allocator.reserved_bytes == held[0] <= 600 * MIB
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert held == [0]


def test_expandable_segments_grow_by_what_their_free_end_lacks() -> None:
    allocator, device = allocator_on(expandable_segments=True)
    first = allocator.allocate(30 * MIB)
    assert (first.size, device.segments) == (30 * MIB, [40 * MIB])
    allocator.allocate(25 * MIB)  # 10 MiB are there already
    assert device.segments == [40 * MIB, 20 * MIB]
    allocator.allocate(MIB)
    assert device.segments == [40 * MIB, 20 * MIB, 2 * MIB]
    allocator.free(first)
    allocator.allocate(31 * MIB)  # does not fit in front
    assert device.segments == [40 * MIB, 20 * MIB, 2 * MIB, 40 * MIB]


def reserved_by_alternating_sizes(allocator: CachingAllocator) -> int:
    """The peak of requests of which none fits into the block that the one before it has left."""
    for mib in (30, 40, 50, 60):
        allocator.free(allocator.allocate(mib * MIB))
    return allocator.peak_reserved_bytes


def test_expandable_segments_hold_less_where_sizes_alternate() -> None:
    plain, _ = allocator_on()
    grown, _ = allocator_on(expandable_segments=True)
    assert reserved_by_alternating_sizes(plain) == 180 * MIB
    assert reserved_by_alternating_sizes(grown) == 60 * MIB


def test_the_free_end_of_an_expandable_segment_is_taken_last() -> None:
    allocator, device = allocator_on(expandable_segments=True)
    blocks = [allocator.allocate(mib * MIB) for mib in (20, 10, 5)]  # 5 MiB are free at the end
    allocator.free(blocks[0])
    assert allocator.allocate(4 * MIB).address == 0
    assert sum(device.segments) == 40 * MIB


def test_emptying_the_cache_trims_the_free_end_of_an_expandable_segment() -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    kept, last = allocator.allocate(30 * MIB), allocator.allocate(70 * MIB)
    allocator.free(last)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.allocate(MIB + 1).address == 0


def test_without_a_device_the_capacity_bounds_what_is_reserved() -> None:
    allocator = CachingAllocator(allowed_bytes=64 * MIB)
    allocator.allocate(60 * MIB)
    with pytest.raises(Refused):
        allocator.allocate(6 * MIB)
    CachingAllocator().allocate(1 << 50)


def test_settings_are_read_as_torch_reads_them() -> None:
    text = "max_split_size_mb:128, expandable_segments:True,garbage_collection_threshold:0.8,backend:native"
    found = AllocatorSettings.from_environment({"PYTORCH_CUDA_ALLOC_CONF": text})
    assert found == AllocatorSettings(128 * MIB, expandable_segments=True)
    newer = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:32", "PYTORCH_CUDA_ALLOC_CONF": text}
    assert AllocatorSettings.from_environment(newer) == AllocatorSettings(32 * MIB)
    assert AllocatorSettings.from_environment({}) == AllocatorSettings()
    with pytest.raises(ValueError, match="max_split_size_mb"):
        AllocatorSettings.from_environment({"PYTORCH_ALLOC_CONF": "max_split_size_mb:lots"})
