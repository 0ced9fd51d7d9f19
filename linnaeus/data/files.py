"""Datasets of image files: from a listing of paths and class names to a `DataBundle`."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info

from linnaeus.config.schema import DataConfig
from linnaeus.data.batch import Batch
from linnaeus.data.bundle import DataBundle, OnMain, as_size, collate_pairs
from linnaeus.data.image import find_damage, load_image
from linnaeus.data.split import stratified_split
from linnaeus.data.taxonomy import UNKNOWN, LabelIndex, Lineage, Taxonomy, UnknownClassError
from linnaeus.data.transforms import Pipeline, Transform, build_transforms, preprocessing_of
from linnaeus.errors import ConfigError, DataError
from linnaeus.words import counted

logger = logging.getLogger("linnaeus.data")

NUM_NAMED = 5
"""Largest number of files or classes that a message names; it only counts the others."""


@dataclass(frozen=True)
class Listing:
    """The files of one split with their labels by name.

    Attributes:
        source: the folder or manifest, for messages.
        root: folder that relative paths start from.
        paths: path of each image, relative to `root` or absolute.
        lineages: class names of each image, coarse to fine.
        places: position of each sample in the source, such as `line 7`; empty where its path tells it.
    """

    source: str
    root: Path
    paths: list[str]
    lineages: list[Lineage]
    places: Sequence[str] = ()

    def take(self, positions: Sequence[int]) -> Listing:
        """The listing of some of the samples."""
        return replace(
            self,
            paths=[self.paths[i] for i in positions],
            lineages=[self.lineages[i] for i in positions],
            places=[self.places[i] for i in positions] if self.places else (),
        )

    def place(self, position: int) -> str:
        """The position of a sample in the source, or else its path; for messages."""
        return self.places[position] if self.places else str(self.root / self.paths[position])


ALL_SAMPLES = "all samples, as there is no validation split"
"""The kind of a `Part` that is the whole dataset."""


@dataclass(frozen=True)
class Part:
    """The files of a dataset that a trained model is to be evaluated on.

    Attributes:
        listing: the files.
        level_names: what the elements of a lineage are, coarse to fine; None where the source does not say.
        kind: which part of the dataset it is, in words.
        report: sentences for the user.
        index: the classes of the training data that the part was held out from; else None.
    """

    listing: Listing
    level_names: tuple[str, ...] | None
    kind: str
    report: tuple[str, ...] = ()
    index: LabelIndex | None = None


class ImageFiles(Dataset[tuple[Tensor, Tensor]]):
    """Images that are decoded on access.

    Args:
        root: folder that relative paths start from.
        paths: path of each image.
        targets: [N, R], int64, one column per level; -1 is unknown.
        channels: 1 (grey) or 3 (RGB); every image is converted.
        transform: applied to each image.
    """

    def __init__(
        self, root: Path, paths: Sequence[str], targets: Tensor, channels: int, transform: Transform
    ) -> None:
        self.root = str(root)
        # One array, which worker processes share. Each would end with a copy of a list of strings, as reading
        # objects changes their reference counts.
        self.paths = np.array([os.fsencode(path) for path in paths])
        self.targets = targets
        self.channels = channels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self._load(index)), self.targets[index]

    @property
    def by_batch(self) -> ByBatch | None:
        """Reads unnormalised pixels and normalises while collating.

        None if the transform erases after normalisation, or is not a `Pipeline`.
        """
        transform = self.transform
        if not isinstance(transform, Pipeline) or transform.erasing is not None:
            return None
        return ByBatch(lambda index: (transform.pixels(self._load(index)), self.targets[index]), transform)

    def _load(self, index: int) -> Tensor:
        path = os.path.join(self.root, os.fsdecode(self.paths[index]))  # noqa: PTH118 (hot path)
        return load_image(path, self.channels)


@dataclass(frozen=True)
class ByBatch:
    """Makes the batches of `collate_pairs`, bit for bit, but writes normalised images into place.

    That spares a float copy of each image.

    Attributes:
        read: gives pixels, uint8 [C, height, width], and labels [R] of a sample.
        transform: normalises the pixels.
    """

    read: Callable[[int], tuple[Tensor, Tensor]]
    transform: Pipeline

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> Batch:
        """The batch of samples that `read` gave."""
        images, targets = zip(*samples, strict=True)
        inputs = _empty_batch((len(images), *images[0].shape))
        for image, place in zip(images, inputs, strict=True):
            self.transform.normalise.write(image, place)
        return Batch(inputs, default_collate(list(targets)))


def _empty_batch(shape: Sequence[int]) -> Tensor:
    """A float32 tensor; in a worker process in shared memory, as torch's own collate function does it."""
    if get_worker_info() is None:
        return torch.empty(*shape)
    storage = torch.UntypedStorage._new_shared(4 * math.prod(shape))
    return torch.empty(0).set_(storage).view(*shape)


def build_files(
    train: Listing, val: Listing | None, index: LabelIndex, config: DataConfig, on_main: OnMain
) -> DataBundle:
    """Datasets from listings; without a validation listing, a stratified part of training is held out.

    With `DATA.ON_BAD_IMAGE skip`, rank 0 decodes every file once, and all ranks leave out the damaged ones.

    Args:
        train, val: the listings of the splits.
        index: gives the labels of class names, for both splits.
        config: the `DATA` node.
        on_main: calls a function on rank 0 and returns its result on every rank.

    Raises:
        ConfigError: `CHANNELS` is neither 1 nor 3, or the augmentation does not fit.
        DataError: a split without a sample, or a validation class without a training sample.
    """
    channels = config.DATASET.CHANNELS
    if channels not in (1, 3):
        raise ConfigError(
            f"DATA.DATASET.CHANNELS: images are decoded to 1 (grey) or 3 (RGB) channels, not {channels}"
        )
    size = as_size(config.IMG_SIZE, (224, 224))
    report: list[str] = []
    if val is None:
        train, val = hold_out(train, config.DATASET.VAL_FRACTION, report)
    datasets = []
    transforms = build_transforms(config.AUGMENT, size, channels)
    splits = zip((train, val), transforms, ("training", "validation"), strict=True)
    for listing, transform, split in splits:
        if config.ON_BAD_IMAGE == "skip":
            listing = without_damaged(listing, on_main, report)
        if not listing.paths:
            raise DataError(f"{listing.source}: no sample for {split}")
        targets = _encode_known(listing, index)
        if split == "training":
            _report_empty_classes(targets, index.taxonomy, report)
        datasets.append(ImageFiles(listing.root, listing.paths, targets, channels, transform))
    report.insert(0, f"{train.source}: {len(datasets[0])} training and {len(datasets[1])} validation samples")
    return DataBundle(
        datasets[0], datasets[1], index.taxonomy, channels, size, collate_pairs, report,
        preprocessing=preprocessing_of(config.AUGMENT, size, channels), index=index,
    )  # fmt: skip


def several(names: Sequence[str]) -> str:
    """The first few of many names, and how many more there are.

    >>> several(["a", "b"]), several(list("abcdefgh"))
    ('a, b', 'a, b, c, d, e and 3 more')
    """
    rest = len(names) - NUM_NAMED
    return ", ".join(names[:NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def hold_out(listing: Listing, fraction: float, report: list[str]) -> tuple[Listing, Listing]:
    """Training and validation samples of a listing, stratified by class; notes it in the report.

    Raises:
        DataError: there are too few samples.
    """
    train, val = stratified_split(listing.paths, listing.lineages, fraction)
    if not val:
        raise DataError(
            f"{listing.source}: {len(listing.paths)} samples are too few to hold out {fraction:g} of them "
            "for validation; raise DATA.DATASET.VAL_FRACTION, or name validation data in DATA.DATASET.VAL"
        )
    held_out = counted(len(val), "sample")
    report.append(f"no validation data of its own: {held_out} held out, stratified by class")
    return listing.take(train), listing.take(val)


def encode(listing: Listing, index: LabelIndex) -> tuple[Tensor, dict[str, list[int]]]:
    """Targets [N, R] of a listing, and the positions of the samples of each class that the index lacks.

    The targets of those samples are unknown at every level.
    """
    labels: dict[Lineage, tuple[int, ...]] = {}
    lacking: dict[Lineage, str] = {}
    unknown: dict[str, list[int]] = {}
    for position, lineage in enumerate(listing.lineages):
        if lineage not in labels:
            try:
                labels[lineage] = index.encode(lineage)
            except UnknownClassError as error:
                lacking[lineage] = error.args[0]
                labels[lineage] = (UNKNOWN,) * len(index.columns)
        if lineage in lacking:
            unknown.setdefault(lacking[lineage], []).append(position)
    targets = torch.tensor([labels[lineage] for lineage in listing.lineages], dtype=torch.int64)
    return targets, unknown


def name_unknown(unknown: Mapping[str, Sequence[int]], listing: Listing) -> tuple[str, str]:
    """The number of unknown classes, and the first few with the place of their first sample."""
    count = counted(len(unknown), "class")
    places = {name: listing.place(positions[0]) for name, positions in unknown.items()}
    return count, several([f"{name} (first in {place})" for name, place in places.items()])


def _encode_known(listing: Listing, index: LabelIndex) -> Tensor:
    """Targets [N, R] of a listing of which the index has all classes.

    Raises:
        DataError: it lacks some; names them.
    """
    targets, unknown = encode(listing, index)
    if unknown:
        count, named = name_unknown(unknown, listing)
        raise DataError(f"{listing.source}: {count} of validation do not occur in training: {named}")
    return targets


def without_damaged(listing: Listing, on_main: OnMain, report: list[str]) -> Listing:
    """Leave out the files that cannot be decoded, which rank 0 looks for, and report them.

    Raises:
        DataError: none can be.
    """
    return _leave_out(listing, on_main(partial(_find_damaged, listing)), report)


def _find_damaged(listing: Listing) -> dict[int, str]:
    """The positions of the files that cannot be decoded, each with the reason."""
    paths = [str(listing.root / path) for path in listing.paths]
    logger.info("checking %d images of %s", len(paths), listing.source)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPool(min(32, cores)) as pool:  # Pillow releases Python's global lock while it decodes
        reasons = pool.map(find_damage, paths, chunksize=256)
    return {i: reason for i, reason in enumerate(reasons) if reason is not None}


def _leave_out(listing: Listing, damaged: dict[int, str], report: list[str]) -> Listing:
    """Leave out the damaged files, and report them."""
    if not damaged:
        return listing
    num_files = len(listing.paths)
    named = several([f"{listing.paths[i]} ({reason})" for i, reason in damaged.items()])
    if len(damaged) == num_files:
        raise DataError(f"{listing.source}: none of the {num_files} images can be read: {named}")
    report.append(f"{listing.source}: {counted(len(damaged), 'damaged image')} left out: {named}")
    return listing.take([i for i in range(num_files) if i not in damaged])


def _report_empty_classes(targets: Tensor, taxonomy: Taxonomy, report: list[str]) -> None:
    for column, level in enumerate(taxonomy.levels):
        counts = torch.bincount(targets[:, column] + 1, minlength=len(level.classes) + 1)[1:]
        empty = [level.classes[label] for label in torch.nonzero(counts == 0).flatten().tolist()]
        if empty:
            report.append(f"taxonomic rank {level.name}: no training sample for {several(empty)}")
