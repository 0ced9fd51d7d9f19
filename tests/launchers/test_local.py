"""Runs on this machine, as processes that know nothing of training: started, watched, joined, ended."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from linnaeus.errors import LinnaeusError
from linnaeus.launchers.interface import Job, Task
from linnaeus.launchers.jobs import cancel, going, lost
from linnaeus.launchers.local import Local, Share, divide
from linnaeus.launchers.outcome import OUTPUT, Outcome, read_outcome
from linnaeus.launchers.record import read_record, rewrite
from tests.conftest import wait_until

LASTING = """\
import signal, sys, time
def stop(number, frame):
    print("saving", flush=True)
    time.sleep({saving})
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
print("up", flush=True)
time.sleep(60)
"""
RESULT = '{"training_s": 1.0, "metrics": {}}'


class Program(Share):
    """The share of a run that executes Python's `-c` with its words."""

    def command(self, words: object) -> list[str]:
        return [sys.executable, "-c", *words]  # type: ignore[misc]


@pytest.fixture
def launcher() -> Iterator[Local]:
    here = Local([Program()] * 2)
    yield here
    wait_until(lambda: here.room([]) == 2 and not here._processes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    (path / "logs").mkdir(parents=True)
    return path


def start(launcher: Local, folder: Path, program: str, seconds: float = 0.0) -> Job:
    launcher.submit([Task(folder, (program,), seconds)], [])
    return going([folder])[folder]


def ended(folder: Path) -> Outcome:
    wait_until(lambda: not going([folder]))
    outcome = read_outcome(folder)
    assert outcome is not None
    return outcome


def text(folder: Path) -> str:
    path = folder / OUTPUT
    return path.read_text() if path.exists() else ""


def test_a_run_that_ends_well_leaves_its_outcome(launcher: Local, folder: Path) -> None:
    program = f"open('{folder}/result.json', 'w').write('{RESULT}'); print('done')"
    job = start(launcher, folder, program, seconds=100.0)
    assert (job.kind, job.slot) == ("running", 0)
    outcome = ended(folder)
    assert outcome.finished
    assert outcome.result == json.loads(RESULT)
    assert 100 < outcome.seconds < 160, "earlier processes count"
    assert text(folder) == "done\n"


def test_a_run_that_fails_gives_its_reason(launcher: Local, folder: Path) -> None:
    start(launcher, folder, "import sys; print('- too large'); sys.exit(3)")
    outcome = ended(folder)
    assert (outcome.exit_code, outcome.reason, outcome.was_interrupted) == (3, "too large", False)


def test_a_run_without_a_result_has_failed(launcher: Local, folder: Path) -> None:
    start(launcher, folder, "pass")
    outcome = ended(folder)
    assert (outcome.exit_code, outcome.reason, outcome.finished) == (0, "ended without result.json", False)


def test_a_run_that_is_asked_to_end_has_time_to_save(launcher: Local, folder: Path) -> None:
    start(launcher, folder, LASTING.format(saving=1.5))
    wait_until(lambda: "up" in text(folder))
    cancel([folder])
    outcome = ended(folder)
    assert (outcome.exit_code, outcome.was_stopped) == (130, True)
    assert outcome.seconds > 1.5, "it was not killed meanwhile"
    assert text(folder) == "up\nsaving\n"


def test_a_run_that_is_asked_twice_ends_at_once(launcher: Local, folder: Path) -> None:
    start(launcher, folder, LASTING.format(saving=60))
    wait_until(lambda: "up" in text(folder))
    cancel([folder])
    wait_until(lambda: "saving" in text(folder))
    began = time.monotonic()
    cancel([folder])
    assert ended(folder).was_interrupted
    assert time.monotonic() - began < 30


def test_a_run_outlives_its_supervisor_and_can_still_be_ended(launcher: Local, folder: Path) -> None:
    start(launcher, folder, LASTING.format(saving=0))
    wait_until(lambda: "up" in text(folder))
    record = read_record(folder)
    assert record is not None
    os.kill(record["supervisor"][0], signal.SIGKILL)
    wait_until(lambda: not launcher._processes or (launcher.room([]) == 2 and not launcher._processes))
    assert going([folder])[folder].kind == "running"
    cancel([folder])
    wait_until(lambda: not going([folder]))
    assert "saving" in text(folder)
    assert read_outcome(folder) is None
    outcome = lost(folder)
    assert outcome is not None
    assert outcome.was_interrupted, "so that it is resumed"
    assert f"process {record['supervisor'][0]} on " in str(outcome.reason)


def test_a_file_system_without_locks(launcher: Local, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    start(launcher, folder, LASTING.format(saving=0))
    wait_until(lambda: "up" in text(folder))
    assert going([folder])[folder].kind == "running"
    cancel([folder])
    assert ended(folder).was_stopped


def test_a_number_that_another_process_has_by_now_is_left_alone(launcher: Local, folder: Path) -> None:
    start(launcher, folder, "pass")
    ended(folder)
    record = read_record(folder)
    assert record is not None
    own = psutil.Process()
    (folder / "job.json").write_text(json.dumps({**record, "supervisor": [own.pid, own.create_time() - 9]}))
    cancel([folder])  # SIGINT would end this test
    assert not going([folder])


def test_a_run_of_another_machine_is_not_ended_from_here(launcher: Local, folder: Path) -> None:
    start(launcher, folder, LASTING.format(saving=0))
    wait_until(lambda: "up" in text(folder))
    record = read_record(folder)
    assert record is not None
    descriptor = os.open(folder / "job.json", os.O_RDWR)
    rewrite(descriptor, {**record, "host": "elsewhere"})
    with pytest.raises(LinnaeusError, match=f"process {record['supervisor'][0]} on elsewhere: go on there"):
        cancel([folder])
    assert going([folder])[folder].name.endswith("on elsewhere")
    rewrite(descriptor, record)
    os.close(descriptor)
    cancel([folder])
    assert ended(folder).was_stopped


def test_a_free_share_is_taken(launcher: Local, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        (folder / "logs").mkdir(parents=True)
    busy = {folders[0]: start(launcher, folders[0], LASTING.format(saving=0))}
    assert launcher.room(busy.values()) == 1
    launcher.submit([Task(folders[1], (LASTING.format(saving=0),))], busy.values())
    jobs = going(folders)
    assert {folder.name: job.slot for folder, job in jobs.items()} == {"a": 0, "b": 1}
    assert launcher.room(jobs.values()) == 0
    for folder in folders[:2]:
        wait_until(lambda folder=folder: "up" in text(folder))  # type: ignore[misc]
    cancel(folders)
    assert ended(folders[0]).was_stopped
    assert ended(folders[1]).was_stopped
    assert lost(folders[2]) is None, "nobody has started it"


def test_the_share_of_a_run_is_what_it_gets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    core = min(os.sched_getaffinity(0))
    launcher = Local([Program(("3", "4"), (core,))])
    names = ["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"]
    start(launcher, folder, f"import os; print([os.environ[n] for n in {names}], os.sched_getaffinity(0))")
    ended(folder)
    assert text(folder) == f"['3,4', '1'] {{{core}}}\n"
    wait_until(lambda: launcher.room([]) == 1 and not launcher._processes)


@pytest.mark.parametrize(
    ("jobs", "gpus", "expected"),
    [
        (1, "0123", ["0123"]), (2, "0123", ["01", "23"]), (3, "01234567", ["01", "23", "45"]),
        (2, "0", ["0", "0"]), (4, "01", ["0", "1", "0", "1"]),
    ],
)  # fmt: skip
def test_gpus_are_divided(jobs: int, gpus: str, expected: list[str]) -> None:
    assert ["".join(share.gpus or ()) for share in divide(jobs, [*gpus], [])] == expected


def test_a_machine_without_gpus_changes_nothing_about_them() -> None:
    assert [share.gpus for share in divide(2, [], [0, 1])] == [None, None]
    assert [share.num_processes for share in divide(2, [], [0, 1])] == [1, 1]
