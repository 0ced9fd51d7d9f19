"""Exchange results between ranks through the key-value store, without a collective.

    working rank                          store                        waiting rank
    heartbeat every second ─────────────▶ beat/<rank>: "trying 128" ──▶ still alive? give up after 30 s
    result, or its error   ─────────────▶ outcome/<rank>            ──▶ return or raise it
                                          read/<rank>               ◀── the failed rank may exit

Keys are prefixed with the name of the exchange and, under torchrun, the number of the restart: an attempt
never reads the keys of an earlier one.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as torch_dist

from linnaeus.dist import World
from linnaeus.errors import AutoBatchError, LinnaeusError

BEAT_S = 1.0
POLL_S = (0.05, 1.0)
"""Shortest and longest pause between two reads of the store; the pause grows with the time waited."""
SILENCE_S = 30.0
"""A rank without a heartbeat for this long counts as dead or hung."""
GRACE_S = 60.0
"""Time that the others wait beyond the deadline of the work: a search finishes its current trial first."""
REPORT_S = 60.0
"""A waiting rank logs this often what it waits for."""
FAREWELL_S = 3.0
"""Longest time that a failed rank stays, so that the others can read its error."""

logger = logging.getLogger("linnaeus.autobatch")


class RankStatus:
    """What a rank is doing, for its heartbeat.

    Args:
        tell: called with each new text.

    Attributes:
        text: the latest, such as `train: trying batch size 128`.
    """

    def __init__(self, tell: Callable[[str], None] = lambda text: None) -> None:
        self._tell = tell
        self.update("starting")

    def update(self, text: str) -> None:
        """Replace the text."""
        self.text = text
        self._tell(text)


def exchange(
    world: World, name: str, work: Callable[[RankStatus], Any], *, timeout_minutes: float = 60.0
) -> list[Any]:
    """Call `work` on every rank, wait for all ranks, and return their results.

    Waiting uses neither the GPU nor a collective, so that no timeout of the process group applies.

    Args:
        world: the processes; each must call this with the same name.
        name: of this exchange; each name can be used once per process group.
        work: updates the status that it is given, uses no collective, and returns a value for JSON.
        timeout_minutes: after this time the work must end by itself; the others wait `GRACE_S` longer.

    Returns:
        The results in rank order.

    Raises:
        LinnaeusError: the work of another rank raised; with that rank's message and exit code.
        AutoBatchError: another rank is silent, or has not finished in time.
    """
    if not world.is_distributed or world.store is None:
        return [work(RankStatus())]
    store = _ExchangeStore(torch_dist.PrefixStore(name, world.store), world)
    limit_s = timeout_minutes * 60 + GRACE_S
    with _last_words(store):
        store.put("outcome", _with_heartbeat(store, work))
        outcomes = [store.wait_for(rank, limit_s) for rank in range(world.world_size)]
    failed = [outcome for outcome in outcomes if "error" in outcome]
    if failed:
        store.put("read", True)
        error = LinnaeusError(failed[0]["error"])
        error.exit_code = failed[0]["exit_code"]
        raise error
    return [outcome["result"] for outcome in outcomes]


def _with_heartbeat(store: _ExchangeStore, work: Callable[[RankStatus], Any]) -> dict[str, Any]:
    """Do the work and return its outcome for the store; if it fails, publish the error before raising it."""
    status = RankStatus(store.beat)
    try:
        with _heartbeat(store, status):
            return {"result": work(status)}
    except BaseException as error:
        message = str(error) if isinstance(error, LinnaeusError) else f"{type(error).__name__}: {error}"
        exit_code = error.exit_code if isinstance(error, LinnaeusError) else 1
        store.put("outcome", {"error": f"rank {store.world.rank}: {message}", "exit_code": exit_code})
        store.wait_until_read()
        raise


@contextmanager
def _heartbeat(store: _ExchangeStore, status: RankStatus) -> Iterator[None]:
    """Send a heartbeat every second from a thread."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT_S):
            with suppress(MemoryError):  # a trial's memory cap applies to this thread too
                store.beat(status.text)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def _last_words(store: _ExchangeStore) -> Iterator[None]:
    """On SIGTERM, print why: torchrun sends it to all ranks as soon as one has died."""
    if threading.current_thread() is not threading.main_thread():  # only that one may set signal handlers
        yield
        return

    def explain(number: int, _: Any) -> None:
        print(f"[rank {store.world.rank}] {_why_ended(store)}", file=sys.stderr, flush=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, explain)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _why_ended(store: _ExchangeStore) -> str:
    dead = []
    with suppress(RuntimeError):  # the process that hosts the store may be the one that died
        for rank in range(store.world.world_size):
            beat = store.get("beat", rank)
            if beat and _is_neighbour(beat) and not _is_alive(beat["pid"]):
                dead.append(f"rank {rank} ({beat['doing']})")
    if dead:
        return f"AutoBatch: {' and '.join(dead)} died, so that this rank was ended too"
    return "AutoBatch: this rank was ended from outside; the first error of the job says why"


@dataclass
class _ExchangeStore:
    """The keys of one exchange; no read blocks."""

    store: torch_dist.Store
    world: World
    beats: Iterator[int] = field(default_factory=itertools.count)

    def put(self, kind: str, value: Any) -> None:
        """Publish this rank's value."""
        self.store.set(f"{kind}/{self.world.rank}", json.dumps(value))

    def get(self, kind: str, rank: int) -> Any:
        """A rank's value; None if it has not published one."""
        key = f"{kind}/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def beat(self, doing: str) -> None:
        """Publish a heartbeat."""
        self.put("beat", {"count": next(self.beats), "doing": doing, **_identity()})

    def wait_for(self, rank: int, limit_s: float) -> dict[str, Any]:
        """Wait for a rank's outcome.

        Raises:
            AutoBatchError: the rank is silent, or takes longer than `limit_s`.
        """
        started = heard = reported = time.monotonic()
        beat: dict[str, Any] = {}
        if not self.world.is_main:  # rank 0 logs to the user's console
            logger.info("waiting for rank %d", rank)
        while (outcome := self.get("outcome", rank)) is None:
            now = time.monotonic()
            newest = self.get("beat", rank) or {}
            if newest.get("count") != beat.get("count"):
                beat, heard = newest, now
            if now - heard > SILENCE_S:
                _end_hung_sibling(beat)
                raise AutoBatchError(
                    f"AutoBatch: rank {rank} has given no sign of life for {SILENCE_S:.0f} s: it died or "
                    f"hangs (last heard of: {beat.get('doing', 'nothing')})"
                )
            if now - started > limit_s:
                raise AutoBatchError(
                    f"AutoBatch: rank {rank} has taken longer than DATA.AUTOBATCH.TIMEOUT_MINUTES and "
                    f"{GRACE_S:.0f} s more (it is {beat.get('doing', 'silent')}); raise the timeout or lower "
                    "DATA.AUTOBATCH.MAX_TRIALS"
                )
            if now - reported > REPORT_S:
                reported = now
                logger.info("waiting %.0f s for rank %d: %s", now - started, rank, beat.get("doing"))
            time.sleep(min(max(POLL_S[0], (now - started) / 4), POLL_S[1]))
        return dict(outcome)

    def wait_until_read(self) -> None:
        """Wait until the others have read the error: torchrun ends them as soon as this process exits."""
        others = [f"read/{rank}" for rank in range(self.world.world_size) if rank != self.world.rank]
        deadline = time.monotonic() + FAREWELL_S
        while not self.store.check(others) and time.monotonic() < deadline:
            time.sleep(POLL_S[0])


def _identity() -> dict[str, Any]:
    """Identifies this process to other ranks. A PID is valid within one PID namespace of one boot."""
    host = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        host = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return {"host": host, "agent": os.getppid(), "pid": os.getpid()}


def _is_neighbour(beat: dict[str, Any]) -> bool:
    """Whether the PID in a rank's heartbeat is valid in this process."""
    return beat.get("host") not in ("", None) and beat["host"] == _identity()["host"]


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end_hung_sibling(beat: dict[str, Any]) -> None:
    """Kill a hung rank started by the same torchrun, whose SIGTERM it would not react to."""
    if _is_neighbour(beat) and beat["agent"] == os.getppid():
        with suppress(OSError):
            os.kill(beat["pid"], signal.SIGKILL)
