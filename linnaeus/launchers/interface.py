"""Where runs run, and what a sweep needs to know of a launcher."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

JobKind = Literal["pending", "running", "unknown"]


@dataclass
class LaunchOptions:
    """Where a command runs.

    Attributes:
        launcher: `local`, this machine, or `slurm`.
        jobs: how many runs of a sweep may go on at once; None for one on this machine, and for all on SLURM.
        slurm: options of sbatch by their long names; None for those without a value.
        dry_run: only say what would be started.
        argv: the tokens after the command, without these options.
    """

    launcher: str = "local"
    jobs: int | None = None
    slurm: dict[str, str | None] = field(default_factory=dict)
    dry_run: bool = False
    argv: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Task:
    """A run that is to be started.

    Attributes:
        folder: the run's, for its files; it exists.
        argv: what follows `python -m linnaeus.main`.
        seconds: what earlier processes of the run have taken.
    """

    folder: Path
    argv: tuple[str, ...]
    seconds: float = 0.0


@dataclass(frozen=True)
class Job:
    """A run that goes on, or waits in a queue.

    Attributes:
        kind: "unknown" where SLURM does not answer.
        name: for people, such as `SLURM job 12_3`.
        reason: why it is pending, or its state is unknown.
        slot: which share of this machine it has, -1 where that is not known; None on SLURM.
        gpus: those of this machine that it has; None for all, or on SLURM.
    """

    kind: JobKind
    name: str
    reason: str = ""
    slot: int | None = None
    gpus: tuple[str, ...] | None = None


class Launcher(ABC):
    """Starts runs. `linnaeus.launchers.jobs` watches them.

    Attributes:
        poll_s: pause between two looks at the jobs.
    """

    poll_s: ClassVar[float]

    @property
    @abstractmethod
    def num_processes(self) -> int:
        """Processes of a run over all its nodes."""

    @abstractmethod
    def room(self, active: Collection[Job]) -> int:
        """How many more runs may be given to `submit` now, beside those that go on."""

    @abstractmethod
    def submit(self, tasks: Sequence[Task], active: Collection[Job]) -> None:
        """Start runs, or queue them.

        Args:
            tasks: at most as many as there is room for; nobody runs them yet.
            active: the jobs of the same sweep.

        Raises:
            LinnaeusError: not all of them can be started. Those that have been go on, and
                `linnaeus.launchers.jobs.active_jobs` knows them.
        """
