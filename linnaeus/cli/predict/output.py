"""Predictions as files for programs and as text for people, written one after another."""

from __future__ import annotations

import csv
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from linnaeus.cli.tables import UnixLines
from linnaeus.files import not_written, temporary_name
from linnaeus.inference.prediction import Prediction, percent


class Writer(ABC):
    """Writes predictions to an open file.

    Attributes:
        replaces: whether the file takes the place of an earlier one.
    """

    replaces = True

    def __init__(self, file: TextIO) -> None:
        self.file = file

    @abstractmethod
    def write(self, prediction: Prediction) -> None:
        """Write one prediction."""

    def end(self) -> None:
        """Finish the file, however many predictions there are."""
        self.file.flush()


class JsonLines(Writer):
    """One JSON object per line."""

    def write(self, prediction: Prediction) -> None:
        """Write a line."""
        self.file.write(_json(prediction) + "\n")


class JsonList(Writer):
    """A JSON list with one object per line."""

    _separator = "[\n"

    def write(self, prediction: Prediction) -> None:
        """Write an item of the list."""
        self.file.write(self._separator + _json(prediction))
        self._separator = ",\n"

    def end(self) -> None:
        """Close the list."""
        self.file.write("[]\n" if self._separator == "[\n" else "\n]\n")
        super().end()


class Csv(Writer):
    """One row per image; for the columns see `columns`.

    Args:
        file: opened with `newline=""`.
        names: the columns.
    """

    def __init__(self, file: TextIO, names: list[str]) -> None:
        super().__init__(file)
        self._writer = csv.writer(UnixLines(file))
        self._writer.writerow(names)

    def write(self, prediction: Prediction) -> None:
        """Write a row."""
        row: list[Any] = [_text(prediction.source)]
        for classes in prediction.levels.values():
            for name, probability in classes:
                row += [name, f"{probability:.6g}"]
        if (path := prediction.path) is not None:
            row += [*path.classes.values(), f"{path.probability:.6g}", str(path.differs).lower()]
        self._writer.writerow(row)


class Text(Writer):
    """For people: the path, and below it a line for each level."""

    def write(self, prediction: Prediction) -> None:
        """Write the lines of an image."""
        width = max(len(printable(name)) for name in [*prediction.levels, "path"])
        lines = [printable(_text(prediction.source))]
        for name, classes in prediction.levels.items():
            listed = "   ".join(f"{printable(label)} {percent(p)}" for label, p in classes)
            lines.append(f"  {printable(name):<{width}}  {listed}")
        if prediction.path is not None:
            lines.append(f"  {'path':<{width}}  {printable(str(prediction.path))}")
        self.file.write("\n".join(lines) + "\n")


def columns(num_classes: Mapping[str, int], *, top: int, path: bool) -> list[str]:
    """The columns of a CSV file.

    >>> columns({"genus": 2, "species": 9}, top=1, path=True)
    ... # doctest: +NORMALIZE_WHITESPACE
    ['path', 'genus_1', 'genus_1_probability', 'species_1', 'species_1_probability',
     'consistent_genus', 'consistent_species', 'consistent_probability', 'consistent_differs']

    Args:
        num_classes: number of classes of each level, coarse to fine.
        top: classes for each level; a level with fewer has fewer columns.
        path: whether there is a consistent path.
    """
    names = ["path"]
    for level, number in num_classes.items():
        for rank in range(1, min(top, number) + 1):
            names += [f"{level}_{rank}", f"{level}_{rank}_probability"]
    if path:
        names += [f"consistent_{name}" for name in [*num_classes, "probability", "differs"]]
    return names


@contextmanager
def open_writer(
    output: Path | None, num_classes: Mapping[str, int], *, top: int, path: bool
) -> Iterator[Writer]:
    """A writer to a file, which appears once it is whole; or to standard output.

    A file that is there stays if `Writer.replaces` has been set to false. Where the context ends with an
    exception, the predictions so far are kept in `partial_name(output)`.

    Args:
        output: its ending says the format; None prints for people.
        num_classes, top, path: see `columns`.

    Raises:
        LinnaeusError: the file cannot be written.
    """
    if output is None:
        yield Text(sys.stdout)
        sys.stdout.flush()
        return
    temporary = temporary_name(output)
    try:
        with temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            kinds = {".json": JsonList, ".jsonl": JsonLines}
            ending = output.suffix.lower()
            names = columns(num_classes, top=top, path=path)
            writer = Csv(file, names) if ending == ".csv" else kinds[ending](file)
            try:
                yield writer
            finally:
                writer.end()
            os.fsync(file.fileno())
        if writer.replaces or not output.exists():
            temporary.replace(output)
        else:
            temporary.unlink()
    except OSError as error:
        _keep(temporary, output)
        raise not_written(output, error) from error
    except BaseException:
        _keep(temporary, output)
        raise


def partial_name(output: Path) -> Path:
    """A free name for what there is of a file: `FILE.partial`, `FILE.partial2` and so on."""
    names = (output.with_name(f"{output.name}.partial{'' if n == 1 else n}") for n in count(1))
    return next(name for name in names if not name.exists())


def _keep(temporary: Path, output: Path) -> None:
    with suppress(OSError):
        if temporary.stat().st_size:
            kept = partial_name(output)
            temporary.rename(kept)
            print(f"what was predicted so far is kept in {kept}", file=sys.stderr)
    temporary.unlink(missing_ok=True)


def printable(text: str) -> str:
    """A name for a terminal: control characters and broken bytes are escaped.

    >>> printable("a\\nb\\x1b[31m"), printable("Ä")
    ('a\\\\nb\\\\x1b[31m', 'Ä')
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _text(source: str | int) -> str:
    return source if isinstance(source, str) else str(source)


def _json(prediction: Prediction) -> str:
    content = prediction.as_dict()
    content["path"] = _text(prediction.source).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return json.dumps(content, ensure_ascii=False)
