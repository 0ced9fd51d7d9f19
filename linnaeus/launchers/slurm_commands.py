"""The commands of SLURM: the queue, cancelling, and what they say when they fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from linnaeus.errors import LinnaeusError
from linnaeus.launchers.interface import Job

COMMAND_TIMEOUT_S = 120
"""SLURM's commands wait this long for a busy controller by themselves."""
RETRY_S = 5.0
NO_CLUSTER = "configuration source"
"""In what SLURM's commands say on a machine that belongs to no cluster."""
_CHANGES_COMMANDS = ("SQUEUE_", "SCANCEL_", "SCONTROL_", "SLURM_TIME_FORMAT")
"""Variables that hide jobs from a look, wait for an answer of the user, or change what is printed."""


@dataclass(frozen=True)
class Queue:
    """This user's jobs that SLURM has not ended.

    Attributes:
        jobs: by their numbers.
        submitted: the numbers by the script of a job, and its index in the script's array.
    """

    jobs: dict[str, Job]
    submitted: dict[tuple[str, int], str]

    def number_of(self, script: Path) -> str:
        """The number of the job, or of the array, with a script; empty for one that SLURM does not have."""
        found = [job for (path, _), job in self.submitted.items() if path == str(script)]
        return found[0].partition("_")[0] if found else ""


def queue() -> Queue | str:
    """What SLURM has in its queue, or in a few words why it does not answer."""
    if shutil.which("squeue") is None:
        return "there is no squeue here"
    done = call("squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i|%T|%r|%o")
    if done.returncode != 0:
        return said_by(done).rpartition("; ")[2] or "squeue fails"  # the last line says what it comes to
    return parse_queue(done.stdout)


def parse_queue(text: str) -> Queue:
    """What `squeue --noheader --array --format=%i|%T|%r|%o` prints: number, state, reason, script."""
    found = Queue({}, {})
    for line in text.splitlines():
        if line.count("|") < 3:  # such as "CLUSTER: name"
            continue
        number, state, reason, script = line.strip().split("|", 3)
        is_running = state in ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
        why = "" if is_running or reason == "None" else reason
        found.jobs[number] = Job("running" if is_running else "pending", _title(number), why)
        index = number.partition("_")[2]
        found.submitted[script, int(index) if index.isdecimal() else 0] = number
    return found


def unknown(job_id: str | None, why: str) -> Job:
    """A job that SLURM says nothing of, perhaps not even its number."""
    return Job("unknown", _title(job_id), why)


def why_gone(job_id: str) -> str:
    """Why a job is no longer in the queue although its run has not ended, as far as SLURM knows."""
    return parse_gone(job_id, call("scontrol", "--oneliner", "show", "job", job_id).stdout)


def parse_gone(job_id: str, text: str) -> str:
    """The same from what `scontrol --oneliner show job` prints; nothing of a job that SLURM has forgotten.

    >>> parse_gone("4", "JobId=4 JobName=a b=c JobState=NODE_FAIL Reason=NodeDown Restarts=0")
    "SLURM job 4 has ended as NODE_FAIL (SLURM's reason: NodeDown)"
    """
    state, reason = (re.search(rf" {name}=(\S+)", text) for name in ("JobState", "Reason"))
    if state is None:
        return f"{_title(job_id)} has ended without writing an outcome: cancelled, or killed with its node"
    return f"{_title(job_id)} has ended as {state[1]} (SLURM's reason: {reason[1] if reason else 'None'})"


def cancel(job_ids: Sequence[str]) -> None:
    """End jobs; those that run are given time for a checkpoint, `KillWait` seconds, 30 by default.

    Raises:
        LinnaeusError: SLURM refuses, or does not answer.
    """
    done = call("scancel", *job_ids)
    if done.returncode != 0:
        raise LinnaeusError(f"scancel {' '.join(job_ids)}: {said_by(done)}")


def _title(job_id: str | None) -> str:
    return f"SLURM job {job_id or 'without a known number'}"


def is_out_of_reach(said: str) -> bool:
    """Whether a command of SLURM has failed for want of the controller, by what it says.

    >>> is_out_of_reach("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    True
    >>> is_out_of_reach("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
    True
    >>> is_out_of_reach("sbatch: error: use --constraint=interconnect on partition gpu")
    False
    """
    signs = f"unable to contact|connect failure|connection refused|timed out|zero bytes|{NO_CLUSTER}"
    return re.search(signs, said, re.IGNORECASE) is not None


def said_by(done: subprocess.CompletedProcess[str]) -> str:
    """What a command of SLURM that has failed says, on one line and without its own name.

    >>> said = "squeue: error: No such host\\nsqueue: fatal: Gave up"
    >>> said_by(subprocess.CompletedProcess([], 1, "", said))
    'No such host; Gave up'
    """
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return "; ".join(re.sub(r"^\w+: ((error|fatal): )?", "", line.strip()) for line in lines if line.strip())


def call(*command: str, env: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[str]:
    """Run a command of SLURM as its arguments say, whatever variables the user has set for it.

    One that does not answer in time has failed.
    """
    env = {name: value for name, value in env.items() if not name.startswith(_CHANGES_COMMANDS)}
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=env,
            timeout=COMMAND_TIMEOUT_S, start_new_session=True,  # Ctrl-C in the terminal would break it off
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
