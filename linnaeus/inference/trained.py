"""A trained run read back from its folder or from one of its checkpoints: model, classes, preprocessing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from torch import nn

from linnaeus.data.taxonomy import Taxonomy
from linnaeus.dist import resolve_device
from linnaeus.errors import CheckpointError, ConfigError, DataError, first_detail, first_line
from linnaeus.files import CHECKPOINTS, checkpoint_file, suggest_path
from linnaeus.inference.images import ImageLike, Reader, as_iterable
from linnaeus.inference.paths import Unreadable
from linnaeus.inference.prediction import Prediction
from linnaeus.inference.predictor import Predictor
from linnaeus.inference.read_ahead import default_workers
from linnaeus.models.spec import ModelSpec
from linnaeus.models.weights import saved_weights
from linnaeus.training.checkpoint import load_checkpoint
from linnaeus.training.precision import AUTOCAST_DTYPES, Precision
from linnaeus.words import counted

if TYPE_CHECKING:
    from linnaeus.inference.export.run import Exported


@dataclass(frozen=True, repr=False)
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
    _batch_size_found: int | None = field(default=None, init=False, compare=False)

    def __repr__(self) -> str:
        classes = ", ".join(f"{level} ({len(names)} classes)" for level, names in self.classes.items())
        size = (
            ""
            if self.spec.img_size is None
            else f", {self.spec.in_chans}×{'×'.join(map(str, self.spec.img_size))}"
        )
        name = self.spec.node.get("NAME") or self.spec.node.get("_target_")
        return f"TrainedRun({str(self.checkpoint)!r}, {name}{size}, {classes or 'no classes'}, {self.device})"

    @property
    def description(self) -> str:
        """Checkpoint, model, input, classes and device, in one sentence."""
        spec = self.spec
        name = spec.node.get("NAME") or spec.node.get("_target_")
        size = ""
        if spec.img_size is not None:
            size = f" on {spec.in_chans} x {' x '.join(map(str, spec.img_size))} inputs"
        ranks = [f"{counted(len(names), 'class')} of {level}" for level, names in self.classes.items()]
        classes = ", ".join(ranks) or "no classes"
        return f"{self.checkpoint}: {name}{size}, {classes}, on {self.device}"

    @property
    def taxonomy(self) -> Taxonomy | None:
        """Levels, classes and parents; None where the dataset declared no classes."""
        return self.spec.taxonomy

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """The names of the classes of each level, coarse to fine; a class's position is its label."""
        return {} if self.taxonomy is None else {level.name: level.classes for level in self.taxonomy.levels}

    @property
    def transform(self) -> Reader:
        """Makes an input [C, H, W] of the model from an image, as validation does; see `Reader`."""
        return Reader(self.spec)

    @property
    def precision(self) -> Precision:
        """Number format and memory format of the forward pass, those of the run's validation."""
        return Precision(self.device, AUTOCAST_DTYPES[self.amp], self.is_channels_last)

    @property
    def amp(self) -> str:
        """The value of TRAIN.AMP."""
        own: str = self.content.get("config", {}).get("TRAIN", {}).get("AMP", "off")
        return own

    @property
    def is_channels_last(self) -> bool:
        """The value of TRAIN.CHANNELS_LAST, as far as it is known."""
        if self.folder is not None:
            return _is_channels_last(self.folder / "config.yaml")
        own: bool = self.content.get("config", {}).get("TRAIN", {}).get("CHANNELS_LAST", False)
        return own

    def predict(
        self,
        images: ImageLike | Iterable[ImageLike],
        *,
        top: int = 5,
        path: bool = False,
        batch_size: int | None = None,
    ) -> list[Prediction]:
        """The most probable classes of each image.

        Args:
            images: one image, or several: paths, Pillow images, arrays [H, W] or [H, W, C] of uint8, tensors
                [C, H, W] of uint8 or of fractions in [0, 1].
            top: number of classes of each level; a level with fewer gives all.
            path: also look for the most probable path through the taxonomy.
            batch_size: images in a batch; None finds the largest that fits, where there are many images.

        Raises:
            DataError: an image cannot be read, or the run has no classes.
            TypeError, ValueError: an argument that cannot be used.
            AutoBatchError, OutOfMemoryError: not even one image fits.
        """
        return list(self.stream(images, top=top, path=path, batch_size=batch_size))

    def stream(
        self,
        images: ImageLike | Iterable[ImageLike],
        *,
        top: int = 5,
        path: bool = False,
        batch_size: int | None = None,
    ) -> Iterator[Prediction]:
        """What `predict` returns, one by one; of the images about two batches are held at a time."""
        size = self._batch_size_found if batch_size is None else batch_size
        predictor = self.predictor(top=top, path=path, batch_size=size)
        for found in predictor.run(as_iterable(images)):
            if isinstance(found, Unreadable):
                raise DataError(f"{found.source} cannot be predicted: {found.reason}")
            yield found
        if predictor.is_largest and predictor.batch_size is not None:
            # Only remembered, so that the class stays frozen for others.
            object.__setattr__(self, "_batch_size_found", predictor.batch_size)

    def export(
        self,
        format: str,
        output: str | Path | None = None,
        *,
        outputs: str = "probabilities",
        level: str | None = None,
        images: Iterable[str] = (),
    ) -> Exported:
        """Write the model for other programs; see `linnaeus.inference.export.run.export_run`."""
        from linnaeus.inference.export.run import export_run  # which imports this module

        return export_run(self, format, output, outputs=outputs, level=level, images=images)

    def predictor(
        self,
        *,
        top: int = 5,
        path: bool = False,
        batch_size: int | None = None,
        num_workers: int | None = None,
    ) -> Predictor:
        """What predicts images with this model; for the arguments see `Predictor` and `predict`.

        Args:
            num_workers: threads that load images; None is one for each CPU core, at most 8.

        Raises:
            DataError: the run has no classes.
            TypeError, ValueError: `top` or `batch_size` is no whole number of at least 1.
        """
        for name, value in (("top", top), ("batch_size", batch_size)):
            if value is None and name == "batch_size":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be a whole number, not {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.taxonomy is None:
            raise DataError(
                f"{self.checkpoint}: the run's dataset declared no classes, so there is no class to predict; "
                "run.model gives the model's outputs"
            )
        return Predictor(
            self.model, self.transform, self.taxonomy, self.precision, top=top, path=path,
            batch_size=batch_size, num_workers=default_workers() if num_workers is None else num_workers,
        )  # fmt: skip


def load_run(
    path: str | Path, *, checkpoint: str | Path = "best", device: str | torch.device = "auto"
) -> TrainedRun:
    """Read a trained run.

    Args:
        path: the run's folder, one of its checkpoints, or a safetensors file that `export` has written.
        checkpoint: `best`, `last`, or a file, which may be named by its name within `checkpoints/`.
        device: torch device that the model goes to; `auto` prefers an accelerator.

    Raises:
        CheckpointError: there is no such run or checkpoint, or it cannot be used.
        ConfigError: the model cannot be built, or there is no such device.
    """
    target = _device(str(device))
    if Path(path).suffix == ".safetensors":
        return _load_exported(Path(path).expanduser(), target)
    file = find_checkpoint_file(Path(path).expanduser(), checkpoint)
    try:
        content = load_checkpoint(file)
    except CheckpointError as error:
        if file != Path(path).expanduser():
            raise
        raise CheckpointError(
            f"{error}; what can be loaded is the folder of a run, one of its checkpoints, or a file of "
            "`linnaeus export --format safetensors`"
        ) from error
    state = content.pop("state", {})
    spec = _spec(content, file)
    model = spec.build()
    _load_weights(model, state, file)
    folder = file.parent.parent
    is_run = file.parent.name == CHECKPOINTS and (folder / "config.yaml").is_file()
    return TrainedRun(
        file, folder if is_run else None, spec, model.to(target).eval(), target, content,
        state.get("criterion", {}),
    )  # fmt: skip


def _load_exported(file: Path, device: torch.device) -> TrainedRun:
    """A run from the safetensors file that `export` has written."""
    try:
        with safe_open(file, "pt") as tensors:
            metadata = tensors.metadata() or {}
            weights = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if "linnaeus" not in metadata:
        raise CheckpointError(
            f"{file} does not say what its model takes: `linnaeus export --format safetensors` has not "
            "written it"
        )
    content = _exported_content(metadata["linnaeus"], file)
    spec = _spec(content, file)
    model = spec.build()
    _load_weights(model, {"model": weights}, file)
    return TrainedRun(file, None, spec, model.to(device).eval(), device, content, {})


def _exported_content(text: str, file: Path) -> dict[str, Any]:
    """The entries of a checkpoint that the description in a safetensors file holds."""
    try:
        description = json.loads(text)
        precision = {"AMP": "off", "CHANNELS_LAST": False} | description.get("precision", {})
        content = {"model_spec": description["spec"], "config": {"TRAIN": precision}}
        if precision["AMP"] not in AUTOCAST_DTYPES or not isinstance(precision["CHANNELS_LAST"], bool):
            raise ValueError(f"precision {precision}")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file}: its entry `linnaeus` is not what `linnaeus export --format safetensors` writes "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error
    return content


def _device(name: str) -> torch.device:
    try:
        return resolve_device(name)
    except ConfigError as error:
        problems = [problem.replace("EXPERIMENT.DEVICE", "device") for problem in error.problems]
        raise ConfigError(problems) from None


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
        raise CheckpointError(f"there is no run {path}{suggest_path(path)}")
    if str(checkpoint) in ("best", "last"):
        named = [checkpoint_file(path, str(checkpoint))]
    else:
        named = [path / CHECKPOINTS / checkpoint, path / checkpoint, Path(checkpoint).expanduser()]
    for file in named:
        if file is not None and file.is_file():
            return file
    found = sorted(file.name for file in (path / CHECKPOINTS).glob("*.pt"))
    if not found:
        raise CheckpointError(f"{path} has no checkpoints; name the folder of a run (with `{CHECKPOINTS}/`)")
    raise ConfigError(f"{path} has no checkpoint {str(checkpoint)!r}; it has {', '.join(found)}")


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
    weights = saved_weights(state)
    if not weights:
        raise CheckpointError(f"{file} holds no weights")
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"{file}: its weights do not fit its model: {first_detail(error)}") from error


def _is_channels_last(config: Path) -> bool:
    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
        return bool(content["TRAIN"]["CHANNELS_LAST"])
    except (OSError, yaml.YAMLError, LookupError, TypeError):  # the format changes speed alone
        return False
