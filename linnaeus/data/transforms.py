"""Augmentation and normalisation, as torchvision v2 pipelines over uint8 tensors [C, H, W]."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from linnaeus.config.schema import AugmentConfig
from linnaeus.errors import ConfigError

Transform = Callable[[Tensor], Tensor]
"""uint8 [C, H, W] of any size to float32 [C, height, width], normalised."""

_POLICIES: dict[str, Callable[[], Any]] = {
    "randaugment": v2.RandAugment,
    "trivialaugment": v2.TrivialAugmentWide,
}

_LUMINANCE = (0.299, 0.587, 0.114)
"""Parts of red, green and blue in grey (ITU-R BT.601), with which Pillow reads colour images as grey ones."""


class CoverAndCrop(nn.Module):
    """Resize the image to just cover `size / fraction`, keeping its aspect ratio, then crop the centre."""

    def __init__(self, size: tuple[int, int], fraction: float = 1.0) -> None:
        super().__init__()
        self.size = size
        self.fraction = fraction

    def forward(self, image: Tensor) -> Tensor:
        """[C, any, any] to [C, height, width]."""
        height, width = image.shape[-2:]
        scale = max(self.size[0] / height, self.size[1] / width) / self.fraction
        resized = [
            max(self.size[0], round(height * scale)),
            max(self.size[1], round(width * scale)),
        ]
        image = functional.resize_image(image, resized, antialias=True)
        cropped: Tensor = functional.center_crop_image(image, list(self.size))
        return cropped


class Normalise(nn.Module):
    """`v2.ToDtype(torch.float32, scale=True)` and `v2.Normalize`, bit for bit, into memory that is there."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.mean = torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1)
        self.std = torch.tensor(std, dtype=torch.float32).view(-1, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        """uint8, or fractions in [0, 1], [C, height, width] to float32 of the same shape."""
        return self.write(image, torch.empty(image.shape, dtype=torch.float32))

    def write(self, image: Tensor, result: Tensor) -> Tensor:
        """Write what `forward` returns into a tensor."""
        result.copy_(image)
        if not image.is_floating_point():
            result.mul_(1 / 255)
        return result.sub_(self.mean).div_(self.std)


class Pipeline(nn.Module):
    """Steps on uint8 pixels [C, any, any], then normalisation, then erasing where it is not None."""

    def __init__(
        self, pixels: Sequence[nn.Module], normalise: Normalise, erasing: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.pixels = nn.Sequential(*pixels)
        self.normalise = normalise
        self.erasing = erasing

    def forward(self, image: Tensor) -> Tensor:
        """uint8 [C, any, any] to float32 [C, height, width]."""
        image = self.normalise(self.pixels(image))
        return image if self.erasing is None else self.erasing(image)


class ThroughPillow(nn.Module):
    """Applies a transform to a tensor as to a Pillow image.

    torchvision's automatic policies are faster on Pillow images than on tensors, conversions included.
    """

    def __init__(self, transform: Callable[[Image.Image], Image.Image]) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, image: Tensor) -> Tensor:
        """uint8 [C, height, width] to the same, for 1 or 3 channels."""
        # Plane by plane: that is faster than interleaving the channels as `to_pil_image` does.
        planes = [Image.fromarray(plane.numpy()) for plane in image]
        pillow = planes[0] if len(planes) == 1 else Image.merge("RGB", planes)
        tensor: Tensor = functional.pil_to_tensor(self.transform(pillow))
        return tensor.contiguous()


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the input of a model, without augmentation.

    Attributes:
        channels: of image and input, 1 (grey) or 3 (RGB) for files.
        size: height and width of the input, in pixels.
        crop_fraction: fraction of the resized image's side that the centre crop keeps, in (0, 1].
        mean, std: of each channel, on the 0-1 scale.
    """

    channels: int
    size: tuple[int, int]
    crop_fraction: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def transform(self) -> Transform:
        """The pipeline of validation and prediction."""
        return Pipeline(
            [CoverAndCrop(self.size, self.crop_fraction)], Normalise(self.mean, self.std)
        )

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Preprocessing:
        """From plain values by attribute, as they stand in a file."""
        values: Any = {key: tuple(v) if isinstance(v, list) else v for key, v in content.items()}
        return cls(**values)


def build_transforms(
    augment: AugmentConfig, size: tuple[int, int], channels: int
) -> tuple[Transform, Preprocessing]:
    """The pipeline of training, and what validation does with an image.

    Random choices use torch's global generator, which the loader seeds for each sample. `size` is height and
    width in pixels. For grey images the MEAN and STD of red, green and blue become those of grey.

    Raises:
        ConfigError: a MEAN or STD that does not fit the number of channels.
    """
    values = {"MEAN": augment.MEAN, "STD": augment.STD}
    if channels == 1 and all(value is not None and len(value) == 3 for value in values.values()):
        # Exact for the mean; the deviation is that of channels which vary together, as in photographs.
        values = {key: [sum(map(operator.mul, _LUMINANCE, value))] for key, value in values.items()}  # type: ignore[arg-type]
    problems = [
        f"DATA.AUGMENT.{key}: {len(value)} values, but the images have {channels} channel(s); give as many, "
        f"or DATA.AUGMENT.{key}=null"
        for key, value in values.items()
        if value is not None and len(value) != channels
    ]
    if problems:
        raise ConfigError(problems)
    mean, std = (tuple(value or [0.5] * channels) for value in values.values())
    erasing = v2.RandomErasing(augment.ERASING, inplace=True) if augment.ERASING else None
    train = Pipeline(_augmentation(augment, size), Normalise(mean, std), erasing)
    return train, Preprocessing(channels, size, augment.CROP_FRACTION, mean, std)


def _augmentation(augment: AugmentConfig, size: tuple[int, int]) -> list[Any]:
    """The steps on uint8 images, without those that are switched off, as each costs time."""
    low, high = augment.CROP_SCALE or (1.0, 1.0)
    steps: list[Any] = [
        CoverAndCrop(size)
        if low >= 1.0
        else v2.RandomResizedCrop(size, (low, high), antialias=True)
    ]
    if augment.HFLIP:
        steps.append(v2.RandomHorizontalFlip(augment.HFLIP))
    if augment.ROTATION:
        steps.append(v2.RandomRotation(augment.ROTATION, v2.InterpolationMode.BILINEAR))
    if augment.COLOR_JITTER:
        steps.append(v2.ColorJitter(*[augment.COLOR_JITTER] * 3))
    if augment.POLICY != "none":
        steps.append(ThroughPillow(_POLICIES[augment.POLICY]()))
    return steps
