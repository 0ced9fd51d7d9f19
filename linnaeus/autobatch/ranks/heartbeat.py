"""The heartbeat of each rank: ranks monitor each other, so that a rank that dies or hangs ends the job.

    each rank                       store                       each other rank
    heartbeat every second ───────▶ beat/<rank>: "trying 128"   looks whether the others still live

Rank 0 monitors every rank; every other rank monitors rank 0. A process of this machine that has died ends the
job at once, one that is stopped after `SILENCE_LOOKS` looks. A silent process that runs may hold the GIL: it
is logged then, and ends the job after `limit_s`. Launchers see processes of other machines die. Looks are
counted, not seconds: a suspended process finds no rank silent after it wakes up.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Self

import psutil
import torch.distributed as torch_dist

from linnaeus.autobatch.ranks.exchange import (
    FAREWELL_S,
    GONE,
    Beat,
    Exchange,
    Failure,
    JobFailedError,
    Keys,
    pid_namespace,
)

BEAT_S = 1.0
"""Time between two heartbeats, and between two looks at the other ranks."""
SILENCE_LOOKS = 30
"""Looks without a new heartbeat after which a rank is named, or ends the job because it is stopped."""
ABANDON_LOOKS = 10
"""Heartbeats after a failure until a rank that has not raised it is killed as hung in a collective."""

logger = logging.getLogger("linnaeus.autobatch.ranks")


class ControlPlane(Exchange):
    """An exchange of ranks that monitor each other. Use it as a context.

    Its methods also raise a `JobFailedError` if another rank has died.

    Args:
        limit_s: a rank without a heartbeat for so long hangs, although its process lives.
        store, rank, and the others: as for `Exchange`.

    Attributes:
        communicates: whether this rank may be inside a collective. If it does not raise the failure of
            another rank within `ABANDON_LOOKS` heartbeats, it waits for ranks that will not come, and only
            the end of its process gets it out of there.
    """

    communicates = False

    def __init__(self, store: torch_dist.Store, rank: int, world_size: int, **options: Any) -> None:
        super().__init__(store, rank, world_size, **options)
        self._doing: str | Callable[[], str] = "starting"
        self._own_keys = Keys(store.clone())  # of the thread
        self._counts = itertools.count()
        # For each rank that this one monitors: the count of its last heartbeat, and the looks since.
        self.watched = dict.fromkeys(range(1, world_size) if rank == 0 else range(1), (GONE, 0))
        self._looks_after_failure = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._beat(self._own_keys)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(FAREWELL_S)
        if not self._thread.is_alive():  # else the store does not answer
            self._own_keys = self.keys  # lets the thread's connection go
            with contextlib.suppress(torch_dist.DistError):
                self._beat(self.keys)  # says that it leaves

    def update(self, doing: str | Callable[[], str]) -> None:
        """Set the activity shown if this rank fails or hangs. The heartbeat thread evaluates a callable."""
        self._doing = doing
        with contextlib.suppress(torch_dist.DistError):
            self._beat(self.keys)

    def neighbours(self) -> list[int]:
        """Return the process ids of the ranks on this machine that have begun their heartbeat."""
        beats = map(self.beat_of, range(self.world_size))
        return [beat.pid for beat in beats if beat.is_on_this_machine()]

    def end_process(self, failure: Failure) -> None:
        """End this process, which hangs in a collective, with the first failure of the job."""
        error = JobFailedError(failure, self.name_of(failure.rank))
        sys.stdout.flush()
        print(f"AutoBatch: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)

    def look(self) -> None:
        """Send a heartbeat and look at the other ranks: a thread does so every `BEAT_S` seconds."""
        self._beat(self._own_keys)
        failure = self._own_keys.get("failure")
        if failure is None:
            self._look_for_silence(self._own_keys)
            return
        self._own_keys.put(f"read/{self.rank}", True)
        self._looks_after_failure += 1
        is_abandoned = self._looks_after_failure > ABANDON_LOOKS
        if is_abandoned and self.communicates and not self.is_ending:
            self.end_process(failure)

    def _run(self) -> None:
        # After the process that hosts the store has ended, no rank can be heard. The rest of training, such
        # as a last checkpoint, needs no store.
        with contextlib.suppress(torch_dist.DistError):
            while not self._closed.wait(BEAT_S):
                with contextlib.suppress(MemoryError):  # a trial's cap applies to this thread too
                    self.look()

    def _beat(self, keys: Keys) -> None:
        count = GONE if self._closed.is_set() else next(self._counts)
        doing = self._doing if isinstance(self._doing, str) else self._doing()
        keys.put(f"beat/{self.rank}", Beat(count, doing, pid_namespace(), os.getpid()))

    def _look_for_silence(self, keys: Keys) -> None:
        for rank, (last_count, looks) in self.watched.items():
            beat = keys.get(f"beat/{rank}") or Beat()
            if beat.count == GONE:
                continue
            looks = looks + 1 if beat.count == last_count else 0
            self.watched[rank] = beat.count, looks
            if death := beat.death(rank):
                keys.put_first("failure", death)
            elif looks and looks % SILENCE_LOOKS == 0:
                status, seconds = beat.status() or "on another machine", looks * BEAT_S
                silence = f"no heartbeat for {seconds:.0f} s; its process {beat.pid} is {status}"
                if seconds >= self.limit_s or status == psutil.STATUS_STOPPED:
                    self.declare_hang(rank, silence)
                else:
                    name = self.name_of(rank)
                    logger.warning("rank %d (%s): %s; waiting", name, beat.doing, silence)
