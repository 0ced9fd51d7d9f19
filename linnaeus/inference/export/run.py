"""Exports a run, reads the result back and compares its outputs with the run's, before it appears."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from linnaeus.config.instantiate import is_target
from linnaeus.config.schema import LoraConfig
from linnaeus.data.taxonomy import UNKNOWN
from linnaeus.inference.export import FORMATS, OUTPUTS, formats
from linnaeus.inference.export.check import Model, largest_difference, random_inputs
from linnaeus.inference.trained import TrainedRun, load_run
from linnaeus.models.lora import merged_weights
from linnaeus.runtime.errors import ConfigError, DataError, LinnaeusError, first_line
from linnaeus.runtime.files import not_written
from linnaeus.training.losses import gives_log_probabilities, log_probabilities, logits_per_level
from linnaeus.version import __version__

NAMES = {
    "safetensors": "model.safetensors",
    "onnx": "model.onnx",
    "torch-export": "model.pt2",
}
"""Name of the file in a run's folder `export`, by format."""


@dataclass(frozen=True)
class Exported:
    """A file that has been written.

    Attributes:
        path: the file.
        num_bytes: size of all that was written.
        difference: the largest difference between its outputs and the run's; None where only the weights
            could be compared, which are equal then.
        kind: of the outputs, `probabilities` or `logits`.
    """

    path: Path
    num_bytes: int
    difference: float | None
    kind: str


def export_run(
    run: TrainedRun,
    format: str,
    output: str | Path | None = None,
    *,
    outputs: str = "probabilities",
    opset: int | None = None,
    half: bool = False,
    preprocessing: bool = False,
) -> Exported:
    """Write a run's model for other programs.

    Args:
        run: the run; a torch.export file is made for its device.
        format: `safetensors`, `onnx` or `torch-export`.
        output: the file; one that is there is replaced. None is `export/model.<ending>` in the run's
            folder, or beside a checkpoint without one.
        outputs: `probabilities` or `logits`, for ONNX and torch.export; in place of logits, a marginal head
            gives log-probabilities.
        opset: version of ONNX's operators; None is the exporter's own.
        half: weights and arithmetic in float16, for ONNX and torch.export; inputs and outputs stay as they
            are.
        preprocessing: take uint8 pixels, and normalize them in the graph, for ONNX and torch.export.

    Raises:
        ConfigError: an argument that cannot be used, or a package that is missing.
        LinnaeusError: the model cannot be exported so, or the result does not give the run's outputs.
            Nothing is written then.
    """
    for name, value, choices in (("format", format, FORMATS), ("outputs", outputs, OUTPUTS)):
        if value not in choices:
            raise ConfigError(f"{name}={value}: is not one of {', '.join(choices)}")
    programs = ("onnx", "torch-export")
    for name, is_given, takes in (
        (f"opset={opset}", opset is not None, ("onnx",)),
        ("half=True", half, programs),
        ("preprocessing=True", preprocessing, programs),
    ):
        if is_given and format not in takes:
            raise ConfigError(f"{name}: is only for format={' or '.join(takes)}; leave it out")
    is_program = format in programs
    if preprocessing and (outputs == "logits" or not run.classes or run.spec.preprocessing is None):
        reason = "gives probabilities; leave out outputs=logits"
        if outputs != "logits":
            reason = "needs a run on images with classes; leave it out"
        raise ConfigError(f"preprocessing=True: {reason}")
    if output is None:
        output = (run.folder or run.checkpoint.parent) / "export" / NAMES[format]
    path = Path(output)
    ending = Path(NAMES[format]).suffix
    if path.suffix != ending:
        raise ConfigError(f"output={path}: the name of such a file ends in {ending}")
    if format == "onnx":
        formats.check_onnx_is_there()
    if format == "safetensors" and run.spec.nested_targets():
        raise LinnaeusError(
            "format=safetensors: arguments of the model have a `_target_`, which no safetensors file may "
            f"have: {', '.join(run.spec.nested_targets())}; use format=onnx or torch-export"
        )
    kind = outputs if is_program and run.classes else "logits"
    try:
        inputs = random_inputs(run)
    except DataError:
        if format != "safetensors":
            raise
        inputs = None
    reference = _reference(run, kind)
    run = _merged(run)
    with _appearing(path) as temporary:
        if is_program:
            assert inputs is not None
            model = _write_program(run, format, temporary, inputs, kind, opset, half, preprocessing)
        else:
            model = _write(run, temporary, kind)
        difference = None
        if inputs is not None:
            difference = largest_difference(
                model,
                reference,
                inputs,
                probabilities=kind == "probabilities",
                half=half,
            )
        num_bytes = sum(file.stat().st_size for file in temporary.parent.iterdir())
    return Exported(path, num_bytes, difference, kind)


def _write(run: TrainedRun, path: Path, kind: str) -> Model:
    """Write the weights to a temporary file, and read them back as a model."""
    formats.write_safetensors(run.model.state_dict(), describe(run, None), path)
    again = load_run(path, device="cpu", trust_code=run.trust_code)
    others = again.model.state_dict()
    for name, tensor in run.model.state_dict().items():
        if not torch.equal(tensor.cpu(), others[name]):
            raise LinnaeusError(
                f"the exported file does not hold the run's weights: {name!r} differs"
            )
    return _reference(again, kind)


def _write_program(
    run: TrainedRun,
    format: str,
    path: Path,
    inputs: Tensor,
    kind: str,
    opset: int | None,
    half: bool,
    preprocessing: bool,
) -> Model:
    """Write the computation to a temporary file, and read it back as a model of normalized inputs."""
    look = run.spec.preprocessing if preprocessing else None
    prepare: Callable[[Tensor], Tensor] = look.pixels if look is not None else lambda images: images
    module = ExportModule(
        run, kind, half=half, normalise=None if look is None else look.normalise()
    )
    try:
        with torch.no_grad():
            program = torch.export.export(
                module.eval(),
                (prepare(inputs[:2]).to(run.device),),
                dynamic_shapes={"images": {0: Dim("batch")}},
            )
    except Exception as error:  # a user's model may raise anything
        raise LinnaeusError(
            f"the model cannot be traced by torch.export ({type(error).__name__}: {first_line(error)}); "
            "format=safetensors exports its weights"
        ) from error
    is_log = kind == "logits" and gives_log_probabilities(run.model)
    description = describe(run, "log-probabilities" if is_log else kind, normalises=preprocessing)
    if format == "onnx":
        written = formats.write_onnx(program, description, path, opset)
        return lambda inputs: written(prepare(inputs))
    on_device = formats.write_program(program, description, path)
    return lambda inputs: on_device(prepare(inputs).to(run.device))


class ExportModule(nn.Module):
    """A run's model whose outputs have names.

    Args:
        run: without classes, its outputs are the model's own.
        kind: `probabilities`, or `logits` for the model's own logits or log-probabilities.
        half: compute in float16; outputs are float32.
        normalise: of pixels, which the module then takes.
    """

    def __init__(
        self,
        run: TrainedRun,
        kind: str,
        *,
        half: bool = False,
        normalise: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.model = copy.deepcopy(run.model).half() if half else run.model
        self._half, self._normalise = half, normalise
        self._names = tuple(run.classes)
        self._kind = kind
        self._are_logs = gives_log_probabilities(run.model)
        self._is_multilabel = run.taxonomy is not None and run.taxonomy.is_multilabel

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """{name of the level: [B, classes]} of images [B, C, H, W]."""
        if self._normalise is not None:
            images = self._normalise(images)
        outputs = self.model(images.half() if self._half else images)
        named: Iterable[tuple[Any, Tensor]]
        if self._names:
            named = zip(self._names, logits_per_level(outputs, self._names), strict=True)
        elif isinstance(outputs, Tensor):
            named = [("output", outputs)]
        else:
            pairs = outputs.items() if isinstance(outputs, Mapping) else enumerate(outputs)
            named = ((f"output_{name}", output) for name, output in pairs)
        found = {name: output.float() if self._half else output for name, output in named}
        if self._kind == "logits":
            return found
        kind = {"are_logs": self._are_logs, "is_multilabel": self._is_multilabel}
        return {name: log_probabilities(each, **kind).exp() for name, each in found.items()}


def _merged(run: TrainedRun) -> TrainedRun:
    """Return the run with the adapters of MODEL.LORA in the weights that they adapt."""
    node = run.spec.node
    lora = LoraConfig() if is_target(node) else LoraConfig(**node.get("LORA", {}))
    if lora.RANK is None:
        return run
    spec = replace(run.spec, node={**node, "LORA": asdict(LoraConfig())})
    model = spec.build(trust_code=run.trust_code)
    model.load_state_dict(merged_weights(run.model.state_dict(), lora))
    return replace(run, spec=spec, model=model.to(run.device).eval())


def _reference(run: TrainedRun, kind: str) -> Model:
    """Return the run's own outputs in full float32, on its device."""
    module = ExportModule(run, kind).eval()

    @torch.no_grad()
    def outputs(inputs: Tensor) -> dict[str, Tensor]:
        with torch.backends.cudnn.flags(allow_tf32=False):
            found: dict[str, Tensor] = module(inputs.to(run.device))
        return found

    return outputs


def describe(run: TrainedRun, outputs: str | None, *, normalises: bool = False) -> dict[str, Any]:
    """Return classes, taxonomy, input and architecture as plain values; for weights also the precision.

    Unknown parents are None in `levels`, which is for other programs. They are -1 in `spec`, which Linnaeus
    reads, as in a checkpoint.

    Args:
        run: the run.
        outputs: `probabilities`, `logits` or `log-probabilities`; None where the file holds weights alone.
        normalises: whether the file takes pixels, and normalizes them.
    """
    spec, preprocessing, taxonomy = run.spec, run.spec.preprocessing, run.taxonomy
    height, width = spec.img_size or (None, None)
    rows: list[Any] = [None, *(taxonomy.parents if taxonomy else ())]
    return {
        "version": __version__,
        "input": {
            "name": "images",
            "channels": spec.in_chans,
            "height": height,
            "width": width,
            "dtype": "uint8" if normalises else "float32",
            "mean": None if normalises else preprocessing and list(preprocessing.mean),
            "std": None if normalises else preprocessing and list(preprocessing.std),
            "crop_fraction": preprocessing and preprocessing.crop_fraction,
            "interpolation": preprocessing and preprocessing.interpolation,
            "resize": preprocessing and preprocessing.resize,
        },
        "outputs": outputs,
        "multilabel": taxonomy is not None and taxonomy.is_multilabel,
        **({"precision": run.precision_settings} if outputs is None else {}),
        "levels": [
            {
                "name": level.name,
                "classes": list(level.classes),
                "parents": row and [None if label == UNKNOWN else label for label in row],
            }
            for level, row in zip(taxonomy.levels if taxonomy else (), rows, strict=False)
        ],
        "spec": spec.as_dict(),
    }


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """A temporary file of the same name. It and its side files move to `path` after success.

    Raises:
        ConfigError: `path` is a folder.
        LinnaeusError: it cannot be written.
    """
    if path.is_dir():
        raise ConfigError(f"output={path}: is a folder; choose another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            yield Path(folder) / path.name
            # safetensors writes for the owner alone: files take the mode of any new file.
            new = Path(folder) / ".new"
            new.touch()
            mode = new.stat().st_mode
            new.unlink()
            for file in Path(folder).iterdir():
                file.chmod(mode)
                file.replace(path.parent / file.name)
    except OSError as error:
        raise not_written(path, error) from error
