"""Datasets of image files: from a listing of paths and class names to a `DataBundle`."""

from __future__ import annotations

import copy
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import accumulate, chain, islice
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from sklearn.model_selection import StratifiedGroupKFold
from torch import Tensor
from torch.utils.data import Dataset

from linnaeus.config.schema import AugmentConfig, DataConfig, DatasetConfig
from linnaeus.data.bundle import DataBundle, OnMain, as_size, collate_pairs
from linnaeus.data.checked import MOST_IMAGES, find_damaged, measure_channels, measure_ranges
from linnaeus.data.image import DEFAULT_DECODING, Decoding, load_image
from linnaeus.data.splits import SPLITS
from linnaeus.data.taxonomy import UNKNOWN, LabelIndex, Lineage, Taxonomy, UnknownClassError
from linnaeus.data.transforms import Pipeline, build_transforms
from linnaeus.runtime.errors import ConfigError, DataError
from linnaeus.runtime.files import other_spelling
from linnaeus.runtime.words import counted, several

T = TypeVar("T")
Texts = np.ndarray[Any, np.dtype[np.object_]]
Places = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
_JPEG = (".jpg", ".jpeg")


def distinct(values: Iterable[T]) -> tuple[list[T], Places]:
    """The different values in the order of their first occurrence, and the place of each value there."""
    places: dict[T, int] = {}
    numbers = [places.setdefault(value, len(places)) for value in values]
    return [*places], np.array(numbers, dtype=np.int64)


@dataclass(frozen=True)
class Listing:
    """The files of one split with their labels by name.

    Attributes:
        source: the folder or manifest, for messages.
        root: folder that relative paths start from.
        paths: path of each image, relative to `root` or absolute; an array of texts.
        lineages: class names that images have, coarse to fine, each once.
        lineage_ids: the position in `lineages` of the class names of each image.
        groups: the group of each image, which a hold-out must not divide; None where there is none.
        is_table: whether a table lists the files, so that some may be missing.
    """

    source: str
    root: Path
    paths: Texts
    lineages: list[Lineage]
    lineage_ids: Places
    groups: Texts | None = None
    is_table: bool = False

    @classmethod
    def of(
        cls,
        source: str,
        root: Path,
        paths: Sequence[str],
        lineages: Iterable[Lineage],
        *,
        is_table: bool = False,
    ) -> Listing:
        """The listing of paths with the class names of each."""
        texts = np.array(paths, dtype=object)
        return cls(source, root, texts, *distinct(lineages), is_table=is_table)

    @property
    def files(self) -> list[str]:
        """The path of each image."""
        return [os.path.join(self.root, path) for path in self.paths]  # noqa: PTH118 (hot path)

    @property
    def counts(self) -> list[int]:
        """The number of images with each of the `lineages`."""
        return np.bincount(self.lineage_ids, minlength=len(self.lineages)).tolist()  # type: ignore[no-any-return]

    def take(self, positions: Places | Mask) -> Listing:
        """The listing of some of the samples, by position or by a mask."""
        held, numbers = np.unique(self.lineage_ids[positions], return_inverse=True)
        return replace(
            self,
            paths=self.paths[positions],
            lineages=[self.lineages[i] for i in held],
            lineage_ids=numbers,
            groups=None if self.groups is None else self.groups[positions],
        )

    @classmethod
    def joined(cls, listings: Sequence[Listing]) -> Listing:
        """The samples of several roots, one after the other."""
        if len(listings) == 1:
            return listings[0]
        lineages, places = distinct(lineage for each in listings for lineage in each.lineages)
        starts = accumulate((len(each.lineages) for each in listings), initial=0)
        numbers = [each.lineage_ids + start for each, start in zip(listings, starts, strict=False)]
        return cls(
            ", ".join(each.source for each in listings),
            Path(),
            np.array([file for each in listings for file in each.files], dtype=object),
            lineages,
            places[np.concatenate(numbers)] if numbers else places,
            is_table=any(each.is_table for each in listings),
        )


@dataclass(frozen=True)
class FoundFiles:
    """The files of a dataset, as they lie on disk.

    Attributes:
        splits: the listings of each split, one for each root; empty where there is no such split.
        level_names: names of the elements of a lineage, coarse to fine; None where the source gives none.
        notes: sentences for the user about what is not read.
        make_index: gives the classes of the training samples. Raises a `DataError` where these cannot be
            learned: a level with one class, or columns from fine to coarse.
    """

    splits: dict[str, list[Listing]]
    level_names: tuple[str, ...] | None
    notes: list[str]
    make_index: Callable[[], LabelIndex]


class ImageFiles(Dataset[tuple[Tensor, Tensor]]):
    """Images that are decoded on access.

    Args:
        root, paths: the folder that relative paths start from, and the path of each image.
        targets: [N, L], int64, one column per level; -1 is unknown. Of several labels per sample [N, C],
            int8, which items have as float32.
        channels: of an image; every image is converted to 1 (grey) or 3 (RGB), or has another number.
        transform: resizes and augments an image; set before the first access.
        decoding: how a file becomes pixels.
    """

    def __init__(
        self,
        root: Path,
        paths: Iterable[str],
        targets: Tensor,
        channels: int,
        transform: Pipeline | None = None,
        decoding: Decoding = DEFAULT_DECODING,
    ) -> None:
        self.root = str(root)
        # One array, which worker processes share. Each would end with a copy of a list of strings, as reading
        # objects changes their reference counts.
        self.paths = np.array([os.fsencode(path) for path in paths])
        self.targets = targets
        self.channels = channels
        self.transform = transform
        self.decoding = decoding

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, rows: Tensor) -> ImageFiles:
        """The samples at these indices."""
        taken = copy.copy(self)
        taken.paths, taken.targets = self.paths[rows.numpy()], self.targets[rows]
        return taken

    @property
    def files(self) -> list[str]:
        """The path of each image."""
        return [os.path.join(self.root, os.fsdecode(path)) for path in self.paths]  # noqa: PTH118

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """The pixels of a sample, uint8 [C, height, width], and its labels [L]."""
        path = os.path.join(self.root, os.fsdecode(self.paths[index]))  # noqa: PTH118 (hot path)
        assert self.transform is not None
        image = load_image(path, self.channels, self.decoding, self.transform.min_size)
        target = self.targets[index]
        return self.transform(image), target.float() if target.dtype == torch.int8 else target


def roots_of(dataset: DatasetConfig) -> list[DatasetConfig]:
    """The node of each root."""
    roots = dataset.ROOT if isinstance(dataset.ROOT, list) else [dataset.ROOT]
    return [replace(dataset, ROOT=None if root is None else str(root)) for root in roots]


@contextmanager
def optional_test(notes: list[str], split: str, dataset: DatasetConfig) -> Iterator[None]:
    """Note why there is no test split instead of raising, where the configuration names none."""
    try:
        yield
    except (ConfigError, DataError) as error:
        if split != "test" or dataset.TEST is not None:
            raise
        notes.append(f"no test split: {error}")


def build_files(files: FoundFiles, config: DataConfig, on_main: OnMain) -> DataBundle:
    """Datasets from the listings of each split.

    Without a validation split, the test split takes its place. Without either, a stratified part of each
    root's training samples is held out.

    With `DATA.ON_BAD_IMAGE skip`, rank 0 decodes every file once, and all ranks leave out the damaged ones.

    Raises:
        ConfigError: the augmentation does not fit.
        DataError: a split without a label, a validation class without a training sample, or a manifest that
            names files that do not exist.
    """
    index = files.make_index()
    dataset, taxonomy = config.DATASET, index.taxonomy
    size = as_size(config.IMG_SIZE, (224, 224))
    report = [*files.notes]
    trains, vals, tests = (files.splits[split] for split in SPLITS)
    source = Listing.joined(trains).source
    for listing in [*trains, *vals, *tests]:
        require_files(listing, config)
    decoding = Decoding.of(config)
    measure = partial(
        measure_ranges,
        {split: _files_with_ranges(each) for split, each in files.splits.items()},
        dataset.CHANNELS,
        decoding,
    )
    decoding, notes = on_main(measure) or (decoding, [])
    report += notes
    make = partial(
        make_split,
        index=index,
        config=config,
        channels=dataset.CHANNELS,
        decoding=decoding,
        on_main=on_main,
        report=report,
    )
    val = test = None
    if tests:
        with optional_test(report, "test", dataset):
            test, _ = make(tests, remedy=None)
    if test is not None and not vals and dataset.FOLD is None:
        report.append(f"no validation split: {Listing.joined(tests).source} is used")
        val, test = test, None
    elif not vals:
        pairs = [hold_out(each, dataset, report, taxonomy) for each in trains]
        trains, vals = [train for train, _ in pairs], [val for _, val in pairs]
    report_repeated(Listing.joined(trains), [*vals, *tests], report)
    train, _ = make(trains)
    report_homonyms(Listing.joined(trains), report)
    if lacking := classes_without_images(taxonomy, train.targets):
        report.append(f"no training image is left of: {several(lacking)}")
    val = val or make(vals)[0]
    augment = _with_statistics(config.AUGMENT, train, dataset.CHANNELS, decoding, on_main, report)
    train.transform, preprocessing = build_transforms(augment, size, dataset.CHANNELS, decoding)
    val.transform = preprocessing.transform()
    if test is not None:
        test.transform = preprocessing.transform()
    return DataBundle(
        train,
        val,
        taxonomy,
        dataset.CHANNELS,
        size,
        collate_pairs,
        report,
        preprocessing,
        index,
        test=test,
        source=source,
    )


def make_split(
    listings: Sequence[Listing],
    *,
    index: LabelIndex,
    config: DataConfig,
    channels: int,
    decoding: Decoding,
    on_main: OnMain,
    report: list[str],
    remedy: str | None = "remove them, or add training samples",
    needs_labels: bool = True,
) -> tuple[ImageFiles, int]:
    """Give the samples of all roots their labels, and leave out damaged files with `ON_BAD_IMAGE skip`.

    Args:
        listings: the files of each root, in the form of the index.
        report: gets sentences on what is left out and on labels that are unknown.
        remedy: ends the error for samples of classes that the index lacks; None leaves these samples out.
        needs_labels: refuse samples without any label of the finest level.

    Returns:
        The samples, without a transform, and the number that is left out for their classes.

    Raises:
        DataError: no file can be read, no label is known, or classes are unknown.
    """
    listing = Listing.joined(listings)
    if config.ON_BAD_IMAGE == "skip":
        damaged: dict[int, str] = (
            on_main(lambda: find_damaged(listing.files, channels, decoding)[0]) or {}
        )
        named = several([f"{listing.paths[i]} ({reason})" for i, reason in damaged.items()])
        num_files = len(listing.paths)
        if len(damaged) == num_files:
            raise DataError(
                f"{listing.source}: none of the {num_files} images can be read: {named}"
            )
        if damaged:
            number = counted(len(damaged), "damaged image")
            report.append(f"{listing.source}: {number} left out: {named}")
            listing = listing.take(_without(num_files, [*damaged]))
    rows, lacking = encode(listing.lineages, index)
    numbers = listing.lineage_ids
    is_unknown = np.isin(numbers, [*lacking])
    num_left_out = int(is_unknown.sum())
    if num_left_out:
        first: dict[str, str] = {}
        for position in is_unknown.nonzero()[0]:
            first.setdefault(lacking[numbers[position]], listing.paths[position])
        names = [f"{name} (first in {listing.root / path})" for name, path in first.items()]
        text = (
            f"{listing.source}: {counted(num_left_out, 'sample')} of {counted(len(names), 'class')} "
            f"without a training sample: {several(names)}"
        )
        is_all = num_left_out == len(numbers)
        if remedy is not None or is_all:
            raise DataError(f"{text}; {'these are all samples' if is_all else remedy}")
        report.append(f"{text}; left out")
        numbers = numbers[~is_unknown]
        listing = listing.take(~is_unknown)
    targets = rows[torch.from_numpy(numbers)]
    coarse = listing.paths[np.array([x[-1] is None for x in listing.lineages])[listing.lineage_ids]]
    if len(coarse):
        counts = f"{len(coarse)} of {counted(len(listing.paths), 'image')}"
        report.append(f"{listing.source}: finest label unknown for {counts}, first {coarse[0]}")
    finest = targets if index.taxonomy.is_multilabel else targets[:, -1]
    if needs_labels and not (finest != UNKNOWN).any():
        raise DataError(
            f"{listing.source}: no image has a label of level {index.taxonomy.names[-1]!r}"
        )
    split = ImageFiles(listing.root, listing.paths, targets, channels, decoding=decoding)
    return split, num_left_out


def stratified_split(
    keys: Iterable[str],
    strata: Places,
    fraction: float,
    fold: int | None = None,
    num_folds: int = 0,
) -> tuple[Places, Places]:
    """Hold out a fraction of each stratum for validation; each keeps at least one training sample.

    The choice depends on the keys (permanent names, such as relative paths) alone, not on a seed or on the
    order of the samples, so accuracies of different runs, machines and versions are comparable. Strata are
    numbers, taken in their order. Rounding carries over from stratum to stratum, so that the total is right
    even where strata are small.

    With a `fold`, every `num_folds`-th sample is held out, from that one on; a sample is in one fold, or in
    none where it is alone in its stratum.

    Returns:
        Positions of the training and of the validation samples, each ascending.
    """
    order = np.fromiter(map(_digest, keys), dtype=np.uint64).argsort(kind="stable")
    order = order[strata[order].argsort(kind="stable")]
    val: list[Places] = []
    seen = num_held = 0
    for members in np.split(order, np.bincount(strata).cumsum()[:-1]):
        held = members[:0]
        if fold is None:
            wanted = round(fraction * (seen + len(members))) - num_held
            held = members[: max(0, min(wanted, len(members) - 1))]
        elif len(members) > 1:
            held = members[(fold - seen) % num_folds :: num_folds]
        val.append(held)
        seen += len(members)
        num_held += len(held)
    found = np.concatenate(val)
    return _without(len(order), found), np.sort(found)


def _digest(key: str) -> int:
    digest = blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _without(number: int, positions: Sequence[int] | Places) -> Places:
    return np.delete(np.arange(number), positions)


def grouped_split(
    keys: Texts, strata: Places, groups: Texts, fold: int, num_folds: int
) -> tuple[Places, Places]:
    """Hold out one of `num_folds` parts of the groups, with about the same strata in each.

    A group stays in training where a stratum would have no training sample without it. A sample without a
    group is one of its own. The choice depends on the names alone.

    Returns:
        As `stratified_split`.
    """
    own = [group or f"\0{key}" for group, key in zip(groups, keys, strict=True)]
    order = sorted(range(len(keys)), key=lambda i: (_digest(own[i]), own[i], keys[i]))
    division = StratifiedGroupKFold(num_folds).split(order, strata[order], [own[i] for i in order])
    try:
        with warnings.catch_warnings(action="ignore"):  # classes with few samples
            _, found = next(islice(division, fold, None))
    except ValueError:  # no class has as many samples as there are folds
        found = []
    members: dict[str, list[int]] = defaultdict(list)
    for place in found:
        members[own[order[place]]].append(order[place])
    numbers = Counter(strata.tolist())
    val: list[int] = []
    for positions in members.values():
        held = Counter(strata[positions].tolist())
        if all(held[stratum] < numbers[stratum] for stratum in held):
            numbers -= held
            val += positions
    return _without(len(keys), val), np.array(sorted(val), dtype=np.int64)


def hold_out(
    listing: Listing, dataset: DatasetConfig, report: list[str], taxonomy: Taxonomy
) -> tuple[Listing, Listing]:
    """Training and validation samples of a listing, stratified by class; notes it in the report.

    A sample with several labels counts for the rarest of them.

    Raises:
        ConfigError: there is no such fold.
        DataError: there are too few samples.
    """
    fraction, fold, num_folds = dataset.VAL_FRACTION, dataset.FOLD, dataset.NUM_FOLDS
    if fold is not None and fold >= num_folds:
        raise ConfigError(
            f"DATA.DATASET.FOLD: {fold}, but the folds are 0 to {num_folds - 1} (DATA.DATASET.NUM_FOLDS)"
        )
    kinds, numbers = [*map(repr, listing.lineages)], listing.lineage_ids
    if taxonomy.is_multilabel:
        labels = [taxonomy.split(cell or "") for (cell,) in listing.lineages]
        counts = Counter[str]()
        for names, number in zip(labels, listing.counts, strict=True):
            counts.update(dict.fromkeys(names, number))
        rarest = (min(names, key=lambda n: (counts[n], n), default="") for names in labels)
        kinds, places = distinct(map(repr, rarest))
        numbers = places[numbers]
    order = sorted(range(len(kinds)), key=kinds.__getitem__)
    strata = np.argsort(order)[numbers]
    if listing.groups is None:
        train, val = stratified_split(listing.paths, strata, fraction, fold, num_folds)
    else:
        parts = num_folds if fold is not None else max(2, round(1 / fraction))
        train, val = grouped_split(listing.paths, strata, listing.groups, fold or 0, parts)
    if not len(val):
        kind = "" if listing.groups is None else f" in {counted(len({*listing.groups}), 'group')}"
        raise DataError(
            f"{listing.source}: {len(listing.paths)} samples{kind} are too few to hold out {fraction:g} of "
            "them for validation; raise DATA.DATASET.VAL_FRACTION, or name validation data in "
            "DATA.DATASET.VAL"
        )
    of_fold = "" if fold is None else f", fold {fold} of {num_folds}"
    by_group = "" if listing.groups is None else ", groups undivided"
    report.append(
        f"no validation split: held out {len(val)} of {counted(len(listing.paths), 'sample')}, stratified by "
        f"class{of_fold}{by_group}"
    )
    return listing.take(train), listing.take(val)


def report_homonyms(listing: Listing, report: list[str]) -> None:
    """Report classes of one name under several parents, the smallest first: one may be a typo."""
    found: list[tuple[int, str]] = []
    for depth in range(1, len(listing.lineages[0])):
        places: dict[str, Counter[str]] = defaultdict(Counter)
        for lineage, number in zip(listing.lineages, listing.counts, strict=True):
            parent, name = lineage[depth - 1 : depth + 1]
            if parent is not None and name is not None:
                places[name][parent] += number
        for name, held in places.items():
            if len(held) > 1:
                pairs = sorted((number, parent) for parent, number in held.items())
                shown = ", ".join(f"{parent} {number}" for number, parent in pairs)
                found.append((pairs[0][0], f"{name} (images: {shown})"))
    if found:
        names = several([text for _, text in sorted(found)])
        report.append(
            f"{counted(len(found), 'name')} under several parents, different classes: {names}"
        )


def report_repeated(train: Listing, held_out: Sequence[Listing], report: list[str]) -> None:
    """Report training files that have several labels, or that another split has too."""
    if any(each.root != train.root for each in held_out):
        train, *held_out = (
            replace(each, root=Path(), paths=np.array(each.files, dtype=object))
            for each in (train, *held_out)
        )
    rows = pd.DataFrame({"path": train.paths, "number": train.lineage_ids}).drop_duplicates()
    paths = pd.Series(np.concatenate([each.paths for each in held_out]), dtype=object)
    found = [*rows["path"][rows["path"].duplicated()], *paths[paths.isin(train.paths)].unique()]
    if found:
        number = counted(len({*found}), "training image")
        first = os.path.join(train.root, found[0])  # noqa: PTH118
        report.append(f"{number} with several labels, or also held out, first {first}")


def classes_without_images(taxonomy: Taxonomy, targets: Tensor) -> list[str]:
    """The classes that no training image has, such as where all of theirs are damaged."""
    lacking: list[str] = []
    for column, level in enumerate(taxonomy.levels):
        if taxonomy.is_multilabel:
            held = {*(targets == 1).any(dim=0).nonzero().flatten().tolist()}
        else:
            held = {*targets[:, column].tolist()}
        lacking += [name for label, name in enumerate(level.classes) if label not in held]
    return lacking


def encode(lineages: Sequence[Lineage], index: LabelIndex) -> tuple[Tensor, dict[int, str]]:
    """Targets [N, L] of lineages, and the class that the index lacks, by position.

    With several labels per sample, targets are [N, C], int8: 1, 0, or -1 where unknown. Targets with such a
    class are unknown at every level.
    """
    lacking: dict[int, str] = {}
    if index.taxonomy.is_multilabel:
        return _encode_sets(lineages, index)
    unknown = (UNKNOWN,) * len(index.taxonomy.levels)
    rows: list[tuple[int, ...]] = []
    for position, lineage in enumerate(lineages):
        try:
            rows.append(index.encode(lineage))
        except UnknownClassError as error:
            lacking[position] = error.args[0]
            rows.append(unknown)
    return torch.tensor(rows), lacking


def _encode_sets(lineages: Sequence[Lineage], index: LabelIndex) -> tuple[Tensor, dict[int, str]]:
    """As `encode`, of cells with several labels."""
    columns = {name: label for (_, name), label in index.lookup[0].items()}
    targets = np.zeros((len(lineages), len(columns)), dtype=np.int8)
    lacking: dict[int, str] = {}
    unknown: list[int] = []
    places: list[tuple[int, int]] = []
    for row, (cell,) in enumerate(lineages):
        names = [] if cell is None else index.taxonomy.split(cell)
        strange = [name for name in names if name not in columns]
        if strange:
            lacking[row] = strange[0]
        if strange or cell is None:
            unknown.append(row)
        else:
            places += [(row, columns[name]) for name in names]
    if places:
        targets[tuple(np.array(places).T)] = 1
    targets[unknown] = UNKNOWN
    return torch.from_numpy(targets), lacking


def _files_with_ranges(listings: Iterable[Listing]) -> list[str]:
    """The files whose values may have more than 8 bits."""
    return [
        os.path.join(each.root, path)  # noqa: PTH118 (hot path)
        for each in listings
        for path in each.paths
        if not path.lower().endswith(_JPEG)
    ]


def _with_statistics(
    augment: AugmentConfig,
    images: ImageFiles,
    channels: int,
    decoding: Decoding,
    on_main: OnMain,
    report: list[str],
) -> AugmentConfig:
    """The node with MEAN and STD that rank 0 measures, where they are null and channels are no colors."""
    if channels in (1, 3) or None not in (augment.MEAN, augment.STD):
        return augment
    found = on_main(lambda: measure_channels(images.files, channels, decoding))
    if found is None:
        return augment
    num_images = counted(min(MOST_IMAGES, len(images)), "training image")
    pairs = zip(("MEAN", "STD"), found, strict=True)
    measured = {key: value for key, value in pairs if getattr(augment, key) is None}
    values = " and ".join(f"{key} {value}" for key, value in measured.items())
    report.append(f"{values}: measured on {num_images}; DATA.AUGMENT sets others")
    return replace(augment, **measured)


def require_files(listing: Listing, config: DataConfig) -> None:
    """Refuse a table with files that do not exist, unless damaged files are left out.

    The first rank of each machine looks.

    Raises:
        DataError: counts the files, and names some of them.
    """
    is_found = not listing.is_table or config.ON_BAD_IMAGE == "skip"
    if is_found or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    by_folder: dict[str, list[str]] = defaultdict(list)
    for path in pd.unique(listing.paths):
        by_folder[path.rpartition("/")[0]].append(path)
    look = partial(_missing, listing.root)
    with ThreadPool(32) as pool:  # a network file system answers many at once
        missing = [*chain.from_iterable(pool.starmap(look, by_folder.items()))]
    if missing:
        there = other_spelling(Path(missing[0]))
        hint = "" if there is None else f"; there is {there}"
        raise DataError(
            f"{listing.source}: {len(missing)} of {counted(len(listing.paths), 'image')} not found: "
            f"{several(missing)}{hint}. Correct the paths or DATA.DATASET.ROOT, or leave such images out "
            "with DATA.ON_BAD_IMAGE skip"
        )


def _missing(root: Path, folder: str, paths: list[str]) -> list[str]:
    """The files of one folder that do not exist; the folder is listed once."""
    held: set[str] = set()
    with suppress(OSError), os.scandir(os.path.join(root, folder or ".")) as entries:  # noqa: PTH118
        held = {entry.name for entry in entries if entry.is_file()}
    absent = (path for path in paths if path.rpartition("/")[2] not in held)
    return [os.path.join(root, path) for path in absent]  # noqa: PTH118
