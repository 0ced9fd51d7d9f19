"""Files are the old ones or the new ones."""

import os
import resource
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, ENOSPC, EROFS

import pytest

from linnaeus.runtime.errors import LinnaeusError
from linnaeus.runtime.files import why_not_written, write_atomically, write_text_atomically
from tests.helpers.run_files import names


@contextmanager
def full_disk(num_bytes):
    """No file can grow beyond this many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# --- one file ---


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write(file):
        file.write(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_atomically(path, write)
    assert path.read_text() == "old"
    assert names(tmp_path) == {"file"}


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with full_disk(4096), pytest.raises(LinnaeusError, match=os.strerror(EFBIG)):
        write_text_atomically(path, "x" * 8192)
    assert path.read_text() == "old"
    assert names(tmp_path) == {"file"}


def test_the_reason_is_not_lost_in_an_error_of_the_writers_own(tmp_path):
    """torch turns it into `unexpected pos`."""

    def write(file):
        try:
            file.write(b"x" * 2**20)
        except OSError as error:
            raise RuntimeError("unexpected pos") from error

    with full_disk(4096), pytest.raises(OSError, match=os.strerror(EFBIG)):
        write_atomically(tmp_path / "file", write)
    with pytest.raises(RuntimeError):
        write_atomically(tmp_path / "file", lambda file: raise_(RuntimeError()))
    assert names(tmp_path) == set()


def raise_(error):
    raise error


def test_a_file_is_whole_before_it_replaces_the_other(tmp_path):
    path = tmp_path / "file"
    write_text_atomically(path, "größe")
    assert path.read_text(encoding="utf-8") == "größe"
    write_text_atomically(path, "old")
    seen = []

    def look(temporary):
        seen.append((temporary.read_text(), path.read_text()))

    write_atomically(path, lambda file: file.write(b"new"), before_replacing=look)
    assert seen == [("new", "old")]
    with pytest.raises(RuntimeError):
        write_atomically(
            path,
            lambda file: file.write(b"newer"),
            before_replacing=lambda _: raise_(RuntimeError()),
        )
    assert path.read_text() == "new"
    assert names(tmp_path) == {"file"}


def test_a_disk_without_room_is_told_from_other_errors(tmp_path):
    folder = tmp_path / "not made yet"
    full, quota, other = (
        OSError(number, os.strerror(number)) for number in (ENOSPC, EDQUOT, EROFS)
    )
    assert "3.0 MiB" in why_not_written(full, folder, 3 * 2**20)
    assert str(folder) in why_not_written(full, folder, 3 * 2**30)
    assert "quota" in why_not_written(quota, folder, 1)
    assert why_not_written(other, folder, 1) == os.strerror(EROFS)
