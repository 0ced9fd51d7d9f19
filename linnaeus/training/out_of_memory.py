"""What a run says when training runs out of memory: what held it, and what to do."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from linnaeus.dist import World
from linnaeus.memory.device import GIB, device_memory
from linnaeus.training.build import Assembly
from linnaeus.training.state_bytes import StateBytes, state_bytes

_REMEDIES = (
    "What helps: a lower DATA.BATCH_SIZE, with TRAIN.EFFECTIVE_BATCH_SIZE to keep the samples of an "
    "optimizer step; DATA.AUTOBATCH.ENABLED True, or a lower DATA.AUTOBATCH.TARGET_MEMORY_FRACTION where "
    "it is; TRAIN.GRADIENT_CHECKPOINTING True. The last checkpoint is kept"
)

_NAMES = {
    "parameters": "parameters",
    "buffers": "buffers",
    "average": "EMA",
    "gradients": "gradients",
    "optimizer_state": "optimizer",
}


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its kind where it has none."""
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__


def explain(assembly: Assembly, world: World, folder: Path, obstacle: str) -> str:
    """What held the memory, where its history is, and what to do. Call it inside the exception's handler.

    Args:
        assembly: the model and what belongs to it.
        world: the processes.
        folder: of the run; the allocator's history goes there.
        obstacle: why the step was not taken again with smaller micro-batches.
    """
    snapshot = write_snapshot(folder, world)
    history = [] if snapshot is None else [f"The allocator's history is in {snapshot}"]
    begun = obstacle[0].upper() + obstacle[1:]
    return ". ".join([what_held_memory(assembly, world.device), *history, begun, _REMEDIES])


def what_held_memory(assembly: Assembly, device: torch.device) -> str:
    """What holds the device's memory now, as a sentence; call it while the exception holds the activations.

    Where memory is too short even for this, or cannot be measured, it says so.
    """
    try:
        memory = device_memory(device)
        held_bytes, outside_bytes = memory.in_use(), memory.outside()
        return memory_sentence(
            state_bytes(assembly, device),
            held_bytes=held_bytes, outside_bytes=outside_bytes, total_bytes=memory.total_bytes,
            is_cpu=device.type == "cpu",
        )  # fmt: skip
    except (MemoryError, RuntimeError, OSError, NotImplementedError) as error:
        return f"What held the memory is not known ({type(error).__name__})"


def memory_sentence(
    state: StateBytes, *, held_bytes: int, outside_bytes: int, total_bytes: int, is_cpu: bool
) -> str:
    """The parts of the memory, the largest first.

    >>> state = StateBytes(parameters=2 * GIB, gradients=GIB)
    >>> memory_sentence(state, held_bytes=7 * GIB, outside_bytes=GIB, total_bytes=8 * GIB, is_cpu=False)
    'This process held 7.00 of 8.00 GiB: activations and batch 4.00, parameters 2.00, gradients 1.00. Others: 1.00 GiB'

    Args:
        state: tensors that training keeps.
        held_bytes: what this process held when memory ran out.
        outside_bytes: in use outside this process's allocator.
        total_bytes: of the device.
        is_cpu: on the CPU the process holds its libraries too.
    """  # noqa: E501
    parts = {_NAMES[name]: num_bytes for name, num_bytes in asdict(state).items() if num_bytes}
    activations = "activations, batch, libraries" if is_cpu else "activations and batch"
    parts[activations] = max(held_bytes - sum(parts.values()), 0)
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {_gib(num_bytes)}" for name, num_bytes in ordered)
    return (
        f"This process held {_gib(held_bytes)} of {_gib(total_bytes)} GiB: {shown}. "
        f"Others: {_gib(max(outside_bytes, 0))} GiB"
    )


def _gib(num_bytes: int) -> str:
    gib = num_bytes / GIB
    return f"{gib:.2f}" if gib >= 1 else f"{gib:.2g}"


def write_snapshot(folder: Path, world: World) -> Path | None:
    """Write the CUDA allocator's recorded history beside the run, for pytorch.org/memory_viz.

    Returns:
        The file; None on another device, or where no history was recorded
        (`torch.cuda.memory._record_memory_history`), or where it cannot be written.
    """
    if world.device.type != "cuda" or not hasattr(torch.cuda.memory, "_dump_snapshot"):
        return None
    path = folder / f"out_of_memory_rank{world.rank}.pickle"
    with suppress(RuntimeError, OSError, MemoryError):
        if any(torch.cuda.memory._snapshot(world.device).get("device_traces", ())):
            torch.cuda.memory._dump_snapshot(str(path))
            return path
    return None
