"""Files and folders of a run: written atomically, never overwritten."""

from __future__ import annotations

import errno
import fcntl
import functools
import io
import itertools
import os
import re
import shutil
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from linnaeus.errors import ConfigError, LinnaeusError

LOGS = "logs"
"""The folder of log files inside the folder of a run."""
CHECKPOINTS = "checkpoints"
"""The folder of checkpoints inside the folder of a run."""
CONFIG, METRICS, RESULT, AUTOBATCH = "config.yaml", "metrics.jsonl", "result.json", "autobatch.json"
RUN_FILES = (CONFIG, "model.json", METRICS, RESULT, AUTOBATCH)
"""Files that a run writes into its folder."""
ASKED, OUTCOME = "asked.yaml", "outcome.json"
"""The configuration that a sweep has started a run with, and how the run's process ended, in its folder."""
SWEEP_FILES = (ASKED, OUTCOME)
"""Files that a sweep writes into the folder of a run."""
SWEEP, STUDY = "sweep.json", "study.journal"
"""The figures of all runs, and the study of a search, in the folder of a sweep itself."""
LOCK = ".lock"
"""The file inside the folder of a run that the run keeps locked while it goes on."""

GIB = 1024**3

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""How a file system says that it has no locks."""


def suggest_path(path: Path) -> str:
    """`; did you mean X?` for what stands beside a missing path and is most like it; empty for nothing."""
    close = get_close_matches(path.name, [beside.name for beside in path.parent.glob("*")], 1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def checkpoint_file(run: Path, name: str) -> Path | None:
    """The file of the checkpoint `best` or `last` in a run's folder; None where there is none.

    A run that was killed while it saved may have its last checkpoint in `pending.pt` or `previous.pt`.
    """
    names = ("best.pt",) if name == "best" else ("pending.pt", "last.pt", "previous.pt")
    files = (run / CHECKPOINTS / file for file in names)
    return next((file for file in files if file.is_file()), None)


def temporary_name(path: Path) -> Path:
    """The file beside `path` that `write_atomically` fills before it takes the place of `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


class _File(io.BufferedWriter):
    """A file that remembers why it could not be written: torch hides the reason in an error of its own."""

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


def why_not_written(error: OSError, folder: Path, num_bytes: int | None = None) -> str:
    """Why a file cannot be written, in words; a full disk is called that.

    Args:
        error: what writing it raised.
        folder: the folder of the file.
        num_bytes: size of the file; None for one that is small.
    """
    if error.errno not in _FULL:
        return error.strerror or str(error)
    reason = "the disk is full" if error.errno == errno.ENOSPC else "the disk quota is used up"
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    needed = "" if num_bytes is None else f", and {num_bytes / GIB:.3g} GiB are needed"
    return f"{reason}: {folder} has {free / GIB:.3g} GiB free{needed}"


def not_written(path: Path, error: OSError) -> LinnaeusError:
    """The error for the user when a small file cannot be written."""
    return LinnaeusError(f"{path} cannot be written: {why_not_written(error, path.parent)}")


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` as UTF-8 with `write_atomically`.

    Raises:
        LinnaeusError: the disk is full.
        OSError: the file cannot be written for any other reason.
    """
    try:
        write_atomically(path, lambda file: file.write(text.encode()))
    except OSError as error:
        if error.errno in _FULL:
            raise not_written(path, error) from error
        raise


class FolderInUseError(ConfigError):
    """Another process holds the lock of a folder."""


class FolderLock:
    """The lock of a run's folder, held from construction to `release` or to the end of the process.

    It is a lock of the kernel on the file `.lock`, which names the process and says when it began. Processes
    that are forked later do not keep it. On a file system without locks nothing is locked.

    Args:
        folder: of the run; it is there.

    Raises:
        FolderInUseError: a run that is still going on uses the folder.
        ConfigError: it cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None
        try:
            self._descriptor = _open_locked(folder)
            os.ftruncate(self._descriptor, 0)
            holder = Holder(os.getpid(), socket.gethostname(), process_start(os.getpid()))
            os.pwrite(self._descriptor, f"{holder}\n{holder.start}\n".encode(), 0)
        except OSError as error:
            self.release()
            raise _cannot_write(folder, why_not_written(error, folder)) from error
        _forget_in_forks()
        _held.add(self)

    @property
    def is_held(self) -> bool:
        """Whether the folder is still the one that was locked: no other folder has taken its place."""
        return self._descriptor is not None and _is_open(self._folder / LOCK, self._descriptor)

    def move(self, folder: Path) -> None:
        """Rename the folder.

        Raises:
            OSError: it cannot be renamed.
        """
        self._folder.rename(folder)
        self._folder = folder

    def release(self) -> None:
        """Delete the file and give the lock back; nothing happens the second time."""
        if self.is_held:
            with suppress(OSError):
                (self._folder / LOCK).unlink()
        self.forget()

    def forget(self) -> None:
        """Close the file. The lock is given back, unless another process has the same file open."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Holder(NamedTuple):
    """Who holds the lock of a folder, as the file says.

    Attributes:
        pid: the number of the process.
        host: its machine.
        start: see `process_start`; empty where that is not known.
    """

    pid: int
    host: str
    start: str

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine."""
        return self.host == socket.gethostname()

    def lives(self) -> bool:
        """Whether the process, one of this machine, has not ended."""
        try:
            state, start = state_and_start(self.pid)
        except OSError:
            return False
        return state not in "ZX" and self.start in ("", start)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def read_holder(folder: Path) -> Holder | None:
    """Who holds the lock of a folder, or held it when it was killed; None where no file says so."""
    try:
        text = (folder / LOCK).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.match(r"process (\d+) on (\S+)(?:\n(\d+))?", text)
    return None if match is None else Holder(int(match[1]), match[2], match[3] or "")


def process_start(pid: int) -> str:
    """The ticks of `state_and_start`; empty where there is no such process, or the system does not say."""
    try:
        return state_and_start(pid)[1]
    except OSError:
        return ""


def state_and_start(pid: int) -> tuple[str, str]:
    """The letter of a process's state, and the ticks from the start of the machine to that of the process.

    Raises:
        OSError: this machine has no such process.
    """
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # a name may have any letters
    return fields[0].decode(), fields[19].decode()


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


@functools.cache
def _forget_in_forks() -> None:
    """Let forked processes close the lock: a worker that outlives a killed run would keep it."""

    def forget() -> None:
        for lock in list(_held):
            lock.forget()

    os.register_at_fork(after_in_child=forget)


def _open_locked(folder: Path) -> int:
    """A descriptor of the folder's lock file, locked; raises `ConfigError` or `OSError`."""
    path = folder / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            holder = read_holder(folder)
            raise FolderInUseError(
                f"EXPERIMENT.NAME: {folder} is in use by a run that is still going on "
                f"({holder or 'it does not say which'}); choose another name"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
        if _is_open(path, descriptor):
            return descriptor
        os.close(descriptor)  # the run that held the lock has ended, and deleted the file


def _is_open(path: Path, descriptor: int) -> bool:
    """Whether the descriptor is that of the file which has this path now."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def holds_run(folder: Path) -> bool:
    """Whether a folder holds what an earlier run or a sweep left, beside the logs of a start that failed."""
    return any((folder / name).exists() for name in (*RUN_FILES, *SWEEP_FILES, CHECKPOINTS))


def check_run_folder(folder: Path, *, keep: bool = True) -> bool:
    """Check that the folder of a run can be made or written to, without touching anything.

    Args:
        folder: `<EXPERIMENT.OUTPUT_DIR>/<EXPERIMENT.NAME>`.
        keep: whether an earlier run is to stay there.

    Returns:
        Whether it holds an earlier run.

    Raises:
        ConfigError: it cannot be written to, or an earlier run cannot be moved aside.
    """
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
        if not nearest.is_dir():
            raise _cannot_write(folder, f"{nearest} is no folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise _cannot_write(folder, f"no permission for {nearest}")
        if not holds_run(folder):
            return False
        inner = None if keep else next(_runs_within(folder), None)
    except OSError as error:
        raise _cannot_write(folder, why_not_written(error, folder)) from error
    if inner is not None:
        raise ConfigError(
            f"EXPERIMENT.NAME: the earlier run in {folder} cannot be moved aside, because {inner} is the "
            "folder of another run; choose another name"
        )
    return True


def check_no_sweep(folder: Path) -> None:
    """Refuse the folder of a sweep for a run, whose files would mix with those of the sweep.

    Raises:
        ConfigError: it is the folder of a sweep.
    """
    if any((folder / name).exists() for name in (SWEEP, STUDY)):
        raise ConfigError(
            f"EXPERIMENT.NAME: {folder} is the folder of a sweep, which holds a folder for each of its runs; "
            "choose another name"
        )


def _runs_within(folder: Path) -> Iterator[Path]:
    """The folders below one that hold runs of other names, such as `group/one` below `group`."""
    for path in sorted(folder.iterdir()):
        if path.name not in (LOGS, CHECKPOINTS) and path.is_dir() and not path.is_symlink():
            if holds_run(path) or (path / LOCK).exists():
                yield path
            yield from _runs_within(path)


def take_run_folder(
    folder: Path, *, keep: bool, suffix: str = ".", lock: FolderLock | None = None
) -> tuple[Path | None, FolderLock]:
    """Make the folder of a run and lock it; that of an earlier run is renamed, never overwritten.

    Args:
        folder: `<EXPERIMENT.OUTPUT_DIR>/<EXPERIMENT.NAME>`.
        keep: use an existing folder as it is (for a resumed run).
        suffix: appended to the name of an earlier run's folder, followed by a number.
        lock: that of the folder, where the caller has it.

    Returns:
        The new path of the earlier run, None when there was none; and the lock of the folder.

    Raises:
        ConfigError: the folder cannot be made or written to, or is in use; an earlier run is where it was.
    """
    check_run_folder(folder, keep=keep)
    own = lock
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock or FolderLock(folder)
        if keep or not check_run_folder(folder, keep=keep):  # a run may have ended in between
            return None, lock
        names = (folder.with_name(f"{folder.name}{suffix}{number}") for number in itertools.count(1))
        aside = next(path for path in names if not path.exists())
        lock.move(aside)
        lock.release()
        folder.mkdir(exist_ok=True)
        return aside, FolderLock(folder)
    except OSError as error:
        if own is None and lock is not None:
            lock.release()
        raise _cannot_write(folder, why_not_written(error, folder)) from error


def prepare_run_folder(folder: Path, *, keep: bool, suffix: str = ".") -> Path | None:
    """Do what `take_run_folder` does for a run that another process starts: the lock is given back.

    Returns:
        The new path of the earlier run; None when there was none.

    Raises:
        ConfigError: see `take_run_folder`.
    """
    aside, lock = take_run_folder(folder, keep=keep, suffix=suffix)
    lock.release()
    return aside


def link_or_copy(source: Path, path: Path) -> None:
    """Hard-link `path` to a file that is replaced, never changed in place; copy it where there are no links.

    Raises:
        OSError: neither is possible.
    """
    try:
        os.link(source, path)
    except OSError:
        shutil.copy2(source, path)


def _cannot_write(folder: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"EXPERIMENT.OUTPUT_DIR: {folder} cannot be written to: {reason}; choose another folder"
    )
