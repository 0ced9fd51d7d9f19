"""CSV manifests: a column of image paths, and one of class names per level; an empty cell is unknown.

With `DATA.DATASET.LABEL_SEPARATOR` a cell holds several names; the separator alone is a sample of no class.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise, product
from pathlib import Path

from linnaeus.config.schema import DataConfig, DatasetConfig
from linnaeus.data import EXTENSIONS
from linnaeus.data.bundle import DataBundle, OnMain
from linnaeus.data.image_files import EvaluatedFiles, Listing, build_files, roots_of
from linnaeus.data.taxonomy import LabelIndex, index_labels, require_classes
from linnaeus.errors import ConfigError, DataError
from linnaeus.words import several

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


@dataclass(frozen=True)
class _Table:
    """A CSV file: its header, its rows, each with the number of its last line, and the node of its root."""

    path: Path
    header: list[str]
    rows: list[tuple[int, list[str]]]
    dataset: DatasetConfig

    @property
    def image_column(self) -> str:
        """The column of image paths: that of the configuration, else the first with a usual name."""
        usual = [name for name in _IMAGE_COLUMNS if name in self.header]
        name = self.dataset.IMAGE_COLUMN or (usual or _IMAGE_COLUMNS)[0]
        self.require([name], "DATA.DATASET.IMAGE_COLUMN")
        return name

    def require(self, names: Sequence[str], key: str) -> None:
        """Refuse a file without one of the columns; `key` names them, for the message."""
        for name in names:
            if name not in self.header:
                close = get_close_matches(name, self.header, 1)
                has = f"the file has {', '.join(map(repr, self.header))}"
                hint = f"did you mean {close[0]!r}?" if close else has
                raise DataError(f"{self.path}, line 1: no column {name!r} ({key}); {hint}")


def build_manifest(config: DataConfig, on_main: OnMain) -> DataBundle:
    """Image files listed in CSV manifests.

    Relative image paths start from `ROOT`, or from the manifest's own folder where `ROOT` is null.

    Raises:
        ConfigError: a manifest that cannot be read, or the image column among the `RANKS`.
        DataError: a manifest that is empty or malformed (the message names file and line); a level
            with one class; columns from fine to coarse; a validation class without a training sample.
    """
    paths = [(node, *_manifest_paths(node)) for node in roots_of(config.DATASET)]
    trains, index, levels = _training([_read(path, node) for node, path, _ in paths])
    _check_nesting(index, trains[0].source)
    vals = [
        _listing(table, levels)
        for table in [_read(val, node) for node, _, val in paths if val is not None]
    ]
    return build_files({"train": trains, "val": vals}, index, config, on_main)


def evaluated_manifest(
    dataset: DatasetConfig, level_names: Sequence[str | None], *, is_own: bool
) -> EvaluatedFiles:
    """The images that a trained model is to be evaluated on.

    These are those of the validation manifest where there is one, else all of the training manifest. Columns
    of levels may be missing, but not in the run's own training manifest.

    Args:
        dataset: the DATA.DATASET node. As many RANKS as the run has levels name their columns.
        level_names: names of the run's levels, coarse to fine; None where one has no name.
        is_own: whether the node is that of the run.
    """
    paths = [(node, *_manifest_paths(node)) for node in roots_of(dataset)]
    vals = [_read(val, node) for node, _, val in paths if val is not None]
    tables = vals or [_read(path, node) for node, path, _ in paths]
    if not vals and is_own:
        trains, index, levels = _training(tables)
        return EvaluatedFiles(trains, tuple(levels), is_val=False, index=index)
    columns = _columns_of_levels(tables[0], dataset, level_names)
    listings = [_listing(table, list(columns.values())) for table in tables]
    return EvaluatedFiles(listings, tuple(columns), is_val=bool(vals))


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
    columns = {name: rank for name, rank in zip(names, ranks, strict=True) if rank in table.header}
    if not columns:
        raise DataError(
            f"{table.path}, line 1: no column {' or '.join(map(repr, names))} with labels, but "
            f"{', '.join(map(repr, table.header))}; name those of {', '.join(names)}, in this order, in "
            "DATA.DATASET.RANKS"
        )
    return columns


def _training(tables: Sequence[_Table]) -> tuple[list[Listing], LabelIndex, list[str]]:
    """The training samples of each root, the classes that they define, and the columns of labels."""
    table, path, dataset = tables[0], tables[0].path, tables[0].dataset
    image = table.image_column
    named = [name for name in table.header if name]
    twice = sorted({name for name in named if named.count(name) > 1})
    if twice:
        raise DataError(f"{path}, line 1: column {several(twice)} occurs more than once")
    levels = (
        dataset.RANKS if dataset.RANKS is not None else [name for name in named if name != image]
    )
    table.require(levels, "DATA.DATASET.RANKS")
    if not levels:
        raise DataError(f"{path}, line 1: no column with labels beside {image!r}")
    if image in levels:
        raise ConfigError(f"DATA.DATASET.RANKS: {image!r} is the image column")
    trains = [_listing(table, levels) for table in tables]
    train = Listing.joined(trains)
    separator = dataset.LABEL_SEPARATOR
    if separator and not any(
        separator in (cell or "") for names in train.lineages for cell in names
    ):
        raise ConfigError(
            f"DATA.DATASET.LABEL_SEPARATOR: {separator!r} is in no cell of {train.source}"
        )
    index = index_labels(levels, train.lineages, separator)
    require_classes(index.taxonomy, train.source, "choose other columns with DATA.DATASET.RANKS")
    return trains, index, list(levels)


def _manifest_paths(dataset: DatasetConfig) -> tuple[Path, Path | None]:
    """The training manifest, which an evaluation of another one does not need, and that of validation."""
    root = Path(dataset.ROOT or "").expanduser()
    train = root / Path(dataset.TRAIN or "train.csv").expanduser()
    if dataset.VAL is not None:
        return train, root / Path(dataset.VAL).expanduser()
    val = (root if dataset.ROOT else train.parent) / "val.csv"
    return train, val if val.is_file() and val != train else None


def _read(path: Path, dataset: DatasetConfig) -> _Table:
    """Read a CSV file, with or without a byte-order mark.

    Raises:
        DataError: it has no header or no row, or a row has not as many cells as the header.
    """
    rows: list[tuple[int, list[str]]] = []
    line = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            for cells in reader:
                line = reader.line_num
                if any(cell.strip() for cell in cells):
                    rows.append((line, [cell.strip() for cell in cells]))
    except OSError as error:
        raise ConfigError(
            f"DATA.DATASET: cannot read manifest {path}: {error.strerror}; name it in DATA.DATASET.TRAIN or "
            "DATA.DATASET.VAL, or its folder in DATA.DATASET.ROOT"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        is_text = isinstance(error, csv.Error)
        problem = f"broken CSV: {error}" if is_text else "not UTF-8 text; save it as `CSV UTF-8`"
        raise DataError(f"{path}, line {line + 1} or after: {problem}") from error
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
    return _Table(path, header, rows, dataset)


def _listing(table: _Table, levels: Sequence[str]) -> Listing:
    table.require(levels, "as in the training manifest")
    dataset, image_column = table.dataset, table.header.index(table.image_column)
    label_columns = [table.header.index(level) for level in levels]
    for line, cells in table.rows:
        if not cells[image_column]:
            raise DataError(f"{table.path}, line {line}: no image path")
    root = Path(dataset.ROOT).expanduser() if dataset.ROOT is not None else table.path.parent
    names = [cells[image_column] for _, cells in table.rows]
    stem = table.path.stem
    places = product(("", stem, f"{stem}_images", "images"), ("", *sorted(EXTENSIONS)))
    for folder, ending in places:
        if any((root / folder / f"{name}{ending}").is_file() for name in names[:100]):
            break
    else:
        raise DataError(
            f"{table.path}, line {table.rows[0][0]}: no image {root / names[0]}, with any ending, nor in "
            f"`images` or `{stem}` there; relative paths start from DATA.DATASET.ROOT, or from the "
            "manifest's folder where that is null"
        )
    return Listing(
        str(table.path),
        root,
        [str(Path(folder, f"{name}{ending}")) if folder else f"{name}{ending}" for name in names],
        [tuple(cells[column] or None for column in label_columns) for _, cells in table.rows],
    )


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
