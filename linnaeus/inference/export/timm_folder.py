"""A folder that timm loads by itself: `timm.create_model("local-dir:FOLDER", pretrained=True)`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from linnaeus.autobatch.rng import preserved_generators
from linnaeus.config.instantiate import is_target
from linnaeus.errors import ConfigError, LinnaeusError
from linnaeus.inference.export.description import KEY, describe
from linnaeus.inference.trained import TrainedRun
from linnaeus.models.hierarchical import HierarchicalClassifier

FILES = ("config.json", "model.safetensors")


def check_level(run: TrainedRun, level: str | None) -> str:
    """The level whose head becomes timm's classifier: the one named, or the finest.

    Raises:
        ConfigError: there is no such level.
        LinnaeusError: timm has no place for the model.
    """
    _head(run, 0)
    names = list(run.classes)
    if level is not None and level not in names:
        raise ConfigError(f"--level: {level!r} is no rank of the run; it has {', '.join(names)}")
    return level or names[-1]


def write(run: TrainedRun, folder: Path, level: str) -> None:
    """Write `config.json` and `model.safetensors`.

    Args:
        run: the run.
        folder: is there, and empty.
        level: of the head.

    Raises:
        LinnaeusError: timm has no place for the model.
    """
    architecture, arguments = _arguments(run)
    head = _head(run, list(run.classes).index(level))
    try:
        with preserved_generators():
            model = timm.create_model(architecture, num_classes=head.out_features, **arguments)
    except Exception as error:
        raise LinnaeusError(f"timm cannot build {architecture} with {arguments}: {error}") from error
    save_file(_state(run, model, head), folder / FILES[1], metadata={"format": "pt"})
    text = json.dumps(_config(run, model, architecture, arguments, level), indent=1, ensure_ascii=False)
    (folder / FILES[0]).write_text(text + "\n", encoding="utf-8")


def read(folder: Path) -> nn.Module:
    """The model as plain timm builds it from the folder, in eval mode."""
    with preserved_generators():
        model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return model.eval()


def _head(run: TrainedRun, position: int) -> nn.Linear:
    heads = getattr(run.model, "heads", None)
    if is_target(run.spec.node) or not isinstance(run.model, HierarchicalClassifier):
        raise LinnaeusError(
            "--format timm: the model is one of your own, which timm cannot build; use another --format"
        )
    if not isinstance(heads, nn.ModuleList) or not all(isinstance(head, nn.Linear) for head in heads):
        raise LinnaeusError(
            f"--format timm: timm has no place for heads of {type(heads).__name__}, only for a linear one; "
            "use another --format"
        )
    head = heads[position]
    assert isinstance(head, nn.Linear)
    return head


def _arguments(run: TrainedRun) -> tuple[str, dict[str, Any]]:
    """The architecture without its tag, and the arguments of `build_model` for timm that matter."""
    spec = run.spec
    name = str(spec.node["NAME"])
    arguments: dict[str, Any] = {"in_chans": spec.in_chans}
    pretrained_cfg = timm.get_pretrained_cfg(name, allow_unregistered=False)
    if pretrained_cfg is not None and pretrained_cfg.fixed_input_size:
        arguments["img_size"] = list(spec.img_size or ())
    left_out = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "num_classes")
    given = spec.node.get("KWARGS") or {}
    arguments |= {key: value for key, value in given.items() if key not in left_out}
    return name.partition(".")[0], arguments


def _state(run: TrainedRun, model: Any, head: nn.Linear) -> dict[str, Tensor]:
    """The tensors of timm's model: its own from the backbone, and the head as the classifier."""
    backbone: Any = run.model.backbone
    own: dict[str, Tensor] = backbone.state_dict()
    classifier = model.get_classifier()
    prefix = next((f"{name}." for name, module in model.named_modules() if module is classifier), None)
    if not isinstance(classifier, nn.Linear) or prefix is None or classifier.bias is None:
        raise LinnaeusError(
            f"--format timm: timm's classifier of this model is a {type(classifier).__name__}, which cannot "
            "hold the run's linear head; use another --format"
        )
    own |= {prefix + name: tensor for name, tensor in head.state_dict().items()}
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    found = {name: tensor.shape for name, tensor in own.items()}
    if expected != found:
        differing = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
        raise LinnaeusError(
            "--format timm: with a classifier of its own, timm's model has other layers before it than "
            f"the run's ({differing[0]} and {len(differing) - 1} more); use another --format"
        )
    return {name: own[name].detach().to("cpu", copy=True).contiguous() for name in expected}


def _config(
    run: TrainedRun, model: Any, architecture: str, arguments: dict[str, Any], level: str
) -> dict[str, Any]:
    spec, labels = run.spec, list(run.classes[level])
    source = model.pretrained_cfg
    preprocessing = spec.preprocessing
    pretrained_cfg = {
        "num_classes": len(labels),
        "input_size": [spec.in_chans, *(spec.img_size or ())],
        "fixed_input_size": bool(source.get("fixed_input_size")),
        "interpolation": "bilinear",
        "crop_mode": "center",
        "first_conv": source.get("first_conv"),
        "classifier": source.get("classifier"),
    }
    if preprocessing is not None:
        pretrained_cfg |= {
            "mean": list(preprocessing.mean), "std": list(preprocessing.std),
            "crop_pct": preprocessing.crop_fraction,
        }  # fmt: skip
    pool = getattr(model, "global_pool", None)
    return {
        "architecture": architecture,
        "num_classes": len(labels),
        "num_features": model.num_features,
        **({"global_pool": pool} if isinstance(pool, str) else {}),
        "label_names": labels,
        "pretrained_cfg": {name: value for name, value in pretrained_cfg.items() if value is not None},
        "model_args": arguments,
        KEY: describe(run, None) | {"level": level},
    }


def as_outputs(model: nn.Module, level: str) -> Any:
    """The model as a function that gives named outputs."""

    @torch.no_grad()
    def run(inputs: Tensor) -> dict[str, Tensor]:
        return {level: model(inputs)}

    return run
