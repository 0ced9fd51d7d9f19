"""Whether an exported model gives the run's outputs, on images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from linnaeus.data.split_file import SPLIT_FILE, read_split
from linnaeus.inference.paths import Unreadable, walk
from linnaeus.inference.trained import TrainedRun
from linnaeus.runtime.errors import DataError, LinnaeusError
from linnaeus.runtime.words import counted

NUM_IMAGES = 8
"""Images of a check; of those that the user names, `MAX_IMAGES` at most."""
MAX_IMAGES = 64
RELATIVE_TOLERANCE = 1e-3
"""Largest difference of a probability, relative to it."""
ABSOLUTE_TOLERANCE = 1e-6
"""Difference of a probability that is allowed beside the relative one."""
HALF_TOLERANCE = 2e-2
"""With float16: largest difference of a probability, or of a logit relative to the largest."""

Model = Callable[[Tensor], Mapping[str, Tensor]]
"""Inputs [B, C, H, W] to outputs by name."""


@dataclass(frozen=True)
class Samples:
    """Inputs of a check.

    Attributes:
        inputs: [B, C, H, W] on the CPU, B of at least 2.
        origin: where they come from, in words.
    """

    inputs: Tensor
    origin: str


def samples_of(run: TrainedRun, words: Iterable[str] = ()) -> Samples:
    """Return inputs for a check: the images named, else some of the run's validation split, else noise.

    Args:
        run: the run.
        words: for `inference.paths.walk`.

    Raises:
        DataError: an image that is named cannot be read; the model takes no images.
    """
    if run.spec.in_chans is None or run.spec.img_size is None:
        raise DataError(
            "the shape of the model's inputs is not known, as the run's dataset gave something else than "
            "images; --format safetensors exports the weights"
        )
    inputs, origin = list[Tensor](), "--images"
    if words:
        inputs = [_read(run, path) for path in islice(walk(words), MAX_IMAGES)]
    elif run.folder is not None and (run.folder / SPLIT_FILE).is_file():
        origin = str(run.folder / SPLIT_FILE)
        with suppress(DataError):
            listed = read_split(run.folder / SPLIT_FILE, "val")[0]
            paths = [path for path in listed if Path(path).is_file()]
            step = max(1, len(paths) // NUM_IMAGES)
            inputs = [run.transform(path) for path in paths[::step][:NUM_IMAGES]]
    if not inputs:
        inputs, origin = list(_noise(run, (run.spec.in_chans, *run.spec.img_size))), "noise"
    # A single input stands there twice, since tracing takes a batch of one for a constant.
    images = torch.stack(inputs if len(inputs) > 1 else inputs * 2).float()
    return Samples(images, f"{counted(len(inputs), 'image')} of {origin}")


def _read(run: TrainedRun, path: str | Unreadable) -> Tensor:
    if isinstance(path, Unreadable):
        raise DataError(f"--images: {path.source}: {path.reason}")
    try:
        return run.transform(path)
    except DataError as error:
        raise DataError(f"--images: {path}: {error}") from error


def _noise(run: TrainedRun, shape: tuple[int, ...]) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_IMAGES):
        if run.spec.preprocessing is None:
            yield torch.randn(shape, generator=generator)
        else:
            yield run.transform(
                torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            )


@torch.no_grad()
def largest_difference(
    model: Model, expected: Model, inputs: Tensor, *, probabilities: bool, half: bool = False
) -> float:
    """The largest difference between the outputs of two models, on a whole batch and on one image of it.

    Args:
        model: the exported one.
        expected: the run's.
        inputs: [B, C, H, W].
        probabilities: whether outputs are probabilities; others may differ by `RELATIVE_TOLERANCE` times the
            largest of them, or times 1.
        half: whether the exported model computes in float16; see `HALF_TOLERANCE`.

    Raises:
        LinnaeusError: the outputs differ by more than the tolerance, or in name or shape.
    """
    largest = 0.0
    for part in (slice(None), slice(0, 1)):
        found, right = (
            {name: output.cpu().double() for name, output in each(inputs[part]).items()}
            for each in (model, expected)
        )
        shapes = [
            {name: list(output.shape) for name, output in each.items()} for each in (found, right)
        ]
        if [*shapes[0].items()] != [*shapes[1].items()]:
            raise LinnaeusError(f"the exported model gives outputs {shapes[0]}, not {shapes[1]}")
        for name, output in right.items():
            if not output.numel():
                continue
            scale, difference = float(output.abs().max()), float((found[name] - output).abs().max())
            relative, absolute = RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE
            if half:
                relative, absolute = 0.0, HALF_TOLERANCE * max(1.0, scale)
            elif not probabilities:
                relative, absolute = 0.0, RELATIVE_TOLERANCE * max(1.0, scale)
            if not torch.allclose(found[name], output, rtol=relative, atol=absolute):
                raise LinnaeusError(
                    f"the exported model does not give the run's outputs: {name!r} differs by "
                    f"{difference:.3g}, where {'probabilities' if probabilities else 'outputs'} are up to "
                    f"{scale:.3g}; nothing was written"
                )
            largest = max(largest, difference)
    return largest
