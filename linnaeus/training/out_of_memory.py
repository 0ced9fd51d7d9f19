"""Out of memory in training: restore the state before the step, and report memory use and remedies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from linnaeus.autobatch import nest
from linnaeus.autobatch.memory.device import GIB, device_memory
from linnaeus.autobatch.state.rng import rng_state, set_rng_state
from linnaeus.batch_plan.stages import Stage
from linnaeus.config.schema import TrainConfig
from linnaeus.models.build import batchnorm_kind, set_gradient_checkpointing
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import CheckpointError, ConfigError, OutOfMemoryError, first_line
from linnaeus.training.build import Assembly
from linnaeus.training.callbacks import CallbackState

_KEY = "TRAIN.ON_OUT_OF_MEMORY"
_NOTABLE_BYTES = GIB // 100


def state_bytes(assembly: Assembly, device: torch.device) -> dict[str, int]:
    """Count the bytes of training state on a device, by name. Shared storage counts once.

    In validation the optimizer state stays in memory, and there are no gradients.
    """
    modules = nn.ModuleList([assembly.model, assembly.criterion])
    average = nn.ModuleList([] if assembly.ema is None else [assembly.ema.module])
    tensors: dict[str, Iterable[Tensor | None]] = {
        "parameters": modules.parameters(),
        "buffers": modules.buffers(),
        "EMA": [*average.parameters(), *average.buffers()],
        "gradients": (parameter.grad for parameter in modules.parameters()),
        "optimizer": nest.tensors(list(assembly.optimizer.state.values())),
    }
    found, seen = dict.fromkeys(tensors, 0), set[int]()
    for name, each in tensors.items():
        for tensor in map(nest.local, each):
            if tensor is None or tensor.device != device or tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[name] += storage.nbytes()
    return found


class StepStart:
    """Callback that copies the buffers and random number generators before each optimizer step.

    Forward, backward and clipping change only these and the gradients, which are empty before a step. The
    update changes parameters, optimizer, loss scale and average, and cannot be undone.

    Args:
        assembly: the model and its training objects.
        device: the device of training.
    """

    def __init__(self, assembly: Assembly, device: torch.device) -> None:
        self._assembly, self._device = assembly, device
        self._buffers: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        self._rng: dict[str, Any] = {}

    @torch.no_grad()
    def on_step_start(self, state: CallbackState) -> None:
        """Copy buffers and generators."""
        self._buffers = []  # frees the last step's copies first
        self._buffers = [
            (module._buffers, name, buffer, buffer.clone())
            for part in (self._assembly.model, self._assembly.criterion)
            for module in part.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._rng = rng_state(self._device)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the copies and drop the gradients."""
        self._assembly.optimizer.zero_grad(set_to_none=True)
        if self._assembly.scaler.is_enabled():
            # The scaler may have recorded that gradients are unscaled. Otherwise only `update` clears this.
            self._assembly.scaler._per_optimizer_states.clear()
        for registry, name, buffer, copy in self._buffers:
            buffer.copy_(copy)
            registry[name] = buffer  # a step may have put another tensor there
        set_rng_state(self._rng, self._device)


@dataclass(frozen=True)
class SizeOrigin:
    """Origin of the batch size of training or validation.

    Attributes:
        size: samples per rank.
        sentence: the origin in a sentence.
        key: the key to lower for a smaller size.
        alternatives: other ways to a smaller size.
    """

    size: int
    sentence: str
    key: str
    alternatives: tuple[str, ...] = ()


def train_remedies(
    config: TrainConfig,
    assembly: Assembly,
    size: int,
    effective_batch_size: int,
    origin: SizeOrigin | None,
) -> Iterator[str]:
    """Yield remedies that would lower the memory of training's forward and backward passes.

    `size` is the micro-batch that did not fit, `effective_batch_size` the samples of its optimizer step.
    """
    smallest = (
        2 if batchnorm_kind(assembly.model) == "local" else 1
    )  # a single sample has no variance
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
    if not config.GRADIENT_CHECKPOINTING:
        with suppress(ConfigError):
            set_gradient_checkpointing(assembly.model)  # the run ends, so its model may change
            yield "TRAIN.GRADIENT_CHECKPOINTING True"
    yield "a smaller model"


def update_remedies(assembly: Assembly) -> Iterator[str]:
    """Yield remedies for an optimizer update, whose memory does not depend on the batch size."""
    yield "an optimizer with less state (OPTIMIZER.NAME)"
    if assembly.ema is not None:
        yield "TRAIN.EMA.ENABLED False"
    yield "a smaller model"


def validation_remedies(origin: SizeOrigin | None) -> Iterator[str]:
    """Yield remedies that lower the memory of validation. `origin` is as for `train_remedies`."""
    if origin is not None and origin.size > 1:
        yield f"{origin.key} below {origin.size}"
        yield from origin.alternatives
    yield "a smaller model"


def what_held_memory(assembly: Assembly, device: torch.device) -> str:
    """Describe the memory's contents in a sentence. Call this while the exception holds the activations.

    The sentence says so if the memory cannot be measured or is too short even for this.
    """
    try:
        memory = device_memory(device)
        return memory_sentence(
            state_bytes(assembly, device),
            held_bytes=memory.in_use(),
            outside_bytes=memory.outside(),
            total_bytes=memory.total_bytes,
            is_cpu=device.type == "cpu",
        )
    except (MemoryError, RuntimeError, OSError, NotImplementedError) as error:
        return f"The memory could not be measured ({type(error).__name__})"


def memory_sentence(
    state: Mapping[str, int],
    *,
    held_bytes: int,
    outside_bytes: int,
    total_bytes: int,
    is_cpu: bool,
) -> str:
    """Return the parts of the memory of at least 0.01 GiB in a sentence, the largest first.

    >>> state = {"parameters": 2 * GIB, "gradients": GIB, "buffers": 100}
    >>> memory_sentence(state, held_bytes=7 * GIB, outside_bytes=GIB, total_bytes=8 * GIB, is_cpu=False)
    'This process held 7.00 of 8.00 GiB: activations and batch 4.00, parameters 2.00, gradients 1.00. Outside its allocator (context, libraries, other processes): 1.00 GiB'

    `outside_bytes` is the memory outside this process's allocator; on the CPU, memory of other processes.
    """  # noqa: E501
    activations = "activations, batch, libraries" if is_cpu else "activations and batch"
    parts = {**state, activations: max(held_bytes - sum(state.values()), 0)}
    ordered = sorted(parts, key=lambda name: -parts[name])
    shown = ", ".join(
        f"{name} {_gib(parts[name])}" for name in ordered if parts[name] >= _NOTABLE_BYTES
    )
    held = f"This process held {_gib(held_bytes)} of {_gib(total_bytes)} GiB: {shown}"
    outside = (
        "Other processes"
        if is_cpu
        else "Outside its allocator (context, libraries, other processes)"
    )
    return f"{held}. {outside}: {_gib(max(outside_bytes, 0))} GiB"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}"


def wait_unless_first(world: World) -> None:
    """Return on the first rank that calls this. On the others, wait for its error and raise it.

    Raises:
        LinnaeusError: the first rank's error.
    """
    control = world.control
    assert control is not None
    while control.keys.put_first("ends", world.rank) != world.rank:
        control.check()
        control.clock.sleep(0.1)


def end_with_checkpoint(
    world: World, text: str, limit: int, save: Callable[[], object]
) -> OutOfMemoryError:
    """Save a checkpoint after memory ran out and return the error that ends all ranks.

    The first rank to call this saves, and the others wait. After the last completed step, parameters,
    optimizer and average are equal on all ranks, so any rank can save.

    Args:
        world: several ranks.
        text: description of the failure.
        limit: maximum number of samples per micro-batch in the next attempt.
        save: writes the checkpoint.
    """
    wait_unless_first(world)
    world.update("saving a checkpoint: memory ran out")
    try:
        save()
        outcome = (
            "all ranks end with a checkpoint. Set TRAIN.AUTO_RESUME True: the next attempt (torchrun "
            f"--max-restarts, or the same command again) uses micro-batches of at most {limit} and the "
            "same effective batch"
        )
    except CheckpointError as problem:
        outcome = f"{problem}"
    return OutOfMemoryError(f"{text}. {_KEY} split: {outcome}")


@dataclass
class OutOfMemoryReport:
    """Errors of a run that ran out of memory: the failure, the contents of the memory, and remedies.

    Call its methods while handling the exception, which holds the activations.

    Attributes:
        config: the TRAIN node.
        origins: origin of the batch sizes of `train` and `val`.
    """

    config: TrainConfig
    assembly: Assembly
    world: World
    origins: Mapping[str, SizeOrigin] = field(default_factory=dict)

    def of_step(
        self, text: str, stage: Stage, *, is_updating: bool, smallest: int
    ) -> OutOfMemoryError | None:
        """Return the error of an optimizer step; None if smaller micro-batches allow to repeat it.

        Args:
            text: description of the failure.
            stage: the sizes of the step.
            is_updating: whether the update had begun.
            smallest: size of the smallest micro-batch after halving.
        """
        if is_updating:
            obstacle = f"The update had begun, which cannot be undone, so {_KEY} split cannot help"
        elif stage.micro_batch_size == 1:
            obstacle = "A micro-batch of one sample cannot be split"
        elif smallest < 2 and batchnorm_kind(self.assembly.model) == "local":
            obstacle = "A smaller micro-batch would have one sample, too few for BatchNorm"
        elif self.config.ON_OUT_OF_MEMORY != "split":
            obstacle = f"{_KEY} split would repeat the step with smaller micro-batches"
        else:
            return None
        remedies = update_remedies(self.assembly)  # an update holds no activations
        if not is_updating:
            remedies = train_remedies(
                self.config,
                self.assembly,
                stage.micro_batch_size,
                stage.effective_batch_size,
                self.origins.get("train"),
            )
        return self._error(text, "train", obstacle, remedies)

    def of_validation(self, error: Exception, epoch: int) -> OutOfMemoryError:
        """Return the error of the validation after an epoch."""
        origin = self.origins.get("val")
        size = "" if origin is None else f", with batches of {origin.size}"
        text = f"out of memory in the validation after epoch {epoch}{size}: {first_line(error)}"
        return self._error(text, "val", "Validation is never split", validation_remedies(origin))

    def between_steps(self, error: Exception, step: int) -> OutOfMemoryError:
        """Return the error of other code after an optimizer step."""
        text = f"out of memory after optimizer step {step}: {first_line(error)}"
        return self._error(
            text, "train", "No training step failed", validation_remedies(self.origins.get("train"))
        )

    def _error(
        self, text: str, mode: str, obstacle: str, remedies: Iterable[str]
    ) -> OutOfMemoryError:
        origin = self.origins.get(mode)
        lines = (
            text,
            "" if origin is None else origin.sentence,
            what_held_memory(self.assembly, self.world.device),
            obstacle,
            f"Remedies: {'; '.join(remedies)}",
        )
        return OutOfMemoryError(".\n".join(filter(None, lines)))
