"""Runs on SLURM: one job, or an array of jobs; the queue, and cancelling.

submitit writes the job script. What it has for submitting and watching is not used: a job whose submission
was broken off would not find its pickle, and the look at the jobs needs `sacct`, which clusters without
accounting do not have. What a job does is in a file beside its script, before it is submitted.
"""

from __future__ import annotations

import getpass
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linnaeus.errors import ConfigError, LinnaeusError
from linnaeus.launchers import slurm_job
from linnaeus.launchers.interface import Job, Launcher, Task
from linnaeus.launchers.record import write_slurm_record, write_submission
from linnaeus.launchers.slurm_job import SlurmJob, save_jobs

Options = Mapping[str, str | None]
"""Options of sbatch by their long names without dashes; None for those without a value."""

GRACE_S = 180
"""A job is told so many seconds before the end of its time that it is to save a checkpoint."""
REFUSED = {
    "array": "a sweep makes the array; --jobs N limits how many of its runs go on at once",
    "ntasks": "each node has one task, which starts a process for each GPU; give nodes=N gpus-per-node=N",
    "ntasks-per-node": "each node has one task, which starts a process for each GPU; give gpus-per-node=N",
    "chdir": "the paths in a configuration begin in the current folder; change to the other one first",
    "wrap": "the job's script is made from the command line",
    "test-only": "use --dry-run",
    "parsable": "the number of the job is printed anyway",
    "wait": "a sweep waits for its jobs",
}
"""Options that would take the place of what the job's script is made for, each with what to do."""
COMMAND_TIMEOUT_S = 120
"""SLURM's commands wait this long for a busy controller by themselves."""


def problems_with(options: Options) -> list[str]:
    """One sentence for each option that cannot be given; sbatch judges the rest."""
    problems = [f"--slurm {name}: {REFUSED[name]}" for name in options if name in REFUSED]
    signal = options.get("signal", "B:")
    if not (signal or "").startswith("B:"):
        problems.append(
            f"--slurm signal={signal}: would end the ranks without a checkpoint; write "
            "signal=B:USR1@SECONDS, which tells the job's script"
        )
    seconds = _seconds(options.get("time") or "")
    if "signal" not in options and seconds is not None and seconds <= 2 * GRACE_S:
        problems.append(
            f"--slurm time={options['time']}: a run is told {GRACE_S} s before the end to save a checkpoint, "
            "and would get nowhere; give it more time (a plain number is minutes), or signal=B:USR1@30"
        )
    return problems


def _seconds(text: str) -> int | None:
    """A time as sbatch reads it, in seconds; None for no limit, or what sbatch will refuse.

    >>> _seconds("90"), _seconds("1:30"), _seconds("4:00:00"), _seconds("1-12"), _seconds("UNLIMITED")
    (5400, 90, 14400, 129600, None)
    """
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in (*parts, days or "0")) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash or len(numbers) == 3:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def num_processes(options: Options) -> int:
    """Processes of a job with these options: one for each GPU, and one for each node without any.

    >>> num_processes({"nodes": "2", "gpus-per-node": "a100:4"}), num_processes({"gres": "gpu:2,shard:1"})
    (8, 2)
    >>> num_processes({"gpus": "6", "nodes": "2"}), num_processes({"nodes": "3-4"}), num_processes({})
    (6, 3, 1)
    """
    nodes = _count((options.get("nodes") or "1").partition("-")[0])
    if gpus := options.get("gpus"):
        return sum(map(_count, gpus.split(",")))
    per_node = options.get("gpus-per-node") or options.get("gpus-per-task")
    kinds = per_node.split(",") if per_node else (options.get("gres") or "").split(",")
    of_node = [_count(kind) for kind in kinds if per_node or kind.partition(":")[0] == "gpu"]
    return nodes * max(sum(of_node), 1)


def _count(text: str) -> int:
    """The number at the end of a request such as `a100:4`; 1 without one."""
    number = text.rpartition(":")[2]
    return int(number) if number.isdecimal() else 1


class Slurm(Launcher):
    """Jobs with the same resources.

    Args:
        folder: for the scripts and logs of the jobs; all nodes see it.
        options: of sbatch.
        name: of the jobs.
        limit: how many jobs of an array may run at once; None for all.
        describe: what a job executes, for people who read its script.
    """

    poll_s = 5.0

    def __init__(
        self, folder: Path, options: Options, name: str, *, limit: int | None = None, describe: str = ""
    ) -> None:
        self.folder = folder.resolve()
        self.limit = limit
        self._options = options
        self._name = name
        self._describe = describe

    @property
    def num_processes(self) -> int:
        """One for each GPU that is asked for, at least one for each node."""
        return num_processes(self._options)

    def room(self, going: Collection[Job]) -> int:
        """No bound: SLURM has the queue."""
        return 1_000_000

    def script(self, num_jobs: int, name: str = "SUBMISSION") -> str:
        """The script of one job, or of an array of several.

        Args:
            num_jobs: how many.
            name: of the submission, which no other one has.

        Raises:
            ConfigError: submitit is not installed.
        """
        slurm = _submitit().slurm.slurm
        # In the place of the script's shell: signals to the script are then for the process.
        content = str(self.folder / f"{name}.json")
        command = f"exec {shlex.join([sys.executable, '-u', '-m', slurm_job.__name__, content])}"
        count = {"map_count": num_jobs} if num_jobs > 1 else {}
        text: str = slurm._make_sbatch_string(command, self.folder, **self._parameters(num_jobs), **count)
        return text

    def check(self, num_jobs: int) -> None:
        """Let sbatch judge the script, without submitting it.

        Raises:
            ConfigError: there is no SLURM here, or what sbatch says against an option.
        """
        text = self.script(num_jobs)
        if shutil.which("sbatch") is None:
            raise ConfigError(
                "--launcher slurm: there is no sbatch here; run this on a login node of the cluster, or use "
                "--dry-run to see the script"
            )
        with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
            file.write(text)
            file.flush()
            done = _call("sbatch", "--test-only", file.name)
        if done.returncode != 0:
            lines = done.stderr.replace(file.name, "the script").splitlines()
            said = "; ".join(line.removeprefix("sbatch: ") for line in lines if line.strip())
            raise ConfigError(f"--slurm: sbatch refuses the job: {said}")

    def submit(self, tasks: Sequence[Task], going: Collection[Job] = ()) -> None:
        """Submit runs of a sweep, several as an array, and note the job of each.

        Raises:
            LinnaeusError: sbatch has refused them.
        """

        def note(script: Path) -> None:
            for index, task in enumerate(tasks):
                write_submission(task.folder, script, index)

        jobs = [SlurmJob(task.words, str(task.folder.resolve()), task.seconds) for task in tasks]
        for task, job_id in zip(tasks, self.submit_jobs(jobs, note), strict=True):
            write_slurm_record(task.folder, job_id)

    def submit_jobs(
        self, jobs: Sequence[SlurmJob], note: Callable[[Path], object] = lambda _: None
    ) -> list[str]:
        """Submit jobs, several as an array; returns their numbers.

        Args:
            jobs: what they do.
            note: called with the script, which no other submission has, before it is submitted.

        Raises:
            LinnaeusError: sbatch has refused them, or does not answer and may have submitted them.
        """
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
        script = self.folder / f"{name}.sh"
        text = self.script(len(jobs), name)
        self.folder.mkdir(parents=True, exist_ok=True)
        save_jobs(script.with_suffix(".json"), jobs)
        script.write_text(text)
        note(script)
        done = _call("sbatch", "--parsable", str(script))
        number = re.search(r"^(\d+)(?:;.*)?$", done.stdout, re.MULTILINE)
        if done.returncode != 0 or number is None:
            said = (done.stderr.strip() or done.stdout.strip()).removeprefix("sbatch: ")
            raise LinnaeusError(f"sbatch has refused the job: {said}")
        return [f"{number[1]}_{index}" for index in range(len(jobs))] if len(jobs) > 1 else [number[1]]

    def log(self, job_id: str) -> str:
        """The file with the output of a job."""
        default = f"{self.folder}/%j.out"
        return (self._options.get("output") or default).replace("%j", job_id).replace("%A_%a", job_id)

    def _parameters(self, num_jobs: int) -> dict[str, Any]:
        """Parameters of submitit; options of sbatch go by the names that they have in Python there."""
        ours = {
            "ntasks_per_node": 1,  # one torchrun
            "requeue": True,
            "signal": f"B:USR1@{GRACE_S}",  # to the script's process, which is ours
            "output": f"{self.folder}/{'%A_%a' if num_jobs > 1 else '%j'}.out",
        }
        given = {
            name.replace("-", "_"): True if value is None else value for name, value in self._options.items()
        }
        return {
            "job_name": self._name,
            "time": None,  # submitit's default is five minutes; None leaves it to the partition
            "wckey": None,
            "use_srun": False,  # the job itself calls it
            "stderr_to_stdout": True,
            "array_parallelism": self.limit or num_jobs,
            "setup": [f"# {line}" for line in self._describe.splitlines()],
            "additional_parameters": {**ours, **given},
        }


def _submitit() -> Any:
    """The module submitit.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import submitit
    except ImportError:
        raise ConfigError(
            "--launcher slurm: needs submitit, which is not installed: pip install 'linnaeus[sweep]'"
        ) from None
    return submitit


@dataclass(frozen=True)
class Queue:
    """This user's jobs that SLURM has not ended.

    Attributes:
        jobs: by their numbers.
        submitted: the numbers by the script of a job, and its index in the script's array.
    """

    jobs: dict[str, Job]
    submitted: dict[tuple[str, int], str]


def queue() -> Queue | str:
    """What SLURM has in its queue, or why it does not answer."""
    if shutil.which("squeue") is None:
        return "there is no squeue here"
    done = _call("squeue", "--noheader", "--array", f"--user={getpass.getuser()}", "--format=%i|%T|%r|%o")
    if done.returncode != 0:
        return done.stderr.strip() or "squeue fails"
    found = Queue({}, {})
    for line in done.stdout.splitlines():
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
    done = _call("scontrol", "--oneliner", "show", "job", job_id)
    words = dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)
    state = words.get("JobState")
    if state is None:
        return f"{_title(job_id)} has ended without a word: cancelled, or killed with its node"
    return f"{_title(job_id)} has ended as {state} (SLURM's reason: {words.get('Reason', 'None')})"


def cancel(job_ids: Sequence[str]) -> None:
    """End jobs; those that run are given time for a checkpoint, `KillWait` seconds, 30 by default.

    Raises:
        LinnaeusError: SLURM refuses, or does not answer.
    """
    done = _call("scancel", *job_ids)
    if done.returncode != 0:
        raise LinnaeusError(f"scancel {' '.join(job_ids)}: {done.stderr.strip()}")


def _title(job_id: str | None) -> str:
    return f"SLURM job {job_id or 'without a known number'}"


def _call(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of SLURM; one that does not answer in time has failed."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            timeout=COMMAND_TIMEOUT_S, start_new_session=True,  # Ctrl-C in the terminal would break it off
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
