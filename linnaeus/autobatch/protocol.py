"""How ranks work apart and agree: heartbeats and outcomes through the store, no collective meanwhile.

    working rank                          store                        waiting rank
    heartbeat every second ─────────────▶ beat/<rank>: "trying 128" ──▶ still alive? give up after 30 s
    result, or its error   ─────────────▶ outcome/<rank>            ──▶ take it
                                          read/<rank>               ◀── so that a rank that failed may leave

A process alone takes the same path without a store. Keys lie below the name of the exchange; torchrun's store
begins them with the number of the restart, so that no attempt reads the keys of the one before it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as torch_dist

from linnaeus.dist import World
from linnaeus.errors import AutoBatchError, LinnaeusError

BEAT_S = 1.0
POLL_S = 0.2
SILENCE_S = 30.0
"""Without a heartbeat for this long, a rank counts as dead or hung."""
GRACE_S = 60.0
"""How much longer than the search's own deadline the others wait: it ends after the trial that is running."""
REPORT_S = 60.0
FAREWELL_S = 3.0
"""How long a rank that failed waits for the others to have read why."""

logger = logging.getLogger("linnaeus.autobatch")


class Status:
    """What a rank is doing, in words, for its heartbeat."""

    def __init__(self) -> None:
        self.text = "starting"


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
    post = _Post(torch_dist.PrefixStore(name, world.store), world)
    post.put("outcome", _with_heartbeat(post, work))
    limit_s = timeout_minutes * 60 + GRACE_S
    outcomes = [post.wait_for(rank, limit_s) for rank in range(world.world_size)]
    failed = [outcome for outcome in outcomes if "error" in outcome]
    if failed:
        post.put("read", True)
        error = LinnaeusError(failed[0]["error"])
        error.exit_code = failed[0]["exit_code"]
        raise error
    return [outcome["result"] for outcome in outcomes]


def _with_heartbeat(post: _Post, work: Callable[[Status], Any]) -> dict[str, Any]:
    """The work's outcome for the store; a failure is posted, read by the others, and raised here."""
    status = Status()
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
def _heartbeat(post: _Post, status: Status) -> Iterator[None]:
    """A sign of life every second, from a thread."""
    done = threading.Event()

    def beat() -> None:
        count = 0
        while True:
            count += 1
            with suppress(MemoryError):  # the thread shares the memory cap of a trial
                post.put("beat", {"count": count, "doing": status.text, **_identity()})
            if done.wait(BEAT_S):
                return

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@dataclass
class _Post:
    """One exchange's keys in the store, read without blocking."""

    store: torch_dist.Store
    world: World

    @property
    def rank(self) -> int:
        return self.world.rank

    def put(self, kind: str, value: Any) -> None:
        """Post this rank's value."""
        self.store.set(f"{kind}/{self.rank}", json.dumps(value))

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
            time.sleep(POLL_S)
        return dict(outcome)

    def wait_until_read(self) -> None:
        """Stay until the others know: torchrun ends them as soon as one process has failed."""
        others = [f"read/{rank}" for rank in range(self.world.world_size) if rank != self.rank]
        deadline = time.monotonic() + FAREWELL_S
        while not self.store.check(others) and time.monotonic() < deadline:
            time.sleep(POLL_S / 2)


def _identity() -> dict[str, Any]:
    """Which process this is, for the ranks that torchrun started beside it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {
        "host": boot.read_text().strip() if boot.exists() else "",
        "agent": os.getppid(),
        "pid": os.getpid(),
    }


def _end_hung_sibling(beat: dict[str, Any]) -> None:
    """Kill a hung rank of the same torchrun, whose own, polite signal it would not answer."""
    mine = _identity()
    if mine["host"] and beat.get("host") == mine["host"] and beat.get("agent") == mine["agent"]:
        with suppress(OSError):
            os.kill(beat["pid"], signal.SIGKILL)
