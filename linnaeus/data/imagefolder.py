"""Folders of images: nested class folders, or the folder names of iNaturalist 2021."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from linnaeus.config.schema import DataConfig, DatasetConfig
from linnaeus.data import EXTENSIONS
from linnaeus.data.bundle import DataBundle, OnMain
from linnaeus.data.image_files import EvaluatedFiles, Listing, build_files, roots_of
from linnaeus.data.taxonomy import LabelIndex, index_labels, require_classes
from linnaeus.errors import ConfigError, DataError
from linnaeus.files import suggest_path
from linnaeus.words import counted, several

INAT_RANKS = ("kingdom", "phylum", "class", "order", "family", "genus", "species")

_INAT_FOLDER = re.compile(r"\d+((?:_[^_]+){6})_(.+)")
_VAL_NAMES = ("val", "valid", "validation")
_SPLIT_NAMES = frozenset(("train", "test", *_VAL_NAMES))


def build_imagefolder(config: DataConfig, on_main: OnMain) -> DataBundle:
    """Image files whose folders are their classes.

    Each level of nested folders is a level of the taxonomy. With `ALLOW_COARSE`, images in a coarser folder
    have unknown finer labels. Files and folders are read in sorted order. Hidden ones and files of other
    kinds are ignored; symbolic links are followed.

    Raises:
        ConfigError: a folder that is missing, or `RANKS` that do not fit the folders.
        DataError: a folder that is unreadable, empty or of another depth; a level with one class; a
            validation class without a training sample.
    """
    dataset: DatasetConfig = config.DATASET
    splits = [(node, *_split_folders(node)) for node in roots_of(dataset)]
    trains, inat = _read([_training(train, node) for node, train, _ in splits], dataset)
    train, depth = Listing.joined(trains), len(trains[0].lineages[0])
    dataset = replace(dataset, FOLDER_NAMES="inat2021" if inat else "nested")
    val_folders = dict.fromkeys(val for *_, val in splits if val is not None)
    vals, _ = _read(val_folders, dataset, depth, need_all=False)
    index = _index(train, dataset.RANKS, inat)
    remedy = "add the folders of other classes"
    if len(index.taxonomy.levels) > 1:
        remedy = (
            "leave it out with DATA.DATASET.RANKS" if inat else "leave out that level of folders"
        )
    require_classes(index.taxonomy, train.source, remedy)
    return build_files(trains, vals, index, config, on_main)


def evaluated_folder(dataset: DatasetConfig, own_depth: int | None) -> EvaluatedFiles:
    """The images that a trained model is to be evaluated on.

    These are the validation folders where there are any, also a folder `test` where the dataset is not the
    run's own; else all images. `own_depth` is the number of levels of the run's folders where the node is
    the run's. Errors are those of `build_imagefolder`.
    """
    val_names = _VAL_NAMES if own_depth else (*_VAL_NAMES, "test")
    splits = [(node, *_split_folders(node, val_names)) for node in roots_of(dataset)]
    vals = [val for *_, val in splits if val is not None]
    folders = vals or [_training(train, node) for node, train, _ in splits]
    listings, inat = _read(folders, dataset, own_depth, need_all=not vals)
    index = (
        _index(Listing.joined(listings), dataset.RANKS, inat) if own_depth and not vals else None
    )
    return EvaluatedFiles(listings, INAT_RANKS if inat else None, bool(vals), index)


def _split_folders(
    dataset: DatasetConfig, val_names: Sequence[str] = _VAL_NAMES
) -> tuple[Path | None, Path | None]:
    """The folders of training and of validation; each is None where there is none.

    Without either, ROOT itself is the folder of training. A TRAIN that is named may be missing.
    """
    if dataset.ROOT is None:
        raise ConfigError("DATA.DATASET.ROOT: name the folder that holds the images")
    root = Path(dataset.ROOT).expanduser()
    try:
        subfolders = {path.name for path in root.iterdir() if path.is_dir() and path.name[0] != "."}
    except OSError as error:
        hint = "" if root.exists() else suggest_path(root)
        raise ConfigError(
            f"DATA.DATASET.ROOT: cannot read folder {root}: {error.strerror}{hint}"
        ) from error
    train, val = (None if name is None else root / name for name in (dataset.TRAIN, dataset.VAL))
    if val is not None:
        _check_folder(val, "VAL")
    if train is None:
        if val is None and not _are_splits(subfolders, val_names):
            return root, None
        train = root / "train" if "train" in subfolders else None
    names = (name for name in val_names if name in subfolders and root / name != train)
    return train, val or next((root / name for name in names), None)


def _training(train: Path | None, dataset: DatasetConfig) -> Path:
    """The folder of training, which an evaluation of other samples does not need."""
    if train is None:
        raise ConfigError(
            f"DATA.DATASET.ROOT: {dataset.ROOT} has no folder `train`; name the training folder in "
            "DATA.DATASET.TRAIN (`.` is ROOT itself)"
        )
    _check_folder(train, "TRAIN")
    return train


def _check_folder(folder: Path, key: str) -> None:
    if not folder.is_dir():
        raise ConfigError(f"DATA.DATASET.{key}: there is no folder {folder}{suggest_path(folder)}")


def _are_splits(subfolders: set[str], val_names: Sequence[str]) -> bool:
    """Whether the folders are splits, not classes: `train` may be a class beside `car` and `plane`."""
    return bool(subfolders & {"train", *val_names}) and (
        subfolders <= _SPLIT_NAMES or ("train" in subfolders and bool(subfolders & set(_VAL_NAMES)))
    )


def _read(
    folders: Iterable[Path],
    dataset: DatasetConfig,
    depth: int | None = None,
    *,
    need_all: bool = True,
) -> tuple[list[Listing], bool]:
    """All images of each folder, and whether class folders are named as in iNaturalist 2021.

    The folders have `depth` levels, or as many as the first of them. With `need_all`, a class folder without
    an image is an error.
    """
    listings: list[Listing] = []
    inat, pad_to = False, depth or 1
    for folder in folders:
        listing, inat = _read_one(folder, dataset, pad_to, need_all=need_all)
        listings.append(listing)
        levels, depth = len(listing.lineages[0]), depth or len(listing.lineages[0])
        if levels != depth:
            raise DataError(
                f"{folder}: {counted(levels, 'level')} of class folders, but {depth} elsewhere"
            )
        dataset = replace(dataset, FOLDER_NAMES="inat2021" if inat else "nested")
    return listings, inat


def _read_one(
    folder: Path, dataset: DatasetConfig, pad_to: int, *, need_all: bool
) -> tuple[Listing, bool]:
    images, kind = _find_images(folder, need_all=need_all), dataset.FOLDER_NAMES
    parts = [tuple(path.split("/")[:-1]) for path in images]
    matches = {
        name: _INAT_FOLDER.fullmatch(name) for name in sorted({"/".join(part) for part in parts})
    }
    others = [name for name, match in matches.items() if match is None]
    if kind == "nested" or (kind == "auto" and len(others) == len(matches)):
        _check_depth(folder, images, parts, dataset.ALLOW_COARSE)
        depth = max(pad_to if dataset.ALLOW_COARSE else 1, *map(len, parts))
        padded = {part: part + (None,) * (depth - len(part)) for part in set(parts)}
        return Listing(str(folder), folder, images, [padded[part] for part in parts]), False
    _check_depth(folder, images, parts, allow_coarse=False)
    if others:
        raise DataError(
            f"{folder}: not named like `00000_Animalia_Chordata_...` (number, then kingdom to species): "
            f"{several(others)}; rename, or set DATA.DATASET.FOLDER_NAMES nested"
        )
    lineages = {}
    for name, match in matches.items():
        above = match[1].split("_")[1:]  # type: ignore[index]
        # The last part is the epithet alone, which occurs in many genera.
        lineages[name] = (*above, f"{above[-1]} {match[2].replace('_', ' ')}")  # type: ignore[index]
    return Listing(str(folder), folder, images, [lineages["/".join(part)] for part in parts]), True


def _find_images(folder: Path, *, need_all: bool) -> list[str]:
    """The paths of all images, relative to the folder, files before folders and each sorted."""
    found: list[str] = []
    empty: list[str] = []

    def fail(error: OSError) -> None:
        raise DataError(f"cannot read folder {error.filename}: {error.strerror}") from error

    for path, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for link in (Path(path, name) for name in folders):
            if link.is_symlink() and Path(path).resolve().is_relative_to(link.resolve()):
                raise DataError(f"{link}: a symbolic link leads back to a folder above it")
        inside = path[len(str(folder)) :].lstrip("/")
        num_before = len(found)
        for name in sorted(files):
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS:  # noqa: PTH122
                found.append(os.path.join(inside, name))  # noqa: PTH118 (hot path)
        if len(found) == num_before and not folders:
            empty.append(path)
    if not found:
        raise DataError(
            f"{folder}: no image in it or below (looked for {', '.join(sorted(EXTENSIONS))})"
        )
    if empty and need_all:
        raise DataError(
            f"no image in class folder {several(empty)}; remove the folder or put images into it"
        )
    return found


def _check_depth(
    folder: Path, images: list[str], parts: list[tuple[str, ...]], allow_coarse: bool
) -> None:
    """Check that all images lie in the same number of nested class folders, or in any; at least in one."""
    usual = Counter(map(len, parts)).most_common(1)[0][0]
    for image, names in zip(images, parts, strict=True):
        if not names:
            raise DataError(
                f"{folder / image}: an image outside of any class folder; move it into that of its class"
            )
        if len(names) != usual and not allow_coarse:
            raise DataError(
                f"{folder / image}: in {counted(len(names), 'class folder')}, but other images in {usual}; "
                "every level of folders is a taxonomic rank. Move it, or leave finer ranks unknown with "
                "DATA.DATASET.ALLOW_COARSE True"
            )


def _index(train: Listing, level_names: list[str] | None, inat: bool) -> LabelIndex:
    if inat:
        index = index_labels(INAT_RANKS, train.lineages)
        wrong = [name for name in level_names or () if name not in INAT_RANKS]
        if wrong:
            raise ConfigError(
                f"DATA.DATASET.RANKS: {several(wrong)} not among {', '.join(INAT_RANKS)}"
            )
        return index.select(level_names) if level_names else index
    depth = len(train.lineages[0])
    names = level_names or (
        ["class"] if depth == 1 else [f"level{level}" for level in range(1, depth + 1)]
    )
    if len(names) != depth:
        raise ConfigError(
            f"DATA.DATASET.RANKS: {len(names)} names for the {depth} level(s) of folders in {train.source}"
        )
    return index_labels(names, train.lineages)
