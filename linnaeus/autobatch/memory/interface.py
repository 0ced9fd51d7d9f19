"""Interface for measuring and capping device memory. All numbers are bytes."""

from __future__ import annotations

import contextlib
import gc
from abc import ABC, abstractmethod

import torch

from linnaeus.autobatch.memory.oom import is_out_of_memory


class FailedAllocations:
    """Handling of allocations that fail on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def clean(self) -> None:
        """Release all memory that no live object holds.

        Memory of a failed backward pass is released by torch's thread for the device, some time after the
        error: a backward pass over nothing waits for this thread, and allocates nothing.
        """
        with torch.inference_mode(False), torch.enable_grad():
            nothing = torch.empty(0, device=self.device, requires_grad=True)
            nothing.backward(torch.empty_like(nothing))
        gc.collect()
        synchronize(self.device)
        empty_cache(self.device)

    def refused(self, error: BaseException) -> bool:
        """Whether an exception means that an allocation failed.

        Ask in the handler of the exception, and inside the cap if there is one: libraries raise some errors
        for other reasons too, and the state of the memory tells.
        """
        return is_out_of_memory(error)


class DeviceMemory(FailedAllocations, ABC):
    """Memory of one device as the search sees it.

    Attributes:
        placement_bytes: fragmentation allowance: bytes that a step may reserve beyond the peak of an equal
            step, because its blocks may lie in other gaps of training's memory.
    """

    total_bytes: int
    placement_bytes: int = 0

    @abstractmethod
    def budget(self, fraction: float, limit_bytes: int | None) -> int:
        """Return the memory this process may hold now, given the use outside its allocator; may be negative.

        Args:
            fraction: of the total that may be in use on the device, by all processes, in (0, 1].
            limit_bytes: this process may hold `fraction` of it, regardless of others; None is no such limit.
        """

    def settle(self, excluded_bytes: int = 0) -> None:
        """Read the memory of the process beside the tensors of trials again, where no allocator knows it.

        Args:
            excluded_bytes: host memory that is not counted.
        """

    def outside(self) -> int:
        """Memory in use outside this process's allocator: its context and libraries, and other processes."""
        return self.total_bytes - self.budget(1.0, None)

    @abstractmethod
    def reset_peak(self) -> None:
        """Reset the peak to the memory in use now."""

    @abstractmethod
    def peak(self) -> int:
        """Most memory in use since `reset_peak`."""

    @abstractmethod
    def in_use(self) -> int:
        """Memory in use now, measured like the peak."""

    def tensor_bytes(self) -> int:
        """Memory in use without the fragmentation that `in_use` may include; compare two of them."""
        return self.in_use()

    def tensor_peak(self) -> int:
        """Most of `tensor_bytes` since `reset_peak`."""
        return self.peak()

    def allocated_bytes(self) -> int:
        """Sum of all allocations so far, freed or not; 0 if they are not counted."""
        return 0

    def num_retries(self) -> int:
        """Number of requests that did not fit at once: the allocator flushed its cache, or a cap refused."""
        return 0

    def cap(self, bytes_: int) -> contextlib.AbstractContextManager[None]:
        """Inside the context, an allocation that would take the process above `bytes_` fails, if it can."""
        return contextlib.nullcontext()

    def caveats(self) -> list[str]:
        """Settings of the allocator under which a trial may reserve less than training, one sentence each."""
        return []


def empty_cache(device: torch.device) -> None:
    """Return the memory that the device's allocator keeps for reuse; the CPU's keeps none."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work; the CPU queues none."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
