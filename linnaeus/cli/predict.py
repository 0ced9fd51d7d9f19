"""`linnaeus predict`: predict the classes of images with a trained run."""

from __future__ import annotations

import csv
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

from linnaeus.cli.arguments import naming_options
from linnaeus.cli.parser import (
    CheckpointOptions,
    CommandParser,
    choice,
    option,
    read_columns,
    read_count,
    read_number,
    read_table,
    unwritable,
)
from linnaeus.data import unread_note
from linnaeus.data.split_file import SPLIT_FILE, read_split
from linnaeus.data.splits import SPLITS
from linnaeus.inference.paths import STDIN, Unreadable, problem_of, walk
from linnaeus.runtime.errors import ConfigError, DataError
from linnaeus.runtime.files import CHECKPOINTS, not_written
from linnaeus.runtime.signals import StopRequest, leaving_at_once
from linnaeus.runtime.words import counted

if TYPE_CHECKING:
    from rich.console import Console

    from linnaeus.inference.prediction import Prediction
    from linnaeus.inference.trained import TrainedRun

DESCRIPTION = """\
Predicts the most probable classes of images, for each level, with a trained run. RUN is a run directory or a
checkpoint. Several runs form an ensemble. IMAGES are files, folders (with subfolders), patterns such as
'*.jpg' and 'photos/**/*.png', or - to read paths from standard input, one per line.
"""
DETAILS = """\
Images are processed as a stream, so memory does not grow with their number. They keep the order of the
command line; files of a folder are sorted by name. Without --output, predictions are printed as text.
Progress and notes go to standard error. Unreadable images are skipped and listed in FILE.skipped.csv.

examples:
  linnaeus predict runs/birds photos/ --output birds.csv
  linnaeus predict runs/birds a.jpg b.jpg --top 3 --path
  linnaeus predict runs/birds photos/ --threshold 0.9 --output birds.csv
  linnaeus predict runs/birds runs/birds_2 photos/ --tta flip --output birds.csv
  linnaeus predict runs/birds photos/ --features birds.npy
  find /data -name '*.jpg' | linnaeus predict runs/birds - --output birds.jsonl --device cuda

exit codes: 0 done, 1 no image was predicted (no file is written) or another error, 2 option, 3 not even one
image fits in memory, 130 Ctrl-C, 143 SIGTERM (FILE.partial keeps the predictions so far), 141 the reader of
standard output, such as head, has exited
"""
NUM_NAMED = 20
"""Number of unreadable images named on the terminal. FILE.skipped.csv lists them all."""
PIPE_CLOSED = 141
"""The shell's exit code for a program whose reader, such as `head`, has exited."""

logger = logging.getLogger("linnaeus.predict")


@dataclass
class PredictOptions(CheckpointOptions):
    """Options of `linnaeus predict`. `images` holds words for `walk`, `others` further runs."""

    images: list[str] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)
    output: Path | None = option(
        "write predictions to a .csv, .json or .jsonl file, which appears when all are done",
        "FILE",
        read_table,
    )
    top: int | None = option(
        "classes for each level; default 5; all above --threshold with several labels",
        "K",
        read_count,
    )
    threshold: float | None = option(
        "add the finest level whose best class reaches this probability: the genus if no species does; with "
        "several labels per image: minimum probability of a label, default 0.5",
        "P",
        partial(read_number, "probability", most=1),
    )
    split: str | None = choice("predict the images of this split of RUN instead of IMAGES", SPLITS)
    path: bool = option("add the most probable path through the taxonomy")
    tta: str | None = choice(
        "average the probabilities over each image and its mirror image", ("flip",)
    )
    features: Path | None = option(
        "write the inputs of the classification head, one row per image in order: .npy, with the paths in "
        "FILE.paths.csv, or .parquet",
        "FILE",
        partial(read_columns, ".npy"),
    )
    device: str = option("auto, cpu, cuda, cuda:1, ...", "DEVICE", default="auto")
    batch_size: int | None = option(
        "images per batch; default: the maximum that fits, at most 512 (64 on the CPU)",
        "N",
        read_count,
    )
    workers: int | None = option(
        "threads that load images; 0 for none; default: one per CPU core, at most 8",
        "N",
        lambda text: 0 if text == "0" else read_count(text),
    )


def read(argv: Sequence[str]) -> tuple[PredictOptions]:
    """Read the tokens after `predict` and return the argument of `run`.

    Raises:
        ConfigError: lists all mistakes.
    """
    options, words, problems = PARSER.words(argv)
    while words and not problems and _is_run(words[0]):
        options.others.append(Path(words.pop(0)))
    options.images = words
    if options.features is not None and options.others:
        problems.append("--features: takes one RUN, because each run has its own embeddings")
    if options.split is not None and options.images:
        problems.append(f"--split {options.split}: predicts images of RUN; leave out IMAGES")
    elif options.split is not None and not problems:
        options.images = _split_images(options.run, options.split)
    elif not options.images:
        problems.append("IMAGES: are missing; add files, folders, patterns or - after RUN")
    for word in () if options.split else options.images:
        if problem := problem_of(word):
            problems.append(f"IMAGES: {word}: {problem}")
    if STDIN in options.images and options.launcher == "slurm":
        problems.append(
            "IMAGES: '-' reads standard input, which a SLURM job lacks; pass files, directories or patterns, "
            "or drop --launcher slurm"
        )
    problems += unwritable({"--output": options.output, "--features": options.features})
    if problems:
        raise ConfigError(problems)
    return (options,)


def _is_run(word: str) -> bool:
    path = Path(word)
    is_file = path.suffix in (".pt", ".safetensors") and path.is_file()
    return is_file or (path / CHECKPOINTS).is_dir()


def _split_images(path: Path, split: str) -> list[str]:
    """Return the images of a split of a run. `path` is the run directory or a checkpoint in it."""
    folder = path if path.is_dir() else path.parent.parent
    if not (folder / SPLIT_FILE).is_file():
        raise ConfigError(
            f"--split {split}: {folder / SPLIT_FILE} does not exist (only runs on image files write it); add "
            "IMAGES instead"
        )
    try:
        return read_split(folder / SPLIT_FILE, split)[0]
    except DataError as error:
        raise ConfigError(f"--split {split}: {error}") from error


def run(options: PredictOptions) -> int:
    """Predict the images. Return the exit code: 0 done, 1 no image was predicted.

    Raises:
        LinnaeusError: an error that the user can fix; the message says how.
    """
    with leaving_at_once():
        import_module("linnaeus.inference.trained")  # for `options.load`
        from linnaeus.runtime.console import make_console
        from linnaeus.runtime.log import close_logging, set_up_logging

    console = make_console(sys.stderr)
    set_up_logging(None, rank=0, console=console)
    try:
        with naming_options(), StopRequest().listening():
            runs = []
            for path in (options.run, *options.others):
                runs.append(options.load(path, options.device))
                logger.info("%s", runs[-1].description)
            return _predict(runs, options, console)
    except BrokenPipeError:
        # Otherwise Python reports the error again when it flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    finally:
        close_logging()


def _predict(runs: list[TrainedRun], options: PredictOptions, console: Console) -> int:
    from linnaeus.inference.predictor import Predictor
    from linnaeus.runtime.console import ProgressBar

    predictor = Predictor(
        runs,
        top=options.top,
        path=options.path,
        threshold=options.threshold,
        tta=options.tta,
        features=options.features is not None,
        batch_size=options.batch_size,
        num_workers=options.workers,
    )
    unreadable, unread = list[Unreadable](), Counter[str]()
    if STDIN in options.images:  # file names may not be valid UTF-8
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    with (
        ExitStack() as files,
        # Show no bar between printed lines.
        ProgressBar(console if options.output else None) as bar,
        closing(predictor.run(walk(options.images, sys.stdin, unread))) as results,
    ):
        if output := options.output or options.features:
            files.callback(_list_unreadable, output, unreadable)
        writers = [files.enter_context(each) for each in _writers(options)]
        bar.start("predicting", None)
        num_predicted = 0
        for found in results:
            if not isinstance(found, Unreadable):
                for writer in writers:
                    writer.write(found)
                num_predicted += 1
            else:
                unreadable.append(found)
                if len(unreadable) <= NUM_NAMED:
                    logger.warning(
                        "skipped: %s: %s", printable(found.source), printable(found.reason)
                    )
            bar.advance(1)
    sys.stdout.flush()
    total = f"{counted(num_predicted, 'image')} predicted"
    if unreadable:
        total += f", {counted(len(unreadable), 'unreadable image')} skipped"
    if unread:
        logger.info("%s", unread_note(unread))
    written = [path.resolve() for path in (options.output, options.features) if path]
    if num_predicted and written:
        total += f": {', '.join(map(str, written))}"
    logger.info("%s", total)
    return 0 if num_predicted else 1


def _writers(options: PredictOptions) -> Iterator[AbstractContextManager[Writer]]:
    """Yield a context for each writer. Without `--output`, one writes to standard output."""
    table, features = options.output, options.features
    yield nullcontext(Writer(sys.stdout, "")) if table is None else _open(table, Writer)
    if features is not None:
        yield _open(features, FeatureWriter)
        if features.suffix.lower() == ".npy":
            yield _open(features.with_name(f"{features.name}.paths.csv"), PathWriter)


def _list_unreadable(output: Path, images: Sequence[Unreadable]) -> None:
    """Write FILE.skipped.csv, or remove the file of an earlier call."""
    table = output.with_name(f"{output.name}.skipped.csv")
    table.unlink(missing_ok=True)
    if not images:
        return
    rows = [["path", "reason"], *([image.source, image.reason] for image in images)]
    try:
        with table.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
    except OSError as error:
        raise not_written(table, error) from error
    logger.info("skipped images are listed in %s", table)


@dataclass
class Writer:
    """Writes predictions to an open file, one after another, and counts them.

    `ending` is .csv, .json (a list with an object per line), .jsonl, or empty for plain text.
    """

    file: IO[Any]
    ending: str
    number: int = 0

    def write(self, prediction: Prediction) -> None:
        """Write one prediction."""
        if self.ending == ".csv":
            cells = self.cells(prediction)
            table = csv.writer(self.file, lineterminator="\n")
            table.writerows([cells.values()] if self.number else [cells, cells.values()])
        elif self.ending:
            content = prediction.as_dict()
            content["path"] = _text_of(prediction.source)
            text = json.dumps(content, ensure_ascii=False)
            begin = ",\n" if self.number else "[\n"
            self.file.write(f"{begin}{text}" if self.ending == ".json" else f"{text}\n")
        else:
            self.file.write(_text(prediction))
        self.number += 1

    def cells(self, prediction: Prediction) -> dict[str, str]:
        """Return the row of a CSV file by column. The best class of a level has number 1.

        Several labels share one cell, as in a manifest. Their probabilities share another cell.
        """
        cells = {"path": str(prediction.source)}
        if prediction.separator:
            for level, classes in prediction.levels.items():
                cells[level] = (
                    prediction.separator.join(name for name, _ in classes) or prediction.separator
                )
                cells[f"{level}_probability"] = prediction.separator.join(
                    f"{p:.6g}" for _, p in classes
                )
            return cells
        for level, classes in prediction.levels.items():
            for number, (name, probability) in enumerate(classes, start=1):
                cells |= {
                    f"{level}_{number}": name,
                    f"{level}_{number}_probability": f"{probability:.6g}",
                }
        if (path := prediction.path) is not None:
            cells |= {f"consistent_{level}": name for level, name in path.classes.items()}
            cells["consistent_probability"] = f"{path.probability:.6g}"
            cells["consistent_differs"] = str(path.differs).lower()
        if prediction.certain is not None:
            level, name, probability = prediction.certain
            cells |= {"certain_level": level, "certain_class": name}
            cells["certain_probability"] = f"{probability:.6g}" if level else ""
        return cells

    def end(self) -> None:
        """Finish the file, even without a prediction."""
        if self.ending == ".json":
            self.file.write("\n]\n" if self.number else "[]\n")
        self.file.flush()


class PathWriter(Writer):
    """Writes the paths of predictions as a CSV file."""

    def cells(self, prediction: Prediction) -> dict[str, str]:
        """Return the path alone."""
        return {"path": str(prediction.source)}


@dataclass
class FeatureWriter(Writer):
    """Writes the embeddings of predictions to an open binary file, a thousand at a time."""

    NUM_HELD: ClassVar = 1000
    _held: list[Prediction] = field(default_factory=list)
    _width: int = 0
    _parquet: Any = None

    def write(self, prediction: Prediction) -> None:
        """Write one embedding."""
        self._held.append(prediction)
        self.number += 1
        if len(self._held) == self.NUM_HELD:
            self._flush()

    def _flush(self) -> None:
        import numpy as np

        rows = np.stack([np.asarray(each.features) for each in self._held])
        if self.ending == ".npy":
            if not self._width:
                self._width = rows.shape[1]
                self._write_header()
            self.file.write(rows.tobytes())
        else:
            import pyarrow
            from pyarrow.parquet import ParquetWriter

            lists = pyarrow.FixedSizeListArray.from_arrays(rows.ravel(), rows.shape[1])
            paths = [_text_of(each.source) for each in self._held]
            table = pyarrow.table({"path": paths, "features": lists})
            self._parquet = self._parquet or ParquetWriter(self.file, table.schema)
            self._parquet.write_table(table)
        self._held = []

    def _write_header(self) -> None:
        """Write the header of a .npy file. NumPy leaves room in it for any number of rows."""
        from numpy.lib.format import write_array_header_1_0

        shape = self.number, self._width
        content = {"descr": "<f4", "fortran_order": False, "shape": shape}
        write_array_header_1_0(self.file, content)

    def end(self) -> None:
        """Write the rows held in memory and the number of rows."""
        if self._held:
            self._flush()
        if self._parquet is not None:
            self._parquet.close()
        elif self._width:
            self.file.seek(0)
            self._write_header()


def _text_of(source: str | int) -> str:
    """Return a path as valid UTF-8."""
    return str(source).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _text(prediction: Prediction) -> str:
    """Return the path and a line for each level below it."""
    from linnaeus.inference.prediction import percent

    rows = {
        printable(name): "   ".join(f"{printable(label)} {percent(p)}" for label, p in classes)
        or "none"
        for name, classes in prediction.levels.items()
    }
    if prediction.path is not None:
        rows["path"] = printable(str(prediction.path))
    if prediction.certain is not None:
        level, label, p = prediction.certain
        rows["certain"] = f"{level} {printable(label)} {percent(p)}" if level else "none"
    width = max(map(len, [*rows, "path"]))
    lines = [f"  {name:<{width}}  {text}" for name, text in rows.items()]
    return "\n".join([printable(str(prediction.source)), *lines, ""])


@contextmanager
def _open(output: Path, kind: type[Writer]) -> Iterator[Writer]:
    """Open a writer to a file.

    It writes FILE.partial, which is renamed to FILE at the end if it has a prediction. If the context ends
    with an exception, FILE.partial keeps the predictions so far.

    Raises:
        LinnaeusError: the file cannot be written.
    """
    writer: Writer | None = None
    partial = output.with_name(f"{output.name}.partial")
    mode: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
    if issubclass(kind, FeatureWriter):
        mode = {"mode": "wb"}
    try:
        with partial.open(**{"mode": "w"} | mode) as file:
            writer = kind(file, output.suffix.lower())
            try:
                yield writer
            finally:
                writer.end()
        if writer.number:
            partial.replace(output)
    except OSError as error:
        raise not_written(output, error) from error
    finally:
        if writer is not None and not writer.number:
            partial.unlink(missing_ok=True)
        elif writer is not None and partial.exists():
            print(f"the predictions so far are kept in {partial}", file=sys.stderr)


def printable(text: str) -> str:
    """Escape control characters and invalid bytes in a name, for a terminal.

    >>> printable("a\\nb\\x1b[31m"), printable("Ä")
    ('a\\\\nb\\\\x1b[31m', 'Ä')
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


PARSER = CommandParser(
    "predict",
    PredictOptions,
    words="RUN... IMAGES... [options]",
    description=DESCRIPTION,
    details=DETAILS,
)
