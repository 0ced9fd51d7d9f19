"""Words in names: which folders, columns and cells of manifests mean splits, groups or no class."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.words import several

SPLITS = ("train", "val", "test")

_WORDS = {
    word: split
    for split, words in {
        "train": "train training trainval trn",
        "val": "val valid validation validate dev eval evaluation",
        "test": "test testing tst holdout",
    }.items()
    for word in words.split()
}
_FILLERS = (
    "sets set datasets dataset data subset split part folder "  # noqa: SIM905
    "images image imgs img photos pictures samples is".split()
)
_TRUE, _FALSE = {*"1 1.0 true yes t y".split()}, {*"0 0.0 false no f n".split()}  # noqa: SIM905
_BESIDE = "(data|image|train(ing)?|val(id|idation)?|test(ing)?|cv|k|id|index|no|name|number|type)"
_SPLITS = re.compile(
    rf"({_BESIDE} )*(split|set|subset|phase|partition|dataset|usage|k?fold)s?( {_BESIDE})*"
)
"""The words of a name of a column of splits."""
_ATTRIBUTE = re.compile(
    "(patient|subject|person|individual|location|site|place|station|camera|device|scanner|hospital|clinic"
    "|institution|annotator|rater|reader|labell?er|photographer|observer|author|owner|user|username|session"
    "|sequence|burst|video|clip|frame|slide|date|time|datetime|timestamp|month|year|source|sex|gender|age|url"
    "|license|comment|note)s?|.*id"
)
"""A word of a column's name that says group, attribute or identifier."""
is_filler = re.compile("(image|img|photo|picture|sample)s?", re.IGNORECASE).fullmatch
"""Whether a folder has a generic name, such as `images`."""
is_no_class = re.compile("unlabell?ed|extra|background|pred", re.IGNORECASE).match
"""Whether a folder beside `train` has images without labels by its name."""


def _words(name: str) -> list[str]:
    """Return the words of a name, case-folded and without digits.

    >>> _words("PatientID"), _words("Hold-out_2")
    (['patient', 'id'], ['holdout'])
    """
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", unicodedata.normalize("NFC", name)).casefold()
    return re.findall(r"[^\W\d_]+", re.sub(r"h[eo]ld[\W_]*out", "holdout", spaced))


def names_splits(column: str) -> bool:
    """Return whether the name of a column says that its cells are splits or folds.

    >>> [names_splits(name) for name in ("data_split", "KFold", "split_id", "moon_phase", "label")]
    [True, True, True, False, False]
    """
    return _SPLITS.fullmatch(" ".join(_words(column))) is not None


def names_attribute(column: str) -> bool:
    """Return whether the name of a column says that its cells are groups, attributes, identifiers or splits.

    >>> [names_attribute(name) for name in ("PatientID", "site2", "cameras", "family", "species")]
    [True, True, True, False, False]
    """
    return names_splits(column) or any(map(_ATTRIBUTE.fullmatch, _words(column)))


def parse_split_name(name: str) -> tuple[str, str] | None:
    """Return the split that a name means, and the rest of the name; None where it means none.

    >>> [parse_split_name(name) for name in ("Training", "train2017", "ValSet", "cub_test_images")]
    [('train', ''), ('train', ''), ('val', ''), ('test', 'cub')]
    >>> parse_split_name("train_test"), parse_split_name("trains")
    (None, None)
    """
    found: list[str] = []
    rest: list[str] = []
    for word in _words(name):
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
    """Return the folders of each split among the folders of a data set; empty where they are no splits.

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
    """Return the one folder of a split; its plain name wins.

    Raises:
        ConfigError: there are several.
    """
    if len(names) > 1 and split not in names:
        raise ConfigError(
            f"DATA.DATASET.{split.upper()}: null, but the folders {', '.join(names)} all look like it; "
            "name one of them"
        )
    return split if split in names else names[0]


def find_names(names: Sequence[str]) -> dict[str, str]:
    """Return the name of each split among the names of all; one alone is for training.

    >>> find_names(["train", "validation"]), find_names(["birds"])
    ({'train': 'train', 'val': 'validation'}, {'train': 'birds'})
    """
    if len(names) == 1:
        return {"train": names[0]}
    return {split: pick_folder(split, some) for split, some in find_folders(names).items()}


def is_true(cell: str) -> bool:
    """Return whether a cell of flags is set."""
    return cell.casefold() in _TRUE


def is_flags(cells: Iterable[str]) -> bool:
    """Return whether all cells are 0 or 1, or other words for them; empty ones do not count."""
    return {cell.casefold() for cell in cells} - {""} <= _TRUE | _FALSE


def parse_split_cells(column: str, cells: Iterable[str]) -> dict[str, str] | None:
    """Return the split that each value of a manifest's column means; None if it is not a split column.

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
    columns: Mapping[str, Sequence[str]], given: str | None, *, is_strict: bool
) -> tuple[str, dict[str, str]] | None:
    """Return the column of splits of a manifest, and the split of each of its values; None if it has none.

    Args:
        columns: the cells of each column.
        given: DATA.DATASET.SPLIT_COLUMN.
        is_strict: refuse a column that is called like splits, but has other values, where no column divides.

    Raises:
        ConfigError: values of a column mean no split, or two columns are columns of splits.
    """
    found, others = {}, [*filter(None, [given])]
    named = {name: names_splits(name) or parse_split_name(name) is not None for name in columns}
    has_flags = any(is_flags(cells) for column, cells in columns.items() if not named[column])
    for column, cells in columns.items():
        is_about = names_splits(column)
        if has_flags and is_flags(cells) and not (is_about or column.casefold().startswith("is")):
            continue  # one of several columns of classes, such as `train` beside `car`
        is_named = named[column] or column == given
        meanings = parse_split_cells(column, cells) if is_named and any(cells) else None
        if meanings:
            found[column] = meanings
        elif is_about and is_strict and len({*cells} - {""}) > 1:
            others.append(column)
    if len(found) > 1:
        raise ConfigError(
            f"DATA.DATASET.SPLIT_COLUMN: null, but the columns {', '.join(found)} all look like it; name "
            "one of them"
        )
    if others and not found:
        values = sorted({*columns[others[0]]} - {""})
        remedy = "correct them, or name another column"
        if all(map(str.isdecimal, values)):
            remedy = "for folds, name the column here, and the fold in DATA.DATASET.FOLD"
        raise ConfigError(
            f"DATA.DATASET.SPLIT_COLUMN: the values of {others[0]!r} ({several(values)}) are not train, val "
            f"and test, or true and false in a column such as `is_valid`; {remedy}. Labels stand in a column "
            "of DATA.DATASET.LEVELS; rename a column that is neither"
        )
    return next(iter(found.items()), None)
