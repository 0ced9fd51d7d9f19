"""Builds the datasets of the `DATA` node, whatever their source."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from linnaeus.autobatch.rng import preserved_generators
from linnaeus.config.schema import DataConfig
from linnaeus.data.bundle import DataBundle, OnMain, on_this_process, training_targets
from linnaeus.data.digits import build_digits
from linnaeus.data.imagefolder import build_imagefolder
from linnaeus.data.manifest import build_manifest
from linnaeus.data.mixing import build_mixing
from linnaeus.data.synthetic import build_synthetic
from linnaeus.data.target import UserCollate, build_target

_BUILT_IN: dict[str, Callable[[DataConfig], DataBundle]] = {
    "digits": build_digits,
    "synthetic": build_synthetic,
}
_FILES: dict[str, Callable[[DataConfig, OnMain], DataBundle]] = {
    "imagefolder": build_imagefolder,
    "manifest": build_manifest,
}


def build_data(data_config: DataConfig, *, seed: int, on_main: OnMain = on_this_process) -> DataBundle:
    """Build training and validation data.

    Every process of a run builds the same bundle: the order of samples, the split and the labels depend on
    the files and the configuration alone.

    Args:
        data_config: the `DATA` node; `DATASET` is its dataclass or a mapping with `_target_`.
        seed: seeds the random numbers that a user's dataset may draw when it is made; others draw none.
        on_main: used to decode every file, for `ON_BAD_IMAGE skip`, on one process only.

    Raises:
        ConfigError: a key that is missing, or that does not fit the data.
        DataError: files, folders or labels that cannot be used; an error in a user's dataset.
    """
    data = _build(data_config, seed, on_main)
    # A user's collate function may give a batch that it keeps.
    is_fresh = not isinstance(data.collate, UserCollate)
    data.mixing = build_mixing(data_config.AUGMENT, data.taxonomy, in_place=is_fresh)
    if data.mixing is not None and isinstance(data_config.DATASET, Mapping):
        with preserved_generators():
            data.mixing.soften(data.collate([data.train[0]]))  # an error must show now, not in training
    if data_config.SAMPLER == "balanced":
        training_targets(data, "DATA.SAMPLER balanced")
    return data


def _build(data_config: DataConfig, seed: int, on_main: OnMain) -> DataBundle:
    if isinstance(data_config.DATASET, Mapping):
        return build_target(data_config, seed=seed)
    name = data_config.DATASET.NAME
    return _BUILT_IN[name](data_config) if name in _BUILT_IN else _FILES[name](data_config, on_main)
