"""The process of a run: started, waited for, and stopped with a checkpoint when the sweep is stopped."""

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
TAIL_BYTES = 1 << 16
"""Only this much of the end of a run's output is read for its last line."""


class Stop:
    """Passes Ctrl-C and SIGTERM on to the run as Ctrl-C: it saves a checkpoint and ends.

    The run is in a session of its own, so that it gets each Ctrl-C once: from here, not from the terminal.

    Attributes:
        requested: whether somebody has asked to stop.
    """

    def __init__(self) -> None:
        self.requested = False
        self._child: subprocess.Popen[bytes] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the context."""
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait(self, child: subprocess.Popen[bytes]) -> int:
        """Wait until a process ends, passing signals on; returns its exit code, negative for a signal."""
        self._child = child
        try:
            if self.requested:  # before the process was known here
                child.send_signal(signal.SIGINT)
            return child.wait()
        finally:
            self._child = None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True
        if self._child is not None:
            self._child.send_signal(signal.SIGINT)


@contextmanager
def locked(folder: Path) -> Iterator[IO[str]]:
    """Lock a folder against other sweeps, and against a run that outlived its sweep.

    The lock belongs to the open file, which a run inherits: it is free once both have ended.

    Raises:
        ConfigError: the folder is locked already, or cannot be written to.
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
    """Train in a process of its own, with the configuration in the folder's `asked.yaml`.

    Args:
        folder: the run's; its output goes there too.
        stop: passes Ctrl-C on.
        lock: lists the processes at work, and stays locked as long as one of them lives.

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
            env={**os.environ, "PYTHONUNBUFFERED": "1"},  # the last line is the reason of a failure
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
    last = last_line(folder).removeprefix("- ")
    short = last if len(last) <= REASON_LETTERS else f"{last[:REASON_LETTERS]}..."
    return short or f"ended with exit code {exit_code}"


def last_line(folder: Path) -> str:
    """The last line that the run in a folder has written so far; empty before the first."""
    try:
        with (folder / OUTPUT).open("rb") as output:
            output.seek(max(output.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
            lines = output.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
