"""A line on the terminal that shows what a command is doing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from linnaeus.autobatch.protocol import RankStatus
from linnaeus.log import is_interactive


@contextmanager
def status_line(console: Console) -> Iterator[RankStatus]:
    """A status for a search; its text is shown on a terminal only."""
    if not is_interactive(console):
        yield RankStatus()
        return
    with console.status("starting") as spinner:
        yield RankStatus(spinner.update)
