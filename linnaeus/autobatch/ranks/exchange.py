"""Exchange values and the first failure between ranks on the host, through the store of the process group.

    each rank                       store                       rank that waits
    its value of an exchange ─────▶ value/<number>/<rank> ────▶ returns the values of all
    its error, if it ends ────────▶ failure ──────────────────▶ raises it
                                    read/<rank> ◀────────────── then the failed rank may exit

No collective takes part, so that no timeout of the process group applies while ranks wait.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import pickle
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as torch_dist

from linnaeus.autobatch.errors import AutoBatchError, LinnaeusError

POLL_S = (0.001, 1.0)
"""Shortest and longest pause between two reads of a value; the pause grows with the time waited."""
REPORT_S = 30.0
"""Time between two log lines of a waiting rank."""
FAREWELL_S = 3.0
"""Longest time that a failed rank stays, so that the others can read its error."""
CAUSE_S = 1.5
"""Seconds to wait for a heartbeat that shows whether another rank's death caused an error."""

GONE = -1
"""Count of heartbeats of a rank that has not begun or has left."""

OnWait = Callable[[int, str], object]

logger = logging.getLogger("linnaeus.autobatch.ranks")


@dataclass(frozen=True)
class Failure:
    """The first error of the job: its rank, its message and its exit code."""

    rank: int
    message: str
    exit_code: int = 1

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Make the failure of a rank from the error that ends it."""
        exit_code = getattr(error, "exit_code", None)  # which our own errors have
        message = f"{type(error).__name__}: {error}" if exit_code is None else str(error)
        return cls(rank, message, exit_code or 1)


class JobFailedError(LinnaeusError):
    """Raised by the other ranks: the first failure of the job, with its exit code."""

    def __init__(self, failure: Failure, name: int) -> None:
        self.failure, self.exit_code = failure, failure.exit_code
        super().__init__(f"rank {name}: {failure.message.removeprefix('AutoBatch: ')}")


class OverdueError(AutoBatchError):
    """Raised where a rank lives but has not sent its value in time; with its name and its activity."""

    def __init__(self, rank: int, doing: str) -> None:
        self.rank, self.doing = rank, doing
        super().__init__(f"AutoBatch: rank {rank} takes too long; its activity: {doing}")


class Exchange:
    """Exchanges of values between ranks, and the first failure of the job.

    Every rank calls `gather`, `collect` and `broadcast` in the same order. These, and `check`, raise a
    `JobFailedError` if another rank has failed.

    Args:
        store: of the process group, with a prefix of this attempt's own. A blocking call needs a clone,
            because it shuts out calls of other threads.
        limit_s: a rank that others wait for at a barrier for so long hangs, although its process lives.
        name_of: the number that messages give to a rank, such as that among all ranks of the job.
        clock: has the functions `monotonic` and `sleep`.
    """

    def __init__(
        self,
        store: torch_dist.Store,
        rank: int,
        world_size: int,
        *,
        limit_s: float = 600.0,
        name_of: Callable[[int], int] = lambda rank: rank,
        clock: Any = time,
    ) -> None:
        self.rank, self.world_size, self.limit_s = rank, world_size, limit_s
        self.name_of, self.clock = name_of, clock
        self.store, self.keys = store, Keys(store)
        self.is_ending = False
        self._numbers = itertools.count()
        self._own_values: list[str] = []
        self._num_barriers = Counter[str]()

    # --- values ---

    def gather(
        self, value: Any, *, limit_s: float | None = None, on_wait: OnWait = lambda *_: None
    ) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank. They must be picklable.

        Args:
            limit_s: how long to wait for each of the others; None waits as long as they live.
            on_wait: called about every second with the name and the activity of the rank that this one
                waits for.

        Raises:
            OverdueError: a rank takes longer than `limit_s`.
        """
        number = self._publish(value)
        values = [self._wait_for(number, rank, limit_s, on_wait) for rank in range(self.world_size)]
        while (
            len(self._own_values) > 1
        ):  # all ranks read the previous value before they sent this one
            self.keys.delete(self._own_values.pop(0))
        return values

    def collect(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks, in rank order, on rank 0; None on the others, which do not wait."""
        number = self._publish(value)
        return (
            None if self.rank else [self._wait_for(number, rank) for rank in range(self.world_size)]
        )

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank. It must be picklable."""
        if self.rank == 0:
            self._publish(value)
            return value
        return self._wait_for(next(self._numbers), 0)

    def barrier(self, name: str, num_ranks: int) -> None:
        """Wait until `num_ranks` ranks have called this with the same name as often as this rank has.

        Raises:
            JobFailedError: a rank has failed or died, or one has not come within `limit_s`.
        """
        self._num_barriers[name] += 1
        key, wanted = f"barrier/{name}", self._num_barriers[name] * num_ranks
        self.store.add(key, 1)
        for waited_s in self._pauses(lambda: int(self.store.get(key)) >= wanted):
            if waited_s > self.limit_s:
                why = f"not all ranks reached the same collective within {self.limit_s:.0f} s"
                self.declare_hang(self.rank, why)

    def _publish(self, value: Any) -> int:
        self._raise_failure()
        number = next(self._numbers)
        self._own_values.append(f"value/{number}/{self.rank}")
        self.keys.put(self._own_values[-1], value)
        return number

    def _wait_for(
        self,
        number: int,
        rank: int,
        limit_s: float | None = None,
        on_wait: OnWait = lambda *_: None,
    ) -> Any:
        key, name = f"value/{number}/{rank}", self.name_of(rank)
        looked = reported = 0.0
        for waited_s in self._pauses(lambda: self.keys.exist([key])):
            if limit_s is not None and waited_s > limit_s:
                raise OverdueError(name, self.beat_of(rank).doing)
            if waited_s - looked > POLL_S[1]:
                looked, doing = waited_s, self.beat_of(rank).doing
                on_wait(name, doing)
                if waited_s - reported > REPORT_S:
                    reported = waited_s
                    logger.info("waiting %.0f s for rank %d: %s", waited_s, name, doing)
        return self.keys.get(key)

    def _pauses(self, is_there: Callable[[], bool]) -> Iterator[float]:
        """Pause until something is there; yield the seconds waited before each pause."""
        started = self.clock.monotonic()
        while True:
            has_failed = self.failure is not None  # read first: values sent before a failure count
            if is_there():
                return
            if has_failed:
                self._raise_failure()
            waited_s = self.clock.monotonic() - started
            yield waited_s
            self.clock.sleep(min(max(POLL_S[0], waited_s / 4), POLL_S[1]))

    # --- failures ---

    @property
    def failure(self) -> Failure | None:
        """The first failure of the job, this rank's own included; None if there is none."""
        return self.keys.get("failure")  # type: ignore[no-any-return]

    def declare_hang(self, rank: int, why: str) -> Failure:
        """Publish that a rank, or its collective, hangs; return the first failure."""
        first: Failure = self.keys.put_first("failure", Failure(rank, self.last_heard(why)))
        return first

    def last_heard(self, why: str) -> str:
        """Return a message that says why the job ends, and the last activity of each rank."""
        ranks: dict[str, list[str]] = {}
        for rank in range(self.world_size):
            ranks.setdefault(self.beat_of(rank).doing, []).append(str(self.name_of(rank)))
        lines = (f"\n  rank {', '.join(names)}: {doing}" for doing, names in ranks.items())
        return f"{why}. Last heard of:{''.join(lines)}"

    def publish(self, error: BaseException, *, always_raise: bool = False) -> None:
        """Publish an error of this rank.

        Args:
            error: the error.
            always_raise: raise `JobFailedError` for this rank's own failure too.

        Raises:
            JobFailedError: the failure of another rank came first; `error` is its cause.
        """
        failure = Failure.of(self.rank, error)
        first = self.fail(self.cause_of(error) or failure)
        is_other = first.rank != self.rank and first.message != failure.message
        if always_raise or (is_other and isinstance(error, Exception)):
            raise JobFailedError(first, self.name_of(first.rank)) from error

    def cause_of(self, error: BaseException) -> Failure | None:
        """Return the failure that came before this rank's error; None if none is known."""
        # Where another rank has died, backends raise a RuntimeError, and torchrun sends SIGTERM.
        may_follow = (
            isinstance(error, RuntimeError) or getattr(error, "signal", None) == signal.SIGTERM
        )
        return self.first_failure(CAUSE_S if may_follow else 0.0)

    def first_failure(self, wait_s: float) -> Failure | None:
        """Return the job's first failure or a rank's death; None if neither is known within `wait_s`."""
        deadline = self.clock.monotonic() + wait_s
        failure = self.failure
        while failure is None and self.clock.monotonic() < deadline:
            self.clock.sleep(0.05)
            failure = self.failure or self.death()
        return failure

    def fail(self, failure: Failure) -> Failure:
        """Publish a failure, unless there is one already, and return the first of the job.

        The others have `FAREWELL_S` seconds to read it: the launcher ends them as soon as this process exits.
        """
        self.is_ending = True
        first: Failure = self.keys.put_first("failure", failure)
        self.keys.put(f"read/{self.rank}", True)
        deadline = self.clock.monotonic() + FAREWELL_S
        while self.clock.monotonic() < deadline:
            states = ((rank, self.beat_of(rank).status()) for rank in range(self.world_size))
            alive = [rank for rank, state in states if state != psutil.STATUS_ZOMBIE]
            if self.keys.exist([f"read/{rank}" for rank in alive]):
                break
            self.clock.sleep(0.05)
        return first

    def death(self) -> Failure | None:
        """Return the death of a rank whose process on this machine has ended without a failure, if any."""
        deaths = (
            self.beat_of(rank).death(rank) for rank in range(self.world_size) if rank != self.rank
        )
        return next(filter(None, deaths), None)

    def check(self) -> None:
        """Raise the failure of another rank, if there is one."""
        with contextlib.suppress(torch_dist.DistError):
            self._raise_failure()

    def _raise_failure(self) -> None:
        if (failure := self.failure) is not None:
            self.keys.put(f"read/{self.rank}", True)
            raise JobFailedError(failure, self.name_of(failure.rank))

    def beat_of(self, rank: int) -> Beat:
        """Return the last heartbeat of a rank."""
        return self.keys.get(f"beat/{rank}") or Beat()


@dataclass(frozen=True)
class Beat:
    """One heartbeat. A PID is valid within one PID namespace of one boot."""

    count: int = GONE
    doing: str = "starting"
    namespace: str = ""
    pid: int = 0

    def is_on_this_machine(self) -> bool:
        """Return whether the PID is valid on this machine and in this namespace."""
        return self.namespace == pid_namespace() != ""

    def status(self) -> str:
        """Return psutil's status of the process: a zombie once it has ended. Empty if unknown."""
        if not self.is_on_this_machine():
            return ""
        try:
            return psutil.Process(self.pid).status()
        except psutil.NoSuchProcess:
            return psutil.STATUS_ZOMBIE
        except OSError:  # too many open files
            return ""

    def death(self, rank: int) -> Failure | None:
        """Return the failure of a rank whose process has ended without leaving; else None."""
        if self.count == GONE or self.status() != psutil.STATUS_ZOMBIE:
            return None
        return Failure(rank, f"its process died ({self.doing}), so the job ends")


class Keys:
    """Picklable values in a store, which takes up to 8 MiB of bytes for each; no read blocks."""

    def __init__(self, store: torch_dist.Store) -> None:
        self._store = store

    def put(self, key: str, value: Any) -> None:
        """Give a key a value."""
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]

    def put_first(self, key: str, value: Any) -> Any:
        """Put a value unless the key has one; return the value of the key."""
        return pickle.loads(self._store.compare_set(key, "", pickle.dumps(value)))  # type: ignore[arg-type]

    def get(self, key: str) -> Any:
        """Return the value of a key; None if it has none."""
        return pickle.loads(self._store.get(key)) if self._store.check([key]) else None

    def exist(self, keys: list[str]) -> bool:
        """Return whether all these keys have values."""
        return bool(self._store.check(keys))

    def delete(self, key: str) -> None:
        """Delete a key that has a value."""
        self._store.delete_key(key)


def first_difference(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[int, dict[str, tuple[Any, Any]]] | None:
    """Return the first rank with other facts than rank 0, and both values of each different fact."""
    for rank, row in enumerate(rows):
        pairs = {name: (value, row.get(name)) for name, value in rows[0].items()}
        if different := {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}:
            return rank, different
    return None


@functools.cache
def pid_namespace() -> str:
    """Return an id of the boot and the PID namespace of this process; empty if unknown."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""
