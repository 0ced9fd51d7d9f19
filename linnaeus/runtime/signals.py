"""Stopping on SIGINT (Ctrl-C), SIGTERM (a launcher, a preemption) and SIGUSR1 (a batch system)."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger("linnaeus.runtime.signals")


def end_with_torchrun() -> None:
    """Request SIGTERM for the death of torchrun, before torch is imported. Linux only.

    Does nothing in a process that torchrun has not started.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # torchrun may have died before. In a container, process 1 may be torchrun itself.
    if os.getppid() == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes():
        os.kill(os.getpid(), signal.SIGTERM)


def ignore_signals() -> None:
    """Ignore signals from now on: a second one must not interrupt error reporting."""
    if threading.current_thread() is threading.main_thread():  # only that one may
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def blocked() -> Iterator[None]:
    """Block signals inside the context; processes that start inside block them for ever."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def handled(
    numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Handle signals inside the context. Only the main thread can.

    Raises:
        ValueError: in another thread.
    """
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@functools.cache
def _listen_alone() -> None:
    """Close the pipe in forked processes: a signal to a loader's worker is not for this process."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process inside the context, before anything is written.

    An exception inside an import of torch or NumPy becomes another error, or an abort.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with handled([signal.SIGINT], _leave):
            yield
    else:
        yield


def _leave(number: int, frame: FrameType | None) -> None:
    print("interrupted by Ctrl-C", file=sys.stderr, flush=True)
    os._exit(128 + number)


class Interrupted(KeyboardInterrupt):
    """This process was asked to stop at once: nothing is to be saved, or Ctrl-C came twice."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        self.exit_code = 128 + number  # the shell's code for a program that the signal has ended
        super().__init__(f"stopped by {self.signal.name}")


class StopRequest:
    """Whether this process was asked to stop.

    A signal raises `Interrupted` at once, unless it comes inside `deferred`: there it is only noted,
    except a second Ctrl-C.

    Attributes:
        stop_signal: the first signal noted; 0 without one.
    """

    def __init__(self) -> None:
        self.stop_signal = 0
        self._deferred = False

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handle the signals inside the context. Only the main thread can; others leave them as they are."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        _listen_alone()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._answer, args=(reader,), name="Ctrl-C", daemon=True)
        thread.start()
        try:
            with handled(SIGNALS, self._handle):
                yield self
        finally:
            signal.set_wakeup_fd(before)
            os.write(writer, b"\0")  # ends the thread; a forked process may still hold the pipe
            thread.join()
            os.close(writer)
            os.close(reader)

    def _answer(self, reader: int) -> None:
        """Log a signal at once: the main thread may be in a call, or wait for another thread."""
        is_told = False
        while (number := os.read(reader, 1)[0]) != 0:
            is_ctrl_c = number == signal.SIGINT
            if number in SIGNALS and self._deferred and not is_told:
                is_told, name = True, "Ctrl-C" if is_ctrl_c else signal.Signals(number).name
                again = " (Ctrl-C again: at once)" if is_ctrl_c else ""
                logger.info("%s: stopping after this step and saving a checkpoint%s", name, again)
            elif is_ctrl_c:
                print(
                    "Ctrl-C: stopping as soon as the call under way returns",
                    file=sys.stderr,
                    flush=True,
                )

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only note signals inside the context, except a second Ctrl-C."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._deferred or (number == self.stop_signal == signal.SIGINT):
            raise Interrupted(number)
        self.stop_signal = self.stop_signal or number
