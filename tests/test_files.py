"""Files are the old ones or the new ones, and runs do not overwrite each other."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, EIO, ENOLCK, ENOSPC, ENOSYS, ENOTSUP, EROFS
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from linnaeus.errors import ConfigError
from linnaeus.files import (
    LOCK,
    RUN_FILES,
    SWEEP_FILES,
    FolderLock,
    check_run_folder,
    prepare_run_folder,
    read_holder,
    take_run_folder,
    why_not_written,
    write_atomically,
    write_text_atomically,
)


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file can grow beyond this many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- one file ---


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write(file: BinaryIO) -> None:
        file.write(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_atomically(path, write)
    assert path.read_text() == "old"
    assert names(tmp_path) == {"file"}


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with full_disk(4096), pytest.raises(OSError, match=os.strerror(EFBIG)):
        write_text_atomically(path, "x" * 8192)
    assert path.read_text() == "old"
    assert names(tmp_path) == {"file"}


def test_the_reason_is_not_lost_in_an_error_of_the_writers_own(tmp_path: Path) -> None:
    """torch turns it into `unexpected pos`."""

    def write(file: BinaryIO) -> None:
        try:
            file.write(b"x" * 2**20)
        except OSError as error:
            raise RuntimeError("unexpected pos") from error

    with full_disk(4096), pytest.raises(OSError, match=os.strerror(EFBIG)):
        write_atomically(tmp_path / "file", write)
    with pytest.raises(RuntimeError):
        write_atomically(tmp_path / "file", lambda file: raise_(RuntimeError()))
    assert names(tmp_path) == set()


def raise_(error: Exception) -> None:
    raise error


def test_a_file_is_whole_before_it_replaces_the_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text_atomically(path, "größe")
    assert path.read_text(encoding="utf-8") == "größe"
    write_text_atomically(path, "old")
    seen = []

    def look(temporary: Path) -> None:
        seen.append((temporary.read_text(), path.read_text()))

    write_atomically(path, lambda file: file.write(b"new"), before_replacing=look)
    assert seen == [("new", "old")]
    with pytest.raises(RuntimeError):
        write_atomically(
            path, lambda file: file.write(b"newer"), before_replacing=lambda _: raise_(RuntimeError())
        )
    assert path.read_text() == "new"
    assert names(tmp_path) == {"file"}


def test_a_disk_without_room_is_told_from_other_errors(tmp_path: Path) -> None:
    folder = tmp_path / "not made yet"
    full, quota, other = (OSError(number, os.strerror(number)) for number in (ENOSPC, EDQUOT, EROFS))
    assert "3 GiB" in why_not_written(full, folder, 3 * 2**30)
    assert str(folder) in why_not_written(full, folder, 3 * 2**30)
    assert "quota" in why_not_written(quota, folder, 1)
    assert why_not_written(other, folder, 1) == os.strerror(EROFS)


# --- the folder of a run ---


def test_what_is_no_earlier_run_is_used_as_it_is(tmp_path: Path) -> None:
    """An empty folder, the logs of a start that failed, a lock that nobody holds, a group of other runs."""
    for number, file in enumerate((None, "logs/rank0.log", ".lock", "one/config.yaml")):
        folder = tmp_path / "runs" / str(number)
        assert prepare_run_folder(folder, keep=False) is None
        if file is not None:
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text("process 1 on a machine that was switched off")
        assert not check_run_folder(folder)
        assert prepare_run_folder(folder, keep=False) is None
        assert names(folder) == ({Path(file).parts[0]} if file not in (None, ".lock") else set())


def test_a_folder_with_a_file_of_a_run_is_a_run(tmp_path: Path) -> None:
    for number, own in enumerate((*RUN_FILES, *SWEEP_FILES, "checkpoints")):
        folder = tmp_path / str(number)
        (folder / "one").mkdir(parents=True)
        (folder / "notes.txt").write_text("of the user")
        (folder / own).touch()
        before = folder.stat().st_mtime_ns
        assert check_run_folder(folder)
        assert folder.stat().st_mtime_ns == before, "a check touches nothing"
        assert prepare_run_folder(folder, keep=True) is None
        aside = prepare_run_folder(folder, keep=False)
        assert aside == tmp_path / f"{number}.1"
        assert names(aside) == {"one", "notes.txt", own}


def test_earlier_runs_are_moved_aside_one_by_one(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    for number in range(3):
        aside = prepare_run_folder(folder, keep=False)
        assert aside == (None if number == 0 else tmp_path / f"digits.{number}")
        (folder / "result.json").write_text(str(number))
    assert names(tmp_path) == {"digits", "digits.1", "digits.2"}
    found = [(tmp_path / name / "result.json").read_text() for name in ("digits.1", "digits.2", "digits")]
    assert found == ["0", "1", "2"]


@pytest.mark.parametrize("prepare", [check_run_folder, partial(prepare_run_folder, keep=False)])
@pytest.mark.parametrize("name", ["file", "file/digits", "nowhere"])
def test_a_check_says_what_making_the_folder_would(tmp_path: Path, prepare: Any, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to("/proc/nowhere")
    with pytest.raises(ConfigError, match=f"EXPERIMENT.OUTPUT_DIR.*{name}"):
        prepare(tmp_path / name)


@pytest.mark.parametrize("trace", ["config.yaml", ".lock"])
@pytest.mark.parametrize("inner", ["one", "deep/one"])
def test_a_run_is_not_moved_with_another_one_in_it(tmp_path: Path, trace: str, inner: str) -> None:
    folder = tmp_path / "group"
    (folder / inner).mkdir(parents=True)
    (folder / inner / trace).touch()
    (folder / "result.json").touch()
    for look in (check_run_folder, prepare_run_folder):
        with pytest.raises(ConfigError, match=rf"EXPERIMENT.NAME: .*{inner}"):
            look(folder, keep=False)
        look(folder, keep=True)
    assert names(tmp_path) == {"group"}
    assert names(folder) == {inner.partition("/")[0], "result.json"}


# --- the lock of a run's folder ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of an earlier run."""
    path = tmp_path / "r1"
    path.mkdir()
    (path / "result.json").touch()
    return path


def test_a_folder_in_use_is_refused_and_says_who_uses_it(folder: Path) -> None:
    lock = FolderLock(folder)
    for take in (partial(take_run_folder, keep=False), partial(prepare_run_folder, keep=True), FolderLock):
        with pytest.raises(
            ConfigError, match=f"EXPERIMENT.NAME: {folder} .*{os.getpid()}.*{socket.gethostname()}"
        ):
            take(folder)
    assert names(folder.parent) == {"r1"}
    assert names(folder) == {"result.json", ".lock"}
    assert lock.is_held
    lock.release()
    assert names(folder) == {"result.json"}
    assert prepare_run_folder(folder, keep=False) is not None  # the negative control


def test_the_lock_goes_from_the_old_folder_to_the_new_one(folder: Path) -> None:
    aside, lock = take_run_folder(folder, keep=False, lock=FolderLock(folder))
    assert aside == folder.with_name("r1.1")
    assert (names(aside), names(folder)) == ({"result.json"}, {".lock"})
    FolderLock(aside).release()
    with pytest.raises(ConfigError, match=str(os.getpid())):
        FolderLock(folder)
    lock.release()


def fork_that_waits(*, lock: Path | None = None) -> int:
    """A child process that locks a folder, if any, and then waits to be killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        held = None if lock is None else FolderLock(lock)
        os.write(writer, b"x")
        signal.pause()
        os._exit(held is None)
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    return child


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_holder_of_a_lock_is_known_as_long_as_it_lives(folder: Path) -> None:
    assert read_holder(folder) is None
    lock = FolderLock(folder)
    holder = read_holder(folder)
    assert holder is not None
    assert (holder.pid, holder.is_here, holder.lives()) == (os.getpid(), True, True)
    assert str(holder) == f"process {os.getpid()} on {socket.gethostname()}"
    assert holder._replace(start="").lives(), "an older version has not said when it began"
    assert not holder._replace(start="1").lives(), "another process has its number now"
    assert not holder._replace(host="elsewhere").is_here
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert not holder._replace(pid=child, start="").lives(), "it has ended, and nobody has asked how"
    os.waitpid(child, 0)
    assert not holder._replace(pid=child, start="").lives()
    lock.release()
    assert read_holder(folder) is None
    for damaged in (b"", b"process x", b"\xff\xfe"):
        (folder / LOCK).write_bytes(damaged)
        assert read_holder(folder) is None


def test_a_process_that_is_killed_loses_its_lock(folder: Path) -> None:
    child = fork_that_waits(lock=folder)
    with pytest.raises(ConfigError, match=str(child)):
        FolderLock(folder)
    end(child)
    assert (folder / ".lock").exists()
    FolderLock(folder).release()
    assert names(folder) == {"result.json"}


def test_a_worker_does_not_keep_the_lock_of_its_run(folder: Path) -> None:
    lock = FolderLock(folder)
    child = fork_that_waits()
    try:
        lock.forget()  # what the kernel does when the process is killed
        FolderLock(folder).release()
    finally:
        end(child)


@pytest.mark.parametrize("number", [ENOLCK, ENOTSUP, ENOSYS])
def test_a_file_system_without_locks_is_used_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    locks = [FolderLock(folder), FolderLock(folder)]
    assert all(lock.is_held for lock in locks)
    for lock in locks:
        lock.release()
    assert names(folder) == {"result.json"}
    number = EIO  # any other error is one
    with pytest.raises(ConfigError, match=os.strerror(EIO)):
        FolderLock(folder)
