"""Where timm takes a model and its weights from: its own list, the Hugging Face hub, or a folder."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm

from linnaeus.errors import ConfigError, first_line

PROBE_S = 10.0
"""How long the hub may take to say that it has a file; its client alone would retry for a minute."""

REMEDY = (
    "without a network, copy the folder of the Hugging Face cache (HF_HOME, ~/.cache/huggingface) from a "
    "machine that has the weights, or name a folder that holds them with MODEL.NAME local-dir:FOLDER, or a "
    "file with MODEL.WEIGHTS FILE (and MODEL.PRETRAINED False)"
)

_HUB, _FOLDER = "hf-hub", "local-dir"
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class Source:
    """A model that timm can build.

    Attributes:
        name: as `timm.create_model` takes it.
        architecture: name of the model without tag and source.
        cfg: timm's `pretrained_cfg`, which describes the pretrained weights; empty where there is none.
        kind: `hf-hub`, `local-dir`, or empty for a name of timm's list.
        arguments: those of the model that its description names.
    """

    name: str
    architecture: str
    cfg: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        """The weights, for people."""
        if self.kind:
            return f"{self.name} ({self.architecture})"
        tag, hub = self.cfg.get("tag"), self.cfg.get("hf_hub_id")
        name = f"{self.architecture}.{tag}" if tag else self.architecture
        return f"timm {name} ({f'hub {hub}' if hub else self.cfg.get('url') or self.cfg.get('file')})"


def find_source(name: str) -> Source:
    """Find a model by `MODEL.NAME`. Only `hf-hub:` names need a network, unless their files are in its cache.

    Raises:
        ConfigError: timm has no such model or tag, or the description of a folder or a hub's model cannot
            be read.
    """
    kind, separator, place = name.partition(":")
    if not separator:
        return _listed(name)
    kind = kind.replace("hf_hub", _HUB)
    if kind not in (_HUB, _FOLDER) or not place:
        raise ConfigError(
            f"MODEL.NAME: {name!r} names no place of a model; give {_HUB}:OWNER/MODEL or {_FOLDER}:FOLDER"
        )
    if kind == _FOLDER:
        place = str(Path(place).expanduser())
        file = Path(place) / "config.json"
    else:
        file = _hub_description(place)
    description = _description(name, file)
    cfg = description.get("pretrained_cfg", description)
    architecture = str(description.get("architecture"))
    if not timm.is_model(architecture):
        raise ConfigError(f"MODEL.NAME: {name!r} describes {architecture!r}, which is not a timm model")
    return Source(f"{kind}:{place}", architecture, cfg, kind, description.get("model_args") or {})


def _listed(name: str) -> Source:
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else "; `timm.list_models()` lists them"
        raise ConfigError(f"MODEL.NAME: {name!r} is not a timm model{hint}")
    architecture, _, tag = name.partition(".")
    try:
        cfg = timm.get_pretrained_cfg(name)
    except RuntimeError as error:
        raise ConfigError(
            f"MODEL.NAME: {name!r} has the tag {tag!r}, which timm does not know; {_tags(architecture)}"
        ) from error
    return Source(name, architecture, {} if cfg is None else cfg.to_dict())


def _tags(architecture: str) -> str:
    """The names with weights, for an error."""
    names = timm.list_models(architecture, pretrained=True)
    if names:
        return f"there are weights for {', '.join(names)}"
    close = difflib.get_close_matches(architecture, timm.list_models(pretrained=True), n=3, cutoff=0.3)
    return f"there are none for {architecture!r}, but for {', '.join(close)}"


def _hub_description(place: str) -> Path:
    """The file that describes a model on the hub: that in the cache, else downloaded into it."""
    from huggingface_hub import hf_hub_download

    file = _find_on_hub(place, ("config.json",), "MODEL.NAME")
    model, _, version = place.partition("@")
    try:
        return file or Path(hf_hub_download(model, "config.json", revision=version or None))
    except Exception as error:
        raise _download_error(model, error, "MODEL.NAME") from error


def _description(name: str, file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"MODEL.NAME: {name!r} needs a description of the model in {file}, as timm.models.save_for_hf "
            f"writes it: {first_line(error)}"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"MODEL.NAME: {name!r}: {file} is no description of a model")
    return content


def check_weights_exist(source: Source, cache_dir: str | None = None) -> None:
    """Check that pretrained weights can be loaded, before timm tries for minutes.

    Args:
        source: the model.
        cache_dir: folder of downloaded files; None is the usual one.

    Raises:
        ConfigError: there are none, or the hub that has them cannot be reached.
    """
    key, cfg = "MODEL.PRETRAINED", source.cfg
    if source.kind == _HUB:
        _find_on_hub(source.name.partition(":")[2], _WEIGHT_FILES, key, cache_dir)
    elif source.kind != _FOLDER and not timm.models.is_model_pretrained(source.name):
        raise ConfigError(
            f"{key}: True, but timm has no weights for {source.name!r}; {_tags(source.architecture)}"
        )
    elif cfg.get("hf_hub_id") and not cfg.get("file"):
        filename = cfg.get("hf_hub_filename")
        _find_on_hub(str(cfg["hf_hub_id"]), (str(filename),) if filename else _WEIGHT_FILES, key, cache_dir)


def _find_on_hub(
    place: str, filenames: tuple[str, ...], key: str, cache_dir: str | None = None
) -> Path | None:
    """The first of a model's files that is in the cache; None if only the server has one.

    Raises:
        ConfigError: names the key; there is none, or the server does not give it or cannot be reached.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    model, _, version = place.partition("@")
    try:
        for name in filenames:
            cached = try_to_load_from_cache(model, name, cache_dir, revision=version or None)
            if isinstance(cached, str):
                return Path(cached)
        for name in filenames:
            with suppress(EntryNotFoundError):
                get_hf_file_metadata(hf_hub_url(model, name, revision=version or None), timeout=PROBE_S)
                return None
    except Exception as error:  # of the client, and of the network library below it
        raise _download_error(model, error, key) from error
    raise ConfigError(f"{key}: hub {model} has no {' and no '.join(filenames)}")


def _download_error(model: str, error: Exception, key: str) -> ConfigError:
    """The error for files that cannot be downloaded: why the hub refuses them, or else the remedy."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    refusals = {
        GatedRepoError: "access to it has to be asked for on its page; then log in with `hf auth login`",
        RepositoryNotFoundError: "there is no such model, or it is private: log in with `hf auth login`",
        RevisionNotFoundError: "the model has no such revision",
        ValueError: first_line(error),  # the name is none that the hub could have
    }
    refusal = next((reason for kind, reason in refusals.items() if isinstance(error, kind)), None)
    reason = f"{refusal:.200})" if refusal else f"{first_line(error):.200}); {REMEDY}"
    return ConfigError(f"{key}: the files of hub {model} cannot be downloaded ({reason}")


def unusable_weights_error(source: Source, error: Exception) -> ConfigError:
    """The error for pretrained weights that timm could not load."""
    remedy = f"; {REMEDY}" if isinstance(error, OSError) else ""  # as those of a network are
    return ConfigError(
        f"MODEL.PRETRAINED: True, but the weights {source.origin} do not load "
        f"({type(error).__name__}: {first_line(error):.200}){remedy}"
    )
