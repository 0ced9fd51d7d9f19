"""`linnaeus predict`: classes of images, by a trained run."""

from __future__ import annotations

import csv
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from linnaeus.cli.parser import (
    CommandParser,
    RunOptions,
    check_files,
    choice,
    option,
    read_count,
    read_number,
    read_table,
)
from linnaeus.data import unread_note
from linnaeus.data.split_file import SPLIT_FILE, read_split
from linnaeus.data.splits import SPLITS
from linnaeus.inference.paths import STDIN, Unreadable, problem_of, walk
from linnaeus.runtime.errors import ConfigError, DataError
from linnaeus.runtime.files import CHECKPOINTS, not_written
from linnaeus.runtime.signals import StopRequest
from linnaeus.runtime.words import counted

if TYPE_CHECKING:
    from rich.console import Console

    from linnaeus.inference.prediction import Prediction
    from linnaeus.inference.trained import TrainedRun

DESCRIPTION = """\
Names the most probable classes of images, for each level, with a trained run. RUN is the folder of a
run or one of its checkpoints. IMAGES are files, folders (with all below), patterns such as '*.jpg' and
'photos/**/*.png', and - for a list of paths on standard input, one per line.
"""
DETAILS = """\
Any number of images can be predicted: they are read, predicted and written one after another, in the order in
which they are named (the files of a folder by name). Without --output they are printed for people; progress
and notes go to standard error. Images that cannot be read are left out, and listed in FILE.skipped.csv.

examples:
  linnaeus predict runs/birds photos/ --output birds.csv
  linnaeus predict runs/birds a.jpg b.jpg --top 3 --path
  linnaeus predict runs/birds photos/ --threshold 0.9 --output birds.csv
  find /data -name '*.jpg' | linnaeus predict runs/birds - --output birds.jsonl --device cuda

exit codes: 0 done, 1 not one image was predicted (no file is written), or anything else, 2 option, 3 not even
one image fits into memory, 130 Ctrl-C, 143 SIGTERM (what was predicted is kept in FILE.partial), 141 the
reader of standard output, such as head, has gone
"""
NUM_NAMED = 20
"""Unreadable images named on the terminal; of more, only FILE.skipped.csv lists all."""
PIPE_CLOSED = 141
"""The shell's exit code for a program whose reader, such as `head`, has gone."""

logger = logging.getLogger("linnaeus.predict")


@dataclass
class PredictOptions(RunOptions):
    """What to predict, with what, and where to; `images` are words for `walk`."""

    images: list[str] = field(default_factory=list)
    output: Path | None = option(
        "write .csv, .json or .jsonl by its ending, instead of printing; the file appears when all is done",
        "FILE",
        read_table,
    )
    top: int | None = option(
        "classes for each level; default 5, or all from the threshold on", "K", read_count
    )
    threshold: float | None = option(
        "name the finest level whose best class has this probability: the genus where no species is certain; "
        "with several labels per image: least probability of a label, default 0.5",
        "P",
        partial(read_number, "probability", most=1),
    )
    split: str | None = choice(
        "predict the images of this split of RUN, in place of IMAGES", SPLITS
    )
    path: bool = option(
        "add the most probable path through the taxonomy, on which each class is the parent of the next"
    )
    device: str = option("auto, cpu, cuda, cuda:1, ...", "DEVICE", default="auto")
    batch_size: int | None = option(
        "images in a batch; default: the largest that fits, at most 512 (64 on the CPU)",
        "N",
        read_count,
    )
    workers: int | None = option(
        "threads that load images; 0 for none; default: one for each CPU core, at most 8",
        "N",
        lambda text: 0 if text == "0" else read_count(text),
    )


def read(argv: Sequence[str]) -> tuple[PredictOptions]:
    """Read the tokens after `predict`: the argument of `run`.

    Raises:
        ConfigError: lists everything that is wrong.
    """
    options, words, problems = PARSER.words(argv)
    options.images = words
    if options.split is not None and options.images:
        problems.append(f"--split {options.split}: predicts images of RUN; leave out IMAGES")
    elif options.split is not None and not problems:
        options.images = _split_images(options.run, options.split)
        return (options,)
    elif not options.images:
        problems.append("IMAGES: name files, folders or patterns after RUN, or - for a list")
    for word in options.images:
        if (Path(word) / CHECKPOINTS).is_dir():
            problems.append(
                f"IMAGES: {word}: is a run, and RUN comes first: linnaeus predict {word} IMAGES"
            )
        elif problem := problem_of(word):
            problems.append(f"IMAGES: {word}: {problem}")
    if options.images.count(STDIN) > 1:
        problems.append("IMAGES: - stands there twice, but standard input can be read once")
    if STDIN in options.images and options.launch.launcher == "slurm":
        problems.append(
            "IMAGES: '-' reads standard input, which a SLURM job lacks; pass files, directories or patterns, "
            "or drop --launcher slurm"
        )
    if problems:
        raise ConfigError(problems)
    check_files({"--output": options.output})
    return (options,)


def _split_images(path: Path, split: str) -> list[str]:
    """The images of a split of a run, which is named by its folder or a checkpoint in it."""
    folder = path if path.is_dir() else path.parent.parent
    if not (folder / SPLIT_FILE).is_file():
        raise ConfigError(
            f"--split {split}: there is no {folder / SPLIT_FILE}, which a run with image files writes; name "
            "the images"
        )
    try:
        return read_split(folder / SPLIT_FILE, split)[0]
    except DataError as error:
        raise ConfigError(f"--split {split}: {error}") from error


def run(options: PredictOptions) -> int:
    """Predict the images; returns the exit code: 0 done, 1 not one image was predicted.

    Raises:
        LinnaeusError: something that the user can mend; the message says how.
    """
    from linnaeus.inference.trained import load_run
    from linnaeus.runtime.console import make_console
    from linnaeus.runtime.log import close_logging, set_up_logging

    console = make_console(sys.stderr)
    set_up_logging(None, rank=0, console=console)
    try:
        with StopRequest().listening():
            trained = load_run(
                options.run,
                checkpoint=options.checkpoint or "best",
                device=options.device,
                trust_code=options.trust_code,
            )
            logger.info("%s", trained.description)
            return _predict(trained, options, console)
    except BrokenPipeError:
        # Python would complain again when it flushes standard output at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    finally:
        close_logging()


def _predict(trained: TrainedRun, options: PredictOptions, console: Console) -> int:
    from linnaeus.runtime.console import ProgressBar

    predictor = trained.predictor(
        top=options.top,
        path=options.path,
        threshold=options.threshold,
        batch_size=options.batch_size,
        num_workers=options.workers,
    )
    unreadable, unread = list[Unreadable](), Counter[str]()
    if STDIN in options.images:  # names of files may be no valid UTF-8
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    with (
        open_writer(options.output, unreadable) as writer,
        # Between printed lines a bar would only get in the way.
        ProgressBar(console if options.output else None) as bar,
        closing(predictor.run(walk(options.images, sys.stdin, unread))) as results,
    ):
        bar.start("predicting", None)
        for found in results:
            if not isinstance(found, Unreadable):
                writer.write(found)
            else:
                unreadable.append(found)
                if len(unreadable) <= NUM_NAMED:
                    logger.warning(
                        "left out: %s: %s", printable(found.source), printable(found.reason)
                    )
            bar.advance(1)
    total = f"{counted(writer.number, 'image')} predicted"
    if unreadable:
        total += f", {counted(len(unreadable), 'unreadable one')} left out"
    if unread:
        logger.info("%s", unread_note(unread))
    is_written = writer.number > 0
    logger.info(
        "%s%s", total, f": {options.output.resolve()}" if options.output and is_written else ""
    )
    return 0 if is_written else 1


def _list_unreadable(output: Path, images: Sequence[Unreadable]) -> None:
    """Write FILE.skipped.csv, or remove that of an earlier call."""
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
    logger.info("what is left out is listed in %s", table)


@dataclass
class Writer:
    """Writes predictions to an open file, one after another, and counts them.

    `ending` is .csv, .json (a list with an object per line) or .jsonl; empty for text for people.
    """

    file: TextIO
    ending: str
    number: int = 0

    def write(self, prediction: Prediction) -> None:
        """Write one prediction."""
        if self.ending == ".csv":
            cells = _cells(prediction)
            table = csv.writer(self.file, lineterminator="\n")
            table.writerows([cells.values()] if self.number else [cells, cells.values()])
        elif self.ending:
            content = prediction.as_dict()
            name = (
                str(prediction.source).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            )
            text = json.dumps({**content, "path": name}, ensure_ascii=False)
            begin = ",\n" if self.number else "[\n"
            self.file.write(f"{begin}{text}" if self.ending == ".json" else f"{text}\n")
        else:
            self.file.write(_text(prediction))
        self.number += 1

    def end(self) -> None:
        """Finish the file, however many predictions there are."""
        if self.ending == ".json":
            self.file.write("\n]\n" if self.number else "[]\n")
        self.file.flush()


def _cells(prediction: Prediction) -> dict[str, str]:
    """The row of a CSV file, by column; the best class of a level is number 1.

    Several labels stand in one cell, as in a manifest, and their probabilities in another one.
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


def _text(prediction: Prediction) -> str:
    """The path, and below it a line for each level."""
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
def open_writer(output: Path | None, unreadable: Sequence[Unreadable]) -> Iterator[Writer]:
    """A writer to a file, or to standard output where `output` is None.

    A file is written as FILE.partial, which becomes FILE at the end if it has a prediction. Where the context
    ends with an exception, FILE.partial keeps the predictions so far. What was unreadable by then is listed
    in FILE.skipped.csv.

    Raises:
        LinnaeusError: the file cannot be written.
    """
    writer: Writer | None = None
    if output is None:
        writer = Writer(sys.stdout, "")
        yield writer
        writer.end()
        return
    partial = output.with_name(f"{output.name}.partial")
    try:
        with partial.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            writer = Writer(file, output.suffix.lower())
            try:
                yield writer
            finally:
                writer.end()
        if writer.number:
            partial.replace(output)
    except OSError as error:
        raise not_written(output, error) from error
    finally:
        _list_unreadable(output, unreadable)
        if writer is not None and not writer.number:
            partial.unlink(missing_ok=True)
        elif writer is not None and partial.exists():
            print(f"what was predicted so far is kept in {partial}", file=sys.stderr)


def printable(text: str) -> str:
    """A name for a terminal: control characters and broken bytes are escaped.

    >>> printable("a\\nb\\x1b[31m"), printable("Ä")
    ('a\\\\nb\\\\x1b[31m', 'Ä')
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


PARSER = CommandParser(
    "predict",
    PredictOptions,
    words="RUN IMAGES... [options]",
    description=DESCRIPTION,
    details=DETAILS,
)
