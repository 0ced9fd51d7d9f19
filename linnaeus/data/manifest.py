"""Manifests: tables with a column of image paths, and one of class names per level.

An empty cell is unknown. With `DATA.DATASET.LABEL_SEPARATOR` a cell holds several names. A cell with only the
separator marks a sample without any class. Columns of 0 and 1, one for each class, are labels too.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pandas as pd

from linnaeus.config.schema import DatasetConfig
from linnaeus.data import EXTENSIONS
from linnaeus.data.image_files import (
    FoundFiles,
    Listing,
    Places,
    Texts,
    distinct,
    optional_test,
    roots_of,
)
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
_PARQUET = (".parquet", ".pq")
_UNNAMED = re.compile(r"(unnamed: \d+)?", re.IGNORECASE)
"""The header of the row numbers that pandas writes."""
_LABEL_COLUMNS = frozenset(("label", "labels", "class", "target", "category", "y"))
"""Columns, case-folded, whose 0 and 1 are two classes."""
_FOLDS = re.compile(r"(.*[\W_])?k?folds?", re.IGNORECASE)
_QUOTES = re.compile(r"""[][]|(?<=[\[ ])['"]|['"](?=[,\]])""")
"""What stands around the names of a cell that is a Python list."""
_SET_SEPARATORS = (";", "|", "/", "\t")
_LONGEST_NAME = 255
"""Of a file, in bytes; longer cells are images, or paths of many folders."""


@dataclass(frozen=True)
class _Table:
    """A manifest, or its rows of one split.

    Attributes:
        path: the file.
        rows: the cells, categories of texts, by number of line.
        dataset: the node of its root.
        split: the split that a column gives to the rows, where it is not the split of the file.
    """

    path: Path
    rows: pd.DataFrame
    dataset: DatasetConfig
    split: str | None = None

    @property
    def image_column(self) -> str:
        """The column of image paths: that of the configuration, else the first with a usual name."""
        usual = [found for name in _IMAGE_COLUMNS if (found := self.find(name)) is not None]
        name = self.dataset.IMAGE_COLUMN or (usual or _IMAGE_COLUMNS)[0]
        return self.require([name], "DATA.DATASET.IMAGE_COLUMN")[0]

    @property
    def group_column(self) -> str | None:
        """The column of groups; None where the configuration names none, or this file has none."""
        name = self.dataset.GROUP_COLUMN
        return None if name is None else self.find(name)

    @property
    def others(self) -> list[str]:
        """The columns beside those of images and groups."""
        taken = (self.image_column, self.group_column)
        return [name for name in self.rows if name not in taken]

    def find(self, name: str) -> str | None:
        """The column of this name, whatever its case; None where there is none."""
        if name in self.rows:
            return name
        return next((each for each in self.rows if each.casefold() == name.casefold()), None)

    def require(self, names: Sequence[str], key: str | None) -> list[str]:
        """Return the columns of these names.

        Args:
            names: in any case.
            key: gives the names; None for columns of the training manifest.

        Raises:
            ConfigError, DataError: the file lacks columns, and the key or the training manifest names them.
        """
        found = [self.find(name) for name in names]
        problems = []
        for name in (name for name, column in zip(names, found, strict=True) if column is None):
            close = get_close_matches(name, self.rows, 1, 0.7)
            has = f"the file has {several([*map(repr, self.rows)])}"
            hint = f"did you mean {close[0]!r}?" if close else has
            if key is None:
                raise DataError(
                    f"{self.path}, line 1: no column {name!r}, as the training manifest has; {hint}"
                )
            problems.append(f"{key}: {self.path} has no column {name!r}; {hint}")
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
    def of(cls, tables: Sequence[_Table]) -> _Labels:
        """The labels of the training manifests.

        Raises:
            ConfigError: the image column among the `LEVELS`, or columns that are no levels.
            DataError: a column that is missing, or none with labels.
        """
        table, dataset = tables[0], tables[0].dataset
        for each in tables:
            each.require([*filter(None, [dataset.GROUP_COLUMN])], "DATA.DATASET.GROUP_COLUMN")
        levels = dataset.LEVELS or table.others
        columns = table.require(levels, "DATA.DATASET.LEVELS")
        if not levels:
            raise DataError(
                f"{table.path}, line 1: no column with labels beside {table.image_column!r}"
            )
        if table.image_column in columns:
            raise ConfigError(f"DATA.DATASET.LEVELS: {table.image_column!r} is the image column")
        if _are_flags(tables, columns):
            separator = dataset.LABEL_SEPARATOR
            if separator is None and any(_num_set(each, columns).ne(1).any() for each in tables):
                separator = next(sign for sign in _SET_SEPARATORS if sign not in "".join(columns))
            return cls(["class"], columns, are_flags=True, separator=separator)
        if dataset.LEVELS is None:
            _check_levels(tables, columns)
        return cls(list(levels), columns, separator=dataset.LABEL_SEPARATOR)

    def files(self, splits: Mapping[str, Sequence[_Table]], notes: list[str]) -> FoundFiles:
        """The samples of each split."""
        unknown: dict[Path, Counter[str]] = defaultdict(Counter)
        found: dict[str, list[Listing]] = {split: [] for split in SPLITS}
        for split, tables in splits.items():
            for table in tables:
                with optional_test(notes, split, table.dataset):
                    found[split].append(self._listing(table, unknown[table.path]))
        for path, words in unknown.items():
            if shown := ", ".join(f"{number} {cell!r}" for cell, number in words.most_common()):
                notes.append(f"{path}: cells read as unknown labels: {shown}")
        return FoundFiles(found, tuple(self.levels), notes, partial(self._index, found["train"]))

    def _index(self, trains: Sequence[Listing]) -> LabelIndex:
        """The classes of the training manifests."""
        train = Listing.joined(trains)
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

    def _listing(self, table: _Table, unknown: Counter[str]) -> Listing:
        """The samples of a manifest; counts the words for unknown labels."""
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

    def _of_flags(self, table: _Table, row: Sequence[str]) -> str | None:
        held = [name for name, cell in zip(self.columns, row, strict=True) if is_true(cell)]
        if self.separator is not None:
            return self.separator.join(held) or self.separator
        if len(held) > 1:
            raise DataError(f"{table.path}: a row of {' and '.join(held)}, but one in training")
        return held[0] if held else None


def read_manifest(dataset: DatasetConfig) -> FoundFiles:
    """Find the image files that manifests list.

    Relative image paths start from `ROOT`, or from the manifest's own folder where `ROOT` is null.

    Raises:
        ConfigError: a manifest that cannot be read, the image column among the `LEVELS`, or columns that are
            no levels.
        DataError: a manifest that is empty or malformed; the message names file and line.
    """
    notes: list[str] = []
    roots = [(node, _manifest_paths(node)) for node in roots_of(dataset)]
    splits = _split_tables(roots, notes)
    if not splits["train"]:
        raise DataError(f"{dataset.TRAIN or 'train.csv'}: no row of the training split")
    labels = _Labels.of(splits["train"])
    table = splits["train"][0]
    if rest := [name for name in table.others if name not in labels.columns]:
        notes.append(f"{table.path}: columns not read: {several(rest)}")
    return labels.files(splits, notes)


def read_evaluated_manifest(
    dataset: DatasetConfig, taxonomy: Taxonomy, *, is_run_dataset: bool
) -> FoundFiles:
    """Find the image files that a trained model is to be evaluated on.

    These are the validation samples where there are any, else the test samples, else all of the training
    manifest. Columns of levels may be missing, but not in the run's own training manifest.

    Args:
        dataset: the DATA.DATASET node. As many LEVELS as the run has levels name their columns.
        taxonomy: the levels of the run.
        is_run_dataset: whether the node is that of the run.
    """
    notes: list[str] = []
    roots = [(node, _manifest_paths(node)) for node in roots_of(dataset)]
    held = next((s for s in ("val", "test") if any(s in paths for _, paths in roots)), None)
    if held is not None and not is_run_dataset:
        roots = [(node, {held: paths[held]}) for node, paths in roots if held in paths]
    splits = _split_tables(roots, notes)
    wanted = next((split for split in ("val", "test", "train") if splits[split]), "train")
    tables = splits[wanted]
    table, names = tables[0], taxonomy.names
    flags = dataset.LEVELS or table.others
    if wanted == "train" and is_run_dataset:
        labels = _Labels.of(tables)
    elif len(names) == 1 and table.find(names[0]) is None and _are_flags(tables, flags):
        labels = _Labels([*names], flags, are_flags=True, separator=taxonomy.separator)
    else:
        columns = _columns_of_levels(table, dataset, names)
        labels = _Labels(list(columns), list(columns.values()), separator=taxonomy.separator)
    return labels.files({wanted: tables}, notes)


def _split_tables(
    roots: Sequence[tuple[DatasetConfig, Mapping[str, Path]]], notes: list[str]
) -> dict[str, list[_Table]]:
    """The rows of each split of each root: those of its manifests, divided by their column of splits.

    A column of splits moves rows from the training manifest to a split without a manifest of its own.
    """
    splits: dict[str, list[_Table]] = {split: [] for split in SPLITS}
    for node, paths in roots:
        if node.FOLD is not None and {"train", "val"} <= paths.keys():
            raise ConfigError(
                f"DATA.DATASET.FOLD: {paths['val']} is the validation split; leave FOLD out"
            )
        for split, path in paths.items():
            with optional_test(notes, split, node):
                table = _read(path, node)
                parts = _divided(table, is_train=split == "train") or {split: table}
                if len(parts) == 1 and "train" not in parts:
                    parts = {split: next(iter(parts.values()))}
                kept = {
                    name: part if name == split else replace(part, split=name)
                    for name, part in parts.items()
                    if name == split or (split == "train" and name not in paths)
                }
                if not kept:
                    raise DataError(
                        f"{path}: no row of split {split}, but of {', '.join(parts)}; name the manifest "
                        f"in DATA.DATASET.{split.upper()}"
                    )
                if left_out := len(table.rows) - sum(len(part.rows) for part in kept.values()):
                    rows = counted(left_out, "row")
                    notes.append(f"{path}: {rows} left out, of other splits or of none")
                for name, part in kept.items():
                    splits[name].append(part)
    return splits


def _divided(table: _Table, *, is_train: bool) -> dict[str, _Table]:
    """The rows of each split, without the column that says it; empty where no column does."""
    dataset, given = table.dataset, table.dataset.SPLIT_COLUMN
    if given is not None and (is_train or table.find(given) is not None):
        (given,) = table.require([given], "DATA.DATASET.SPLIT_COLUMN")
    elif given is not None:
        return {}
    usual = next(filter(_FOLDS.fullmatch, table.rows), None)
    folds = _column_of_folds(table, given or usual) if is_train else None
    named = map(table.find, dataset.LEVELS or ())
    taken = {table.image_column, table.group_column, *named, *(folds or ())[:1]}
    columns = [name for name in table.rows if name not in taken]
    if given is not None and folds is None:
        columns = [given]
    cells = {name: table.rows[name].unique().tolist() for name in columns}
    is_strict = is_train and given is None
    found = find_column(cells, given if folds is None else None, is_strict=is_strict)
    if found is not None and dataset.FOLD is not None and is_train and not (given and folds):
        raise ConfigError(
            f"DATA.DATASET.FOLD: the column {found[0]!r} of {table.path} divides the samples; leave "
            "FOLD out, or name the column of folds in DATA.DATASET.SPLIT_COLUMN"
        )
    divisions = [*filter(None, (folds, found))]
    if not divisions:
        return {}
    column, meanings = divisions[0]
    rows = table.rows.drop(columns=[name for name, _ in divisions])
    parts = rows.groupby(table.rows[column].map(meanings), observed=True)
    return {split: replace(table, rows=rows) for split, rows in parts}


def _column_of_folds(table: _Table, column: str | None) -> tuple[str, dict[str, str]] | None:
    """The column with the number of each sample's fold, and the split of each; None without one or a FOLD."""
    fold = table.dataset.FOLD
    if fold is None or column is None or not table.rows[column].str.isdecimal().all():
        return None
    numbers = table.rows[column].unique()
    if fold not in map(int, numbers):
        raise ConfigError(
            f"DATA.DATASET.FOLD: {fold} is not among the values of {column!r} in {table.path}: "
            f"{', '.join(sorted(numbers, key=int))}"
        )
    return column, {cell: "val" if int(cell) == fold else "train" for cell in numbers}


def _distinct(rows: pd.DataFrame) -> tuple[pd.DataFrame, Places]:
    """The different rows as texts, in order of first occurrence, and the place of each row there."""
    numbers = np.zeros(len(rows), dtype=np.int64)
    for _, cells in rows.items():
        numbers, _ = pd.factorize(numbers * len(cells.cat.categories) + cells.cat.codes.to_numpy())
    first = np.unique(numbers, return_index=True)[1]
    return rows.iloc[first].astype(object), numbers


def _are_flags(tables: Sequence[_Table], columns: Sequence[str]) -> bool:
    """Whether each column is a class, with 1 for its samples and 0 for others.

    Two columns with flags are classes only where no row has both.
    """
    if len(columns) < 2 or {name.casefold() for name in columns} & _LABEL_COLUMNS:
        return False
    for table in tables:
        found = [table.find(name) for name in columns]
        if not all(name and is_flags(table.rows[name].unique()) for name in found):
            return False
    return len(columns) > 2 or all(_num_set(table, columns).le(1).all() for table in tables)


def _num_set(table: _Table, columns: Sequence[str]) -> pd.Series[int]:
    """The number of flags that are set in each kind of row."""
    return _distinct(table.rows[table.require(columns, None)])[0].map(is_true).sum(axis=1)


def _check_levels(tables: Sequence[_Table], columns: Sequence[str]) -> None:
    """Refuse columns that are no levels: numbers, groups, several labels, unique values, or no nesting.

    Raises:
        ConfigError: says what the columns look like.
    """
    parts = [_distinct(each.rows[[x for x in columns if x in each.rows]]) for each in tables]
    rows = pd.concat([kinds for kinds, _ in parts]).reindex(columns=columns).replace("", None)
    num_rows = np.concatenate([np.bincount(numbers) for _, numbers in parts])
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
        elif number and not tables[0].dataset.LABEL_SEPARATOR and (sign := _separator(cells)):
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
            f"DATA.DATASET.LEVELS: null, but columns of {tables[0].path} are no levels: "
            f"{several([f'{name}: {look}' for name, look in looks.items()])}. Name the columns of labels, "
            f"coarse to fine{together}. DATA.DATASET.GROUP_COLUMN keeps the images of a group in one split"
        )


def _separator(cells: Sequence[str]) -> str | None:
    """The sign between several labels in a cell; None where each cell is one label.

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
    table: _Table, dataset: DatasetConfig, names: Sequence[str]
) -> dict[str, str]:
    """The column of each level that the manifest has."""
    levels = names
    if dataset.LEVELS not in (None, [*names]) and len(dataset.LEVELS) == len(names):
        levels = table.require(dataset.LEVELS, "DATA.DATASET.LEVELS")
    found = {name: table.find(level) for name, level in zip(names, levels, strict=True)}
    columns = {name: column for name, column in found.items() if column is not None}
    if not columns:
        raise DataError(
            f"{table.path}, line 1: no column {' or '.join(map(repr, names))} with labels, but "
            f"{several([*map(repr, table.rows)])}; name those of {', '.join(names)}, in this order, in "
            "DATA.DATASET.LEVELS"
        )
    return columns


def _manifest_paths(dataset: DatasetConfig) -> dict[str, Path]:
    """The manifest of each split that there is; that of training may be missing."""
    root = Path(dataset.ROOT or "").expanduser()
    keys = {split: getattr(dataset, split.upper()) for split in SPLITS}
    paths = {split: root / Path(name).expanduser() for split, name in keys.items() if name}
    folder = paths["train"].parent if "train" in paths and not dataset.ROOT else root
    for split in SPLITS:
        beside = [folder / f"{split}{ending}" for ending in (".csv", ".tsv", *_PARQUET)]
        found = [path for path in beside if path.is_file() and path not in paths.values()]
        if split == "train":
            found.append(beside[0])
        if found:
            paths.setdefault(split, found[0])
    return {split: paths[split] for split in SPLITS if split in paths}


def _read(path: Path, dataset: DatasetConfig) -> _Table:
    """Read a manifest.

    Raises:
        ConfigError: there is no such file.
        DataError: it has no header or no row, a row has more cells than the header, or two columns have one
            name.
    """
    read: Callable[[Path], pd.DataFrame] = (
        _read_parquet if path.suffix.lower() in _PARQUET else _read_csv
    )
    try:
        rows = read(path)
    except ImportError as error:
        raise ConfigError(f"DATA.DATASET: {path} is Parquet: pip install pyarrow") from error
    except OSError as error:
        raise ConfigError(
            f"DATA.DATASET: cannot read manifest {path}: {error.strerror or error}; name it in "
            "DATA.DATASET.TRAIN or DATA.DATASET.VAL, or its folder in DATA.DATASET.ROOT"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text; save it as `CSV UTF-8`") from error
    except ValueError as error:
        reason = first_line(error).removeprefix("Error tokenizing data. C error: ")
        raise DataError(f"{path}: broken: {reason}") from error
    rows = rows.apply(lambda cells: cells.map(str.strip).astype("category"))
    rows = rows[(rows != "").any(axis=1)]
    if rows.empty:
        raise DataError(f"{path}: empty; the first line must name the columns")
    rows.columns = pd.Index([normalize("NFC", name) for name in rows.iloc[0]])
    rows = rows.iloc[1:]
    if rows.empty:
        raise DataError(f"{path}: no row below the header")
    rows = rows[[name for name in rows if not _UNNAMED.fullmatch(name)]]
    if twice := sorted({*rows.columns[rows.columns.duplicated()]}):
        raise DataError(f"{path}, line 1: column {several(twice)} occurs more than once")
    return _Table(path, rows, dataset)


def _read_csv(path: Path) -> pd.DataFrame:
    """The lines of a CSV file, with the header, as text; cells that a line lacks are empty."""
    with path.open(encoding="utf-8-sig") as file:
        num_blank, header = next(((i, x) for i, x in enumerate(file) if x.strip()), (0, ""))
    if not header:
        return pd.DataFrame()
    separator = max(",;\t|", key=re.sub(r'"[^"]*"', "", header).count)
    rows = pd.read_csv(
        path,
        sep=separator,
        header=None,
        skiprows=num_blank,
        skip_blank_lines=False,
        dtype="category",
        low_memory=False,  # else it merges the categories of many small parts
        keep_default_na=False,
        encoding="utf-8-sig",
    )
    return rows.set_axis(range(num_blank + 1, num_blank + 1 + len(rows)))


def _read_parquet(path: Path) -> pd.DataFrame:
    rows = pd.read_parquet(path, dtype_backend="numpy_nullable").astype(object)
    header = pd.DataFrame([rows.columns], columns=rows.columns)
    rows = pd.concat([header, rows.where(rows.notna(), "")], ignore_index=True)
    # Lists as Python writes them, and the beginning of images.
    text = rows.map(lambda x: str(x.tolist() if hasattr(x, "tolist") else x)[: 2 * _LONGEST_NAME])
    return text.astype("category").set_axis(range(1, len(rows) + 1))


def _files(table: _Table) -> tuple[Path, Texts]:
    """The folder that paths start from, and the path of each image, with the ending that names may lack."""
    names = table.rows[table.image_column]
    for line in names.index[names == ""]:
        raise DataError(f"{table.path}, line {line}: no image path")
    given = table.dataset.ROOT
    root = Path(given).expanduser() if given is not None else table.path.parent
    numbers, kinds = pd.factorize(names)
    longest = max(map(os.fsencode, kinds), key=len)
    # `Path.exists` raises for a name that is too long.
    if len(longest) > _LONGEST_NAME and not os.path.exists(root / os.fsdecode(longest)):  # noqa: PTH110
        raise DataError(
            f"{table.path}: the column {table.image_column!r} holds images, not paths; write the images to "
            "files, and name the column of their paths in DATA.DATASET.IMAGE_COLUMN"
        )
    stem = table.path.stem
    for folder in ("", stem, f"{stem}_images", "images"):
        paths = [os.path.join(folder, name) for name in kinds]  # noqa: PTH118 (hot path)
        if not any((root / path).is_file() for path in paths[:100]):
            if _with_endings(root, paths[:100]) == paths[:100]:
                continue
            paths = _with_endings(root, paths)
        return root, np.array(paths, dtype=object)[numbers]
    if not root.is_dir():
        raise ConfigError(f"DATA.DATASET.ROOT: there is no folder {root}{suggest_path(root)}")
    first = names.iloc[0]
    if "\\" in first:
        hint = "; the paths of the manifest have backslashes: replace them by /"
    elif there := other_spelling(root / first):
        hint = f"; there is {there}"
    else:
        hint = f", with any ending, nor in `images` or `{stem}` there; relative paths start from "
        hint += "DATA.DATASET.ROOT, or from the manifest's folder where that is null"
    raise DataError(f"{table.path}, line {names.index[0]}: no image {root / first}{hint}")


def _with_endings(root: Path, paths: Iterable[str]) -> list[str]:
    """The paths, each with the ending of the image of this name, where there is one."""
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
