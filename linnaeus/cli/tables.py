"""Files for programs (JSON, JSONL and CSV), and tables for people."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnaeus.runtime.files import write_text_atomically

if TYPE_CHECKING:
    from rich.table import Table


def save_figures(path: Path, content: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a file, atomically, in the format that its ending names.

    Args:
        path: `.json` has the content, `.jsonl` and `.csv` have the rows.
        content: all figures.
        rows: the lines of a table, by column.
    """
    ending = path.suffix.lower()
    if ending == ".json":
        text = json.dumps(content, indent=2) + "\n"
    elif ending == ".jsonl":
        text = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        import pandas as pd  # here: help and completion do not wait for pandas

        text = pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n")
    write_text_atomically(path, text)


def cell(value: float | None, form: str) -> str:
    """Return a number for people, in a format such as `.3g`; empty for None."""
    return "" if value is None else f"{value:{form}}"


def shortened(text: str, most: int) -> str:
    """Return a text cut in its middle to a number of letters."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 + 1 :]}"


def table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = ()
) -> Table:
    """Return a table for people, with numbers on the right; `left` are the columns of texts."""
    from rich.table import Table  # here: help and completion do not wait for rich

    table = Table(title=title, title_justify="left")
    for heading in headings:
        is_text = heading in left
        justify: Any = "left" if is_text else "right"
        table.add_column(heading, justify=justify, no_wrap=not is_text, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
