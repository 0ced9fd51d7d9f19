"""A trained run read back from its folder or from one of its checkpoints: model, classes, preprocessing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linnaeus.dist import resolve_device
from linnaeus.errors import CheckpointError, DataError
from linnaeus.models.spec import ModelSpec
from linnaeus.training.checkpoint import CheckpointFolder, load_checkpoint


@dataclass(frozen=True)
class TrainedRun:
    """A model as a run has left it, ready for inputs.

    Attributes:
        checkpoint: the file that the weights come from.
        folder: the run's folder; None where a checkpoint stands elsewhere.
        spec: classes, preprocessing and architecture.
        model: in eval mode, on `device`; the average of the weights where the run kept one (TRAIN.EMA).
        device: of the model.
        content: the small entries of the checkpoint, such as `progress` and `config`.
        criterion_state: state of the run's loss, such as class weights.
    """

    checkpoint: Path
    folder: Path | None
    spec: ModelSpec
    model: nn.Module
    device: torch.device
    content: Mapping[str, Any]
    criterion_state: Mapping[str, Any]


def load_run(
    path: str | Path, *, checkpoint: str | Path = "best", device: str | torch.device = "auto"
) -> TrainedRun:
    """Read a trained run.

    Args:
        path: the run's folder, or one of its checkpoints.
        checkpoint: `best`, `last`, or a file, which may be named by its name within `checkpoints/`.
        device: torch device that the model goes to; `auto` prefers an accelerator.

    Raises:
        CheckpointError: there is no such run or checkpoint, or it cannot be used.
        ConfigError: the model cannot be built, or there is no such device.
    """
    target = resolve_device(str(device))
    file = find_checkpoint_file(Path(path).expanduser(), checkpoint)
    content = load_checkpoint(file)
    state = content.pop("state", {})
    spec = _spec(content, file)
    model = spec.build()
    _load_weights(model, state, file)
    folder = file.parent.parent
    is_run = file.parent.name == "checkpoints" and (folder / "config.yaml").is_file()
    return TrainedRun(
        file, folder if is_run else None, spec, model.to(target).eval(), target, content,
        state.get("criterion", {}),
    )  # fmt: skip


def find_checkpoint_file(path: Path, checkpoint: str | Path = "best") -> Path:
    """The file of a run's checkpoint; arguments as for `load_run`.

    Without a `best.pt`, as after a run that was stopped before its first validation, `best` is an error.

    Raises:
        CheckpointError: there is none; the message says what there is.
    """
    if path.is_file():
        if str(checkpoint) not in ("best", str(path)):
            raise CheckpointError(f"{path} is a checkpoint itself; leave out the checkpoint {checkpoint}")
        return path
    if not path.is_dir():
        raise CheckpointError(f"there is no run {path}{_runs_like(path)}")
    folder = CheckpointFolder(path / "checkpoints")
    by_name = {"best": [folder.best], "last": [folder.pending, folder.last, folder.previous]}
    named = [path / "checkpoints" / checkpoint, path / checkpoint, Path(checkpoint).expanduser()]
    for file in by_name.get(str(checkpoint), named):
        if file.is_file():
            return file
    found = sorted(file.name for file in folder.folder.glob("*.pt"))
    if not found:
        raise CheckpointError(f"{path} has no checkpoints; name the folder of a run (with `checkpoints/`)")
    raise CheckpointError(f"{path} has no checkpoint {str(checkpoint)!r}; it has {', '.join(found)}")


def _runs_like(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if (entry / "checkpoints").is_dir()]
    except OSError:
        return ""
    close = get_close_matches(path.name, names, 1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _spec(content: Mapping[str, Any], file: Path) -> ModelSpec:
    if "model_spec" not in content:
        raise CheckpointError(
            f"{file} does not hold the model's classes and preprocessing: an older version of Linnaeus has "
            "written it. Resume the run with TRAIN.AUTO_RESUME True and one epoch more, which adds them"
        )
    try:
        return ModelSpec.from_dict(content["model_spec"])
    except (LookupError, TypeError, ValueError, AttributeError, DataError) as error:
        raise CheckpointError(f"{file}: its model_spec cannot be used ({error})") from error


def _load_weights(model: nn.Module, state: Mapping[str, Any], file: Path) -> None:
    average = state.get("ema")
    weights = average["module"] if average else state.get("model")
    if not weights:
        raise CheckpointError(f"{file} holds no weights")
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).partition("\n")[2].partition("\n")[0].strip()
        raise CheckpointError(f"{file}: its weights do not fit its model: {reason}") from error
