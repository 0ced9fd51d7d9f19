"""Builds the data of a run from any source."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from operator import call

from linnaeus.autobatch.state.rng import preserved_generators
from linnaeus.config.schema import DataConfig, TrainConfig
from linnaeus.data.builtin import build_digits, build_fashion_mnist, build_synthetic
from linnaeus.data.bundle import (
    DataBundle,
    OnMain,
    Resized,
    as_size,
    dataset_length,
    limited,
    training_targets,
)
from linnaeus.data.huggingface import find_huggingface
from linnaeus.data.image_files import bundle_files, find_splits
from linnaeus.data.imagefolder import read_folders
from linnaeus.data.manifest import Finder, find_manifests, read_tables
from linnaeus.data.mixing import build_device_transform
from linnaeus.data.transforms import build_transforms
from linnaeus.data.user_dataset import build_user_dataset
from linnaeus.data.webdataset import find_webdataset
from linnaeus.runtime.errors import ConfigError

_BUILT_IN = {
    "digits": build_digits,
    "fashion_mnist": build_fashion_mnist,
    "synthetic": build_synthetic,
}
TABLES: dict[str, Finder] = {
    "manifest": find_manifests,
    "huggingface": find_huggingface,
    "webdataset": find_webdataset,
}
"""Functions that find the splits of a dataset in tables."""
_KEYS_OF = {
    **dict.fromkeys(("LABEL_SEPARATOR", "SPLIT_COLUMN", "GROUP_COLUMN"), (*TABLES,)),
    "FOLD": ("imagefolder", *TABLES),
}


def build_data(
    data_config: DataConfig, *, seed: int, on_main: OnMain = call, reads_images: bool = True
) -> DataBundle:
    """Build training and validation data.

    Every rank of a run has the same bundle: the order of samples, the split and the labels depend on the
    files and the configuration alone.

    Args:
        data_config: the `DATA` node.
        seed: seeds the random numbers that a user's dataset may draw when it is made.
        on_main: calls a function on rank 0, which reads folders, manifests and images for all ranks.
        reads_images: look for damaged files, and measure ranges of values.

    Raises:
        ConfigError: a key that is missing, or that does not fit the data.
        DataError: files, folders or labels that cannot be used; an error in a user's dataset.
    """
    dataset = data_config.DATASET
    is_users = isinstance(dataset, Mapping)
    for name, kinds in {} if is_users else _KEYS_OF.items():
        if getattr(dataset, name) is not None and dataset.NAME not in kinds:
            raise ConfigError(
                f"DATA.DATASET.{name}: is for NAME {' and '.join(kinds)}, not {dataset.NAME}"
            )
    if is_users:
        data = build_user_dataset(data_config, seed=seed)
    elif dataset.NAME in _BUILT_IN:
        data = _BUILT_IN[dataset.NAME](data_config)
    else:
        tables = TABLES.get(dataset.NAME)
        read = read_folders if tables is None else partial(read_tables, find=tables)
        find = partial(find_splits, config=data_config, reads_images=reads_images)
        data = bundle_files(on_main(lambda: find(read(dataset))), data_config)
    before = data.description
    data.train = limited(data.train, data_config.LIMIT_TRAIN_SAMPLES, seed)
    data.val = limited(data.val, data_config.LIMIT_VAL_SAMPLES, seed)
    data.report.insert(0, before)
    if data.description != before:
        sizes = f"train {dataset_length(data.train)}, val {dataset_length(data.val)}"
        data.report.insert(1, f"limited to a random part: {sizes}")
    data.on_device = build_device_transform(data_config.AUGMENT, data.taxonomy, data.preprocessing)
    if data.on_device.mixing is not None and is_users:
        with preserved_generators():  # an error must show now, not in training
            data.on_device.check(data.collate([data.train[0]]))
    if data_config.SAMPLER != "shuffle":
        training_targets(data, f"DATA.SAMPLER {data_config.SAMPLER}")
    return data


def check_sides(data: DataConfig, train: TrainConfig) -> None:
    """Raise `ConfigError` for an IMG_SIZE_SCHEDULE that does not fit IMG_SIZE or the epochs of the run."""
    if not data.IMG_SIZE_SCHEDULE:
        return
    epoch, side = data.IMG_SIZE_SCHEDULE[-1]
    problems = []
    if as_size(data.IMG_SIZE, (side, side)) != (side, side):
        problems.append(
            f"DATA.IMG_SIZE: {data.IMG_SIZE} is not the last side of DATA.IMG_SIZE_SCHEDULE, {side}; "
            "leave it out"
        )
    if train.MAX_STEPS is not None:
        problems.append(
            f"TRAIN.MAX_STEPS: {train.MAX_STEPS}, but DATA.IMG_SIZE_SCHEDULE counts epochs; set "
            "TRAIN.EPOCHS instead"
        )
    elif epoch > train.EPOCHS:
        problems.append(
            f"DATA.IMG_SIZE_SCHEDULE: the last side comes in epoch {epoch}, after the last of "
            f"TRAIN.EPOCHS {train.EPOCHS}; lower it or train for more epochs"
        )
    if problems:
        raise ConfigError(problems)


def resized_data(data: DataBundle, config: DataConfig) -> tuple[Resized, ...]:
    """The training data at each side of DATA.IMG_SIZE_SCHEDULE.

    Raises:
        ConfigError: the dataset gives no images.
    """
    if config.IMG_SIZE_SCHEDULE and data.preprocessing is None:
        raise ConfigError(
            f"DATA.IMG_SIZE_SCHEDULE: {data.source} gives tensors, which are not resized; let it "
            "give Pillow images, or leave the key out"
        )
    resized = []
    for epoch, side in config.IMG_SIZE_SCHEDULE:
        dataset, preprocessing = copy.copy(data.train), data.preprocessing
        assert preprocessing is not None
        transform, _ = build_transforms(
            config.AUGMENT, (side, side), preprocessing.channels, preprocessing.decoding
        )
        dataset.transform = transform  # type: ignore[attr-defined]
        resized.append(Resized(epoch - 1, side, dataset))
    return tuple(resized)
