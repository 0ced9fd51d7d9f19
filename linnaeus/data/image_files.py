"""Datasets of image files: from a listing of paths and class names to splits of `ImageFiles`."""

from __future__ import annotations

import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import chain, islice
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from sklearn.model_selection import StratifiedGroupKFold
from torch import Tensor
from torch.utils.data import Dataset

from linnaeus.config.schema import DataConfig, DatasetConfig
from linnaeus.data.bundle import DataBundle, as_size, collate_pairs
from linnaeus.data.checked import find_damaged, measure_ranges
from linnaeus.data.image import DEFAULT_DECODING, Decoding, load_image
from linnaeus.data.packed import container
from linnaeus.data.taxonomy import UNKNOWN, LabelIndex, Lineage, Taxonomy, UnknownClassError
from linnaeus.data.transforms import Pipeline, build_transforms
from linnaeus.runtime.errors import ConfigError, DataError
from linnaeus.runtime.files import other_spelling
from linnaeus.runtime.words import counted, several

T = TypeVar("T")
Paths = np.ndarray[Any, np.dtype[np.bytes_]]
"""File names as the file system has them, in one block of memory, which the processes of a loader share."""
Texts = np.ndarray[Any, np.dtype[np.object_]]
Places = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
_JPEG = (b".jpg", b".jpeg", b".JPG", b".JPEG")


def encoded(paths: Iterable[str]) -> Paths:
    """Return the paths as bytes."""
    return np.array([path.encode("utf-8", "surrogateescape") for path in paths], dtype=np.bytes_)


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
        paths: path of each image, relative to `root` or absolute.
        lineages: class names that images have, coarse to fine, each once.
        lineage_ids: the position in `lineages` of the class names of each image.
        groups: the group of each image, which a hold-out must not divide; None if there is none.
        is_table: whether a table lists the files, so that some may be missing.
    """

    source: str
    root: Path
    paths: Paths
    lineages: list[Lineage]
    lineage_ids: Places
    groups: Texts | None = None
    is_table: bool = False

    @classmethod
    def of(
        cls,
        source: str,
        root: Path,
        paths: Iterable[str],
        lineages: Iterable[Lineage],
        *,
        is_table: bool = False,
    ) -> Listing:
        """Return the listing of paths with the class names of each."""
        return cls(source, root, encoded(paths), *distinct(lineages), is_table=is_table)

    def file(self, position: int) -> str:
        """Return the path of one image."""
        return os.path.join(self.root, os.fsdecode(self.paths[position]))  # noqa: PTH118

    @property
    def files(self) -> list[str]:
        """The path of each image."""
        return [*map(self.file, range(len(self.paths)))]

    @property
    def counts(self) -> list[int]:
        """The number of images with each of the `lineages`."""
        return np.bincount(self.lineage_ids, minlength=len(self.lineages)).tolist()  # type: ignore[no-any-return]

    def take(self, positions: Places | Mask) -> Listing:
        """Return the listing of some of the samples, by position or by a mask."""
        held, numbers = np.unique(self.lineage_ids[positions], return_inverse=True)
        return replace(
            self,
            paths=self.paths[positions],
            lineages=[self.lineages[i] for i in held],
            lineage_ids=numbers,
            groups=None if self.groups is None else self.groups[positions],
        )


@dataclass(frozen=True)
class FoundFiles:
    """The files of a dataset, as they lie on disk.

    Attributes:
        splits: the listing of each split that there is.
        level_names: names of the elements of a lineage, coarse to fine; None where the source gives none.
        notes: sentences for the user about unread files.
        make_index: gives the classes of the training samples. Raises a `DataError` where these cannot be
            learned: a level with one class, or columns from fine to coarse.
    """

    splits: dict[str, Listing]
    level_names: tuple[str, ...] | None
    notes: list[str]
    make_index: Callable[[], LabelIndex]


@dataclass(eq=False)
class ImageFiles(Dataset[tuple[Tensor, Tensor]]):
    """Images that are decoded on access.

    Attributes:
        listing: the files.
        labels: [K, L], int64, of each of the listing's K lineages, one column per level; -1 is unknown. Of
            several labels per sample [K, C], int8, which items have as float32.
        channels: of an image; every image is converted to 1 (grey) or 3 (RGB), or has another number.
        decoding: how a file becomes pixels.
        transform: resizes and augments an image; set before the first access.
    """

    listing: Listing
    labels: Tensor
    channels: int
    decoding: Decoding = DEFAULT_DECODING
    transform: Pipeline | None = None

    def __len__(self) -> int:
        return len(self.listing.paths)

    def take(self, rows: Tensor) -> ImageFiles:
        """Return the samples at these indices."""
        held, listing = rows.numpy(), self.listing
        paths, ids = listing.paths[held], listing.lineage_ids[held]
        return replace(self, listing=replace(listing, paths=paths, lineage_ids=ids, groups=None))

    @property
    def files(self) -> list[str]:
        """The path of each image."""
        return self.listing.files

    @property
    def targets(self) -> Tensor:
        """The labels of each image, [N, L] or [N, C]."""
        return self.labels[torch.from_numpy(self.listing.lineage_ids)]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the pixels of a sample, uint8 [C, height, width], and its labels [L]."""
        assert self.transform is not None
        path = self.listing.file(index)
        image = load_image(path, self.channels, self.decoding, self.transform.min_size)
        target = self.labels[self.listing.lineage_ids[index]]
        return self.transform(image), target.float() if target.dtype == torch.int8 else target


@dataclass
class FileSplits:
    """The image files of a run, which rank 0 finds and sends to the other ranks.

    Attributes:
        train, val, test: the splits, without transforms; `test` is None if there is none.
        index: the labels of class names.
        report: sentences for the user.
        source: the folder or manifest.
    """

    train: ImageFiles
    val: ImageFiles
    test: ImageFiles | None
    index: LabelIndex
    report: list[str]
    source: str


@contextmanager
def optional_test(notes: list[str], split: str, dataset: DatasetConfig) -> Iterator[None]:
    """Note why there is no test split instead of raising, where the configuration names none."""
    try:
        yield
    except (ConfigError, DataError) as error:
        if split != "test" or dataset.TEST is not None:
            raise
        notes.append(f"no test split: {error}")


def find_splits(files: FoundFiles, config: DataConfig, *, reads_images: bool = True) -> FileSplits:
    """Return the splits of the files, labeled.

    Without a validation split, the test split takes its place. Without either, a stratified part of the
    training samples is held out. With `reads_images`, ranges of values are measured, and `ON_BAD_IMAGE skip`
    decodes every file once and leaves out the damaged ones.

    Raises:
        DataError: a split without a label, or a validation class without a training sample.
    """
    index = files.make_index()
    dataset, splits, report = config.DATASET, files.splits, [*files.notes]
    train, val, test = (splits.pop(split, None) for split in ("train", "val", "test"))
    assert train is not None
    report_names(train, index, report)
    source, decoding = train.source, Decoding.of(config)
    if reads_images:
        held = {"train": train, "val": val, "test": test}
        wide = {split: _wide_files(each) for split, each in held.items() if each is not None}
        decoding, notes = measure_ranges(wide, dataset.CHANNELS, decoding)
        report += notes
    make = partial(
        make_split,
        index=index,
        config=config,
        channels=dataset.CHANNELS,
        decoding=decoding,
        report=report,
        reads_images=reads_images,
    )
    tested = validated = None
    if test is not None:
        with optional_test(report, "test", dataset):
            tested, _ = make(test, remedy=None)
    if test is not None and tested is not None and val is None and dataset.FOLD is None:
        report.append(f"no validation split: {test.source} is used")
        val, test, validated, tested = test, None, tested, None
    elif val is None:
        train, val = hold_out(train, dataset, report, index.taxonomy)
    report_repeated(train, [val] if test is None else [val, test], report)
    trained, _ = make(train)
    if validated is None:
        validated, _ = make(val)
    return FileSplits(trained, validated, tested, index, report, source)


def bundle_files(splits: FileSplits, config: DataConfig) -> DataBundle:
    """Return the bundle of splits of image files.

    Raises:
        ConfigError: the augmentation does not fit.
        DataError: a manifest names files that do not exist on this machine.
    """
    train, channels = splits.train, splits.train.channels
    size = as_size(config.IMG_SIZE, (224, 224))
    train.transform, preprocessing = build_transforms(
        config.AUGMENT, size, channels, train.decoding
    )
    for split in filter(None, (train, splits.val, splits.test)):
        require_files(split.listing, config)
        split.transform = split.transform or preprocessing.transform()
    return DataBundle(
        train,
        splits.val,
        splits.index.taxonomy,
        channels,
        size,
        collate_pairs,
        splits.report,
        preprocessing,
        splits.index,
        test=splits.test,
        source=splits.source,
    )


def make_split(
    listing: Listing,
    *,
    index: LabelIndex,
    config: DataConfig,
    channels: int,
    decoding: Decoding,
    report: list[str],
    remedy: str | None = "remove them, or add training samples",
    needs_labels: bool = True,
    reads_images: bool = True,
) -> tuple[ImageFiles, int]:
    """Give samples their labels, and leave out damaged files with `ON_BAD_IMAGE skip`.

    Args:
        listing: the files, in the form of the index.
        report: gets sentences on omitted samples and unknown labels.
        remedy: ends the error for samples of classes that the index lacks; None leaves these samples out.
        needs_labels: refuse samples without any label of the finest level.
        reads_images: decode files to find damaged ones.

    Returns:
        The samples, without a transform, and the number that is left out for their classes.

    Raises:
        DataError: no file can be read, no label is known, or classes are unknown.
    """
    if config.ON_BAD_IMAGE == "skip" and reads_images:
        damaged, _ = find_damaged(listing.files, channels, decoding)
        shown = (f"{os.fsdecode(listing.paths[i])} ({why})" for i, why in damaged.items())
        named, num_files = several([*shown]), len(listing.paths)
        if len(damaged) == num_files:
            raise DataError(
                f"{listing.source}: none of the {num_files} images can be read: {named}"
            )
        if damaged:
            number = counted(len(damaged), "damaged image")
            report.append(f"{listing.source}: {number} left out: {named}")
            listing = listing.take(_without(num_files, [*damaged]))
    labels, lacking = encode(listing.lineages, index)
    is_unknown = np.isin(listing.lineage_ids, [*lacking])
    num_left_out = int(is_unknown.sum())
    if num_left_out:
        ids, places = np.unique(listing.lineage_ids[is_unknown], return_index=True)
        positions = is_unknown.nonzero()[0][places]
        first: dict[str, Path] = {}
        for position, place in sorted(zip(positions, ids, strict=True)):
            first.setdefault(lacking[place], Path(listing.file(position)))
        names = [f"{name} (first in {file})" for name, file in first.items()]
        text = (
            f"{listing.source}: {counted(num_left_out, 'sample')} of {counted(len(names), 'class')} "
            f"without a training sample: {several(names)}"
        )
        is_all = num_left_out == len(is_unknown)
        if remedy is not None or is_all:
            raise DataError(f"{text}; {'these are all samples' if is_all else remedy}")
        report.append(f"{text}; left out")
        listing = listing.take(~is_unknown)
        labels, _ = encode(listing.lineages, index)
    is_coarse = np.array([x[-1] is None for x in listing.lineages])[listing.lineage_ids]
    if num_coarse := int(is_coarse.sum()):
        counts = f"{num_coarse} of {counted(len(is_coarse), 'image')}"
        first_path = os.fsdecode(listing.paths[is_coarse.argmax()])
        report.append(f"{listing.source}: finest label unknown for {counts}, first {first_path}")
    finest = labels if index.taxonomy.is_multilabel else labels[:, -1]
    if needs_labels and not (finest != UNKNOWN).any():
        raise DataError(
            f"{listing.source}: no image has a label of level {index.taxonomy.names[-1]!r}"
        )
    return ImageFiles(listing, labels, channels, decoding), num_left_out


def stratified_split(
    keys: Paths,
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
    order = _digests(keys).argsort(kind="stable")
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


def _digests(keys: Iterable[bytes]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    digests = (blake2b(key, digest_size=8).digest() for key in keys)
    return np.fromiter(digests, dtype="S8").view(">u8").astype(np.uint64)


def _without(number: int, positions: Sequence[int] | Places) -> Places:
    return np.delete(np.arange(number), positions)


def grouped_split(
    keys: Paths, strata: Places, groups: Texts, fold: int, num_folds: int
) -> tuple[Places, Places]:
    """Hold out one of `num_folds` parts of the groups, with about the same strata in each.

    A group stays in training where a stratum would have no training sample without it. A sample without a
    group is its own group. The choice depends only on the names.

    Returns:
        As `stratified_split`.
    """
    own = [group.encode() or b"\0" + key for group, key in zip(groups, keys, strict=True)]
    digests = _digests(own)
    order = sorted(range(len(keys)), key=lambda i: (digests[i], own[i], keys[i]))
    division = StratifiedGroupKFold(num_folds).split(order, strata[order], [own[i] for i in order])
    try:
        with warnings.catch_warnings(action="ignore"):  # classes with few samples
            _, found = next(islice(division, fold, None))
    except ValueError:  # no class has as many samples as there are folds
        found = []
    members: dict[bytes, list[int]] = defaultdict(list)
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
    if not taxonomy.is_multilabel and len(never := np.setdiff1d(strata, strata[val])):
        finest = ([*filter(None, listing.lineages[order[i]])] for i in never.tolist())
        report.append(
            f"{counted(len(never), 'class')} without a validation sample, having too few: "
            f"{several([repr(x[-1]) if x else 'unknown' for x in finest])}"
        )
    return listing.take(train), listing.take(val)


def report_names(train: Listing, index: LabelIndex, report: list[str]) -> None:
    """Report names of a level that may be one class: they differ little, or stand under several parents.

    The folders of images show the parents of each name, so these are reported for tables alone.
    """
    for depth, level in enumerate(index.taxonomy.levels):
        alike: dict[str, set[str]] = defaultdict(set)
        for _, name in index.lookup[depth]:
            alike["".join(name.split()).casefold()].add(name)
        pairs = [
            " and ".join(map(repr, sorted(names))) for names in alike.values() if len(names) > 1
        ]
        if pairs:
            report.append(
                f"{train.source}: classes of {level.name} that differ only in case or spaces: "
                f"{several(pairs)}"
            )
        if depth == 0 or not train.is_table:
            continue
        parents: dict[str, Counter[str]] = defaultdict(Counter)
        for lineage, number in zip(train.lineages, train.counts, strict=True):
            above, below = lineage[depth - 1 : depth + 1]
            if above is not None and below is not None:
                parents[below][above] += number
        held = [(name, rows) for name, rows in parents.items() if len(rows) > 1]
        held.sort(key=lambda each: min(each[1].values()))  # a mistake is in few rows
        shown = [
            f"{name} stands under "
            + several([f"{above} ({counted(n, 'row')})" for above, n in rows.most_common()])
            for name, rows in held
        ]
        if shown:
            report.append(
                f"{train.source}: {level.name} of several parents are several classes: {several(shown)}"
            )


def report_repeated(train: Listing, held_out: Sequence[Listing], report: list[str]) -> None:
    """Report training files that have several labels, or that another split has too."""
    hashes = _hashes(train)
    order = np.argsort(hashes, kind="stable")
    files, labels = hashes[order], train.lineage_ids[order]
    twice = order[1:][(files[1:] == files[:-1]) & (labels[1:] != labels[:-1])]
    held = np.concatenate([*map(_hashes, held_out)])
    places = np.searchsorted(files, held).clip(max=len(files) - 1)
    both = order[places[files[places] == held]]
    for found, what in ((twice, "with several labels"), (both, "also held out")):
        if len(found):
            number = counted(len(np.unique(hashes[found])), "training image")
            report.append(f"{number} {what}, first {train.file(found[0])}")


def _hashes(listing: Listing) -> Places:
    """Return a number of 64 bits for the path of each file; different files have different numbers."""
    folder = os.fsencode(listing.root / "x")[:-1]
    whole = (path if path.startswith(b"/") else folder + path for path in listing.paths)
    return np.fromiter(map(hash, whole), np.int64, len(listing.paths))


def encode(lineages: Sequence[Lineage], index: LabelIndex) -> tuple[Tensor, dict[int, str]]:
    """Targets [N, L] of lineages, and the class that the index lacks, by position.

    With several labels per sample, targets are [N, C], int8: 1, 0, or -1 where unknown. Targets with such a
    class are unknown at every level.
    """
    if index.taxonomy.is_multilabel:
        return _encode_sets(lineages, index)
    lacking: dict[int, str] = {}
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


def _wide_files(listing: Listing) -> list[str]:
    """Return the files whose values may have more than 8 bits."""
    is_jpeg = np.logical_or.reduce([np.strings.endswith(listing.paths, end) for end in _JPEG])
    return [listing.file(int(position)) for position in np.flatnonzero(~is_jpeg)]


def require_files(listing: Listing, config: DataConfig) -> None:
    """Refuse a table with files that do not exist, unless damaged files are left out.

    The first rank of each machine looks.

    Raises:
        DataError: counts the files, and names some of them.
    """
    is_found = not listing.is_table or config.ON_BAD_IMAGE == "skip"
    if is_found or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    folders: dict[bytes, int] = {}
    found = (path.rpartition(b"/")[0] for path in listing.paths)
    numbers = (folders.setdefault(folder, len(folders)) for folder in found)
    ids = np.fromiter(numbers, np.int32, len(listing.paths))
    order = np.argsort(ids, kind="stable")
    parts = np.split(listing.paths[order], np.bincount(ids).cumsum()[:-1])
    look = partial(_missing, os.fsencode(listing.root))
    with ThreadPool(32) as pool:  # a network file system answers many at once
        missing = [*dict.fromkeys(chain(*pool.starmap(look, zip(folders, parts, strict=True))))]
    if missing:
        there = other_spelling(Path(missing[0]))
        hint = "" if there is None else f"; there is {there}"
        raise DataError(
            f"{listing.source}: {len(missing)} of {counted(len(listing.paths), 'image')} not found: "
            f"{several(missing)}{hint}. Correct the paths or DATA.DATASET.ROOT, or leave such images out "
            "with DATA.ON_BAD_IMAGE skip"
        )


def _missing(root: bytes, folder: bytes, paths: Paths) -> list[str]:
    """Return the files of one folder that do not exist; the folder is listed once."""
    held: set[bytes] = set()
    with suppress(OSError), os.scandir(os.path.join(root, folder or b".")) as entries:  # noqa: PTH118
        held = {entry.name for entry in entries if entry.is_file()}
    absent = (
        path
        for path in paths
        if not {(name := path.rpartition(b"/")[2]), os.fsencode(container(os.fsdecode(name)))}
        & held
    )
    return [os.fsdecode(os.path.join(root, path)) for path in absent]  # noqa: PTH118
