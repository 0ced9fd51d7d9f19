"""Runs on this machine, as processes that know nothing of training: started, watched, joined, ended."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

from linnaeus.errors import LinnaeusError
from linnaeus.files import OUTCOME
from linnaeus.launchers import jobs, slurm_commands
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
from linnaeus.launchers.supervise import Supervisor
from tests.helpers.runs import wait_until

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
    wait_until(lambda: here.reap() == 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    (path / "logs").mkdir(parents=True)
    return path


def start(launcher: Local, folder: Path, program: str, seconds: float = 0.0) -> Job:
    launcher.submit([Task(folder, (program,), seconds)], [])
    return active_jobs([folder])[folder]


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
    wait_until(lambda: launcher.reap() == 0)
    assert active_jobs([folder])[folder].kind == "running"
    cancel([folder])
    wait_until(lambda: not active_jobs([folder]))
    assert "saving" in text(folder)
    assert read_outcome(folder) is None
    outcome = lost_outcome(folder)
    assert outcome is not None
    assert outcome.was_interrupted, "so that it is resumed"
    assert f"process {record['supervisor'][0]} on " in str(outcome.reason)


def test_a_file_system_without_locks(launcher: Local, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    start(launcher, folder, LASTING.format(saving=0))
    wait_until(lambda: "up" in text(folder))
    assert active_jobs([folder])[folder].kind == "running"
    cancel([folder])
    assert ended(folder).was_stopped


def test_a_number_that_another_process_has_by_now_is_left_alone(launcher: Local, folder: Path) -> None:
    start(launcher, folder, "pass")
    ended(folder)
    record = read_record(folder)
    assert record is not None
    pid, began = identity(os.getpid())
    (folder / OUTCOME).unlink()  # it would say that the run has ended
    with locked(folder):
        write_record(folder, {**record, "supervisor": (pid, f"1{began}"), "child": (pid, f"2{began}")})
        assert not active_jobs([folder]), "whatever holds the lock, it is no process of the run"
        cancel([folder])  # SIGINT would end this test
        write_record(folder, {**record, "supervisor": (pid, began)})
        assert active_jobs([folder])


def test_a_process_is_known_by_no_clock_that_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "60"])
    known, created = identity(child.pid), psutil.Process(child.pid).create_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 0.0)
    assert psutil.Process(child.pid).create_time() != created, "the negative control"
    assert lives(*known)
    child.kill()
    wait_until(lambda: not lives(*known))  # its exit code has not been read yet
    child.wait()
    assert not lives(*known)


def test_a_run_of_another_machine_is_not_ended_from_here(launcher: Local, folder: Path) -> None:
    start(launcher, folder, LASTING.format(saving=0))
    wait_until(lambda: "up" in text(folder))
    record = read_record(folder)
    assert record is not None
    write_record(folder, {**record, "host": "elsewhere"})
    with pytest.raises(LinnaeusError, match=f"process {record['supervisor'][0]} on elsewhere: goes on there"):
        cancel([folder])
    assert active_jobs([folder])[folder].name.endswith("on elsewhere")
    write_record(folder, record)
    cancel([folder])
    assert ended(folder).was_stopped


def test_a_worker_that_outlives_the_training_does_not_keep_the_run(launcher: Local, folder: Path) -> None:
    start(launcher, folder, "import os; os.fork() or os.execlp('sleep', 'sleep', '600')")
    wait_until(lambda: (folder / OUTCOME).exists() and launcher.reap() == 0)
    (folder / OUTCOME).unlink()  # it would say that the run has ended
    with (folder / LOCK).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert not active_jobs([folder])
    [worker] = [one for one in psutil.process_iter() if folder / LOCK in opened(one)]
    worker.kill()


def opened(process: psutil.Process) -> list[Path]:
    """The files that a process has open."""
    try:
        return [path.readlink() for path in Path(f"/proc/{process.pid}/fd").iterdir()]
    except OSError:
        return []


def test_a_rank_that_outlives_torchrun_keeps_the_run(launcher: Local, folder: Path) -> None:
    """Those that torchrun starts do not have the launcher's lock, but the first has that of the run."""
    rank = LASTING.format(saving=0).replace(
        'print("up"', f"held = FolderLock(Path('{folder}')); print(\"up\""
    )
    rank = f"from linnaeus.files import FolderLock; from pathlib import Path\n{rank}"
    start(launcher, folder, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])")
    wait_until(lambda: "up" in text(folder))
    record = read_record(folder)
    assert record is not None
    for name in PROCESSES:
        os.kill(record[name][0], signal.SIGKILL)
        wait_until(lambda name=name: not lives(*record[name]))  # type: ignore[misc]
    with (folder / LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # it alone would say that nobody runs it
    assert active_jobs([folder])[folder].kind == "running"
    cancel([folder])
    wait_until(lambda: not active_jobs([folder]))
    assert "saving" in text(folder)


def test_a_process_that_does_not_say_who_it_is_cannot_be_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "START_S", 0.2)
    with locked(folder):
        for record in (None, {"launcher": "local", "host": socket.gethostname(), "slot": 1}):
            if record is None:
                (folder / RECORD).write_text('{"launcher": "lo')
            else:
                write_record(folder, record)
            [job] = active_jobs([folder]).values()
            assert (job.kind, job.slot) == ("running", -1 if record is None else 1)
            with pytest.raises(LinnaeusError, match=r"job\.json: names no process to end, 0\.2 s after"):
                cancel([folder, folder])
    assert not active_jobs([folder])
    cancel([folder])


@pytest.mark.parametrize(
    "content",
    [
        "{}", "[]", "1", '{"launcher": "slurm", "id": 12}', '{"launcher": "local", "host": "a"}',
        '{"launcher": "local", "host": 1, "slot": 0}', '{"launcher": "slurm", "id": "1", "seconds": null}',
        '{"launcher": "slurm", "script": "s.sh"}', '{"launcher": "slurm", "id": null, "script": ""}',
        '{"launcher": "local", "host": "a", "slot": 0, "child": 1}', '{"launcher": "other", "id": "1"}',
    ],
)  # fmt: skip
def test_a_damaged_record_is_none(folder: Path, content: str) -> None:
    (folder / RECORD).write_text(content)
    assert read_record(folder) is None
    assert not active_jobs([folder])
    assert lost_outcome(folder) is None
    cancel([folder])


def test_a_run_that_is_stopped_after_its_result_has_finished(launcher: Local, folder: Path) -> None:
    """A result of an earlier process does not count, which is the negative control."""
    for old, program in ((True, "pass"), (False, f"open('{folder}/result.json', 'w').write('{RESULT}')")):
        if old:
            (folder / "result.json").write_text(RESULT)
        save_outcome(folder, Outcome(130, 50.0))
        start(launcher, folder, f"{program}\n{LASTING.format(saving=0)}")
        wait_until(lambda: "up" in text(folder))
        cancel([folder])
        outcome = ended(folder)
        assert (outcome.finished, outcome.was_stopped) == (not old, old)
        (folder / OUTPUT).unlink()


def test_what_a_run_took_is_not_replaced_by_its_training_alone(launcher: Local, folder: Path) -> None:
    (folder / "result.json").write_text(RESULT)
    start(launcher, folder, "pass", seconds=100.0)
    assert ended(folder).seconds > 100, "the result has training_s alone"


def test_a_run_has_no_outcome_while_it_goes_on(launcher: Local, folder: Path) -> None:
    """That of its earlier process would count when nobody sees its end."""
    save_outcome(folder, Outcome(130, 1000.0, "stopped by SIGINT"))
    start(launcher, folder, LASTING.format(saving=0))
    wait_until(lambda: "up" in text(folder))
    assert read_outcome(folder) is None
    record = read_record(folder)
    assert record is not None
    for name in PROCESSES:
        os.kill(record[name][0], signal.SIGKILL)
    wait_until(lambda: not active_jobs([folder]))
    outcome = lost_outcome(folder)
    assert outcome is not None
    assert (outcome.seconds, outcome.was_interrupted) == (1000.0, True), "what it took before counts"


def test_an_outcome_that_is_final_hides_the_job_of_slurm(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_commands, "queue", lambda: "there is no squeue here")
    write_slurm_record(folder, "12")
    for outcome, is_shown in (
        (Outcome(1, 1.0, "no such model"), False), (Outcome(130, 1.0, "stopped"), True),
        (Outcome(-9, 1.0), True), (Outcome(0, 1.0, None, {}), False),
    ):  # fmt: skip
        save_outcome(folder, outcome)
        assert [job.kind for job in active_jobs([folder]).values()] == ["unknown"] * is_shown


def test_the_process_of_a_run_leaves_its_own_errors_with_the_run(launcher: Local, folder: Path) -> None:
    class Nothing(Share):
        def command(self, words: object) -> list[str]:
            return ["/no/such/program"]

    launcher.shares = [Nothing()]
    launcher.submit([Task(folder, ())], [])
    wait_until(lambda: launcher.reap() == 0)
    assert "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/program'" in text(folder)
    outcome = lost_outcome(folder)
    assert outcome is not None
    assert "logs/output.txt says why" in str(outcome.reason)


def test_runs_before_one_that_cannot_be_started_go_on(launcher: Local, folder: Path) -> None:
    tasks = [Task(path, (LASTING.format(saving=0),)) for path in (folder, folder / "missing")]
    with pytest.raises(LinnaeusError, match="missing: the run cannot be started: "):
        launcher.submit(tasks, [])
    assert [*active_jobs([task.folder for task in tasks])] == [folder]
    wait_until(lambda: "up" in text(folder))
    cancel([folder])
    assert ended(folder).was_stopped


def test_a_signal_is_passed_on_once_whenever_it_comes() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    counts = []
    for moment in range(200):
        passed, count = list[int](), itertools.count()
        supervisor = Supervisor(lambda number, *_, passed=passed: passed.append(number))  # type: ignore[misc]

        def trace(frame: FrameType, event: str, _: object, moment: int = moment, count=count) -> Any:  # type: ignore[no-untyped-def]
            if frame.f_code.co_name not in ("wait", "_pass_on"):
                return None
            frame.f_trace_opcodes = True
            if event == "opcode" and next(count) == moment:
                signal.raise_signal(signal.SIGINT)
            return trace

        before = sys.gettrace()
        with supervisor.listening():
            try:
                sys.settrace(trace)
                supervisor.wait(child)
            finally:
                sys.settrace(before)
        counts.append(len(passed))
        if not supervisor.received:
            break
    assert counts[0] == 1, "it came before the process was known"
    assert {*counts} == {0, 1}, "0 when the process had ended"
    assert not supervisor.received, "all moments have been tried"


def test_a_free_share_is_taken(launcher: Local, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        (folder / "logs").mkdir(parents=True)
    busy = {folders[0]: start(launcher, folders[0], LASTING.format(saving=0))}
    assert launcher.room(busy.values()) == 1
    launcher.submit([Task(folders[1], (LASTING.format(saving=0),))], busy.values())
    found = active_jobs(folders)
    assert {folder.name: job.slot for folder, job in found.items()} == {"a": 0, "b": 1}
    assert launcher.room(found.values()) == 0
    for folder in folders[:2]:
        wait_until(lambda folder=folder: "up" in text(folder))  # type: ignore[misc]
    cancel(folders)
    assert ended(folders[0]).was_stopped
    assert ended(folders[1]).was_stopped
    assert lost_outcome(folders[2]) is None, "nobody has started it"


def test_the_share_of_a_run_is_what_it_gets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    core = min(os.sched_getaffinity(0))
    launcher = Local([Program(("3", "4"), (core,))])
    names = ["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"]
    start(launcher, folder, f"import os; print([os.environ[n] for n in {names}], os.sched_getaffinity(0))")
    ended(folder)
    assert text(folder) == f"['3,4', '1'] {{{core}}}\n"
    wait_until(lambda: launcher.reap() == 0)


@pytest.mark.parametrize(
    ("jobs", "gpus", "expected"),
    [
        (1, "0123", ["0123"]), (2, "0123", ["01", "23"]), (3, "01234567", ["01", "23", "45"]),
        (2, "0", ["0", "0"]), (4, "01", ["0", "1", "0", "1"]),
    ],
)  # fmt: skip
def test_gpus_are_divided(jobs: int, gpus: str, expected: list[str]) -> None:
    assert ["".join(share.gpus or ()) for share in divide(jobs, [*gpus], [])] == expected


@pytest.mark.parametrize(
    ("held", "jobs", "free"),
    [
        # The runs that go on, each with its share's number and GPUs; then the new shares that are free.
        (["0 0,1", "1 2,3"], 4, []), (["1 2,3"], 4, [0, 1]), (["0 all"], 4, []), (["0 all"], 1, []),
        (["3 3"], 2, [0]), (["1 2,3"], 2, [0]), (["0 0", "1 1", "2 2"], 2, []), (["-1 all"], 2, []),
        ([], 2, [0, 1]), (["0 4,5"], 2, [0]),
    ],
)  # fmt: skip
def test_gpus_of_runs_that_a_sweep_with_other_shares_has_started(
    held: list[str], jobs: int, free: list[int], folder: Path
) -> None:
    going_on = []
    for number, text in enumerate(held):
        slot, gpus = text.split()
        env = {} if gpus == "all" else {"CUDA_VISIBLE_DEVICES": gpus}
        run = folder / str(number)
        run.mkdir()
        with locked(run):
            write_record(run, {"launcher": "local", "host": "node7", "slot": int(slot), "env": env})
            going_on += active_jobs([run]).values()
    launcher = Local(divide(jobs, [*"0123"], []))
    assert launcher._free(going_on)[: launcher.room(going_on)] == free


def test_runs_that_share_a_gpu_have_shares_of_their_own() -> None:
    launcher = Local(divide(3, ["0"], []))
    assert launcher._free([Job("running", "", slot=1, gpus=("0",))]) == [0, 2]


def test_jobs_of_slurm_need_no_share() -> None:
    launcher = Local(divide(2, ["0", "1"], []))
    queued = Job("pending", "SLURM job 1")
    assert launcher.room([queued] * 3) == 2
    assert launcher.room([queued, Job("running", "", slot=0, gpus=("0",))]) == 1
    assert launcher._free([queued]) == [0, 1]


def test_a_machine_without_gpus_changes_nothing_about_them() -> None:
    assert [share.gpus for share in divide(2, [], [0, 1])] == [None, None]
    assert [share.num_processes for share in divide(2, [], [0, 1])] == [1, 1]
