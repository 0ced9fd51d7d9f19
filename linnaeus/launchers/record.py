"""`job.json` in a run's folder: who runs it.

The process of a local run keeps the file locked as long as it lives. So does the training that it has
started, which may outlive it. The lock tells other processes, also of other machines on a shared file system,
that the run goes on; a number of a process could be another's by now.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from linnaeus.files import write_text_atomically
from linnaeus.launchers.outcome import read_json

RECORD = "job.json"
PROCESSES = ("supervisor", "child")
"""Keys of a local run's record: the process that supervises it, and that which trains."""


def read_record(folder: Path) -> dict[str, Any] | None:
    """Who runs the run of a folder, or has run it; None where nobody has."""
    return read_json(folder / RECORD)


def write_slurm_record(folder: Path, job_id: str) -> None:
    """Note the job of SLURM that runs the run.

    Raises:
        LinnaeusError, OSError: see `write_text_atomically`.
    """
    write_text_atomically(folder / RECORD, json.dumps({"launcher": "slurm", "id": job_id}) + "\n")


def write_submission(folder: Path, script: Path, index: int) -> None:
    """Note which job is about to be submitted for the run, before it has a number.

    Whoever submits may be killed before SLURM's answer. The script's name then tells the job from others.

    Args:
        folder: the run's.
        script: that of the job, or of its array; no other submission has it.
        index: of the job in the array.

    Raises:
        LinnaeusError, OSError: see `write_text_atomically`.
    """
    content = {"launcher": "slurm", "script": str(script), "index": index}
    write_text_atomically(folder / RECORD, json.dumps(content) + "\n")


def forget_record(folder: Path) -> None:
    """Delete the record of an earlier job, before the next one begins."""
    with suppress(FileNotFoundError):
        (folder / RECORD).unlink()


def open_locked(folder: Path, content: dict[str, Any]) -> int:
    """Make the record of a local run and lock it.

    Returns:
        A descriptor; the record is locked until all processes that inherit it have ended.

    Raises:
        OSError: the file cannot be written.
    """
    forget_record(folder)
    descriptor = os.open(folder / RECORD, os.O_RDWR | os.O_CREAT, 0o666)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    rewrite(descriptor, content)
    return descriptor


def rewrite(descriptor: int, content: dict[str, Any]) -> None:
    """Replace the content of a record in its place: a new file would not be locked."""
    text = (json.dumps(content) + "\n").encode()
    os.pwrite(descriptor, text, 0)
    os.ftruncate(descriptor, len(text))


def is_locked(folder: Path) -> bool:
    """Whether a process that has inherited the record's lock lives.

    Where the file system has no locks, the processes of this machine are looked at instead.
    """
    try:
        descriptor = os.open(folder / RECORD, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return _is_alive(read_record(folder) or {})
    finally:
        os.close(descriptor)
    return False


def _is_alive(record: dict[str, Any]) -> bool:
    """Whether a process that a record names lives, or none has said yet who it is."""
    known = [record[name] for name in PROCESSES if name in record]
    return not known or any(lives(*one) for one in known)


def identity(pid: int) -> list[float]:
    """The number of a process and when it began, in seconds: another process may get the number later."""
    return [pid, psutil.Process(pid).create_time()]


def lives(pid: float, created: float) -> bool:
    """Whether the process with this identity has not ended."""
    try:
        process = psutil.Process(int(pid))
        return process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
