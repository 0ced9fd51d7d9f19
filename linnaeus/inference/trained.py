"""A trained run read back from its folder or from one of its checkpoints: model, classes, preprocessing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml
from PIL import Image
from torch import Tensor, nn

from linnaeus.data.taxonomy import Taxonomy
from linnaeus.inference.images import ImageLike, Reader
from linnaeus.inference.paths import Unreadable
from linnaeus.inference.prediction import Prediction
from linnaeus.inference.predictor import Predictor
from linnaeus.models.model_spec import ModelSpec
from linnaeus.runtime.distributed import resolve_device
from linnaeus.runtime.errors import ConfigError, DataError
from linnaeus.runtime.files import CHECKPOINTS, CONFIG
from linnaeus.runtime.words import counted
from linnaeus.training.precision import AUTOCAST_DTYPES, Precision
from linnaeus.training.saved_run import read_run

if TYPE_CHECKING:
    from linnaeus.inference.export.run import Exported


@dataclass(repr=False)
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
        trust_code: whether the user has consented to run code that the run's files name.
    """

    checkpoint: Path
    folder: Path | None
    spec: ModelSpec
    model: nn.Module
    device: torch.device
    content: Mapping[str, Any]
    criterion_state: Mapping[str, Any]
    trust_code: bool = False
    _batch_size_found: int | None = field(default=None, init=False, compare=False)

    def __repr__(self) -> str:
        return f"TrainedRun({self.description})"

    @property
    def description(self) -> str:
        """Checkpoint, model, input, classes and device, in one sentence."""
        spec = self.spec
        name = spec.node.get("NAME") or spec.node.get("_target_")
        shape = " x ".join(map(str, (spec.in_chans, *(spec.img_size or ()))))
        size = "" if spec.img_size is None else f" on {shape} inputs"
        levels = [
            f"{counted(len(names), 'class')} of {level}" for level, names in self.classes.items()
        ]
        return f"{self.checkpoint}: {name}{size}, {', '.join(levels) or 'no classes'}, on {self.device}"

    @property
    def taxonomy(self) -> Taxonomy | None:
        """Levels, classes and parents; None where the dataset declared no classes."""
        return self.spec.taxonomy

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """The names of the classes of each level, coarse to fine; a class's position is its label."""
        return (
            {}
            if self.taxonomy is None
            else {level.name: level.classes for level in self.taxonomy.levels}
        )

    @property
    def transform(self) -> Reader:
        """Makes an input [C, H, W] of the model from an image, as validation does; see `Reader`."""
        return Reader(self.spec)

    @property
    def precision(self) -> Precision:
        """Number format and memory format of the forward pass, as in the run's validation."""
        settings = self.precision_settings
        return Precision(self.device, AUTOCAST_DTYPES[settings["AMP"]], settings["CHANNELS_LAST"])

    @cached_property
    def precision_settings(self) -> dict[str, Any]:
        """AMP and CHANNELS_LAST of the run's TRAIN node; a checkpoint lacks the latter, which is speed."""
        known = {"CHANNELS_LAST": False} | self.content["config"]["TRAIN"]
        if self.folder is not None:
            with suppress(OSError, yaml.YAMLError, LookupError, TypeError):
                config = yaml.safe_load((self.folder / CONFIG).read_text(encoding="utf-8"))
                known["CHANNELS_LAST"] = bool(config["TRAIN"]["CHANNELS_LAST"])
        return {name: known[name] for name in ("AMP", "CHANNELS_LAST")}

    def predict(self, images: ImageLike | Iterable[ImageLike], **options: Any) -> list[Prediction]:
        """Return the most probable classes of each image.

        Args:
            images: one image, or several: paths, Pillow images, arrays or tensors of uint8 [H, W], [C, H, W]
                or [H, W, C]; or an array or tensor of several.
            options: `top`, `path`, `threshold`, `tta`, `features` and `batch_size` of `Predictor`.

        Raises:
            DataError: an image cannot be read, or the run has no classes.
            TypeError, ValueError: an argument that cannot be used.
            AutoBatchError, OutOfMemoryError: not even one image fits.
        """
        return list(self.stream(images, **options))

    def stream(
        self, images: ImageLike | Iterable[ImageLike], **options: Any
    ) -> Iterator[Prediction]:
        """Yield the predictions one by one, with about two batches of images in memory."""
        is_batch = isinstance(images, np.ndarray | Tensor) and images.ndim > 3
        if (
            isinstance(images, str | os.PathLike | Image.Image | np.ndarray | Tensor)
            and not is_batch
        ):
            images = [images]
        if not isinstance(images, Iterable):
            raise TypeError(
                f"images must be an image or an iterable of images, not {images!r:.100}"
            )
        known = Predictor.__match_args__[1:]  # without `runs`
        if unknown := [name for name in options if name not in known]:
            raise TypeError(
                f"{unknown[0]}: predict takes no such argument; it takes {', '.join(known)}, and "
                "load_run takes device"
            )
        if options.get("batch_size") is None:
            options["batch_size"] = self._batch_size_found
        predictor = Predictor([self], **options)
        for found in predictor.run(images):
            if isinstance(found, Unreadable):
                raise DataError(f"{found.source} cannot be predicted: {found.reason}")
            yield found
        if predictor.has_searched:
            self._batch_size_found = predictor.batch_size

    def export(self, format: str, output: str | Path | None = None, **options: Any) -> Exported:
        """Write the model for other programs; see `linnaeus.inference.export.run.export_run`."""
        from linnaeus.inference.export.run import export_run  # which imports this module

        return export_run(self, format, output, **options)


def load_run(
    path: str | Path,
    *,
    checkpoint: str | Path = "best",
    device: str | torch.device = "auto",
    trust_code: bool = False,
) -> TrainedRun:
    """Load a trained run, to predict and export with it.

    A run with a built-in model is data: no code of its files runs.

        run = load_run("runs/birds")
        for prediction in run.predict(["photos/0.jpg", "photos/1.jpg"], top=3):
            print(prediction.source, prediction.levels["species"][0])

    Args:
        path: the run's folder, one of its checkpoints, or a safetensors file that `export` has written.
        checkpoint: `best`, `last`, or a file, which may be named by its name within `checkpoints/`.
        device: torch device that the model goes to; `auto` prefers an accelerator.
        trust_code: call the model that the run names in `MODEL._target_`, a class or function of yours. Set
            it for your own runs only: a stranger's file chooses the functions called.

    Raises:
        CheckpointError: there is no such run or checkpoint, or it cannot be used.
        ConfigError: the model cannot be built, or there is no such device.
        TrustError: the run names your own model, and `trust_code` is False.
    """
    try:
        target = resolve_device(str(device))
    except ConfigError as error:
        problems = [problem.partition(": ")[2] for problem in error.problems]
        raise ConfigError([f"device={device}: {problem}" for problem in problems]) from None
    saved = read_run(Path(path).expanduser(), checkpoint, trust_code=trust_code)
    folder = saved.file.parent.parent
    is_run = saved.file.parent.name == CHECKPOINTS and (folder / CONFIG).is_file()
    return TrainedRun(
        saved.file,
        folder if is_run else None,
        saved.spec,
        saved.model.to(target).eval(),
        target,
        saved.content,
        saved.criterion_state,
        trust_code,
    )
