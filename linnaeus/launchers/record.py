"""Who runs the run in a folder: `job.json`, and `job.lock`, which a run on this machine keeps locked.

The process that supervises a local run holds the lock, and so does the training that it has started, which
may outlive it. Other processes, also of other machines on a shared file system, see from it that the run
goes on; the number of a process could be another's by now.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from linnaeus.files import LOCK as RUN_LOCK
from linnaeus.files import read_holder, state_and_start, write_text_atomically
from linnaeus.launchers.outcome import read_json

RECORD, LOCK = "job.json", "job.lock"
PROCESSES = ("supervisor", "child")
"""Keys of a local run's record: the process that supervises it, and that which trains."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def read_record(folder: Path) -> dict[str, Any] | None:
    """Who runs the run of a folder, or has run it; None where nobody has, or the record is damaged."""
    record = read_json(folder / RECORD)
    return record if record is not None and _is_valid(record) else None


def _is_valid(record: dict[str, Any]) -> bool:
    if not isinstance(record.get("seconds", 0.0), int | float):
        return False
    if record.get("launcher") == "slurm":
        names = isinstance(record.get("script"), str) and isinstance(record.get("index"), int)
        return isinstance(record["id"], str) if "id" in record else names
    processes = [record[name] for name in PROCESSES if name in record]
    return (
        record.get("launcher") == "local"
        and isinstance(record.get("host"), str)
        and isinstance(record.get("slot"), int)
        and isinstance(record.get("env", {}), dict)
        and all(isinstance(one, list) and len(one) == 2 and isinstance(one[0], int) for one in processes)
    )


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write who runs the run, atomically.

    Raises:
        LinnaeusError, OSError: see `write_text_atomically`.
    """
    write_text_atomically(folder / RECORD, json.dumps(record) + "\n")


def update_record(folder: Path, **changes: Any) -> None:
    """Change some values of the record; raises what `write_record` does."""
    write_record(folder, {**(read_record(folder) or {}), **changes})


def write_slurm_record(folder: Path, job_id: str) -> None:
    """Note the number of the run's job of SLURM; raises what `write_record` does."""
    update_record(folder, launcher="slurm", id=job_id)


def forget_record(folder: Path) -> None:
    """Delete what an earlier job has left, before the next one begins."""
    for name in (RECORD, LOCK):
        (folder / name).unlink(missing_ok=True)


def open_locked(folder: Path, record: dict[str, Any]) -> int:
    """Lock the folder for a local run, and write its record.

    Returns:
        A descriptor; the folder is locked until all processes that inherit it have ended.

    Raises:
        LinnaeusError, OSError: a file cannot be written.
    """
    forget_record(folder)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        write_record(folder, record)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_locked(folder: Path) -> bool:
    """Whether a run that was started on a machine, this or another one, goes on.

    On this machine the lock alone proves nothing: data-loader workers inherit it and may outlive training,
    and torchrun's ranks do not inherit it (they hold the run's `.lock`).
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    has_locks = is_held = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        is_held = False
    except BlockingIOError:
        pass
    except OSError:  # a file system without locks
        has_locks = False
    finally:
        os.close(descriptor)
    return (is_held and _may_live(read_record(folder), has_locks)) or training_process(folder) is not None


def _may_live(record: dict[str, Any] | None, has_locks: bool) -> bool:
    """Whether a process that a record names lives, as far as can be seen from this machine."""
    if record is None or record.get("host") != socket.gethostname():
        return has_locks
    known = [record[name] for name in PROCESSES if name in record]
    return not known or any(lives(*one) for one in known)  # a supervisor has yet to say who it is


def training_process(folder: Path) -> int | None:
    """The process of this machine that holds the lock of the run (`linnaeus.files.FolderLock`).

    That lock is not tried: a run that starts at this moment would find it taken.
    """
    try:
        holder = read_holder(folder)
        if holder is None or not holder.is_here:
            return None
        lock = (folder / RUN_LOCK).stat()
        opened = [*Path(f"/proc/{holder.pid}/fd").iterdir()]
    except OSError:
        return None
    for path in opened:
        with suppress(OSError):  # closed meanwhile
            if os.path.samestat(path.stat(), lock):
                return holder.pid
    return None


def identity(pid: int) -> tuple[int, str]:
    """The number of a process and when it began, by no clock that can be set: a number may come again.

    Raises:
        OSError: there is no such process.
    """
    return pid, _state_and_start(pid)[1]


def lives(pid: int, start: str) -> bool:
    """Whether the process with this identity has not ended."""
    try:
        state, actual = _state_and_start(pid)
    except OSError:
        return False
    return actual == start and state not in "ZX"


def _state_and_start(pid: int) -> tuple[str, str]:
    """The letter of a process's state, and when it began, told from the same ticks after another boot."""
    state, start = state_and_start(pid)
    return state, f"{start} ticks after boot {_BOOT_ID.read_text().strip()}"
