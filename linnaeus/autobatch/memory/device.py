"""Memory of accelerators, and the choice of the class that measures a device."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from linnaeus.autobatch.memory.host import CpuMemory, available_host_bytes
from linnaeus.autobatch.memory.interface import DeviceMemory, FailedAllocations
from linnaeus.autobatch.memory.oom import is_ambiguous, is_out_of_memory

GIB = 1024**3
_LIBRARY_BYTES = GIB // 8
SLACK = 0.25
"""Part of the budget that a trial's cap leaves for the largest request, with expandable segments. Where a
single tensor takes more than that, the size found is too small, never too large."""


class AcceleratorMemory(DeviceMemory):
    """An accelerator other than CUDA, without a cap: only the measured peak shows whether a size fits."""

    placement_bytes = (2 + 20) * 1024**2
    """One more segment of each kind that blocks share, `kSmallBuffer` and `kLargeBuffer` of torch's caching
    allocators: a checkpoint is loaded in another order than that in which training allocates its state."""

    _api: Any = torch.accelerator

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.total_bytes = self._free_and_total()[1]

    def budget(self, fraction: float, limit_bytes: int | None) -> int:
        """See `DeviceMemory.budget`. The context and other processes count as use outside the allocator."""
        budget_bytes = int(fraction * self.total_bytes) - self.outside()
        return (
            budget_bytes if limit_bytes is None else min(budget_bytes, int(fraction * limit_bytes))
        )

    def outside(self) -> int:
        """See `DeviceMemory.outside`."""
        free, total = self._free_and_total()
        return total - free - self.in_use()

    def reset_peak(self) -> None:
        """Reset the allocator's peak to the memory held now."""
        self._api.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """Most bytes reserved since `reset_peak`. Reserved bytes include fragmentation."""
        self._api.synchronize(self.device)
        return int(self._api.max_memory_reserved(self.device))

    def in_use(self) -> int:
        """Bytes that the allocator has reserved."""
        return int(self._api.memory_reserved(self.device))

    def tensor_bytes(self) -> int:
        """Bytes that the allocator has handed out."""
        return int(self._api.memory_allocated(self.device))

    def tensor_peak(self) -> int:
        """Most bytes that the allocator has handed out since `reset_peak`."""
        return int(self._api.max_memory_allocated(self.device))

    def allocated_bytes(self) -> int:
        """Sum of all blocks that the allocator has handed out."""
        return self._count("allocated_bytes.all.allocated")

    def _count(self, name: str) -> int:
        return int(self._api.memory_stats(self.device).get(name, 0))

    def _free_and_total(self) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(self.device)


class CudaMemory(AcceleratorMemory):
    """A CUDA or HIP device, measured at the caching allocator.

    A cap that is set already (by `torch.cuda.set_per_process_memory_fraction`, or by
    `per_process_memory_fraction` in `PYTORCH_CUDA_ALLOC_CONF`) bounds the budget and is never raised.

    With expandable segments, the allocator compares the cap with all that it holds and the whole request,
    although the free end of a segment serves part of it. There a trial's cap is looser, and its peak decides.

    Raises:
        NotImplementedError: the allocator keeps no statistics.
    """

    _api = torch.cuda

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(self.device)
        self.total_bytes = int(properties.total_memory)
        self._is_integrated = bool(getattr(properties, "is_integrated", False))
        for name in ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING"):
            if os.environ.get(name):
                raise NotImplementedError(f"{name} is set: reserved memory is not counted")
        if (backend := torch.cuda.get_allocator_backend()) not in ("native", "pluggable"):
            raise NotImplementedError(
                f"the allocator's backend is {backend}: its cap is another one"
            )
        try:
            self._num_refusals = self._count("num_ooms")
        except RuntimeError as error:  # RMM and others that replace torch's own
            raise NotImplementedError(
                f"the allocator of {self.device} keeps no statistics: {error}"
            ) from None

    def budget(self, fraction: float, limit_bytes: int | None) -> int:
        """See `DeviceMemory.budget`; no more than a cap that is set already."""
        return min(super().budget(fraction, limit_bytes), self._allowed_bytes())

    def clean(self) -> None:
        """See `FailedAllocations.clean`. Earlier refusals are no evidence for later ones."""
        super().clean()
        self._num_refusals = self._count("num_ooms")

    def num_retries(self) -> int:
        """The allocator's own count of cache flushes."""
        return self._count("num_alloc_retries")

    def refused(self, error: BaseException) -> bool:
        """See `DeviceMemory.refused`; also an ambiguous error, if memory had run short.

        The allocator refused a request since `clean` or since the cap was set, or less is free than
        libraries allocate themselves (handles, workspaces, kernel code).
        """
        if not is_ambiguous(error):
            return is_out_of_memory(error)
        refused_any = self._count("num_ooms") > self._num_refusals
        return is_out_of_memory(error) or refused_any or self._free_and_total()[0] < _LIBRARY_BYTES

    @contextlib.contextmanager
    def cap(self, bytes_: int) -> Iterator[None]:
        """See `DeviceMemory.cap`; the caching allocator enforces it."""
        before_bytes = self._allowed_bytes()
        self._num_refusals = self._count("num_ooms")
        bytes_ = max(bytes_, 0)
        if self._settings().get("expandable_segments"):
            room = self._free_and_total()[0] + self.in_use() - bytes_
            bytes_ += min(int(SLACK * bytes_), max(room - _LIBRARY_BYTES, 0))
        self._allow(min(bytes_, before_bytes))
        try:
            yield
        finally:
            self._allow(before_bytes)

    def caveats(self) -> list[str]:
        """See `DeviceMemory.caveats`."""
        settings = self._settings()
        names = ("garbage_collection_threshold", "max_split_size")
        return [
            f"{name} is set: near the cap of a trial, the allocator releases cached blocks that it keeps in "
            "training, which runs without that cap"
            for name in names
            if 0 < settings.get(name, 0) < self.total_bytes
        ]

    def _free_and_total(self) -> tuple[int, int]:
        """Of memory shared with the host, the driver counts cached files as used, which give way."""
        free, total = torch.cuda.mem_get_info(self.device)
        if self._is_integrated:
            free = max(free, min(available_host_bytes(), total))
        return free, total

    def _settings(self) -> dict[str, Any]:
        """The allocator's settings; only torch's own has any, and no public function returns them."""
        try:
            return dict(torch.cuda.memory._snapshot(self.device).get("allocator_settings", {}))
        except RuntimeError:
            return {}

    def _allowed_bytes(self) -> int:
        """Return the cap on the allocator's reserved memory; the total without a cap."""
        return round(torch.cuda.get_per_process_memory_fraction(self.device) * self.total_bytes)

    def _allow(self, bytes_: int) -> None:
        """Set the cap. The allocator rounds down to whole bytes, so the quotient may be one byte short."""
        fraction = bytes_ / self.total_bytes
        if int(fraction * self.total_bytes) < bytes_:
            fraction = math.nextafter(fraction, 1.0)
        torch.cuda.set_per_process_memory_fraction(fraction, self.device)


def device_memory(device: torch.device, neighbours: Sequence[int] = ()) -> DeviceMemory:
    """The memory of a device.

    Args:
        neighbours: ids of the processes on this machine that train together, as for `CpuMemory`.

    Raises:
        NotImplementedError: the memory of this kind of device cannot be measured.
    """
    if device.type == "cuda":
        return CudaMemory(device)
    try:
        if device.type == "cpu":
            return CpuMemory(device, neighbours)
        return AcceleratorMemory(device)
    except (
        OSError,  # of a system without /proc, and the next one
        LookupError,
        RuntimeError,  # torch raises any of the others
        ValueError,
        AttributeError,
        AssertionError,
    ) as error:
        raise NotImplementedError(
            f"the memory of {device} cannot be measured on {sys.platform} with torch "
            f"{torch.__version__}: {error}"
        ) from error


def failed_allocations(device: torch.device) -> FailedAllocations:
    """Return the handling of failed allocations of a device, of any kind."""
    try:
        return device_memory(device)
    except NotImplementedError:
        return FailedAllocations(device)
