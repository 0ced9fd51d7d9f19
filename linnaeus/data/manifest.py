"""Manifests: tables with a column of image paths, and one of class names per level.

An empty cell is unknown. With `DATA.DATASET.LABEL_SEPARATOR` a cell holds several names; the separator alone
is a sample of no class. Columns of 0 and 1, one for each class, are labels too.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unicodedata import normalize

from linnaeus.config.schema import DataConfig, DatasetConfig
from linnaeus.data import EXTENSIONS
from linnaeus.data.bundle import DataBundle, OnMain
from linnaeus.data.image_files import EvaluatedFiles, Listing, build_files, roots_of
from linnaeus.data.splits import SPLITS, find_column, is_flags, is_true
from linnaeus.data.taxonomy import LabelIndex, index_labels, require_classes
from linnaeus.errors import ConfigError, DataError
from linnaeus.files import suggest_path
from linnaeus.words import counted, several

_IMAGE_COLUMNS = (
    "image",
    "path",
    "file",
    "filename",
    "file_name",
    "filepath",
    "file_path",
    "image_path",
    "image_name",
    "image_id",
    "img",
    "id",
)
_PARQUET = (".parquet", ".pq")
_UNNAMED = re.compile(r"(unnamed: \d+)?", re.IGNORECASE)
"""The header of the row numbers that pandas writes."""
_UNKNOWN_WORDS = frozenset(("nan", "none", "na", "n/a", "<na>", "null", "-"))
"""Cells that mean an unknown label, case-folded, as does an empty one."""
_LABEL_COLUMNS = frozenset(("label", "labels", "class", "target", "category", "y"))
"""Columns, case-folded, whose 0 and 1 are two classes."""
_SET_SEPARATORS = (";", "|", "/", "\t")


@dataclass(frozen=True)
class _Table:
    """A manifest: its header, its rows, each with the number of its last line, and the node of its root."""

    path: Path
    header: list[str]
    rows: list[tuple[int, list[str]]]
    dataset: DatasetConfig

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
    def named(self) -> list[str]:
        """The columns but those of row numbers."""
        return [name for name in self.header if not _UNNAMED.fullmatch(name)]

    def find(self, name: str) -> str | None:
        """The column of this name, whatever its case; None where there is none."""
        if name in self.header:
            return name
        return next((each for each in self.header if each.casefold() == name.casefold()), None)

    def require(self, names: Sequence[str], key: str) -> list[str]:
        """The columns of these names; refuses a file without one. `key` names them, for the message."""
        found = []
        for name in names:
            column = self.find(name)
            if column is None:
                close = get_close_matches(name, self.header, 1)
                has = f"the file has {', '.join(map(repr, self.header))}"
                hint = f"did you mean {close[0]!r}?" if close else has
                raise DataError(f"{self.path}, line 1: no column {name!r} ({key}); {hint}")
            found.append(column)
        return found

    def cells(self, column: str) -> list[str]:
        """The cells of a column."""
        place = self.header.index(column)
        return [cells[place] for _, cells in self.rows]


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
            ConfigError: the image column among the `RANKS`, or columns that are no levels.
            DataError: a column that is missing or occurs twice, or none with labels.
        """
        table, path, dataset = tables[0], tables[0].path, tables[0].dataset
        image = table.image_column
        twice = sorted({name for name in table.named if table.named.count(name) > 1})
        if twice:
            raise DataError(f"{path}, line 1: column {several(twice)} occurs more than once")
        others = {image, table.group_column}
        levels = dataset.RANKS or [name for name in table.named if name not in others]
        columns = table.require(levels, "DATA.DATASET.RANKS")
        if not levels:
            raise DataError(f"{path}, line 1: no column with labels beside {image!r}")
        if image in columns:
            raise ConfigError(f"DATA.DATASET.RANKS: {image!r} is the image column")
        if flags := _flag_columns(tables, columns):
            num_set = Counter(
                sum(row) for each in tables for row in zip(*_flags(each, flags), strict=True)
            )
            separator = dataset.LABEL_SEPARATOR
            if separator is None and num_set.keys() != {1}:
                separator = next(sign for sign in _SET_SEPARATORS if sign not in "".join(flags))
            return cls(["class"], flags, are_flags=True, separator=separator)
        if dataset.RANKS is None:
            _check_levels(tables, columns)
        return cls(list(levels), columns, separator=dataset.LABEL_SEPARATOR)

    def train(self, tables: Sequence[_Table], notes: list[str]) -> tuple[list[Listing], LabelIndex]:
        """The training samples of each root, and the classes that they define."""
        for table in tables:
            groups = table.dataset.GROUP_COLUMN
            table.require([] if groups is None else [groups], "DATA.DATASET.GROUP_COLUMN")
        trains = [self.listing(table, notes) for table in tables]
        train = Listing.joined(trains)
        separator = self.separator
        if (
            separator
            and not self.are_flags
            and not any(separator in (cell or "") for names in train.lineages for cell in names)
        ):
            raise ConfigError(
                f"DATA.DATASET.LABEL_SEPARATOR: {separator!r} is in no cell of {train.source}"
            )
        index = index_labels(self.levels, train.lineages, separator)
        remedy = "choose other columns with DATA.DATASET.RANKS"
        require_classes(index.taxonomy, train.source, remedy)
        return trains, index

    def are_in(self, table: _Table) -> bool:
        """Whether a manifest has all columns."""
        return all(table.find(column) is not None for column in self.columns)

    def listing(self, table: _Table, notes: list[str]) -> Listing:
        """The samples of a manifest."""
        columns = table.require(self.columns, "as in the training manifest")
        lineages: list[tuple[str | None, ...]]
        if self.are_flags:
            lineages = [
                (self._of_flags(table, line, row),)
                for (line, _), row in zip(
                    table.rows, zip(*_flags(table, columns), strict=True), strict=True
                )
            ]
        else:
            unknown = Counter[str]()
            names = [self._names(table.cells(column), unknown) for column in columns]
            lineages = list(zip(*names, strict=True))
            if unknown:
                shown = ", ".join(f"{num} {cell!r}" for cell, num in unknown.most_common())
                notes.append(f"{table.path}: cells read as unknown labels: {shown}")
        root, paths = _files(table)
        groups = None if table.group_column is None else table.cells(table.group_column)
        return Listing(str(table.path), root, paths, lineages, groups=groups)

    def _of_flags(self, table: _Table, line: int, row: Sequence[bool]) -> str | None:
        held = [column for column, flag in zip(self.columns, row, strict=True) if flag]
        if self.separator is not None:
            return self.separator.join(held) or self.separator
        if len(held) > 1:
            raise DataError(f"{table.path}, line {line}: {len(held)} classes, but one in training")
        return held[0] if held else None

    def _names(self, cells: Iterable[str], unknown: Counter[str]) -> list[str | None]:
        names: list[str | None] = []
        for cell in cells:
            if cell.casefold() in _UNKNOWN_WORDS and cell != self.separator:
                unknown[cell] += 1
                names.append(None)
            else:
                names.append(normalize("NFC", cell) or None)
        return names


def build_manifest(config: DataConfig, on_main: OnMain) -> DataBundle:
    """Image files listed in manifests.

    Relative image paths start from `ROOT`, or from the manifest's own folder where `ROOT` is null.

    Raises:
        ConfigError: a manifest that cannot be read, the image column among the `RANKS`, or columns that are
            no levels.
        DataError: a manifest that is empty or malformed (the message names file and line); a level
            with one class; columns from fine to coarse; a validation class without a training sample.
    """
    notes: list[str] = []
    splits = _splits([(node, _manifest_paths(node)) for node in roots_of(config.DATASET)], notes)
    if not splits["train"]:
        raise DataError(f"{config.DATASET.TRAIN or 'train.csv'}: no row of the training split")
    labels = _Labels.of(splits["train"])
    trains, index = labels.train(splits["train"], notes)
    _check_nesting(index, trains[0].source)
    listings = {"train": trains, "val": [], "test": []}
    for table in splits["val"]:
        listings["val"].append(labels.listing(table, notes))
    for table in splits["test"]:
        if config.DATASET.TEST is None and not labels.are_in(table):
            notes.append(f"no test split: {table.path} lacks the columns of labels")
        else:
            listings["test"].append(labels.listing(table, notes))
    return build_files(listings, index, config, on_main, notes)


def evaluated_manifest(
    dataset: DatasetConfig,
    level_names: Sequence[str | None],
    *,
    is_own: bool,
    separator: str | None = None,
) -> EvaluatedFiles:
    """The images that a trained model is to be evaluated on.

    These are the validation samples where there are any, else the test samples, else all of the training
    manifest. Columns of levels may be missing, but not in the run's own training manifest.

    Args:
        dataset: the DATA.DATASET node. As many RANKS as the run has levels name their columns.
        level_names: names of the run's levels, coarse to fine; None where one has no name.
        is_own: whether the node is that of the run.
        separator: of several labels of a sample of the run.
    """
    notes: list[str] = []
    roots = [(node, _manifest_paths(node)) for node in roots_of(dataset)]
    held = next((s for s in ("val", "test") if any(s in paths for _, paths in roots)), None)
    if held is not None and not is_own:
        roots = [(node, {held: paths[held]}) for node, paths in roots if held in paths]
    splits = _splits(roots, notes)
    wanted = next((split for split in ("val", "test", "train") if splits[split]), "train")
    tables = splits[wanted]
    if wanted == "train" and is_own:
        labels = _Labels.of(tables)
        trains, index = labels.train(tables, notes)
        return EvaluatedFiles(trains, tuple(labels.levels), is_val=False, index=index)
    table, names = tables[0], [name for name in level_names if name is not None]
    flags = []
    if len(names) == 1 and table.find(names[0]) is None:
        image = table.image_column
        others = {image, table.group_column}
        named = [name for name in table.named if name not in others]
        flags = _flag_columns(tables, dataset.RANKS or named)
    if flags:
        labels = _Labels(names, flags, are_flags=True, separator=separator)
    else:
        columns = _columns_of_levels(table, dataset, level_names)
        labels = _Labels(list(columns), list(columns.values()), separator=separator)
    listings = [labels.listing(table, notes) for table in tables]
    return EvaluatedFiles(listings, tuple(labels.levels), is_val=wanted != "train")


def _splits(
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
            table = _read(path, node)
            parts = _divided(table, is_train=split == "train") or {split: table}
            if len(parts) == 1 and "train" not in parts:
                parts = {split: next(iter(parts.values()))}
            kept = {
                name: part
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
    given = table.dataset.SPLIT_COLUMN
    if given is not None and (is_train or table.find(given) is not None):
        (given,) = table.require([given], "DATA.DATASET.SPLIT_COLUMN")
    elif given is not None:
        return {}
    image = table.image_column
    ranks = {name.casefold() for name in table.dataset.RANKS or ()}
    others = [n for n in table.named if n != image and n.casefold() not in ranks]
    found = _column_of_folds(table, given or table.find("fold"))
    if found is None:
        found = find_column({name: table.cells(name) for name in dict.fromkeys(others)}, given)
        if found is not None and table.dataset.FOLD is not None:
            raise ConfigError(
                f"DATA.DATASET.FOLD: the column {found[0]!r} of {table.path} divides the samples; leave "
                "FOLD out, or name the column of folds in DATA.DATASET.SPLIT_COLUMN"
            )
    if found is None:
        return {}
    column, meanings = found
    place = table.header.index(column)
    rows: dict[str, list[tuple[int, list[str]]]] = {split: [] for split in SPLITS}
    for line, cells in table.rows:
        if (split := meanings.get(cells[place])) is not None:
            rows[split].append((line, cells[:place] + cells[place + 1 :]))
    header = table.header[:place] + table.header[place + 1 :]
    return {split: replace(table, header=header, rows=held) for split, held in rows.items() if held}


def _column_of_folds(table: _Table, column: str | None) -> tuple[str, dict[str, str]] | None:
    """The column with the number of each sample's fold, and the split of each; None without one or a FOLD."""
    fold = table.dataset.FOLD
    if fold is None or column is None or not all(map(str.isdecimal, table.cells(column))):
        return None
    numbers = {*table.cells(column)}
    if fold not in map(int, numbers):
        raise ConfigError(
            f"DATA.DATASET.FOLD: {fold} is not among the values of {column!r} in {table.path}: "
            f"{', '.join(sorted(numbers, key=int))}"
        )
    return column, {cell: "val" if int(cell) == fold else "train" for cell in numbers}


def _flag_columns(tables: Sequence[_Table], columns: Sequence[str]) -> list[str]:
    """The columns, where each is a class with 1 for its samples and 0 for others; else none.

    Two columns with flags are classes only where each row has one of them.
    """
    if len(columns) < 2 or {name.casefold() for name in columns} & _LABEL_COLUMNS:
        return []
    if any(
        table.find(column) is None or not is_flags(table.cells(str(table.find(column))))
        for table in tables
        for column in columns
    ):
        return []
    rows = (zip(*_flags(table, columns), strict=True) for table in tables)
    if len(columns) == 2 and any(sum(row) != 1 for each in rows for row in each):
        return []
    return list(columns)


def _flags(table: _Table, columns: Sequence[str]) -> list[list[bool]]:
    return [[is_true(cell) for cell in table.cells(name)] for name in table.require(columns, "")]


def _check_levels(tables: Sequence[_Table], columns: Sequence[str]) -> None:
    """Refuse columns beside the labels, which are no levels: numbers, unique values, values that do not nest.

    Raises:
        ConfigError: says what the columns look like.
    """
    values = {}
    for name in columns:
        held = [str(table.find(name) or "") for table in tables]
        values[name] = [
            cell
            for table, column in zip(tables, held, strict=True)
            for cell in (table.cells(column) if column else [""] * len(table.rows))
        ]
    looks: dict[str, str] = {}
    for name, cells in values.items():
        known = [cell for cell in cells if cell]
        num = len({*known})
        is_unique = len(known) >= 5 and num > 0.8 * len(known)
        if num and all(_is_number(cell) for cell in known) and (len(columns) > 1 or is_unique):
            looks[name] = counted(num, "number")
            if name.casefold() == "fold":
                looks[name] += " (DATA.DATASET.FOLD holds out one of them)"
        elif num == 1 and len(columns) > 1:
            looks[name] = "1 value"
        elif is_unique and len(columns) > 1:
            looks[name] = f"{num} values in {counted(len(known), 'row')}"
    for above, below in pairwise(name for name in columns if name not in looks):
        if not (
            _nests(values[above], values[below]) or _nests(values[below], values[above], all_=True)
        ):
            num = len({*values[below]} - {""})
            looks[below] = f"{counted(num, 'value')} that do not nest in {above}"
    if looks:
        levels = [name for name in columns if name not in looks]
        raise ConfigError(
            f"DATA.DATASET.RANKS: null, but columns of {tables[0].path} are no levels: "
            + "; ".join(f"{name}: {look}" for name, look in looks.items())
            + f". Name the columns of labels, coarse to fine, such as [{', '.join(levels or columns[:1])}]"
        )


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _nests(above: Sequence[str], below: Sequence[str], *, all_: bool = False) -> bool:
    """Whether most values, or all, stand under one value of the column above; names may have homonyms."""
    parents: dict[str, set[str]] = {}
    for parent, name in zip(above, below, strict=True):
        if parent and name:
            parents.setdefault(name, set()).add(parent)
    num = sum(len(found) == 1 for found in parents.values())
    return num == len(parents) if all_ else num >= 0.5 * len(parents)


def _columns_of_levels(
    table: _Table, dataset: DatasetConfig, level_names: Sequence[str | None]
) -> dict[str, str]:
    """The column of each level that the manifest has."""
    names = [name for name in level_names if name is not None]
    ranks = (
        dataset.RANKS if dataset.RANKS is not None and len(dataset.RANKS) == len(names) else names
    )
    if ranks != names:
        table.require(ranks, "DATA.DATASET.RANKS")
    found = {name: table.find(rank) for name, rank in zip(names, ranks, strict=True)}
    columns = {name: column for name, column in found.items() if column is not None}
    if not columns:
        raise DataError(
            f"{table.path}, line 1: no column {' or '.join(map(repr, names))} with labels, but "
            f"{', '.join(map(repr, table.header))}; name those of {', '.join(names)}, in this order, in "
            "DATA.DATASET.RANKS"
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
        if split not in paths:
            found = [path for path in beside if path.is_file() and path not in paths.values()]
            if found or split == "train":
                paths[split] = (found or beside)[0]
    return {split: paths[split] for split in SPLITS if split in paths}


def _read(path: Path, dataset: DatasetConfig) -> _Table:
    """Read a manifest.

    Raises:
        DataError: it has no header or no row, or a row has not as many cells as the header.
    """
    try:
        is_parquet = path.suffix.lower() in _PARQUET
        rows = _read_parquet(path) if is_parquet else _read_csv(path)
    except OSError as error:
        raise ConfigError(
            f"DATA.DATASET: cannot read manifest {path}: {error.strerror or error}; name it in "
            "DATA.DATASET.TRAIN or DATA.DATASET.VAL, or its folder in DATA.DATASET.ROOT"
        ) from error
    rows = [
        (line, [cell.strip() for cell in cells])
        for line, cells in rows
        if any(cell.strip() for cell in cells)
    ]
    if not rows:
        raise DataError(f"{path}: empty; the first line must name the columns")
    (_, header), *rows = rows
    if not rows:
        raise DataError(f"{path}: no row below the header")
    for line, cells in rows:
        if len(cells) != len(header):
            raise DataError(
                f"{path}, line {line}: {len(cells)} cells, but the header has {len(header)}"
            )
    return _Table(path, [normalize("NFC", name) for name in header], rows, dataset)


def _read_csv(path: Path) -> list[tuple[int, list[str]]]:
    """The rows of a CSV file, with or without a byte-order mark, each with the number of its last line."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8 text; save it as `CSV UTF-8`") from error
    header = re.sub(r'"[^"]*"', "", text.lstrip().partition("\n")[0])
    rows = []
    line = 0
    try:
        reader = csv.reader(
            io.StringIO(text, newline=""), delimiter=max(",;\t|", key=header.count), strict=True
        )
        for cells in reader:
            line = reader.line_num
            rows.append((line, cells))
    except csv.Error as error:
        raise DataError(f"{path}, line {line + 1} or after: broken CSV: {error}") from error
    return rows


def _read_parquet(path: Path) -> list[tuple[int, list[str]]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(f"DATA.DATASET: {path} is Parquet: pip install pyarrow") from error
    path.stat()
    try:
        columns: dict[str, list[Any]] = parquet.read_table(path).to_pydict()
    except ArrowException as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error
    rows = zip(*columns.values(), strict=True)
    table = [["" if cell is None or cell != cell else str(cell) for cell in row] for row in rows]
    return list(enumerate([[*columns], *table], start=1))


def _files(table: _Table) -> tuple[Path, list[str]]:
    """The folder that paths start from, and the path of each image, with the ending that names may lack."""
    image_column = table.header.index(table.image_column)
    for line, cells in table.rows:
        if not cells[image_column]:
            raise DataError(f"{table.path}, line {line}: no image path")
    given = table.dataset.ROOT
    root = Path(given).expanduser() if given is not None else table.path.parent
    names = [cells[image_column] for _, cells in table.rows]
    stem = table.path.stem
    places = product(("", stem, f"{stem}_images", "images"), ("", *sorted(EXTENSIONS)))
    for folder, ending in places:
        if any((root / folder / f"{name}{ending}").is_file() for name in names[:100]):
            break
    else:
        if not root.is_dir():
            raise ConfigError(f"DATA.DATASET.ROOT: there is no folder {root}{suggest_path(root)}")
        hint = f", nor in `images` or `{stem}` there; relative paths start from DATA.DATASET.ROOT, or from "
        hint += "the manifest's folder where that is null"
        if "\\" in names[0]:
            hint = "; the paths of the manifest have backslashes: replace them by /"
        raise DataError(
            f"{table.path}, line {table.rows[0][0]}: no image {root / names[0]}, with any ending{hint}"
        )
    return root, [
        str(Path(folder, f"{name}{ending}")) if folder else f"{name}{ending}" for name in names
    ]


def _check_nesting(index: LabelIndex, source: str) -> None:
    """Refuse columns from fine to coarse: each class has one name in the next, and not vice versa."""
    for depth, (above, below) in enumerate(pairwise(index.taxonomy.names), start=1):
        parents = [parent for parent, _ in index.lookup[depth] if parent >= 0]
        names = [name for _, name in index.lookup[depth]]
        if len(set(names)) < len(names) and len(parents) == len(set(parents)):
            raise DataError(
                f"{source}: {below!r} stands after {above!r}, but it groups the classes of {above!r}; "
                "order the columns from coarse to fine with DATA.DATASET.RANKS"
            )
