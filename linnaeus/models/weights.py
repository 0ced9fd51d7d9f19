"""Weights from a file: another run's, or a state dict of the backbone or of a whole model (MODEL.WEIGHTS)."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import timm.models
import torch
from torch import Tensor, nn

from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.errors import ConfigError
from linnaeus.files import checkpoint_file
from linnaeus.models.hierarchical import HierarchicalClassifier, MarginalHead

_NESTED = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Where training scripts put a state dict inside of what they save; averages first, as timm does."""

BATCHNORM_STATISTICS = ("running_mean", "running_var")
"""Names of BatchNorm's buffers in evaluation, without the module's."""


@dataclass(frozen=True)
class SavedWeights:
    """The tensors of a file.

    Attributes:
        path: the file.
        backbone: tensors of the backbone, by their names in it.
        heads: tensors of the heads, by their names in the model; empty where the file has none.
        note: epoch and average of a checkpoint, for people; empty for other files.
        classes: names of the classes of each level, by the level's name; None where the file does not say.
    """

    path: Path
    backbone: dict[str, Tensor]
    heads: dict[str, Tensor]
    note: str = ""
    classes: dict[str, list[str]] | None = None


def read_weights(value: str) -> SavedWeights:
    """Read what `MODEL.WEIGHTS` names.

    Raises:
        ConfigError: there is no such file, or it holds no tensors by name.
    """
    path = find_file(value)
    content, note, classes = _read(path), "", None
    if is_checkpoint(content):
        state, progress = content["state"], content["progress"]
        samples = ", within an epoch" if progress.get("samples") else ""
        note = f"epoch {progress.get('epoch')}{samples}{', EMA' if state.get('ema') else ''}"
        levels = content.get("model_spec", {}).get("taxonomy", {}).get("levels")
        classes = None if levels is None else {level["name"]: list(level["classes"]) for level in levels}
        content = saved_weights(state)
    elif isinstance(content, dict):
        content = next((content[name] for name in _NESTED if isinstance(content.get(name), dict)), content)
    items = content.items() if isinstance(content, dict) else ()
    found = {name: value for name, value in items if isinstance(name, str) and isinstance(value, Tensor)}
    if not found:
        raise ConfigError(
            f"MODEL.WEIGHTS: {str(path)!r} holds a {type(content).__name__} without tensors by name; save a "
            "state dict"
        )
    tensors = dict(timm.models.clean_state_dict(found))  # without the prefixes of wrappers
    prefix = "backbone."
    backbone = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    if not backbone:  # all of another file belongs to the backbone
        return SavedWeights(path, tensors, {}, note)
    heads = {name: tensor for name, tensor in tensors.items() if name.startswith("heads.")}
    return SavedWeights(path, backbone, heads, note, classes)


def find_file(value: str) -> Path:
    """The file that `MODEL.WEIGHTS` names: itself, or the best checkpoint of a run's folder, else its last.

    Raises:
        ConfigError: there is none.
    """
    path = Path(value).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(f"MODEL.WEIGHTS: {value!r} is not a file, nor the folder of a run")
    found = checkpoint_file(path, "best") or checkpoint_file(path, "last")
    if found is not None:
        return found
    hint = ""
    if (path / "config.json").is_file():
        hint = f"; it holds a model of timm: MODEL.NAME local-dir:{value} MODEL.PRETRAINED True"
    raise ConfigError(
        f"MODEL.WEIGHTS: {value!r} is a folder without checkpoints/best.pt and checkpoints/last.pt, so it is "
        f"not that of a run{hint}"
    )


def saved_config(value: str) -> Mapping[str, Any]:
    """The nodes of the configuration that a run's checkpoint keeps; empty for other files.

    Raises:
        ConfigError: there is no such file.
    """
    path = find_file(value)
    if path.suffix == ".safetensors":
        return {}
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # not torch's present format, or damaged: reading the weights says so
        return {}
    nodes = content.get("config", {}) if is_checkpoint(content) else {}
    return nodes if isinstance(nodes, dict) else {}


def saved_weights(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights to use of a checkpoint's `state`: the average where the run kept one; empty without any."""
    return state["ema"]["module"] if state.get("ema") else state.get("model") or {}


def is_checkpoint(content: Any) -> bool:
    """Whether this is the content of a checkpoint of Linnaeus."""
    return (
        isinstance(content, dict)
        and isinstance(content.get("progress"), dict)
        and isinstance(content.get("state"), dict)
    )


def _read(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damage shows in many kinds of exceptions
        reason = str(error).strip().partition("\n")[0]
        if isinstance(error, pickle.UnpicklingError):  # torch's own text is about its options
            reason = "not written by torch.save, or it holds more than tensors and plain values"
        raise ConfigError(
            f"MODEL.WEIGHTS: {str(path)!r} cannot be read as tensors ({type(error).__name__}: {reason:.150})"
            "; save a state dict with torch.save or safetensors"
        ) from error


def load_backbone(
    saved: SavedWeights, name: str, untrained: nn.Module, create: Callable[..., nn.Module]
) -> nn.Module:
    """The backbone with the weights of a file.

    Where names and shapes are not its own, timm adapts them to the names, the channels and the size of the
    images. `untrained` has random weights and may be filled and returned; `create` builds it again from the
    same random numbers, with more arguments of `timm.create_model`. `name` is MODEL.NAME, for errors.

    Raises:
        ConfigError: they do not fit.
    """
    own = untrained.state_dict()
    if all(key in saved.backbone and saved.backbone[key].shape == own[key].shape for key in own):
        untrained.load_state_dict({key: saved.backbone[key] for key in own})
        return untrained
    problem = f"MODEL.WEIGHTS: {str(saved.path)!r} does not load into {name!r}: "
    overlay = {"state_dict": dict(saved.backbone), "source": None, "custom_load": False}
    try:
        backbone = create(pretrained=True, pretrained_cfg_overlay=overlay)
    except Exception as error:  # timm's filters raise what they meet in files that are not theirs
        other = [key for key in own if key in saved.backbone and saved.backbone[key].shape != own[key].shape]
        if not other:
            missing = [key for key in own if key not in saved.backbone]
            raise ConfigError(problem + _not_in_file(missing, saved.backbone)) from error
        shapes = ["×".join(map(str, tensors[other[0]].shape)) for tensors in (saved.backbone, own)]
        raise ConfigError(
            f"{problem}{len(other)} of {len(own)} tensors have another shape, such as {other[0]!r} "
            f"({shapes[0]} in the file, {shapes[1]} in the model)"
        ) from error
    for cfg in (backbone.pretrained_cfg, backbone.default_cfg):  # or every copy of the model would copy them
        cfg.pop("state_dict", None)  # type: ignore[operator, union-attr]
    missed = missing_tensors(backbone, untrained, saved.backbone)
    if missed:
        raise ConfigError(problem + _not_in_file(missed, saved.backbone))
    return backbone


def missing_tensors(
    loaded: nn.Module, untrained: nn.Module, file: Mapping[str, Tensor] | None = None
) -> list[str]:
    """Parameters that timm has silently not loaded; with the tensors of a `file`, BatchNorm's statistics too.

    timm may rename what it loads. `untrained` is the same network from the same random numbers: a parameter
    that equals its own was not loaded. BatchNorm's statistics are the same in each untrained network; a file
    has as many of them as the network, whatever their names.
    """
    initial, names = untrained.state_dict(), loaded.state_dict()
    if file is not None and names.keys() <= file.keys():
        return []
    missed = [
        name
        for name, parameter in loaded.named_parameters()
        if parameter.requires_grad and torch.equal(parameter, initial[name]) and len(parameter.unique()) > 1
    ]
    for kind in BATCHNORM_STATISTICS if file is not None else ():
        own = [name for name in names if name.rpartition(".")[2] == kind]
        held = [name for name in file or () if name.rpartition(".")[2] == kind]
        if len(held) < len(own):
            missed += [name for name in own if torch.equal(names[name], initial[name])]
    return missed


def _not_in_file(missed: list[str], file: Mapping[str, Tensor]) -> str:
    return (
        f"{len(missed)} parameters are not in the file, such as {missed[0]!r}; it holds {len(file)} tensors, "
        f"such as {next(iter(file))!r}"
    )


@torch.no_grad()
def load_heads(model: HierarchicalClassifier, saved: SavedWeights, taxonomy: Taxonomy) -> list[str]:
    """Copy the heads of levels with the same classes, in this model's order; the names of the other levels.

    Where the file does not name its classes, their number decides, with the same number of levels. A marginal
    head is copied where the file has one with the same classes in the same order.
    """
    if isinstance(model.heads, MarginalHead):
        classes = {level.name: list(level.classes) for level in taxonomy.levels}
        own = model.heads.state_dict()
        found = {name: saved.heads.get(f"heads.{name}") for name in own}
        is_other = saved.classes is not None and saved.classes != classes
        if is_other or any(t is None or t.shape != own[name].shape for name, t in found.items()):
            return list(taxonomy.names)
        model.heads.load_state_dict(found)
        return []
    new = []
    for index, level in enumerate(taxonomy.levels):
        number, rows = _place(index, level, len(taxonomy.levels), saved)
        weight, bias = (saved.heads.get(f"heads.{number}.{part}") for part in ("weight", "bias"))
        head: Any = model.heads[index]
        if weight is None or bias is None or weight.shape != head.weight.shape:
            new.append(level.name)
        else:
            head.weight.copy_(weight[rows])
            head.bias.copy_(bias[rows])
    return new


def _place(index: int, level: Level, num_levels: int, saved: SavedWeights) -> tuple[int, list[int]]:
    """The number of a level's head in the file, -1 if the classes differ, and the row of each class there."""
    if saved.classes is None:
        num_before = len({name.split(".")[1] for name in saved.heads})
        return index if num_before == num_levels else -1, list(range(len(level.classes)))
    before = saved.classes.get(level.name, [])
    if sorted(before) != sorted(level.classes):
        return -1, []
    rows = {name: row for row, name in enumerate(before)}
    return list(saved.classes).index(level.name), [rows[name] for name in level.classes]
