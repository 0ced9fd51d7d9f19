"""The allocator's documented rules, each with its figures."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from linnaeus.autobatch.predict.allocator import MIB, AllocatorSettings, Block, CachingAllocator
from tests.helpers.capped import CappedAllocator, Refused


class Watched(CachingAllocator):
    """Keeps the sizes of its segments, in their order."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(AllocatorSettings(**settings))
        self.segments: list[int] = []

    def reserve(self, num_bytes: int) -> None:
        super().reserve(num_bytes)
        self.segments.append(num_bytes)

    def release(self, num_bytes: int) -> None:
        super().release(num_bytes)
        if not self.settings.expandable_segments:
            self.segments.remove(num_bytes)


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
    allocator = Watched()
    block = allocator.allocate(request_bytes)
    assert block.size == block_bytes
    assert allocator.segments == [segment_bytes]
    assert allocator.reserved_bytes == segment_bytes


def test_small_blocks_are_split_down_to_512_bytes() -> None:
    allocator = Watched()
    blocks = [allocator.allocate(512) for _ in range(4096)]
    assert allocator.segments == [2 * MIB]
    assert len({block.address for block in blocks}) == 4096
    allocator.allocate(1)
    assert allocator.segments == [2 * MIB] * 2


def test_a_large_block_is_split_only_where_more_than_one_mebibyte_remains() -> None:
    for rest_bytes, is_split in ((MIB, False), (MIB + 512, True)):
        allocator = Watched()
        first = allocator.allocate(40 * MIB)
        allocator.free(first)
        assert allocator.allocate(40 * MIB - rest_bytes).size == 40 * MIB - (rest_bytes if is_split else 0)


def test_the_pools_do_not_mix() -> None:
    allocator = Watched()
    allocator.free(allocator.allocate(64 * MIB))
    allocator.allocate(MIB)
    assert allocator.segments == [64 * MIB, 2 * MIB]
    allocator.allocate(MIB + 512)
    assert allocator.segments == [64 * MIB, 2 * MIB]


def test_the_smallest_block_that_fits_is_taken_and_of_equal_ones_the_first() -> None:
    allocator = Watched()
    blocks = [allocator.allocate(mib * MIB) for mib in (40, 20, 30, 20)]
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.allocate(20 * MIB).address == blocks[1].address
    assert allocator.allocate(20 * MIB).address == blocks[3].address
    assert allocator.allocate(20 * MIB).address == blocks[2].address


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_free_neighbours_merge_in_any_order(order: tuple[int, ...]) -> None:
    allocator = Watched()
    blocks = [allocator.allocate(mib * MIB) for mib in (4, 6, 8)]
    assert allocator.segments == [20 * MIB]
    for index in order:
        allocator.free(blocks[index])
    assert allocator.allocate(20 * MIB).size == 20 * MIB
    assert allocator.segments == [20 * MIB]


def test_blocks_of_two_segments_do_not_merge() -> None:
    allocator = Watched()
    for block in [allocator.allocate(20 * MIB) for _ in range(2)]:
        allocator.free(block)
    allocator.allocate(40 * MIB)
    assert allocator.segments == [20 * MIB, 20 * MIB, 40 * MIB]


@pytest.mark.parametrize("capped", [False, True])
def test_a_cap_and_a_full_device_flush_the_cache_before_they_refuse(capped: bool) -> None:
    """Of the stand-in that tests of searches use; whole segments count."""
    allocator = CappedAllocator(lambda num_bytes: capped or allocator.reserved_bytes + num_bytes <= 64 * MIB)
    allocator.allowed_bytes = 64 * MIB if capped else None
    kept = allocator.allocate(20 * MIB)
    allocator.free(allocator.allocate(40 * MIB))
    assert (allocator.reserved_bytes, allocator.num_alloc_retries) == (60 * MIB, 0)
    allocator.allocate(44 * MIB)
    assert (allocator.num_alloc_retries, allocator.num_ooms) == (1, 0)
    assert allocator.reserved_bytes == 64 * MIB
    with pytest.raises(Refused):
        allocator.allocate(1)
    assert (allocator.num_alloc_retries, allocator.num_ooms) == (2, 1)
    allocator.free(kept)
    assert allocator.allocate(2 * MIB).size == 2 * MIB, "a refusal leaves the allocator usable"


def test_a_segment_with_a_block_in_use_stays_when_the_cache_is_emptied() -> None:
    allocator = Watched()
    first, second = allocator.allocate(4 * MIB), allocator.allocate(6 * MIB)
    allocator.free(allocator.allocate(32 * MIB))
    allocator.free(second)
    allocator.empty_cache()
    assert allocator.segments == [20 * MIB]
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


@pytest.mark.parametrize("expandable", [False, True])
def test_any_sequence_keeps_the_books_in_order(expandable: bool) -> None:
    draw = random.Random(0)
    allocator = Watched(expandable_segments=expandable)
    live: list[tuple[Block, int]] = []
    for number in range(3000):
        if live and draw.random() < 0.5:
            allocator.free(live.pop(draw.randrange(len(live)))[0])
        else:
            num_bytes = int(2 ** draw.uniform(0, 24))
            live.append((allocator.allocate(num_bytes), num_bytes))
            assert num_bytes <= live[-1][0].size <= num_bytes + MIB + 511
        if number % 300 == 0:
            allocator.empty_cache()
        for is_small in (False, True):
            spans = sorted((b.address, b.size) for b, _ in live if b.pool.is_small == is_small)
            assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
        assert sum(block.size for block, _ in live) <= allocator.reserved_bytes
        assert allocator.reserved_bytes <= allocator.peak_reserved_bytes
    for block, _ in live:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_expandable_segments_grow_by_what_their_free_end_lacks() -> None:
    allocator = Watched(expandable_segments=True)
    first = allocator.allocate(30 * MIB)
    assert (first.size, allocator.segments) == (30 * MIB, [40 * MIB])
    allocator.allocate(25 * MIB)  # 10 MiB are there already
    assert allocator.segments == [40 * MIB, 20 * MIB]
    allocator.allocate(MIB)
    assert allocator.segments == [40 * MIB, 20 * MIB, 2 * MIB]
    allocator.free(first)
    allocator.allocate(31 * MIB)  # does not fit in front
    assert allocator.segments == [40 * MIB, 20 * MIB, 2 * MIB, 40 * MIB]


def reserved_by_alternating_sizes(allocator: CachingAllocator) -> int:
    """The peak of requests of which none fits into the block that the one before it has left."""
    for mib in (30, 40, 50, 60):
        allocator.free(allocator.allocate(mib * MIB))
    return allocator.peak_reserved_bytes


def test_expandable_segments_hold_less_where_sizes_alternate() -> None:
    assert reserved_by_alternating_sizes(Watched()) == 180 * MIB
    assert reserved_by_alternating_sizes(Watched(expandable_segments=True)) == 60 * MIB


def test_the_free_end_of_an_expandable_segment_is_taken_last() -> None:
    allocator = Watched(expandable_segments=True)
    blocks = [allocator.allocate(mib * MIB) for mib in (20, 10, 5)]  # 5 MiB are free at the end
    allocator.free(blocks[0])
    assert allocator.allocate(4 * MIB).address == 0
    assert sum(allocator.segments) == 40 * MIB


def test_emptying_the_cache_trims_the_free_end_of_an_expandable_segment() -> None:
    allocator = Watched(expandable_segments=True)
    kept, last = allocator.allocate(30 * MIB), allocator.allocate(70 * MIB)
    allocator.free(last)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.allocate(MIB + 1).address == 0


def test_the_setting_is_read_as_torch_reads_it() -> None:
    text = "max_split_size_mb:128, expandable_segments:True,garbage_collection_threshold:0.8,backend:native"
    older = {"PYTORCH_CUDA_ALLOC_CONF": text}
    assert AllocatorSettings.from_environment(older).expandable_segments
    newer = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    assert not AllocatorSettings.from_environment(newer | older).expandable_segments
    assert not AllocatorSettings.from_environment({}).expandable_segments
