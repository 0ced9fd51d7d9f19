"""From a run and images to predictions."""

from __future__ import annotations

import csv
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TextIO

from PIL import Image
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from linnaeus.cli.predict.options import Options, skipped_name
from linnaeus.cli.predict.output import open_writer, printable
from linnaeus.cli.tables import UnixLines
from linnaeus.console import is_interactive, make_console
from linnaeus.inference.paths import STDIN, Unreadable, walk
from linnaeus.inference.trained import TrainedRun, load_run
from linnaeus.log import close_logging, set_up_logging
from linnaeus.signals import StopRequest
from linnaeus.words import counted

NUM_NAMED = 20
"""So many unreadable images are named on the terminal; of more, only `--output` lists all."""
PIPE_CLOSED = 141
"""The shell's exit code for a program whose reader, such as `head`, has gone."""

logger = logging.getLogger("linnaeus.predict")


def run(options: Options) -> int:
    """Predict the images; returns the exit code: 0 done, 1 not one image could be read.

    Raises:
        LinnaeusError: something that the user can mend; the message says how.
    """
    console = make_console(stderr=True)
    set_up_logging(None, rank=0, console=console)
    # Pillow reports the size of such an image with a line of source code; too large a one is unreadable.
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    try:
        with StopRequest().listening():
            trained = load_run(options.run, checkpoint=options.checkpoint, device=options.device)
            logger.info("%s", trained.description)
            return _predict(trained, options, console)
    except BrokenPipeError:
        # Python would complain again when it flushes standard output at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    finally:
        close_logging()


def _predict(trained: TrainedRun, options: Options, console: Console) -> int:
    predictor = trained.predictor(
        top=options.top, path=options.path, batch_size=options.batch_size, num_workers=options.workers
    )
    num_predicted = 0
    with ExitStack() as stack:
        skipped = stack.enter_context(_Skipped(options.output))
        writer = stack.enter_context(
            open_writer(options.output, predictor.taxonomy.num_classes, top=options.top, path=options.path)
        )
        # Between printed lines a bar would only get in the way.
        progress = stack.enter_context(_progress(console, is_shown=options.output is not None))
        task = progress.add_task("predicting", total=None)
        images = walk(options.images, _lines(options.images))
        for found in stack.enter_context(closing(predictor.run(images))):
            if isinstance(found, Unreadable):
                skipped.add(found)
            else:
                writer.write(found)
                num_predicted += 1
            progress.advance(task)
        writer.replaces = bool(num_predicted) or not skipped.number
        is_kept = not writer.replaces and options.output is not None and options.output.exists()
    total = f"{counted(num_predicted, 'image')} predicted"
    if skipped.number:
        total += f", {counted(skipped.number, 'unreadable one')} left out{skipped.where()}"
    if options.output is not None:
        total += f": {options.output.resolve()}{', of an earlier call, stays as it was' if is_kept else ''}"
    logger.info("%s", total)
    return 0 if num_predicted or not skipped.number else 1


def _lines(words: list[str]) -> Iterator[str]:
    """The lines of standard input, where a word asks for them; names of files may be no valid UTF-8."""
    if STDIN in words:
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        yield from sys.stdin


def _progress(console: Console, *, is_shown: bool) -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.completed:.0f} images"),
        TimeElapsedColumn(), console=console, transient=True,
        disable=not (is_shown and is_interactive(console)),
    )  # fmt: skip


class _Skipped:
    """Reports images that cannot be read: the first ones on the terminal, all in a table beside the output.

    Args:
        output: the file of the predictions; None for no table.

    Attributes:
        number: how many there are so far.
    """

    def __init__(self, output: Path | None) -> None:
        self.number = 0
        self._table = None if output is None else skipped_name(output)
        self._file: TextIO | None = None

    def __enter__(self) -> _Skipped:
        if self._table is not None:
            self._table.unlink(missing_ok=True)  # of an earlier call
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, image: Unreadable) -> None:
        """Report one."""
        self.number += 1
        if self.number <= NUM_NAMED:
            logger.warning("left out: %s: %s", printable(image.source), printable(image.reason))
        elif self.number == NUM_NAMED + 1:
            logger.warning("more images are left out; from here on they are only counted%s", self.where())
        if self._table is None:
            return
        if self._file is None:
            self._file = self._table.open("w", encoding="utf-8", errors="surrogateescape", newline="")
            csv.writer(UnixLines(self._file)).writerow(["path", "reason"])
        csv.writer(UnixLines(self._file)).writerow([image.source, image.reason])

    def where(self) -> str:
        """Where all of them are listed."""
        return "" if self._table is None else f" (listed in {self._table})"
