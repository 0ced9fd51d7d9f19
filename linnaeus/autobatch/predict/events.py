"""What a step does to the memory of a device, as a list of events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from linnaeus.autobatch.predict.reductions import Reduction


class ConvFacts(NamedTuple):
    """A convolution, as far as the workspace of its kernel depends on it.

    Attributes:
        kind: `forward`, `input` (its gradient) or `weight` (its gradient).
        x: shape of the input, (B, C, *size).
        w: shape of the weight.
        y: shape of the output.
        groups: number of groups.
        strides: of each dimension.
        itemsize: bytes of an element.
        channels_last: whether the kernel reads and writes channels-last tensors.
    """

    kind: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    groups: int
    strides: tuple[int, ...]
    itemsize: int
    channels_last: bool

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel has filters of its own."""
        return self.groups > 1 and self.groups == self.x[1]

    @property
    def is_by_cudnn(self) -> bool:
        """Whether cuDNN runs it; torch has kernels of its own for contiguous depthwise ones in float32."""
        return not self.is_depthwise or self.channels_last or self.itemsize < 4


class Event(NamedTuple):
    """One thing that happens to memory.

    Attributes:
        kind: `allocate`, `release`, `workspace` (held within one operation), `flush` (the allocator gives
            its free segments back) or `mark`.
        storage: names the storage, in the order of allocation; 0 for other events.
        num_bytes: of the storage, or of a workspace without facts.
        label: of a mark; the operation that allocates.
        facts: of the workspace of a convolution or reduction.
    """

    kind: str
    storage: int
    num_bytes: int = 0
    label: str = ""
    facts: ConvFacts | Reduction | None = None


@dataclass(frozen=True)
class Trace:
    """What two steps do to the memory of the device.

    Attributes:
        batch_size: of both steps.
        events: in order, from the first tensor of the state on.
    """

    batch_size: int
    events: tuple[Event, ...]

    def live_peak_bytes(self) -> int:
        """Most bytes of storages alive at once, without workspaces."""
        sizes: dict[int, int] = {}
        live = peak = 0
        for event in self.events:
            if event.kind == "allocate":
                sizes[event.storage] = event.num_bytes
                live += event.num_bytes
                peak = max(peak, live)
            elif event.kind == "release":
                live -= sizes.pop(event.storage)
        return peak
