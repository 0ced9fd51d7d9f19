"""Files that are either the old ones or the new ones, never half of each."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from linnaeus.errors import ConfigError


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to the disk and rename it to `path`.

    Raises:
        OSError: when the folder or the disk does not take the file; `path` is then what it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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
    """Make the folder of a run; an earlier run of that name is moved aside, never overwritten.

    Args:
        folder: `<EXPERIMENT.OUTPUT_DIR>/<EXPERIMENT.NAME>`.
        keep: go on in the folder that is there (a resumed run).
        suffix: what an earlier run's folder gets after its name, before a number.

    Returns:
        Where the earlier run is now; None when there was none.

    Raises:
        ConfigError: the folder cannot be made or written to.
    """
    aside = None
    try:
        if not keep and folder.is_dir() and any(folder.iterdir()):
            aside = _free_name(folder, suffix)
            folder.rename(aside)
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(folder / ".writable", "")
        (folder / ".writable").unlink()
    except OSError as error:
        raise ConfigError(
            f"EXPERIMENT.OUTPUT_DIR: {folder} cannot be written to: {error.strerror}; choose another folder"
        ) from error
    return aside


def _free_name(folder: Path, suffix: str) -> Path:
    number = 1
    while (candidate := folder.with_name(f"{folder.name}{suffix}{number}")).exists():
        number += 1
    return candidate
