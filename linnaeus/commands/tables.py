"""Figures for programs: JSON, JSONL and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from linnaeus.files import write_text_atomically


def save_table(
    path: Path, content: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], columns: Sequence[str]
) -> None:
    """Write a file, atomically, in the format that its ending names.

    Args:
        path: ends in `.json`, `.jsonl` or `.csv`.
        content: all there is, for JSON.
        rows: the rows of JSONL and CSV.
        columns: of CSV, in order.
    """
    text = {
        ".json": lambda: json.dumps(content, indent=2) + "\n",
        ".jsonl": lambda: "".join(json.dumps(row) + "\n" for row in rows),
        ".csv": lambda: _csv(rows, columns),
    }[path.suffix.lower()]()
    write_text_atomically(path, text)


def _csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
