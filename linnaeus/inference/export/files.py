"""Single files: safetensors, ONNX and torch.export; each is written and read back here."""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.export import ExportedProgram

from linnaeus.errors import ConfigError, LinnaeusError, first_line
from linnaeus.inference.export.check import Model
from linnaeus.inference.export.description import KEY

EXTRA_FILE = "linnaeus.json"
"""The file with the description inside a torch.export archive."""
_NEEDED = ("onnx", "onnxscript", "onnxruntime")


def check_onnx_is_there() -> None:
    """Make sure that ONNX files can be written and checked.

    Raises:
        ConfigError: a package is missing; the message says how it is installed.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"--format onnx: {', '.join(missing)} missing: pip install 'linnaeus[export]'")


def write_safetensors(state: dict[str, Tensor], description: dict[str, Any], file: Path) -> None:
    """Write the model's tensors; the description is in the header."""
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}
    save_file(tensors, file, metadata={"format": "pt", KEY: json.dumps(description, ensure_ascii=False)})


def write_program(program: ExportedProgram, description: dict[str, Any], file: Path) -> None:
    """Write a torch.export archive."""
    torch.export.save(program, file, extra_files={EXTRA_FILE: json.dumps(description, ensure_ascii=False)})


def read_program(file: Path) -> Model:
    """The model of a torch.export archive."""
    module = torch.export.load(file).module()
    model: Model = module
    return model


def write_onnx(program: ExportedProgram, description: dict[str, Any], file: Path) -> None:
    """Write an ONNX file; weights above 2 GB go to a second file beside it.

    Raises:
        LinnaeusError: the model has an operation that ONNX does not have.
    """
    names = [level["name"] for level in description["levels"]]
    unusual = [f"linnaeus_output_{position}" for position in range(len(names))]
    try:
        with _quiet():
            exported = torch.onnx.export(
                program, dynamo=True, input_names=[description["input"]["name"]], verbose=False,
                output_names=unusual or None,
            )  # fmt: skip
    except Exception as error:  # whatever the exporter meets
        raise LinnaeusError(
            f"the model cannot be exported to ONNX ({type(error).__name__}: {first_line(error)}); "
            "--format torch-export or safetensors may do"
        ) from error
    assert exported is not None
    _name_outputs(exported.model.graph, names)
    exported.model.metadata_props[KEY] = json.dumps(description, ensure_ascii=False)
    exported.save(file)


def _name_outputs(graph: Any, names: list[str]) -> None:
    """Give the outputs of an ONNX graph their names, and values inside it that have one of them another."""
    values = [value for node in graph for value in node.outputs]
    taken = {value.name for value in values} | {*names}
    for value in values:
        if value.name in names:
            new = next(f"{value.name}_{n}" for n in count(1) if f"{value.name}_{n}" not in taken)
            taken.add(new)
            value.name = new
    for value, name in zip(graph.outputs, names or [value.name for value in graph.outputs], strict=True):
        value.name = name


def read_onnx(file: Path) -> Model:
    """The model of an ONNX file, run by onnxruntime on the CPU.

    Raises:
        LinnaeusError: onnxruntime cannot load it.
    """
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no base class of their own
        raise LinnaeusError(f"onnxruntime cannot load the exported file: {error}") from error
    (name,) = [entry.name for entry in session.get_inputs()]
    outputs = [entry.name for entry in session.get_outputs()]

    def run(inputs: Tensor) -> dict[str, Tensor]:
        values = session.run(None, {name: inputs.cpu().numpy()})
        return {output: torch.from_numpy(value) for output, value in zip(outputs, values, strict=True)}

    return run


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of its own parts, and prints progress through several loggers."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
