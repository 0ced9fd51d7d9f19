"""`split.csv` in a run's folder: which image is in which split, with its labels. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnaeus.runtime.errors import DataError
from linnaeus.runtime.files import not_written, write_atomically

if TYPE_CHECKING:
    from linnaeus.data.bundle import DataBundle
    from linnaeus.data.taxonomy import Lineage, Taxonomy

SPLIT_FILE = "split.csv"

UNKNOWN_WORDS = frozenset("nan NaN NA N/A n/a <NA> None NULL -".split())  # noqa: SIM905
"""Cells of a manifest that mean an unknown label, as does an empty one; after a backslash they are names."""


def save_split(data: DataBundle, path: Path) -> None:
    """Write the images of each split; nothing where the samples are no image files.

    The file is a manifest: a run with `DATA.DATASET.TRAIN=split.csv` has the same splits.

    Raises:
        LinnaeusError: the file cannot be written.
    """
    taxonomy = data.taxonomy
    if taxonomy is None or not hasattr(data.train, "files"):
        return

    import pandas as pd

    rows = [
        (path, split, *names)
        for split, dataset in data.splits.items()
        for path, names in _rows(dataset, taxonomy)
    ]
    table = pd.DataFrame(rows, columns=["path", "split", *taxonomy.names], dtype=object)
    save = partial(table.to_csv, index=False, errors="surrogateescape", lineterminator="\n")
    try:
        write_atomically(path, lambda file: save(file, mode="wb"))
    except OSError as error:
        raise not_written(path, error) from error


def _rows(dataset: Any, taxonomy: Taxonomy) -> Iterator[tuple[str, list[str]]]:
    classes = [(*level.classes, "") for level in taxonomy.levels]  # the last one is that of -1
    for path, labels in zip(dataset.files, dataset.targets.tolist(), strict=True):
        if taxonomy.separator is None:
            names = [names[label] for names, label in zip(classes, labels, strict=True)]
        else:
            held = [name for name, label in zip(classes[0], labels, strict=False) if label == 1]
            names = [taxonomy.separator.join(held) or ("" if -1 in labels else taxonomy.separator)]
        yield os.path.abspath(path), [*map(escape, names)]  # noqa: PTH100 (hot path)


def escape(name: str) -> str:
    r"""The cell of a class name, which may be a word for an unknown label.

    >>> escape("None"), unescape(escape("None")), escape("none")
    ('\\None', 'None', 'none')
    """
    return f"\\{name}" if name.lstrip("\\") in UNKNOWN_WORDS else name


def unescape(cell: str) -> str:
    """The class name in a cell."""
    is_escaped = cell.startswith("\\") and cell.lstrip("\\") in UNKNOWN_WORDS
    return cell[1:] if is_escaped else cell


def read_split(path: Path, split: str) -> tuple[list[str], list[Lineage]]:
    """The images of a split and their class names.

    Raises:
        DataError: the file cannot be read, or has no image of the split.
    """
    import pandas as pd  # takes seconds on a cold disk, and most commands read no split

    try:
        rows = pd.read_csv(
            path, dtype=object, keep_default_na=False, encoding_errors="surrogateescape"
        )
        paths, splits = rows.pop("path"), rows.pop("split")
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); a run on image files writes it"
        ) from error
    wanted = splits == split
    if not wanted.any():
        held = ", ".join(sorted({*splits}))
        raise DataError(f"{path}: no image of split {split!r}; it has {held}")
    lineages = rows[wanted].itertuples(index=False, name=None)
    return paths[wanted].tolist(), [tuple(unescape(n) or None for n in row) for row in lineages]
