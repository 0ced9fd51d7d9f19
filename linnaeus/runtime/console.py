"""Rank 0's console, the progress bar of an epoch, and a status line."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any

import rich.progress
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

COUNT_S = 0.1
"""How often a `ProgressBar` counts steps, at most."""
REFRESHES_PER_S = 2.0
"""How often a `StatusLine` and a `ProgressBar` are drawn, which takes time from training."""


def is_interactive(console: Console) -> bool:
    """Return whether the output is a terminal, and not of a CI job."""
    return console.is_terminal and os.environ.get("CI", "").lower() not in ("1", "true")


def make_console(file: IO[str] | None = None, **options: Any) -> Console:
    """Return a console that prints text unchanged, and does not wrap at 80 columns where it is no terminal.

    Args:
        file: where it prints; None for standard output.
        options: of `rich.console.Console`.
    """
    console = Console(
        file=file or sys.stdout, highlight=False, markup=False, emoji=False, **options
    )
    if not console.is_terminal:
        console.width = max(console.width, 120)
    return console


class ProgressBar:
    """A progress bar per epoch on a terminal; elsewhere one log line per call of `describe`.

    Args:
        console: rank 0's console; None on the other ranks, which show no bar.
    """

    def __init__(self, console: Console | None) -> None:
        self._shown = console is not None and is_interactive(console)
        columns = (
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("{task.fields[metrics]}", markup=False),
        )
        self._bar = rich.progress.Progress(
            *columns,
            console=console,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
            disable=not self._shown,
        )

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:  # a bar that is not shown would print an empty line
            self._bar.stop()

    def start(self, title: str, total: int | None) -> None:
        """Begin an epoch of `total` optimizer steps; None for any number."""
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._bar.add_task(title, total=total, metrics="")
        self._uncounted, self._last_count = 0, 0.0

    def advance(self, num_steps: int) -> None:
        """Count optimizer steps as done."""
        self._uncounted += num_steps
        if time.monotonic() - self._last_count > COUNT_S:
            self._count()

    def _count(self) -> None:
        self._bar.advance(self._bar.task_ids[0], self._uncounted)
        self._uncounted, self._last_count = 0, time.monotonic()

    def describe(self, values: Mapping[str, float]) -> None:
        """Show metrics beside the bar, or log them."""
        self._count()
        [task] = self._bar.tasks
        text = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        self._bar.update(task.id, metrics=text)
        logging.getLogger("linnaeus").log(
            logging.DEBUG if self._shown else logging.INFO,
            "%s  step %d/%d  %s",
            task.description,
            task.completed,
            task.total,
            text,
        )


class StatusLine:
    """Status in the last line of a terminal: the activity, and its duration. Elsewhere nothing is shown.

    Args:
        console: rank 0's console; None shows nothing.
    """

    def __init__(self, console: Console | None) -> None:
        self._describe: Callable[[], str] = lambda: "starting"
        self._started = time.monotonic()
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        if console is not None and is_interactive(console):
            self._live = _Live(
                get_renderable=self._line,
                console=console,
                refresh_per_second=REFRESHES_PER_S,
                transient=True,
            )

    def __enter__(self) -> StatusLine:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, text: str | Callable[[], str]) -> None:
        """Replace the text. A function is called at each refresh."""
        self._describe = text if callable(text) else lambda: text
        if self._live is not None:
            self._live.refresh()

    def _line(self) -> Text:
        seconds = int(time.monotonic() - self._started)
        text = f" {seconds // 60}:{seconds % 60:02d} {self._describe()}"
        frame = self._spinner.render(time.monotonic())
        assert isinstance(frame, Text)
        return Text.assemble(frame, text, no_wrap=True, overflow="ellipsis")


class _Live(Live):
    """Survives the memory cap of a trial, which applies to its thread too, and the end of the terminal."""

    def refresh(self) -> None:
        with suppress(MemoryError, OSError):
            super().refresh()
