"""The state before an optimizer step, from which the step can be taken again after it ran out of memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from linnaeus.dist import World
from linnaeus.memory.device import synchronize
from linnaeus.rng import rng_state, set_rng_state
from linnaeus.training.build import Assembly


class StepGuard:
    """Copies what forward and backward passes change: the buffers, and the random number generators' states.

    Gradients need no copy, there are none before a step. Parameters, optimizer, gradient scaler and average
    change only in the update, after which there is no way back.

        begin ──── forward, backward, clipping ──── before_update ──── update, progress ──── end
              the state before the step is here ───▶│◀── nowhere ──────────────────────────▶│ the state after

    Another thread may read the state inside `held`: meanwhile no update begins.

    Args:
        assembly: the model and what belongs to it.
        world: the processes.
    """

    def __init__(self, assembly: Assembly, world: World) -> None:
        self._assembly = assembly
        self._world = world
        self._lock = threading.Lock()
        self._is_open = False
        self._buffers: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        self._rng: dict[str, Any] = {}
        self._begun: torch.cuda.Event | None = None

    @property
    def is_open(self) -> bool:
        """Whether the state before the current step can be restored."""
        return self._is_open

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the state; call it before each optimizer step."""
        with self._lock:
            self._buffers = [
                (module._buffers, name, buffer, buffer.clone())
                for module in self._modules()
                for name, buffer in module._buffers.items()
                if buffer is not None
            ]
            self._rng = rng_state(self._world.device)
            if self._world.is_distributed and self._world.device.type == "cuda":
                self._begun = torch.cuda.Event()
                self._begun.record()
            self._is_open = True

    def before_update(self) -> None:
        """Say that the update begins, which waits for the end of `held`.

        The host may be steps ahead of an accelerator that waits for a rank without memory. With several ranks
        it first waits for the gradients of all, so that the update is one that every rank makes.
        """
        if self._world.is_distributed:
            synchronize(self._world.device)
        self._lock.acquire()
        self._is_open = False

    def end(self) -> None:
        """Say that the update is done, and the progress counted."""
        self._lock.release()

    @torch.no_grad()
    def restore(self) -> None:
        """Bring the state before the step back; drop the gradients."""
        assert self._is_open, "an update cannot be undone"
        self._assembly.optimizer.zero_grad(set_to_none=True)
        if self._assembly.scaler.is_enabled():  # the step may have noted that its gradients are unscaled
            self._assembly.scaler._per_optimizer_states.clear()
        self._restore_buffers()
        set_rng_state(self._rng, self._world.device)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside the context, no update begins."""
        with self._lock:
            yield

    @torch.no_grad()
    def state_before(self, state: dict[str, Any]) -> dict[str, Any]:
        """`TrainingState.state_dict()` with the buffers as they were before the step. Call it inside `held`.

        The current step's forward and backward passes may go on meanwhile.
        """
        if not self._is_open:
            return state
        copies = {(id(registry), name): copy for registry, name, _, copy in self._buffers}
        for part in ("model", "criterion"):
            for path, module in getattr(self._assembly, part).named_modules(remove_duplicate=False):
                for name in module._buffers:
                    full_name = f"{path}.{name}".lstrip(".")
                    if full_name in state.get(part, {}):
                        state[part][full_name] = copies[id(module._buffers), name]
        return state

    def rng_before(self) -> dict[str, Any]:
        """The generators' states before the step; inside `held`."""
        return self._rng if self._is_open else rng_state(self._world.device)

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

    def _restore_buffers(self) -> None:
        for registry, name, buffer, copy in self._buffers:
            buffer.copy_(copy)
            registry[name] = buffer  # a step may have put another tensor there

    def _modules(self) -> Iterator[nn.Module]:
        yield from self._assembly.model.modules()
        yield from self._assembly.criterion.modules()
