"""A run under supervision: started, passed the signals to stop, and its end written to its folder.

`python -m linnaeus.launchers.supervise FOLDER DESCRIPTOR` is the process of a local run. It does not depend
on the sweep that has started it, which may end earlier.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import FrameType

import psutil

from linnaeus.errors import EXIT_INTERRUPTED
from linnaeus.files import OUTCOME, RESULT
from linnaeus.launchers.outcome import OUTPUT, Outcome, is_stop, outcome_of, read_outcome, save_outcome, stamp
from linnaeus.launchers.record import identity, read_record, update_record
from linnaeus.signals import handled

Child = subprocess.Popen[bytes]


class Supervisor:
    """Forwards stop signals to the process of a run, also those that arrive before it exists.

    Args:
        react: called in the main thread for each signal, with its number, the process, and how many signals
            there have been.
        signals: what to listen to.

    Attributes:
        received: the signals so far.
    """

    def __init__(
        self,
        react: Callable[[int, Child, int], object],
        signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
    ) -> None:
        self.received: list[int] = []
        self._to_pass_on: deque[int] = deque()
        self._react = react
        self._signals = signals
        self._child: Child | None = None

    def listening(self) -> AbstractContextManager[None]:
        """Handle the signals inside the context."""
        return handled(self._signals, self._handle)

    def wait(self, child: Child) -> int:
        """Wait until a process ends; returns its exit code, negative for a signal."""
        self._child = child
        try:
            self._pass_on()  # what came before the process was known here
            return child.wait()
        finally:
            self._child = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        self._to_pass_on.append(number)
        self._pass_on()

    def _pass_on(self) -> None:
        """Each signal once, although another one may interrupt this at any point."""
        while self._child is not None:
            try:
                number = self._to_pass_on.popleft()
            except IndexError:
                return
            self._react(number, self._child, len(self.received))


def run_to_end(
    folder: Path,
    command: Sequence[str],
    supervisor: Supervisor,
    *,
    env: Mapping[str, str],
    started: Callable[[Child], object] = lambda _: None,
    stopped_elsewhere: Callable[[], bool] = lambda: False,
    pass_fds: Sequence[int] = (),
) -> Outcome:
    """Run the process of a run and write how it ended; its output is appended to the run's.

    The outcome of an earlier process is deleted first: if nobody sees the end of this one, it has none.

    Args:
        folder: the run's.
        command: what to execute.
        supervisor: passes signals on; a run that they stop counts as interrupted, whatever its exit code.
        env: the environment.
        started: called with the process.
        stopped_elsewhere: asked of a run that has failed: whether somebody else has stopped it.
        pass_fds: descriptors that the process inherits.
    """
    seconds, result_before = _seconds_before(folder), stamp(folder / RESULT)
    update_record(folder, seconds=seconds)
    (folder / OUTCOME).unlink(missing_ok=True)
    began = time.monotonic()
    with (folder / OUTPUT).open("ab") as output:
        begin = output.tell()
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**env, "PYTHONUNBUFFERED": "1"},  # the last line is the reason of a failure
            start_new_session=True,
            pass_fds=pass_fds,
        )
        started(child)
        exit_code = supervisor.wait(child)
    says_so = exit_code == 0 or is_stop(exit_code)
    if not says_so and (supervisor.received or stopped_elsewhere()):
        exit_code = EXIT_INTERRUPTED  # its last words were cut off, or it was stopped before it could say any
    outcome = outcome_of(folder, exit_code, seconds + time.monotonic() - began, begin)
    if outcome.was_interrupted and stamp(folder / RESULT) not in (None, result_before):
        outcome = outcome_of(folder, 0, outcome.seconds)  # it had done all, and was about to end
    save_outcome(folder, outcome)
    return outcome


def _seconds_before(folder: Path) -> float:
    """What earlier processes of a run have taken, by how the last one ended and by the run's record.

    Each may know less than the other: `result.json` has the last training alone, the record only what was
    before a job that was queued again.
    """
    earlier, record = read_outcome(folder), read_record(folder) or {}
    return max(0.0 if earlier is None else earlier.seconds, float(record.get("seconds", 0.0)))


def kill(child: Child) -> None:
    """End a process and all that it has started, at once."""
    with suppress(psutil.Error):
        for process in psutil.Process(child.pid).children(recursive=True):
            with suppress(psutil.Error):
                process.kill()
    child.kill()


def _stop_or_kill(_: int, child: Child, num_signals: int) -> None:
    """The first signal is passed on as Ctrl-C, with which the run saves a checkpoint; the next one kills."""
    if num_signals == 1:
        child.send_signal(signal.SIGINT)
    else:
        kill(child)


def main(folder: Path, descriptor: int) -> int:
    """Supervise the local run of a folder, as its record says; returns the exit code."""
    record = read_record(folder)
    assert record is not None, f"{folder}: nobody has made its record"
    if record["cores"]:
        with suppress(OSError):  # not allowed in this container: the run may use all
            os.sched_setaffinity(0, record["cores"])
    supervisor = Supervisor(_stop_or_kill)
    with supervisor.listening():  # from here on the process may be told to stop, and says who it is
        update_record(folder, supervisor=identity(os.getpid()))
        outcome = run_to_end(
            folder,
            record["command"],
            supervisor,
            env={**os.environ, **record["env"]},
            started=lambda child: update_record(folder, child=identity(child.pid)),
            pass_fds=[descriptor],
        )
    return 0 if outcome.finished else 1


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), int(sys.argv[2])))
