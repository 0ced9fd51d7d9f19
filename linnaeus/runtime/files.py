"""Names of a run's files, and files that are written whole or not at all."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO

from linnaeus.runtime.errors import LinnaeusError
from linnaeus.runtime.words import in_units, several

LOGS, CHECKPOINTS = "logs", "checkpoints"
CONFIG, METRICS, RESULT, AUTOBATCH = "config.yaml", "metrics.jsonl", "result.json", "autobatch.json"
SWEEP, STUDY = "sweep.json", "study.journal"
"""The runs of a sweep, and the study of a search, in the folder of a sweep itself."""
GIB = 1024**3
MOST_BYTES = GIB // 4
"""A larger file is no text of a run or a sweep."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


def suggest_path(path: Path) -> str:
    """Return `; did you mean X?` for the most similar name beside a missing path; empty without one."""
    close = get_close_matches(path.name, [beside.name for beside in path.parent.glob("*")], 1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def other_spelling(path: Path) -> Path | None:
    """The file or folder of this path in another case, or with another ending; None if there is none."""
    if os.path.exists(path) or path == path.parent:  # noqa: PTH110 (no error for long names)
        return path
    beside = sorted((other_spelling(path.parent) or path).glob("*"))
    names = {each.stem.casefold(): each for each in beside}
    names |= {each.name.casefold(): each for each in beside}
    return names.get(path.name.casefold(), names.get(path.stem.casefold()))


def suggest_run(path: Path) -> str:
    """Suggest runs for a path that is not a run."""
    folders = (path if path.is_dir() else path.parent, path.parent / "runs")
    found = [run for folder in folders for run in sorted(folder.glob(f"*/{CHECKPOINTS}"))]
    runs = {run.parent.name: str(run.parent) for run in found}
    if close := get_close_matches(path.name, runs, 1):
        return f"; did you mean {runs[close[0]]}?"
    if not path.exists() and (beside := suggest_path(path)):
        return beside
    named = several([*runs.values()])
    return f"; available runs: {named}" if runs else "; name a run directory, such as runs/birds"


def checkpoint_file(run: Path, name: str) -> Path | None:
    """Return the file of the checkpoint `best` or `last` in a run's folder; None if there is none.

    A run that was killed while it saved may have its last checkpoint in `pending.pt` or `previous.pt`.
    """
    last = ("failed_rank.pt", "pending.pt", "last.pt", "previous.pt")
    names = ("best.pt",) if name == "best" else last
    files = (run / CHECKPOINTS / file for file in names)
    return next((file for file in files if file.is_file()), None)


def temporary_name(path: Path) -> Path:
    """Return the file beside `path` that `write_atomically` fills before it takes the place of `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


class _File(io.BufferedWriter):
    """A file that remembers why it could not be written: torch hides the reason in its own error."""

    failure: BaseException | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BaseException as error:  # also Ctrl-C
            self.failure = error
            raise


def write_atomically(
    path: Path,
    write: Callable[[BinaryIO], object],
    before_replacing: Callable[[Path], object] | None = None,
) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to the disk and rename it to `path`.

    `before_replacing` is called with the temporary file once it is whole.

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


def why_not_written(error: OSError, folder: Path, num_bytes: int | None = None) -> str:
    """Return the reason why a file cannot be written, with the free space where the disk is full."""
    if error.errno not in _FULL:
        return error.strerror or str(error)
    reason = "the disk is full" if error.errno == errno.ENOSPC else "the disk quota is used up"
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    needed = "" if num_bytes is None else f", and {in_units(num_bytes)} are needed"
    return f"{reason}: {folder} has {in_units(free)} free{needed}"


def not_written(path: Path, error: OSError) -> LinnaeusError:
    """Return the error for the user when a small file cannot be written."""
    return LinnaeusError(f"{path} cannot be written: {why_not_written(error, path.parent)}")


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` as UTF-8 with `write_atomically`.

    Raises:
        LinnaeusError: the file cannot be written, such as on a full disk.
    """
    try:
        write_atomically(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise not_written(path, error) from error


def read_text(path: Path) -> str:
    """Return the text of a file that another program may have written.

    Raises:
        OSError: it cannot be read, or is no file, such as a pipe, which would be waited for.
        ValueError: it is not UTF-8, or larger than any file of a run.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no file", str(path))
    if status.st_size > MOST_BYTES:
        raise ValueError(f"it has {status.st_size} bytes")
    return path.read_text(encoding="utf-8")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file; None if there is no such file or it is damaged."""
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    return content if isinstance(content, dict) else None


def finite(value: object) -> float | None:
    """Return a finite number unchanged; None for anything else.

    >>> finite(2), finite(float("nan")), finite("2"), finite(True), finite(10**400)
    (2, None, None, None, None)
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):
            return value if math.isfinite(value) else None
    return None


def link_new(temporary: Path, path: Path) -> None:
    """Give a finished file another name, in one step that only one of several processes can take.

    Raises:
        FileExistsError: there is a file of this name.
        OSError: it cannot be made.
    """
    try:
        os.link(temporary, path)
    except FileNotFoundError:
        raise
    except FileExistsError:
        if (
            temporary.stat().st_nlink != 2
        ):  # otherwise done before, and repeated by a network file system
            raise
    except OSError:  # a file system without links
        with path.open("xb") as file:
            file.write(temporary.read_bytes())
