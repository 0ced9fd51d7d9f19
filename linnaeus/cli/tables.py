"""What the commands have measured, as plain data for programs: JSON, JSONL and CSV."""

from __future__ import annotations

import csv
import io
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from linnaeus.files import write_text_atomically


class UnixLines:
    r"""A file for `csv.writer`, whose rows end in a line feed alone.

    With `lineterminator="\n"` a writer would leave a carriage return in a cell unquoted, and a reader would
    take it for the end of a row.

    >>> file = io.StringIO()
    >>> csv.writer(UnixLines(file)).writerow(["a\rb", "c"])
    8
    >>> file.getvalue()
    '"a\rb",c\n'
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, row: str) -> int:
        """Write one row, which ends in `\\r\\n`; gives the number of characters."""
        return self._file.write(row.removesuffix("\r\n") + "\n")


class Figures(ABC):
    """The results of a command."""

    @property
    def columns(self) -> list[str]:
        """Columns of the table, in order; to be overridden where there may be no rows."""
        return list(self.scalars()[0])

    @abstractmethod
    def scalars(self) -> list[dict[str, Any]]:
        """Rows of the table, by column."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Content of the JSON file."""

    def save(self, path: Path) -> None:
        """Write a file, atomically, in the format that its ending names: `.json`, `.jsonl` or `.csv`."""
        text = {
            ".json": lambda: json.dumps(self.as_dict(), indent=2) + "\n",
            ".jsonl": lambda: "".join(json.dumps(row) + "\n" for row in self.scalars()),
            ".csv": self._csv,
        }[path.suffix.lower()]()
        write_text_atomically(path, text)

    def _csv(self) -> str:
        file = io.StringIO()
        writer = csv.DictWriter(UnixLines(file), self.columns)
        writer.writeheader()
        writer.writerows(self.scalars())
        return file.getvalue()


def cell(value: float | None, form: str) -> str:
    """A number for people, in a format such as `.3g`; empty for None."""
    return "" if value is None else f"{value:{form}}"


@dataclass(kw_only=True)
class Measurement(Figures):
    """Everything measured so far; filled while it is measured, so that an interruption loses nothing.

    Attributes:
        environment: where the figures hold; empty until there is something to measure.
        interrupted: whether Ctrl-C or an error ended the measuring early.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
