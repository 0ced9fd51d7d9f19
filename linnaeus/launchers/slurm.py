"""Runs on SLURM: one job, or an array of jobs.

submitit writes the job script. What it has for submitting and watching is not used: a job whose submission
was broken off would not find its pickle, and the look at the jobs needs `sacct`, which clusters without
accounting do not have. What a job does is in a file beside its script, before it is submitted.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from linnaeus.errors import ConfigError, LinnaeusError
from linnaeus.launchers import slurm_job
from linnaeus.launchers.interface import Job, Launcher, LaunchOptions, Task
from linnaeus.launchers.record import read_record, write_record, write_slurm_record
from linnaeus.launchers.sbatch import (
    GRACE_S,
    REFUSED,
    Options,
    likely_misspelled,
    num_nodes,
    num_per_node,
    num_processes,
)
from linnaeus.launchers.slurm_commands import (
    NO_CLUSTER,
    RETRY_S,
    Queue,
    call,
    is_out_of_reach,
    queue,
    said_by,
)
from linnaeus.launchers.slurm_job import SlurmJob, save_jobs
from linnaeus.words import counted

FOLDER = "slurm"
"""Below the current folder: the scripts and logs of single commands."""
SUBMIT_S = 120
"""Longest wait at submission for a controller that does not answer, in seconds."""

logger = logging.getLogger("linnaeus.launchers.slurm")


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

    def room(self, active: Collection[Job]) -> int:
        """No bound: SLURM has the queue."""
        return 1_000_000

    def script(self, num_jobs: int, name: str = "SUBMISSION") -> str:
        """The script of one job, or of an array of several.

        Args:
            num_jobs: how many.
            name: of the submission, which no other one has.

        Raises:
            ConfigError: submitit is not installed, or SLURM cannot write to the folder.
        """
        if "%" in str(self.folder):
            raise ConfigError(
                f"--launcher slurm: {self.folder}: SLURM replaces % in the path of a log; rename the folder"
            )
        slurm = _submitit().slurm.slurm
        # In the place of the script's shell: signals to the script are then for the process.
        content = str(self.folder / f"{name}.json")
        command = f"exec {shlex.join([sys.executable, '-u', '-m', slurm_job.__name__, content])}"
        count = {"map_count": num_jobs} if num_jobs > 1 else {}
        # A private function, but what submitit is for; pyproject.toml bounds its version.
        text: str = slurm._make_sbatch_string(command, self.folder, **self._parameters(num_jobs), **count)
        return text

    def dry_run(self, num_jobs: int) -> str:
        """The script, judged by sbatch where there is one that reaches its controller.

        Raises:
            ConfigError: submitit is not installed, or what sbatch says against an option.
        """
        text = self.script(num_jobs)
        said = None if shutil.which("sbatch") is None else self._judge(text)
        if said is None or is_out_of_reach(said):
            if problems := likely_misspelled(self._options):
                raise ConfigError(problems)
            logger.warning("SLURM does not answer here: sbatch has not judged the options")
        elif said:
            raise ConfigError(f"--slurm: sbatch refuses the job: {said}")
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
        deadline: float | None = None
        while is_out_of_reach(said := self._judge(text)):
            deadline = deadline or time.monotonic() + SUBMIT_S
            if NO_CLUSTER in said or time.monotonic() > deadline:
                raise ConfigError(f"--launcher slurm: SLURM does not answer here: {said}")
            logger.warning("sbatch: %s; it is tried again", said)
            time.sleep(RETRY_S)
        if said:
            raise ConfigError(f"--slurm: sbatch refuses the job: {said}")
        if note := self._note():
            logger.warning("%s", note)

    def _judge(self, text: str) -> str:
        """What sbatch says against a script; empty where it would take it."""
        with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
            file.write(text)
            file.flush()
            done = _sbatch("--test-only", Path(file.name), text)
        return "" if done.returncode == 0 else said_by(done).replace(file.name, "the script") or "it fails"

    def _note(self) -> str:
        """A warning where the job's processes may have to share one CPU core; empty otherwise."""
        names = ("cpus-per-task", "cpus-per-gpu", "exclusive", "mincpus", "cores-per-socket")
        if num_per_node(self._options) == 1 or any(name in self._options for name in names):
            return ""
        return (
            "--slurm: without cpus-per-task=N or cpus-per-gpu=N, SLURM gives a node's processes one CPU core "
            "together, unless the cluster has another default"
        )

    def submit(self, tasks: Sequence[Task], active: Collection[Job] = ()) -> None:
        """Submit runs of a sweep, several as an array, and note the job of each.

        The script is noted before it is submitted: whoever submits may be killed before SLURM's answer. Its
        name then tells the job from others.

        Raises:
            LinnaeusError: sbatch has refused them.
        """

        def note(script: Path) -> None:
            for index, task in enumerate(tasks):
                record = {"launcher": "slurm", "script": str(script), "index": index, "seconds": task.seconds}
                write_record(task.folder, record)

        jobs = [SlurmJob(task.argv, str(task.folder.resolve())) for task in tasks]
        job_ids = self.submit_jobs(jobs, note)
        numbers = " to ".join(dict.fromkeys((job_ids[0], job_ids[-1])))
        logger.info("%s submitted as SLURM job %s", counted(len(tasks), "run"), numbers)
        for task, job_id in zip(tasks, job_ids, strict=True):
            if "id" not in (read_record(task.folder) or {}):  # else the job has begun, and noted its number
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
        number = self._number(script, text)
        return [f"{number}_{index}" for index in range(len(jobs))] if len(jobs) > 1 else [number]

    def _number(self, script: Path, text: str) -> str:
        """Submit a script; returns the number of the job, which a controller that is busy may have taken."""
        deadline: float | None = None
        while True:
            done = _sbatch("--parsable", script, text)
            number = re.search(r"^(\d+)(?:;.*)?$", done.stdout, re.MULTILINE)
            if done.returncode == 0 and number is not None:
                return number[1]
            said = said_by(done)
            if not is_out_of_reach(said):
                raise LinnaeusError(f"sbatch has refused the job: {said}")
            logger.warning("sbatch: %s; it is tried again", said)
            deadline = deadline or time.monotonic() + SUBMIT_S  # sbatch itself may have waited as long
            found: Queue | str = said
            while isinstance(found, str):
                time.sleep(RETRY_S)
                found = queue()
                if not isinstance(found, str) and (taken := found.number_of(script)):
                    return taken
                if time.monotonic() > deadline:
                    raise LinnaeusError(
                        f"SLURM does not answer, and may have taken the job ({said}): look with squeue --me; "
                        "the same command of a sweep finds its jobs by itself"
                    )

    def log(self, job_id: str) -> str | None:
        """The file with the output of a single job; None where its name depends on what SLURM knows alone."""
        pattern = self._options.get("output") or f"{self.folder}/%j.out"
        known = {"%j": job_id, "%x": self._options.get("job-name") or self._name}
        return None if re.search(r"%(?![jx])", pattern) else re.sub("%[jx]", lambda at: known[at[0]], pattern)

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
            "setup": [f"# {line}" for line in self._lines()],
            "additional_parameters": {**ours, **given},
        }

    def _lines(self) -> list[str]:
        """What a job executes, with the numbers that the options give."""
        nodes, per_node = num_nodes(self._options), num_per_node(self._options)
        given = self._options.get("nodes") or "1"
        text = self._describe.replace(slurm_job.PER_NODE, str(per_node))
        if given.isdecimal():
            text = text.replace(slurm_job.NODES, given)
        if "torchrun" in text:
            each = f"{counted(nodes, 'node')}, {per_node} on each" if nodes > 1 else "one node"
            text += f"\nProcesses: {num_processes(self._options)} ({each})"
        text += f"\n{self._note()}\nThe job reads the .json file that linnaeus writes beside this script."
        return [line for line in text.splitlines() if line]


def submit_command(
    options: LaunchOptions, command: str, words: Sequence[str], with_torchrun: bool, resumed_in: Path | None
) -> str:
    """Submit one command, whose words have been checked, as one job: `linnaeus train --launcher slurm`.

    Args:
        options: where it runs.
        command: the word after `linnaeus`.
        words: those after the command.
        with_torchrun: whether it uses a process for each GPU.
        resumed_in: the folder of the run that goes on there when the job is queued again; None for a
            command that begins anew.

    Returns:
        What to print: the job with its log, and how to follow and cancel it; or the job's script.

    Raises:
        LinnaeusError: it cannot be submitted; the message says why.
    """
    folder = None if resumed_in is None else str(resumed_in.resolve())
    job = SlurmJob((command, *words), with_torchrun=with_torchrun, resumed_in=folder)
    slurm = Slurm(Path(FOLDER), options.slurm, f"linnaeus-{command}", describe=job.describe())
    if not with_torchrun and (asked := num_processes(options.slurm)) > 1:
        logger.warning(
            "--slurm: linnaeus %s is one process, and the job holds the GPUs or nodes of %d; gpus-per-node=1 "
            "and no nodes=N are enough", command, asked,
        )  # fmt: skip
    if options.dry_run:
        return slurm.dry_run(1)
    slurm.check(1)
    [job_id] = slurm.submit_jobs([job])
    if (log := slurm.log(job_id)) is None:
        where = f"log:    as output={options.slurm['output']} says\n"
    else:
        where = f"log:    {shlex.quote(log)}\nfollow: tail --retry --follow=name {shlex.quote(log)}\n"
    return (
        f"submitted as SLURM job {job_id}: linnaeus {shlex.join([command, *words])}\n{where}"
        f"state:  squeue --jobs={job_id}\n"
        f"cancel: scancel {job_id}\n"
    )


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


def _sbatch(mode: str, script: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Call sbatch with the options of a script as arguments too: variables SBATCH_* rank above the script.

    Left out of the environment are those of refused options, and what it says of the job that this is in.
    """
    options = shlex.split(" ".join(re.findall(r"^#SBATCH (--.*)$", text, re.MULTILINE)))
    refused = {f"SBATCH_{name.upper().replace('-', '_')}" for name in REFUSED} | {"SBATCH_ARRAY_INX"}
    env = {
        name: value for name, value in os.environ.items()
        if name not in refused and not name.startswith(("SLURM_ARRAY_", "SLURM_RESTART_COUNT"))
    }  # fmt: skip
    return call("sbatch", mode, *options, str(script), env=env)
