"""`split.csv` in a run's folder: which image is in which split, with its labels. Imports no torch."""

from __future__ import annotations

import os
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

    tables = [
        pd.DataFrame({"path": files, "split": split} | names, dtype=object)
        for split, dataset in data.splits.items()
        for files, names in [_columns(dataset, taxonomy)]
    ]
    table = pd.concat(tables)
    save = partial(table.to_csv, index=False, errors="surrogateescape", lineterminator="\n")
    try:
        write_atomically(path, lambda file: save(file, mode="wb"))
    except OSError as error:
        raise not_written(path, error) from error


def _columns(dataset: Any, taxonomy: Taxonomy) -> tuple[list[str], dict[str, Any]]:
    """Return the absolute path of each image, and the cells of each level."""
    import numpy as np

    files = [*map(os.path.abspath, dataset.files)]
    targets = dataset.targets.numpy()
    if taxonomy.separator is None:
        names = {
            level.name: np.array([*map(escape, level.classes), ""], dtype=object)[labels]
            for level, labels in zip(taxonomy.levels, targets.T, strict=True)
        }  # index -1 is the last name
        return files, names
    (level,), separator = taxonomy.levels, taxonomy.separator
    classes = np.array(level.classes, dtype=object)
    held = (
        separator.join(classes[row == 1]) or ("" if -1 in row else separator) for row in targets
    )
    return files, {level.name: [*map(escape, held)]}


def escape(name: str) -> str:
    r"""The cell of a class name, which may be a word for an unknown label.

    >>> escape("None"), unescape(escape("None")), escape("none")
    ('\\None', 'None', 'none')
    """
    return f"\\{name}" if name.lstrip("\\") in UNKNOWN_WORDS else name


def unescape(cell: str) -> str:
    """Return the class name in a cell."""
    is_escaped = cell.startswith("\\") and cell.lstrip("\\") in UNKNOWN_WORDS
    return cell[1:] if is_escaped else cell


def read_rows(path: Path) -> tuple[Any, ...]:
    """Return the columns of paths and splits, and the table of the others.

    Raises:
        DataError: the file cannot be read.
    """
    import pandas as pd  # takes seconds on a cold disk, and most commands read no split

    try:
        rows = pd.read_csv(
            path, dtype=object, keep_default_na=False, encoding_errors="surrogateescape"
        )
        return rows.pop("path"), rows.pop("split"), rows
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); a run on image files writes it"
        ) from error


def read_split(path: Path, split: str) -> tuple[list[str], list[Lineage]]:
    """Return the images of a split and their class names.

    Raises:
        DataError: the file cannot be read, or has no image of the split.
    """
    paths, splits, rows = read_rows(path)
    wanted = splits == split
    if not wanted.any():
        held = ", ".join(sorted({*splits}))
        raise DataError(f"{path}: no image of split {split!r}; it has {held}")
    lineages = rows[wanted].itertuples(index=False, name=None)
    return paths[wanted].tolist(), [tuple(unescape(n) or None for n in row) for row in lineages]
