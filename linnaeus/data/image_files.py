"""Datasets of image files: from a listing of paths and class names to a `DataBundle`."""

from __future__ import annotations

import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import chain, islice, pairwise
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
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


@dataclass(frozen=True)
class Listing:
    """The files of one split with their labels by name.

    Attributes:
        source: the folder or manifest, for messages.
        root: folder that relative paths start from.
        paths: path of each image, relative to `root` or absolute.
        lineages: class names of each image, coarse to fine.
        groups: the group of each image, which a hold-out must not divide; None where there is none.
        is_table: whether a table lists the files, so that some may be missing.
    """

    source: str
    root: Path
    paths: list[str]
    lineages: list[Lineage]
    groups: list[str] | None = None
    is_table: bool = False

    @property
    def files(self) -> list[str]:
        """The path of each image."""
        return [os.path.join(self.root, path) for path in self.paths]  # noqa: PTH118 (hot path)

    def take(self, positions: Sequence[int]) -> Listing:
        """The listing of some of the samples."""
        return replace(
            self,
            paths=[self.paths[i] for i in positions],
            lineages=[self.lineages[i] for i in positions],
            groups=None if self.groups is None else [self.groups[i] for i in positions],
        )

    @classmethod
    def joined(cls, listings: Sequence[Listing]) -> Listing:
        """The samples of several roots, one after the other."""
        if len(listings) == 1:
            return listings[0]
        return cls(
            ", ".join(each.source for each in listings),
            Path(),
            [file for each in listings for file in each.files],
            [lineage for each in listings for lineage in each.lineages],
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
        paths: Sequence[str],
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
    except DataError as error:
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
        {split: Listing.joined(each).files for split, each in files.splits.items()},
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
    report_homonyms(Listing.joined(trains).lineages, report)
    if lacking := classes_without_images(taxonomy, train.targets):
        report.append(f"no training image is left of: {several(lacking)}")
    val = val or make(vals)[0]
    augment = _with_statistics(
        config.AUGMENT, train.files, dataset.CHANNELS, decoding, on_main, report
    )
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
            listing = listing.take(_without(num_files, damaged))
    targets, unknown = encode(listing.lineages, index)
    left_out = {position for positions in unknown.values() for position in positions}
    if unknown:
        kept = _without(len(listing.paths), left_out)
        names = [
            f"{name} (first in {listing.root / listing.paths[positions[0]]})"
            for name, positions in unknown.items()
        ]
        text = (
            f"{listing.source}: {counted(len(left_out), 'sample')} of {counted(len(names), 'class')} "
            f"without a training sample: {several(names)}"
        )
        if remedy is not None or not kept:
            raise DataError(f"{text}; {remedy if kept else 'these are all samples'}")
        report.append(f"{text}; left out")
        listing, targets = listing.take(kept), targets[kept]
    coarse = [
        path
        for path, names in zip(listing.paths, listing.lineages, strict=True)
        if names[-1] is None
    ]
    if coarse:
        counts = f"{len(coarse)} of {counted(len(listing.paths), 'image')}"
        report.append(f"{listing.source}: finest label unknown for {counts}, first {coarse[0]}")
    finest = targets if index.taxonomy.is_multilabel else targets[:, -1]
    if needs_labels and not (finest != UNKNOWN).any():
        raise DataError(
            f"{listing.source}: no image has a label of level {index.taxonomy.names[-1]!r}"
        )
    split = ImageFiles(listing.root, listing.paths, targets, channels, decoding=decoding)
    return split, len(left_out)


def stratified_split(
    keys: Sequence[str],
    strata: Sequence[Hashable],
    fraction: float,
    fold: int | None = None,
    num_folds: int = 0,
) -> tuple[list[int], list[int]]:
    """Hold out a fraction of each stratum for validation; each keeps at least one training sample.

    The choice depends on the keys (permanent names, such as relative paths) alone, not on a seed or on the
    order of the samples, so accuracies of different runs, machines and versions are comparable. Rounding
    carries over from stratum to stratum, so that the total is right even where strata are small.

    With a `fold`, every `num_folds`-th sample is held out, from that one on; a sample is in one fold, or in
    none where it is alone in its stratum.

    Returns:
        Positions of the training and of the validation samples, each ascending.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for position in sorted(range(len(keys)), key=lambda i: (_digest(keys[i]), keys[i])):
        members[strata[position]].append(position)
    val: list[int] = []
    seen = 0
    for stratum in sorted(members, key=repr):
        held = members[stratum]
        if fold is None:
            wanted = round(fraction * (seen + len(held))) - len(val)
            val += held[: max(0, min(wanted, len(held) - 1))]
        elif len(held) > 1:
            val += held[(fold - seen) % num_folds :: num_folds]
        seen += len(held)
    return _without(len(keys), val), sorted(val)


def _digest(key: str) -> bytes:
    return blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()


def _without(number: int, positions: Iterable[int]) -> list[int]:
    held_out = set(positions)
    return [i for i in range(number) if i not in held_out]


def grouped_split(
    keys: Sequence[str],
    strata: Sequence[Hashable],
    groups: Sequence[str],
    fold: int,
    num_folds: int,
) -> tuple[list[int], list[int]]:
    """Hold out one of `num_folds` parts of the groups, with about the same strata in each.

    A group stays in training where a stratum would have no training sample without it. A sample without a
    group is one of its own. The choice depends on the names alone.

    Returns:
        As `stratified_split`.
    """
    own = [group or f"\0{key}" for group, key in zip(groups, keys, strict=True)]
    order = sorted(range(len(keys)), key=lambda i: (_digest(own[i]), own[i], keys[i]))
    division = StratifiedGroupKFold(num_folds).split(
        order, [repr(strata[i]) for i in order], [own[i] for i in order]
    )
    try:
        with warnings.catch_warnings(action="ignore"):  # classes with few samples
            _, found = next(islice(division, fold, None))
    except ValueError:  # no class has as many samples as there are folds
        found = []
    members: dict[str, list[int]] = defaultdict(list)
    for place in found:
        members[own[order[place]]].append(order[place])
    numbers = Counter(strata)
    val: list[int] = []
    for positions in members.values():
        held = Counter(strata[i] for i in positions)
        if all(held[stratum] < numbers[stratum] for stratum in held):
            numbers -= held
            val += positions
    return _without(len(keys), val), sorted(val)


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
    strata: Sequence[Hashable] = listing.lineages
    if taxonomy.is_multilabel:
        labels = [taxonomy.split(cell or "") for (cell,) in listing.lineages]
        counts = Counter(chain.from_iterable(labels))
        strata = [min(names, key=lambda name: (counts[name], name), default="") for names in labels]
    if listing.groups is None:
        train, val = stratified_split(listing.paths, strata, fraction, fold, num_folds)
    else:
        parts = num_folds if fold is not None else max(2, round(1 / fraction))
        train, val = grouped_split(listing.paths, strata, listing.groups, fold or 0, parts)
    if not val:
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


def report_homonyms(lineages: Iterable[Lineage], report: list[str]) -> None:
    """Report classes of one name under several parents, the smallest first: one may be a typo."""
    found: list[tuple[int, str]] = []
    for above, below in pairwise(zip(*lineages, strict=True)):
        places: dict[str | None, list[tuple[int, str]]] = defaultdict(list)
        for (parent, name), number in Counter(zip(above, below, strict=True)).items():
            if parent is not None:
                places[name].append((number, parent))
        for name, held in places.items():
            if name is not None and len(held) > 1:
                shown = ", ".join(f"{parent} {number}" for number, parent in sorted(held))
                found.append((min(held)[0], f"{name} (images: {shown})"))
    if found:
        names = several([text for _, text in sorted(found)])
        report.append(
            f"{counted(len(found), 'name')} under several parents, different classes: {names}"
        )


def report_repeated(train: Listing, held_out: Sequence[Listing], report: list[str]) -> None:
    """Report training files that have several labels, or that another split has too."""
    labels: dict[str, Lineage] = {}
    pairs = zip(train.files, train.lineages, strict=True)
    found = [file for file, lineage in pairs if labels.setdefault(file, lineage) != lineage]
    found += [file for listing in held_out for file in listing.files if file in labels]
    if found:
        number = counted(len({*found}), "training image")
        report.append(f"{number} with several labels, or also held out, first {found[0]}")


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


def encode(lineages: Sequence[Lineage], index: LabelIndex) -> tuple[Tensor, dict[str, list[int]]]:
    """Targets [N, L] of samples, and the positions of the samples of each class that the index lacks.

    With several labels per sample, targets are [N, C], int8: 1, 0, or -1 where unknown. The targets of those
    samples are unknown at every level.
    """
    dtype = torch.int8 if index.taxonomy.is_multilabel else torch.int64
    numbers = {lineage: number for number, lineage in enumerate(dict.fromkeys(lineages))}
    lacking: dict[Lineage, str] = {}
    rows: list[Tensor] = []
    for lineage in numbers:
        try:
            row = index.encode(lineage)
        except UnknownClassError as error:
            lacking[lineage] = error.args[0]
            row = index.encode((None,) * len(lineage))
        rows.append(torch.tensor(row, dtype=dtype))
    unknown: dict[str, list[int]] = defaultdict(list)
    for position, lineage in enumerate(lineages):
        if lineage in lacking:
            unknown[lacking[lineage]].append(position)
    return torch.stack(rows)[[numbers[lineage] for lineage in lineages]], dict(unknown)


def _with_statistics(
    augment: AugmentConfig,
    files: Sequence[str],
    channels: int,
    decoding: Decoding,
    on_main: OnMain,
    report: list[str],
) -> AugmentConfig:
    """The node with MEAN and STD that rank 0 measures, where they are null and channels are no colors."""
    if channels in (1, 3) or None not in (augment.MEAN, augment.STD):
        return augment
    found = on_main(lambda: measure_channels(files, channels, decoding))
    if found is None:
        return augment
    num_images = counted(min(MOST_IMAGES, len(files)), "training image")
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
    files = listing.files
    with ThreadPool(32) as pool:  # a network file system answers many at once
        found = pool.map(os.path.isfile, files, chunksize=256)
    missing = [file for file, is_file in zip(files, found, strict=True) if not is_file]
    if missing:
        there = other_spelling(Path(missing[0]))
        hint = "" if there is None else f"; there is {there}"
        raise DataError(
            f"{listing.source}: {len(missing)} of {counted(len(files), 'image')} not found: "
            f"{several(missing)}{hint}. Correct the paths or DATA.DATASET.ROOT, or leave such images out "
            "with DATA.ON_BAD_IMAGE skip"
        )
