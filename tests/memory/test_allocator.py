"""The allocator's documented rules, each with its figures."""

import pytest

from linnaeus.autobatch.predict.allocator import MIB, CachingAllocator


@pytest.mark.parametrize(
    ("request_bytes", "block_bytes", "segment_bytes"),
    [
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of 1 MiB is not split off
    ],
)
def test_requests_are_rounded_to_blocks_of_segments(request_bytes, block_bytes, segment_bytes):
    allocator = CachingAllocator()
    assert allocator.allocate(request_bytes).size == block_bytes
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
}
"""MiB that are allocated, or with a minus the number of what is freed; and the segments in MiB."""


@pytest.mark.parametrize(("program", "segments"), RULES.values(), ids=RULES)
def test_rules(program, segments):
    allocator, blocks = CachingAllocator(), []
    for word in program.split():
        if word == "empty":
            allocator.empty_cache()
        elif word.startswith("-"):
            allocator.free(blocks[int(word[1:])])
        else:
            blocks.append(allocator.allocate(int(float(word) * MIB)))
    assert allocator.reserved_bytes == sum(segments) * MIB


def test_of_equal_blocks_the_first_is_taken():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(20 * MIB) for _ in range(3)]
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.allocate(20 * MIB).address == blocks[0].address
