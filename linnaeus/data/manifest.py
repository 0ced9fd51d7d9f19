"""Manifests: tables with a column of image paths, and one of class names per level.

An empty cell is unknown. With `DATA.DATASET.LABEL_SEPARATOR` a cell holds several names. A cell with only the
separator marks a sample without any class. Columns of 0 and 1, one for each class, are labels too.
"""

from __future__ import annotations

import csv
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pandas as pd
from pandas.api.types import union_categoricals

from linnaeus.config.schema import DatasetConfig
from linnaeus.data import EXTENSIONS
from linnaeus.data.image_files import (
    FoundFiles,
    Listing,
    Paths,
    Places,
    distinct,
    encoded,
    optional_test,
)
from linnaeus.data.packed import container
from linnaeus.data.split_file import UNKNOWN_WORDS, unescape
from linnaeus.data.splits import (
    SPLITS,
    find_column,
    is_flags,
    is_true,
    names_attribute,
    names_splits,
)
from linnaeus.data.taxonomy import LabelIndex, Lineage, Taxonomy, index_labels, require_classes
from linnaeus.runtime.errors import ConfigError, DataError, first_line
from linnaeus.runtime.files import other_spelling, suggest_path
from linnaeus.runtime.words import counted, several

_IMAGE_COLUMNS = tuple(
    "image path file filename file_name filepath file_path image_path image_name image_id img id".split()  # noqa: SIM905
)
_UNNAMED = re.compile(r"(unnamed: \d+)?", re.IGNORECASE)
"""The header of the row numbers that pandas writes."""
_LABEL_COLUMNS = frozenset(("label", "labels", "class", "target", "category", "y"))
"""Columns, case-folded, whose 0 and 1 are two classes."""
_QUOTES = re.compile(r"""[][]|(?<=[\[ ])['"]|['"](?=[,\]])""")
"""Characters around the names of a cell that is a Python list."""
_SET_SEPARATORS = (";", "|", "/", "\t")
_CHUNK = 100_000
"""Rows that are read at once."""


@dataclass(frozen=True)
class Table:
    """A manifest, or its rows of one split.

    Attributes:
        path: the file.
        image: the name of the column of image paths.
        images: the image path of each line below the header.
        rows: the other cells, categories of texts, by position in `images`.
        dataset: the DATA.DATASET node.
        split: the split that a column gives to the rows, where it is not the split of the file.
        root: folder that paths start from; None to search for it.
    """

    path: Path
    image: str
    images: Paths
    rows: pd.DataFrame
    dataset: DatasetConfig
    split: str | None = None
    root: Path | None = None

    @property
    def group_column(self) -> str | None:
        """The column of groups; None where the configuration names none, or this file has none."""
        name = self.dataset.GROUP_COLUMN
        return None if name is None else self.find(name)

    @property
    def others(self) -> list[str]:
        """The columns other than images and groups."""
        return [name for name in self.rows if name != self.group_column]

    def find(self, name: str) -> str | None:
        """Return the column of this name, ignoring case, except the image column; else None."""
        return _find(self.rows, name)

    def require(self, names: Sequence[str], key: str | None) -> list[str]:
        """Return the columns of these names.

        Args:
            names: in any case.
            key: gives the names; None for columns of the training manifest.

        Raises:
            ConfigError, DataError: the file lacks columns, and the key or the training manifest names them.
        """
        if self.image in names:
            raise ConfigError(f"{key}: {self.image!r} is the image column")
        return _require(self.path, [self.image, *self.rows], names, key)


def _find(columns: Iterable[str], name: str) -> str | None:
    same = [each for each in columns if each.casefold() == name.casefold()]
    return name if name in same else next(iter(same), None)


def _require(
    path: Path, columns: Sequence[str], names: Sequence[str], key: str | None
) -> list[str]:
    found = [_find(columns, name) for name in names]
    problems = []
    for name in (name for name, column in zip(names, found, strict=True) if column is None):
        close = get_close_matches(name, columns, 1, 0.7)
        has = f"the file has {several([*map(repr, columns)])}"
        hint = f"did you mean {close[0]!r}?" if close else has
        if key is None:
            raise DataError(
                f"{path}, line 1: no column {name!r}, as the training manifest has; {hint}"
            )
        problems.append(f"{key}: {path} has no column {name!r}; {hint}")
    if problems:
        raise ConfigError(problems)
    return found  # type: ignore[return-value]


@dataclass(frozen=True)
class _Labels:
    """How the cells of a row give its class names.

    Attributes:
        levels: names of the levels, coarse to fine.
        columns: the column of each level, or of each class where `are_flags`.
        are_flags: whether the columns are 0 and 1 for each class of the one level.
        separator: stands between names in a cell, or is put there where several flags of a row are set.
    """

    levels: list[str]
    columns: list[str]
    are_flags: bool = False
    separator: str | None = None

    @classmethod
    def of(cls, table: Table) -> _Labels:
        """Return the labels of the training manifest.

        Raises:
            ConfigError: columns that are no levels.
            DataError: a column that is missing, or none with labels.
        """
        dataset = table.dataset
        table.require([*filter(None, [dataset.GROUP_COLUMN])], "DATA.DATASET.GROUP_COLUMN")
        levels = dataset.LEVELS or table.others
        columns = table.require(levels, "DATA.DATASET.LEVELS")
        if not levels:
            raise DataError(f"{table.path}, line 1: no column with labels beside {table.image!r}")
        if _are_flags(table, columns):
            separator = dataset.LABEL_SEPARATOR
            if separator is None and _num_set(table, columns).ne(1).any():
                separator = next(sign for sign in _SET_SEPARATORS if sign not in "".join(columns))
            return cls(["class"], columns, are_flags=True, separator=separator)
        if dataset.LEVELS is None:
            _check_levels(table, columns)
        return cls(list(levels), columns, separator=dataset.LABEL_SEPARATOR)

    def files(self, tables: Mapping[str, Table], notes: list[str]) -> FoundFiles:
        """Return the samples of each split."""
        unknown: dict[Path, Counter[str]] = defaultdict(Counter)
        found: dict[str, Listing] = {}
        for split, table in tables.items():
            with optional_test(notes, split, table.dataset):
                found[split] = self._listing(table, unknown[table.path])
        for path, words in unknown.items():
            if shown := ", ".join(f"{number} {cell!r}" for cell, number in words.most_common()):
                notes.append(f"{path}: cells read as unknown labels: {shown}")
        make_index = partial(self._index, found.get("train"))
        return FoundFiles(found, tuple(self.levels), notes, make_index)

    def _index(self, train: Listing | None) -> LabelIndex:
        """Return the classes of the training manifest."""
        assert train is not None
        cells = {cell or "" for lineage in train.lineages for cell in lineage}
        if self.separator and not self.are_flags and self.separator not in "".join(cells):
            raise ConfigError(
                f"DATA.DATASET.LABEL_SEPARATOR: {self.separator!r} is in no cell of {train.source}"
            )
        index = index_labels(self.levels, train.lineages, self.separator)
        remedy = "choose other columns with DATA.DATASET.LEVELS"
        require_classes(index.taxonomy, train.source, remedy)
        _check_nesting(self.levels, train.lineages, train.source)
        return index

    def _listing(self, table: Table, unknown: Counter[str]) -> Listing:
        """Return the samples of a manifest; counts the words for unknown labels."""
        columns = table.require(self.columns, None)
        rows, numbers = _distinct(table.rows[columns])
        found: list[Lineage] = []
        for row, number in zip(rows.values.tolist(), np.bincount(numbers).tolist(), strict=True):
            if self.are_flags:
                found.append((self._of_flags(table, row),))
                continue
            words = [cell for cell in row if cell in UNKNOWN_WORDS and cell != self.separator]
            unknown.update({word: number * words.count(word) for word in words})
            cells = (_QUOTES.sub("", c) if self.separator and c[:1] == "[" else c for c in row)
            names = (None if c in words else normalize("NFC", unescape(c)) or None for c in cells)
            found.append(tuple(name and " ".join(name.splitlines()) for name in names))
        lineages, places = distinct(found)
        root, paths = _files(table)
        source = str(table.path) if table.split is None else f"{table.path} (split {table.split})"
        column = table.group_column
        groups = None if column is None else table.rows[column].to_numpy(dtype=object)
        return Listing(source, root, paths, lineages, places[numbers], groups, is_table=True)

    def _of_flags(self, table: Table, row: Sequence[str]) -> str | None:
        held = [name for name, cell in zip(self.columns, row, strict=True) if is_true(cell)]
        if self.separator is not None:
            return self.separator.join(held) or self.separator
        if len(held) > 1:
            raise DataError(f"{table.path}: a row of {' and '.join(held)}, but one in training")
        return held[0] if held else None


Finder = Callable[[DatasetConfig, list[str]], dict[str, Callable[[], Table]]]
"""Gives each split that there is, with a function that reads it; takes a list for notes."""


def find_manifests(dataset: DatasetConfig, notes: list[str]) -> dict[str, Callable[[], Table]]:
    """Return the manifest of each split that there is, and how to read it."""
    return {
        split: partial(_read, path, dataset, notes)
        for split, path in _manifest_paths(dataset).items()
    }


def read_tables(dataset: DatasetConfig, find: Finder = find_manifests) -> FoundFiles:
    """Find the images that manifests or other tables list.

    Relative image paths start from `ROOT`, or from the manifest's own folder where `ROOT` is null.

    Raises:
        ConfigError: a manifest that cannot be read, or columns that are no levels.
        DataError: a manifest that is empty or malformed; the message names file and line.
    """
    notes: list[str] = []
    tables = _split_tables(dataset, find(dataset, notes), notes)
    if "train" not in tables:
        raise DataError(f"{dataset.TRAIN or 'train.csv'}: no row of the training split")
    table = tables["train"]
    labels = _Labels.of(table)
    if rest := [name for name in table.others if name not in labels.columns]:
        notes.append(f"{table.path}: columns not read: {several(rest)}")
    return labels.files(tables, notes)


def read_evaluated_tables(
    dataset: DatasetConfig, find: Finder, taxonomy: Taxonomy, *, is_run_dataset: bool
) -> FoundFiles:
    """Find the image files that a trained model is to be evaluated on.

    These are the validation samples where there are any, else the test samples, else all of the training
    manifest. Columns of levels may be missing, but not in the run's own training manifest.

    Args:
        dataset: the DATA.DATASET node. As many LEVELS as the run has levels name their columns.
        find: finds the tables.
        taxonomy: the levels of the run.
        is_run_dataset: whether the node is the run's own.
    """
    notes: list[str] = []
    readers = find(dataset, notes)
    if not is_run_dataset:
        held = next((split for split in ("val", "test") if split in readers), "train")
        readers = {held: readers[held]}
    tables = _split_tables(dataset, readers, notes)
    wanted = next(split for split in ("val", "test", "train") if split in tables)
    table, names = tables[wanted], taxonomy.names
    flags = dataset.LEVELS or table.others
    if wanted == "train" and is_run_dataset:
        labels = _Labels.of(table)
    elif len(names) == 1 and table.find(names[0]) is None and _are_flags(table, flags):
        labels = _Labels([*names], flags, are_flags=True, separator=taxonomy.separator)
    else:
        columns = _columns_of_levels(table, dataset, names)
        labels = _Labels(list(columns), list(columns.values()), separator=taxonomy.separator)
    return labels.files({wanted: table}, notes)


def _split_tables(
    dataset: DatasetConfig, readers: Mapping[str, Callable[[], Table]], notes: list[str]
) -> dict[str, Table]:
    """Return the rows of each existing split, from its manifest or from a split column.

    A split column moves rows from the training manifest to a split without its own manifest.
    """
    if dataset.FOLD is not None and {"train", "val"} <= readers.keys():
        raise ConfigError("DATA.DATASET.FOLD: there is a validation split; leave FOLD out")
    splits: dict[str, Table] = {}
    for split, read in readers.items():
        with optional_test(notes, split, dataset):
            table = read()
            path = table.path
            parts = _divided(table, is_train=split == "train") or {split: table}
            if len(parts) == 1 and "train" not in parts:
                parts = {split: next(iter(parts.values()))}
            kept = {
                name: part if name == split else replace(part, split=name)
                for name, part in parts.items()
                if name == split or (split == "train" and name not in readers)
            }
            if not kept:
                raise DataError(
                    f"{path}: no row of split {split}, but of {', '.join(parts)}; name the manifest "
                    f"in DATA.DATASET.{split.upper()}"
                )
            if left_out := len(table.rows) - sum(len(part.rows) for part in kept.values()):
                rows = counted(left_out, "row")
                notes.append(f"{path}: {rows} left out, of other splits or of none")
            splits |= kept
    return splits


def _divided(table: Table, *, is_train: bool) -> dict[str, Table]:
    """Return the rows of each split, without the column that says it; empty where no column does."""
    dataset, given = table.dataset, table.dataset.SPLIT_COLUMN
    if given is not None:
        if not is_train and table.find(given) is None:
            return {}
        (given,) = table.require([given], "DATA.DATASET.SPLIT_COLUMN")
    named = map(table.find, dataset.LEVELS or ())
    taken = {table.group_column, *named} if given is None else {*table.rows} - {given}
    cells = {name: [*table.rows[name].cat.categories] for name in table.rows if name not in taken}
    fold = dataset.FOLD
    if fold is not None and given is not None and all(map(str.isdecimal, cells[given])):
        if not is_train:
            return {}
        numbers = {cell: int(cell) for cell in cells[given]}
        if fold not in numbers.values():
            raise ConfigError(
                f"DATA.DATASET.FOLD: {fold} is not among the values of {given!r} in {table.path}: "
                f"{', '.join(sorted(numbers, key=int))}"
            )
        column = given
        meanings = {cell: "val" if n == fold else "train" for cell, n in numbers.items()}
    else:
        found = find_column(cells, given, is_strict=is_train and given is None)
        if found is None:
            return {}
        column, meanings = found
        if fold is not None and is_train:
            raise ConfigError(
                f"DATA.DATASET.FOLD: the column {column!r} of {table.path} divides the samples; leave "
                "FOLD out, or name the column of folds in DATA.DATASET.SPLIT_COLUMN"
            )
    rows = table.rows.drop(columns=column)
    parts = rows.groupby(table.rows[column].map(meanings), observed=True)
    return {split: replace(table, rows=rows) for split, rows in parts}


def _distinct(rows: pd.DataFrame) -> tuple[pd.DataFrame, Places]:
    """Return the different rows as texts, in order of first occurrence, and the place of each row there."""
    numbers = np.zeros(len(rows), dtype=np.int64)
    for _, cells in rows.items():
        numbers, _ = pd.factorize(numbers * len(cells.cat.categories) + cells.cat.codes.to_numpy())
    first = np.unique(numbers, return_index=True)[1]
    return rows.iloc[first].astype(object), numbers


def _are_flags(table: Table, columns: Sequence[str]) -> bool:
    """Return whether each column is a class, with 1 for its samples and 0 for others.

    Two columns with flags are classes only where no row has both.
    """
    if len(columns) < 2 or {name.casefold() for name in columns} & _LABEL_COLUMNS:
        return False
    found = [table.find(name) for name in columns]
    are = all(name is not None and is_flags(table.rows[name].unique()) for name in found)
    return are and (len(columns) > 2 or bool(_num_set(table, columns).le(1).all()))


def _num_set(table: Table, columns: Sequence[str]) -> pd.Series[int]:
    """Return the number of flags that are set in each kind of row."""
    return _distinct(table.rows[table.require(columns, None)])[0].map(is_true).sum(axis=1)


def _check_levels(table: Table, columns: list[str]) -> None:
    """Refuse columns that are no levels: numbers, groups, several labels, unique values, or no nesting.

    Raises:
        ConfigError: describes the columns.
    """
    kinds, numbers = _distinct(table.rows[columns])
    rows, num_rows = kinds.replace("", None), np.bincount(numbers)
    looks: dict[str, str] = {}
    for name in columns:
        cells = rows[name].dropna().unique()
        number, num_values = num_rows[rows[name].notna()].sum(), rows[name].nunique()
        is_unique = number >= 5 and num_values > 0.8 * number
        numeric = pd.to_numeric(rows[name], errors="coerce")
        are_numbers = 0 < numeric.count() == rows[name].count()
        if are_numbers and (len(columns) > 1 or is_unique):
            looks[name] = counted(num_values, "number")
            if names_splits(name):
                looks[name] += " (DATA.DATASET.FOLD holds out one of them)"
        elif len(columns) > 1 and names_attribute(name):
            looks[name] = f"{counted(num_values, 'value')} of a group or an attribute"
        elif len(columns) > 1 and (is_unique or num_values == 1):
            looks[name] = f"{counted(num_values, 'value')} in {counted(number, 'row')}"
        elif number and not table.dataset.LABEL_SEPARATOR and (sign := _separator(cells)):
            looks[name] = (
                f"several labels in a cell (DATA.DATASET.LABEL_SEPARATOR {sign!r} parts them)"
            )
    for above, below in pairwise(name for name in columns if name not in looks):
        known = rows[[above, below]].dropna()
        nests = known.groupby(below)[above].nunique().eq(1)  # homonyms have several parents
        if nests.mean() < 0.5 and not known.groupby(above)[below].nunique().eq(1).all():
            number = counted(rows[below].nunique(), "value")
            looks[below] = f"{number} that do not nest in {above}"
    if looks:
        flags = [x for x in looks if is_flags(rows[x].dropna()) and not names_attribute(x)]
        together = f", or all columns of 0 and 1: [{', '.join(flags)}]" if len(flags) > 1 else ""
        raise ConfigError(
            f"DATA.DATASET.LEVELS: null, but columns of {table.path} are no levels: "
            f"{several([f'{name}: {look}' for name, look in looks.items()])}. Name the columns of labels, "
            f"coarse to fine{together}. DATA.DATASET.GROUP_COLUMN keeps the images of a group in one split"
        )


def _separator(cells: Sequence[str]) -> str | None:
    """Return the sign between several labels in a cell; None where each cell is one label.

    A comma may be part of a name, such as `tench, Tinca tinca`. It parts labels that recur in other cells:
    they are no more than cells, or stand in brackets.
    """
    for sign in "|;,":
        sets = [{part.strip(" []'\"") for part in cell.split(sign)} - {""} for cell in cells]
        sizes = [*map(len, sets)]
        most = len(cells) if not cells[0].startswith("[") else sum(sizes) - 1
        recur = sign != "," or len(set[str]().union(*sets)) <= most
        if recur and (max(sizes) > 1 or sign in cells):
            return sign
    return None


def _columns_of_levels(
    table: Table, dataset: DatasetConfig, names: Sequence[str]
) -> dict[str, str]:
    """Return the column of each level that the manifest has."""
    levels = names
    if dataset.LEVELS not in (None, [*names]) and len(dataset.LEVELS) == len(names):
        levels = table.require(dataset.LEVELS, "DATA.DATASET.LEVELS")
    found = {name: table.find(level) for name, level in zip(names, levels, strict=True)}
    columns = {name: column for name, column in found.items() if column is not None}
    if not columns:
        held = several([*map(repr, [table.image, *table.rows])])
        raise DataError(
            f"{table.path}, line 1: no column {' or '.join(map(repr, names))} with labels, but {held}; "
            f"name the columns of {', '.join(names)}, in this order, in DATA.DATASET.LEVELS"
        )
    return columns


def _manifest_paths(dataset: DatasetConfig) -> dict[str, Path]:
    """Return the manifest of each existing split; the training manifest may be missing."""
    root = Path(dataset.ROOT or "").expanduser()
    keys = {split: getattr(dataset, split.upper()) for split in SPLITS}
    paths = {split: root / Path(name).expanduser() for split, name in keys.items() if name}
    folder = paths["train"].parent if "train" in paths and not dataset.ROOT else root
    for split in SPLITS:
        beside = [folder / f"{split}{ending}" for ending in (".csv", ".tsv", ".parquet")]
        found = [path for path in beside if path.is_file() and path not in paths.values()]
        if split == "train":
            found.append(beside[0])
        if found:
            paths.setdefault(split, found[0])
    return {split: paths[split] for split in SPLITS if split in paths}


def _read(path: Path, dataset: DatasetConfig, notes: list[str]) -> Table:
    """Read a manifest.

    Raises:
        ConfigError: there is no such file.
        DataError: it has no header, no row or no column of images, a row has more cells than the header, or
            two columns have one name.
    """
    try:
        if path.suffix.lower() == ".parquet":
            return _read_parquet(path, dataset)
        return _read_csv(path, dataset, notes)
    except ImportError as error:
        raise ConfigError(f"DATA.DATASET: {path} is Parquet: pip install pyarrow") from error
    except OSError as error:
        raise ConfigError(
            f"DATA.DATASET: cannot read manifest {path}: {error.strerror or error}; name it in "
            "DATA.DATASET.TRAIN or DATA.DATASET.VAL, or its folder in DATA.DATASET.ROOT"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text; save it as `CSV UTF-8`") from error
    except (ValueError, csv.Error) as error:
        reason = first_line(error).removeprefix("Error tokenizing data. C error: ")
        raise DataError(f"{path}: broken: {reason}") from error


def _read_csv(path: Path, dataset: DatasetConfig, notes: list[str]) -> Table:
    """Read a CSV file in chunks, so that the texts of a few rows alone are in memory."""
    with path.open(encoding="utf-8-sig") as file:
        num_blank, header = next(((i, x) for i, x in enumerate(file) if x.strip()), (0, ""))
    if not header:
        raise DataError(f"{path}: empty; the first line must name the columns")
    sep = max(",;\t|", key=re.sub(r'"[^"]*"', "", header).count)
    read = partial(
        pd.read_csv,
        path,
        sep=sep,
        header=None,
        skiprows=num_blank,
        skip_blank_lines=False,
        low_memory=False,  # else it merges the categories of many small parts
        keep_default_na=False,
        encoding="utf-8-sig",
    )
    names = [normalize("NFC", str(name).strip()) for name in read(nrows=1, dtype=object).iloc[0]]
    if twice := sorted({n for n in names if names.count(n) > 1 and not _UNNAMED.fullmatch(n)}):
        raise DataError(f"{path}, line 1: column {several(twice)} occurs more than once")
    image = names.index(image_column(path, names, dataset))
    kinds = {i: object if i == image else "category" for i in range(len(names))}
    images: list[Paths] = []
    parts: dict[str, list[Any]] = {name: [] for name in names if not _UNNAMED.fullmatch(name)}
    for chunk in read(dtype=kinds, chunksize=_CHUNK):
        images.append(encoded(map(str.strip, chunk.pop(image))))
        for i in chunk:
            parts.get(names[i], []).append(chunk[i].array)
    del parts[names[image]]
    size, width = sum(map(len, images)), max(part.itemsize for part in images)
    found = np.empty(size, f"S{width}")
    while images:  # from the end, so that memory is free before more is used
        part = images.pop()
        found[size - len(part) : size] = part
        size -= len(part)
    found, line = found[1:], num_blank + 2
    rows = pd.DataFrame({name: _joined(cells) for name, cells in parts.items()})
    nameless = np.flatnonzero(found == b"")
    is_blank = (rows.iloc[nameless] == "").all(axis=1).to_numpy()
    if len(nameless) == len(found):
        raise DataError(f"{path}: no row below the header")
    if not is_blank.all():
        raise DataError(f"{path}, line {nameless[~is_blank][0] + line}: no image path")
    if len(rows.columns) and (rows.iloc[:, -1] == "").sum() > len(nameless):
        _note_short(path, sep, names, notes)
    return Table(
        path, names[image], found, rows.drop(index=nameless) if len(nameless) else rows, dataset
    )


def _note_short(path: Path, separator: str, names: list[str], notes: list[str]) -> None:
    """Note rows with fewer cells than the header, which pandas fills with empty cells."""
    width = max(i for i, name in enumerate(names, 1) if not _UNNAMED.fullmatch(name))
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=separator)
        short = ((reader.line_num, row) for row in reader if 0 < len(row) < width and any(row))
        line, first = next(short, (0, []))
        if first:
            rows = counted(1 + sum(1 for _ in short), "row")
            notes.append(
                f"{path}: {rows} of fewer cells than the {width} of the header, the others read as empty; "
                f"first line {line}: {separator.join(first)[:200]}"
            )


def _read_parquet(path: Path, dataset: DatasetConfig) -> Table:
    from pyarrow.parquet import read_table

    table = read_table(path)
    image = image_column(path, table.column_names, dataset)
    kind = table.schema.field(image).type
    if "binary" in str(kind):
        raise DataError(
            f"{path}: the column {image!r} holds images, not paths; set DATA.DATASET.NAME huggingface"
        )
    paths = encoded(str(value or "").strip() for value in values(table.column(image)))
    rows = {x: categories(values(table.column(x))) for x in table.column_names if x != image}
    return Table(path, image, paths, pd.DataFrame(rows), dataset)


def values(column: Any) -> Iterator[Any]:
    """The values of a column of Arrow, which are not all in memory at once."""
    return (value for chunk in column.chunks for value in chunk.to_pylist())


def categories(cells: Iterable[Any], names: Sequence[str] = ()) -> pd.Categorical:
    """Return the texts of cells; "" where there is no label.

    Args:
        cells: texts, numbers, lists of them, which become texts as Python writes them, or None.
        names: of the classes that cells are numbers of; -1 is no label.
    """

    def text(cell: Any) -> str:
        if isinstance(cell, list):
            return str([*map(text, cell)])
        if isinstance(cell, float) and cell.is_integer():  # whole numbers beside an empty cell
            cell = int(cell)
        is_unknown = cell is None or (names and cell < 0)
        return "" if is_unknown else str(names[cell] if names else cell).strip()

    kinds, places = distinct(map(text, cells))
    return pd.Categorical.from_codes(places, kinds)


def _joined(parts: Sequence[pd.Categorical]) -> pd.Categorical:
    """Return the cells of a column below its header, without spaces around them."""
    whole = union_categoricals(parts)[1:].remove_unused_categories()
    numbers, texts = pd.factorize(np.array([*map(str.strip, whole.categories)], dtype=object))
    return pd.Categorical.from_codes(numbers[whole.codes], texts)


def image_column(path: Path, names: list[str], dataset: DatasetConfig) -> str:
    """Return the column of image paths: the configured one, else the first with a usual name."""
    usual = [found for name in _IMAGE_COLUMNS if (found := _find(names, name)) is not None]
    name = dataset.IMAGE_COLUMN or (usual or _IMAGE_COLUMNS)[0]
    return _require(path, names, [name], "DATA.DATASET.IMAGE_COLUMN")[0]


def _files(table: Table) -> tuple[Path, Paths]:
    """The folder that paths start from, and the path of each image, with the ending that names may lack."""
    paths, stem = table.images, table.path.stem
    if len(table.rows) < len(paths):
        paths = paths[table.rows.index]
    if table.root is not None:
        return table.root, paths
    root = (
        table.path.parent if table.dataset.ROOT is None else Path(table.dataset.ROOT).expanduser()
    )
    for folder in ("", stem, f"{stem}_images", "images"):
        place = partial(os.path.join, folder)
        first = [*dict.fromkeys(place(os.fsdecode(path)) for path in paths[:1000])][:100]
        is_there = any(os.path.isfile(root / container(path)) for path in first)  # noqa: PTH113 (no error)
        if not is_there and _with_endings(root, first) == first:
            continue
        if not folder and is_there:
            return root, paths
        names = [place(os.fsdecode(path)) for path in paths]
        return root, encoded(names if is_there else _with_endings(root, names))
    if not root.is_dir():
        raise ConfigError(f"DATA.DATASET.ROOT: there is no folder {root}{suggest_path(root)}")
    name = os.fsdecode(paths[0])[:200]
    if "\\" in name:
        hint = "; the paths of the manifest have backslashes: replace them by /"
    elif there := other_spelling(root / name):
        hint = f"; there is {there}"
    else:
        hint = f", with any ending, nor in `images` or `{stem}` there; relative paths start from "
        hint += "DATA.DATASET.ROOT, or from the manifest's folder where that is null"
    raise DataError(f"{table.path}: no image {root / name}{hint}")


def _with_endings(root: Path, paths: Iterable[str]) -> list[str]:
    """Return the paths, each with the ending of the image of this name, where there is one."""
    images: dict[str, dict[str, str]] = {}
    found = []
    for path in paths:
        folder, name = os.path.split(path)
        if folder not in images:
            files = sorted((root / folder).glob("*"), reverse=True)
            images[folder] = {x.stem: x.name for x in files if x.suffix.lower() in EXTENSIONS}
        found.append(os.path.join(folder, images[folder].get(name, name)))  # noqa: PTH118 (hot path)
    return found


def _check_nesting(names: Sequence[str], lineages: Iterable[Lineage], source: str) -> None:
    """Refuse columns from fine to coarse: each class has one name in the next, and not vice versa."""
    rows = pd.DataFrame([*{*lineages}], columns=names, dtype=object)
    for above, below in pairwise(names):
        fewer = rows.groupby(above)[below].nunique().le(1).all()
        if fewer and rows.groupby(below)[above].nunique().gt(1).any():
            raise DataError(
                f"{source}: {below!r} stands after {above!r}, but it groups the classes of {above!r}; "
                "order the columns from coarse to fine with DATA.DATASET.LEVELS"
            )
