"""What a run says when it runs out of memory: what held it, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from linnaeus.autobatch.memory.device import GIB, device_memory
from linnaeus.config.schema import TrainConfig
from linnaeus.dist import World
from linnaeus.models.build import batchnorm_kind, has_gradient_checkpointing
from linnaeus.training.build import Assembly
from linnaeus.training.state_bytes import StateBytes, state_bytes

_NAMES = {
    "parameters": "parameters",
    "buffers": "buffers",
    "average": "EMA",
    "gradients": "gradients",
    "optimizer_state": "optimizer",
}


_NOTABLE_BYTES = GIB // 100


@dataclass(frozen=True)
class SizeOrigin:
    """Where the batch size of training or of validation comes from.

    Attributes:
        size: samples per process.
        sentence: says where it comes from.
        key: the key that is set to less for a smaller size.
        alternatives: what leads to a smaller size too.
    """

    size: int
    sentence: str
    key: str
    alternatives: tuple[str, ...] = ()


def train_remedies(
    config: TrainConfig, assembly: Assembly, size: int, effective_batch_size: int, origin: SizeOrigin | None
) -> Iterator[str]:
    """What makes the forward and backward passes of training need less; only what would have an effect.

    Args:
        config: the TRAIN node.
        assembly: the model and what belongs to it.
        size: samples of the micro-batch that did not fit.
        effective_batch_size: samples of the optimizer step, over all ranks.
        origin: of the size; None if it is not known.
    """
    smallest = 2 if batchnorm_kind(assembly.model) == "local" else 1  # a single sample has no variance
    if origin is not None and size > smallest:
        keeps = "keeps the samples of an optimizer step"
        if config.EFFECTIVE_BATCH_SIZE is not None:
            keeps = f" (TRAIN.EFFECTIVE_BATCH_SIZE {keeps})"
        elif config.BATCH_SCHEDULE.NAME == "constant":
            keeps = f" (TRAIN.EFFECTIVE_BATCH_SIZE {effective_batch_size} {keeps})"
        else:
            keeps = ""
        yield f"{origin.key} below {size}{keeps}"
        yield from origin.alternatives
    if not config.GRADIENT_CHECKPOINTING and has_gradient_checkpointing(assembly.model):
        yield "TRAIN.GRADIENT_CHECKPOINTING True"
    yield "a smaller model"


def update_remedies(assembly: Assembly) -> Iterator[str]:
    """What makes the state of training smaller; batch size and activations have no part in an update."""
    yield "an optimizer with less state (OPTIMIZER.NAME)"
    if assembly.ema is not None:
        yield "TRAIN.EMA.ENABLED False"
    yield "a smaller model"


def validation_remedies(origin: SizeOrigin | None) -> Iterator[str]:
    """What makes validation need less; `origin` as for `train_remedies`."""
    if origin is not None and origin.size > 1:
        yield f"{origin.key} below {origin.size}"
        yield from origin.alternatives
    yield "a smaller model"


def what_held_memory(assembly: Assembly, device: torch.device) -> str:
    """What holds the device's memory now, as a sentence; call it while the exception holds the activations.

    Where memory is too short even for this, or cannot be measured, it says so.
    """
    try:
        memory = device_memory(device)
        return memory_sentence(
            state_bytes(assembly, device),
            held_bytes=memory.in_use(), outside_bytes=memory.outside(), total_bytes=memory.total_bytes,
            is_cpu=device.type == "cpu",
        )  # fmt: skip
    except (MemoryError, RuntimeError, OSError, NotImplementedError) as error:
        return f"What held the memory is not known ({type(error).__name__})"


def memory_sentence(
    state: StateBytes,
    *,
    held_bytes: int,
    outside_bytes: int,
    total_bytes: int,
    is_cpu: bool,
) -> str:
    """The parts of the memory, the largest first; those that are below 0.01 GiB, without a figure.

    >>> state = StateBytes(parameters=2 * GIB, gradients=GIB, buffers=100)
    >>> memory_sentence(state, held_bytes=7 * GIB, outside_bytes=GIB, total_bytes=8 * GIB, is_cpu=False)
    'This process held 7.00 of 8.00 GiB: activations and batch 4.00, parameters 2.00, gradients 1.00 (buffers: next to nothing). Outside its allocator (context, libraries, other processes): 1.00 GiB'

    Args:
        state: tensors that training keeps.
        held_bytes: what this process held when memory ran out.
        outside_bytes: in use outside this process's allocator; on the CPU, by other processes.
        total_bytes: of the device.
        is_cpu: on the CPU, what the process holds includes its libraries.
    """  # noqa: E501
    parts = {_NAMES[name]: num_bytes for name, num_bytes in asdict(state).items() if num_bytes}
    activations = "activations, batch, libraries" if is_cpu else "activations and batch"
    parts[activations] = max(held_bytes - sum(parts.values()), 0)
    ordered = sorted(parts, key=lambda name: -parts[name])
    shown = ", ".join(f"{name} {_gib(parts[name])}" for name in ordered if parts[name] >= _NOTABLE_BYTES)
    small = ", ".join(name for name in ordered if parts[name] < _NOTABLE_BYTES)
    small = f" ({small}: next to nothing)" if small else ""
    held = f"This process held {_gib(held_bytes)} of {_gib(total_bytes)} GiB: {shown}{small}"
    outside = "Other processes" if is_cpu else "Outside its allocator (context, libraries, other processes)"
    return f"{held}. {outside}: {_gib(max(outside_bytes, 0))} GiB"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}"


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
