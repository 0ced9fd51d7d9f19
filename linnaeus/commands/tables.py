"""What the commands have measured, as plain data for programs: JSON, JSONL and CSV."""

from __future__ import annotations

import csv
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linnaeus.files import write_text_atomically


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
        rows = _Rows()
        writer = csv.DictWriter(rows, self.columns, lineterminator="\r\n")
        writer.writeheader()
        writer.writerows(self.scalars())
        return "".join(rows.lines)


class _Rows:
    """Lines that end in `\\n`, of a writer that ends them in `\\r\\n`.

    The writer quotes text that holds one of its own line endings only; readers end a line at either.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, row: str) -> None:
        """Add a line."""
        self.lines.append(row.removesuffix("\r\n") + "\n")


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
