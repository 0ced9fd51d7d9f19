"""Mean and standard deviation of the images that pretrained weights were trained with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from linnaeus.config.instantiate import is_target
from linnaeus.config.schema import DataConfig
from linnaeus.errors import ConfigError
from linnaeus.models.timm_source import find_source
from linnaeus.models.weights import saved_config

_KEYS = ("MEAN", "STD")


def with_normalisation(
    data: DataConfig, model_node: Any, saved: Mapping[str, Any] | None = None
) -> tuple[DataConfig, str | None]:
    """Fill in `DATA.AUGMENT.MEAN` and `STD`, where they are null, with those of the pretrained weights.

    Weights of another run have that run's.

    Args:
        data, model_node: the nodes DATA and MODEL.
        saved: the configuration in the checkpoint that is resumed, whose values are taken; None without one.

    Returns:
        The DATA node, and a note if the values given differ from those of the weights; else None.
    """
    theirs = _of_weights(model_node) if saved is None else saved.get("DATA", {}).get("AUGMENT", {})
    given = {key: getattr(data.AUGMENT, key) for key in _KEYS}
    values = {key: list(theirs[key]) for key in _KEYS if theirs.get(key) is not None}
    lengths = {len(value) for value in (*values.values(), *given.values()) if value is not None}
    # Those of red, green and blue serve grey images too, and where the channels are not known.
    is_users = isinstance(data.DATASET, Mapping)
    is_grey = not is_users and data.DATASET.NAME in ("digits", "fashion_mnist")
    channels = 3 if is_users else 1 if is_grey else data.DATASET.CHANNELS
    if len(values) < len(_KEYS) or not (
        lengths == {channels} or (lengths == {3} and channels == 1)
    ):
        return data, None
    filled: dict[str, Any] = {
        key: values[key] if given[key] is None else given[key] for key in _KEYS
    }
    note = None
    different = [key for key in _KEYS if list(filled[key] or []) != values[key]]
    if different and saved is None:
        listed = " and ".join(
            f"DATA.AUGMENT.{key} {filled[key]} is not {values[key]}" for key in different
        )
        note = f"note: {listed}, with which the pretrained weights were trained; null takes theirs"
    return replace(data, AUGMENT=replace(data.AUGMENT, **filled)), note


def _of_weights(node: Any) -> Mapping[str, Any]:
    """MEAN and STD of the weights that a MODEL node names; empty where they are not known."""
    if is_target(node) or (node.WEIGHTS is None and not node.PRETRAINED):
        return {}
    if node.WEIGHTS is None:
        cfg = find_source(node.NAME).cfg
        return {key: cfg.get(key.lower()) for key in _KEYS}
    try:
        nodes = saved_config(node.WEIGHTS)
    except ConfigError:  # there is no such file, as building the model says, if it needs it
        return {}
    augment: Mapping[str, Any] = nodes.get("DATA", {}).get("AUGMENT", {})
    return augment
