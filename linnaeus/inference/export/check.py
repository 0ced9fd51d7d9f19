"""Whether an exported model gives the run's outputs, on images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from linnaeus.config.load import load_config, settings_of
from linnaeus.config.schema import Config
from linnaeus.data.bundle import dataset_length
from linnaeus.data.datasets import build_data
from linnaeus.data.imagefolder import example_folder
from linnaeus.errors import ConfigError, DataError, LinnaeusError, first_line
from linnaeus.inference.paths import Unreadable, walk
from linnaeus.inference.trained import TrainedRun
from linnaeus.words import counted

NUM_IMAGES = 8
"""Images of a check; of those that the user names, `MAX_IMAGES` at most."""
MAX_IMAGES = 64
RELATIVE_TOLERANCE = 1e-3
"""Largest difference of a probability, relative to it."""
ABSOLUTE_TOLERANCE = 1e-6
"""Difference of a probability that is allowed beside the relative one."""
_SEEN = 512
"""Files of a folder among which a few are chosen."""

Item = TypeVar("Item")
Outputs = Mapping[str, Tensor]
Model = Callable[[Tensor], Outputs]


@dataclass(frozen=True)
class Samples:
    """Inputs of a check.

    Attributes:
        inputs: [B, C, H, W] on the CPU, B of at least 2.
        origin: where they come from, in words.
    """

    inputs: Tensor
    origin: str


def samples_of(run: TrainedRun, images: Iterable[str] = ()) -> Samples:
    """Inputs for a check: the images named, else some of the run's dataset, else noise.

    Args:
        run: the run.
        images: words for `inference.paths.walk`.

    Raises:
        DataError: an image that is named cannot be read; the model takes no images.
    """
    if run.spec.in_chans is None or run.spec.img_size is None:
        raise DataError(
            "the shape of the model's inputs is not known, as the run's dataset gave something else than "
            "images; --format safetensors exports the weights"
        )
    if images:
        named = list(islice(walk(images), MAX_IMAGES))
        return Samples(
            _paired([_read(run, path) for path in named]), f"{counted(len(named), 'image')} of --images"
        )
    try:
        inputs, origin = _of_dataset(run)
        return Samples(_paired(inputs), f"{counted(len(inputs), 'image')} of {origin}")
    except (LinnaeusError, OSError) as error:
        reason = error.problems[0] if isinstance(error, ConfigError) else first_line(error)
        return Samples(
            _noise(run), f"{NUM_IMAGES} images of noise (data of the run cannot be used: {reason})"
        )


def _read(run: TrainedRun, path: str | Unreadable) -> Tensor:
    if isinstance(path, Unreadable):
        raise DataError(f"--images: {path.source}: {path.reason}")
    try:
        return run.transform(path)
    except DataError as error:
        raise DataError(f"--images: {path}: {error}") from error


def _of_dataset(run: TrainedRun) -> tuple[list[Tensor], str]:
    """Inputs from the run's dataset, without looking through all of a large folder, and their origin."""
    config = _config(run)
    dataset = config.DATA.DATASET
    if not isinstance(dataset, Mapping) and dataset.NAME == "imagefolder":
        return _of_folder(run, example_folder(dataset))
    data = build_data(config.DATA, seed=config.EXPERIMENT.SEED)
    inputs = [data.val[index][0] for index in _spread(range(dataset_length(data.val)))]
    shape = [run.spec.in_chans, *(run.spec.img_size or ())]
    if any(list(image.shape) != shape for image in inputs):
        raise DataError(f"its validation gives {list(inputs[0].shape)}, and the model takes {shape}")
    return inputs, "the run's validation"


def _config(run: TrainedRun) -> Config:
    """The configuration of the run: in its folder, else what the checkpoint holds of it."""
    tokens, below = ["DATA.ON_BAD_IMAGE=raise"], None
    if run.folder is not None:
        tokens = ["--cfg", str(run.folder / "config.yaml"), *tokens]
    elif "DATA" in run.content.get("config", {}):
        below = settings_of(run.content["config"], str(run.checkpoint))
    else:
        raise DataError(f"{run.checkpoint.name} does not name the run's dataset")
    return load_config(tokens, below).config


def _of_folder(run: TrainedRun, folder: Path) -> tuple[list[Tensor], str]:
    paths = list(islice(walk([str(folder)]), _SEEN))
    inputs = [tensor for path in _spread(paths) if (tensor := _readable(run, path)) is not None]
    if not inputs:
        raise DataError(f"no image in {folder} can be read")
    return inputs, str(folder)


def _readable(run: TrainedRun, path: str | Unreadable) -> Tensor | None:
    try:
        return None if isinstance(path, Unreadable) else run.transform(path)
    except DataError:
        return None


def _spread(items: Sequence[Item]) -> Sequence[Item]:
    """A few of the items, evenly spread."""
    step = max(1, len(items) // NUM_IMAGES)
    return items[::step][:NUM_IMAGES]


def _noise(run: TrainedRun) -> Tensor:
    """Seeded noise [B, C, H, W]."""
    assert run.spec.img_size is not None
    generator = torch.Generator().manual_seed(0)
    shape = (run.spec.in_chans, *run.spec.img_size)
    if run.spec.preprocessing is None:
        return torch.randn(NUM_IMAGES, *shape, generator=generator)  # type: ignore[arg-type]
    pixels = torch.randint(0, 256, (NUM_IMAGES, *shape), dtype=torch.uint8, generator=generator)  # type: ignore[arg-type]
    return torch.stack([run.transform(image) for image in pixels])


def _paired(inputs: list[Tensor]) -> Tensor:
    """A batch; a single input stands there twice, since tracing takes a batch of one for a constant."""
    return torch.stack(inputs if len(inputs) > 1 else inputs * 2).float()


@torch.no_grad()
def largest_difference(model: Model, expected: Model, inputs: Tensor, *, probabilities: bool) -> float:
    """The largest difference between the outputs of two models, on a whole batch and on one image of it.

    Args:
        model: the exported one.
        expected: the run's.
        inputs: [B, C, H, W].
        probabilities: whether outputs are probabilities; others may differ by `RELATIVE_TOLERANCE` times the
            largest of them, or times 1.

    Returns:
        The largest absolute difference.

    Raises:
        LinnaeusError: the outputs differ by more than the tolerance, or in name or shape.
    """
    largest = 0.0
    for part in (slice(None), slice(0, 1)):
        found, right = model(inputs[part]), expected(inputs[part])
        if list(found) != list(right):
            raise LinnaeusError(f"the exported model gives outputs {list(found)}, not {list(right)}")
        for name, output in right.items():
            difference = _difference(found[name].cpu(), output.cpu(), name, probabilities)
            largest = max(largest, difference)
    return largest


def _difference(found: Tensor, expected: Tensor, name: str, probabilities: bool) -> float:
    if found.shape != expected.shape:
        raise LinnaeusError(
            f"the exported model gives {list(found.shape)} for {name!r}, not {list(expected.shape)}"
        )
    found, expected = found.double(), expected.double()
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    relative, absolute = (
        (RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE)
        if probabilities
        else (0.0, RELATIVE_TOLERANCE * max(1.0, scale))
    )
    if not torch.allclose(found, expected, rtol=relative, atol=absolute):
        worst = float((found - expected).abs().max())
        raise LinnaeusError(
            f"the exported model does not give the run's outputs: {name!r} differs by {worst:.3g}, where "
            f"{'probabilities' if probabilities else 'outputs'} are up to {scale:.3g}; nothing was written"
        )
    return float((found - expected).abs().max()) if found.numel() else 0.0
