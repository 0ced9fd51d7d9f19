"""Whether an exported model gives the run's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from linnaeus.inference.trained import TrainedRun
from linnaeus.runtime.errors import DataError, LinnaeusError

NUM_IMAGES = 8
"""Images of a check."""
RELATIVE_TOLERANCE = 1e-3
"""Largest difference of a probability, relative to it."""
ABSOLUTE_TOLERANCE = 1e-6
"""Difference of a probability that is allowed beside the relative one."""
HALF_TOLERANCE = 2e-2
"""With float16: largest difference of a probability, or of a logit relative to the largest."""

Model = Callable[[Tensor], Mapping[str, Tensor]]
"""Inputs [B, C, H, W] to outputs by name."""


def random_inputs(run: TrainedRun) -> Tensor:
    """Return inputs [B, C, H, W] of a run for a check: random pixels, normalized as the run's images are.

    Raises:
        DataError: the model takes no images.
    """
    if run.spec.in_chans is None or run.spec.img_size is None:
        raise DataError(
            "the shape of the model's inputs is not known, because the run's dataset did not give "
            "images; format=safetensors exports the weights"
        )
    shape = (NUM_IMAGES, run.spec.in_chans, *run.spec.img_size)
    generator = torch.Generator().manual_seed(0)
    if run.spec.preprocessing is None:
        return torch.randn(shape, generator=generator)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    inputs: Tensor = run.spec.preprocessing.normalise()(pixels)
    return inputs


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
