"""Sweeps without training: a queue that notes what it is given, and events in place of waiting."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from linnaeus.cli.compare.runs import Comparison
from linnaeus.cli.sweep.folder import prepare
from linnaeus.cli.sweep.options import PlannedRun, read
from linnaeus.cli.sweep.source import Source
from linnaeus.cli.sweep.stop import Stop
from linnaeus.cli.sweep.watch import Watch
from linnaeus.console import make_console
from linnaeus.launchers.interface import Job, Launcher, Task
from linnaeus.launchers.record import write_slurm_record


class Queue(Launcher):
    """Notes what it is given, as a job of SLURM that has the number of its call.

    Args:
        size: jobs that it has room for.
        at_submit: called after the first run of each submission has its job.
    """

    poll_s = 30.0
    num_processes = 1

    def __init__(self, size: int = 100, at_submit: Callable[[], object] = lambda: None) -> None:
        self.size, self.at_submit = size, at_submit
        self.started: list[Path] = []

    def room(self, active: Collection[Job]) -> int:
        return self.size - len(active)

    def submit(self, tasks: Sequence[Task], active: Collection[Job]) -> None:
        for task in tasks:
            write_slurm_record(task.folder, str(len(self.started)))
            self.started.append(task.folder)
            self.at_submit()


class Script(Stop):
    """Ctrl-C and SIGTERM of a sweep in which something happens between two looks, in place of a sleep.

    Attributes:
        events: what happens after each look; nothing after the last of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.events: list[Callable[[], object]] = []

    def wait(self, seconds: float) -> None:
        self.seconds += seconds
        assert self.seconds < 10_000, "it waits for ever"
        if self.events:
            self.events.pop(0)()

    def receive(self, number: int) -> None:
        self.signals.append(number)


@functools.cache
def planned(seeds: str) -> list[PlannedRun]:
    """The runs, below the current folder."""
    found = read([f"EXPERIMENT.SEED={seeds}", "EXPERIMENT.OUTPUT_DIR=.", "EXPERIMENT.NAME=s"])
    assert isinstance(found, tuple)
    return found[1]


class Sweep:
    """A sweep over some seeds, with what it needs."""

    def __init__(self, queue: Queue, limit: int | None = None, seeds: str = "0,1,2") -> None:
        self.runs = planned(seeds)
        self.folders = [run.folder for run in self.runs]
        self.stop, self.table = Script(), Comparison([])
        self.saved: list[list[str]] = []
        self.watch = Watch(
            self.table, Source(self.runs), queue, self.stop, make_console(),
            lambda: self.saved.append(self.statuses), limit,
        )  # fmt: skip

    @property
    def statuses(self) -> list[str]:
        return [row.status for row in self.table.rows]

    def start_before(self, *numbers: int) -> None:
        """Let an earlier process have started some of the runs."""
        for number in numbers:
            prepare(self.folders[number], self.runs[number].config)
            write_slurm_record(self.folders[number], str(number))

    def run(self) -> None:
        self.watch.join()
        self.watch.to_the_end()
