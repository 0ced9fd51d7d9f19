"""The process of a run: started, watched, and stopped properly when the sweep is."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

from linnaeus.commands.sweep.folder import ASKED, OUTPUT
from linnaeus.errors import ConfigError

LOCK = ".lock"
REASON_LETTERS = 400


class Stop:
    """Ctrl-C or SIGTERM, handed to the run as Ctrl-C: it saves a checkpoint and ends.

    The run is in a session of its own, so that it hears of each Ctrl-C once, and from here.

    Attributes:
        requested: somebody has asked to stop.
    """

    def __init__(self) -> None:
        self.requested = False
        self._child: subprocess.Popen[bytes] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals inside the context."""
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait(self, child: subprocess.Popen[bytes]) -> int:
        """Wait for the end of a process, and pass signals on; returns its exit code."""
        self._child = child
        try:
            if self.requested:  # since before the process was known here
                child.send_signal(signal.SIGINT)
            return child.wait()
        finally:
            self._child = None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True
        if self._child is not None:
            self._child.send_signal(signal.SIGINT)


@contextmanager
def sole(folder: Path) -> Iterator[IO[str]]:
    """Make sure that no other sweep works in a folder, nor a run that outlived its sweep.

    The lock is the open file's, which a run inherits: it is free when both have ended.

    Raises:
        ConfigError: another one does, or the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"EXPERIMENT.OUTPUT_DIR: {folder} cannot be written to: {error.strerror}; choose another folder"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigError(
                f"{folder}: another sweep is at work here (process {', '.join(lock.read().split())}); wait "
                "for it or end it, or set another EXPERIMENT.NAME"
            ) from None
        yield lock


def run_in_child(folder: Path, stop: Stop, lock: IO[str]) -> int:
    """Train as a folder's `asked.yaml` says, in a process of its own.

    Args:
        folder: of the run; takes its output.
        stop: passes Ctrl-C on.
        lock: names the processes at work, and stays locked as long as one of them lives.

    Returns:
        The exit code; negative for a signal.
    """
    command = [sys.executable, "-m", "linnaeus.main", "--cfg", str(folder / ASKED)]
    with (folder / OUTPUT).open("ab") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},  # what is said last stands last
            start_new_session=True,
            pass_fds=[lock.fileno()],
        )
        lock.seek(0)
        lock.truncate()
        lock.write(f"{os.getpid()}\n{child.pid}\n")
        lock.flush()
        return stop.wait(child)


def reason_of(folder: Path, exit_code: int) -> str | None:
    """Why a run failed: the last line that it wrote, or the signal that ended it; None when it did not."""
    if exit_code == 0:
        return None
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"ended by {name}" + (", often for lack of host memory" if name == "SIGKILL" else "")
    lines = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    last = last.removeprefix("- ")
    short = last if len(last) <= REASON_LETTERS else f"{last[:REASON_LETTERS]}..."
    return short or f"ended with exit code {exit_code}"
