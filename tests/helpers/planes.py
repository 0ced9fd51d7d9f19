"""Ranks that meet in a store of this process: as threads, or one after the other under a clock of a test."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed import HashStore, Store

from linnaeus.autobatch.ranks.heartbeat import ControlPlane
from linnaeus.runtime.errors import LinnaeusError
from tests.helpers.threads import together


class Script:
    """A clock that only runs while a rank pauses; the next event happens in each pause.

    Args:
        events: what the other ranks do, one in each pause; nothing after the last of them.
    """

    def __init__(self, *events: Callable[[], object]) -> None:
        self.events = list(events)
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        assert self.seconds < 10_000, "it waits for ever"
        self.seconds += seconds
        if self.events:
            self.events.pop(0)()


def nothing() -> None:
    """A pause without an event."""


def planes(
    num_ranks: int = 2,
    store: Store | None = None,
    kind: Callable[..., ControlPlane] = ControlPlane,
    **options: Any,
) -> list[ControlPlane]:
    """Control planes with a clock each, whose heartbeats only come when the test calls `look`."""
    store = store or HashStore()
    return [kind(store, rank, num_ranks, clock=Script(), **options) for rank in range(num_ranks)]


def script(plane: ControlPlane, *events: Callable[[], object]) -> Script:
    """The clock of a plane of `planes`, with events for the next pauses."""
    clock: Script = plane.clock
    clock.events += events
    return clock


def ranks(*works: Callable[[ControlPlane], Any], store: Store | None = None) -> list[Any]:
    """What each rank's work returns, or the error of Linnaeus that it raises; the ranks are threads."""
    shared = store or HashStore()

    def one(rank: int) -> Any:
        try:
            with ControlPlane(shared, rank, len(works)) as plane:
                return works[rank](plane)
        except LinnaeusError as error:
            return error

    return together(*(partial(one, rank) for rank in range(len(works))))
