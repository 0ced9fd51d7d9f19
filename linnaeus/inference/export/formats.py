"""The four formats: safetensors, torch.export, ONNX and timm; each is written and read back here."""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.export import ExportedProgram

from linnaeus.inference.export.check import Model
from linnaeus.runtime.errors import ConfigError, LinnaeusError, first_line

KEY = "linnaeus"
"""The entry of the description in the metadata of safetensors and ONNX files."""
EXTRA_FILE = "linnaeus.json"
"""The file with the description inside a torch.export archive."""
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
            f"format=onnx: {', '.join(missing)} missing: pip install 'linnaeus[export]'"
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
    except Exception as error:  # the exporter may raise anything
        raise LinnaeusError(
            f"the model cannot be exported to ONNX ({type(error).__name__}: {first_line(error)}); "
            "format=torch-export or safetensors may do"
        ) from error
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
    assert exported is not None
    written = exported.model.opset_imports[""]
    if opset not in (None, written):
        raise LinnaeusError(
            f"opset={opset}: the exporter cannot write it for this model, but {written}; leave it out"
        )
    exported.model.metadata_props[KEY] = json.dumps(description, ensure_ascii=False)
    exported.save(file)
    try:
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no base class of their own
        raise LinnaeusError(
            f"onnxruntime cannot load the exported file: {first_line(error)}; format=torch-export or "
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
