"""Ranks stop after the same optimizer step: otherwise some would wait for others for ever."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import torch

from linnaeus.runtime.distributed import World
from linnaeus.runtime.signals import StopRequest

CHECK_S = 0.5
"""Ranks exchange about so often whether any of them was asked to stop."""
MOST_STEPS = 16
"""Most optimizer steps between two exchanges, however fast they are: steps may become slower."""


class StopAgreement:
    """The ranks' agreement on whether to stop.

    The exchange is one small sum on the host. How many steps later the next one comes follows from the
    seconds per step of the slowest rank, which the exchange carries too, so that all ranks know it.

    Args:
        world: the ranks.
        request: whether this process was asked to stop.

    Attributes:
        stop_signal: the signal that stops the run; 0 without one. The same on all ranks.
    """

    def __init__(self, world: World, request: StopRequest) -> None:
        self.stop_signal = 0
        self._world = world
        self._request = request
        self._num_steps = 0
        self._next_exchange = 1
        self._last_exchange = time.monotonic()

    def deferred(self) -> AbstractContextManager[None]:
        """Return the context in which signals are only noted."""
        return self._request.deferred()

    @property
    def is_requested(self) -> bool:
        """Whether this rank was asked to stop; others may not know yet."""
        return bool(self._request.stop_signal)

    def after_step(self) -> None:
        """Exchange, if it is time to; every rank must call this after every optimizer step."""
        if not self._world.is_distributed:
            self.stop_signal = self._request.stop_signal
            return
        self._num_steps += 1
        if self._num_steps >= self._next_exchange:
            self.exchange()

    def exchange(self) -> None:
        """Exchange now. Collective."""
        now = time.monotonic()
        step_s = (now - self._last_exchange) / max(self._num_steps, 1)
        values = torch.tensor([self._request.stop_signal, step_s], dtype=torch.float64)
        stop_signal, slowest_s = self._world.reduce(values, "MAX").tolist()
        self.stop_signal = int(stop_signal)
        self._num_steps, self._last_exchange = 0, now
        self._next_exchange = min(max(int(CHECK_S / max(slowest_s, 1e-6)), 1), MOST_STEPS)
