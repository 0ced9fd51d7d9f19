"""Builds the datasets of the `DATA` node, whatever their source."""

from __future__ import annotations

from collections.abc import Mapping

from linnaeus.autobatch.rng import preserved_generators
from linnaeus.config.schema import DataConfig
from linnaeus.data.builtin import build_digits, build_synthetic
from linnaeus.data.bundle import DataBundle, OnMain, on_this_process, training_targets
from linnaeus.data.imagefolder import build_imagefolder
from linnaeus.data.manifest import build_manifest
from linnaeus.data.mixing import build_mixing
from linnaeus.data.user_dataset import UserCollate, build_user_dataset

_BUILT_IN = {"digits": build_digits, "synthetic": build_synthetic}
_FILES = {"imagefolder": build_imagefolder, "manifest": build_manifest}


def build_data(data_config: DataConfig, *, seed: int, on_main: OnMain = on_this_process) -> DataBundle:
    """Build training and validation data.

    Every process of a run builds the same bundle: the order of samples, the split and the labels depend on
    the files and the configuration alone.

    Args:
        data_config: the `DATA` node.
        seed: seeds the random numbers that a user's dataset may draw when it is made.
        on_main: used to decode every file, for `ON_BAD_IMAGE skip`, on one process only.

    Raises:
        ConfigError: a key that is missing, or that does not fit the data.
        DataError: files, folders or labels that cannot be used; an error in a user's dataset.
    """
    if isinstance(data_config.DATASET, Mapping):
        data = build_user_dataset(data_config, seed=seed)
    elif data_config.DATASET.NAME in _BUILT_IN:
        data = _BUILT_IN[data_config.DATASET.NAME](data_config)
    else:
        data = _FILES[data_config.DATASET.NAME](data_config, on_main)
    # A user's collate function may give a batch that it keeps.
    is_fresh = not isinstance(data.collate, UserCollate)
    data.mixing = build_mixing(data_config.AUGMENT, data.taxonomy, in_place=is_fresh)
    if data.mixing is not None and isinstance(data_config.DATASET, Mapping):
        with preserved_generators():
            data.mixing.soften(data.collate([data.train[0]]))  # an error must show now, not in training
    if data_config.SAMPLER == "balanced":
        training_targets(data, "DATA.SAMPLER balanced")
    return data
