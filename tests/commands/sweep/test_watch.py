"""What a sweep does with jobs that SLURM does not know, with signals, and with launchers that fail."""

from __future__ import annotations

import functools
import logging
import os
import signal
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pytest

from linnaeus.commands.compare.results import Comparison, Row
from linnaeus.commands.sweep import watch as module
from linnaeus.commands.sweep.folder import lock_folder, prepare
from linnaeus.commands.sweep.options import PlannedRun, read
from linnaeus.commands.sweep.session import _Files, _watch_to_the_end
from linnaeus.commands.sweep.source import Source, UnknownMetricError
from linnaeus.commands.sweep.stop import Stop
from linnaeus.commands.sweep.watch import Watch
from linnaeus.console import make_console
from linnaeus.errors import LinnaeusError
from linnaeus.launchers.interface import Job, Launcher, Task
from linnaeus.launchers.outcome import Outcome, save_outcome
from linnaeus.launchers.record import write_record, write_slurm_record


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
    """Ctrl-C and SIGTERM of a sweep that does not sleep between two looks: something happens then.

    Attributes:
        events: what happens after each look; nothing after the last of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Callable[[], object]] = []

    def wait(self, seconds: float) -> None:
        if self.events:
            self.events.pop(0)()

    def receive(self, number: int) -> None:
        self.signals.append(number)


def nothing() -> None:
    """A look without an event before the next."""


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


@pytest.fixture(autouse=True)
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder with commands: there is no SLURM that answers, so that jobs are unknown."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize("limit", [None, 2])
def test_the_limit_of_a_search_also_holds_for_runs_that_are_resumed(limit: int | None) -> None:
    queue = Queue()
    sweep = Sweep(queue, limit)
    queue.at_submit = lambda: sweep.stop.receive(signal.SIGTERM)
    sweep.run()
    assert queue.started == sweep.folders[:limit]


def test_runs_that_a_failing_launcher_has_started_are_active() -> None:
    def fail() -> None:
        raise LinnaeusError("full")

    sweep = Sweep(Queue(at_submit=fail))
    with pytest.raises(LinnaeusError, match="full"):
        sweep.run()
    assert sweep.saved[-1] == ["unknown", "not run", "not run"]


@pytest.mark.parametrize("is_local", [True, False])
def test_local_runs_of_an_earlier_list_of_values_take_room(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_local: bool
) -> None:
    Sweep(Queue()).start_before(0)
    if is_local:
        monkeypatch.setattr(module, "_is_on_slurm", lambda _: False)
    queue = Queue(size=2)
    sweep = Sweep(queue, seeds="1,2,3")
    queue.at_submit = lambda: sweep.stop.signals.append(signal.SIGTERM)
    monkeypatch.setattr(module, "cancel", lambda _: sweep.watch._active.clear())
    with caplog.at_level(logging.WARNING):
        sweep.run()
    assert len(queue.started) == (1 if is_local else 2)
    assert ("SEED=0" in caplog.text) == is_local


def test_cancelling_that_fails_is_said_and_the_watch_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one answer is yes; the second Ctrl-C leaves."""
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: "y")
    sweep = Sweep(Queue())
    sweep.start_before(0, 1, 2)
    sweep.watch.join()
    sweep.stop.signals.append(signal.SIGINT)
    sweep.stop.events = [nothing, lambda: sweep.stop.receive(signal.SIGINT)]
    with caplog.at_level(logging.WARNING):
        sweep.watch.to_the_end()
    assert caplog.text.count("scancel 0 1 2") == 1
    assert sweep.stop.signals == [signal.SIGINT] * 2


def test_sigterm_at_the_question_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_for_an_answer(_: str) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "y"

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", wait_for_an_answer)
    sweep = Sweep(Queue())
    sweep.start_before(0, 1, 2)
    sweep.watch.join()
    with sweep.stop.listening():
        sweep.stop.signals.append(signal.SIGINT)
        sweep.watch.to_the_end()
    assert sweep.statuses == ["unknown"] * 3, "nobody has tried to cancel them"


@pytest.mark.parametrize(("num_looks", "status"), [(3, "finished"), (4, "interrupted")])
def test_the_outcome_of_a_job_may_come_late(commands: Path, num_looks: int, status: str) -> None:
    """A file server shows it when the job has left the queue already."""
    (commands / "squeue").write_text("#!/bin/sh\n")
    queue = Queue()
    sweep = Sweep(queue)
    result = {"metrics": {"loss": 1.0}, "training_s": 1.0}

    def end() -> None:
        for folder in queue.started:
            save_outcome(folder, Outcome(0, 1.0, None, result))

    queue.at_submit = lambda: (commands / "squeue").chmod(0o755)
    sweep.stop.events = [nothing] * num_looks + [end]
    sweep.run()
    assert sweep.statuses == [status] * 3


def answer(commands: Path, *jobs: str) -> None:
    """Let SLURM answer that it has these jobs, running."""
    lines = "".join(f"{job}|RUNNING|None||\\n" for job in jobs)
    (commands / "squeue").write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    (commands / "squeue").chmod(0o755)


@pytest.mark.parametrize("is_released", [False, True])
def test_a_run_whose_submission_was_lost_is_submitted_again_or_named(
    commands: Path, caplog: pytest.LogCaptureFixture, is_released: bool
) -> None:
    """SLURM does not answer when the sweep joins, and does not have the job when it answers again."""
    queue = Queue()
    sweep = Sweep(queue, seeds="0,1")
    for number in (0, 1):
        prepare(sweep.folders[number], sweep.runs[number].config)
        record = {"launcher": "slurm", "script": "lost.sh", "index": number}
        write_record(sweep.folders[number], record)
    sweep.watch.lock = lock_folder(Path("s"))
    if is_released:
        sweep.watch.lock.release()
    queue.at_submit = lambda: sweep.stop.receive(signal.SIGTERM)
    sweep.stop.events = [lambda: answer(commands)]
    with caplog.at_level(logging.WARNING):
        sweep.run()
    assert queue.started == ([] if is_released else sweep.folders)
    assert len(caplog.records) == 4, "they may go on; and no job has them"


def test_a_run_that_another_sweep_has_started_again_is_watched_again(commands: Path) -> None:
    """It does not stay failed in the files that this sweep writes last."""
    sweep = Sweep(Queue(), seeds="0,1")
    sweep.start_before(0, 1)
    answer(commands, "0", "1")
    sweep.watch.join()
    result = {"metrics": {"loss": 1.0}, "training_s": 1.0}

    def fail() -> None:
        save_outcome(sweep.folders[0], Outcome(1, 1.0, "why"))
        answer(commands, "1")

    def again() -> None:
        assert sweep.statuses == ["failed", "running"]
        sweep.start_before(0)
        write_slurm_record(sweep.folders[0], "7")
        answer(commands, "1", "7")

    def end() -> None:
        assert sweep.statuses == ["running", "running"]
        for folder in sweep.folders:
            save_outcome(folder, Outcome(0, 1.0, None, result))
        answer(commands)

    sweep.stop.events = [fail, again, end]
    sweep.watch.to_the_end()
    assert sweep.saved[-1] == ["finished"] * 2
    assert ["failed", "running"] in sweep.saved, "the control"


def test_figures_that_cannot_be_written_end_no_sweep_and_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sweep = Sweep(Queue())
    sweep.start_before(0, 1, 2)
    sweep.watch.join()
    files = _Files(sweep.table, Path("s"), lock_folder(Path("s")))
    Path("s/sweep.json").mkdir()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert [files.save(), files.save()] == [False, False]
        assert len(caplog.records) == 1
        assert "sweep.json" in caplog.text
        Path("s/sweep.json").rmdir()
        assert files.save()
        assert Path("s/sweep.csv").exists()


@pytest.mark.parametrize("error", [UnknownMetricError("top1/b"), LinnaeusError("full"), OSError("full")])
def test_runs_end_with_a_search_for_a_metric_that_they_lack(
    commands: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Nobody needs them, and no other command could end them. Those of any other sweep that ends go on."""

    class Failing(Source):
        def prunes(self, row: Row) -> bool:
            raise error

    cancelled: list[Path] = []
    monkeypatch.setattr(module, "cancel", cancelled.extend)
    sweep = Sweep(Queue())
    sweep.watch._source = Failing(sweep.runs)
    sweep.start_before(0, 1)
    answer(commands, "0", "1")
    sweep.watch.join()
    failure = _watch_to_the_end(sweep.watch, Path("s"))
    assert isinstance(failure, LinnaeusError)
    assert str(error) in str(failure)
    assert cancelled == (sweep.folders[:2] if isinstance(error, UnknownMetricError) else [])
