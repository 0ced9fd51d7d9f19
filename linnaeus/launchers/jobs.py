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
from linnaeus.launchers.local import VISIBLE_GPUS, named_gpus
from linnaeus.launchers.outcome import OUTCOME, OUTPUT, Outcome, read_outcome
from linnaeus.launchers.record import (
    PROCESSES,
    RECORD,
    is_locked,
    lives,
    read_record,
    training_process,
    write_slurm_record,
)

START_S = 10.0
"""A process that has just been started says within this time who it is."""


def active_jobs(folders: Iterable[Path]) -> dict[Path, Job]:
    """The runs that go on or wait in a queue, by their folders."""
    found: dict[Path, Job] = {}
    on_slurm: dict[Path, dict[str, Any]] = {}
    for folder in folders:
        if _has_ended_for_good(folder):
            continue
        record = read_record(folder) or {}
        if record.get("launcher") == "slurm":
            on_slurm[folder] = record
        elif is_locked(folder):
            gpus = record.get("env", {}).get(VISIBLE_GPUS)
            found[folder] = Job(
                "running", _local_name(record), slot=record.get("slot", -1),
                gpus=None if gpus is None else named_gpus(gpus),
            )  # fmt: skip
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


def lost_outcome(folder: Path) -> Outcome | None:
    """The outcome of a run that has been started and does not go on, but has not left one.

    Its process or its machine was killed, or its job was cancelled before it began. None for a run that
    nobody has started.
    """
    record = read_record(folder)
    if record is None or "script" in record:  # submitted perhaps, but never begun
        return None
    if record["launcher"] == "slurm":
        reason = slurm.why_gone(record["id"])
    else:
        reason = f"{_local_name(record)} ended without writing an outcome: killed, or {OUTPUT} says why"
    return Outcome(EXIT_INTERRUPTED, record.get("seconds", 0.0), reason)


def cancel(folders: Collection[Path]) -> None:
    """Ask runs to save a checkpoint and end; local ones that are asked again end at once.

    Raises:
        LinnaeusError: SLURM refuses, or does not answer; a run goes on on another machine, or has not said
            who it is. The others have been asked.
    """
    ids, here, problems = list[str](), list[Path](), list[str]()
    for folder in folders:
        record = read_record(folder) or {}
        if record.get("launcher") == "slurm":
            ids += [record["id"]] if "id" in record else []
        elif is_locked(folder):
            if record.get("host", socket.gethostname()) == socket.gethostname():
                here.append(folder)
            else:
                name = _local_name(record)
                problems.append(f"{name}: goes on there, and can only be ended there (kill -INT)")
    deadline = time.monotonic() + START_S
    while here := [folder for folder in here if is_locked(folder) and not _interrupt(folder)]:
        if time.monotonic() > deadline:
            names = ", ".join(str(folder / RECORD) for folder in here)
            problems.append(f"{names}: names no process to end, {START_S:g} s after it was asked; ask again")
            break
        time.sleep(0.05)  # they have just been started
    if ids:
        try:
            slurm.cancel(ids)
        except LinnaeusError as error:
            problems.append(str(error))
    if problems:
        raise LinnaeusError("; ".join(problems))


def cancel_command(folders: Collection[Path]) -> str:
    """How to cancel jobs of SLURM by hand, arrays as a whole; empty where none of the runs has one."""
    records = (read_record(folder) or {} for folder in folders)
    ids = dict.fromkeys(record["id"].partition("_")[0] for record in records if "id" in record)
    return f"scancel {' '.join(ids)}" if ids else ""


def _interrupt(folder: Path) -> bool:
    """Send SIGINT to the process in charge of a local run; returns whether one is known."""
    record = read_record(folder) or {}
    known = [record[name] for name in PROCESSES if name in record]
    # The training alone where its supervisor has been killed; a rank where torchrun has been, too.
    pid = next((pid for pid, start in known if lives(pid, start)), None) or training_process(folder)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
    return pid is not None


def _has_ended_for_good(folder: Path) -> bool:
    """Whether whoever supervises the run says that it has ended, and neither it nor SLURM goes on with it.

    `result.json` alone does not say so: it is written before the process ends.
    """
    if not (folder / OUTCOME).exists():
        return False
    outcome = read_outcome(folder)
    return outcome is not None and not outcome.was_interrupted


def _local_name(record: dict[str, Any]) -> str:
    on = f"on {record['host']}" if "host" in record else f"that {RECORD} does not name"
    pid = record.get("supervisor", [0])[0]
    return f"process {pid} {on}" if pid else f"a process {on}"
