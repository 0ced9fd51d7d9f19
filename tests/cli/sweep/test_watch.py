"""What a sweep does with jobs that SLURM does not know, with signals, and with launchers that fail."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest

from linnaeus.cli.compare.runs import Row
from linnaeus.cli.sweep import watch as module
from linnaeus.cli.sweep.folder import lock_folder, prepare
from linnaeus.cli.sweep.session import _watch_to_the_end
from linnaeus.cli.sweep.source import Source, UnknownMetricError
from linnaeus.errors import LinnaeusError
from linnaeus.launchers.outcome import Outcome, save_outcome
from linnaeus.launchers.record import write_record
from tests.helpers.sweeps import Queue, Sweep


def nothing() -> None:
    """A look without an event before the next."""


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


@pytest.mark.parametrize("error", [UnknownMetricError("top1/b"), OSError("full")])
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
