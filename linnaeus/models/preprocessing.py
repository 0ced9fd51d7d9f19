"""The preprocessing that pretrained weights were trained with: size, resizing, crop, mean and deviation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from timm.data import resolve_data_config

from linnaeus.config.instantiate import is_target
from linnaeus.config.schema import DataConfig
from linnaeus.data.transforms import Preprocessing
from linnaeus.models.timm_source import CROP_MODES, find_source
from linnaeus.models.weights import saved_spec
from linnaeus.runtime.errors import ConfigError

_NORMALISATION = ("MEAN", "STD")
_GEOMETRY = ("IMG_SIZE", "CROP_FRACTION", "RESIZE")
_KEYS = (*_GEOMETRY, "INTERPOLATION", *_NORMALISATION)
"""Keys of DATA.AUGMENT, and DATA.IMG_SIZE, whose null takes the value of the weights."""


def with_preprocessing(
    data: DataConfig, model_node: Any, saved: Mapping[str, Any] | None = None
) -> tuple[DataConfig, str | None]:
    """Fill in the keys of preprocessing that are null with the values of the pretrained weights.

    The built-in grey data sets keep their own size and are not cropped.

    Args:
        data, model_node: the nodes DATA and MODEL.
        saved: the configuration in the checkpoint that is resumed, whose values are taken; None without one.

    Returns:
        The DATA node, and a line for the log on the preprocessing of the weights; None if it is not known.
    """
    if data.IMG_SIZE is None and data.IMG_SIZE_SCHEDULE:
        data = replace(data, IMG_SIZE=data.IMG_SIZE_SCHEDULE[-1][-1])
    is_users = isinstance(data.DATASET, Mapping)
    is_grey = not is_users and data.DATASET.NAME in ("digits", "fashion_mnist")
    if saved is None:
        theirs = _of_weights(model_node)
        if is_grey:
            theirs = {key: value for key, value in theirs.items() if key not in _GEOMETRY}
    else:
        node = saved.get("DATA", {})
        theirs = {"IMG_SIZE": node.get("IMG_SIZE"), **node.get("AUGMENT", {})}
    given = {key: getattr(data.AUGMENT, key, data.IMG_SIZE) for key in _KEYS}
    values = {key: theirs[key] for key in _KEYS if theirs.get(key) is not None}
    lengths = {
        len(each[key]) for each in (values, given) for key in _NORMALISATION if each.get(key)
    }
    # Three values, for red, green and blue, also serve grey images and unknown channels.
    channels = 3 if is_users else 1 if is_grey else data.DATASET.CHANNELS
    is_whole = values.keys() >= {*_NORMALISATION}
    if not is_whole or not (lengths == {channels} or (lengths == {3} and channels == 1)):
        values = {key: value for key, value in values.items() if key not in _NORMALISATION}
    if not values:
        return data, None
    filled: dict[str, Any] = {
        key: values.get(key) if given[key] is None else given[key] for key in _KEYS
    }
    line = None if saved is not None else _line(values, filled)
    size = filled.pop("IMG_SIZE")
    return replace(data, IMG_SIZE=size, AUGMENT=replace(data.AUGMENT, **filled)), line


def _line(values: Mapping[str, Any], filled: Mapping[str, Any]) -> str:
    """Describe the preprocessing of the weights, and the run's own."""
    theirs = ", ".join(f"{key} {value}" for key, value in values.items())
    ours = ", ".join(f"{key} {filled[key]}" for key in values if filled[key] != values[key])
    instead = f"; this run has {ours} (null takes the weights' value)" if ours else ""
    return f"preprocessing of the weights: {theirs}{instead}"


def _of_weights(node: Any) -> dict[str, Any]:
    """The values of the weights that a MODEL node names; empty where they are not known."""
    if is_target(node) or (node.WEIGHTS is None and not node.PRETRAINED):
        return {}
    if node.WEIGHTS is not None:
        try:
            spec = saved_spec(node.WEIGHTS)
        except ConfigError:  # there is no such file, as building the model says, if it needs it
            return {}
        if spec:
            try:
                found = Preprocessing.from_dict(spec["preprocessing"])
            except (LookupError, TypeError, ValueError, AttributeError):  # tensors, or damaged
                return {}
            resizing = (found.crop_fraction, found.resize, found.interpolation)
            return _by_key(found.size, *resizing, found.mean, found.std)
    cfg = find_source(node.NAME).cfg
    if not cfg:
        return {}
    theirs = resolve_data_config(pretrained_cfg=cfg)
    modes = {timms: own for own, timms in CROP_MODES.items()}
    return _by_key(
        theirs["input_size"][-2:],
        min(1.0, theirs["crop_pct"]),
        modes.get(theirs["crop_mode"], "crop"),
        "bilinear" if theirs["interpolation"] == "bilinear" else "bicubic",
        theirs["mean"],
        theirs["std"],
    )


def _by_key(
    size: Any, fraction: float, resize: str, interpolation: str, *colors: Any
) -> dict[str, Any]:
    """The value of each of `_KEYS`."""
    side = size[0] if size[0] == size[1] else [*size]
    return dict(
        zip(_KEYS, (side, fraction, resize, interpolation, *map(list, colors)), strict=True)
    )
