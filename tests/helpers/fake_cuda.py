"""A CUDA device as a model: `torch.cuda` answers from it, and steps on CPU tensors allocate in it.

>>> cuda = FakeCuda(1 << 30, context_bytes=200 << 20)
>>> with cuda.installed():
...     weights = torch.ones(10 << 20)
...     torch.cuda.memory_reserved(0) >> 20
40

The storages that operations on CPU tensors allocate are allocated in the model of the caching allocator too,
and freed with them. A step of training on the CPU has those of the device, but for what CPU kernels save
otherwise and for the memory that CUDA's libraries take within an operation; `FakeCuda.allocate` adds such.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import linnaeus.autobatch.finder
import linnaeus.training.trainer
from linnaeus.autobatch import nest
from linnaeus.autobatch.memory.device import CudaMemory, empty_cache
from linnaeus.autobatch.memory.storages import StorageTracer
from linnaeus.autobatch.predict.allocator import MIB, Block
from linnaeus.autobatch.snapshot import Snapshot
from tests.helpers.capped import CappedAllocator, Refused

DEVICE = torch.device("cuda", 0)
_FUNCTIONS = (
    "current_device", "empty_cache", "get_device_name", "get_device_properties",
    "get_per_process_memory_fraction", "get_rng_state", "init", "max_memory_allocated", "max_memory_reserved",
    "mem_get_info", "memory_allocated", "memory_reserved", "memory_stats", "reset_peak_memory_stats",
    "set_per_process_memory_fraction", "set_rng_state", "synchronize",
)  # fmt: skip


class FakeCuda:
    """One device with this process's context and allocator on it, and other processes.

    The methods named like functions of `torch.cuda` do what these do.

    Args:
        total_bytes: memory of the device.
        context_bytes: what the process holds outside its allocator from the start.
        tenants_bytes: what other processes hold at the start.
        fraction: `per_process_memory_fraction` of the allocator's settings.
        max_split_bytes: `max_split_size_mb` of these settings, in bytes; shown and not followed.
        garbage_collection_threshold: of these settings, shown and not followed.
        scale: bytes of the device that each byte of a CPU tensor takes. A small model then takes the memory
            of a large one, against which segments are as small as on a card.

    Attributes:
        allocator: the caching allocator.
        context_bytes: what the process holds outside its allocator.
    """

    def __init__(
        self,
        total_bytes: int,
        *,
        context_bytes: int = 0,
        tenants_bytes: int = 0,
        fraction: float = 1.0,
        max_split_bytes: int | None = None,
        garbage_collection_threshold: float = 0.0,
        scale: int = 1,
    ) -> None:
        self._scale = scale
        self.total_bytes, self.context_bytes, self.tenants_bytes = total_bytes, context_bytes, tenants_bytes
        self._threshold = garbage_collection_threshold
        self._max_split_bytes = max_split_bytes
        self.allocator = CappedAllocator(lambda num_bytes: num_bytes <= self.free_bytes)
        self._blocks: dict[int, Block] = {}
        self._rng_state = torch.zeros(16, dtype=torch.uint8)
        self.set_per_process_memory_fraction(fraction)
        assert self.free_bytes >= 0

    @property
    def free_bytes(self) -> int:
        """What nobody holds."""
        return self.total_bytes - self.context_bytes - self.tenants_bytes - self.allocator.reserved_bytes

    def grow_context(self, num_bytes: int) -> None:
        """Load kernels, make a library's handle, or open a connection.

        Raises:
            RuntimeError: as CUDA reports that the device is full.
        """
        if num_bytes > self.free_bytes:
            raise RuntimeError("CUDA error: out of memory")
        self.context_bytes += num_bytes

    def allocate(self, num_bytes: int) -> Block:
        """Request memory of the caching allocator, as a tensor or a library's workspace does.

        Raises:
            torch.OutOfMemoryError: with CUDA's wording.
        """
        try:
            return self.allocator.allocate(num_bytes)
        except Refused as refused:
            error = torch.OutOfMemoryError(self._message(refused.segment_bytes))
        raise error

    @contextlib.contextmanager
    def installed(self, *state: Any) -> Iterator[FakeCuda]:
        """Let `torch.cuda` be this device, for code that runs on CPU tensors.

        AutoBatch and the trainer take the memory of the CPU's tensors for that of this device. A snapshot's
        copies are made on the host, so they take none of it.

        Args:
            state: modules, optimizers and tensors whose storages are on the device already.
        """
        tracer = StorageTracer(self._on_allocate, self._on_free)
        with pytest.MonkeyPatch.context() as patch, tracer:
            for name in _FUNCTIONS:
                patch.setattr(torch.cuda, name, getattr(self, name))
            patch.setattr(torch.cuda.memory, "_snapshot", self._snapshot)
            patch.setattr(linnaeus.autobatch.finder, "device_memory", lambda device: CudaMemory(DEVICE))
            patch.setattr(linnaeus.autobatch.finder, "Snapshot", _HostSnapshot)
            patch.setattr(linnaeus.training.trainer, "empty_cache", lambda device: empty_cache(DEVICE))
            with torch.no_grad():
                for tensor in _tensors(state):
                    torch.ops.aten.lift_fresh(tensor)  # the tracer takes its result for allocated now
            yield self

    def _on_allocate(self, number: int, num_bytes: int) -> None:
        if num_bytes:
            self._blocks[number] = self.allocate(self._scale * num_bytes)

    def _on_free(self, number: int, num_bytes: int) -> None:
        block = self._blocks.pop(number, None)
        if block is not None:  # it is None for a storage without bytes, and for one that was refused
            self.allocator.free(block)

    def _message(self, segment_bytes: int) -> str:
        allocator = self.allocator
        cached_bytes = allocator.reserved_bytes - allocator.allocated_bytes
        allowed_bytes = allocator.allowed_bytes
        allowed = "" if allowed_bytes is None else f"{format_size(allowed_bytes)} allowed; "
        return (
            f"CUDA out of memory. Tried to allocate {format_size(segment_bytes)}. GPU 0 has a total capacity "
            f"of {format_size(self.total_bytes)} of which {format_size(self.free_bytes)} is free. {allowed}"
            f"Of the allocated memory {format_size(allocator.allocated_bytes)} is allocated by PyTorch, and "
            f"{format_size(cached_bytes)} is reserved by PyTorch but unallocated."
        )

    # --- torch.cuda ---

    def init(self) -> None: ...

    def current_device(self) -> int:
        return 0

    def synchronize(self, device: Any = None) -> None: ...

    def get_device_name(self, device: Any = None) -> str:
        return "stand-in"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name=self.get_device_name(), total_memory=self.total_bytes)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.free_bytes, self.total_bytes

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        allocator = self.allocator
        return {
            "num_alloc_retries": allocator.num_alloc_retries,
            "num_ooms": allocator.num_ooms,
            "reserved_bytes.all.current": allocator.reserved_bytes,
            "reserved_bytes.all.peak": allocator.peak_reserved_bytes,
            "allocated_bytes.all.current": allocator.allocated_bytes,
            "allocated_bytes.all.peak": allocator.peak_allocated_bytes,
        }

    def memory_reserved(self, device: Any = None) -> int:
        return self.allocator.reserved_bytes

    def max_memory_reserved(self, device: Any = None) -> int:
        return self.allocator.peak_reserved_bytes

    def memory_allocated(self, device: Any = None) -> int:
        return self.allocator.allocated_bytes

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.allocator.peak_allocated_bytes

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.allocator.reset_peaks()

    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        """The allocator keeps whole bytes, rounded down; a fraction of 1 is no cap."""
        self.allocator.allowed_bytes = int(fraction * self.total_bytes) if fraction < 1 else None

    def get_per_process_memory_fraction(self, device: Any = None) -> float:
        """The fraction that the whole bytes are of the total, which may be less than what was set."""
        allowed_bytes = self.allocator.allowed_bytes
        return 1.0 if allowed_bytes is None else allowed_bytes / self.total_bytes

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self._rng_state

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self._rng_state = state

    def _snapshot(self, device: Any = None) -> dict[str, Any]:
        """The allocator's settings, as `torch.cuda.memory._snapshot` has them."""
        limit = self._max_split_bytes
        return {
            "allocator_settings": {
                "max_split_size": -1 if limit is None else limit,
                "garbage_collection_threshold": self._threshold,
            }
        }


class _HostSnapshot(Snapshot):
    """A snapshot whose copies are in the memory of the host, as those of a real device are."""

    def __init__(self, *arguments: Any) -> None:
        with _disable_current_modes():
            super().__init__(*arguments)


def mebibytes(number: int) -> Tensor:
    """A tensor of so many MiB."""
    return torch.empty(number * MIB, dtype=torch.uint8)


def format_size(num_bytes: int) -> str:
    """Bytes as the allocator's messages show them."""
    for exponent, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes > 1024**exponent:
            return f"{num_bytes / 1024**exponent:.2f} {unit}"
    return f"{num_bytes} bytes"


def _tensors(state: tuple[Any, ...]) -> Iterator[Tensor]:
    """Parameters, gradients, buffers and optimizer state."""
    for part in state:
        if isinstance(part, nn.Module):
            for parameter in part.parameters():
                yield from (tensor for tensor in (parameter, parameter.grad) if tensor is not None)
            yield from part.buffers()
        elif isinstance(part, torch.optim.Optimizer):
            yield from nest.tensors(list(part.state.values()))
        else:
            yield from nest.tensors(part)
