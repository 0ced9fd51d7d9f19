"""`split.csv` in a run's folder: which image is in which split, with its labels. Imports no torch."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from linnaeus.data.splits import SPLITS
from linnaeus.errors import DataError
from linnaeus.files import not_written, write_atomically

if TYPE_CHECKING:
    from linnaeus.data.bundle import DataBundle
    from linnaeus.data.taxonomy import Lineage, Taxonomy

SPLIT_FILE = "split.csv"


def save_split(data: DataBundle, path: Path) -> None:
    """Write the images of each split; nothing where the samples are no image files.

    The file is a manifest: a run with `DATA.DATASET.TRAIN=split.csv` has the same splits.

    Raises:
        LinnaeusError: the file cannot be written.
    """
    taxonomy = data.taxonomy
    if taxonomy is None or not hasattr(data.train, "files"):
        return

    def write(file: BinaryIO) -> None:
        text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="")
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["path", "split", *taxonomy.names])
        for split in SPLITS:
            if (dataset := getattr(data, split)) is not None:
                table.writerows([path, split, *names] for path, names in _rows(dataset, taxonomy))
        text.flush()
        text.detach()

    try:
        write_atomically(path, write)
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
        yield os.path.abspath(path), names  # noqa: PTH100 (hot path)


def read_split(path: Path, split: str) -> tuple[list[str], list[Lineage]]:
    """The images of a split and their class names.

    Raises:
        DataError: the file cannot be read, or has no image of the split.
    """
    try:
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            _, *rows = csv.reader(file)
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(
            f"{path} cannot be read ({error}); it says which images a run trained on, and a run with image "
            "files writes it"
        ) from error
    found = [row for row in rows if len(row) > 2 and row[1] == split]
    if not found:
        held = ", ".join(sorted({row[1] for row in rows if len(row) > 2}))
        raise DataError(f"{path}: no image of split {split!r}; it has {held}")
    return [row[0] for row in found], [tuple(n or None for n in row[2:]) for row in found]
