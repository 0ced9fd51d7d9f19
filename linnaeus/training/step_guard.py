"""The state before an optimizer step, from which the step can be taken again after it ran out of memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from linnaeus.autobatch.memory.interface import synchronize
from linnaeus.autobatch.rng import rng_state, set_rng_state
from linnaeus.dist import World
from linnaeus.errors import LinnaeusError
from linnaeus.training.build import Assembly
from linnaeus.training.noise_scale import GradientProbe


class Phase(Enum):
    """How far an optimizer step has come.

    Attributes:
        BETWEEN: no step has begun, or it has no copy yet of the state before it.
        BEFORE_UPDATE: forward, backward or clipping.
        UPDATE: parameters, optimizer, gradient scaler, average and progress change.
    """

    BETWEEN = auto()
    BEFORE_UPDATE = auto()
    UPDATE = auto()


class StepGuard:
    """Knows how far a step has come, and copies what forward, backward and clipping change.

    That is the buffers, the random number generators' states and the noise scale. Gradients need no copy:
    there are none before a step. Parameters, optimizer, gradient scaler and average change only in the
    update, after which there is no way back.

        step ──── forward, backward, clipping ──── before_update ──── update, progress ──── end of step
             the state before the step is here ───▶│◀── nowhere ──────────────────────────▶│ the state after

    Another thread may read the state inside `held`: meanwhile no update begins.

    Args:
        assembly: the model and what belongs to it.
        world: the processes.
        probe: of the training step; None without one.
        copies: whether to copy; otherwise a step cannot be taken again, and costs nothing more.

    Attributes:
        phase: how far the current step has come, or had come when it failed.
    """

    def __init__(
        self, assembly: Assembly, world: World, probe: GradientProbe | None = None, *, copies: bool = True
    ) -> None:
        self.phase = Phase.BETWEEN
        self._assembly = assembly
        self._world = world
        self._probe = probe
        self._copies = copies
        self._lock = threading.Lock()
        self._update = ExitStack()
        self._buffers: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        self._rng: dict[str, Any] = {}
        self._noise_scale: dict[str, Any] | None = None
        self._begun: torch.cuda.Event | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """The context of one optimizer step and of counting it: copies the state, then runs the step.

        An error leaves `phase` as it is. The lock that `before_update` takes is released in any case.
        """
        with self._lock:
            self.phase = Phase.BETWEEN
            if self._copies:
                self._copy()
            self.phase = Phase.BEFORE_UPDATE
        with ExitStack() as self._update:
            yield
            self.phase = Phase.BETWEEN

    def before_update(self) -> None:
        """Say that the update begins, which waits for the end of `held`; to be called inside `step`.

        The host may be steps ahead of an accelerator that waits for a rank without memory. With several ranks
        it first waits for the gradients of all, so that the update is one that every rank makes.
        """
        if self._copies and self._world.is_distributed:
            synchronize(self._world.device)
        self._update.enter_context(self._lock)
        self.phase = Phase.UPDATE

    @torch.no_grad()
    def restore(self) -> None:
        """Bring the state before the step back; drop the gradients."""
        assert self._copies
        assert self.phase is Phase.BEFORE_UPDATE, "an update cannot be undone"
        self._assembly.optimizer.zero_grad(set_to_none=True)
        if self._assembly.scaler.is_enabled():  # the step may have noted that its gradients are unscaled
            self._assembly.scaler._per_optimizer_states.clear()
        if self._probe is not None and self._noise_scale is not None:
            self._probe.scale.load_state_dict(self._noise_scale)
        for registry, name, buffer, copy in self._buffers:
            buffer.copy_(copy)
            registry[name] = buffer  # a step may have put another tensor there
        set_rng_state(self._rng, self._world.device)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside the context, no update begins.

        Raises:
            LinnaeusError: the last update has failed, so that there is no whole state to read.
        """
        with self._lock:
            if self.phase is Phase.UPDATE:
                raise LinnaeusError("an update has failed, and some parameters may have changed already")
            yield

    @torch.no_grad()
    def before(self, content: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint's content as it was before the current step. Call it inside `held`.

        The current step's forward and backward passes may go on meanwhile.

        Args:
            content: with the model's and the loss's `state_dict` in `state`; its `rng` and `noise_scale` are
                replaced.
        """
        if self.phase is not Phase.BEFORE_UPDATE:
            return content | {"rng": [rng_state(self._world.device)]}
        copies = {(id(registry), name): copy for registry, name, _, copy in self._buffers}
        state = content["state"]
        for part in ("model", "criterion"):
            for path, module in getattr(self._assembly, part).named_modules(remove_duplicate=False):
                for name in module._buffers:
                    full_name = f"{path}.{name}".lstrip(".")
                    if full_name in state.get(part, {}):
                        state[part][full_name] = copies[id(module._buffers), name]
        return content | {"rng": [self._rng], "noise_scale": self._noise_scale}

    @contextmanager
    def beside_training(self) -> Iterator[None]:
        """Copies from the device, made inside the context, do not wait for collectives of other threads."""
        if self._begun is None:
            yield
            return
        stream = torch.cuda.Stream(self._world.device)
        stream.wait_event(self._begun)
        with torch.cuda.stream(stream):
            yield

    @torch.no_grad()
    def _copy(self) -> None:
        self._buffers = []  # frees the last step's copies before there are new ones
        self._buffers = [
            (module._buffers, name, buffer, buffer.clone())
            for module in self._modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._rng = rng_state(self._world.device)
        self._noise_scale = None if self._probe is None else self._probe.scale.state_dict()
        if self._world.is_distributed and self._world.device.type == "cuda":
            self._begun = torch.cuda.Event()
            self._begun.record()

    def _modules(self) -> Iterator[nn.Module]:
        yield from self._assembly.model.modules()
        yield from self._assembly.criterion.modules()
