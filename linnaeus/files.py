"""Files and folders of a run: written atomically, never overwritten."""

from __future__ import annotations

import errno
import io
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from linnaeus.errors import ConfigError

LOGS = "logs"
"""The folder of log files inside the folder of a run."""

GIB = 1024**3


def temporary_name(path: Path) -> Path:
    """The file beside `path` that `write_atomically` fills before it takes the place of `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


class _File(io.BufferedWriter):
    """A file that remembers why it could not be written: torch hides the reason in an error of its own."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


def write_atomically(
    path: Path,
    write: Callable[[BinaryIO], object],
    *,
    before_replacing: Callable[[Path], object] | None = None,
) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to the disk and rename it to `path`.

    Args:
        path: the file to make or to replace.
        write: writes the content.
        before_replacing: called with the temporary file once it is whole.

    Raises:
        OSError: the file cannot be written; `path` is left unchanged.
    """
    temporary = temporary_name(path)
    try:
        with _File(io.FileIO(temporary, "w")) as file:
            try:
                write(file)
                file.flush()
            except Exception as error:
                if file.failure is not None and error is not file.failure:
                    raise file.failure from error
                raise
            os.fsync(file.fileno())
        if before_replacing is not None:
            before_replacing(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def why_not_written(error: OSError, folder: Path, num_bytes: int) -> str:
    """Why a file cannot be written, in words; a full disk is called that.

    Args:
        error: what writing it raised.
        folder: the folder of the file.
        num_bytes: size of the file.
    """
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error.strerror or str(error)
    reason = "the disk is full" if error.errno == errno.ENOSPC else "the disk quota is used up"
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    return f"{reason}: {folder} has {free / GIB:.3g} GiB free, and {num_bytes / GIB:.3g} GiB are needed"


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` as UTF-8 with `write_atomically`."""
    write_atomically(path, lambda file: file.write(text.encode()))


def holds_run(folder: Path) -> bool:
    """Whether a folder holds what an earlier run left: anything but the logs of a start that failed."""
    return folder.is_dir() and any(entry.name != LOGS for entry in folder.iterdir())


def check_run_folder(folder: Path) -> bool:
    """Check that the folder of a run can be made or written to, without touching anything.

    Returns:
        Whether it holds an earlier run.

    Raises:
        ConfigError: it cannot be written to.
    """
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
        if not nearest.is_dir():
            raise _cannot_write(folder, f"{nearest} is no folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise _cannot_write(folder, f"no permission for {nearest}")
        return holds_run(folder)
    except OSError as error:
        raise _cannot_write(folder, error.strerror or str(error)) from error


def prepare_run_folder(folder: Path, *, keep: bool, suffix: str = ".") -> Path | None:
    """Make the folder of a run; the folder of an earlier run of that name is renamed, never overwritten.

    Args:
        folder: `<EXPERIMENT.OUTPUT_DIR>/<EXPERIMENT.NAME>`.
        keep: use an existing folder as it is (for a resumed run).
        suffix: appended to the name of an earlier run's folder, followed by a number.

    Returns:
        The new path of the earlier run; None when there was none.

    Raises:
        ConfigError: the folder cannot be made or written to; an earlier run is where it was.
    """
    aside = None
    try:
        if not keep and holds_run(folder):
            names = (folder.with_name(f"{folder.name}{suffix}{number}") for number in itertools.count(1))
            aside = next(path for path in names if not path.exists())
            folder.rename(aside)
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(folder / ".writable", "")
        (folder / ".writable").unlink()
    except OSError as error:
        if aside is not None and aside.exists():
            put_back(folder, aside)
        raise _cannot_write(folder, error.strerror or str(error)) from error
    return aside


def put_back(folder: Path, aside: Path) -> None:
    """Undo `prepare_run_folder`: delete the new folder, and give the earlier run its name back."""
    if folder.exists():
        failed = folder.with_name(f".{folder.name}.{os.getpid()}.failed")
        folder.rename(failed)
        shutil.rmtree(failed, ignore_errors=True)
    aside.rename(folder)


def _cannot_write(folder: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"EXPERIMENT.OUTPUT_DIR: {folder} cannot be written to: {reason}; choose another folder"
    )
