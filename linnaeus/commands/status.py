"""What a command is trying just now, for a person who watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from linnaeus.autobatch.protocol import Status
from linnaeus.log import is_interactive


class _Announcer(Status):
    """Shows what is being tried where a person watches."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        super().__init__()

    @property
    def text(self) -> str:
        """What is being tried."""
        return self._text

    @text.setter
    def text(self, text: str) -> None:
        self._text = text
        self._show(text)


@contextmanager
def status_line(console: Console) -> Iterator[Status]:
    """A status that a search may set; shown on a terminal only."""
    if not is_interactive(console):
        yield Status()
        return
    with console.status("starting") as spinner:
        yield _Announcer(spinner.update)
