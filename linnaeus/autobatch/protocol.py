"""How ranks work apart and agree: heartbeats and outcomes through the store, no collective meanwhile.

    working rank                          store                        waiting rank
    heartbeat every second ─────────────▶ beat/<rank>: "trying 128" ──▶ still alive? give up after 30 s
    result, or its error   ─────────────▶ outcome/<rank>            ──▶ take it
                                          read/<rank>               ◀── so that a rank that failed may leave

A process alone takes the same path without a store. Keys lie below the name of the exchange; torchrun's store
begins them with the number of the restart, so that no attempt reads the keys of the one before it.
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
"""Shortest and longest pause between two looks at the store; it grows with the time waited."""
SILENCE_S = 30.0
"""Without a heartbeat for this long, a rank counts as dead or hung."""
GRACE_S = 60.0
"""How much longer than the search's own deadline the others wait: it ends after the trial that is running."""
REPORT_S = 60.0
FAREWELL_S = 3.0
"""How long a rank that failed waits for the others to have read why."""

logger = logging.getLogger("linnaeus.autobatch")


class Status:
    """What a rank is doing, in words, for its heartbeat.

    Args:
        tell: called with every new text.
    """

    def __init__(self, tell: Callable[[str], None] = lambda text: None) -> None:
        self._tell = tell
        self.text = "starting"

    @property
    def text(self) -> str:
        """The words."""
        return self._text

    @text.setter
    def text(self, text: str) -> None:
        self._text = text
        self._tell(text)


def exchange(
    world: World, name: str, work: Callable[[Status], Any], *, timeout_minutes: float = 60.0
) -> list[Any]:
    """Let every rank work for as long as it needs, then give each rank the results of all.

    Waiting takes neither a collective (no watchdog, no timeout of the process group) nor the GPU.

    Args:
        world: the processes; all must call this with the same name.
        name: of this exchange, used once in the life of the process group.
        work: called with the status to keep up to date; must use no collective; gives something that JSON
            can hold.
        timeout_minutes: deadline of the work. It must end by itself then; others wait `GRACE_S` longer.

    Returns:
        The results in rank order.

    Raises:
        LinnaeusError: with its message and exit code, when another rank's work raised.
        AutoBatchError: when another rank fell silent, or did not end in time.
    """
    if not world.is_distributed or world.store is None:
        return [work(Status())]
    post = _ExchangeStore(torch_dist.PrefixStore(name, world.store), world)
    limit_s = timeout_minutes * 60 + GRACE_S
    with _last_words(post):
        post.put("outcome", _with_heartbeat(post, work))
        outcomes = [post.wait_for(rank, limit_s) for rank in range(world.world_size)]
    failed = [outcome for outcome in outcomes if "error" in outcome]
    if failed:
        post.put("read", True)
        error = LinnaeusError(failed[0]["error"])
        error.exit_code = failed[0]["exit_code"]
        raise error
    return [outcome["result"] for outcome in outcomes]


def _with_heartbeat(post: _ExchangeStore, work: Callable[[Status], Any]) -> dict[str, Any]:
    """The work's outcome for the store; a failure is posted, read by the others, and raised here."""
    status = Status(post.beat)
    try:
        with _heartbeat(post, status):
            return {"result": work(status)}
    except BaseException as error:
        message = str(error) if isinstance(error, LinnaeusError) else f"{type(error).__name__}: {error}"
        exit_code = error.exit_code if isinstance(error, LinnaeusError) else 1
        post.put("outcome", {"error": f"rank {post.rank}: {message}", "exit_code": exit_code})
        post.wait_until_read()
        raise


@contextmanager
def _heartbeat(post: _ExchangeStore, status: Status) -> Iterator[None]:
    """A sign of life every second, from a thread."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT_S):
            with suppress(MemoryError):  # the thread shares the memory cap of a trial
                post.beat(status.text)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def _last_words(post: _ExchangeStore) -> Iterator[None]:
    """Say why when the launcher ends this process: it does so as soon as another one has died."""
    if threading.current_thread() is not threading.main_thread():  # others may not handle signals
        yield
        return

    def explain(number: int, _: Any) -> None:
        print(f"[rank {post.rank}] {_why_ended(post)}", file=sys.stderr, flush=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, explain)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _why_ended(post: _ExchangeStore) -> str:
    dead = []
    with suppress(RuntimeError):  # the store may have gone with the process that kept it
        dead = [f"rank {rank} ({doing})" for rank, doing in post.dead()]
    if dead:
        return f"AutoBatch: {' and '.join(dead)} died, so that this rank was ended too"
    return "AutoBatch: this rank was ended from outside; the first error of the job says why"


@dataclass
class _ExchangeStore:
    """One exchange's keys in the store, read without blocking."""

    store: torch_dist.Store
    world: World
    beats: Iterator[int] = field(default_factory=itertools.count)

    @property
    def rank(self) -> int:
        return self.world.rank

    def put(self, kind: str, value: Any) -> None:
        """Post this rank's value."""
        self.store.set(f"{kind}/{self.rank}", json.dumps(value))

    def beat(self, doing: str) -> None:
        """Give a sign of life."""
        self.put("beat", {"count": next(self.beats), "doing": doing, **_identity()})

    def get(self, kind: str, rank: int) -> Any:
        """A rank's value; None when it has posted none."""
        key = f"{kind}/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def wait_for(self, rank: int, limit_s: float) -> dict[str, Any]:
        """A rank's outcome, as soon as it is there.

        Raises:
            AutoBatchError: the rank is silent, or takes longer than `limit_s`.
        """
        started = heard = reported = time.monotonic()
        beat: dict[str, Any] = {}
        if not self.world.is_main:  # it stays quiet: its console is the user's
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

    def dead(self) -> Iterator[tuple[int, str]]:
        """The ranks of this host whose process is gone, and what they were doing."""
        for rank in range(self.world.world_size):
            beat = self.get("beat", rank)
            if beat and _is_neighbour(beat) and not _is_alive(beat["pid"]):
                yield rank, beat["doing"]

    def wait_until_read(self) -> None:
        """Stay until the others know: torchrun ends them as soon as one process has failed."""
        others = [f"read/{rank}" for rank in range(self.world.world_size) if rank != self.rank]
        deadline = time.monotonic() + FAREWELL_S
        while not self.store.check(others) and time.monotonic() < deadline:
            time.sleep(POLL_S[0])


def _identity() -> dict[str, Any]:
    """Which process this is, for the ranks beside it. Process numbers hold within a namespace of one boot."""
    host = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        host = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return {"host": host, "agent": os.getppid(), "pid": os.getpid()}


def _is_neighbour(beat: dict[str, Any]) -> bool:
    """Whether a rank's process number means something here."""
    return beat.get("host") not in ("", None) and beat["host"] == _identity()["host"]


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end_hung_sibling(beat: dict[str, Any]) -> None:
    """Kill a hung rank of the same torchrun, whose own, polite signal it would not answer."""
    if _is_neighbour(beat) and beat["agent"] == os.getppid():
        with suppress(OSError):
            os.kill(beat["pid"], signal.SIGKILL)
