"""Workers of a sweep on this machine, each with its share of the GPUs and CPU cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Share:
    """The part of this machine that one worker may use.

    Attributes:
        gpus: as in CUDA_VISIBLE_DEVICES; None leaves it unchanged.
        cores: numbers of CPU cores; empty for all that this process may use.
    """

    gpus: tuple[str, ...] | None = None
    cores: tuple[int, ...] = ()

    @property
    def num_processes(self) -> int:
        """Ranks of a run: one for each GPU."""
        return max(len(self.gpus or ()), 1)

    def env(self) -> dict[str, str]:
        """Changes to the environment."""
        changes = {} if self.gpus is None else {VISIBLE_GPUS: ",".join(self.gpus)}
        if self.cores and "OMP_NUM_THREADS" not in os.environ:
            changes["OMP_NUM_THREADS"] = str(max(len(self.cores) // self.num_processes, 1))
        return changes

    def command(self, folder: Path) -> list[str]:
        """The command line of a worker."""
        ranks = ["--nproc", str(self.num_processes)] if self.num_processes > 1 else []
        return [sys.executable, "-m", "linnaeus.main", "work", str(folder), *ranks]


def divide(num_jobs: int, gpus: Sequence[str], cores: Sequence[int]) -> list[Share]:
    """Divide a machine into equal shares. A remainder stays unused, and no share is empty.

    With fewer GPUs or cores than jobs, several jobs have the same one.

    >>> [share.gpus for share in divide(2, ["0", "1", "2", "3"], [])]
    [('0', '1'), ('2', '3')]
    >>> [share.cores for share in divide(3, [], [0, 1])]
    [(0,), (1,), (0,)]
    """

    def part(items: Sequence[Any], number: int) -> tuple[Any, ...]:
        size = max(len(items) // num_jobs, 1)
        begin = number * size % max(len(items), 1)
        return tuple(items[begin : begin + size])

    return [Share(part(gpus, n) or None, part(cores, n)) for n in range(num_jobs)]


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    named = os.environ.get(VISIBLE_GPUS)
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    import torch  # late: a command line with a mistake does not wait for it

    return [str(number) for number in range(torch.cuda.device_count())]


def start_workers(folder: Path, shares: Sequence[Share]) -> list[subprocess.Popen[bytes]]:
    """Start a worker for each share, with its output in `logs/`; it outlives this process."""
    cores, workers = os.sched_getaffinity(0), []
    (folder / "logs").mkdir(exist_ok=True)
    for number, share in enumerate(shares, start=1):
        with worker_log(folder, number).open("ab") as output:
            try:
                os.sched_setaffinity(0, share.cores or cores)  # which the worker inherits
                workers.append(
                    subprocess.Popen(
                        share.command(folder),
                        env={**os.environ, **share.env()},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,  # Ctrl-C is for this process alone
                    )
                )
            finally:
                os.sched_setaffinity(0, cores)
    return workers


def worker_log(folder: Path, number: int) -> Path:
    """Return the log file of a worker. Numbers start at 1."""
    return folder / f"logs/worker{number}.txt"
