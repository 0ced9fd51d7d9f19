"""Runs on this machine, as processes that know nothing of training: started, watched, joined, ended."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from linnaeus.errors import LinnaeusError
from linnaeus.files import OUTCOME
from linnaeus.launchers import slurm_commands
from linnaeus.launchers.interface import Job, Task
from linnaeus.launchers.jobs import active_jobs, cancel, lost_outcome
from linnaeus.launchers.local import Local, Share, divide
from linnaeus.launchers.outcome import OUTPUT, Outcome, read_outcome, save_outcome
from linnaeus.launchers.record import (
    LOCK,
    PROCESSES,
    RECORD,
    identity,
    lives,
    read_record,
    write_record,
    write_slurm_record,
)
from tests.helpers.runs import wait_until

LASTING = """\
import signal, sys
def stop(number, frame):
    print("saving", flush=True)
    {saving}
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
print("up", flush=True)
signal.pause()
"""
ENDS = LASTING.format(saving="pass")
"""A program that ends when it is asked to."""
RESULT = '{"training_s": 1.0, "metrics": {}}'


class Program(Share):
    """The share of a run that executes Python's `-c` with its words."""

    def command(self, words: object) -> list[str]:
        return [sys.executable, "-c", *words]  # type: ignore[misc]


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Local]:
    """No process that a record names outlives a test, also one that fails."""
    here = Local([Program()] * 2)
    yield here
    for record in filter(None, map(read_record, tmp_path.iterdir())):
        for process in (record[name] for name in PROCESSES if name in record and lives(*record[name])):
            with suppress(ProcessLookupError):
                os.kill(process[0], signal.SIGKILL)
    wait_until(lambda: here.reap() == 0)


def start(launcher: Local, folder: Path, program: str, seconds: float = 0.0) -> Job:
    """Start a run; one that lasts until it is asked to end is up then."""
    launcher.submit([Task(folder, (program,), seconds)], [])
    job = active_jobs([folder])[folder]
    if "signal.pause()" in program:
        wait_until(lambda: "up" in text(folder))
    return job


def ended(folder: Path) -> Outcome:
    wait_until(lambda: not active_jobs([folder]))
    outcome = read_outcome(folder)
    assert outcome is not None
    return outcome


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The lock of a local run, held by this process."""
    with (folder / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def text(folder: Path) -> str:
    path = folder / OUTPUT
    return path.read_text() if path.exists() else ""


def record_of(folder: Path) -> dict[str, Any]:
    found = read_record(folder)
    assert found is not None
    return found


def kill(folder: Path, *names: str) -> None:
    """Kill processes of a run."""
    record = record_of(folder)
    for name in names:
        os.kill(record[name][0], signal.SIGKILL)
        wait_until(lambda name=name: not lives(*record[name]))  # type: ignore[misc]


def lost(folder: Path) -> Outcome:
    found = lost_outcome(folder)
    assert found is not None
    return found


def test_a_run_gets_its_share_and_leaves_its_outcome(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    core = min(os.sched_getaffinity(0))
    launcher = Local([Program(("3", "4"), (core,))])
    names = ["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"]
    (folder / "result.json").write_text(RESULT)  # of the run's earlier process, whose training was shorter
    program = f"""
import os
open('{folder}/result.json', 'w').write('{RESULT}')
print([os.environ[n] for n in {names}], os.sched_getaffinity(0))
"""
    job = start(launcher, folder, program, seconds=100.0)
    assert (job.kind, job.slot) == ("running", 0)
    outcome = ended(folder)
    assert outcome.finished
    assert outcome.result == json.loads(RESULT)
    assert outcome.seconds > 100, "earlier processes count"
    assert text(folder) == f"['3,4', '1'] {{{core}}}\n"
    wait_until(lambda: launcher.reap() == 0)


def test_a_run_that_fails_gives_its_reason(launcher: Local, folder: Path) -> None:
    start(launcher, folder, "import sys; print('- large'); sys.exit(3)")
    outcome = ended(folder)
    assert (outcome.exit_code, outcome.reason, outcome.was_interrupted) == (3, "large", False)


def test_a_run_that_is_asked_to_end_has_time_to_save(launcher: Local, folder: Path) -> None:
    os.mkfifo(folder / "saved")
    start(launcher, folder, LASTING.format(saving=f"open('{folder}/saved').read()"))
    cancel([folder])
    wait_until(lambda: "saving" in text(folder))
    assert active_jobs([folder])
    (folder / "saved").write_text("")
    outcome = ended(folder)
    assert (outcome.exit_code, outcome.was_stopped) == (130, True)


def test_a_run_that_is_asked_twice_ends_at_once(launcher: Local, folder: Path) -> None:
    start(launcher, folder, LASTING.format(saving="signal.pause()"))
    cancel([folder])
    wait_until(lambda: "saving" in text(folder))
    cancel([folder])
    assert ended(folder).was_interrupted


def test_a_run_outlives_its_supervisor_and_can_still_be_ended(launcher: Local, folder: Path) -> None:
    start(launcher, folder, ENDS)
    kill(folder, "supervisor")
    wait_until(lambda: launcher.reap() == 0)
    assert active_jobs([folder])[folder].kind == "running"
    cancel([folder])
    wait_until(lambda: not active_jobs([folder]))
    assert "saving" in text(folder)
    assert read_outcome(folder) is None
    assert lost(folder).was_interrupted, "so that it is resumed"


HERE = {"launcher": "local", "host": socket.gethostname(), "slot": 0}


def test_a_number_that_another_process_has_by_now_is_left_alone(folder: Path) -> None:
    pid, began = identity(os.getpid())
    with locked(folder):
        write_record(folder, {**HERE, "supervisor": (pid, f"1{began}"), "child": (pid, f"2{began}")})
        assert not active_jobs([folder]), "whatever holds the lock, it is no process of the run"
        cancel([folder])  # SIGINT would end this test
        write_record(folder, {**HERE, "supervisor": (pid, began)})
        assert active_jobs([folder])


def test_a_worker_that_outlives_the_training_does_not_keep_the_run(launcher: Local, folder: Path) -> None:
    os.mkfifo(folder / "ends")
    start(launcher, folder, f"import os; os.fork() or open('{folder}/ends').read()")
    wait_until(lambda: (folder / OUTCOME).exists() and launcher.reap() == 0)
    (folder / OUTCOME).unlink()  # it would say that the run has ended
    with (folder / LOCK).open() as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert not active_jobs([folder])
        (folder / "ends").write_text("")
        fcntl.flock(file, fcntl.LOCK_SH)  # the worker alone had it


def test_a_rank_that_outlives_torchrun_keeps_the_run(launcher: Local, folder: Path) -> None:
    """Those that torchrun starts do not have the launcher's lock, but the first has that of the run."""
    rank = f"""
from linnaeus.files import FolderLock; from pathlib import Path
held = FolderLock(Path('{folder}'))
{ENDS}"""
    start(launcher, folder, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])")
    kill(folder, *PROCESSES)
    with (folder / LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # it alone would say that nobody runs it
    assert active_jobs([folder])[folder].kind == "running"
    cancel([folder])
    wait_until(lambda: not active_jobs([folder]))
    assert "saving" in text(folder)


@pytest.mark.parametrize(
    "content",
    [
        "[]", '{"launcher": "local", "host": "a", "slot": 0, "child": 1}',
        '{"launcher": "slurm", "script": "s.sh"}',
    ],
)  # fmt: skip
def test_a_damaged_record_is_none(folder: Path, content: str) -> None:
    (folder / RECORD).write_text(content)
    assert read_record(folder) is None
    assert not active_jobs([folder])
    assert lost_outcome(folder) is None
    cancel([folder])


@pytest.mark.parametrize("old", [True, False])
def test_a_run_that_is_stopped_after_its_result_has_finished(
    launcher: Local, folder: Path, old: bool
) -> None:
    """A result of an earlier process does not count, which is the negative control."""
    if old:
        (folder / "result.json").write_text(RESULT)
    save_outcome(folder, Outcome(130, 50.0))
    writes = "" if old else f"open('{folder}/result.json', 'w').write('{RESULT}')"
    start(launcher, folder, f"{writes}\n{ENDS}")
    cancel([folder])
    outcome = ended(folder)
    assert (outcome.finished, outcome.was_stopped) == (not old, old)


def test_a_run_has_no_outcome_while_it_goes_on(launcher: Local, folder: Path) -> None:
    """That of its earlier process would count when nobody sees its end."""
    save_outcome(folder, Outcome(130, 1000.0, "SIGINT"))
    start(launcher, folder, ENDS)
    assert read_outcome(folder) is None
    kill(folder, *PROCESSES)
    wait_until(lambda: not active_jobs([folder]))
    assert (lost(folder).seconds, lost(folder).was_interrupted) == (1000.0, True), (
        "what it took before counts"
    )


def test_an_outcome_that_is_final_hides_the_job_of_slurm(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_commands, "queue", lambda: "unreachable")
    write_slurm_record(folder, "12")
    for outcome, is_shown in (
        (Outcome(1, 1.0, "fails"), False), (Outcome(130, 1.0, "stopped"), True),
        (Outcome(-9, 1.0), True), (Outcome(0, 1.0, None, {}), False),
    ):  # fmt: skip
        save_outcome(folder, outcome)
        assert [job.kind for job in active_jobs([folder]).values()] == ["unknown"] * is_shown


def test_a_free_share_is_taken(launcher: Local, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders[:2]:
        (folder / "logs").mkdir(parents=True)
    first, second, missing = (Task(folder, (ENDS,)) for folder in folders)
    with pytest.raises(LinnaeusError, match=str(missing.folder)):
        launcher.submit([first, missing], [])
    found = active_jobs(folders)
    assert {*found} == {first.folder}, "what was started before goes on"
    assert launcher.room(found.values()) == 1
    launcher.submit([second], found.values())
    found = active_jobs(folders)
    assert {folder.name: job.slot for folder, job in found.items()} == {"a": 0, "b": 1}
    assert launcher.room(found.values()) == 0
    wait_until(lambda: all("up" in text(folder) for folder in folders[:2]))
    cancel(folders)
    assert ended(folders[0]).was_stopped
    assert ended(folders[1]).was_stopped
    assert lost_outcome(folders[2]) is None, "nobody has started it"


@pytest.mark.parametrize(
    ("num_jobs", "gpus", "expected"),
    [(3, "01234567", ["01", "23", "45"]), (4, "01", ["0", "1", "0", "1"]), (2, "", ["", ""])],
)
def test_gpus_are_divided(num_jobs: int, gpus: str, expected: list[str]) -> None:
    shares = divide(num_jobs, [*gpus], [0, 1])
    assert ["".join(share.gpus or ()) for share in shares] == expected
    assert all((share.gpus is None) == (not gpus) for share in shares), "None changes nothing about them"


def running(slot: int, gpus: str | None) -> Job:
    return Job("running", "", slot=slot, gpus=None if gpus is None else tuple(gpus))


@pytest.mark.parametrize(
    ("active", "num_jobs", "gpus", "free"),
    [
        # Runs that a sweep with other shares has started, the new shares, and which of these are free.
        ([running(0, "01"), running(1, "23")], 4, "0123", []), ([running(1, "23")], 4, "0123", [0, 1]),
        ([running(0, None)], 4, "0123", []), ([running(-1, None)], 2, "0123", []),
        ([running(3, "3")], 2, "0123", [0]), ([running(0, "45")], 2, "0123", [0]),
        ([running(0, "0"), running(1, "1"), running(2, "2")], 2, "0123", []),
        ([running(1, "0")], 3, "0", [0, 2]),  # shares of one GPU
        ([Job("pending", "SLURM job 1")] * 3, 2, "01", [0, 1]),
    ],
)  # fmt: skip
def test_runs_that_go_on_keep_their_gpus(
    active: list[Job], num_jobs: int, gpus: str, free: list[int]
) -> None:
    launcher = Local(divide(num_jobs, [*gpus], []))
    assert launcher.free(active)[: launcher.room(active)] == free
