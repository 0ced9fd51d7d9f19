"""Hugging Face datasets: a `save_to_disk` folder, Parquet files, or a name on the Hub.

`datasets` downloads them and converts them to Arrow files. Images are read from these files by offset.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from linnaeus.config.schema import DatasetConfig
from linnaeus.data.image_files import encoded
from linnaeus.data.manifest import Table, categories, image_column, values
from linnaeus.data.packed import packed_path
from linnaeus.data.splits import SPLITS, find_names
from linnaeus.runtime.errors import ConfigError, DataError, first_line
from linnaeus.runtime.words import several

_TEXTS = re.compile("(large_)?string|u?int|bool")
"""Data types of columns that may hold labels."""
_is_path = re.compile(r"[./~].*|.*/.*/.*|.*\.(parquet|arrow|csv|json)").fullmatch
"""Whether a text is no name on the Hub."""


def find_huggingface(dataset: DatasetConfig, notes: list[str]) -> dict[str, Callable[[], Table]]:
    """Map each split of a dataset to a function that reads it.

    Raises:
        ConfigError: the dataset cannot be loaded, or has no such split.
    """
    found = _load(dataset.ROOT)
    splits = find_names([*found])
    for split in SPLITS:
        name = getattr(dataset, split.upper())
        if name is not None and name not in found:
            raise ConfigError(
                f"DATA.DATASET.{split.upper()}: {dataset.ROOT} has no split {name!r}, but "
                f"{', '.join(found)}"
            )
        if name is not None:
            splits = {s: other for s, other in splits.items() if other != name} | {split: name}
    return {s: partial(_read, found[name], name, dataset, notes) for s, name in splits.items()}


def _load(root: str | None) -> dict[str, Any]:
    """Return the splits of a dataset, by name."""
    try:
        from datasets import Dataset, load_dataset, load_from_disk
    except ImportError as error:
        raise ConfigError(
            "DATA.DATASET.NAME: huggingface needs datasets: pip install 'linnaeus[huggingface]'"
        ) from error
    if root is None:
        raise ConfigError(
            "DATA.DATASET.ROOT: name a folder of `save_to_disk`, Parquet files, or a dataset on the "
            "Hugging Face hub"
        )
    path = Path(root).expanduser()
    is_saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    name, _, subset = root.partition(":")
    absent = (
        ""
        if path.exists() or Path(name).exists()
        else "there is no such folder or file here; the hub: "
    )
    try:
        if absent and _is_path(name):
            raise ValueError("no path is needed")
        if is_saved:
            data = load_from_disk(str(path))
        elif path.is_file():
            data = load_dataset("parquet", data_files=str(path))
        else:
            data = load_dataset(str(path) if path.is_dir() else name, subset or None)
    except Exception as error:  # from any of the libraries that `datasets` uses
        raise ConfigError(
            f"DATA.DATASET.ROOT: cannot load {root}: {absent}{first_line(error)}"
        ) from error
    return {"train": data} if isinstance(data, Dataset) else dict(data)


def _read(data: Any, name: str, dataset: DatasetConfig, notes: list[str]) -> Table:
    """Return the rows of a split: its labels as texts, and the path of each image."""
    from datasets import ClassLabel, Image, Value

    path = Path(f"{dataset.ROOT} ({name})")
    data = data.flatten()  # a column `label` of columns becomes `label.family` and `label.species`
    features = data.features
    # The feature of a column of lists is the feature of their elements.
    kinds = {x: getattr(each, "feature", each) for x, each in features.items()}
    types = {x: kind.dtype for x, kind in kinds.items() if isinstance(kind, ClassLabel | Value)}
    images = [x for x in features if isinstance(features[x], Image) or "binary" in types.get(x, "")]
    if not images:
        raise ConfigError(
            f"DATA.DATASET.NAME: {path} has no column of images, but {several([*features])}; set manifest "
            "for a table of paths"
        )
    column = image_column(
        path, images, replace(dataset, IMAGE_COLUMN=dataset.IMAGE_COLUMN or images[0])
    )
    named = {*(dataset.LEVELS or ()), dataset.SPLIT_COLUMN, dataset.GROUP_COLUMN}
    labels = [
        x for x, k in types.items() if _TEXTS.match(k) or (x in named and k.startswith("float"))
    ]
    classes = [x for x in labels if isinstance(kinds[x], ClassLabel) or x in named]
    if dataset.LEVELS is None and classes:
        labels = classes
    rows = data.select_columns(labels).with_format("arrow")[:]
    cells = {x: categories(values(rows.column(x)), getattr(kinds[x], "names", ())) for x in labels}
    files = [each["filename"] for each in data.cache_files]
    root = Path(files[0] if files else "").parent
    paths = encoded(chain.from_iterable(_paths(file, root, column) for file in files))
    if len(paths) != len(data):
        raise DataError(f"{path}: not on disk; save it with `save_to_disk`")
    note = f"{dataset.ROOT}: images from the column {column!r}"
    notes += [] if note in notes else [note]
    return Table(path, column, paths, pd.DataFrame(cells), dataset, root=root)


def _paths(file: str, root: Path, column: str) -> Iterator[str]:
    """Yield the path of each image in an Arrow file; a row without one has no bytes.

    Paths of files start from the working directory, as in `datasets`.
    """
    import pyarrow as pa
    from pyarrow.compute import if_else

    whole = pa.memory_map(file).read_buffer()
    numbers = count()
    for batch in pa.ipc.open_stream(whole):
        images = batch.to_struct_array()
        for name in column.split("."):
            images = images.field(name)
        paths = [""] * len(images)
        if pa.types.is_struct(images.type):
            paths, images = images.field("path"), images.field("bytes")
            paths = if_else(images.is_null(), paths, None).to_pylist()
        _, ends, content = images.buffers()
        places = np.frombuffer(ends, np.int64 if "large" in str(images.type) else np.int32)
        begins = places[: len(images)] + (content.address - whole.address if content else 0)
        sizes = np.diff(places[: len(images) + 1])
        for begin, size, path in zip(begins.tolist(), sizes.tolist(), paths, strict=True):
            packed = packed_path(os.path.relpath(file, root), next(numbers), begin, size)
            yield os.path.abspath(path) if path else packed  # noqa: PTH100 (a text)
