"""What the commands have measured, as plain data for programs: JSON, JSONL and CSV."""

from __future__ import annotations

import csv
import io
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
        file = io.StringIO()
        writer = csv.DictWriter(file, self.columns, lineterminator="\n")
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
