"""Files are the old ones or the new ones."""

import os
import resource
from contextlib import contextmanager
from errno import EFBIG, ENOSPC, EROFS

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


def half(file):
    file.write(b"half")
    raise ZeroDivisionError


def hidden(file):
    """What torch makes of a full disk: `unexpected pos`."""
    try:
        file.write(b"x" * 2**20)
    except OSError as error:
        raise RuntimeError("unexpected pos") from error


def interrupted(temporary):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("write", "before_replacing", "error"),
    [
        (half, None, ZeroDivisionError),
        (lambda file: file.write(b"x" * 8192), None, OSError),
        (hidden, None, OSError),
        (lambda file: file.write(b"new"), interrupted, KeyboardInterrupt),
    ],
)
def test_a_file_that_is_not_written_leaves_the_old_one(tmp_path, write, before_replacing, error):
    path = tmp_path / "file"
    write_text_atomically(path, "größe")
    full = os.strerror(EFBIG) if error is OSError else None
    with full_disk(4096), pytest.raises(error, match=full):
        write_atomically(path, write, before_replacing)
    assert path.read_text(encoding="utf-8") == "größe"
    assert names(tmp_path) == {"file"}


def test_a_text_that_a_full_disk_refuses_is_an_error_of_linnaeus(tmp_path):
    with full_disk(4096), pytest.raises(LinnaeusError, match=os.strerror(EFBIG)):
        write_text_atomically(tmp_path / "file", "x" * 8192)


def test_a_disk_without_room_is_told_from_other_errors(tmp_path):
    """The golden messages have the error of a quota."""
    folder = tmp_path / "not made yet"
    full, other = (OSError(number, os.strerror(number)) for number in (ENOSPC, EROFS))
    assert "3.0 MiB" in why_not_written(full, folder, 3 * 2**20)
    assert why_not_written(other, folder, 1) == os.strerror(EROFS)
