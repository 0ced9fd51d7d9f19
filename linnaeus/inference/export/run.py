"""Exports a run, reads the result back and compares its outputs with the run's, before it appears."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from linnaeus.errors import ConfigError, DataError, LinnaeusError
from linnaeus.files import not_written
from linnaeus.inference.export import FORMATS, OUTPUTS, files, timm_folder
from linnaeus.inference.export.check import Model, Samples, largest_difference, samples_of
from linnaeus.inference.export.description import describe
from linnaeus.inference.export.module import ExportModule, traced
from linnaeus.inference.trained import TrainedRun, load_run
from linnaeus.training.losses import gives_log_probabilities

ENDINGS = {"safetensors": ".safetensors", "onnx": ".onnx", "torch-export": ".pt2", "timm": ""}


@dataclass(frozen=True)
class Exported:
    """A file or folder that has been written.

    Attributes:
        path: the file, or timm's folder.
        num_bytes: size of all that was written.
        origin: which images it was checked on, in words.
        difference: the largest difference between its outputs and the run's; None where only the weights
            could be compared, which are equal then.
        kind: what the outputs are: `probabilities` or `logits`.
    """

    path: Path
    num_bytes: int
    origin: str
    difference: float | None
    kind: str


def export_run(
    run: TrainedRun,
    format: str,
    output: str | Path | None = None,
    *,
    outputs: str = "probabilities",
    level: str | None = None,
    images: Iterable[str] = (),
) -> Exported:
    """Write a run's model for other programs.

    Args:
        run: the run; a torch.export file is made for its device.
        format: `safetensors`, `onnx`, `torch-export` or `timm`.
        output: the file, or the folder for timm; None is `default_output`. One that is there is replaced.
        outputs: `probabilities` or `logits`, for ONNX and torch.export; in place of logits, a marginal head
            gives log-probabilities.
        level: whose head becomes timm's classifier; None is the finest.
        images: files, folders and patterns to check the result on; none takes some of the run's dataset.

    Raises:
        ConfigError: an argument that cannot be used, or a package that is missing.
        LinnaeusError: the model cannot be exported so, or the result does not give the run's outputs.
            Nothing is written then.
    """
    for name, value, choices in (("--format", format, FORMATS), ("--outputs", outputs, OUTPUTS)):
        if value not in choices:
            raise ConfigError(f"{name}: {value!r} is none of {', '.join(choices)}")
    if level is not None and format != "timm":
        raise ConfigError("--level: only timm takes a single rank; other formats hold all of them")
    path = default_output(run, format) if output is None else Path(output)
    if ENDINGS[format] and path.suffix != ENDINGS[format]:
        raise ConfigError(f"--output: {path}: the name of such a file ends in {ENDINGS[format]}")
    if format == "onnx":
        files.check_onnx_is_there()
    chosen = timm_folder.check_level(run, level) if format == "timm" else ""
    kind = outputs if format in ("onnx", "torch-export") and run.classes else "logits"
    samples = _samples(run, format, images)
    reference = _reference(run, kind)
    with _appearing(path, is_folder=format == "timm") as temporary:
        model = _write(run, format, temporary, samples, kind, chosen)
        expected: Model = reference
        if chosen:
            expected = lambda inputs: {chosen: reference(inputs)[chosen]}  # noqa: E731
        difference = None
        if samples is not None:
            difference = largest_difference(
                model, expected, samples.inputs, probabilities=kind == "probabilities"
            )
        num_bytes = sum(file.stat().st_size for file in temporary.parent.rglob("*") if file.is_file())
    origin = "the weights alone" if samples is None else samples.origin
    return Exported(path, num_bytes, origin, difference, kind)


def default_output(run: TrainedRun, format: str) -> Path:
    """`export/model.<ending>` or `export/timm` in the run's folder, or beside a checkpoint without one."""
    folder = (run.folder or run.checkpoint.parent) / "export"
    return folder / ("timm" if format == "timm" else f"model{ENDINGS[format]}")


def _samples(run: TrainedRun, format: str, images: Iterable[str]) -> Samples | None:
    try:
        return samples_of(run, images)
    except DataError:
        if format == "safetensors" and not images:
            return None
        raise


def _reference(run: TrainedRun, kind: str) -> Model:
    """The run's own outputs in full float32, on its device."""
    module = ExportModule(run.model, run.taxonomy, probabilities=kind == "probabilities").eval()

    @torch.no_grad()
    def outputs(inputs: Tensor) -> dict[str, Tensor]:
        with torch.backends.cudnn.flags(allow_tf32=False):
            found: dict[str, Tensor] = module(inputs.to(run.device))
        return found

    return outputs


def _write(run: TrainedRun, format: str, path: Path, samples: Samples | None, kind: str, level: str) -> Model:
    """Write the temporary file or folder, and read it back as a model."""
    if format == "timm":
        timm_folder.write(run, path, level)
        model: Model = timm_folder.as_outputs(timm_folder.read(path), level)
        return model
    if format == "safetensors":
        files.write_safetensors(run.model.state_dict(), describe(run, None), path)
        again = load_run(path, device="cpu")
        _check_equal(run, again)
        return _reference(again, kind)
    assert samples is not None
    module = ExportModule(run.model, run.taxonomy, probabilities=kind == "probabilities").eval()
    program = traced(module, samples.inputs[:2].to(run.device))
    is_log = kind == "logits" and gives_log_probabilities(run.model)
    description = describe(run, "log-probabilities" if is_log else kind)
    if format == "onnx":
        files.write_onnx(program, description, path)
        return files.read_onnx(path)
    files.write_program(program, description, path)
    on_device = files.read_program(path)
    return lambda inputs: on_device(inputs.to(run.device))


def _check_equal(run: TrainedRun, again: TrainedRun) -> None:
    others = again.model.state_dict()
    for name, tensor in run.model.state_dict().items():
        if not torch.equal(tensor.cpu(), others[name]):
            raise LinnaeusError(f"the exported file does not hold the run's weights: {name!r} differs")


@contextmanager
def _appearing(path: Path, *, is_folder: bool) -> Iterator[Path]:
    """A temporary file or folder of the same name; what lies beside it goes to `path` when the context ends
    well.

    Raises:
        ConfigError: `path` is a folder that holds something else.
        LinnaeusError: it cannot be written.
    """
    if path.is_dir() and (not is_folder or {entry.name for entry in path.iterdir()} - {*timm_folder.FILES}):
        what = "holds other files" if is_folder else "is a folder"
        raise ConfigError(f"--output: {path} {what}; choose another name")
    if is_folder and path.exists() and not path.is_dir():
        raise ConfigError(f"--output: {path} is a file; timm needs a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            temporary = Path(folder) / path.name
            if is_folder:
                temporary.mkdir()
            yield temporary
            _let_others_read(Path(folder))
            if is_folder and path.is_dir():
                shutil.rmtree(path)
            for entry in Path(folder).iterdir():
                entry.replace(path.parent / entry.name)
    except OSError as error:
        raise not_written(path, error) from error


def _let_others_read(folder: Path) -> None:
    """Give files the mode of any new file; those of safetensors are for their owner alone."""
    new = folder / ".new"
    new.touch()
    for file in folder.rglob("*"):
        if file.is_file():
            shutil.copymode(new, file)
    new.unlink()
