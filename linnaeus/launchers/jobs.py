"""Which runs go on, and ending them, whichever process has started them and by whichever launcher."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from linnaeus.errors import EXIT_INTERRUPTED, LinnaeusError
from linnaeus.launchers import slurm
from linnaeus.launchers.interface import Job
from linnaeus.launchers.outcome import OUTCOME, Outcome, read_outcome
from linnaeus.launchers.record import PROCESSES, is_locked, lives, read_record, write_slurm_record

START_S = 10.0
"""A process that has just been started says within this time who it is."""


def going(folders: Iterable[Path]) -> dict[Path, Job]:
    """The runs that go on or wait in a queue, by their folders."""
    found: dict[Path, Job] = {}
    on_slurm: dict[Path, dict[str, Any]] = {}
    for folder in folders:
        record = read_record(folder)
        if record is None or _has_ended_well(folder):
            continue
        if record["launcher"] == "slurm":
            on_slurm[folder] = record
        elif is_locked(folder):
            found[folder] = Job("running", _local_name(record), slot=record["slot"])
    if on_slurm:
        found |= _in_queue(on_slurm)
    return found


def _in_queue(records: dict[Path, dict[str, Any]]) -> dict[Path, Job]:
    """The runs whose job is in SLURM's queue; one that was submitted without a note of its number gets it."""
    queue = slurm.queue()
    if isinstance(queue, str):
        return {folder: slurm.unknown(record.get("id"), queue) for folder, record in records.items()}
    found = {}
    for folder, record in records.items():
        job_id = record.get("id") or queue.submitted.get((record["script"], record["index"]))
        if job_id in queue.jobs:
            found[folder] = queue.jobs[job_id]
            if "id" not in record:
                write_slurm_record(folder, job_id)
    return found


def lost(folder: Path) -> Outcome | None:
    """The outcome of a run that has been started and does not go on, but has not left one.

    Its process or its machine was killed, or its job was cancelled before it began. None for a run that
    nobody has started.
    """
    record = read_record(folder)
    if record is None or "script" in record:  # submitted perhaps, but never begun
        return None
    if record["launcher"] == "slurm":
        return Outcome(EXIT_INTERRUPTED, 0.0, slurm.why_gone(record["id"]))
    return Outcome(EXIT_INTERRUPTED, 0.0, f"{_local_name(record)} has ended without a word: it was killed")


def cancel(folders: Collection[Path]) -> None:
    """Ask runs to save a checkpoint and end; local ones that are asked again end at once.

    Raises:
        LinnaeusError: SLURM refuses, or does not answer; or a run goes on on another machine. The others have
            been asked.
    """
    records = [(folder, record) for folder in folders if (record := read_record(folder)) is not None]
    if ids := [record["id"] for _, record in records if "id" in record]:
        slurm.cancel(ids)
    elsewhere = []
    for folder, record in records:
        if record["launcher"] == "local" and is_locked(folder):
            if record["host"] == socket.gethostname():
                _cancel_local(folder)
            else:
                elsewhere.append(_local_name(record))
    if elsewhere:
        raise LinnaeusError(f"{', '.join(elsewhere)}: go on there, and can only be ended there (kill -INT)")


def cancel_command(folders: Collection[Path]) -> str:
    """How to cancel jobs of SLURM by hand, arrays as a whole; empty where none of the runs has one."""
    records = (read_record(folder) or {} for folder in folders)
    ids = dict.fromkeys(record["id"].partition("_")[0] for record in records if "id" in record)
    return f"scancel {' '.join(ids)}" if ids else ""


def _cancel_local(folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while is_locked(folder) and time.monotonic() < deadline:
        record = read_record(folder) or {}
        for name in PROCESSES:  # the training alone where its supervisor has been killed
            if name in record and lives(*record[name]):
                with suppress(ProcessLookupError):
                    os.kill(int(record[name][0]), signal.SIGINT)
                return
        time.sleep(0.05)  # it has just been started


def _has_ended_well(folder: Path) -> bool:
    """Whether whoever supervises the run says so; `result.json` alone is written before the process ends."""
    if not (folder / OUTCOME).exists():
        return False
    outcome = read_outcome(folder)
    return outcome is not None and outcome.finished


def _local_name(record: dict[str, Any]) -> str:
    pid = int(record.get("supervisor", [0])[0])
    return f"process {pid} on {record['host']}" if pid else f"a process on {record['host']}"
