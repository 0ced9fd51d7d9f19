"""Jobs of SLURM: the script, its submission, and what it does: a worker of a sweep, or one command.

`python -m linnaeus.sweep.slurm [--run FOLDER] COMMAND...` is the process of a job, on its first node.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from linnaeus.runtime.errors import ConfigError, LinnaeusError
from linnaeus.runtime.run_folder import own_job, read_state

GRACE_S = 180
"""Seconds before the time limit at which SLURM tells the job to save a checkpoint."""
FLAGS = (
    "contiguous",
    "exclusive",
    "hold",
    "nice",
    "oversubscribe",
    "reboot",
    "spread-job",
    "use-min-nodes",
)
"""Options of sbatch that need no value; others are written as NAME= on our command line."""
_ONE_TASK = "each node has one task, which starts a rank for each GPU; give nodes=N gpus-per-node=N"
REFUSED = {
    "array": "a sweep makes the array; --jobs N is the number of workers",
    **dict.fromkeys(("ntasks", "ntasks-per-node", "ntasks-per-gpu", "gpus"), _ONE_TASK),
}
"""Options of sbatch that Linnaeus sets, each with what to give in their place."""
TIME_IS_OVER = "its time was nearly over"


@dataclass
class LaunchOptions:
    """Where a command runs.

    Attributes:
        launcher: `local`, this machine, or `slurm`.
        jobs: number of workers of a sweep; None for 1 on this machine, and one for each run on SLURM.
        slurm: options of sbatch by their long names; None for those without a value.
        dry_run: only say what would be started.
        argv: the tokens after the command, without these options.
    """

    launcher: str = "local"
    jobs: int | None = None
    slurm: dict[str, str | None] = field(default_factory=dict)
    dry_run: bool = False
    argv: list[str] = field(default_factory=list)


def problems_with(options: Mapping[str, str | None]) -> list[str]:
    """One sentence for each option of sbatch that cannot be given; sbatch judges the rest."""
    problems = [f"--slurm {name}: {REFUSED[name]}" for name in options if name in REFUSED]
    given = options.get("signal", f"B:USR1@{GRACE_S}") or ""
    if not re.fullmatch(r"B:(SIG)?USR1(@[1-9]\d*)?", given):
        problems.append(
            f"--slurm signal={given}: would end the ranks without a checkpoint; write signal=B:USR1@SECONDS, "
            "which tells the job's script"
        )
    return problems


# Submission.


def script(
    folder: Path, options: Mapping[str, str | None], name: str, words: Sequence[str], jobs: int = 1
) -> str:
    """The script of a job, or of an array of several.

    Args:
        folder: for the logs; all nodes see it.
        options: of sbatch.
        name: of the job.
        words: what follows `python -m linnaeus.sweep.slurm`.
        jobs: in the array; 1 for none.
    """
    logs = str(folder.resolve()).replace("%", "%%")  # as in patterns of sbatch
    ours = {
        "job-name": name,
        "output": f"{logs}/{'%A_%a' if jobs > 1 else '%j'}.out",
        "open-mode": "append",
        "requeue": None,
        "signal": f"B:USR1@{GRACE_S}",
        "ntasks-per-node": "1",
        **({"array": f"0-{jobs - 1}"} if jobs > 1 else {}),
    }
    lines = [
        f"#SBATCH --{key}" + (f"={_quoted(value)}" if value else "")
        for key, value in {**ours, **options}.items()
    ]
    # In the place of the shell: signals to the script are then for the process.
    command = shlex.join([sys.executable, "-u", "-m", "linnaeus.sweep.slurm", *words])
    here = shlex.quote(str(Path.cwd()))
    return "\n".join(["#!/bin/bash", *lines, f"cd {here} || exit", f"exec {command}", ""])


def _quoted(value: str) -> str:
    """A value in a line of a script, as sbatch reads it: blanks, quotes and `#` in double quotes."""
    if re.fullmatch(r"[\w@%+=:,./~*\[\]-]+", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def workers_script(folder: Path, options: LaunchOptions, jobs: int = 1) -> str:
    """The script of an array of workers of the sweep in a folder; `jobs` where the options name no number."""
    words = ["work", str(folder.resolve())]
    return script(folder / "slurm", options.slurm, folder.name, words, options.jobs or jobs)


def check_sbatch() -> None:
    """Raise `ConfigError` where there is no SLURM."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "--launcher slurm: there is no sbatch here; go to a login node of the cluster"
        )


def submit(folder: Path, text: str) -> str:
    """Submit a script, which is kept beside its logs; returns the job's number.

    Raises:
        ConfigError: there is no SLURM here.
        LinnaeusError: sbatch has refused it, or does not answer.
    """
    check_sbatch()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LinnaeusError(f"{folder} cannot be written to: {error.strerror}") from error
    kept = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.sh"
    kept.write_text(text, encoding="utf-8")
    # Of the job that this command may be in: options of sbatch, and the number of an array's task.
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SBATCH_", "SLURM_"))
    }
    env |= {"SLURM_CONF": os.environ["SLURM_CONF"]} if "SLURM_CONF" in os.environ else {}
    done = _call("sbatch", "--parsable", str(kept), env=env)
    number = re.search(r"^(\d+)(?:;.*)?$", done.stdout, re.MULTILINE)
    if done.returncode == 0 and number is not None:
        return number[1]
    said = " ".join((done.stderr.strip() or done.stdout.strip()).split())
    raise LinnaeusError(
        f"--launcher slurm: the job is not submitted: {said}; look with squeue --me"
    )


def submit_command(
    options: LaunchOptions,
    command: str,
    words: Sequence[str],
    with_torchrun: bool,
    run: Path | None,
) -> str:
    """Submit one command, whose words have been checked, as one job: `linnaeus train --launcher slurm`.

    Args:
        with_torchrun: whether it uses a rank for each GPU.
        run: the folder of the run that resumes when the job is queued again; None for a command that
            begins anew.

    Returns:
        What to print: the job with its log, and how to follow and cancel it; or the job's script.

    Raises:
        LinnaeusError: it cannot be submitted; the message says why.
    """
    folder = Path("slurm")
    of_job = ["--run", str(run)] if run is not None else [] if with_torchrun else ["--alone"]
    text = script(folder, options.slurm, f"linnaeus-{command}", [*of_job, command, *words])
    if options.dry_run:
        return text
    number = submit(folder, text)
    log = options.slurm.get("output") or str(folder.resolve() / f"{number}.out")
    return (
        f"submitted as SLURM job {number}: linnaeus {shlex.join([command, *words])}\n"
        f"log:    {shlex.quote(log)}\ncancel: scancel {number}\n"
    )


def _call(*command: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of SLURM; one that is not there, or does not answer, has failed."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            env=env,
            timeout=120,
            start_new_session=True,  # Ctrl-C in the terminal would break it off
        )
    except FileNotFoundError:
        said = f"there is no {command[0]} here"
    except subprocess.TimeoutExpired:
        said = f"{command[0]} does not answer"
    return subprocess.CompletedProcess(command, 1, "", said)


# In the job.


def prefix(env: Mapping[str, str], *, alone: bool = False) -> list[str]:
    """What starts one run in a job: torchrun over its nodes, or a single process.

    Several nodes meet at a port that is free now; a single one lets torchrun choose.

    Args:
        env: that of the job.
        alone: whether it is one process in any case.
    """
    nodes, per_node = ("1", 1) if alone else (env.get("SLURM_NNODES") or "1", _per_node(env))
    python = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", sys.executable, "-u", "-m"]
    if alone:
        return python
    meeting = ["--standalone"]
    if nodes != "1":
        meeting = [
            f"--nnodes={nodes}",
            f"--rdzv-id={env['SLURM_JOB_ID']}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={_endpoint(env)}",
        ]
    return [*python, "linnaeus.sweep.torchrun", *meeting, f"--nproc-per-node={per_node}", "-m"]


def _per_node(env: Mapping[str, str]) -> int:
    """Ranks of a node: one for each of its GPUs, and one without any."""
    return max(int(env.get("SLURM_GPUS_ON_NODE") or 1), 1)


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """The environment of srun: all CPU cores of the job, divided among the ranks of a node."""
    env = dict(given)
    if cores := env.get("SLURM_CPUS_PER_TASK"):
        env.setdefault("SRUN_CPUS_PER_TASK", cores)  # srun does not take it from the job
    per_task = int(cores or env.get("SLURM_CPUS_ON_NODE") or 1)
    env.setdefault("OMP_NUM_THREADS", str(max(per_task // _per_node(env), 1)))
    return env


def _endpoint(env: Mapping[str, str]) -> str:
    """Where the nodes of this job meet: the address of this first one, and a port that is free here.

    The port is one of its own, because jobs may share the node. The name of a node need not be an address.
    """
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    name = env.get("SLURMD_NODENAME") or socket.gethostname()
    address = re.search(
        r"\bNodeAddr=(\S+)", _call("scontrol", "--oneliner", "show", "node", name).stdout
    )
    return f"{address[1] if address else name}:{port}"


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


def _queue_again(received: Sequence[int], has_progress: bool) -> None:
    """Put this job back into the queue if its time is nearly over, or another one takes its place.

    On preemption SLURM does not requeue a job that exits by itself; therefore the job requeues itself.
    """
    job, why = own_job(), TIME_IS_OVER  # SLURM_JOB_ID of a task may be that of the whole array
    if signal.SIGUSR1 not in received:
        why = "another job has preempted it"
        if not was_preempted(_call("scontrol", "--oneliner", "show", "job", job).stdout):
            return
    elif not has_progress and os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        print(
            "not queued again: its time was over before anything new was saved; give it more (time=...)"
        )
        return
    print(f"queued again, because {why}", flush=True)
    if said := _call("scontrol", "requeue", job).stderr.strip():
        print(f"not queued again after all: {said}")


def main(argv: Sequence[str]) -> int:
    """Do what a job was submitted for; returns the exit code."""
    from linnaeus.sweep.folder import (
        Sweep,
    )  # here: every command imports this module for its options
    from linnaeus.sweep.worker import Child, Worker, saved_at

    env, words = _environment(os.environ), [*argv]
    alone = words[0] == "--alone"
    run = Path(words[1]) if words[0] == "--run" else None
    words = words[2 if run is not None else int(alone) :]
    child = Child(is_step=True)
    with child.listening():
        start = partial(prefix, env, alone=alone)
        if words[0] == "work":
            worker = Worker(Sweep.read(Path(words[1])), start, env, child)
            code, has_progress = worker.work(), worker.progress > 0
        else:
            resume = []
            if run is not None and (holder := read_state(run).holder) and holder.job == own_job():
                resume = ["TRAIN.AUTO_RESUME=True"]  # the job has been queued again
            saved = saved_at(run) if run else None
            code = child.run([*start(), "linnaeus.main", *words, *resume], env, None, Path.cwd())
            has_progress = run is not None and saved_at(run) != saved
        if child.received and code != 0:
            _queue_again(child.received, has_progress)
    return code


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except LinnaeusError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
