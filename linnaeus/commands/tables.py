"""What the commands have measured, as plain data for programs: JSON, JSONL and CSV."""

from __future__ import annotations

import csv
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linnaeus.files import write_text_atomically


class Figures(ABC):
    """The results of a command."""

    @property
    @abstractmethod
    def columns(self) -> Sequence[str]:
        """Columns of the table, in order; there even when there are no rows."""

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


@dataclass(kw_only=True)
class Measurement(Figures):
    """Everything measured so far; filled while it is measured, so that an interruption loses nothing.

    Attributes:
        environment: where the figures hold; empty until there is something to measure.
        interrupted: whether Ctrl-C or an error ended the measuring early.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
