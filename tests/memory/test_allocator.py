"""The allocator's documented rules, each with its figures."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from linnaeus.autobatch.predict.allocator import MIB, AllocatorSettings, Block, CachingAllocator
from linnaeus.autobatch.search import OutOfMemory


class Watched(CachingAllocator):
    """Keeps what it has taken from the device, in order; segments that are given back are taken out."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(AllocatorSettings(**settings))
        self.taken: list[int] = []

    def reserve(self, num_bytes: int) -> bool:
        has_room = super().reserve(num_bytes)
        self.taken += [num_bytes] * has_room
        return has_room

    def release(self, num_bytes: int) -> None:
        super().release(num_bytes)
        while num_bytes:  # of expandable segments the last ones together
            index = self.taken.index(num_bytes) if num_bytes in self.taken else -1
            num_bytes -= self.taken.pop(index)


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
    assert allocator.taken == [segment_bytes]
    assert allocator.reserved_bytes == segment_bytes


RULES = {
    "small blocks share a segment": ("0.5 0.5 0.5 0.5 0.5", [2, 2]),
    "a rest of one MiB is not split off": ("40 -0 39 1.5", [40, 20]),
    "a larger one is": ("40 -0 38 1.5", [40]),
    "the pools do not mix": ("64 -0 1 1.5", [64, 2]),
    "the smallest block that fits is taken": ("40 30 -0 -1 25 40", [40, 30]),
    "free neighbours merge": ("4 6 8 -0 -1 -2 20", [20]),
    "in any order": ("4 6 8 -2 -0 -1 20", [20]),
    "blocks of two segments do not merge": ("20 20 -0 -1 40", [20, 20, 40]),
    "a segment with a block in use stays": ("4 6 32 -1 -2 empty", [20]),
    "others are given back": ("4 6 32 -0 -1 -2 empty", []),
    "sizes that alternate hold much": ("30 -0 40 -1 50 -2 60 -3", [30, 40, 50, 60]),
}
EXPANDABLE = {
    "sizes that alternate hold less": ("30 -0 40 -1 50 -2 60 -3", [40, 20]),
    "a segment grows by what its free end lacks": ("30 25 1 -0 31", [40, 20, 2, 40]),
    "the free end is taken last": ("20 10 5 -0 4 20", [20, 20, 20]),
    "the free end is given back": ("30 70 -1 empty", [40]),
    "all of it": ("30 70 -1 -0 empty 1.5", [20]),
    "free pages in the middle are too": ("30 70 1.5 -1 empty", [40, 20]),
    "and are taken first": ("30 70 1.5 -1 empty 35 30", [40, 20, 40, 20]),
}
"""MiB that are allocated, or with a minus the number of what is freed; and what is taken from the device."""


@pytest.mark.parametrize("rule", [*RULES, *EXPANDABLE])
def test_rules(rule: str) -> None:
    program, expected = {**RULES, **EXPANDABLE}[rule]
    allocator, blocks = Watched(expandable_segments=rule in EXPANDABLE), list[Block]()
    for word in program.split():
        if word == "empty":
            allocator.empty_cache()
        elif word.startswith("-"):
            allocator.free(blocks[int(word[1:])])
        else:
            blocks.append(allocator.allocate(int(float(word) * MIB)))
    assert [num_bytes // MIB for num_bytes in allocator.taken] == expected


def test_of_equal_blocks_the_first_is_taken() -> None:
    allocator = Watched()
    blocks = [allocator.allocate(20 * MIB) for _ in range(3)]
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.allocate(20 * MIB).address == blocks[0].address


@pytest.mark.parametrize("limit_bytes", [math.inf, 60 * MIB])
@pytest.mark.parametrize("expandable", [False, True])
def test_any_sequence_keeps_the_books_in_order(expandable: bool, limit_bytes: float) -> None:
    draw = random.Random(0)
    allocator = CachingAllocator(AllocatorSettings(expandable), limit_bytes)
    live: list[tuple[Block, int]] = []
    for number in range(3000):
        if live and draw.random() < 0.5:
            allocator.free(live.pop(draw.randrange(len(live)))[0])
        else:
            num_bytes = int(2 ** draw.uniform(0, 24))
            try:
                block = allocator.allocate(num_bytes)
            except OutOfMemory:
                assert allocator.reserved_bytes + num_bytes + 20 * MIB > limit_bytes
            else:
                live.append((block, num_bytes))
                assert num_bytes <= block.size <= num_bytes + MIB + 511
        if number % 300 == 0:
            allocator.empty_cache()
        for is_small in (False, True):
            spans = sorted((b.address, b.size) for b, _ in live if b.pool.is_small == is_small)
            assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
        assert sum(block.size for block, _ in live) <= allocator.reserved_bytes
        assert allocator.reserved_bytes <= allocator.peak_reserved_bytes <= limit_bytes
    for block, _ in live:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_the_setting_is_read_as_torch_reads_it() -> None:
    text = "max_split_size_mb:128, expandable_segments:True,garbage_collection_threshold:0.8,backend:native"
    older = {"PYTORCH_CUDA_ALLOC_CONF": text}
    assert AllocatorSettings.from_environment(older).expandable_segments
    newer = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    assert not AllocatorSettings.from_environment(newer | older).expandable_segments
    assert not AllocatorSettings.from_environment({}).expandable_segments
