"""Ranks that meet in a store of this process: as threads, or one after the other under a clock of a test."""

from functools import partial

from torch.distributed import HashStore

from linnaeus.autobatch.ranks.heartbeat import ControlPlane
from linnaeus.runtime.errors import LinnaeusError
from tests.helpers.threads import together


class ScriptedClock:
    """A clock that only runs while a rank pauses.

    Args:
        events: functions, one for each pause in this order: what the other ranks do then.
    """

    def __init__(self, *events):
        self.events = list(events)
        self.seconds = 0.0

    def monotonic(self):
        return self.seconds

    def sleep(self, seconds):
        assert self.seconds < 10_000, "it waits for ever"
        self.seconds += seconds
        if self.events:
            self.events.pop(0)()


def nothing():
    """A pause without an event."""


def control_planes(num_ranks=2, kind=ControlPlane, **options):
    """Control planes with a clock each, whose heartbeats only come when the test calls `look`."""
    store = HashStore()
    return [
        kind(store, rank, num_ranks, clock=ScriptedClock(), **options) for rank in range(num_ranks)
    ]


def add_events(plane, *events):
    """Add events for the next pauses to the clock of a plane, and return the clock."""
    plane.clock.events += events
    return plane.clock


def ranks(*works, store=None):
    """What each rank's work returns, or the error of Linnaeus that it raises; the ranks are threads."""
    shared = store or HashStore()

    def one(rank):
        try:
            with ControlPlane(shared, rank, len(works)) as plane:
                return works[rank](plane)
        except LinnaeusError as error:
            return error

    return together(*(partial(one, rank) for rank in range(len(works))))
