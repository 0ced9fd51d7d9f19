"""A model as a run has saved it: in its folder, one of its checkpoints, or a file of `linnaeus export`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from linnaeus.models.model_spec import ModelSpec
from linnaeus.models.weights import read_export, saved_weights
from linnaeus.runtime.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    first_detail,
    first_line,
)
from linnaeus.runtime.files import CHECKPOINTS, checkpoint_file, suggest_run
from linnaeus.runtime.words import several
from linnaeus.training.checkpoint import load_checkpoint
from linnaeus.training.precision import AUTOCAST_DTYPES


@dataclass(frozen=True)
class SavedRun:
    """A saved model.

    Attributes:
        file: the checkpoint or export.
        spec: classes, preprocessing and architecture.
        model: with its weights, the average where the run kept one, on the CPU.
        content: the entries of the checkpoint but `state`.
        criterion_state: state of the run's loss.
    """

    file: Path
    spec: ModelSpec
    model: nn.Module
    content: dict[str, Any]
    criterion_state: dict[str, Any]


def read_run(path: Path, checkpoint: str | Path = "best", *, trust_code: bool = False) -> SavedRun:
    """Read a saved model; arguments and errors as for `linnaeus.inference.trained.load_run`."""
    if path.suffix == ".safetensors":
        file, content = path, _read_export(path)
    else:
        file = find_checkpoint_file(path, checkpoint)
        try:
            content = load_checkpoint(file)
        except CheckpointError as error:
            hint = (
                "give a run directory, one of its checkpoints, or a file of `linnaeus "
                "export --format safetensors`"
            )
            others = [] if file == path else _other_checkpoints(file)
            if others:
                hint = f"the run also has {several(others)}, such as with checkpoint={others[0]}"
            if file == path or others:
                raise CheckpointError(f"{error}; {hint}") from error
            raise
    state = content.pop("state", {})
    try:
        spec = ModelSpec.from_dict(content["model_spec"], file)
        model = spec.build(trust_code=trust_code)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
        DataError,
    ) as error:  # it may hold anything
        raise CheckpointError(f"{file}: its model_spec cannot be used ({error})") from error
    weights = saved_weights(state)
    if not weights:
        raise CheckpointError(f"{file} holds no weights")
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"{file}: its weights do not fit its model: {first_detail(error)}"
        ) from error
    return SavedRun(file, spec, model, content, state.get("criterion", {}))


def _other_checkpoints(damaged: Path) -> list[str]:
    """Return the names of the checkpoints beside a damaged one that are intact."""
    found = []
    for file in sorted(damaged.parent.glob("*.pt")):
        with suppress(CheckpointError):
            load_checkpoint(file, mmap=True, check=True)
            found.append(file.name)
    return found


def _read_export(file: Path) -> dict[str, Any]:
    """Return the entries of a safetensors file that `export` has written."""
    try:
        content = read_export(file)
        if content is not None:
            AUTOCAST_DTYPES[content["config"]["TRAIN"]["AMP"]]  # an unknown one is a KeyError
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: its entry `linnaeus` was not written by `linnaeus export --format safetensors` "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error
    if content is None:
        raise CheckpointError(
            f"{file} has no description of its model, so it was not written by `linnaeus export --format "
            "safetensors`"
        )
    return content


def find_checkpoint_file(path: Path, checkpoint: str | Path = "best") -> Path:
    """Return the file of a run's checkpoint; arguments as for `load_run`.

    Raises:
        CheckpointError: there is none; the message lists the existing ones.
    """
    if path.is_file():
        if str(checkpoint) not in ("best", str(path)):
            raise CheckpointError(
                f"{path} is already a checkpoint; leave out the checkpoint {checkpoint}"
            )
        return path
    if not path.is_dir():
        raise CheckpointError(f"there is no run {path}{suggest_run(path)}")
    if str(checkpoint) in ("best", "last"):
        named = [checkpoint_file(path, str(checkpoint))]
    else:
        named = [path / CHECKPOINTS / checkpoint, path / checkpoint, Path(checkpoint).expanduser()]
    for file in named:
        if file is not None and file.is_file():
            return file
    found = sorted(file.name for file in (path / CHECKPOINTS).glob("*.pt"))
    if not found:
        raise CheckpointError(f"{path} has no checkpoints{suggest_run(path)}")
    raise ConfigError(f"{path} has no checkpoint {str(checkpoint)!r}; it has {', '.join(found)}")
