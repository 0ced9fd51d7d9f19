"""Runs on this machine: so many at once, with the GPUs and the CPU cores divided among them.

submitit has an executor for this, which is not used: it starts all jobs at once, cannot find them again from
another process, and gives a job that is cancelled one second before SIGKILL, too short for a checkpoint.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from linnaeus.errors import LinnaeusError
from linnaeus.launchers import torchrun
from linnaeus.launchers.interface import Job, Launcher, Task
from linnaeus.launchers.outcome import OUTPUT
from linnaeus.launchers.record import open_locked

SUPERVISE = (sys.executable, "-m", "linnaeus.launchers.supervise")
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Share:
    """What one of the jobs may use of this machine.

    Attributes:
        gpus: as in CUDA_VISIBLE_DEVICES; None leaves that as it is.
        cores: numbers of CPU cores; empty for all that this process may use.
    """

    gpus: tuple[str, ...] | None = None
    cores: tuple[int, ...] = ()

    @property
    def num_processes(self) -> int:
        """Processes of a run: one for each GPU."""
        return max(len(self.gpus or ()), 1)

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line of a run: with torchrun where there are several processes."""
        ranks = [torchrun.__name__, "--standalone", f"--nproc-per-node={self.num_processes}", "-m"]
        return [sys.executable, "-m", *(ranks if self.num_processes > 1 else []), "linnaeus.main", *words]

    def env(self) -> dict[str, str]:
        """The run's changes to the environment."""
        changes = {} if self.gpus is None else {VISIBLE_GPUS: ",".join(self.gpus)}
        if self.cores and "OMP_NUM_THREADS" not in os.environ:
            changes["OMP_NUM_THREADS"] = str(max(len(self.cores) // self.num_processes, 1))
        return changes

    def __str__(self) -> str:
        gpus = "" if self.gpus is None else f"GPU {', '.join(self.gpus) or 'none'}"
        cores = f"CPU core {', '.join(map(str, self.cores))}" if self.cores else ""
        return "; ".join(text for text in (gpus, cores) if text) or "the whole machine"


def divide(num_jobs: int, gpus: Sequence[str], cores: Sequence[int]) -> list[Share]:
    """Equal shares of a machine; what cannot be divided equally is left over, and no share is empty.

    With fewer GPUs or cores than jobs, several jobs have the same one.

    >>> [share.gpus for share in divide(2, ["0", "1", "2", "3"], [])]
    [('0', '1'), ('2', '3')]
    >>> [share.cores for share in divide(3, [], [0, 1])]
    [(0,), (1,), (0,)]
    """
    return [
        Share(_part(gpus, number, num_jobs) if gpus else None, _part(cores, number, num_jobs))
        for number in range(num_jobs)
    ]


def _part(things: Sequence[Thing], number: int, num_jobs: int) -> tuple[Thing, ...]:
    each = len(things) // num_jobs
    if each == 0:
        return (things[number % len(things)],) if things else ()
    return tuple(things[number * each : (number + 1) * each])


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    named = os.environ.get(VISIBLE_GPUS)
    if named is not None:
        return [*named_gpus(named)]
    import torch  # late: a command line with a mistake does not wait for it

    return [str(number) for number in range(torch.cuda.device_count())]


def named_gpus(text: str) -> tuple[str, ...]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES names."""
    return tuple(name.strip() for name in text.split(",") if name.strip() not in ("", "-1"))


class Local(Launcher):
    """Runs on this machine; each has a process that supervises it and outlives this one.

    Args:
        shares: one for each run that may go on at once.
    """

    poll_s = 0.2

    def __init__(self, shares: Sequence[Share]) -> None:
        self.shares = shares
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def num_processes(self) -> int:
        """One for each GPU of a share."""
        return self.shares[0].num_processes

    def room(self, active: Collection[Job]) -> int:
        """Number of shares of which no active run uses any GPU, less runs of unknown shares."""
        self.reap()
        here = [job for job in active if job.slot is not None]  # those of SLURM need none
        return max(min(len(self.shares) - len(here), len(self.free(here))), 0)

    def free(self, active: Collection[Job]) -> list[int]:
        """The numbers of the shares that no run has, also none of a sweep with other shares."""
        return [
            number
            for number, share in enumerate(self.shares)
            if not any(self._has(job, number, share) for job in active if job.slot is not None)
        ]

    def _has(self, job: Job, number: int, share: Share) -> bool:
        own = self.shares[job.slot] if job.slot is not None and 0 <= job.slot < len(self.shares) else None
        if (own is not None and own.gpus == job.gpus) or not share.gpus:
            return job.slot == number  # with fewer GPUs than runs, several shares have the same one
        return job.gpus is None or bool({*job.gpus} & {*share.gpus})

    def reap(self) -> int:
        """Reap supervisors that have ended; returns the number of those started here that still run."""
        self._processes = [process for process in self._processes if process.poll() is None]
        return len(self._processes)

    def submit(self, tasks: Sequence[Task], active: Collection[Job]) -> None:
        """Start runs, each with a free share.

        Raises:
            LinnaeusError: the folder of a run cannot be written to, or no process can be started. The runs
                before it have been.
        """
        for task, slot in zip(tasks, self.free(active)[: len(tasks)], strict=True):
            self._start(task, slot)

    def _start(self, task: Task, slot: int) -> None:
        share = self.shares[slot]
        record = {
            "launcher": "local", "host": socket.gethostname(), "slot": slot, "cores": share.cores,
            "command": share.command(task.argv), "env": share.env(), "seconds": task.seconds,
        }  # fmt: skip
        try:
            with (task.folder / OUTPUT).open("ab") as output:
                descriptor = open_locked(task.folder, record)
                try:
                    process = subprocess.Popen(
                        [*SUPERVISE, task.folder, str(descriptor)],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=output,  # the sweep's own would stay open as long as the run goes on
                        start_new_session=True,  # Ctrl-C in the terminal is for the sweep alone
                        pass_fds=[descriptor],
                    )
                finally:
                    os.close(descriptor)
            self._processes.append(process)
        except OSError as error:
            raise LinnaeusError(f"{task.folder}: the run cannot be started: {error}") from error
