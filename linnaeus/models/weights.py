"""Weights from a file: another run's, or a state dict of the backbone or of a whole model (MODEL.WEIGHTS)."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import timm.models
import torch
from torch import Tensor, nn

from linnaeus.config.schema import LoraConfig
from linnaeus.data.taxonomy import Taxonomy
from linnaeus.errors import ConfigError, first_line
from linnaeus.files import checkpoint_file
from linnaeus.models.hierarchical import HierarchicalClassifier, MarginalHead
from linnaeus.models.lora import merged_weights
from linnaeus.models.shards import ShardsReader

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
        try:
            content, note, classes = _of_checkpoint(content)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ConfigError(
                f"MODEL.WEIGHTS: {str(path)!r} does not describe its model as Linnaeus does "
                f"({type(error).__name__}: {first_line(error):.150}); save its state dict alone"
            ) from error
    elif isinstance(content, dict):
        content = next(
            (content[name] for name in _NESTED if isinstance(content.get(name), dict)), content
        )
    items = content.items() if isinstance(content, dict) else ()
    found = {
        name: value for name, value in items if isinstance(name, str) and isinstance(value, Tensor)
    }
    if not found:
        raise ConfigError(
            f"MODEL.WEIGHTS: {str(path)!r} holds a {type(content).__name__} without tensors by name; save a "
            "state dict"
        )
    tensors = dict(timm.models.clean_state_dict(found))
    while tensors.keys() != found.keys():  # older timm takes away one wrapper's prefix at a time
        found, tensors = tensors, dict(timm.models.clean_state_dict(tensors))
    prefix = "backbone."
    backbone = {
        name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)
    }
    if not backbone:  # all of another file belongs to the backbone
        return SavedWeights(path, tensors, {}, note)
    heads = {name: tensor for name, tensor in tensors.items() if name.startswith("heads.")}
    return SavedWeights(path, backbone, heads, note, classes)


def _of_checkpoint(
    content: dict[str, Any],
) -> tuple[Mapping[str, Tensor], str, dict[str, list[str]] | None]:
    """The weights of a checkpoint with its LoRA adapters merged, a note for people, and the classes."""
    state, progress, spec = content["state"], content["progress"], content.get("model_spec", {})
    samples = ", within an epoch" if progress.get("samples") else ""
    note = f"epoch {progress.get('epoch')}{samples}{', EMA' if state.get('ema') else ''}"
    levels = (spec.get("taxonomy") or {}).get("levels")
    classes = levels and {level["name"]: list(level["classes"]) for level in levels}
    weights, lora = saved_weights(state), spec.get("model", {}).get("LORA") or {}
    if lora.get("RANK"):
        weights = merged_weights(weights, LoraConfig(**lora))
        note += ", with its LoRA adapters"
    return weights, note, classes


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
        # Mapped, where the format allows it: a rank that keeps a shard of each tensor reads one at a time.
        content = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
        if is_checkpoint(content) and "shards" in content:
            content["state"] = ShardsReader(path, content["shards"]).read_whole(content["state"])
        return content
    except Exception as error:  # damage shows in many kinds of exceptions
        reason = str(error).strip().partition("\n")[0]
        if isinstance(error, pickle.UnpicklingError):  # torch's own text is about its options
            reason = "not written by torch.save, or it holds more than tensors and plain values"
        remedy = "save a state dict with torch.save or safetensors"
        if isinstance(error, FileNotFoundError):
            remedy = "the folder of its shards belongs beside it: copy both, or export the run"
        raise ConfigError(
            f"MODEL.WEIGHTS: {str(path)!r} cannot be read as tensors ({type(error).__name__}: {reason:.150})"
            f"; {remedy}"
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
        raise ConfigError(
            f"{problem}{type(error).__name__}: {' '.join(str(error).split()):.300}"
        ) from error
    for cfg in (
        backbone.pretrained_cfg,
        backbone.default_cfg,
    ):  # or every copy of the model would copy them
        cfg.pop("state_dict", None)  # type: ignore[operator, union-attr]
    missed = missing_tensors(backbone, untrained, saved.backbone)
    if missed:
        raise ConfigError(
            f"{problem}parameters such as {missed[0]!r} are not in the file; it holds {len(saved.backbone)} "
            f"tensors, such as {next(iter(saved.backbone))!r}"
        )
    return backbone


def missing_tensors(
    loaded: nn.Module, untrained: nn.Module, file: Mapping[str, Tensor] | None = None
) -> list[str]:
    """Parameters that timm has silently not loaded; with the tensors of a `file`, BatchNorm's statistics too.

    timm may rename what it loads. `untrained` is the same network from the same random numbers: a parameter
    that equals its own was not loaded. BatchNorm's statistics are the same in each untrained network, so they
    are missing only if the file has none at all.
    """
    initial = untrained.state_dict()
    missed = [
        name
        for name, parameter in loaded.named_parameters()
        if parameter.requires_grad
        and torch.equal(parameter, initial[name])
        and len(parameter.unique()) > 1
    ]
    lacking = {*BATCHNORM_STATISTICS}.difference(
        name.rpartition(".")[2] for name in file or initial
    )
    return missed + [name for name in initial if name.rpartition(".")[2] in lacking]


@torch.no_grad()
def load_heads(model: HierarchicalClassifier, saved: SavedWeights, taxonomy: Taxonomy) -> list[str]:
    """Copy the heads of levels with the same classes, in this model's order; the names of the other levels.

    Where the file does not name its classes, their number decides, with the same number of levels. A marginal
    head is copied where the file has one with the same classes in the same order.
    """
    own = {level.name: list(level.classes) for level in taxonomy.levels}
    if isinstance(model.heads, MarginalHead):
        shapes = {name: tensor.shape for name, tensor in model.heads.state_dict().items()}
        found = {
            name: saved.heads[f"heads.{name}"] for name in shapes if f"heads.{name}" in saved.heads
        }
        if saved.classes not in (None, own) or shapes != {
            name: t.shape for name, t in found.items()
        }:
            return list(own)
        model.heads.load_state_dict(found)
        return []
    before = saved.classes
    if before is None:
        before = own if len({name.split(".")[1] for name in saved.heads}) == len(own) else {}
    new = []
    heads: Any = model.heads
    for head, (level, classes) in zip(heads, own.items(), strict=True):
        rows = {name: row for row, name in enumerate(before.get(level, []))}
        number = [*before].index(level) if rows.keys() == set(classes) else -1
        weight, bias = (saved.heads.get(f"heads.{number}.{part}") for part in ("weight", "bias"))
        if weight is None or bias is None or weight.shape != head.weight.shape:
            new.append(level)
        else:
            order = [rows[name] for name in classes]
            head.weight.copy_(weight[order])
            head.bias.copy_(bias[order])
    return new
