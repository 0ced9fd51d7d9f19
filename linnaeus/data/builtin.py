"""Datasets with a name: scikit-learn's handwritten digits, Fashion-MNIST, and generated images."""

from __future__ import annotations

import copy
import gzip
import math
import zlib
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from linnaeus.config.schema import DataConfig, DatasetConfig
from linnaeus.data.bundle import DataBundle, as_size, collate_pairs
from linnaeus.data.image import Decoding
from linnaeus.data.image_files import stratified_split
from linnaeus.data.taxonomy import UNKNOWN, Level, Taxonomy
from linnaeus.data.transforms import Transform, build_transforms
from linnaeus.runtime.errors import ConfigError, DataError
from linnaeus.runtime.rng import derive_seed

_SHAPE_OF_DIGIT = (2, 0, 1, 1, 0, 1, 2, 0, 2, 2)
"""How each digit is drawn: 1, 4, 7 straight (0); 2, 3, 5 curved (1); 0, 6, 8, 9 looped (2)."""

TAXONOMY = Taxonomy(
    (Level("shape", ("straight", "curved", "looped")), Level("digit", tuple("0123456789"))),
    (_SHAPE_OF_DIGIT,),
)

_GROUP_OF_ARTICLE = (0, 1, 0, 2, 0, 3, 0, 3, 4, 3)
_ARTICLES = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)

FASHION = Taxonomy(
    (Level("group", ("tops", "trousers", "dresses", "shoes", "bags")), Level("article", _ARTICLES)),
    (_GROUP_OF_ARTICLE,),
)

FASHION_FOLDER = "/usr/share/datasets/fashion-mnist"
"""Folder of Debian's package dataset-fashion-mnist."""

_GRID = 4
"""A class of the synthetic dataset is a pattern of _GRID x _GRID fields, interpolated to the image's size."""

_UNKNOWN_STREAM = 7
"""Keeps the random numbers of `_hide_labels` apart from others that are derived from a sample's index."""


@dataclass(eq=False)
class ImageTensors(Dataset[tuple[Tensor, Tensor]]):
    """Images [N, C, H, W], uint8, in memory, with labels [N, L], int64."""

    images: Tensor
    targets: Tensor
    transform: Transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.images[index]), self.targets[index]

    def take(self, rows: Tensor) -> ImageTensors:
        """Return the samples at these indices."""
        return replace(self, images=self.images[rows], targets=self.targets[rows])


def build_digits(config: DataConfig) -> DataBundle:
    """Return the 1,797 grey digits of 8 x 8 pixels with two levels, `shape` above `digit`.

    Validation is a part held out, stratified by digit and the same in every run.
    """
    from sklearn.datasets import load_digits  # here: its import takes a second

    data = load_digits()
    images = torch.from_numpy(data.images * (255 / 16)).round().to(torch.uint8).unsqueeze(1)
    digits = torch.from_numpy(data.target).long()
    targets = torch.stack([torch.tensor(_SHAPE_OF_DIGIT)[digits], digits], dim=1)
    dataset: DatasetConfig = config.DATASET
    rows, held_out = stratified_split(
        np.arange(len(digits)).astype(np.bytes_), data.target, dataset.VAL_FRACTION
    )
    known = _hide_labels(targets, dataset.UNKNOWN_FRACTION)
    train, val = (images[rows], known[rows]), (images[held_out], targets[held_out])
    return _in_memory(config, TAXONOMY, 32, train, val)


def build_fashion_mnist(config: DataConfig) -> DataBundle:
    """Fashion-MNIST (Xiao et al. 2017): 60,000 training images, grey, 28 x 28 pixels; 10,000 for validation.

    Raises:
        ConfigError: a file is missing.
        DataError: a file is damaged, or not of this dataset.
    """
    dataset: DatasetConfig = config.DATASET
    folder = Path(dataset.ROOT or FASHION_FOLDER).expanduser()
    parts = ("images-idx3", "labels-idx1")
    paths = [folder / f"{split}-{part}-ubyte.gz" for split in ("train", "t10k") for part in parts]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ConfigError(
            f"DATA.DATASET.ROOT: {folder} has no {', '.join(missing)}; Debian's and Ubuntu's package "
            "dataset-fashion-mnist brings the four files, elsewhere ROOT names their folder"
        )
    (images, targets), val = _read_split(*paths[:2]), _read_split(*paths[2:])
    train = images, _hide_labels(targets, dataset.UNKNOWN_FRACTION)
    return _in_memory(config, FASHION, 28, train, val)


def _read_split(images_path: Path, labels_path: Path) -> tuple[Tensor, Tensor]:
    """Images [N, 1, 28, 28], uint8, and targets [N, 2], int64, of IDX files: a header, then the data."""
    try:
        images, labels = (
            np.frombuffer(bytearray(gzip.decompress(path.read_bytes())), np.uint8, offset=offset)
            for path, offset in ((images_path, 16), (labels_path, 8))
        )
        images = images.reshape(-1, 1, 28, 28)
        if len(labels) != len(images) or labels.max() > 9:
            raise ValueError("labels of other images, or above 9")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(
            f"{images_path} and {labels_path.name} are not whole files of Fashion-MNIST ({error})"
        ) from error
    groups = np.array(_GROUP_OF_ARTICLE)[labels]
    return torch.from_numpy(images), torch.from_numpy(np.stack([groups, labels], axis=1)).long()


def _in_memory(
    config: DataConfig,
    taxonomy: Taxonomy,
    side: int,
    train: tuple[Tensor, Tensor],
    val: tuple[Tensor, Tensor],
) -> DataBundle:
    """Bundle the grey images [N, 1, H, W] and labels of both splits; `side` is the default size of inputs."""
    size = as_size(config.IMG_SIZE, (side, side))
    transform, preprocessing = build_transforms(config.AUGMENT, size, 1, Decoding.of(config))
    return DataBundle(
        ImageTensors(*train, transform),
        ImageTensors(*val, preprocessing.transform()),
        taxonomy,
        1,
        size,
        collate_pairs,
        [],
        preprocessing,
        source=config.DATASET.NAME,
    )


class SyntheticImages(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is the sum of the patterns of its classes, one per level, and of noise that depends on i.

    Args:
        config: length, channels, noise (standard deviation on the 0-255 scale), unknown labels.
        taxonomy: its classes; samples cycle through the classes of the finest level.
        size: height and width.
        transform: applied to each image.
        is_val: validation has the same classes, other noise, and no unknown label.
    """

    def __init__(
        self,
        config: DatasetConfig,
        taxonomy: Taxonomy,
        size: tuple[int, int],
        transform: Transform,
        *,
        is_val: bool,
    ) -> None:
        num_samples = config.NUM_SAMPLES_VAL if is_val else config.NUM_SAMPLES
        counts = list(taxonomy.num_classes.values())
        rows = [taxonomy.ancestors(len(counts) - 1, level) for level in range(len(counts))]
        self.labels = torch.tensor(rows).T[torch.arange(num_samples) % counts[-1]]
        self.targets = self.labels if is_val else _hide_labels(self.labels, config.UNKNOWN_FRACTION)
        self.shape = shape = (config.CHANNELS, *size)
        self.transform = transform
        generator = torch.Generator().manual_seed(derive_seed(int(is_val), *counts))
        # Each sample takes a window of one buffer: far cheaper than drawing noise for it.
        self.noise = torch.randn(2 * math.prod(shape) + 4096, generator=generator) * config.NOISE

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        channels, height, width = self.shape
        fields = torch.zeros(
            channels, _GRID, _GRID
        )  # values around 0, on the 0-255 scale of pixels
        for level, label in enumerate(self.labels[index].tolist()):
            generator = torch.Generator().manual_seed(derive_seed(level, label))
            fields += torch.randint(-60, 61, fields.shape, generator=generator)
        image = interpolate(fields[None], (height, width), mode="bilinear", align_corners=False)[0]
        numel = channels * height * width
        start = derive_seed(index) % (len(self.noise) - numel)
        image = image + self.noise[start : start + numel].view(self.shape)
        return self.transform((image + 127.5).clamp_(0, 255).to(torch.uint8)), self.targets[index]

    def take(self, rows: Tensor) -> SyntheticImages:
        """As many samples of the classes at these indices."""
        taken = copy.copy(self)
        taken.labels, taken.targets = self.labels[rows], self.targets[rows]
        return taken


def build_synthetic(config: DataConfig) -> DataBundle:
    """Synthetic images of `DATA.IMG_SIZE` (default 64 x 64 pixels), with a pattern for each class to learn.

    Raises:
        ConfigError: a level with fewer classes than the level above it, or labels that cannot be left out.
    """
    dataset: DatasetConfig = config.DATASET
    taxonomy = _synthetic_taxonomy(dataset)
    size = as_size(config.IMG_SIZE, (64, 64))
    transform, preprocessing = build_transforms(
        config.AUGMENT, size, dataset.CHANNELS, Decoding.of(config)
    )
    train = SyntheticImages(dataset, taxonomy, size, transform, is_val=False)
    val = SyntheticImages(dataset, taxonomy, size, preprocessing.transform(), is_val=True)
    return DataBundle(
        train,
        val,
        taxonomy,
        dataset.CHANNELS,
        size,
        collate_pairs,
        [],
        preprocessing,
        source="synthetic",
    )


def _synthetic_taxonomy(dataset: DatasetConfig) -> Taxonomy:
    counts = dataset.NUM_CLASSES
    names = dataset.LEVELS or [f"level{depth}" for depth in range(1, len(counts) + 1)]
    problems = []
    if not counts or counts != sorted(counts):
        problems.append(f"NUM_CLASSES: {counts} must go from few classes (coarse) to many (fine)")
    if len(names) != len(counts):
        problems.append(f"LEVELS: {len(names)} names for {len(counts)} entries of NUM_CLASSES")
    if dataset.UNKNOWN_FRACTION and len(counts) == 1:
        problems.append(
            f"UNKNOWN_FRACTION: {dataset.UNKNOWN_FRACTION} keeps the labels of a coarser level, and "
            "NUM_CLASSES has one level only; set it 0, or add a level"
        )
    if problems:
        raise ConfigError([f"DATA.DATASET.{problem}" for problem in problems])
    return Taxonomy(
        tuple(
            Level(name, tuple(f"{name}-{label}" for label in range(count)))
            for name, count in zip(names, counts, strict=True)
        ),
        tuple(
            tuple(label * above // below for label in range(below))
            for above, below in pairwise(counts)
        ),
    )


def _hide_labels(labels: Tensor, fraction: float) -> Tensor:
    """Set finer labels of [N, L], coarse to fine, to unknown (-1) for a fraction of the samples.

    The finest label that stays known is at a random level above the finest one. Sample and fraction decide
    it alone, so that every epoch, rank and run sees the same labels.
    """
    labels, most_known = labels.clone(), labels.shape[1] - 1
    for index in range(len(labels) if fraction else 0):
        draw = derive_seed(_UNKNOWN_STREAM, index) / 2**64
        if draw < fraction:  # the draw is uniform in [0, fraction), so it also decides the level
            labels[index, min(1 + int(draw / fraction * most_known), most_known) :] = UNKNOWN
    return labels
