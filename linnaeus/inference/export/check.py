"""Whether an exported model gives the run's outputs, on images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from linnaeus.config.instantiate import check_targets, targets
from linnaeus.config.load import load_config, read_run_config, settings_of
from linnaeus.data.bundle import dataset_length
from linnaeus.inference.evaluation_data import EvaluationRequest, build_evaluation_data
from linnaeus.inference.paths import Unreadable, walk
from linnaeus.inference.trained import TrainedRun
from linnaeus.runtime.errors import ConfigError, DataError, LinnaeusError, TrustError, first_line
from linnaeus.runtime.files import CONFIG
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


def samples_of(run: TrainedRun, images: Iterable[str] = ()) -> Samples:
    """Inputs for a check: the images named, else some of the run's dataset, else noise.

    Args:
        run: the run.
        images: words for `inference.paths.walk`.

    Raises:
        DataError: an image that is named cannot be read; the model takes no images.
        TrustError: the run's dataset is a `_target_` that may not be called.
    """
    if run.spec.in_chans is None or run.spec.img_size is None:
        raise DataError(
            "the shape of the model's inputs is not known, as the run's dataset gave something else than "
            "images; --format safetensors exports the weights"
        )
    shape = (run.spec.in_chans, *run.spec.img_size)
    if images:
        inputs = [_read(run, path) for path in islice(walk(images), MAX_IMAGES)]
        origin = f"{counted(len(inputs), 'image')} of --images"
    else:
        try:
            inputs, source = _of_dataset(run)
            if any(tuple(image.shape) != shape for image in inputs):
                raise DataError(
                    f"{source} gives {list(inputs[0].shape)}, and the model takes {list(shape)}"
                )
            origin = f"{counted(len(inputs), 'image')} of {source}"
        except TrustError:
            raise
        except (LinnaeusError, OSError) as error:
            reason = error.problems[0] if isinstance(error, ConfigError) else first_line(error)
            inputs = list(_noise(run, shape))
            origin = f"{NUM_IMAGES} images of noise (data of the run cannot be used: {reason})"
    # A single input stands there twice, since tracing takes a batch of one for a constant.
    return Samples(torch.stack(inputs if len(inputs) > 1 else inputs * 2).float(), origin)


def _read(run: TrainedRun, path: str | Unreadable) -> Tensor:
    if isinstance(path, Unreadable):
        raise DataError(f"--images: {path.source}: {path.reason}")
    try:
        return run.transform(path)
    except DataError as error:
        raise DataError(f"--images: {path}: {error}") from error


def _of_dataset(run: TrainedRun) -> tuple[list[Tensor], str]:
    """Inputs from the data that `linnaeus evaluate` would take, evenly spread, and their source."""
    file = run.checkpoint
    if run.folder is not None:
        file = run.folder / CONFIG
        below = read_run_config(file)
    elif "DATA" in run.content.get("config", {}):
        below = settings_of(run.content["config"], str(file))
    else:
        raise DataError(f"{file.name} does not name the run's dataset")
    config = load_config(["DATA.ON_BAD_IMAGE=raise"], below).config
    named = dict(targets(config.DATA.DATASET, ("DATA", "DATASET")))
    check_targets(named, file, trust_code=run.trust_code)
    spec, seed = run.spec, config.EXPERIMENT.SEED
    request = EvaluationRequest(
        config.DATA, spec.index, spec.preprocessing, seed, is_run_dataset=True
    )
    data = build_evaluation_data(request)
    inputs, problems, num_samples = [], [], dataset_length(data.bundle.val)
    for index in range(0, num_samples, max(1, num_samples // NUM_IMAGES))[:NUM_IMAGES]:
        try:
            image = data.bundle.val[index][0]
            if spec.preprocessing is not None and image.dtype == torch.uint8:
                image = spec.preprocessing.normalise()(image)
            inputs.append(image)
        except DataError as error:  # a damaged image; there are others
            problems.append(error)
    if not inputs:
        raise problems[0]
    return inputs, f"{data.source} ({data.part})"


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
