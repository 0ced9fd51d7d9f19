"""Scratch memory of reductions on CUDA, where several thread blocks share an output.

It follows `setReduceConfig` and `ReduceConfig::global_memory_size` of aten/src/ATen/native/cuda/Reduce.cuh,
torch 2.11 to 2.15. The bias gradient of a wide linear layer takes up to 108 MiB on an A100:

>>> Reduction.of(torch.empty(24 * 197, 3072, device="meta"), (0,)).scratch_bytes() >> 20
108
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

ASSUMED_MULTIPROCESSORS, THREADS_OF_EACH = 108, 2048
"""Those of an A100; the device's own where there is one."""

WARP = 32
MAX_THREADS = 512
FEW_VALUES, MANY_VALUES = 16, 256
"""Values that a thread reads: blocks share an output where it would read many, and each then reads a few."""


class Reduction(NamedTuple):
    """A reduction, as far as its scratch memory depends on it.

    Attributes:
        num_outputs: elements of the output.
        num_inputs: elements that are reduced to each of them.
        is_fastest: whether the input's dense dimension is reduced.
        vector: outputs, or inputs where `is_fastest`, that one load reads.
        item_bytes: of the accumulator.
    """

    num_outputs: int
    num_inputs: int
    is_fastest: bool
    vector: int
    item_bytes: int

    @classmethod
    def of(cls, x: Tensor, dims: Collection[int] | None) -> Reduction:
        """The sum of a tensor over dimensions; none is all of them."""
        kept, reduced = _as_iterated(x, dims)
        num_outputs, num_inputs = (
            math.prod(size for size, _ in group) for group in (kept, reduced)
        )
        is_fastest = not kept or (bool(reduced) and reduced[0][1] < kept[0][1])
        vector = 1
        if is_fastest and not kept and len(reduced) == 1 and reduced[0][1] == 1:
            vector = 4
        elif not is_fastest and kept[0][1] == 1:
            aligned = [
                x.storage_offset(),
                kept[0][0],
                *(stride for _, stride in (*kept[1:], *reduced)),
            ]
            vector = next(n for n in (4, 2, 1) if all(number % n == 0 for number in aligned))
        return cls(num_outputs, num_inputs, is_fastest, vector, max(4, x.element_size()))

    def scratch_bytes(self) -> int:
        """Bytes that it takes beside its output."""
        num_outputs, num_inputs, is_fastest, vector, item_bytes = self
        if not num_outputs or not num_inputs:
            return 0
        of_outputs = 1 if is_fastest else vector
        width, height = (
            (num_inputs, num_outputs) if is_fastest else (num_outputs // vector, num_inputs)
        )
        if is_fastest and num_inputs > 128:
            width //= vector
        most = MAX_THREADS // of_outputs
        width, height = (min(1 << (max(n, 1).bit_length() - 1), most) for n in (width, height))
        height = min(height, most // min(width, WARP))
        width = min(width, most // height)
        step_input, step_output = (width, 1) if is_fastest else (1, width)
        if -(-num_inputs // step_input) < min(16 * height, MANY_VALUES):
            return 0
        values = -(-num_inputs // (step_input * height))
        grid = -(-(num_outputs // of_outputs) // step_output)
        target = _target_grid(width * height)
        if values < MANY_VALUES or grid > target:
            return 0
        blocks = max(min(-(-target // grid), -(-values // FEW_VALUES)), -(-values // MANY_VALUES))
        if blocks <= 1:
            return 0
        return item_bytes * num_outputs * blocks * (1 if is_fastest else width * vector)


def _as_iterated(
    x: Tensor, dims: Collection[int] | None
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Sizes and strides of kept and of reduced dimensions, joined where dense, the fastest first."""
    chosen = {dim % max(x.dim(), 1) for dim in dims} if dims else set(range(x.dim()))
    groups: list[list[tuple[int, int]]] = [[], []]
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if size != 1:
            groups[dim in chosen].append((size, stride))
    for group in groups:
        group.sort(key=lambda entry: entry[1])
        joined: list[tuple[int, int]] = []
        for size, stride in group:
            if joined and joined[-1][0] * joined[-1][1] == stride:
                joined[-1] = (joined[-1][0] * size, joined[-1][1])
            else:
                joined.append((size, stride))
        group[:] = joined
    kept, reduced = groups
    return kept, reduced


def _target_grid(num_threads: int) -> int:
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties()
        return int(
            device.multi_processor_count * (device.max_threads_per_multi_processor // num_threads)
        )
    return ASSUMED_MULTIPROCESSORS * (THREADS_OF_EACH // num_threads)
