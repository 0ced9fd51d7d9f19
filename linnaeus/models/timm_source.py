"""Where timm takes a model and its weights from: its own list, the Hugging Face hub, or a folder."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm

from linnaeus.config.keys import suggest
from linnaeus.runtime.errors import ConfigError, first_line

REMEDY = (
    "offline, copy the Hugging Face cache (HF_HOME, ~/.cache/huggingface) from a "
    "machine that has the weights, or name a folder that holds them with MODEL.NAME local-dir:FOLDER, or a "
    "file with MODEL.WEIGHTS FILE (and MODEL.PRETRAINED False)"
)

CROP_MODES = {"squash": "squash", "letterbox": "border"}
"""timm's `crop_mode` for DATA.AUGMENT.RESIZE; `center` for others."""

_HUB, _FOLDER = "hf-hub", "local-dir"
_from_hub = functools.cache(timm.models.load_model_config_from_hf)
"""Reads a description once in a process: without a network, the client asks for half a minute each time."""


@dataclass(frozen=True)
class Source:
    """A model that timm can build.

    Attributes:
        name: as `timm.create_model` takes it.
        architecture: name of the model without tag and source.
        cfg: timm's `pretrained_cfg`, which describes the pretrained weights; empty if there is none.
        kind: `hf-hub`, `local-dir`, or empty for a name of timm's list.
        arguments: model arguments in its description.
    """

    name: str
    architecture: str
    cfg: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        """The weights, for people."""
        names = (self.cfg.get(key) for key in ("hf_hub_id", "url", "file"))
        place = self.architecture if self.kind else next(filter(None, names), "timm")
        return f"{self.name} ({place})"


def find_source(name: str, key: str = "MODEL.NAME") -> Source:
    """Find a model by the value of `key`. Only `hf-hub:` names need a network, unless they are in its cache.

    Raises:
        ConfigError: timm has no such model or tag, or the description of a folder or a hub's model cannot
            be read.
    """
    kind, separator, place = name.partition(":")
    if not separator:
        return _listed(name, key)
    kind = kind.replace("hf_hub", _HUB)
    if kind not in (_HUB, _FOLDER) or not place:
        raise ConfigError(
            f"{key}: {name!r} is not a known source of models; use {_HUB}:OWNER/MODEL or {_FOLDER}:FOLDER"
        )
    try:
        if kind == _HUB:
            cfg, architecture, arguments = _from_hub(place)
        else:
            place = str(Path(place).expanduser())
            # timm's public function reads from the hub alone.
            cfg, architecture, arguments = timm.models._hub.load_model_config_from_path(place)
    except Exception as error:  # of files, of the hub's client, and of the network library below it
        remedy = f"; {REMEDY}" if kind == _HUB else "; timm.models.save_for_hf writes such a folder"
        reason = " ".join(str(error).split())
        raise ConfigError(f"{key}: {name!r} cannot be read: {reason:.300}{remedy}") from error
    if not timm.is_model(architecture):
        raise ConfigError(f"{key}: {name!r} describes {architecture!r}, which is not a timm model")
    return Source(f"{kind}:{place}", architecture, cfg, kind, arguments)


def _listed(name: str, key: str) -> Source:
    if not timm.is_model(name):
        close = suggest(name, timm.list_models(), most=3, cutoff=0.6)
        hint = close or "; `timm.list_models()` lists them"
        raise ConfigError(f"{key}: {name!r} is not a timm model{hint}")
    architecture, _, tag = name.partition(".")
    try:
        cfg = timm.get_pretrained_cfg(name)
    except RuntimeError as error:
        raise ConfigError(
            f"{key}: {name!r} has the tag {tag!r}, which timm does not know; {_tags(architecture)}"
        ) from error
    return Source(name, architecture, {} if cfg is None else cfg.to_dict())


def _tags(architecture: str) -> str:
    """The names with weights, for an error."""
    names = timm.list_models(architecture, pretrained=True)
    return f"there are weights for {', '.join(names) or 'none of its kind'}"


def check_weights_exist(source: Source, key: str = "MODEL.PRETRAINED: True") -> None:
    """Refuse a name of timm's list without pretrained weights, and name those that have some."""
    if not source.kind and not timm.models.is_model_pretrained(source.name):
        raise ConfigError(
            f"{key}, but timm has no weights for {source.name!r}; {_tags(source.architecture)}"
        )


def unusable_weights_error(source: Source, error: Exception) -> ConfigError:
    """The error for pretrained weights that timm could not load."""
    remedy = f"; {REMEDY}" if isinstance(error, OSError) else ""  # such as a network error
    return ConfigError(
        f"MODEL.PRETRAINED: True, but the weights {source.origin} do not load "
        f"({type(error).__name__}: {first_line(error):.200}){remedy}"
    )
