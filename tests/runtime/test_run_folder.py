"""Who has the folder of a run, which run it is and how it ended; runs do not overwrite each other."""

import json
import os
import subprocess
import threading
from unittest.mock import patch

import pytest

from linnaeus.runtime import run_folder
from linnaeus.runtime.errors import CheckpointError
from linnaeus.runtime.run_folder import (
    CLAIMS,
    DEAD_S,
    OUTPUT,
    RESTART_TOKEN,
    RUN,
    RUN_FILES,
    SHARED_CLAIM,
    SILENT_S,
    TAIL_BYTES,
    Claim,
    FolderInUseError,
    Holder,
    LostFolderError,
    claim_run_folder,
    is_queued,
    last_line,
    move_aside,
    read_state,
)
from tests.helpers import children
from tests.helpers.run_files import names
from tests.helpers.threads import together


def taken_and_left(folder):
    """What a start without TRAIN.AUTO_RESUME does with an earlier run."""
    aside, claim = move_aside(claim_run_folder(folder))
    claim.release()
    return aside


def test_a_folder_with_a_file_of_a_run_is_a_run(tmp_path):
    """Others are used as they are: empty, with logs of a start that failed, or with other runs in it."""
    for number, own in enumerate((*RUN_FILES, "checkpoints")):
        folder = tmp_path / str(number)
        assert taken_and_left(folder) is None
        for inner in ("logs", "one"):
            (folder / inner).mkdir()
            (folder / inner / "config.yaml").touch()
        (folder / "notes.txt").write_text("of the user")
        assert taken_and_left(folder) is None
        (folder / own).touch()
        aside = taken_and_left(folder)
        assert aside == tmp_path / f"{number}.1"
        assert names(aside) == {"logs", "one", "notes.txt", own}
    assert taken_and_left(tmp_path / "0.1") == tmp_path / "0.1.1"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "r1"
    path.mkdir()
    (path / "result.json").touch()
    return path


@pytest.fixture
def other():
    """Another process, which ends when its input is closed."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process


def test_a_dead_process_loses_its_claim_and_the_run_keeps_its_id(tmp_path, other):
    folder = tmp_path / "r1"
    with patch("os.getpid", return_value=other.pid):
        claim = Claim(folder)
        claim.begin()
    with pytest.raises(FolderInUseError, match=str(other.pid)):
        Claim(folder)
    other.communicate()
    state = read_state(folder)
    assert (state.status, state.exit_code, state.seconds) == ("interrupted", None, None)
    assert state.holder.pid == other.pid
    seconds = 0.0
    for _ in range(2):
        again = Claim(folder)
        assert again.id == claim.id
        again.begin()
        again.end(130)
        again.release()
        assert read_state(folder).seconds > seconds, "they are summed"
        seconds = read_state(folder).seconds


def test_a_run_shares_the_claim_of_its_worker(folder, monkeypatch):
    """It gives nothing up, and a third process has the folder when both are gone."""
    worker = Claim(folder)
    monkeypatch.setenv(SHARED_CLAIM, worker.token)
    run = claim_run_folder(folder)
    with pytest.raises(FolderInUseError):  # shared with one process
        claim_run_folder(folder)
    run.begin()
    run.end(143, "stopped")
    run.release()
    assert worker.is_mine
    worker.release()
    assert read_state(folder).reason == "stopped"
    with pytest.raises(FolderInUseError):
        Claim(folder, worker.token)
    Claim(folder).release()


def test_a_run_keeps_the_folder_when_its_worker_dies(folder, other):
    with patch("os.getpid", return_value=other.pid):
        worker = Claim(folder)
    other.communicate()
    run = Claim(folder, worker.token)
    run.begin()
    with pytest.raises(FolderInUseError, match=f"process {os.getpid()}"):
        Claim(folder)
    assert read_state(folder).holder == Holder.this_process()
    run.end(143)
    Claim(folder).release()


def elsewhere(folder, age_s, **changes):
    """Let a process of another machine have the folder; it touched its claim `age_s` seconds ago."""
    (folder / CLAIMS).mkdir(exist_ok=True)
    path = folder / CLAIMS / "7"
    holder = vars(Holder.this_process()) | {"host": "elsewhere", "boot": "other"} | changes
    path.write_text(json.dumps(holder))
    touched = path.stat().st_mtime - age_s
    os.utime(path, (touched, touched))


def test_of_several_that_see_a_dead_holder_one_takes_the_folder(folder):
    start = threading.Barrier(4)

    def take():
        start.wait()
        try:
            return Claim(folder)
        except FolderInUseError:
            return None

    for _ in range(5):
        elsewhere(folder, DEAD_S + 60)
        [winner] = filter(None, together(*[take] * 4))
        winner.release()


@pytest.mark.parametrize("name", [RESTART_TOKEN, "TORCHELASTIC_RUN_ID"])
def test_a_restarted_container_takes_its_run_over_at_once(folder, monkeypatch, name):
    for old, new in (("", "none"), ("", ""), ("job 7", "job 8")):
        elsewhere(folder, 1, restart_token=old)
        monkeypatch.setenv(name, new)
        with pytest.raises(FolderInUseError, match=f"in {DEAD_S - 1:.0f} s"):
            claim_run_folder(folder, resumes=True)
    monkeypatch.setenv(name, "job 7")
    with pytest.raises(FolderInUseError):  # it would move the run that is going on
        claim_run_folder(folder)
    assert read_state(folder).status == "running", "others see it as before"
    claim = claim_run_folder(folder, resumes=True)
    assert claim.is_mine
    with pytest.raises(FolderInUseError):  # on this machine the process itself is looked for
        claim_run_folder(folder, resumes=True)
    claim.release()


def test_a_job_that_is_not_in_the_queue_has_nothing(folder, monkeypatch):
    queue = {"12_3"}
    monkeypatch.setattr(run_folder, "_queue", lambda moment: [*queue])
    elsewhere(folder, SILENT_S + 60, job="12_3")
    with pytest.raises(FolderInUseError, match="12_3"):
        Claim(folder)
    queue.clear()
    Claim(folder).release()
    elsewhere(folder, 0, job="12_3")
    with pytest.raises(FolderInUseError, match="12_3"):  # perhaps another cluster's
        Claim(folder)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    with pytest.raises(FolderInUseError, match="12_3"):  # another node of this job
        Claim(folder)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    Claim(folder).release()  # the same job, queued again


def test_slurm_is_asked_once_and_without_an_answer_a_job_lives(tmp_path, monkeypatch):
    squeue = tmp_path / "squeue"
    squeue.write_text(
        f"#!/bin/sh\necho >> {tmp_path}/asked; [ -e {tmp_path}/away ] && exit 1; echo 12_3 7\n"
    )
    squeue.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(run_folder, "QUEUE_S", 1e9)
    assert is_queued("12_3", now=True)
    assert [is_queued(job) for job in ("12", "7", "8")] == [True, True, False]
    assert (tmp_path / "asked").read_text() == "\n"
    (tmp_path / "away").touch()
    assert is_queued("8", now=True)


def test_a_file_system_without_links_or_locks_is_used(folder, monkeypatch):
    def fail(*_):
        raise PermissionError

    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr("fcntl.flock", fail)
    claim = Claim(folder)
    with pytest.raises(FolderInUseError):
        Claim(folder)
    claim.release()
    Claim(folder).release()


def test_the_last_line_is_the_run_s_own(tmp_path):
    """Not what torchrun says after it."""
    output = tmp_path / OUTPUT
    output.parent.mkdir()
    assert last_line(tmp_path) == ""
    output.write_text("earlier\n")
    begin = output.stat().st_size
    assert last_line(tmp_path, begin) == ""
    with output.open("a") as file:
        file.write("x" * TAIL_BYTES + "\nno memory\n\n")
        file.write(
            "E1123 10:00:00.000 7 site-packages/torch/distributed/elastic/api.py:1] failed\nmore\n"
        )
    assert last_line(tmp_path, begin) == "no memory"


@pytest.mark.parametrize("how", ["renamed", "replaced", "taken over"])
def test_a_run_that_has_lost_its_folder_writes_nothing_more(folder, how):
    claim = Claim(folder)
    claim.begin()
    claim.check()
    if how == "taken over":  # it was silent for too long
        (folder / CLAIMS / "2").write_text(
            (folder / CLAIMS / "1").read_text().replace(claim.token, "other")
        )
    else:
        folder.rename(folder.with_name("away"))
    if how == "replaced":
        Claim(folder).begin()
    before = names(folder.parent)
    with pytest.raises(LostFolderError, match=f"{folder}.*{claim.id}"):
        claim.check()
    claim.end(0)
    claim.release()
    assert names(folder.parent) == before
    if how == "replaced":
        assert json.loads((folder / RUN).read_text())["id"] != claim.id


def test_a_checkpoint_of_another_run_is_refused_with_both_ids(folder):
    claim = Claim(folder)
    claim.check_id("the id of its checkpoint", folder)
    claim.begin()
    claim.release()
    again = Claim(folder)
    assert again.id == "the id of its checkpoint"
    with pytest.raises(CheckpointError, match=rf"other.*{again.id}"):
        again.check_id("other", folder)
    again.release()


@pytest.mark.parametrize(
    ("code", "pruned", "expected"),
    [
        (0, False, "finished"),
        (143, False, "interrupted"),
        (143, True, "pruned"),
        (-9, False, "failed"),
    ],
)
def test_how_a_run_has_ended(folder, code, pruned, expected):
    claim = Claim(folder)
    claim.begin()
    if code != 0:
        (folder / "result.json").unlink()
    claim.end(code, "why", pruned=pruned)
    claim.release()
    state = read_state(folder)
    assert (state.status, state.exit_code, state.reason) == (expected, code, "why")


def test_a_claim_is_touched(folder, monkeypatch):
    touched = threading.Event()
    monkeypatch.setattr(run_folder, "BEAT_S", 0.001)
    monkeypatch.setattr(os, "utime", lambda path: touched.set())
    claim = Claim(folder)
    assert touched.wait(children.limit_s)
    claim.release()
