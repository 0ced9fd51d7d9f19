"""What a job of SLURM does: torchrun over its nodes, a checkpoint in time, and back into the queue.

`python -m linnaeus.launchers.slurm_job SUBMISSION.json` is the process of a job's script, on the first node.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from linnaeus.files import write_text_atomically
from linnaeus.launchers import torchrun
from linnaeus.launchers.outcome import OUTPUT, read_outcome, save_outcome, stamp
from linnaeus.launchers.record import read_record, write_slurm_record
from linnaeus.launchers.slurm_commands import RETRY_S, call, is_out_of_reach, said_by
from linnaeus.launchers.supervise import Child, Supervisor, run_to_end

CONTROLLER_S = 600
"""Longest wait for a restarting controller, in seconds."""
RESUME = "TRAIN.AUTO_RESUME=True"
NODES, PER_NODE = "NODES", "GPUS_OF_A_NODE_OR_1"
"""Stand for numbers in a described command, as long as they are not known."""
TIME_IS_OVER = "the time of its job was nearly over"
NOTHING_SAVED = (
    "not queued again: the time of its job was over before anything new was saved; give it more time "
    "(--slurm time=...)"
)


@dataclass(frozen=True)
class SlurmJob:
    """The content of a job.

    Attributes:
        argv: what follows `python -m linnaeus.main`.
        folder: of a sweep's run, which keeps the output and how the run ended; None leaves both to SLURM.
        with_torchrun: whether to start a process for each GPU of each node; else one process in all.
        resumed_in: folder of the run of `train`; when the job has been queued again it goes on there. None
            for a command line that says so themselves, or cannot be resumed.
    """

    argv: tuple[str, ...]
    folder: str | None = None
    with_torchrun: bool = True
    resumed_in: str | None = None

    def run(self, script: Path, index: int) -> int:
        """Run to the end or until the job has to go; returns the exit code of the run.

        Args:
            script: the job's, as it was submitted.
            index: of the job in the script's array.
        """
        if self.folder is not None and not _owns_run(Path(self.folder), script, index):
            return 0
        supervisor = Supervisor(_pass_on, (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT))
        requeue_reason = functools.cache(functools.partial(_requeue_reason, supervisor))  # one answer holds
        before = self._saved()
        with supervisor.listening():
            code = self._run(supervisor, requeue_reason, script.parent)
            if code == 0:
                return 0
            why = requeue_reason()
            if why == TIME_IS_OVER and not self._may_repeat(before, script.with_name(f"{_own_id()}.over")):
                self._set_reason(NOTHING_SAVED)
                return 1
            if why:
                self._queue_again(why)
            elif signal.SIGTERM in supervisor.received:
                self._set_reason(f"SLURM job {_own_id()} was ended with SIGTERM, as by scancel")
            return code

    def _saved(self) -> int | None:
        """When the run's last checkpoint was written; None without any."""
        folder = self.folder or self.resumed_in
        return None if folder is None else stamp(Path(folder) / "checkpoints/last.pt")

    def _may_repeat(self, before: int | None, mark: Path) -> bool:
        """Whether as much time again is of use: something was saved, or this is the first time without.

        The first one may have found batch sizes, which are kept. A command that cannot be resumed would
        need as much time again.

        Args:
            before: when the checkpoint that was there before had been saved.
            mark: a file of this job that says that its time was once over before anything was saved.
        """
        if self.folder is None and self.resumed_in is None:
            return False
        if self._saved() != before:
            mark.unlink(missing_ok=True)
            return True
        is_first = not mark.exists()  # SLURM's count of restarts has preemptions too
        mark.touch()
        return is_first

    def _set_reason(self, reason: str) -> None:
        """Say how the job has ended, in the run's outcome too."""
        self._say(reason)
        if self.folder is not None and (outcome := read_outcome(Path(self.folder))) is not None:
            reason = "; ".join(filter(None, [reason, outcome.reason]))
            save_outcome(Path(self.folder), replace(outcome, reason=reason))

    def _queue_again(self, why: str) -> None:
        """Put this job back into the queue, and say so where the run's output ends."""
        how = "begins anew" if self._saved() is None else "goes on where it was"
        self._say(f"queued again: the run {how}, because {why}")
        if said := _scontrol("requeue", os.environ["SLURM_JOB_ID"]).stderr.strip():
            self._say(f"not queued again after all: {said}; the same command as before submits the run again")

    def _say(self, sentence: str) -> None:
        print(sentence, flush=True)
        if self.folder is not None:
            with (Path(self.folder) / OUTPUT).open("a", encoding="utf-8") as output:
                output.write(f"{sentence}\n")

    def command(self, env: Mapping[str, str], endpoint: str) -> list[str]:
        """What the job executes.

        Args:
            env: that of the job.
            endpoint: address and port where its nodes meet.

        >>> env = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "4", "SLURM_GPUS_ON_NODE": "8"}
        >>> words = SlurmJob(("--cfg", "a.yaml")).command(env, "n1:1234")
        >>> print(*words[:3], *words[6:], sep=" ")  # doctest: +NORMALIZE_WHITESPACE
        srun --nodes=4 --ntasks=4 linnaeus.launchers.torchrun --nnodes=4 --nproc-per-node=8 --rdzv-id=7
        --rdzv-backend=c10d --rdzv-endpoint=n1:1234 -m linnaeus.main --cfg a.yaml
        """
        nodes = env.get("SLURM_NNODES") or "1"
        return self._command(env["SLURM_JOB_ID"], nodes, str(_per_node(env)), endpoint)

    def describe(self) -> str:
        """The command in shell words, for people who read the job's script."""
        return shlex.join(self._command("ID", NODES, PER_NODE, "FIRST_NODE:FREE_PORT"))

    def _command(self, job_id: str, nodes: str, per_node: str, endpoint: str) -> list[str]:
        if not self.with_torchrun:
            srun = ["srun", "--nodes=1", "--ntasks=1", sys.executable, "-u"]
            return [*srun, "-m", "linnaeus.main", *self.argv]
        return [
            "srun", f"--nodes={nodes}", f"--ntasks={nodes}", sys.executable, "-u",
            "-m", torchrun.__name__, f"--nnodes={nodes}", f"--nproc-per-node={per_node}",
            f"--rdzv-id={job_id}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}",
            "-m", "linnaeus.main", *self.argv,
        ]  # fmt: skip

    def _run(self, supervisor: Supervisor, requeue_reason: Callable[[], str], marks: Path) -> int:
        env = _environment(os.environ)
        endpoint = _endpoint(env)
        if self.folder is not None:
            command = self.command(env, endpoint)
            outcome = run_to_end(
                Path(self.folder), command, supervisor, env=env,
                stopped_elsewhere=lambda: bool(requeue_reason()),
            )  # fmt: skip
            return outcome.exit_code if outcome.exit_code != 0 or outcome.finished else 1
        command = [*self.command(env, endpoint), *self._resume(env, marks)]
        child = subprocess.Popen(command, env=env, start_new_session=True)
        return supervisor.wait(child)

    def _resume(self, env: Mapping[str, str], marks: Path) -> list[str]:
        """Goes on with the run that this job has begun, and with no earlier one of the same name."""
        if self.resumed_in is None:
            return []
        mark = marks / f"{env['SLURM_JOB_ID']}.began"
        written = str(stamp(Path(self.resumed_in) / "config.yaml"))
        if env.get("SLURM_RESTART_COUNT", "0") == "0" or not mark.exists():
            mark.write_text(written)  # of an earlier run: two times of one file server are comparable
            return []
        return [RESUME] if written not in ("None", mark.read_text()) else []


def save_jobs(path: Path, jobs: Sequence[SlurmJob]) -> None:
    """Write what the jobs of one submission do.

    Raises:
        LinnaeusError, OSError: see `write_text_atomically`.
    """
    write_text_atomically(path, json.dumps([asdict(job) for job in jobs], indent=1) + "\n")


def main(path: Path) -> int:
    """Run the job of a submission that this process has been started for; returns the exit code."""
    index = int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))
    content = json.loads(path.read_text(encoding="utf-8"))[index]
    job = SlurmJob(**{**content, "argv": tuple(content["argv"])})
    return job.run(path.with_suffix(".sh"), index)


def _owns_run(folder: Path, script: Path, index: int) -> bool:
    """Whether this job is to run the run of a folder: it has not ended well, and no other job has it.

    Two jobs may have the same script: sbatch was called again although the controller had taken the first
    without an answer. While the record has no number, the job that begins first gets the run.
    """
    own = _own_id()
    outcome, record = read_outcome(folder), read_record(folder)
    if outcome is not None and outcome.finished:
        print(f"{folder}: the run has ended well before")
        return False
    noted = (str(script), index, own)
    if record is not None and noted == (record.get("script"), record.get("index"), record.get("id", own)):
        holder = _claim(script.with_suffix(f".{index}"), own)
        write_slurm_record(folder, holder)
        if holder == own:
            return True
        record["id"] = holder
    print(f"{folder}: the run does not belong to this job, but to {record or 'none'}; nothing is done")
    return False


def _claim(path: Path, own: str) -> str:
    """The number of the job that has made a link; this job makes it where there is none."""
    with suppress(FileExistsError):
        path.symlink_to(own)  # made at once with its content, on a network file system too
    return str(path.readlink())


def _own_id() -> str:
    """This job's number, as squeue shows it."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ["SLURM_JOB_ID"]


def _endpoint(env: Mapping[str, str]) -> str:
    """Where the nodes of this job meet: the address of this first one, and a port that is free here.

    The port is one of its own, because jobs may share the node. The name of a node need not be an address.
    """
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    name = env.get("SLURMD_NODENAME") or socket.gethostname()
    address = re.search(r"\bNodeAddr=(\S+)", _scontrol("--oneliner", "show", "node", name).stdout)
    return f"{address[1] if address else name}:{port}"


def _per_node(env: Mapping[str, str]) -> int:
    """Processes of a node: one for each of its GPUs, and one without any."""
    return max(int(env.get("SLURM_GPUS_ON_NODE") or 1), 1)


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """The environment of srun: all CPU cores of the job, divided among the processes of a node."""
    env = dict(given)
    if cores := env.get("SLURM_CPUS_PER_TASK"):
        env.setdefault("SRUN_CPUS_PER_TASK", cores)  # srun does not take it from the job
    per_task = int(cores or env.get("SLURM_CPUS_ON_NODE") or 1)
    env.setdefault("OMP_NUM_THREADS", str(max(per_task // _per_node(env), 1)))
    return env


def _pass_on(number: int, child: Child, num_signals: int) -> None:
    """The time is nearly over: SIGTERM to srun, which passes it to torchrun and its ranks on all nodes.

    They save a checkpoint. With SIGTERM SLURM ends the job; it has sent that to them itself.
    """
    if number != signal.SIGTERM:
        child.send_signal(signal.SIGTERM)


def _requeue_reason(supervisor: Supervisor) -> str:
    """Why the job has to go: its time is nearly over, or another one takes its place; empty otherwise.

    On preemption SLURM sends SIGTERM to torchrun only, and does not requeue a job that exits by itself;
    therefore the job requeues itself.
    """
    if signal.SIGUSR1 in supervisor.received:
        return TIME_IS_OVER
    shown = _scontrol("--oneliner", "show", "job", os.environ["SLURM_JOB_ID"]).stdout
    return "another job has preempted this one" if was_preempted(shown) else ""


def was_preempted(shown: str) -> bool:
    """Whether a job is preempted since it was last started, by what `scontrol --oneliner show job` prints.

    Both times are the controller's. That of an earlier preemption stays.

    >>> was_preempted("StartTime=2026-11-22T12:05:24 PreemptTime=2026-11-22T12:09:01")
    True
    >>> was_preempted("StartTime=2026-11-22T12:09:40 PreemptTime=2026-11-22T12:09:01")
    False
    >>> was_preempted("StartTime=2026-11-22T12:05:24 PreemptTime=None"), was_preempted("")
    (False, False)
    """
    times = dict(re.findall(r" ?\b(StartTime|PreemptTime)=(\d{4}-\S+)", shown))
    return "PreemptTime" in times and times["PreemptTime"] >= times.get("StartTime", "")


def _scontrol(*words: str) -> subprocess.CompletedProcess[str]:
    """Call `scontrol`; a controller that restarts is waited for."""
    deadline = time.monotonic() + CONTROLLER_S
    while True:
        done = call("scontrol", *words)
        if done.returncode == 0 or time.monotonic() > deadline:
            return done
        print(said_by(done), file=sys.stderr, flush=True)
        if not is_out_of_reach(done.stderr):
            return done
        time.sleep(RETRY_S)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
