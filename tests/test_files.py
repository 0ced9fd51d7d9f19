"""Files are the old ones or the new ones, and runs do not overwrite each other."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC, EROFS
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from linnaeus.errors import ConfigError
from linnaeus.files import (
    check_run_folder,
    prepare_run_folder,
    put_back,
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


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "autobatch.json"
    for text in ("erste größe", "zweite"):
        write_text_atomically(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert names(tmp_path) == {"autobatch.json"}


def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    seen = []

    def write(file: BinaryIO) -> None:
        file.write(b"new, first half")
        file.flush()
        seen.append(path.read_text())
        file.write(b", second half")

    write_atomically(path, write)
    assert seen == ["old"]
    assert path.read_text() == "new, first half, second half"


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write(file: BinaryIO) -> None:
        file.write(b"half")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_atomically(path, write)
    assert path.read_text() == "old"
    assert names(tmp_path) == {"file"}


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with full_disk(4096), pytest.raises(OSError, match="File too large"):
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

    with full_disk(4096), pytest.raises(OSError, match="File too large"):
        write_atomically(tmp_path / "file", write)
    with pytest.raises(RuntimeError, match="of its own"):
        write_atomically(tmp_path / "file", lambda file: raise_(RuntimeError("of its own")))
    assert names(tmp_path) == set()


def raise_(error: Exception) -> None:
    raise error


def test_a_file_is_whole_before_it_replaces_the_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
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


def test_a_disk_without_room_is_told_from_other_errors(tmp_path: Path) -> None:
    folder = tmp_path / "not made yet"
    full, quota, other = (OSError(number, os.strerror(number)) for number in (ENOSPC, EDQUOT, EROFS))
    assert re.fullmatch(
        r"the disk is full: .*yet has [\d.e+]+ GiB free, and 3 GiB are needed",
        why_not_written(full, folder, 3 * 2**30),
    )
    assert why_not_written(quota, folder, 1).startswith("the disk quota is used up: ")
    assert why_not_written(other, folder, 1) == "Read-only file system"


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_text_atomically(tmp_path / "none" / "file", "text")


# --- the folder of a run ---


def test_a_new_run_gets_a_new_folder(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "deep" / "digits"
    assert prepare_run_folder(folder, keep=False) is None
    assert names(folder) == set()
    assert prepare_run_folder(folder, keep=False) is None  # an empty folder is no earlier run


def test_earlier_runs_are_moved_aside_one_by_one(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    for number in range(3):
        aside = prepare_run_folder(folder, keep=False)
        assert aside == (None if number == 0 else tmp_path / f"digits.{number}")
        (folder / "result").write_text(str(number))
    assert names(tmp_path) == {"digits", "digits.1", "digits.2"}
    found = [(tmp_path / name / "result").read_text() for name in ("digits.1", "digits.2", "digits")]
    assert found == ["0", "1", "2"]


def test_a_resumed_run_keeps_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    prepare_run_folder(folder, keep=True)
    (folder / "last.pt").write_text("state")
    assert prepare_run_folder(folder, keep=True) is None
    assert names(tmp_path) == {"digits"}
    assert names(folder) == {"last.pt"}


def test_the_logs_of_a_start_that_failed_are_no_earlier_run(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs/rank0.log").write_text("it failed")
    assert not check_run_folder(folder)
    assert prepare_run_folder(folder, keep=False) is None
    assert names(folder) == {"logs"}


def test_a_check_touches_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    assert not check_run_folder(tmp_path / "deep/digits")
    folder.mkdir()
    (folder / "last.pt").write_text("state")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path, folder)}
    assert check_run_folder(folder)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path, folder)} == before
    assert names(tmp_path) == {"digits"}


def test_a_move_can_be_undone(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    folder.mkdir()
    (folder / "result").write_text("first")
    aside = prepare_run_folder(folder, keep=False)
    assert aside is not None
    (folder / "logs").mkdir()
    (folder / "logs/rank0.log").write_text("it failed")
    put_back(folder, aside)
    assert names(tmp_path) == {"digits"}
    assert names(folder) == {"result"}


@pytest.mark.parametrize("prepare", [check_run_folder, partial(prepare_run_folder, keep=False)])
@pytest.mark.parametrize("name", ["file", "file/digits", "nowhere"])
def test_a_check_says_what_making_the_folder_would(tmp_path: Path, prepare: Any, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to("/proc/nowhere")
    with pytest.raises(
        ConfigError, match=r"EXPERIMENT.OUTPUT_DIR: .* cannot be written to: .*; choose another"
    ):
        prepare(tmp_path / name)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", ["file", "file/digits"])
def test_a_folder_that_cannot_be_made_is_a_configuration_error(tmp_path: Path, keep: bool, name: str) -> None:
    (tmp_path / "file").write_text("")
    message = f"EXPERIMENT.OUTPUT_DIR: .*{name} cannot be written to: .*; choose another folder"
    with pytest.raises(ConfigError, match=message):
        prepare_run_folder(tmp_path / name, keep=keep)


def test_a_folder_that_takes_no_files_is_a_configuration_error(tmp_path: Path) -> None:
    """Links that lead nowhere fail for every user, root included."""
    (tmp_path / "digits").symlink_to("/proc/nowhere")
    with pytest.raises(ConfigError, match=r"EXPERIMENT.OUTPUT_DIR: .*digits cannot be written to"):
        prepare_run_folder(tmp_path / "digits", keep=True)
