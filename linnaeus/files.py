"""Files and folders of a run: written atomically, never overwritten."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from linnaeus.errors import ConfigError


def temporary_name(path: Path) -> Path:
    """The file beside `path` that `write_atomically` fills before it takes the place of `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to the disk and rename it to `path`.

    Raises:
        OSError: the file cannot be written; `path` is left unchanged.
    """
    temporary = temporary_name(path)
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` as UTF-8 with `write_atomically`."""
    write_atomically(path, lambda file: file.write(text.encode()))


def prepare_run_folder(folder: Path, *, keep: bool, suffix: str = ".") -> Path | None:
    """Make the folder of a run; the folder of an earlier run of that name is renamed, never overwritten.

    Args:
        folder: `<EXPERIMENT.OUTPUT_DIR>/<EXPERIMENT.NAME>`.
        keep: use an existing folder as it is (for a resumed run).
        suffix: appended to the name of an earlier run's folder, followed by a number.

    Returns:
        The new path of the earlier run; None when there was none.

    Raises:
        ConfigError: the folder cannot be made or written to.
    """
    aside = None
    try:
        if not keep and folder.is_dir() and any(folder.iterdir()):
            names = (folder.with_name(f"{folder.name}{suffix}{number}") for number in itertools.count(1))
            aside = next(path for path in names if not path.exists())
            folder.rename(aside)
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(folder / ".writable", "")
        (folder / ".writable").unlink()
    except OSError as error:
        raise ConfigError(
            f"EXPERIMENT.OUTPUT_DIR: {folder} cannot be written to: {error.strerror}; choose another folder"
        ) from error
    return aside
