"""Predict the peak GPU memory of a step at any batch size, without running it and without a GPU.

>>> from linnaeus.autobatch.predict.trace import trace
>>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU(), torch.nn.Flatten())
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
>>> def step(images):
...     model(images).sum().backward()
...     optimizer.step()
...     optimizer.zero_grad()
>>> def make_batch(n):
...     return torch.empty(n, 3, 224, 224)
>>> prediction = predict(step, make_batch, state=(model, optimizer), base_bytes=600 << 20)
>>> prediction.peak_bytes(512) >> 20, prediction.largest(8 << 30)
(19676, 203)

Two steps are traced on `meta` at two batch sizes, by `trace`. Each event's size is a line through the two; at
any other batch size, the events with the sizes on their lines are replayed through a model of the caching
allocator. That includes fragmentation, which a line through the two peaks does not.

A step is traced as it would run now: `torch.backends.cudnn.benchmark` counts, since with it the first step
empties the allocator's cache again and again, and later steps find no leftovers of the first.

For a model that is built for this only, build model and optimizer inside `with torch.device("meta")`;
otherwise pass what there is as `state`: it is put on `meta` meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from linnaeus.autobatch.predict.allocator import AllocatorSettings, Block, CachingAllocator
from linnaeus.autobatch.predict.events import ConvFacts
from linnaeus.autobatch.predict.gpus import ASSUMED_BASE_BYTES
from linnaeus.autobatch.predict.reductions import Reduction
from linnaeus.autobatch.predict.trace import Buckets, Trace, UntraceableError, trace
from linnaeus.autobatch.predict.workspace import workspace_bytes

BATCH_SIZES = (8, 16)
"""The batch sizes that are traced: large enough for kernels to take their usual path."""

MARGIN = 1.15
"""Peak times this is at least the measured peak in 98 of 100 runs, see benchmarks/prediction_accuracy.py."""

ALLOCATE, RELEASE, BORROW, FLUSH = 0, 1, 2, 3
Program = list[tuple[int, int, "int | Reduction"]]
"""Events: what to do, the number of the storage, and its bytes or the reduction that they follow from."""


@dataclass(frozen=True)
class Prediction:
    """Peak memory of a step as a function of the batch size.

    Attributes:
        base_bytes: in use on the device beside the allocator: context, libraries, other processes.
        settings: of the allocator.
        margin: factor of `safe_bytes`.
        is_paired: whether the two traces have the same events; if not, the peak is a line through theirs.
        is_base_measured: whether the base was measured on a device.
    """

    base_bytes: int
    settings: AllocatorSettings
    margin: float
    is_paired: bool
    is_base_measured: bool
    _batch_sizes: tuple[int, int]
    _programs: tuple[Program, Program] = field(repr=False)
    _peaks: dict[int, int] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        first: Trace,
        second: Trace,
        *,
        base_bytes: int | None = None,
        settings: AllocatorSettings | None = None,
        margin: float = MARGIN,
    ) -> Prediction:
        """The prediction from two traces of the same step.

        Args:
            first: at one batch size.
            second: at a larger one.
            base_bytes: as the attribute; None measures it, or assumes one where there is no device.
            settings: None takes those of the environment.
            margin: as the attribute.

        Raises:
            ValueError: the batch sizes are not in ascending order.
        """
        if not first.batch_size < second.batch_size:
            raise ValueError(f"traces at {first.batch_size} and {second.batch_size}: not in ascending order")
        measured = measured_base_bytes() if base_bytes is None else base_bytes
        programs = _program(first), _program(second)
        return cls(
            base_bytes=ASSUMED_BASE_BYTES if measured is None else measured,
            settings=AllocatorSettings.from_environment() if settings is None else settings,
            margin=margin,
            is_paired=[event[:2] for event in programs[0]] == [event[:2] for event in programs[1]],
            is_base_measured=base_bytes is None and measured is not None,
            _batch_sizes=(first.batch_size, second.batch_size),
            _programs=programs,
        )

    def check_paired(self) -> None:
        """Check that the step does the same at both sizes: else its peak at others is a guess.

        Raises:
            UntraceableError: it does not.
        """
        if not self.is_paired:
            low, high = self._batch_sizes
            raise UntraceableError(
                f"the step runs other operations with {high} samples than with {low}, such as a loop over "
                "parts of the batch"
            )

    def reserved_bytes(self, n: int) -> int:
        """Most bytes that the allocator reserves in a step with n samples.

        Raises:
            ValueError: n is no whole number of samples.
        """
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"n is {n!r}; it must be a whole number of samples, at least 1")
        if n not in self._peaks:
            self._peaks[n] = self._replayed(n) if self.is_paired else self._on_line(n)
        return self._peaks[n]

    def peak_bytes(self, n: int) -> int:
        """Most bytes in use on the device in a step with n samples."""
        return self.base_bytes + self.reserved_bytes(n)

    def safe_bytes(self, n: int) -> int:
        """The peak with the margin."""
        return int(self.margin * self.peak_bytes(n))

    def slope(self, n: int) -> float:
        """Bytes that one more sample takes, between n and 2n samples."""
        other = max(2 * n, n + 1)
        return (self.peak_bytes(other) - self.peak_bytes(n)) / (other - n)

    @property
    def is_constant(self) -> bool:
        """Whether no event of the step depends on the batch size: `make_batch` may ignore it."""
        return self._programs[0] == self._programs[1]

    def largest(
        self, limit_bytes: float, *, smallest: int = 1, largest: int = 1 << 20, with_margin: bool = False
    ) -> int | None:
        """The largest batch size in a range whose peak is within the limit; None if not even the smallest.

        The next size exceeds the limit, or the range. Peaks do not quite grow with the batch: where a larger
        size reuses blocks better, it may be within the limit again.

        Args:
            limit_bytes: bytes of the device that may be in use.
            smallest, largest: the range, both inclusive.
            with_margin: whether the peak with the margin is to be within the limit.

        Raises:
            TypeError, ValueError: the limit is no number of bytes, or the range is empty.
        """
        if not isinstance(limit_bytes, int | float):
            raise TypeError(f"limit_bytes is {limit_bytes!r}; it must be a number of bytes")
        if math.isnan(limit_bytes):
            raise ValueError("limit_bytes is nan; it must be a number of bytes")
        if largest < smallest:
            raise ValueError(f"largest is {largest}; it must be at least smallest, {smallest}")
        need = self.safe_bytes if with_margin else self.peak_bytes
        return largest_within(range(smallest, largest + 1), limit_bytes, need)

    def _replayed(self, n: int) -> int:
        (first, second), (low, high) = self._programs, self._batch_sizes
        factor, span = n - low, high - low

        def between(size: int, other: int) -> int:
            return max(0, size + (other - size) * factor // span)

        events: Program = []
        for (kind, number, size), (_, _, other) in zip(first, second, strict=True):
            if isinstance(size, Reduction) and isinstance(other, Reduction):
                facts = size._replace(
                    num_outputs=between(size.num_outputs, other.num_outputs),
                    num_inputs=between(size.num_inputs, other.num_inputs),
                )
                events.append((kind, number, facts))
            else:
                assert isinstance(size, int) and isinstance(other, int)  # noqa: PT018
                events.append((kind, number, between(size, other)))
        return replay(events, self.settings).peak_reserved_bytes

    def _on_line(self, n: int) -> int:
        low, high = self._batch_sizes
        first, second = (replay(program, self.settings).peak_reserved_bytes for program in self._programs)
        return max(0, first + (second - first) * (n - low) // (high - low))


def predict(
    step: Callable[[Any], object],
    make_batch: Callable[[int], Any],
    *,
    state: Any = (),
    buckets: Buckets | None = None,
    before: Callable[[], object] | None = None,
    batch_sizes: tuple[int, int] = BATCH_SIZES,
    base_bytes: int | None = None,
    settings: AllocatorSettings | None = None,
    margin: float = MARGIN,
) -> Prediction:
    """Trace a step twice and predict its peak; see `trace` and `Prediction.of` for arguments and errors."""
    first, second = (
        trace(step, make_batch, n, state=state, buckets=buckets, before=before) for n in batch_sizes
    )
    return Prediction.of(first, second, base_bytes=base_bytes, settings=settings, margin=margin)


_MAX_AIMED = 8
"""Aimed steps before the range is halved instead."""


class _Sizes(Protocol):
    """Ascending batch sizes."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> int: ...


def largest_within(candidates: _Sizes, budget: float, need: Callable[[int], float]) -> int | None:
    """The largest candidate that needs no more than the budget, where the next one needs more.

    Needs are nearly a line in the size, so most steps aim where the line through the ends meets the budget.

    >>> largest_within(range(1, 1000), 100, lambda size: 7 + 3 * size)
    31
    """
    low, high = 0, len(candidates) - 1
    if need(candidates[high]) <= budget:
        return candidates[high]
    if need(candidates[low]) > budget:
        return None
    num_aimed = 0
    while high - low > 1:
        below, above = need(candidates[low]), need(candidates[high])
        aim = low + int((high - low) * (budget - below) / (above - below))
        middle = min(max(aim, low + 1), high - 1) if num_aimed < _MAX_AIMED else (low + high) // 2
        num_aimed += 1
        if need(candidates[middle]) <= budget:
            low = middle
        else:
            high = middle
    return candidates[low]


def replay(events: Program, settings: AllocatorSettings) -> CachingAllocator:
    """The allocator after a program."""
    allocator = CachingAllocator(settings)
    allocate, free = allocator.allocate, allocator.free
    blocks: dict[int, Block] = {}
    for kind, number, size in events:
        num_bytes = size.scratch_bytes() if isinstance(size, Reduction) else size
        if kind == RELEASE:
            block = blocks.pop(number, None)
            if block is not None:
                free(block)
        elif kind == FLUSH:
            allocator.empty_cache()
        elif num_bytes:
            block = allocate(num_bytes)
            if kind == ALLOCATE:
                blocks[number] = block
            else:
                free(block)
    return allocator


def _program(found: Trace) -> Program:
    """The events as `replay` takes them."""
    program: Program = []
    for event in found.events:
        if event.kind == "allocate":
            program.append((ALLOCATE, event.storage, event.num_bytes))
        elif event.kind == "release":
            program.append((RELEASE, event.storage, 0))
        elif event.kind == "flush":
            program.append((FLUSH, 0, 0))
        elif event.kind == "workspace":
            facts = event.facts
            borrowed = workspace_bytes(facts) if isinstance(facts, ConvFacts) else facts or event.num_bytes
            program.append((BORROW, 0, borrowed))
    return program


def measured_base_bytes() -> int | None:
    """Bytes in use on the current CUDA device outside this process's allocator; None without a device."""
    if not torch.cuda.is_available():
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return int(total_bytes - free_bytes - torch.cuda.memory_reserved())
