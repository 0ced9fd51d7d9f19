"""Weights from a file: another run's, or a state dict of the backbone or of a whole model (MODEL.WEIGHTS)."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from linnaeus.config.schema import LoraConfig
from linnaeus.data.taxonomy import Taxonomy
from linnaeus.models.hierarchical import HierarchicalClassifier, MarginalHead
from linnaeus.models.lora import merged_weights
from linnaeus.models.shards import ShardsReader
from linnaeus.runtime.errors import ConfigError, first_line
from linnaeus.runtime.files import checkpoint_file
from linnaeus.runtime.words import several

_AVERAGE = re.compile(r"(^|[._])(ema|swa|averaged?)([._]|$)")
"""Keys of an average of the weights, which is taken before the weights themselves."""

_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts that torch's wrappers add to names, also of inner modules."""

_MAX_NESTING = 4
"""Levels of mappings in a file in which tensors are looked for."""

BATCHNORM_STATISTICS = ("running_mean", "running_var")
"""Names of BatchNorm's buffers in evaluation, without the module's."""


@dataclass(frozen=True)
class SavedWeights:
    """The tensors of a file.

    Attributes:
        path: the file.
        backbone: tensors of the backbone, by their names in it.
        heads: tensors of the heads, by their names in the model; empty where the file has none.
        note: for people: epoch and average of a checkpoint; of other files, where in it the tensors stand.
        classes: names of the classes of each level, by the level's name; None where the file does not say.
        architecture: name of the model that the weights are of; None where the file does not say.
    """

    path: Path
    backbone: dict[str, Tensor]
    heads: dict[str, Tensor]
    note: str = ""
    classes: dict[str, list[str]] | None = None
    architecture: str | None = None


def read_weights(value: str, backbone_names: Collection[str]) -> SavedWeights:
    """Read the weights of `MODEL.WEIGHTS`.

    The tensors may stand in nested mappings, and their names may begin with any prefix. `backbone_names`
    are the names of the backbone's tensors, which tell both.

    Raises:
        ConfigError: there is no such file, or it holds no tensors by name.
    """
    path = find_file(value)
    content = _read(path)
    is_own, spec, architecture = is_checkpoint(content), _spec(content), _architecture(content)
    notes: list[str] = []
    if is_own:
        try:
            content, notes = _of_checkpoint(content, spec)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ConfigError(
                f"MODEL.WEIGHTS: {str(path)!r} does not describe its model as Linnaeus does "
                f"({type(error).__name__}: {first_line(error):.150}); save its state dict alone"
            ) from error
    found = [_candidate(key, tensors, backbone_names) for key, tensors in _state_dicts(content)]
    if not found:
        raise ConfigError(
            f"MODEL.WEIGHTS: {str(path)!r} holds a {type(content).__name__} without tensors by name; save a "
            "state dict"
        )
    best = max(found, key=lambda each: (each.num_matching, each.is_average, len(each.tensors)))
    stem, backbone, inner = best.prefix.rpartition("backbone.")
    tensors: dict[str, Tensor] = {}
    heads: dict[str, Tensor] = {}
    for name, tensor in best.tensors.items():
        if name.startswith(best.prefix):
            tensors[name.removeprefix(best.prefix)] = tensor
        elif backbone and name.startswith(f"{stem}heads."):
            heads[name.removeprefix(stem)] = tensor
    used = {f"{best.prefix}{name}" for name in backbone_names} | {f"{stem}{name}" for name in heads}
    unused = [name for name in best.tensors if name not in used]
    if not is_own:
        prefix = "".join([*best.wrappers, stem if backbone and not inner else best.prefix])
        notes += [best.key] if best.key else []
        notes += [f"without the prefix {prefix!r}"] if prefix else []
        if unused and best.num_matching == len(backbone_names):  # else timm may have use for them
            notes.append(f"not used: {several(unused)}")
    return SavedWeights(path, tensors, heads, ", ".join(notes), _classes(spec), architecture)


@dataclass(frozen=True)
class _Candidate:
    """A mapping of a file that holds tensors by name.

    Attributes:
        key: where it stands in the file, with dots.
        tensors: by their names without `wrappers`.
        wrappers: the parts of torch's wrappers that names had.
        prefix: of the names of the backbone.
        num_matching: number of the backbone's names that it has; 0 if it has less than half of them.
        is_average: whether key or prefix say that the tensors are an average.
    """

    key: str
    tensors: dict[str, Tensor]
    wrappers: list[str]
    prefix: str
    num_matching: int
    is_average: bool


def _state_dicts(
    content: Any, key: str = "", depth: int = 0
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The mappings in a file that hold tensors by name, outermost first, each with its key."""
    if not isinstance(content, Mapping) or depth > _MAX_NESTING:
        return
    named = {name: value for name, value in content.items() if isinstance(name, str)}
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    if tensors:
        yield key, tensors
    for name, value in named.items():
        if "optim" not in name:
            yield from _state_dicts(value, f"{key}.{name}" if key else name, depth + 1)


def _candidate(
    key: str, tensors: Mapping[str, Tensor], backbone_names: Collection[str]
) -> _Candidate:
    """Find the prefix under which most names of the backbone stand."""
    wrappers = dict.fromkeys(match for name in tensors for match in _WRAPPERS.findall(name))
    tensors = {_WRAPPERS.sub("", name): tensor for name, tensor in tensors.items()}
    found: Counter[str] = Counter()
    for name in tensors:
        parts = name.split(".")
        found.update(
            "".join(f"{part}." for part in parts[:start])
            for start in range(len(parts))
            if ".".join(parts[start:]) in backbone_names
        )
    prefix = max(found, key=lambda each: (found[each], bool(_AVERAGE.search(each))), default="")
    num_matching = found[prefix] if 2 * found[prefix] > len(backbone_names) else 0
    if not num_matching:  # timm may know the names, if no prefix hides them
        prefix = "backbone." if any(name.startswith("backbone.") for name in tensors) else ""
        prefix = prefix or re.sub(r"[^.]*$", "", os.path.commonprefix([*tensors]))  # noqa: RUF071 (cut at a dot)
    is_average = bool(_AVERAGE.search(f"{key}.{prefix}"))
    parts = [f"{each}." for each in wrappers]
    return _Candidate(key, dict(tensors), parts, prefix, num_matching, is_average)


def _spec(content: Any) -> dict[str, Any]:
    """Return the `ModelSpec` in a checkpoint of Linnaeus, as plain values; empty for other files."""
    spec = content.get("model_spec") if is_checkpoint(content) else None
    return spec if isinstance(spec, dict) and isinstance(spec.get("model", {}), dict) else {}


def _architecture(content: Any) -> str | None:
    """The name of the model in a checkpoint: of Linnaeus, of timm, or of a script that saves `arch`."""
    found = _spec(content).get("model", {}).get("NAME")
    if isinstance(content, Mapping):
        found = found or content.get("arch") or getattr(content.get("args"), "model", None)
    return found if isinstance(found, str) else None


def _classes(spec: Mapping[str, Any]) -> dict[str, list[str]] | None:
    """Return the names of the classes in a `ModelSpec` of plain values; None if it has none."""
    try:
        levels = spec["taxonomy"]["levels"]
        return {str(level["name"]): [str(each) for each in level["classes"]] for level in levels}
    except (LookupError, TypeError):
        return None


def _of_checkpoint(content: Any, spec: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return the weights of a checkpoint of Linnaeus with its LoRA adapters merged, and notes for people."""
    state, progress, notes = content["state"], content["progress"], []
    if progress:
        samples = ", within an epoch" if progress.get("samples") else ""
        notes = [f"epoch {progress.get('epoch')}{samples}"]
    notes += ["EMA"] if state.get("ema") else []
    weights, lora = saved_weights(state), spec.get("model", {}).get("LORA") or {}
    if lora.get("RANK"):
        weights = merged_weights(weights, LoraConfig(**lora))
        notes.append("with its LoRA adapters")
    return weights, notes


def find_file(value: str) -> Path:
    """The file that `MODEL.WEIGHTS` names: itself, or the best checkpoint of a run's folder, else its last.

    Raises:
        ConfigError: there is none.
    """
    path = Path(value).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(f"MODEL.WEIGHTS: {value!r} is not a file, nor a run directory")
    found = checkpoint_file(path, "best") or checkpoint_file(path, "last")
    if found is not None:
        return found
    hint = ""
    if (path / "config.json").is_file():
        hint = f"; it holds a model of timm: MODEL.NAME local-dir:{value} MODEL.PRETRAINED True"
    raise ConfigError(
        f"MODEL.WEIGHTS: {value!r} is a folder without checkpoints/best.pt and checkpoints/last.pt, so it is "
        f"not a run directory{hint}"
    )


def saved_spec(value: str) -> Mapping[str, Any]:
    """The `ModelSpec` of a checkpoint or an export of Linnaeus, as plain values; empty for other files.

    Raises:
        ConfigError: there is no such file.
    """
    path = find_file(value)
    try:
        return _spec(read_export(path) if path.suffix == ".safetensors" else _load(path))
    except Exception:  # reading the weights reports it
        return {}


def saved_weights(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights to use of a checkpoint's `state`: the average where the run kept one; empty without any."""
    return state["ema"]["module"] if state.get("ema") else state.get("model") or {}


def is_checkpoint(content: Any) -> bool:
    """Return whether this is the content of a checkpoint of Linnaeus."""
    return (
        isinstance(content, dict)
        and isinstance(content.get("progress"), dict)
        and isinstance(content.get("state"), dict)
    )


def _read(path: Path) -> Any:
    """Return the content of a file. An export of Linnaeus has the same entries as a checkpoint."""
    try:
        if path.suffix == ".safetensors":
            return read_export(path) or safetensors.torch.load_file(path)
        content = _load(path)
        if is_checkpoint(content) and "shards" in content:
            content["state"] = ShardsReader(path, content["shards"]).read_whole(content["state"])
        return content
    except Exception as error:  # damage shows in many kinds of exceptions
        reason = str(error).strip().partition("\n")[0]
        if isinstance(error, pickle.UnpicklingError):  # torch's own text is about its options
            reason = _refused(path)
        remedy = "save a state dict with torch.save or safetensors"
        if isinstance(error, FileNotFoundError):
            remedy = "the folder of its shards belongs beside it: copy both, or export the run"
        raise ConfigError(
            f"MODEL.WEIGHTS: {str(path)!r} cannot be read as tensors ({type(error).__name__}: {reason:.300})"
            f"; {remedy}"
        ) from error


def _load(path: Path) -> Any:
    """Load a file of torch.save without running code; timm's checkpoints hold a Namespace of plain values."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        # Mapped, where the format allows it: a rank that keeps a shard of each tensor reads one at a time.
        return torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )


def _refused(path: Path) -> str:
    """Return why torch refuses a file: the code that it names, if it says so."""
    with suppress(Exception), torch.serialization.safe_globals([argparse.Namespace]):
        if names := torch.serialization.get_unsafe_globals_in_checkpoint(path):
            return f"it holds more than tensors and plain values: {several(sorted(names))}"
    return "not written by torch.save, or it holds more than tensors and plain values"


def read_export(path: Path) -> dict[str, Any] | None:
    """Return the entries of a file of `linnaeus export`, as a checkpoint has them; None for another file.

    The header may hold anything, so this raises the errors of JSON and of mappings.
    """
    with safetensors.safe_open(path, "pt") as file:
        header = (file.metadata() or {}).get("linnaeus")
        if header is None:
            return None
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    description = json.loads(header)
    train = {"AMP": "off", "CHANNELS_LAST": False} | description.get("precision", {})
    return {
        "model_spec": description["spec"],
        "config": {"TRAIN": train},
        "progress": {},
        "state": {"model": weights},
    }


def load_backbone(
    saved: SavedWeights, name: str, untrained: nn.Module, create: Callable[..., nn.Module]
) -> nn.Module:
    """Return the backbone with the weights of a file.

    Where names and shapes are not its own, timm adapts them to the names, the channels and the size of the
    images. `untrained` has random weights and may be filled and returned; `create` builds it again from the
    same random numbers, with more arguments of `timm.create_model`. `name` is MODEL.NAME, for errors.

    Raises:
        ConfigError: they do not fit.
    """
    expected = untrained.state_dict()
    problem = f"MODEL.WEIGHTS: {str(saved.path)!r} does not load into {name!r}: "
    architecture = saved.architecture or name
    if architecture.partition(".")[0] != name.partition(".")[0]:  # the rest is timm's tag
        problem += f"its weights are of {saved.architecture!r}; "
    overlay = {"state_dict": dict(saved.backbone), "source": None, "custom_load": False}
    tensors = saved.backbone
    try:
        if all(key in tensors and tensors[key].shape == expected[key].shape for key in expected):
            untrained.load_state_dict({key: tensors[key] for key in expected})
            return untrained
        backbone = create(pretrained=True, pretrained_cfg_overlay=overlay)
    except Exception as error:  # timm's filters raise various errors on foreign files
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
    """Return parameters that timm silently did not load; with tensors of a `file`, also BatchNorm statistics.

    timm may rename tensors. `untrained` is the same network from the same random numbers. A parameter that
    equals its untrained value was not loaded. BatchNorm's statistics are equal in all untrained networks, so
    they are missing only if the file has none at all.
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
    wanted = {level.name: list(level.classes) for level in taxonomy.levels}
    if isinstance(model.heads, MarginalHead):
        found = _fitting(saved, "heads.", model.heads)
        if found is None or saved.classes not in (None, wanted):
            return list(wanted)
        model.heads.load_state_dict(found)
        return []
    before = saved.classes
    if before is None:
        before = wanted if len({name.split(".")[1] for name in saved.heads}) == len(wanted) else {}
    new = []
    heads: Any = model.heads
    for head, (level, classes) in zip(heads, wanted.items(), strict=True):
        rows = {name: row for row, name in enumerate(before.get(level, []))}
        is_same = sorted(before.get(level, [])) == sorted(classes)
        number = [*before].index(level) if is_same else -1
        parts = _fitting(saved, f"heads.{number}.", head)
        if parts is None:
            new.append(level)
        else:
            order = [rows[name] for name in classes]
            head.load_state_dict({part: tensor[order] for part, tensor in parts.items()})
    return new


def _fitting(saved: SavedWeights, prefix: str, head: nn.Module) -> dict[str, Tensor] | None:
    """Return the tensors of a head in a file; None where one is missing or has another shape."""
    found = {}
    for name, tensor in head.state_dict().items():
        saved_tensor = saved.heads.get(f"{prefix}{name}")
        if saved_tensor is None or saved_tensor.shape != tensor.shape:
            return None
        found[name] = saved_tensor
    return found
