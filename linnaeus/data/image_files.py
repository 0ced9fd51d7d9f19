"""Datasets of image files: from a listing of paths and class names to a `DataBundle`."""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain, islice
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import torch
from sklearn.model_selection import StratifiedGroupKFold
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info

from linnaeus.config.schema import AugmentConfig, DataConfig, DatasetConfig
from linnaeus.data import unread_note
from linnaeus.data.batch import Batch
from linnaeus.data.bundle import DataBundle, OnMain, as_size, collate_pairs
from linnaeus.data.checked import MOST_IMAGES, find_damaged, measure_bits, measure_channels
from linnaeus.data.image import DEFAULT_DECODING, SIXTEEN_BIT_EXTENSIONS, Decoding, load_image
from linnaeus.data.splits import SPLITS
from linnaeus.data.taxonomy import UNKNOWN, LabelIndex, Lineage, Taxonomy, UnknownClassError
from linnaeus.data.transforms import Pipeline, Transform, build_transforms
from linnaeus.errors import ConfigError, DataError
from linnaeus.words import counted, several


@dataclass(frozen=True)
class Listing:
    """The files of one split with their labels by name.

    Attributes:
        source: the folder or manifest, for messages.
        root: folder that relative paths start from.
        paths: path of each image, relative to `root` or absolute.
        lineages: class names of each image, coarse to fine.
        unread: files of other endings beside them, by ending.
        groups: the group of each image, which a hold-out must not divide; None where there is none.
    """

    source: str
    root: Path
    paths: list[str]
    lineages: list[Lineage]
    unread: Counter[str] = field(default_factory=Counter)
    groups: list[str] | None = None

    @property
    def files(self) -> list[str]:
        """The path of each image."""
        return [str(self.root / path) for path in self.paths]

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
            [str(each.root / path) for each in listings for path in each.paths],
            [lineage for each in listings for lineage in each.lineages],
            sum((each.unread for each in listings), Counter()),
        )


@dataclass(frozen=True)
class EvaluatedFiles:
    """The files of a dataset that a trained model is to be evaluated on.

    Attributes:
        listings: the files of each root.
        level_names: what the elements of a lineage are, coarse to fine; None where the source does not say.
        is_val: whether they are a validation split; otherwise they are all samples of the dataset.
        index: the classes of the run's own training data, of which it held out samples; else None.
    """

    listings: list[Listing]
    level_names: tuple[str, ...] | None
    is_val: bool
    index: LabelIndex | None = None


class ImageFiles(Dataset[tuple[Tensor, Tensor]]):
    """Images that are decoded on access.

    The loader reads pixels, and normalises while collating unless the transform erases after it. That gives
    the batches of `collate_pairs` bit for bit, and spares a float copy of each image.

    Args:
        root, paths: the folder that relative paths start from, and the path of each image.
        targets: [N, R], int64, one column per level; -1 is unknown. Of several labels per sample [N, C],
            int8, which items have as float32.
        channels: of an image; every image is converted to 1 (grey) or 3 (RGB), or has another number.
        decoding: how a file becomes pixels.
    """

    def __init__(
        self,
        root: Path,
        paths: Sequence[str],
        targets: Tensor,
        channels: int,
        transform: Transform,
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
        self.min_size = transform.min_size if isinstance(transform, Pipeline) else None
        self.normalises_batches = isinstance(transform, Pipeline) and transform.erasing is None

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def files(self) -> list[str]:
        """The path of each image."""
        return [os.path.join(self.root, os.fsdecode(path)) for path in self.paths]  # noqa: PTH118

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self._load(index)), self._target(index)

    def read_pixels(self, index: int) -> tuple[Tensor, Tensor]:
        """The pixels of a sample before normalisation, uint8 [C, height, width], and its labels [R]."""
        return self.transform.pixels(self._load(index)), self._target(index)  # type: ignore[attr-defined]

    def collate_pixels(self, samples: list[tuple[Tensor, Tensor]]) -> Batch:
        """The batch of samples that `read_pixels` gave."""
        images, targets = zip(*samples, strict=True)
        shape = (len(images), *images[0].shape)
        if get_worker_info() is None:
            inputs = torch.empty(shape)
        else:  # in shared memory, as torch's own collate function does it
            inputs = (
                torch.empty(0)
                .set_(torch.UntypedStorage._new_shared(4 * math.prod(shape)))
                .view(shape)
            )
        for image, place in zip(images, inputs, strict=True):
            self.transform.normalise.write(image, place)  # type: ignore[attr-defined]
        return Batch(inputs, default_collate(list(targets)))

    def _target(self, index: int) -> Tensor:
        target = self.targets[index]
        return target.float() if target.dtype == torch.int8 else target

    def _load(self, index: int) -> Tensor:
        path = os.path.join(self.root, os.fsdecode(self.paths[index]))  # noqa: PTH118 (hot path)
        return load_image(path, self.channels, self.decoding, self.min_size)


def roots_of(dataset: DatasetConfig) -> list[DatasetConfig]:
    """The node of each root."""
    roots = dataset.ROOT if isinstance(dataset.ROOT, list) else [dataset.ROOT]
    return [replace(dataset, ROOT=None if root is None else str(root)) for root in roots]


def build_files(
    listings: Mapping[str, Sequence[Listing]],
    index: LabelIndex,
    config: DataConfig,
    on_main: OnMain,
    notes: Sequence[str] = (),
) -> DataBundle:
    """Datasets from the listings of each split, one for each root.

    Without a validation split, the test split takes its place. Without either, a stratified part of each
    root's training samples is held out.

    With `DATA.ON_BAD_IMAGE skip`, rank 0 decodes every file once, and all ranks leave out the damaged ones.

    Raises:
        ConfigError: the augmentation does not fit.
        DataError: a split without a sample or a label, a validation class without a training sample, or a
            manifest that names files that do not exist.
    """
    channels, taxonomy = config.DATASET.CHANNELS, index.taxonomy
    size = as_size(config.IMG_SIZE, (224, 224))
    report = list(notes)
    trains, vals, tests = (list(listings.get(split, ())) for split in SPLITS)
    unread = Listing.joined([*trains, *vals, *tests]).unread
    report += filter(None, [unread_note(unread)])
    tests = _known_tests(tests, index, report)
    if tests and not vals and config.DATASET.FOLD is None:
        report.append(
            f"no validation split: the test split {tests[0].source} is used for validation"
        )
        vals, tests = tests, []
    if not vals:
        pairs = [hold_out(each, config.DATASET, report, taxonomy) for each in trains]
        trains, vals = [train for train, _ in pairs], [val for _, val in pairs]
    found = {
        split: Listing.joined(parts)
        for split, parts in (("train", trains), ("val", vals), ("test", tests))
        if parts
    }
    for listing in found.values():
        if not listing.paths:
            raise DataError(f"{listing.source}: no sample")
        require_files(listing, config)
    files = found["train"].files
    decoding = with_bit_depth(Decoding.of(config), files, config, on_main, report)
    if config.ON_BAD_IMAGE == "skip":
        found = {
            split: without_damaged(listing, channels, decoding, on_main, report)
            for split, listing in found.items()
        }
    augment = _with_statistics(config.AUGMENT, found["train"], channels, decoding, on_main, report)
    transform, preprocessing = build_transforms(augment, size, channels, decoding)
    splits: dict[str, ImageFiles] = {}
    for split, listing in found.items():
        report_coarse(listing, report)
        targets, unknown = encode(listing.lineages, index)
        if unknown:
            raise DataError(
                f"{listing.source}: {counted(len(unknown), 'validation class')} without a training sample: "
                f"{several(name_unknown(unknown, listing))}"
            )
        if split == "train":
            report += homonyms(index, targets)
            report += without_images(taxonomy, targets)
        finest = targets if taxonomy.is_multilabel else targets[:, -1]
        if not (finest != UNKNOWN).any():
            raise DataError(
                f"{listing.source}: no image has a label of rank {taxonomy.names[-1]!r}"
            )
        each = transform if split == "train" else preprocessing.transform()
        splits[split] = ImageFiles(listing.root, listing.paths, targets, channels, each, decoding)
    return DataBundle(
        splits["train"],
        splits["val"],
        taxonomy,
        channels,
        size,
        collate_pairs,
        report,
        preprocessing,
        index,
        test=splits.get("test"),
        source=Listing.joined(trains).source,
    )


def _known_tests(tests: Sequence[Listing], index: LabelIndex, report: list[str]) -> list[Listing]:
    """The test samples of the classes of training; notes others, such as images without a label."""
    known = []
    for listing in tests:
        _, unknown = encode(listing.lineages, index)
        left_out = {position for positions in unknown.values() for position in positions}
        kept = [i for i in range(len(listing.paths)) if i not in left_out]
        if left_out:
            report.append(
                f"{listing.source}: {counted(len(left_out), 'test sample')} left out, of "
                f"{counted(len(unknown), 'class')} without a training sample: {several([*unknown])}"
            )
        if kept:
            known.append(listing.take(kept))
    return known


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
    names = {stratum: number for number, stratum in enumerate(sorted({*strata}, key=repr))}
    division = StratifiedGroupKFold(num_folds).split(
        order, [names[strata[i]] for i in order], [own[i] for i in order]
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
    held_out = counted(len(val), "sample")
    of_fold = "" if fold is None else f", fold {fold} of {num_folds}"
    by_group = "" if listing.groups is None else ", groups undivided"
    report.append(
        f"no validation data of its own: {held_out} held out, stratified by class{of_fold}{by_group}"
    )
    return listing.take(train), listing.take(val)


def report_coarse(listing: Listing, report: list[str]) -> None:
    """Report how many samples have an unknown finest label."""
    coarse = [
        path
        for path, names in zip(listing.paths, listing.lineages, strict=True)
        if names[-1] is None
    ]
    if coarse:
        counts = f"{len(coarse)} of {counted(len(listing.paths), 'image')}"
        report.append(f"{listing.source}: finest label unknown for {counts}, first {coarse[0]}")


def homonyms(index: LabelIndex, targets: Tensor) -> list[str]:
    """A note on the classes that stand under several parents, the smallest first: one may be a typo."""
    found: list[tuple[int, str]] = []
    for level, depth in enumerate(index.columns):
        if depth == 0 or index.taxonomy.is_multilabel:
            continue
        above = [name for _, name in index.lookup[depth - 1]]
        counts = targets[:, level].clamp(min=UNKNOWN).add(1).bincount(minlength=1).tolist()[1:]
        places: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for (parent, name), label in index.lookup[depth].items():
            if parent != UNKNOWN:
                number = counts[label] if label < len(counts) else 0
                places[name].append((number, above[parent]))
        for name, held in sorted(places.items()):
            if len(held) > 1:
                shown = ", ".join(f"{parent} {number}" for number, parent in sorted(held))
                found.append((min(held)[0], f"{name} (images: {shown})"))
    if not found:
        return []
    names = "; ".join(text for _, text in sorted(found)[:5])
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return [
        f"{counted(len(found), 'name')} under several parents, different classes: {names}{more}"
    ]


def without_images(taxonomy: Taxonomy, targets: Tensor) -> list[str]:
    """A note on the classes that no training image has, such as where all of theirs are damaged."""
    lacking: list[str] = []
    for column, level in enumerate(taxonomy.levels):
        if taxonomy.is_multilabel:
            numbers = (targets == 1).sum(dim=0)
        else:
            numbers = (targets[:, column] + 1).bincount(minlength=len(level.classes) + 1)[1:]
        lacking += [n for n, num in zip(level.classes, numbers.tolist(), strict=True) if not num]
    return [f"no training image is left of: {several(lacking)}"] if lacking else []


def encode(lineages: Sequence[Lineage], index: LabelIndex) -> tuple[Tensor, dict[str, list[int]]]:
    """Targets [N, R] of samples, and the positions of the samples of each class that the index lacks.

    With several labels per sample, targets are [N, C], int8: 1, 0, or -1 where unknown. The targets of those
    samples are unknown at every level.
    """
    is_multilabel = index.taxonomy.is_multilabel
    num_columns = len(index.lookup[0] if is_multilabel else index.columns)
    labels: dict[Lineage, Tensor] = {}
    lacking: dict[Lineage, str] = {}
    unknown: dict[str, list[int]] = {}
    for position, lineage in enumerate(lineages):
        if lineage not in labels:
            try:
                row = index.encode(lineage)
            except UnknownClassError as error:
                row, lacking[lineage] = (UNKNOWN,) * num_columns, error.args[0]
            labels[lineage] = torch.tensor(row, dtype=torch.int8 if is_multilabel else torch.int64)
        if lineage in lacking:
            unknown.setdefault(lacking[lineage], []).append(position)
    positions = {lineage: position for position, lineage in enumerate(labels)}
    rows = torch.stack([*labels.values()])
    return rows[[positions[lineage] for lineage in lineages]], unknown


def name_unknown(unknown: Mapping[str, Sequence[int]], listing: Listing) -> list[str]:
    """The unknown classes, each with its first sample."""
    return [
        f"{name} (first in {listing.root / listing.paths[found[0]]})"
        for name, found in unknown.items()
    ]


def with_bit_depth(
    decoding: Decoding,
    files: Sequence[str],
    config: DataConfig,
    on_main: OnMain,
    report: list[str],
) -> Decoding:
    """The decoding with the bits that rank 0 measures in 16-bit training files, where there are any."""
    files = [file for file in files if Path(file).suffix.lower() in SIXTEEN_BIT_EXTENSIONS]
    if config.BIT_DEPTH is not None or not files:
        return decoding
    bits: int | None = on_main(lambda: measure_bits(files, config.DATASET.CHANNELS))
    if bits in (None, 0, 16):
        return decoding
    report.append(
        f"16-bit files hold {bits}-bit values, measured on {min(MOST_IMAGES, len(files))}: scaled by "
        f"{2**bits - 1}, larger ones are white; DATA.BIT_DEPTH sets another"
    )
    return replace(decoding, bit_depth=bits)


def _with_statistics(
    augment: AugmentConfig,
    train: Listing,
    channels: int,
    decoding: Decoding,
    on_main: OnMain,
    report: list[str],
) -> AugmentConfig:
    """The node with MEAN and STD that rank 0 measures, where they are null and channels are no colors."""
    if channels in (1, 3) or None not in (augment.MEAN, augment.STD):
        return augment
    found = on_main(lambda: measure_channels(train.files, channels, decoding))
    if found is None:
        return augment
    num_images = counted(min(MOST_IMAGES, len(train.paths)), "training image")
    measured = dict(zip(("MEAN", "STD"), found, strict=True))
    measured = {key: value for key, value in measured.items() if getattr(augment, key) is None}
    values = " and ".join(f"{key} {value}" for key, value in measured.items())
    report.append(f"{values}: measured on {num_images}; DATA.AUGMENT sets others")
    return replace(augment, **measured)


def without_damaged(
    listing: Listing, channels: int, decoding: Decoding, on_main: OnMain, report: list[str]
) -> Listing:
    """Leave out the files that cannot be decoded, which rank 0 looks for, and report them.

    Raises:
        DataError: none can be.
    """
    damaged: dict[int, str] | None = on_main(
        lambda: find_damaged(listing.files, channels, decoding)[0]
    )
    if not damaged:
        return listing
    num_files = len(listing.paths)
    named = several([f"{listing.paths[i]} ({reason})" for i, reason in damaged.items()])
    if len(damaged) == num_files:
        raise DataError(f"{listing.source}: none of the {num_files} images can be read: {named}")
    report.append(f"{listing.source}: {counted(len(damaged), 'damaged image')} left out: {named}")
    return listing.take([i for i in range(num_files) if i not in damaged])


def require_files(listing: Listing, config: DataConfig) -> None:
    """Refuse a manifest with files that do not exist, unless damaged files are left out.

    The first rank of each machine looks.

    Raises:
        DataError: counts the files, and names some of them.
    """
    is_listed = config.DATASET.NAME != "manifest" or config.ON_BAD_IMAGE == "skip"
    if is_listed or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    files = [os.path.join(listing.root, path) for path in listing.paths]  # noqa: PTH118 (hot path)
    with ThreadPool(32) as pool:  # a network file system answers many at once
        found = pool.map(os.path.isfile, files, chunksize=256)
    missing = [file for file, is_file in zip(files, found, strict=True) if not is_file]
    if missing:
        raise DataError(
            f"{listing.source}: {len(missing)} of {counted(len(files), 'image')} not found: "
            f"{several(missing)}. Correct the paths or DATA.DATASET.ROOT, or leave such images out with "
            "DATA.ON_BAD_IMAGE skip"
        )
