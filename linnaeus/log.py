"""Logging: rank 0 to the console, every rank to its own file in the folder of a run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.logging import RichHandler

from linnaeus.console import is_interactive, make_console
from linnaeus.files import LOGS, not_written
from linnaeus.run_folder import Claim, claim_run_folder, move_aside

if TYPE_CHECKING:
    from linnaeus.dist import World

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
        logger.addHandler(_file_handler(folder, rank))
    return logger


def close_logging() -> None:
    """Remove the handlers that `set_up_logging` has added."""
    logger = logging.getLogger(LOGGER_NAME)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        with suppress(OSError):  # of lines that a full disk has not taken
            handler.close()


class RunFolder:
    """The folder of a run, with its claim and the log of this process, inside the context.

    Until `begin`, the run owns the folder by its claim only, which rank 0 holds: nothing of an earlier run is
    touched, and the log goes to the console and is kept in memory for the file. Every rank must enter the
    context and call `begin`.

    Args:
        path: `<EXPERIMENT.OUTPUT_DIR>/<EXPERIMENT.NAME>`.
        world: the processes.
        keep: use the folder of an earlier run as it is; otherwise `begin` renames it.

    Attributes:
        console: rank 0's console.
        has_begun: whether `begin` was called.
        claim: rank 0's; None on the other ranks.
        pruned: why a search ends the run; empty where it does not.

    Raises:
        ConfigError: on entering: the folder cannot be written to, or is in use; the same on every rank.
    """

    def __init__(self, path: Path, world: World, *, keep: bool) -> None:
        self.console = make_console()
        self.has_begun = False
        self.claim: Claim | None = None
        self.pruned = ""
        self._path, self._world, self._keep = path, world, keep
        self._new_folders: list[Path] = []
        self._early_lines = MemoryHandler(
            capacity=sys.maxsize, flushLevel=sys.maxsize, flushOnClose=False
        )

    def __enter__(self) -> RunFolder:
        set_up_logging(None, rank=self._world.rank, console=self.console).addHandler(
            self._early_lines
        )
        try:
            self._world.on_main(self._take)
        except BaseException as error:  # also of another rank, while this one has the folder
            self.__exit__(None, error, None)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            code, cause = getattr(error, "exit_code", 1), error
            if isinstance(error, SystemExit):
                code = error.code if isinstance(error.code, int) else 1
                cause = error.__cause__ or error  # a rank ends so, when it has told its error
            self.end(code, " ".join(str(cause).split()) or type(cause).__name__)
        close_logging()
        if self.claim is not None:
            self.claim.release()
            with suppress(OSError):  # it is not empty
                for folder in self._new_folders:
                    folder.rmdir()

    def _take(self) -> None:
        with suppress(OSError):  # which the claim says
            self._new_folders = [
                path for path in (self._path, *self._path.parents) if not path.exists()
            ]
        self.claim = claim_run_folder(self._path)

    def check(self) -> None:
        """To be called before anything is written into the folder.

        Raises:
            LostFolderError: it is not this run's any more.
        """
        if self.claim is not None:
            self.claim.check()

    def begin(self) -> str:
        """Move an earlier run aside, and write the log to its file from now on.

        Returns:
            The run's id.

        Raises:
            ConfigError, LostFolderError: see `move_aside` and `check`; the same on every rank.
        """
        run_id, aside = self._world.on_main(self._begin)
        self.has_begun = True
        logger, handler = (
            logging.getLogger(LOGGER_NAME),
            _file_handler(self._path / LOGS, self._world.rank),
        )
        self._early_lines.setTarget(handler)
        self._early_lines.flush()
        logger.removeHandler(self._early_lines)
        logger.addHandler(handler)
        if aside is not None:
            logging.getLogger("linnaeus.run").info(
                "an earlier run of this name is now in %s", aside
            )
        return run_id

    def _begin(self) -> tuple[str, Path | None]:
        assert self.claim is not None
        self.claim.check()
        aside = None
        if not self._keep:
            aside, self.claim = move_aside(self.claim)
        self.claim.begin()
        return self.claim.id, aside

    def end(self, exit_code: int, reason: str | None = None) -> None:
        """Write down how the run has ended, if it has begun."""
        if self.claim is not None and self.has_begun:
            self.claim.end(exit_code, self.pruned or reason, pruned=bool(self.pruned))


class _LogFile(logging.FileHandler):
    """A log file that is given up when it cannot be written, with one line on the console."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self.addFilter(lambda record: False)
        logging.getLogger("linnaeus.log").warning(
            "%s ends here: %s", self.baseFilename, error.strerror
        )


def _file_handler(folder: Path, rank: int) -> logging.Handler:
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
