"""The parts of the memory at a batch size: tensors counted while a step holds them, and the remainder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch

from linnaeus.autobatch.result import Mode
from linnaeus.training.build import Assembly
from linnaeus.training.state_bytes import StateBytes, state_bytes


@dataclass
class Breakdown(StateBytes):
    """The parts of a peak, in bytes; they add up to it.

    Attributes:
        buckets: those of DistributedDataParallel. The gradients are views of them, and count here instead; in
            validation they are still held.
        activations: the peak less all other parts: activations, the batch, workspaces of kernels.
        rest: all else that the process holds between steps: runtime and libraries on the CPU, workspaces and
            rounding of the caching allocator on an accelerator.
    """

    buckets: int = 0
    activations: int = 0
    rest: int = 0

    def parts(self) -> dict[str, int]:
        """The parts by name, in order."""
        return asdict(self)


def break_down(
    mode: Mode, state: StateBytes, *, peak_bytes: int, held_bytes: int, has_buckets: bool = False
) -> Breakdown:
    """Split a peak.

    >>> parts = break_down("train", StateBytes(100, 4, 0, 100, 200), peak_bytes=1500, held_bytes=600)
    >>> parts.activations, parts.rest, sum(parts.parts().values())
    (600, 496, 1500)

    Args:
        mode: a training trial allocates the optimizer state; in validation it is there from the start.
        state: counted on the same model.
        peak_bytes: peak of a trial.
        held_bytes: bytes that the process held between the trials, without buckets.
        has_buckets: whether the gradients are views of buckets, which then are held all the time.
    """
    resident = state.parameters + state.buffers + state.average
    buckets = state.gradients if has_buckets else 0
    gradients = state.gradients if mode == "train" and not has_buckets else 0
    allocated = gradients + buckets + (state.optimizer_state if mode == "train" else 0)
    if mode == "val":
        resident += state.optimizer_state
    return Breakdown(
        **asdict(replace(state, gradients=gradients)),
        buckets=buckets,
        activations=peak_bytes - held_bytes - allocated,
        rest=held_bytes - resident,
    )


@contextmanager
def counting(assembly: Assembly, device: torch.device) -> Iterator[StateBytes]:
    """Count bytes after each optimizer step inside the context, before the gradients are cleared."""
    state = StateBytes()

    def count(*_: object) -> None:
        vars(state).update(vars(state_bytes(assembly, device)))

    handle = assembly.optimizer.register_step_post_hook(count)
    try:
        yield state
    finally:
        handle.remove()
