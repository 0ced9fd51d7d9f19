"""SLURM jobs: write and submit the script, and run a sweep's worker or one command in the job.

`python -m linnaeus.sweep.slurm [--run FOLDER] COMMAND...` runs in the job, on its first node.
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
from functools import partial
from pathlib import Path

from linnaeus.runtime.errors import ConfigError, LinnaeusError
from linnaeus.runtime.run_folder import own_job, read_state

GRACE_S = 180
"""Seconds before the time limit when SLURM signals the job to save a checkpoint."""
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
"""Options of sbatch without a value. Others are written as NAME= on our command line."""
_ONE_TASK = "each node has one task, which starts a rank for each GPU; set nodes=N gpus-per-node=N"
REFUSED = {
    "array": "the sweep sets it; set the number of workers with --jobs N",
    **dict.fromkeys(("ntasks", "ntasks-per-node", "ntasks-per-gpu", "gpus"), _ONE_TASK),
}
"""Options of sbatch that Linnaeus sets, with the option to use instead."""
TIME_IS_OVER = "its time was nearly over"


def problems_with(options: Mapping[str, str | None]) -> list[str]:
    """Return a sentence for each option of sbatch that cannot be set. sbatch checks the others.

    Options have their long names. Options without a value are None.
    """
    problems = [f"--slurm {name}: {REFUSED[name]}" for name in options if name in REFUSED]
    given = options.get("signal", f"B:USR1@{GRACE_S}") or ""
    if not re.fullmatch(r"B:(SIG)?USR1(@[1-9]\d*)?", given):
        problems.append(
            f"--slurm signal={given}: would end the ranks without a checkpoint; set signal=B:USR1@SECONDS, "
            "which signals the job's script"
        )
    return problems


# Submission.


def script(
    folder: Path, options: Mapping[str, str | None], name: str, words: Sequence[str], jobs: int = 1
) -> str:
    """Return the script of a job or of an array of jobs.

    Args:
        folder: folder of the logs, which all nodes must see.
        options: options of sbatch.
        name: name of the job.
        words: arguments of `python -m linnaeus.sweep.slurm`.
        jobs: number of jobs in the array; 1 for no array.
    """
    logs = str(folder.resolve()).replace("%", "%%")  # sbatch expands %
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
    # exec replaces the shell, so that signals to the script reach the process.
    command = shlex.join([sys.executable, "-u", "-m", "linnaeus.sweep.slurm", *words])
    here = shlex.quote(str(Path.cwd()))
    return "\n".join(["#!/bin/bash", *lines, f"cd {here} || exit", f"exec {command}", ""])


def _quoted(value: str) -> str:
    """Quote a value for an `#SBATCH` line: blanks, quotes and `#` need double quotes."""
    if re.fullmatch(r"[\w@%+=:,./~*\[\]-]+", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def workers_script(folder: Path, options: Mapping[str, str | None], jobs: int) -> str:
    """Return the script of an array of workers for the sweep in a folder."""
    return script(folder / "slurm", options, folder.name, ["work", str(folder.resolve())], jobs)


def check_sbatch() -> None:
    """Raise `ConfigError` if this machine has no SLURM."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "--launcher slurm: sbatch was not found; run this on a login node of the cluster"
        )


def submit(folder: Path, text: str) -> str:
    """Save a script beside its logs, submit it and return the job's number.

    Raises:
        ConfigError: this machine has no SLURM.
        LinnaeusError: sbatch refused the script or did not answer.
    """
    check_sbatch()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LinnaeusError(f"{folder} cannot be written to: {error.strerror}") from error
    kept = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.sh"
    kept.write_text(text, encoding="utf-8")
    # If this command runs in a job itself, do not pass that job's variables to sbatch.
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
        f"--launcher slurm: the job was not submitted: {said}; check with squeue --me"
    )


def submit_command(
    options: Mapping[str, str | None],
    command: str,
    words: Sequence[str],
    with_torchrun: bool,
    run: Path | None,
    *,
    dry_run: bool,
) -> str:
    """Submit a checked command as one job: `linnaeus train --launcher slurm`.

    Args:
        options: options of sbatch.
        command: command of Linnaeus.
        words: its arguments.
        with_torchrun: whether it uses a rank for each GPU.
        run: directory of the run that a requeued job resumes; None if the command starts over.
        dry_run: return the script and submit nothing.

    Returns:
        The text to print: the job's number, log and cancel command, or the script.

    Raises:
        LinnaeusError: the job cannot be submitted; the message says why.
    """
    folder = Path("slurm")
    of_job = ["--run", str(run)] if run is not None else [] if with_torchrun else ["--alone"]
    text = script(folder, options, f"linnaeus-{command}", [*of_job, command, *words])
    if dry_run:
        return text
    number = submit(folder, text)
    log = options.get("output") or str(folder.resolve() / f"{number}.out")
    return (
        f"submitted as SLURM job {number}: linnaeus {shlex.join([command, *words])}\n"
        f"log:    {shlex.quote(log)}\ncancel: scancel {number}\n"
    )


def _call(*command: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a SLURM command. If it is missing or does not answer, return a failure."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            env=env,
            timeout=120,
            start_new_session=True,  # so that Ctrl-C in the terminal does not interrupt it
        )
    except FileNotFoundError:
        said = f"{command[0]} was not found"
    except subprocess.TimeoutExpired:
        said = f"{command[0]} did not answer"
    return subprocess.CompletedProcess(command, 1, "", said)


# In the job.


def prefix(env: Mapping[str, str], *, alone: bool = False) -> list[str]:
    """Return the command prefix that starts a run in a job: torchrun over its nodes, or one process.

    Several nodes meet at a port that is free now. On a single node torchrun chooses the port.

    Args:
        env: environment of the job.
        alone: whether to start one process regardless of the GPUs.
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
    """Return the number of ranks per node: one for each GPU, or one without GPUs."""
    return max(int(env.get("SLURM_GPUS_ON_NODE") or 1), 1)


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of srun. It divides the job's CPU cores among the ranks of a node."""
    env = dict(given)
    if cores := env.get("SLURM_CPUS_PER_TASK"):
        env.setdefault("SRUN_CPUS_PER_TASK", cores)  # srun does not take it from the job
    per_task = int(cores or env.get("SLURM_CPUS_ON_NODE") or 1)
    env.setdefault("OMP_NUM_THREADS", str(max(per_task // _per_node(env), 1)))
    return env


def _endpoint(env: Mapping[str, str]) -> str:
    """Return the endpoint where the nodes of this job meet: the address of this first node and a free port.

    Each job chooses its own port, because jobs may share the node. A node's name need not be an address.
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
    """Whether a job was preempted after its last start, from the output of `scontrol --oneliner show job`.

    Both times are from the controller. The output keeps the time of an earlier preemption.

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
    """Requeue this job if its time is nearly over or another job preempted it.

    SLURM does not requeue a preempted job that exits before it is killed.
    """
    job, why = own_job(), TIME_IS_OVER  # SLURM_JOB_ID of a task may name the whole array
    if signal.SIGUSR1 not in received:
        why = "another job preempted it"
        if not was_preempted(_call("scontrol", "--oneliner", "show", "job", job).stdout):
            return
    elif not has_progress and os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        print(
            "not queued again: its time was over before a new checkpoint was saved; set a longer time=..."
        )
        return
    print(f"queued again, because {why}", flush=True)
    if said := _call("scontrol", "requeue", job).stderr.strip():
        print(f"not queued again after all: {said}")


def main(argv: Sequence[str]) -> int:
    """Run the worker or the command of a job and return the exit code."""
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
                resume = ["TRAIN.AUTO_RESUME=True"]  # the job was requeued
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
