"""Logging: rank 0 to the console, every rank to its own file in the folder of a run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnaeus.runtime.files import not_written

if TYPE_CHECKING:
    from rich.console import Console

LOGGER_NAME = "linnaeus"
SHOWN_ELSEWHERE: Mapping[str, Any] = {"is_shown_elsewhere": True}
"""`extra` of a log record whose content the console shows in another way."""


def set_up_logging(folder: Path | None, *, rank: int, console: Console) -> logging.Logger:
    """Send the package's log to rank 0's console, and to `<folder>/rank<rank>.log` if there is a folder."""
    logger = logging.getLogger(LOGGER_NAME)
    close_logging()
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    if rank == 0:
        logger.addHandler(_console_handler(console))
    if folder is not None:
        logger.addHandler(file_handler(folder, rank))
    return logger


def close_logging() -> None:
    """Remove the handlers that `set_up_logging` has added."""
    logger = logging.getLogger(LOGGER_NAME)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        with suppress(OSError):  # of lines that a full disk has not taken
            handler.close()


class _LogFile(logging.FileHandler):
    """A log file that is given up when it cannot be written, with one line on the console."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self.addFilter(lambda record: False)
        logging.getLogger("linnaeus.runtime.log").warning(
            "%s ends here: %s", self.baseFilename, error.strerror
        )


def file_handler(folder: Path, rank: int) -> logging.Handler:
    """Return a handler that writes this rank's log file into `folder`."""
    path = folder / f"rank{rank}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(path, encoding="utf-8")
    except OSError as error:
        raise not_written(path, error) from error
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)s [rank {rank}] %(name)s: %(message)s")
    )
    return handler


def _console_handler(console: Console) -> logging.Handler:
    from rich.logging import RichHandler  # completion reads run directories without rich

    from linnaeus.runtime.console import is_interactive

    handler: logging.Handler
    if is_interactive(console):
        handler = RichHandler(
            console=console, show_path=False, show_level=False, omit_repeated_times=False
        )
    else:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    handler.setLevel(logging.INFO)
    handler.addFilter(lambda record: not hasattr(record, "is_shown_elsewhere"))
    return handler
