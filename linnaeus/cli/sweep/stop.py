"""Ctrl-C and SIGTERM in a sweep, which answers them between two looks at its runs."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from linnaeus.signals import handled

SLICE_S = 0.1


class Stop:
    """Notes Ctrl-C and SIGTERM.

    Attributes:
        signals: those so far.
    """

    def __init__(self) -> None:
        self.signals: list[int] = []
        self._num_handled = 0

    @property
    def requested(self) -> bool:
        """Whether somebody has asked to stop."""
        return bool(self.signals)

    @property
    def is_new(self) -> bool:
        """Whether there is a signal since the last call of `handle`."""
        return len(self.signals) > self._num_handled

    def handle(self) -> None:
        """Count the signals so far as handled."""
        self._num_handled = len(self.signals)

    def wait(self, seconds: float) -> None:
        """Sleep, but not past a new signal."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.is_new:
            time.sleep(SLICE_S)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note the signals inside the context."""
        with handled((signal.SIGINT, signal.SIGTERM), self._note):
            yield

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
