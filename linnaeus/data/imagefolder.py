"""Folders of images: nested class folders, or the folder names of iNaturalist 2021."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_high
from unicodedata import normalize

from linnaeus.config.schema import DatasetConfig
from linnaeus.data import EXTENSIONS_TEXT, is_ignored, is_image, unread_note
from linnaeus.data.image_files import FoundFiles, Listing, optional_test
from linnaeus.data.splits import (
    SPLITS,
    find_folders,
    is_filler,
    is_no_class,
    parse_split_name,
    pick_folder,
)
from linnaeus.data.taxonomy import LabelIndex, index_labels, require_classes
from linnaeus.runtime.errors import ConfigError, DataError
from linnaeus.runtime.files import STUDY, SWEEP, suggest_path
from linnaeus.runtime.run_folder import CLAIMS, RUN
from linnaeus.runtime.words import counted, several

_OF_RUNS = frozenset((RUN, CLAIMS, SWEEP, STUDY))
"""Files in a run directory or sweep as soon as the data are read."""
_INAT_FOLDER = re.compile(r"\d+_((?:[^_]+_){5})([^_]+)_(.+)")
"""A class folder of iNaturalist 2021: number, kingdom to family, genus, epithet."""


def read_folders(
    dataset: DatasetConfig, *, evaluated: bool = False, num_run_levels: int | None = None
) -> FoundFiles:
    """Find the image files of a dataset whose folders are their classes.

    Each level of nested folders is a level of the taxonomy, but folders of splits are none. With
    `ALLOW_COARSE`, images in a coarser folder have unknown finer labels. Files and folders are read in sorted
    order. Hidden ones, files of other kinds and folders of runs are ignored; symbolic links are followed. A
    level of folders with one name for all images, as in `crow/images/1.jpg`, is no level.

    Args:
        dataset: the DATA.DATASET node.
        evaluated: find the images to evaluate alone: validation folders, else test folders, else all images.
        num_run_levels: number of levels of the run that is evaluated, where the node is the run's.

    Raises:
        ConfigError: a folder that is missing, `LEVELS` that do not fit the folders, or folders that look like
            splits and cannot be told apart.
        DataError: a folder that is unreadable, empty or of another depth.
    """
    notes: list[str] = []
    unread = Counter[str]()
    folders = _split_folders(dataset, notes)
    held_out = [split for split in SPLITS[1:] if split in folders]
    wanted = (held_out or ["train"])[:1] if evaluated else SPLITS
    if "train" in wanted:
        _require_training(folders, dataset)
    # Other data may have other LEVELS than the run.
    levels = None if evaluated and num_run_levels is None else dataset.LEVELS
    splits: dict[str, Listing] = {}
    depth = num_run_levels
    for split in wanted:
        if split not in folders:
            continue
        with optional_test(notes, split, dataset):
            found = _read_folder(folders[split], split, dataset, depth or 1, unread, notes)
            num_levels = len(found.lineages[0])
            depth = depth or num_levels
            if num_levels != depth:
                raise DataError(
                    f"{folders[split]}: {counted(num_levels, 'level')} of class folders, but {depth} "
                    f"elsewhere, such as for {os.fsdecode(found.paths[0])}"
                )
            splits[split] = found
    if dataset.FOLD is not None and "val" in splits and not evaluated:
        raise ConfigError(
            f"DATA.DATASET.FOLD: {splits['val'].source} is the validation split; leave FOLD out, or name "
            f"the folder of the folds in DATA.DATASET.ROOT, such as {splits['train'].source}"
        )
    notes += filter(None, [unread_note(unread)])
    make_index = functools.partial(_index, splits.get("train"), levels)
    return FoundFiles(splits, None, notes, make_index)


def _split_folders(dataset: DatasetConfig, notes: list[str]) -> dict[str, Path]:
    """Return the folder of each existing split; without one, ROOT is the training folder.

    A TRAIN that is named may be missing.
    """
    if dataset.ROOT is None:
        raise ConfigError("DATA.DATASET.ROOT: name the folder that holds the images")
    root = Path(dataset.ROOT).expanduser()
    subfolders = _subfolders(root)
    keys = {split: getattr(dataset, split.upper()) for split in SPLITS}
    given = {split: root / name for split, name in keys.items() if name is not None}
    if len(subfolders) == 1 and not given:  # as an archive is unpacked
        wrapped = root / subfolders[0]
        if len(find_folders(_subfolders(wrapped))) > 1:
            return _split_folders(replace(dataset, ROOT=str(wrapped)), notes)
    for split in given.keys() - {"train"}:
        _check_folder(given[split], split.upper())
    rest = [name for name in subfolders if root / name not in given.values()]
    named = find_folders(rest, is_given=bool(given))
    if not named and any(map(parse_split_name, rest)):  # such as `train` beside unlabeled images
        has_classes = (name for name in rest if len(_subfolders(root / name)) > 1)
        named = find_folders(name for name in has_classes if not is_no_class(name))
    found = {
        split: root / pick_folder(split, named[split]) for split in named.keys() - given.keys()
    }
    read = {os.path.relpath(path, root).split("/")[0] for path in (found | given).values()}
    beside = sorted({*subfolders} - read)
    if not given and beside and not any(_subfolders(path) for path in found.values()):
        found = {}  # classes beside others, that are called like splits
    folders = found | given
    if folders and beside and "." not in read:
        notes.append(f"{root}: folders beside the splits are not read: {several(beside)}")
    return {split: folders[split] for split in SPLITS if split in folders} or {"train": root}


def _entries(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        hint = "" if folder.exists() else suggest_path(folder)
        raise ConfigError(
            f"DATA.DATASET.ROOT: cannot read folder {folder}: {error.strerror}{hint}"
        ) from error


def _subfolders(folder: Path) -> list[str]:
    """Return the folders in a folder. Runs are left out where they could hide splits: beside a few others."""
    found = [path for path in _entries(folder) if path.is_dir() and not is_ignored(path.name)]
    return [path.name for path in found if len(found) > 9 or not _holds_runs(path)]


def _holds_runs(folder: Path) -> bool:
    """Return whether a folder is a run directory or a sweep, or all folders below are."""
    _, folders, files = next(os.walk(folder), ("", [], []))
    below = [folder / name for name in folders if not is_ignored(name)]
    is_run = not _OF_RUNS.isdisjoint([*folders, *files])
    return is_run or (below != [] and all(map(_holds_runs, below)))


def _require_training(root: dict[str, Path], dataset: DatasetConfig) -> None:
    """Refuse a root without a folder of training, which an evaluation of other samples does not need."""
    if "train" not in root:
        raise ConfigError(
            f"DATA.DATASET.ROOT: {dataset.ROOT} has no folder `train`; name the training folder in "
            "DATA.DATASET.TRAIN (`.` is ROOT itself)"
        )
    _check_folder(root["train"], "TRAIN")


def _check_folder(folder: Path, key: str) -> None:
    if not folder.is_dir():
        raise ConfigError(f"DATA.DATASET.{key}: there is no folder {folder}{suggest_path(folder)}")


def _read_folder(
    folder: Path,
    split: str,
    dataset: DatasetConfig,
    pad_to: int,
    unread: Counter[str],
    notes: list[str],
) -> Listing:
    """Return the images of a folder; `unread` counts other files.

    Where most images lie as deep as `LEVELS` has names, folders further below are no classes.
    """
    images = _walk(folder, unread, need_all=split == "train")
    parts = [_class_names(folder, path.rpartition("/")[0]) for path in images]
    constant = set(parts[0]).intersection(*{*parts})
    if min(map(len, parts)) - len(constant) < pad_to:
        constant = {*filter(is_filler, constant)}
    if constant:
        parts = [tuple(name for name in part if name not in constant) for part in parts]
    if split == "train" and dataset.LEVELS is None:
        _check_twins(folder, parts)
    for image, part in zip(images, parts, strict=True):
        if not part:
            raise DataError(
                f"{folder / image}: is in no class folder; move it into one, or list images and classes "
                "in a manifest (data=manifest)"
            )
    num_named = len(dataset.LEVELS or ())
    below = [image for image, part in zip(images, parts, strict=True) if len(part) > num_named]
    if below and median_high(map(len, parts)) == num_named:
        parts = [part[:num_named] for part in parts]
        notes.append(
            f"{folder}: {counted(len(below), 'image')} in subfolders of classes count for the class, because "
            f"DATA.DATASET.LEVELS names {counted(num_named, 'level')}; such as {below[0]}"
        )
    coarse = dataset.ALLOW_COARSE
    if coarse is False or (coarse is None and split == "train"):
        _check_depth(folder, images, parts, only_deeper=coarse is None)
    depth = max(1 if coarse is False else pad_to, *map(len, parts))
    lineages = [part + (None,) * (depth - len(part)) for part in parts]
    return Listing.of(str(folder), folder, images, lineages)


@functools.lru_cache(maxsize=1)
def _class_names(folder: Path, parents: str) -> tuple[str, ...]:
    """Return the names of class folders, with one spelling for each accented letter.

    The name of a folder of iNaturalist 2021 has the names of seven levels.

    Raises:
        DataError: a name is not UTF-8.
    """
    if not parents:
        return ()
    try:
        parents.encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(str(folder / parents)).decode("utf-8", "backslashreplace")
        raise DataError(
            f"{shown}: the name of this class folder is not UTF-8; rename it, such as with "
            "`convmv -f latin1 -t utf8 --notest`"
        ) from error
    if match := _INAT_FOLDER.fullmatch(parents):
        # The epithet alone occurs in many genera.
        return *match[1].split("_")[:-1], match[2], f"{match[2]} {match[3].replace('_', ' ')}"
    return tuple(normalize("NFC", parents).split("/"))


def _check_twins(folder: Path, parts: Iterable[tuple[str, ...]]) -> None:
    """Refuse folders that hold nearly the same class folders: splits with unknown names, folds, sites.

    A name then stands in half of the other folders on average, or in two of them.
    """
    pairs = {(part[0], part[1].casefold()): part[1] for part in {*parts} if len(part) > 1}
    above = sorted({name for name, _ in pairs})
    counts = Counter(name for _, name in pairs)
    shared = sorted({name for (_, key), name in pairs.items() if counts[key] > 1})
    if len(shared) > 1 and len(pairs) >= len(counts) * (1 + min(2, (len(above) - 1) / 2)):
        raise ConfigError(
            f"DATA.DATASET.ROOT: the folders {several(above)} of {folder} hold the same folders "
            f"({several(shared)}). Splits: name them in DATA.DATASET.TRAIN and VAL; folds "
            "(DATA.DATASET.FOLD) need a manifest. Data sets: name one here, or a list to join them. Classes: "
            "name both levels in DATA.DATASET.LEVELS"
        )


def _check_depth(
    folder: Path, images: list[str], parts: list[tuple[str, ...]], *, only_deeper: bool
) -> None:
    """Refuse images in another number of class folders than most, or in a larger one alone.

    A stray folder inside of a class folder looks like a level.
    """
    usual = median_high(map(len, parts))
    odd = [
        (str(Path(image).parent), image)
        for image, part in zip(images, parts, strict=True)
        if len(part) > usual or (len(part) < usual and not only_deeper)
    ]
    if odd:
        first = dict(reversed(odd))  # of each folder
        raise DataError(
            f"{folder}: {len(odd)} of {counted(len(images), 'image')} are not in "
            f"{counted(usual, 'class folder')} like most: {several([*first.values()][::-1])}; every level of "
            "folders is a level of the taxonomy. Move these images, set DATA.DATASET.ALLOW_COARSE True if "
            "finer labels are unknown, or name the levels in DATA.DATASET.LEVELS if deeper ones are none"
        )


def _walk(folder: Path, unread: Counter[str], *, need_all: bool) -> list[str]:
    """Return the paths of all images, relative to the folder, files before folders and each sorted.

    `unread` counts the files with other endings.
    """
    found: list[str] = []
    empty: list[str] = []

    def fail(error: OSError) -> None:
        raise DataError(f"cannot read folder {error.filename}: {error.strerror}") from error

    for path, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        if folders and path != str(folder) and _holds_runs(Path(path)):
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not is_ignored(name))
        for link in (Path(path, name) for name in folders):
            if link.is_symlink() and Path(path).resolve().is_relative_to(link.resolve()):
                raise DataError(f"{link}: a symbolic link leads back to a folder above it")
        inside = path[len(str(folder)) :].lstrip("/")
        num_before = len(found)
        for name in sorted(files):
            if is_image(name, unread):
                found.append(os.path.join(inside, name))  # noqa: PTH118 (hot path)
        if len(found) == num_before and not folders and parse_split_name(Path(path).name) is None:
            empty.append(path)
    note = f"; {unread_note(unread)}" if unread else ""
    if not found:
        raise DataError(f"{folder}: no image in it or below (looked for {EXTENSIONS_TEXT}){note}")
    if empty and need_all:
        raise DataError(
            f"no image in class folder {several(empty)}; remove the folder or put images into it{note}"
        )
    return found


def _index(train: Listing | None, names: Sequence[str] | None) -> LabelIndex:
    """Return the classes of the training folders."""
    assert train is not None
    depth = len(train.lineages[0])
    if names is None:
        names = ["class"] if depth == 1 else [f"level{level}" for level in range(1, depth + 1)]
    if len(names) != depth:
        raise ConfigError(
            f"DATA.DATASET.LEVELS: {len(names)} names for the {depth} level(s) of folders in {train.source}"
        )
    index = index_labels(names, train.lineages)
    remedy = "leave out that level of folders" if depth > 1 else "add the folders of other classes"
    require_classes(index.taxonomy, train.source, remedy)
    return index
