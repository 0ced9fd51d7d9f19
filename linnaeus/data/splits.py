"""Names of splits: which folders, manifest columns and cells mean training, validation or test data."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

from linnaeus.errors import ConfigError

SPLITS = ("train", "val", "test")

_WORDS = {
    word: split
    for split, words in {
        "train": "train training trainval trn",
        "val": "val valid validation validate dev eval evaluation",
        "test": "test testing tst",
    }.items()
    for word in words.split()
}
_FILLERS = (
    *("sets", "set", "datasets", "dataset", "data", "subset", "split", "part", "folder"),
    *("images", "image", "imgs", "img", "photos", "pictures", "samples", "is"),
)
_TRUE, _FALSE = {"1", "1.0", "true", "yes", "t", "y"}, {"0", "0.0", "false", "no", "f", "n"}
_COLUMNS = ("split", "fold", "subset", "set", "partition", "phase", "usage")


def parse_split_name(name: str) -> tuple[str, str] | None:
    """The split that a name means, and the rest of the name; None where it means none.

    >>> [parse_split_name(name) for name in ("Training", "train2017", "ValSet", "cub_test_images")]
    [('train', ''), ('train', ''), ('val', ''), ('test', 'cub')]
    >>> parse_split_name("train_test"), parse_split_name("trains")
    (None, None)
    """
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", unicodedata.normalize("NFC", name))
    found: list[str] = []
    rest: list[str] = []
    for word in re.findall(r"[^\W\d_]+", spaced.casefold()):
        bare = next((word.removesuffix(end) for end in _FILLERS if word.endswith(end)), word)
        split = _WORDS.get(word) or _WORDS.get(bare)
        if split is not None:
            found.append(split)
        elif bare and word not in _FILLERS:
            rest.append(word)
    if found == ["train", "val"]:  # training and validation data in one
        found = ["train"]
    return (found[0], " ".join(rest)) if len(found) == 1 else None


def find_folders(names: Iterable[str], *, is_given: bool = False) -> dict[str, list[str]]:
    """The folders of each split among the folders of a data set; empty where they are no splits.

    Folders are splits where one is for training and another is not, or where each of them is a split by its
    plain name. A data set's name in front or behind has to be the same for all. With `is_given`, the
    configuration names one of the splits, and plain names are enough.

    >>> find_folders(["Training", "Testing"]), find_folders(["car", "plane", "train"])
    ({'train': ['Training'], 'test': ['Testing']}, {})
    >>> find_folders(["test_tube", "train_station"]), find_folders(["train"])
    ({}, {'train': ['train']})
    """
    names = sorted(names)
    by_rest: dict[str, dict[str, list[str]]] = {}
    for name in names:
        if (meaning := parse_split_name(name)) is not None:
            by_rest.setdefault(meaning[1], {}).setdefault(meaning[0], []).append(name)
    for rest in sorted(by_rest):
        found = by_rest[rest]
        is_all = sum(map(len, found.values())) == len(names)
        if (not rest and (is_all or is_given)) or ("train" in found and len(found) > 1):
            return {split: found[split] for split in SPLITS if split in found}
    return {}


def pick_folder(split: str, names: Sequence[str]) -> str:
    """The one folder of a split; its plain name wins.

    Raises:
        ConfigError: there are several.
    """
    if len(names) > 1 and split not in names:
        raise ConfigError(
            f"DATA.DATASET.{split.upper()}: null, but the folders {', '.join(names)} all look like it; "
            "name one of them"
        )
    return split if split in names else names[0]


def find_nested_splits(paths: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """The split of each path of folders whose class folders are divided: (split, the path without it).

    Empty where they are not: most paths need a folder such as `train`, and there must be another split. The
    name of a split may repeat that of the folder above it, as in `cat/cat_train`.

    >>> find_nested_splits([("cat", "train"), ("cat", "val")])
    {('cat', 'train'): ('train', 'cat'), ('cat', 'val'): ('val', 'cat')}
    """
    paths = list(paths)
    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    for path in paths:
        for place in reversed(range(1, len(path))):
            meaning = parse_split_name(path[place])
            above = re.findall(r"[^\W\d_]+", path[place - 1].casefold())
            if meaning is not None and set(meaning[1].split()) <= {*above}:
                found[path] = (meaning[0], *path[:place], *path[place + 1 :])
                break
    splits = {split for split, *_ in found.values()}
    return found if "train" in splits and len(splits) > 1 and len(found) > 0.9 * len(paths) else {}


def is_true(cell: str) -> bool:
    """Whether a cell of flags is set."""
    return cell.casefold() in _TRUE


def is_flags(cells: Iterable[str]) -> bool:
    """Whether all cells are 0 or 1, or other words for them; empty ones do not count."""
    return {cell.casefold() for cell in cells} - {""} <= _TRUE | _FALSE


def parse_split_cells(column: str, cells: Iterable[str]) -> dict[str, str] | None:
    """The split that each value of a manifest's column means; None where it is no column of splits.

    >>> parse_split_cells("Set", ["Training", "Test"]), parse_split_cells("is_valid", ["True", "False"])
    ({'Test': 'test', 'Training': 'train'}, {'False': 'train', 'True': 'val'})
    >>> parse_split_cells("label", ["train", "car"]), parse_split_cells("fold", ["0", "1"])
    (None, None)
    """
    values = sorted({*cells} - {""})
    meaning = parse_split_name(column)
    if meaning is not None and is_flags(values):
        other = "val" if meaning[0] == "train" else "train"
        return {v: meaning[0] if is_true(v) else other for v in values}
    found = {value: parse_split_name(value) for value in values}
    return {v: each[0] for v, each in found.items() if each} if all(found.values()) else None


def find_column(
    columns: Mapping[str, Sequence[str]], given: str | None
) -> tuple[str, dict[str, str]] | None:
    """The column of splits of a manifest, and the split of each of its values; None where it has none.

    Args:
        columns: the cells of each column.
        given: DATA.DATASET.SPLIT_COLUMN.

    Raises:
        ConfigError: values of the given column mean no split, or two columns are columns of splits.
    """
    if given is not None:
        meanings = parse_split_cells(given, columns[given])
        if not meanings:
            values = ", ".join(sorted({*columns[given]})[:5])
            raise ConfigError(
                f"DATA.DATASET.SPLIT_COLUMN: the values of {given!r} ({values}) are not train, val and "
                "test, or true and false in a column such as `is_valid`"
            )
        return given, meanings
    found = {}
    named = {column: parse_split_name(column) is not None for column in columns}
    has_flags = any(is_flags(cells) for column, cells in columns.items() if not named[column])
    for column, cells in columns.items():
        if has_flags and is_flags(cells) and not column.casefold().startswith("is"):
            continue  # one of several columns of classes, such as `train` beside `car`
        is_named = column.casefold() in _COLUMNS or named[column]
        meanings = parse_split_cells(column, cells) if is_named and any(cells) else None
        if meanings:
            found[column] = meanings
    if len(found) > 1:
        raise ConfigError(
            f"DATA.DATASET.SPLIT_COLUMN: null, but the columns {', '.join(found)} all look like it; name "
            "one of them"
        )
    return next(iter(found.items()), None)
