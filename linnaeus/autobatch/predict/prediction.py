"""Predict the peak GPU memory of a step at any batch size, without running it and without a GPU.

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
(13220, 308)

Two steps are traced on `meta` at two batch sizes, by `trace`. Each event's size is a line through the two, or
a parabola through them and 0 where it grows much faster. At any other batch size, the events with these sizes
are replayed through a model of the caching allocator. That includes fragmentation, which a line through the
two peaks does not.

For a model that is built for this only, build model and optimizer inside `with torch.device("meta")`;
otherwise pass the existing objects as `state`: they are put on `meta` meanwhile.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from linnaeus.autobatch import nest
from linnaeus.autobatch.predict.allocator import Block, CachingAllocator
from linnaeus.autobatch.predict.gpus import ASSUMED_BASE_BYTES
from linnaeus.autobatch.predict.recorder import CONV_WORKSPACE, Event
from linnaeus.autobatch.predict.trace import Buckets, Trace, UntraceableError, trace
from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.search import Candidates, OutOfMemory
from linnaeus.autobatch.trial import step_with_zero_gradients

BATCH_SIZES = (8, 16)
"""Batch sizes of the traces: large enough for kernels to take their usual path."""

MARGIN = 1.15
"""In 98 of 100 runs the measured peak is below the predicted one times this (prediction_accuracy.py)."""


@dataclass(frozen=True)
class Prediction:
    """Peak memory of a step as a function of the batch size.

    Attributes:
        base_bytes: in use on the device beside the allocator: context, libraries, other processes.
        traces: of the step at two batch sizes.
    """

    base_bytes: int
    traces: tuple[Trace, Trace] = field(repr=False)
    _peaks: dict[int, int] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, first: Trace, second: Trace, *, base_bytes: int | None = None) -> Prediction:
        """Make the prediction from two traces of the same step.

        Args:
            first, second: at two batch sizes, the smaller first.
            base_bytes: as the attribute; None measures it, or assumes one where there is no device.

        Raises:
            UntraceableError: the step does other things at the second size, so its peak at others is a guess.
        """
        low, high = first.batch_size, second.batch_size
        if [event[:2] for event in first.events] != [event[:2] for event in second.events]:
            raise UntraceableError(
                f"the step runs other operations with {high} samples than with {low}, such as a loop over "
                "parts of the batch"
            )
        if base_bytes is None and (base_bytes := measured_base_bytes()) is None:
            base_bytes = ASSUMED_BASE_BYTES
        return cls(base_bytes, (first, second))

    def reserved_bytes(self, n: int) -> int:
        """Return the most bytes that the allocator reserves in a step with n samples.

        Raises:
            ValueError: n is no whole number of samples.
        """
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"n is {n!r}; it must be a whole number of samples, at least 1")
        if n not in self._peaks:
            self._peaks[n] = replay(self._events(n)).peak_reserved_bytes
        return self._peaks[n]

    def peak_bytes(self, n: int) -> int:
        """Return the most bytes in use on the device in a step with n samples."""
        return self.base_bytes + self.reserved_bytes(n)

    def peak_within(self, n: int, limit_bytes: float) -> int | None:
        """Return the peak on a device with `limit_bytes`; None where the step does not fit.

        Where the device is full, the allocator gives its cache back and tries again, and convolutions take
        kernels without a workspace. A trial of AutoBatch accepts neither.
        """
        with contextlib.suppress(OutOfMemory):
            allocator = replay(self._events(n), limit_bytes - self.base_bytes)
            return self.base_bytes + allocator.peak_reserved_bytes
        return None

    def safe_bytes(self, n: int) -> int:
        """Return the peak times `MARGIN`."""
        return int(MARGIN * self.peak_bytes(n))

    @property
    def is_constant(self) -> bool:
        """Whether predicted memory does not grow with the batch: `make_batch` may ignore its size."""
        first, second = self.traces
        return first.events == second.events

    def largest(
        self,
        limit_bytes: float,
        *,
        smallest: int = 1,
        largest: int = 1 << 20,
    ) -> int | None:
        """Return the largest batch size in a range that runs within the limit; None if the smallest does not.

        The next size exceeds the limit, or the range. Peaks do not quite grow with the batch: where a larger
        size reuses blocks better, it may be within the limit again. `peak_within` models a full
        device; AutoBatch needs room for `peak_bytes` and may find less.

        Args:
            limit_bytes: bytes of the device that may be in use.
            smallest: lower end of the range, inclusive.
            largest: upper end of the range, inclusive.

        Raises:
            TypeError, ValueError: the limit is no number of bytes, or the range is empty.
        """
        if not isinstance(limit_bytes, int | float) or math.isnan(limit_bytes):
            raise TypeError(f"limit_bytes is {limit_bytes!r}; it must be a number of bytes")
        if largest < smallest:
            raise ValueError(f"largest is {largest}; it must be at least smallest, {smallest}")
        return self.largest_of(range(smallest, largest + 1), limit_bytes)

    def largest_of(self, candidates: Sequence[int] | Candidates, limit_bytes: float) -> int | None:
        """Return the largest of ascending batch sizes that runs within the limit, as `largest` does."""
        num = bisect.bisect_left(
            candidates, True, key=lambda n: self.peak_within(n, limit_bytes) is None
        )
        return candidates[num - 1] if num else None

    def _events(self, n: int) -> Iterator[Event]:
        """Yield the events of a step with n samples."""
        first, second = self.traces
        low, high = first.batch_size, second.batch_size
        factor, span = n - low, high - low

        def between(size: int, other: int) -> int:
            if (
                size and other * low >= 1.5 * size * high
            ):  # a n + b n², such as the scores of all pairs of samples
                linear, square = size * high * span, other * low - size * high
                return max(0, n * (linear + square * factor) // (low * high * span))
            return max(0, size + (other - size) * factor // span)

        for one, other in zip(first.events, second.events, strict=True):
            yield one._replace(num_bytes=between(one.num_bytes, other.num_bytes))


def predict(
    step: Callable[[Any], object],
    make_batch: Callable[[int], Any],
    *,
    state: Any = (),
    mode: Mode | None = None,
    train_once: Callable[[], object] | None = None,
    buckets: Buckets | None = None,
    base_bytes: int | None = None,
) -> Prediction:
    """Trace a step twice and predict its peak; for other arguments and errors see `trace`, `Prediction.of`.

    Args:
        mode: `train`, or `val`, where the state of the optimizers is allocated too; None leaves modules and
            optimizers as they are.
        train_once: runs one training step before validation, as for `BatchSizeFinder`.
    """
    parts = list(nest.leaves(state))
    modules = [part for part in parts if isinstance(part, nn.Module)]

    def prepare() -> None:
        if mode == "val":
            for module in modules:
                module.train()
            if train_once is not None:
                train_once()
            for part in parts:
                if isinstance(part, torch.optim.Optimizer):
                    step_with_zero_gradients(part, lambda error: False)
        for module in modules:
            module.train(mode == "train")

    before = None if mode is None else prepare
    traces = (
        trace(step, make_batch, n, state=state, buckets=buckets, before=before) for n in BATCH_SIZES
    )
    return Prediction.of(*traces, base_bytes=base_bytes)


def replay(events: Iterable[Event], limit_bytes: float = math.inf) -> CachingAllocator:
    """Replay events; workspaces of convolutions are left out where they do not fit.

    Raises:
        OutOfMemory: something else does not fit within the limit.
    """
    allocator = CachingAllocator(limit_bytes)
    blocks: dict[int, Block] = {}
    for kind, storage, num_bytes, label, stream in events:
        if kind == "release":
            if storage in blocks:
                allocator.free(blocks.pop(storage))
        elif num_bytes:
            with contextlib.suppress(*[OutOfMemory] if label == CONV_WORKSPACE else []):
                blocks[storage] = allocator.allocate(num_bytes, stream)
    return allocator


def measured_base_bytes() -> int | None:
    """Return bytes in use on the current CUDA device outside this process's allocator; None without one."""
    if not torch.cuda.is_available():
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return int(total_bytes - free_bytes - torch.cuda.memory_reserved())
