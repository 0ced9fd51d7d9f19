"""The four formats: safetensors, torch.export, ONNX and timm; each is written and read back here."""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf
from torch import Tensor, nn
from torch.export import ExportedProgram

from linnaeus.autobatch.state.rng import preserved_generators
from linnaeus.config.instantiate import is_target
from linnaeus.inference.export.check import Model
from linnaeus.inference.trained import TrainedRun
from linnaeus.models.hierarchical import HierarchicalClassifier
from linnaeus.models.timm_source import CROP_MODES
from linnaeus.runtime.errors import ConfigError, LinnaeusError, first_detail, first_line

KEY = "linnaeus"
"""The entry of the description in the metadata of safetensors and ONNX files, and in timm's `config.json`."""
EXTRA_FILE = "linnaeus.json"
"""The file with the description inside a torch.export archive."""
TIMM_FILES = ("config.json", "model.safetensors")
_NEEDED = ("onnx", "onnxscript", "onnxruntime")


def write_safetensors(state: dict[str, Tensor], description: dict[str, Any], file: Path) -> None:
    """Write the model's tensors; the description is in the header."""
    tensors = {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()
    }
    save_file(
        tensors, file, metadata={"format": "pt", KEY: json.dumps(description, ensure_ascii=False)}
    )


def write_program(program: ExportedProgram, description: dict[str, Any], file: Path) -> Model:
    """Write a torch.export archive and read it back."""
    torch.export.save(
        program, file, extra_files={EXTRA_FILE: json.dumps(description, ensure_ascii=False)}
    )
    with warnings.catch_warnings(action="ignore"):  # torch 2.11 warns of its own buffer
        module: Model = torch.export.load(file).module()
    return module


def check_onnx_is_there() -> None:
    """Make sure that ONNX files can be written and checked.

    Raises:
        ConfigError: a package is missing; the message says how it is installed.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--format onnx: {', '.join(missing)} missing: pip install 'linnaeus[export]'"
        )


def write_onnx(
    program: ExportedProgram, description: dict[str, Any], file: Path, opset: int | None = None
) -> Model:
    """Write an ONNX file and read it back, into onnxruntime on the CPU.

    Weights above 2 GB go to a second file beside it.

    Raises:
        LinnaeusError: ONNX lacks an operation of the model, or onnxruntime cannot load the file.
    """
    import onnxruntime

    # They report progress, warn of their own parts, and print tracebacks.
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            exported = torch.onnx.export(
                program,
                dynamo=True,
                input_names=[description["input"]["name"]],
                verbose=False,
                opset_version=opset,
                dynamic_shapes={"images": {0: "batch"}},  # the name of the axis
                output_names=program.call_spec.out_spec.context,  # the keys of the outputs
            )
    except Exception as error:  # whatever the exporter meets
        raise LinnaeusError(
            f"the model cannot be exported to ONNX ({type(error).__name__}: {first_line(error)}); "
            "--format torch-export or safetensors may do"
        ) from error
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
    assert exported is not None
    written = exported.model.opset_imports[""]
    if opset not in (None, written):
        raise LinnaeusError(
            f"--opset {opset}: the exporter cannot write it for this model, but {written}; leave it out"
        )
    exported.model.metadata_props[KEY] = json.dumps(description, ensure_ascii=False)
    exported.save(file)
    try:
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no base class of their own
        raise LinnaeusError(
            f"onnxruntime cannot load the exported file: {first_line(error)}; --format torch-export or "
            "safetensors may do"
        ) from error
    (name,) = [entry.name for entry in session.get_inputs()]
    outputs = [entry.name for entry in session.get_outputs()]

    def run(inputs: Tensor) -> dict[str, Tensor]:
        values = session.run(None, {name: inputs.cpu().numpy()})
        return {
            output: torch.from_numpy(value) for output, value in zip(outputs, values, strict=True)
        }

    return run


# timm: a folder for `timm.create_model("local-dir:FOLDER", pretrained=True)`.


def check_level(run: TrainedRun, level: str | None) -> str:
    """The level whose head becomes timm's classifier: the one named, or the finest.

    Raises:
        ConfigError: there is no such level.
        LinnaeusError: timm has no place for the model.
    """
    if is_target(run.spec.node) or not isinstance(run.model, HierarchicalClassifier):
        raise LinnaeusError(
            "--format timm: the model is one of your own, which timm cannot build; use another --format"
        )
    heads = run.model.heads
    if not isinstance(heads, nn.ModuleList) or not all(
        isinstance(head, nn.Linear) for head in heads
    ):
        raise LinnaeusError(
            f"--format timm: timm has no place for heads of {type(heads).__name__}, only for a linear one; "
            "use another --format"
        )
    names = list(run.classes)
    if level is not None and level not in names:
        raise ConfigError(f"--level: {level!r} is no level of the run; it has {', '.join(names)}")
    return level or names[-1]


def write_timm(run: TrainedRun, description: dict[str, Any], folder: Path, level: str) -> Model:
    """Write `config.json` and `model.safetensors`, and let plain timm build the model from them.

    Args:
        run: a run that `check_level` accepts.
        description: stands in `config.json`.
        folder: is there, and empty.
        level: the level of the head.

    Raises:
        LinnaeusError: timm has no place for the model.
    """
    spec, labels = run.spec, list(run.classes[level])
    name = str(spec.node["NAME"])
    architecture = name.partition(".")[0]  # without the tag
    arguments: dict[str, Any] = {"in_chans": spec.in_chans}
    known = timm.get_pretrained_cfg(name, allow_unregistered=False)
    if known is not None and known.fixed_input_size:
        arguments["img_size"] = list(spec.img_size or ())
    left_out = (
        "pretrained",
        "pretrained_cfg",
        "pretrained_cfg_overlay",
        "checkpoint_path",
        "num_classes",
    )
    given = spec.node.get("KWARGS") or {}
    arguments |= {key: value for key, value in given.items() if key not in left_out}
    try:
        with preserved_generators():
            model: Any = timm.create_model(architecture, num_classes=len(labels), **arguments)
    except Exception as error:
        raise LinnaeusError(
            f"timm cannot build {architecture} with {arguments}: {error}"
        ) from error
    try:
        model.load_state_dict(_timm_state(run, model, level))
    except RuntimeError as error:
        raise LinnaeusError(
            "--format timm: with a classifier of its own, timm's model has other layers before it than "
            f"the run's ({first_detail(error)}); use another --format"
        ) from error
    preprocessing = spec.preprocessing
    kept = ("fixed_input_size", "first_conv", "classifier")
    pretrained_cfg = {
        **{name: model.pretrained_cfg.get(name) for name in kept},
        "input_size": [spec.in_chans, *(spec.img_size or ())],
        "interpolation": preprocessing and preprocessing.interpolation,
        "crop_mode": preprocessing and CROP_MODES.get(preprocessing.resize, "center"),
        "mean": preprocessing and list(preprocessing.mean),
        "std": preprocessing and list(preprocessing.std),
        "crop_pct": preprocessing and preprocessing.crop_fraction,
    }
    about = {
        "num_classes": len(labels),
        "label_names": labels,
        "pretrained_cfg": {key: value for key, value in pretrained_cfg.items() if value},
        KEY: description | {"level": level},
    }
    save_for_hf(model, str(folder), about, arguments, safe_serialization=True)
    with preserved_generators():
        again: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    again.eval()
    return lambda inputs: {level: again(inputs)}


def _timm_state(run: TrainedRun, model: Any, level: str) -> dict[str, Tensor]:
    """The tensors of timm's model: its own from the backbone, and the level's head as the classifier."""
    trained: Any = run.model
    tensors: dict[str, Tensor] = trained.backbone.state_dict()
    classifier = model.get_classifier()
    prefix = next(
        (f"{name}." for name, module in model.named_modules() if module is classifier), None
    )
    if not isinstance(classifier, nn.Linear) or prefix is None or classifier.bias is None:
        raise LinnaeusError(
            f"--format timm: timm's classifier of this model is a {type(classifier).__name__}, which cannot "
            "hold the run's linear head; use another --format"
        )
    head = trained.heads[list(run.classes).index(level)].state_dict()
    tensors |= {prefix + name: tensor for name, tensor in head.items()}
    return tensors
