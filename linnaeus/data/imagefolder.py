"""Folders of images: nested class folders, or the folder names of iNaturalist 2021."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from unicodedata import normalize

from linnaeus.config.schema import DataConfig, DatasetConfig
from linnaeus.data import LISTED, is_ignored, is_image, unread_note
from linnaeus.data.bundle import DataBundle, OnMain
from linnaeus.data.image_files import EvaluatedFiles, Listing, build_files, roots_of
from linnaeus.data.splits import SPLITS, find_folders, find_inside, only_folder, read_name
from linnaeus.data.taxonomy import LabelIndex, Lineage, index_labels, require_classes
from linnaeus.errors import ConfigError, DataError
from linnaeus.files import suggest_path
from linnaeus.words import counted, several

INAT_RANKS = ("kingdom", "phylum", "class", "order", "family", "genus", "species")

_INAT_FOLDER = re.compile(r"\d+((?:_[^_]+){6})_(.+)")


def build_imagefolder(config: DataConfig, on_main: OnMain) -> DataBundle:
    """Image files whose folders are their classes.

    Each level of nested folders is a level of the taxonomy, but folders of splits are none. With
    `ALLOW_COARSE`, images in a coarser folder have unknown finer labels. Files and folders are read in sorted
    order. Hidden ones and files of other kinds are ignored; symbolic links are followed.

    Raises:
        ConfigError: a folder that is missing, `RANKS` that do not fit the folders, or folders that look like
            splits and cannot be told apart.
        DataError: a folder that is unreadable, empty or of another depth; a level with one class; a
            validation class without a training sample.
    """
    dataset: DatasetConfig = config.DATASET
    roots = [_split_folders(node) for node in roots_of(dataset)]
    notes = []
    for node, root in zip(roots_of(dataset), roots, strict=True):
        _require_training(root, dataset)
        if beside := _beside(Path(str(node.ROOT)).expanduser(), root):
            notes.append(f"{node.ROOT}: folders beside the splits are not read: {several(beside)}")
    splits, inat, more = _read_roots(roots, dataset)
    notes += more
    train = Listing.joined(splits["train"])
    if splits["val"] and dataset.FOLD is not None:
        raise ConfigError(
            f"DATA.DATASET.FOLD: {splits['val'][0].source} is the validation split; leave FOLD out, or name "
            f"the folder of the folds in DATA.DATASET.ROOT, such as {train.source}"
        )
    if dataset.ALLOW_COARSE is None:
        _check_coarse(train)
    index = _index(train, dataset.RANKS, inat)
    remedy = "add the folders of other classes"
    if len(index.taxonomy.levels) > 1:
        remedy = (
            "leave it out with DATA.DATASET.RANKS" if inat else "leave out that level of folders"
        )
    require_classes(index.taxonomy, train.source, remedy)
    return build_files(splits, index, config, on_main, notes)


def evaluated_folder(dataset: DatasetConfig, own_depth: int | None) -> EvaluatedFiles:
    """The images that a trained model is to be evaluated on.

    These are the validation folders where there are any, else test folders, else all images. `own_depth` is
    the number of levels of the run's folders where the node is the run's. Errors are those of
    `build_imagefolder`.
    """
    roots = [_split_folders(node) for node in roots_of(dataset)]
    held = {split for root in roots for split in root}
    wanted = next((split for split in ("val", "test") if split in held), "train")
    for root in roots if wanted == "train" else ():
        _require_training(root, dataset)
    roots = [{split: root[split] for split in (wanted,) if split in root} for root in roots]
    splits, inat, _ = _read_roots(roots, dataset, own_depth)
    listings = splits["val"] or splits["test"]
    index = None
    if own_depth and not listings:
        index = _index(Listing.joined(splits["train"]), dataset.RANKS, inat)
    names = INAT_RANKS if inat else None
    return EvaluatedFiles(listings or splits["train"], names, bool(listings), index)


def _split_folders(dataset: DatasetConfig) -> dict[str, Path]:
    """The folder of each split that there is; ROOT itself is that of training where there is none.

    A TRAIN that is named may be missing.
    """
    if dataset.ROOT is None:
        raise ConfigError("DATA.DATASET.ROOT: name the folder that holds the images")
    root = Path(dataset.ROOT).expanduser()
    try:
        subfolders = _subfolders(root)
    except OSError as error:
        hint = "" if root.exists() else suggest_path(root)
        raise ConfigError(
            f"DATA.DATASET.ROOT: cannot read folder {root}: {error.strerror}{hint}"
        ) from error
    keys = {split: getattr(dataset, split.upper()) for split in SPLITS}
    if len(subfolders) == 1 and not any(keys.values()):  # as an archive is unpacked
        wrapped = root / subfolders[0]
        if len(find_folders(_subfolders(wrapped))) > 1:
            return _split_folders(replace(dataset, ROOT=str(wrapped)))
    given = {split: root / name for split, name in keys.items() if name is not None}
    for split in given.keys() - {"train"}:
        _check_folder(given[split], split.upper())
    rest = [name for name in subfolders if root / name not in given.values()]
    named = find_folders(rest, is_given=bool(given))
    found = {
        split: root / only_folder(split, named[split]) for split in named.keys() - given.keys()
    }
    beside = {*rest} - {path.name for path in found.values()}
    if not given and beside and not any(_subfolders(path) for path in found.values()):
        found = {}  # classes beside others, that are called like splits
    folders = {split: _unwrapped(path, split) for split, path in found.items()} | given
    return {split: folders[split] for split in SPLITS if split in folders} or {"train": root}


def _beside(root: Path, folders: dict[str, Path]) -> list[str]:
    """The folders of a root that hold nothing of a split."""
    paths = [path.resolve() for path in folders.values()]
    names = sorted(_subfolders(root))
    return [n for n in names if not any(_overlap((root / n).resolve(), path) for path in paths)]


def _overlap(one: Path, other: Path) -> bool:
    return one.is_relative_to(other) or other.is_relative_to(one)


def _subfolders(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.is_dir() and not is_ignored(p.name)]


def _unwrapped(folder: Path, split: str) -> Path:
    """The only folder in a folder of a split, where it is called like that split too."""
    inside = [path for path in folder.iterdir() if not path.name.startswith(".")]
    if len(inside) == 1 and inside[0].is_dir() and (read_name(inside[0].name) or "?")[0] == split:
        return _unwrapped(inside[0], split)
    return folder


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


def _read_roots(
    roots: Sequence[dict[str, Path]], dataset: DatasetConfig, depth: int | None = None
) -> tuple[dict[str, list[Listing]], bool, list[str]]:
    """All images of each split of each root.

    The folders have `depth` levels, or as many as the first of them.

    Returns:
        The listings of each split; whether class folders are named as in iNaturalist 2021; notes on what is
        not read.
    """
    splits: dict[str, list[Listing]] = {split: [] for split in SPLITS}
    notes: list[str] = []
    inat, pad_to = False, depth or 1
    for split in SPLITS:
        for folder in dict.fromkeys(root[split] for root in roots if split in root):
            is_root = {split: folder} in roots
            try:
                read, inat = _read_one(folder, split, dataset, pad_to, is_root=is_root)
            except DataError as error:
                if split != "test" or not splits["train"] or dataset.TEST is not None:
                    raise
                notes.append(f"no test split: {error}")
                continue
            for part, listing in read.items():
                splits[part].append(listing)
                levels = len(listing.lineages[0])
                depth = depth or levels
                if levels != depth:
                    deepest = max(listing.paths, key=lambda path: path.count("/"))
                    raise DataError(
                        f"{folder}: {counted(levels, 'level')} of class folders, but {depth} elsewhere, such "
                        f"as for {deepest}"
                    )
            dataset = replace(dataset, FOLDER_NAMES="inat2021" if inat else "nested")
        pad_to = depth or 1
    return splits, inat, notes


def _read_one(
    folder: Path, split: str, dataset: DatasetConfig, pad_to: int, *, is_root: bool
) -> tuple[dict[str, Listing], bool]:
    """The images of a folder, which hold several splits where class folders are divided."""
    images, unread = _find_images(folder, need_all=split == "train")
    parts = [_class_names(folder, path.rpartition("/")[0]) for path in images]
    inside = find_inside({*parts}) if is_root else {}
    if inside:
        for image, part in zip(images, parts, strict=True):
            if part not in inside:
                raise DataError(
                    f"{folder / image}: in no folder of a split, but other class folders are divided into "
                    "splits; move or remove it"
                )
        members = {
            name: [i for i, p in enumerate(parts) if inside[p][0] == name] for name in SPLITS
        }
        parts = [inside[part][1:] for part in parts]
    else:
        members = {split: list(range(len(images)))}
        if is_root and dataset.RANKS is None:
            _check_twins(folder, parts)
    lineages, inat = _lineages(folder, images, parts, dataset, pad_to)
    whole = Listing(str(folder), folder, images, lineages)
    found = {name: whole.take(positions) for name, positions in members.items() if positions}
    if inside:
        found = {n: replace(each, source=f"{folder} ({n} folders)") for n, each in found.items()}
    first = next(iter(found))
    return found | {first: replace(found[first], unread=unread)}, inat


@functools.lru_cache(maxsize=1)
def _class_names(folder: Path, parents: str) -> tuple[str, ...]:
    """The names of class folders, with one spelling for each accented letter.

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
    return tuple(normalize("NFC", parents).split("/"))


def _check_twins(folder: Path, parts: Iterable[tuple[str, ...]]) -> None:
    """Refuse two to four folders that hold nearly the same class folders: splits with unknown names."""
    classes: dict[str, set[str]] = {}
    for part in {*parts}:
        classes.setdefault(part[0] if part else "", set()).update(n.casefold() for n in part[1:2])
    if not 2 <= len(classes) <= 4:
        return
    shared = set.intersection(*classes.values())
    smallest, union = min(map(len, classes.values())), len(set.union(*classes.values()))
    if len(shared) >= max(2, 0.8 * smallest, 0.5 * union):
        raise ConfigError(
            f"DATA.DATASET.ROOT: the folders {', '.join(sorted(classes))} of {folder} hold the same class "
            f"folders ({several(sorted(shared))}), as splits do; name the splits in DATA.DATASET.TRAIN and "
            "VAL, or where they are classes, both levels in DATA.DATASET.RANKS"
        )


def _lineages(
    folder: Path,
    images: list[str],
    parts: list[tuple[str, ...]],
    dataset: DatasetConfig,
    pad_to: int,
) -> tuple[list[Lineage], bool]:
    """The class names of each image, and whether they are named as in iNaturalist 2021."""
    kind = dataset.FOLDER_NAMES
    matches = {
        name: _INAT_FOLDER.fullmatch(name) for name in sorted({"/".join(part) for part in parts})
    }
    others = [name for name, match in matches.items() if match is None]
    if kind == "nested" or (kind == "auto" and len(others) == len(matches)):
        allow_coarse = dataset.ALLOW_COARSE is not False
        _check_depth(folder, images, parts, allow_coarse)
        depth = max(pad_to if allow_coarse else 1, *map(len, parts))
        padded = {part: part + (None,) * (depth - len(part)) for part in set(parts)}
        return [padded[part] for part in parts], False
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
    return [lineages["/".join(part)] for part in parts], True


def _find_images(folder: Path, *, need_all: bool) -> tuple[list[str], Counter[str]]:
    """The paths of all images, relative to the folder, files before folders and each sorted.

    Also returns the number of files with each other ending.
    """
    found: list[str] = []
    unread = Counter[str]()
    empty: list[str] = []

    def fail(error: OSError) -> None:
        raise DataError(f"cannot read folder {error.filename}: {error.strerror}") from error

    for path, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = sorted(name for name in folders if not is_ignored(name))
        for link in (Path(path, name) for name in folders):
            if link.is_symlink() and Path(path).resolve().is_relative_to(link.resolve()):
                raise DataError(f"{link}: a symbolic link leads back to a folder above it")
        inside = path[len(str(folder)) :].lstrip("/")
        num_before = len(found)
        for name in sorted(files):
            if is_image(name, unread):
                found.append(os.path.join(inside, name))  # noqa: PTH118 (hot path)
        if len(found) == num_before and not folders and read_name(Path(path).name) is None:
            empty.append(path)
    note = f"; {unread_note(unread)}" if unread else ""
    if not found:
        raise DataError(f"{folder}: no image in it or below (looked for {LISTED}){note}")
    if empty and need_all:
        raise DataError(
            f"no image in class folder {several(empty)}; remove the folder or put images into it{note}"
        )
    return found, unread


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


def _check_coarse(train: Listing) -> None:
    """Refuse a level that most images lack: a stray folder inside of a class folder looks like one."""
    for depth in range(1, len(train.lineages[0])):
        deep = [i for i, names in enumerate(train.lineages) if names[depth] is not None]
        if 2 * len(deep) < len(train.lineages):
            found = dict.fromkeys(str(Path(train.paths[i]).parent) for i in deep)
            raise DataError(
                f"{train.source}: {len(deep)} of {counted(len(train.lineages), 'image')} are in folders "
                f"deeper than the others: {several([*found])}; move these images up, or set "
                "DATA.DATASET.ALLOW_COARSE True where the others have unknown finer labels"
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
