"""Folders of images: nested class folders, or the folder names of iNaturalist 2021."""

from __future__ import annotations

import os
import re
from collections import Counter
from difflib import get_close_matches
from pathlib import Path

from linnaeus.config.schema import DataConfig, DatasetConfig
from linnaeus.data.bundle import DataBundle, OnMain
from linnaeus.data.endings import EXTENSIONS
from linnaeus.data.files import ALL_SAMPLES, Listing, Part, build_files, hold_out, several
from linnaeus.data.taxonomy import LabelIndex, Lineage, index_labels, require_classes
from linnaeus.errors import ConfigError, DataError

INAT_RANKS = ("kingdom", "phylum", "class", "order", "family", "genus", "species")

_INAT_FOLDER = re.compile(r"\d+((?:_[^_]+){6})_(.+)")
_VAL_NAMES = ("val", "valid", "validation")
_SPLIT_NAMES = frozenset(("train", "test", *_VAL_NAMES))


def build_imagefolder(config: DataConfig, on_main: OnMain) -> DataBundle:
    """Image files whose folders are their classes.

    Each level of nested folders is a level of the taxonomy; all images have the same depth. Files and folders
    are read in sorted order. Hidden ones and files of other kinds are ignored; symbolic links are followed.

    Raises:
        ConfigError: a folder that is missing, or `RANKS` that do not fit the folders.
        DataError: a folder that is unreadable, empty or of another depth; a level with one class; a
            validation class without a training sample.
    """
    dataset: DatasetConfig = config.DATASET
    train_folder, val_folder = _split_folders(dataset)
    train, inat = _read(train_folder, dataset)
    val = None if val_folder is None else _listing(val_folder, _scan(val_folder, need_all=False), inat)
    if val and len(val.lineages[0]) != len(train.lineages[0]):
        raise DataError(
            f"{val_folder}: {len(val.lineages[0])} levels of class folders, but {len(train.lineages[0])} in "
            f"{train_folder}"
        )
    index = _index(train, dataset.RANKS, inat)
    remedy = "add the folders of other classes"
    if len(index.taxonomy.levels) > 1:
        remedy = "leave it out with DATA.DATASET.RANKS" if inat else "leave out that level of folders"
    require_classes(index.taxonomy, str(train_folder), remedy)
    return build_files(train, val, index, config, on_main)


def evaluated_folder(dataset: DatasetConfig, *, is_own: bool) -> Part:
    """The images that a trained model is to be evaluated on.

    These are the validation folder where there is one; of another dataset than the run's also a folder
    `test`. Else they are the samples that the run has held out of its own training data, or all images.

    Args:
        dataset: the DATA.DATASET node.
        is_own: whether it is that of the run.

    Raises:
        ConfigError, DataError: as for `build_imagefolder`.
    """
    folder = _evaluation_split(dataset, is_own)
    if folder is not None:
        listing, inat = _read(folder, dataset, need_all=False)
        return Part(listing, INAT_RANKS if inat else None, "validation split")
    folder = _split_folders(dataset)[0]
    listing, inat = _read(folder, dataset)
    names = INAT_RANKS if inat else None
    if not is_own:
        return Part(listing, names, ALL_SAMPLES)
    report: list[str] = []
    _, held_out = hold_out(listing, dataset.VAL_FRACTION, report)
    index = _index(listing, dataset.RANKS, inat)
    return Part(held_out, names, "samples held out of training", tuple(report), index)


def _evaluation_split(dataset: DatasetConfig, is_own: bool) -> Path | None:
    """The folder of the validation split; the one of training need not be there."""
    if dataset.ROOT is None:
        raise ConfigError("DATA.DATASET.ROOT: name the folder that holds the images")
    root = Path(dataset.ROOT).expanduser()
    subfolders = _subfolders(root)
    if dataset.VAL is not None:
        folder = root / dataset.VAL
        if not folder.is_dir():
            raise ConfigError(f"DATA.DATASET.VAL: there is no folder {folder}{_folders_like(folder)}")
        return folder
    names = _VAL_NAMES if is_own else (*_VAL_NAMES, "test")
    has_splits = _are_splits(subfolders) or (not is_own and bool(subfolders) and subfolders <= _SPLIT_NAMES)
    if dataset.TRAIN is None and not has_splits:
        return None
    train = None if dataset.TRAIN is None else root / dataset.TRAIN
    return next((root / name for name in names if name in subfolders and root / name != train), None)


def _read(folder: Path, dataset: DatasetConfig, *, need_all: bool = True) -> tuple[Listing, bool]:
    """All images of a folder, and whether its class folders are named as in iNaturalist 2021."""
    found = _scan(folder, need_all=need_all)
    inat = _is_inat(dataset.FOLDER_NAMES, found, folder)
    return _listing(folder, found, inat), inat


def _split_folders(dataset: DatasetConfig) -> tuple[Path, Path | None]:
    """Folders of training and validation; the latter is None where samples of training are to be held out."""
    if dataset.ROOT is None:
        raise ConfigError("DATA.DATASET.ROOT: name the folder that holds the images")
    root = Path(dataset.ROOT).expanduser()
    subfolders = _subfolders(root)
    train = root / dataset.TRAIN if dataset.TRAIN is not None else None
    val = root / dataset.VAL if dataset.VAL is not None else None
    if train is None and "train" in subfolders and (val or _are_splits(subfolders)):
        train = root / "train"
    if train is None:
        if val is not None or _are_splits(subfolders):
            raise ConfigError(
                f"DATA.DATASET.ROOT: {root} has no folder `train`; name the training folder in "
                "DATA.DATASET.TRAIN (`.` is ROOT itself)"
            )
        return root, None
    if val is None:
        val = next((root / name for name in _VAL_NAMES if name in subfolders and root / name != train), None)
    for key, folder in (("TRAIN", train), ("VAL", val)):
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"DATA.DATASET.{key}: there is no folder {folder}{_folders_like(folder)}")
    return train, val


def _are_splits(subfolders: set[str]) -> bool:
    """Whether the folders are splits, not classes: `train` may be a class beside `car` and `plane`."""
    return bool(subfolders & {"train", *_VAL_NAMES}) and (
        subfolders <= _SPLIT_NAMES or ("train" in subfolders and bool(subfolders & set(_VAL_NAMES)))
    )


def _subfolders(root: Path) -> set[str]:
    try:
        return {
            entry.name
            for entry in os.scandir(root)
            if _kind(entry) == "folder" and not entry.name.startswith(".")
        }
    except OSError as error:
        raise ConfigError(
            f"DATA.DATASET.ROOT: cannot read folder {root}: {error.strerror}{_folders_like(root)}"
        ) from error


def _folders_like(missing: Path) -> str:
    """`; did you mean X?` for the folder beside a missing one whose name is most like it."""
    if missing.exists():
        return ""
    try:
        names = [entry.name for entry in os.scandir(missing.parent) if _kind(entry) == "folder"]
    except OSError:
        return ""
    close = get_close_matches(missing.name, names, 1)
    return f"; did you mean {missing.parent / close[0]}?" if close else ""


def _scan(folder: Path, *, need_all: bool = True) -> list[tuple[tuple[str, ...], str]]:
    """All images as (names of the class folders, path relative to `folder`), sorted.

    Args:
        folder: the folder to read.
        need_all: whether a class folder without an image is an error.
    """
    found: list[tuple[tuple[str, ...], str]] = []
    empty: list[str] = []

    def visit(path: Path, names: tuple[str, ...], above: frozenset[str]) -> None:
        real = os.path.realpath(path)
        if real in above:
            raise DataError(f"{path}: a symbolic link leads back to a folder above it")
        num_before = len(found)
        try:
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError as error:
            raise DataError(f"cannot read folder {path}: {error.strerror}") from error
        kinds = {entry.name: _kind(entry) for entry in entries if not entry.name.startswith(".")}
        folders = [name for name, kind in kinds.items() if kind == "folder"]
        for name, kind in kinds.items():
            if kind == "folder" or os.path.splitext(name)[1].lower() not in EXTENSIONS:  # noqa: PTH122
                continue
            if kind == "special":
                raise DataError(
                    f"{path / name}: not a file but a pipe, a socket or a device, which cannot be read as an "
                    "image; remove it"
                )
            found.append((names, "/".join((*names, name))))
        for name in folders:
            visit(path / name, (*names, name), above | {real})
        if len(found) == num_before and not folders:
            empty.append(str(path))

    visit(folder, (), frozenset())
    if not found:
        raise DataError(f"{folder}: no image in it or below (looked for {', '.join(sorted(EXTENSIONS))})")
    if empty and need_all:
        raise DataError(f"no image in class folder {several(empty)}; remove the folder or put images into it")
    _check_depth(folder, found)
    return found


def _kind(entry: os.DirEntry[str]) -> str:
    """`folder`, `file`, or `special` for a pipe, a socket or a device, which would block when it is opened.

    A link that leads nowhere, or to itself, is a file: reading it says why it cannot be.
    """
    try:
        if entry.is_dir():
            return "folder"
        if entry.is_file():
            return "file"
        entry.stat()  # fails for a link that leads nowhere
    except OSError:
        return "file"
    return "special"


def _check_depth(folder: Path, found: list[tuple[tuple[str, ...], str]]) -> None:
    """Check that all images lie in the same number of nested class folders, at least one."""
    depths = Counter(len(names) for names, _ in found)
    usual = depths.most_common(1)[0][0]
    for names, path in found:
        if not names:
            raise DataError(
                f"{folder / path}: an image outside of any class folder; move it into the folder of its class"
            )
        if len(names) != usual:
            raise DataError(
                f"{folder.joinpath(*names)}: images {len(names)} folders deep, but {usual} deep elsewhere; "
                "every level of folders is a taxonomic rank, so all images must stand at the same depth"
            )


def _is_inat(folder_names: str, found: list[tuple[tuple[str, ...], str]], folder: Path) -> bool:
    """Whether folder names are like those of iNaturalist 2021.

    Raises:
        DataError: some are and some are not.
    """
    if folder_names == "nested":
        return False
    names = sorted({"/".join(names) for names, _ in found})
    others = [name for name in names if not _INAT_FOLDER.fullmatch(name)]
    if others and (folder_names == "inat2021" or len(others) < len(names)):
        raise DataError(
            f"{folder}: not named like `00000_Animalia_Chordata_...` (number, then kingdom to species): "
            f"{several(others)}; rename, or set DATA.DATASET.FOLDER_NAMES nested"
        )
    return not others


def _listing(folder: Path, found: list[tuple[tuple[str, ...], str]], inat: bool) -> Listing:
    lineages: list[Lineage] = [_inat_lineage(names, folder) if inat else names for names, _ in found]
    return Listing(str(folder), folder, [path for _, path in found], lineages)


def _inat_lineage(names: tuple[str, ...], folder: Path) -> Lineage:
    match = _INAT_FOLDER.fullmatch("/".join(names))
    if match is None:
        raise DataError(f"{folder.joinpath(*names)}: not named like `00000_Animalia_Chordata_...`")
    above = match[1].split("_")[1:]
    # The last part is the epithet alone, which occurs in many genera.
    return (*above, f"{above[-1]} {match[2].replace('_', ' ')}")


def _index(train: Listing, level_names: list[str] | None, inat: bool) -> LabelIndex:
    if inat:
        index = index_labels(INAT_RANKS, train.lineages)
        wrong = [name for name in level_names or () if name not in INAT_RANKS]
        if wrong:
            raise ConfigError(f"DATA.DATASET.RANKS: {several(wrong)} not among {', '.join(INAT_RANKS)}")
        return index.select(level_names) if level_names else index
    depth = len(train.lineages[0])
    names = level_names or (["class"] if depth == 1 else [f"level{level}" for level in range(1, depth + 1)])
    if len(names) != depth:
        raise ConfigError(
            f"DATA.DATASET.RANKS: {len(names)} names for the {depth} level(s) of folders in {train.source}"
        )
    return index_labels(names, train.lineages)
