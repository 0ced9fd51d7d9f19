"""Augmentation and resizing of uint8 tensors [C, H, W], and normalization."""

from __future__ import annotations

import inspect
import math
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data import create_transform
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor, nn
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from linnaeus.autobatch.state.rng import preserved_generators
from linnaeus.config.instantiate import call_target, place_of
from linnaeus.config.schema import AugmentConfig
from linnaeus.data.batch import describe
from linnaeus.data.image import DEFAULT_DECODING, Decoding, pixels_of
from linnaeus.runtime.errors import ConfigError, DataError, first_line

Transform = Callable[[Tensor | Image.Image], Tensor]
"""uint8 [C, H, W] of any size, or a Pillow image, to uint8 [C, height, width]."""

_POLICIES: dict[str, Callable[[], Any]] = {
    "randaugment": v2.RandAugment,
    "trivialaugment": v2.TrivialAugmentWide,
}

_LUMINANCE = (0.299, 0.587, 0.114)
"""Parts of red, green and blue in grey (ITU-R BT.601), with which Pillow reads color images as grey ones."""
_MOST_PIXELS_IN_PILLOW = 128 * 128
"""Up to this size, Pillow augments an image faster than torch does, whose calls take longer."""


class ResizeCenterCrop:
    """Resize an image, then crop or pad it around its center, with the arithmetic of timm.

    Args:
        size: height and width of the result, in pixels.
        fraction: the image is resized to `size / fraction`, rounded down.
        mode: `crop` covers that size and keeps the aspect ratio, `squash` takes exactly that size,
            `letterbox` fits the image into it and pads.
        interpolation: `bilinear` or `bicubic`.
        fill: padding of each channel, on the 0-1 scale.
    """

    def __init__(
        self,
        size: tuple[int, int],
        fraction: float = 1.0,
        mode: str = "crop",
        interpolation: str = "bilinear",
        fill: Sequence[float] = (),
    ) -> None:
        self.size = size
        self.fraction = fraction
        self.mode = mode
        self.interpolation = v2.InterpolationMode(interpolation)
        self.fill = fill

    def __call__(self, image: Tensor | Image.Image) -> Tensor | Image.Image:
        """[C, any, any] to [C, height, width], or a Pillow image to one of this size."""
        if isinstance(image, Tensor):
            return self._of_tensor(image)
        if self._resized(image.height, image.width) != [*self.size]:
            return self._of_tensor(pixels_of(image))
        return image.resize(self.size[::-1], Image.Resampling[self.interpolation.name])

    def _of_tensor(self, image: Tensor) -> Tensor:
        source, resized = image.shape[-2:], self._resized(*image.shape[-2:])
        rows, columns = (min(sides) for sides in zip(resized, self.size, strict=True))
        top, left = round((resized[0] - rows) / 2), round((resized[1] - columns) / 2)
        # The order of Pillow 13. Bicubic values that overshoot are cut off after each of the two passes.
        rows_first = source[0] - resized[0] > max(0, 2 * (source[1] - resized[1]))
        if math.prod(resized) > 2 * rows * columns:
            # Most would be cut off, as of thin images. Pillow resizes the crop alone; torch cannot.
            y, bottom = (row * source[0] / resized[0] for row in (top, top + rows))
            x, right = (column * source[1] / resized[1] for column in (left, left + columns))
            resample = Image.Resampling[self.interpolation.name]
            planes = [Image.fromarray(plane.numpy()) for plane in image]
            for is_of_rows in (rows_first, not rows_first):
                planes = [
                    plane.resize((plane.width, rows), resample, (0, y, plane.width, bottom))
                    if is_of_rows
                    else plane.resize(
                        (columns, plane.height), resample, (x, 0, right, plane.height)
                    )
                    for plane in planes
                ]
            image = torch.cat([pixels_of(plane) for plane in planes])
        else:
            for size in [[resized[0], source[1]], resized] if rows_first else [resized]:
                image = functional.resize_image(image, size, self.interpolation, antialias=True)
            image = functional.crop_image(image, top, left, rows, columns)
        if image.is_floating_point():
            image = image.clamp(0, 1)  # bicubic overshoots
        if (rows, columns) == self.size:
            return image
        fill = [value if image.is_floating_point() else round(255 * value) for value in self.fill]
        above, before = (self.size[0] - rows) // 2, (self.size[1] - columns) // 2
        padding = [before, above, self.size[1] - columns - before, self.size[0] - rows - above]
        padded: Tensor = functional.pad_image(image, padding, fill=fill)
        return padded

    def _resized(self, height: int, width: int) -> list[int]:
        """Height and width before the crop."""
        target = [math.floor(side / self.fraction) for side in self.size]
        if self.mode == "squash":
            return target
        if self.mode == "crop" and target[0] == target[1]:
            return [int(target[0] * side / min(height, width)) for side in (height, width)]
        choose = max if self.mode == "letterbox" else min
        ratio = choose(height / target[0], width / target[1])
        return [max(1, round(side / ratio)) for side in (height, width)]


class Normalise(nn.Module):
    """`v2.ToDtype(torch.float32, scale=True)` and `v2.Normalize`, bit for bit, with one copy."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.mean = torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1)
        self.std = torch.tensor(std, dtype=torch.float32).view(-1, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        """uint8, or fractions in [0, 1], [..., C, height, width] to float32 of the same shape."""
        result = images.to(torch.float32, copy=True)  # mixed types would take ten times as long
        if not images.is_floating_point():
            result.mul_(1 / 255)
        return result.sub_(self.mean.to(result.device)).div_(self.std.to(result.device))


class RandomCrop:
    """Resize a random part of an image to a size, drawn as timm draws it.

    torchvision's class takes three times as long for a small image.

    Args:
        size: height and width of the result, in pixels.
        scale, ratio: ranges of the part's area, as a fraction of the image, and of its width to its height.
        interpolation: `bilinear` or `bicubic`.
    """

    def __init__(
        self,
        size: tuple[int, int],
        scale: Sequence[float],
        ratio: Sequence[float],
        interpolation: str,
    ) -> None:
        self.size = size
        self.scale, self.ratio = scale, ratio
        self.interpolation = v2.InterpolationMode(interpolation)

    def draw(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Top, left, height and width of the next part of an image."""
        image = torch.empty(1, height, width, device="meta")
        place = RandomResizedCropAndInterpolation.get_params(image, self.scale, self.ratio)
        return place  # type: ignore[no-any-return]

    def __call__(self, image: Tensor | Image.Image) -> Tensor | Image.Image:
        """uint8 [C, any, any] to [C, height, width], or a Pillow image to one of this size."""
        place = RandomResizedCropAndInterpolation.get_params(image, self.scale, self.ratio)
        if isinstance(image, Image.Image):
            top, left, height, width = place
            image = image.crop((left, top, left + width, top + height))
            return image.resize(self.size[::-1], Image.Resampling[self.interpolation.name])
        part = functional.crop_image(image, *place)
        resized: Tensor = functional.resize_image(part, self.size, self.interpolation)
        return resized


class RandomFlip:
    """Flip an axis of an image with a probability; torchvision's class takes thrice as long."""

    def __init__(self, probability: float, axis: int) -> None:
        self.probability = probability
        self.axis = axis

    def __call__(self, image: Tensor | Image.Image) -> Tensor | Image.Image:
        """[C, height, width] to the same shape, or a Pillow image to its mirror image."""
        if float(torch.rand(1)) >= self.probability:
            return image
        if isinstance(image, Tensor):
            return image.flip(self.axis)
        return (ImageOps.mirror if self.axis == -1 else ImageOps.flip)(image)


@dataclass(frozen=True)
class Pipeline:
    """Steps on pixels, uint8 or fractions in [0, 1], [C, any, any] to [C, height, width].

    Small Pillow images of the right channels stay Pillow images while `steps` allow it, if `augments`.
    """

    steps: Sequence[Any]
    augments: bool = False

    def __call__(self, image: Tensor | Image.Image) -> Tensor:
        """Apply all steps."""
        if isinstance(image, Image.Image):
            is_small = image.width * image.height <= _MOST_PIXELS_IN_PILLOW
            image = image if self.augments and is_small else pixels_of(image)
        for step in self.steps:
            if isinstance(image, Image.Image) and not isinstance(step, _TAKES_PILLOW):
                image = pixels_of(image)
            image = step(image)
        return pixels_of(image) if isinstance(image, Image.Image) else image

    def min_size(self, height: int, width: int) -> tuple[float, float]:
        """Height and width at which an image is twice as large as the result of its resizing, or larger.

        For a random crop these follow from the crop that the next call takes.
        """
        step = self.steps[0]
        rows, columns = (2.0 * side for side in step.size)
        if not isinstance(step, RandomCrop):
            return rows / step.fraction, columns / step.fraction
        if min(height / rows, width / columns) < 2:  # no scale is small enough for any crop
            return height, width
        state = random.getstate()
        _, _, crop_height, crop_width = step.draw(height, width)
        random.setstate(state)
        return rows * height / crop_height, columns * width / crop_width


class ThroughPillow:
    """Applies a transform to a tensor as to a Pillow image.

    torchvision's automatic policies are faster on Pillow images than on tensors, conversions included.
    """

    def __init__(self, transform: Callable[[Image.Image], Image.Image]) -> None:
        self.transform = transform

    def __call__(self, image: Tensor | Image.Image) -> Tensor | Image.Image:
        """uint8 [C, height, width] to the same, for 1 or 3 channels, or a Pillow image to another."""
        # Plane by plane: that is faster than interleaving the channels as `to_pil_image` does.
        if isinstance(image, Image.Image):
            pillow = image
        else:
            planes = [*map(Image.fromarray, image.numpy())]
            pillow = planes[0] if len(planes) == 1 else Image.merge("RGB", planes)
        try:
            pillow = self.transform(pillow)
        except ValueError as error:
            # timm 1.0 asks Pillow 13 for colors of 0 bits.
            if "bits must be between" not in str(error):
                raise
        return pillow if isinstance(image, Image.Image) else pixels_of(pillow).contiguous()


_TAKES_PILLOW = (ResizeCenterCrop, RandomCrop, RandomFlip, ThroughPillow)


class UserTransform:
    """A transform of DATA.AUGMENT.TRAIN.

    A module or a function gets the tensor. A callable with arbitrary keyword arguments, as in albumentations,
    gets `image=` as an array [height, width, channels] and returns a mapping with `image`. Random transforms
    draw from the global generators. The method `set_random_seed` of a transform seeds its own generators.

    Args:
        transform: the callable.
        name: for messages.
    """

    def __init__(self, transform: Callable[..., Any], name: str) -> None:
        self.transform = transform
        self.name = name
        kinds = () if isinstance(transform, nn.Module) else _parameter_kinds(transform)
        self.takes_array = inspect.Parameter.VAR_KEYWORD in kinds

    def __call__(self, image: Tensor) -> Tensor:
        """Pixels [C, height, width] to the same shape and type; raises `DataError` for anything else."""
        try:
            if hasattr(self.transform, "set_random_seed"):
                self.transform.set_random_seed(int(torch.randint(1 << 32, ())))
            if self.takes_array:
                found = self.transform(image=np.ascontiguousarray(image.permute(1, 2, 0)))["image"]
                if isinstance(found, np.ndarray):
                    found = functional.to_image(np.atleast_3d(found)).as_subclass(Tensor)
            else:
                found = self.transform(image)
        except Exception as error:
            text = f"{type(error).__name__}: {first_line(error)}"
            raise DataError(f"{self.name}: {text}{place_of(error)}") from error
        if isinstance(found, Tensor) and (found.shape, found.dtype) == (image.shape, image.dtype):
            return found.contiguous()
        raise DataError(
            f"{self.name}: gave {describe(found)} for {describe(image)}; it must keep shape and type"
        )


def _parameter_kinds(function: Callable[..., Any]) -> list[Any]:
    try:
        return [each.kind for each in inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # some callables in C have no signature
        return []


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing that turns an image into the input of a model, without augmentation.

    Attributes:
        channels: of image and input, 1 (grey) or 3 (RGB) for files.
        size: height and width of the input, in pixels.
        crop_fraction: fraction of the resized image's side that the center crop keeps, in (0, 1].
        mean, std: of each channel, on the 0-1 scale.
        interpolation, resize: as in `ResizeCenterCrop`. The defaults apply to files that do not record them.
        decoding: decoding of files. The default applies to runs that did not record it.
    """

    channels: int
    size: tuple[int, int]
    crop_fraction: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    resize: str = "crop"
    decoding: Decoding = field(default=Decoding(background=None))

    def transform(self) -> Pipeline:
        """Resizes and crops an image for validation and prediction."""
        size, fraction = self.size, self.crop_fraction
        return Pipeline(
            [ResizeCenterCrop(size, fraction, self.resize, self.interpolation, self.mean)]
        )

    def normalise(self) -> Normalise:
        """Turns results of `transform` into inputs of the model, one image or a batch."""
        return Normalise(self.mean, self.std)

    def pixels(self, inputs: Tensor) -> Tensor:
        """Turn inputs of the model [..., C, height, width] back into pixels, uint8."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (255 * (inputs * std + mean)).round().clamp(0, 255).to(torch.uint8)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Preprocessing:
        """From plain values by attribute, as they stand in a file."""
        values = _with_tuples(content)
        if "decoding" in values:
            values["decoding"] = Decoding(**_with_tuples(values["decoding"]))
        found = cls(**values)
        if min(found.size) < 1 or not 0 < found.crop_fraction <= 1:
            raise ValueError(f"size {found.size}, crop_fraction {found.crop_fraction}")
        found.transform()  # raises ValueError where it cannot be used
        return found


def _with_tuples(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in content.items()
    }


def build_transforms(
    augment: AugmentConfig,
    size: tuple[int, int],
    channels: int,
    decoding: Decoding = DEFAULT_DECODING,
) -> tuple[Pipeline, Preprocessing]:
    """The pipelines of training and validation.

    Random choices use torch's global generator, which the loader seeds for each sample. `size` is height and
    width in pixels. For grey images, MEAN and STD of red, green and blue are converted to grey.

    Raises:
        ConfigError: a key that does not fit the number of channels, or a transform of TRAIN that cannot be
            used.
    """
    values = {"MEAN": augment.MEAN, "STD": augment.STD}
    if channels == 1 and all(value is not None and len(value) == 3 for value in values.values()):
        # Exact for the mean. The deviation assumes that channels vary together, as in photographs.
        values = {key: [sum(map(operator.mul, _LUMINANCE, value))] for key, value in values.items()}  # type: ignore[arg-type]
    problems = [
        f"DATA.AUGMENT.{key}: {len(value)} values, but the images have {channels} channel(s); give as many, "
        f"or DATA.AUGMENT.{key}=null"
        for key, value in values.items()
        if value is not None and len(value) != channels
    ]
    takes = {"POLICY": (1, 3), "COLOR_JITTER": (1, 3), "HUE": (3,), "GRAYSCALE": (3,)}
    problems += [
        f"DATA.AUGMENT.{key}: needs images of {' or '.join(map(str, numbers))} channels, not {channels}; "
        "leave it out"
        for key, numbers in takes.items()
        if getattr(augment, key) not in ("none", 0) and channels not in numbers
    ]
    if problems:
        raise ConfigError(problems)
    mean, std = (tuple(value or [0.5] * channels) for value in values.values())
    fraction = 1.0 if augment.CROP_FRACTION is None else augment.CROP_FRACTION
    mode, interpolation = augment.RESIZE or "crop", augment.INTERPOLATION or "bilinear"
    preprocessing = Preprocessing(
        channels, size, fraction, mean, std, interpolation, mode, decoding
    )
    return Pipeline(_augmentation(augment, preprocessing), augments=True), preprocessing


def _augmentation(augment: AugmentConfig, preprocessing: Preprocessing) -> list[Any]:
    """The steps on uint8 images, without those that are switched off, as each costs time."""
    size, interpolation = preprocessing.size, preprocessing.interpolation
    low, high = augment.CROP_SCALE or (1.0, 1.0)
    steps: list[Any] = [
        ResizeCenterCrop(size, 1.0, preprocessing.resize, interpolation, preprocessing.mean)
        if low >= 1.0
        else RandomCrop(size, (low, high), augment.CROP_RATIO, interpolation)
    ]
    if augment.HFLIP:
        steps.append(RandomFlip(augment.HFLIP, -1))
    if augment.VFLIP:
        steps.append(RandomFlip(augment.VFLIP, -2))
    if augment.ROTATION:
        steps.append(v2.RandomRotation(augment.ROTATION, v2.InterpolationMode.BILINEAR))
    if augment.COLOR_JITTER or augment.HUE:
        steps.append(v2.ColorJitter(*[augment.COLOR_JITTER] * 3, augment.HUE))
    if augment.GRAYSCALE:
        steps.append(v2.RandomGrayscale(augment.GRAYSCALE))
    if augment.BLUR:
        # A tenth of the side, as in SimCLR (Chen et al. 2020, arXiv:2002.05709).
        blur = v2.GaussianBlur(2 * max(1, min(size) // 20) + 1, (0.1, 2.0))
        steps.append(v2.RandomApply([blur], augment.BLUR))
    if augment.POLICY != "none":
        steps.append(ThroughPillow(_policy(augment.POLICY, preprocessing)))
    example = torch.zeros(preprocessing.channels, *size, dtype=torch.uint8)
    with preserved_generators():
        for position, node in enumerate(augment.TRAIN):
            key = f"DATA.AUGMENT.TRAIN.{position}"
            steps.append(UserTransform(call_target(node, key), f"{key}: {node['_target_']}"))
            try:
                steps[-1](example)  # an error must show now, not in training
            except DataError as error:
                raise ConfigError(str(error)) from error
    return steps


def _policy(name: str, preprocessing: Preprocessing) -> Callable[[Image.Image], Image.Image]:
    """torchvision's policy of this name, or timm's for its configuration string."""
    if name in _POLICIES:
        return _POLICIES[name]()  # type: ignore[no-any-return]
    try:
        _, policy, _ = create_transform(
            (3, *preprocessing.size),
            is_training=True,
            auto_augment=name,
            color_jitter=None,
            interpolation=preprocessing.interpolation,
            mean=preprocessing.mean,
            separate=True,
        )
    except (AssertionError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"DATA.AUGMENT.POLICY: timm knows no {name!r}: {first_line(error)}"
        ) from error
    return policy  # type: ignore[no-any-return]
