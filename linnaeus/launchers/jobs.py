"""Which runs go on, and ending them, whichever process has started them and by whichever launcher."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from linnaeus.errors import EXIT_INTERRUPTED, LinnaeusError
from linnaeus.files import OUTCOME
from linnaeus.launchers import slurm_commands
from linnaeus.launchers.interface import Job
from linnaeus.launchers.local import VISIBLE_GPUS, named_gpus
from linnaeus.launchers.outcome import OUTPUT, Outcome, read_outcome
from linnaeus.launchers.record import (
    PROCESSES,
    RECORD,
    is_locked,
    lives,
    read_record,
    training_process,
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
    """The runs whose job is in SLURM's queue."""
    queue = slurm_commands.queue()
    if isinstance(queue, str):
        return {folder: slurm_commands.unknown(record.get("id"), queue) for folder, record in records.items()}
    ids = {folder: _job_id(record, queue) for folder, record in records.items()}
    return {folder: queue.jobs[job_id] for folder, job_id in ids.items() if job_id in queue.jobs}


def _job_id(record: dict[str, Any], queue: slurm_commands.Queue) -> str | None:
    """The number of a run's job, also of one that was submitted without a note of it; None without a job."""
    return record.get("id") or queue.submitted.get((record["script"], record["index"]))


def lost_outcome(folder: Path) -> Outcome | None:
    """The outcome of a run that has been started and does not go on, but has not left one.

    Its process or its machine was killed, or its job was cancelled before it began. None for a run that
    nobody has started.
    """
    record = read_record(folder)
    if record is None:
        return None
    if record["launcher"] == "slurm":
        if "id" not in record:  # submitted perhaps, but never begun
            return None
        reason = slurm_commands.why_gone(record["id"])
    else:
        reason = f"{_local_name(record)} ended without writing an outcome: killed, or {OUTPUT} says why"
    return Outcome(EXIT_INTERRUPTED, record.get("seconds", 0.0), reason)


def cancel(folders: Collection[Path]) -> None:
    """Ask runs to save a checkpoint and end; local ones that are asked again end at once.

    Raises:
        LinnaeusError: SLURM refuses, or does not answer; a run goes on on another machine, or has not said
            who it is. The others have been asked.
    """
    on_slurm, here, problems = list[dict[str, Any]](), list[Path](), list[str]()
    for folder in folders:
        record = read_record(folder) or {}
        if record.get("launcher") == "slurm":
            on_slurm.append(record)
        elif is_locked(folder):
            if record.get("host", socket.gethostname()) == socket.gethostname():
                here.append(folder)
            else:
                name = _local_name(record)
                problems.append(f"{name}: goes on there, and can only be ended there (kill -INT)")
    if problems := [*problems, *_interrupt_all(here), *_cancel_all(on_slurm)]:
        raise LinnaeusError("; ".join(problems))


def _interrupt_all(folders: Sequence[Path]) -> list[str]:
    """Ask local runs of this machine to end; returns a sentence on those that name no process in time."""
    deadline = time.monotonic() + START_S
    while folders := [folder for folder in folders if is_locked(folder) and not _interrupt(folder)]:
        if time.monotonic() > deadline:
            names = ", ".join(str(folder / RECORD) for folder in folders)
            return [f"{names}: names no process to end, {START_S:g} s after it was asked; ask again"]
        time.sleep(0.05)  # they have just been started
    return []


def _cancel_all(records: Sequence[dict[str, Any]]) -> list[str]:
    """Cancel jobs of SLURM; returns a sentence for each problem."""
    ids, problems = _job_ids(records)
    if ids:
        try:
            slurm_commands.cancel(ids)
        except LinnaeusError as error:
            problems.append(str(error))
    return problems


def _job_ids(records: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """The numbers of jobs of SLURM, and a sentence for each script whose job has an unknown one.

    SLURM is asked for those that nobody has noted; one that was never submitted has none.
    """
    unnoted = [record for record in records if "id" not in record]
    queue = slurm_commands.queue() if unnoted else slurm_commands.Queue({}, {})
    if isinstance(queue, str):
        scripts = dict.fromkeys(record["script"] for record in unnoted)
        problems = [
            f"{script}: the number of its job is not known ({queue}); look with squeue --me "
            "--format='%i %o', and cancel it with scancel" for script in scripts
        ]  # fmt: skip
        return [record["id"] for record in records if "id" in record], problems
    return [job_id for record in records if (job_id := _job_id(record, queue))], []


def cancel_command(folders: Collection[Path]) -> str:
    """How to cancel jobs of SLURM by hand, arrays as a whole; empty where none of the runs has one."""
    records = (read_record(folder) or {} for folder in folders)
    ids, _ = _job_ids([record for record in records if record.get("launcher") == "slurm"])
    arrays = dict.fromkeys(job_id.partition("_")[0] for job_id in ids)
    return f"scancel {' '.join(arrays)}" if arrays else ""


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
