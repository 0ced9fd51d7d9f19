"""Anything that is an image, as the input of a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from linnaeus.autobatch.memory.oom import is_out_of_memory
from linnaeus.data.image import array_to_tensor, decode, readable, to_tensor
from linnaeus.data.transforms import Preprocessing
from linnaeus.models.model_spec import ModelSpec
from linnaeus.runtime.errors import DataError, first_line

ImageLike: TypeAlias = "str | Path | Image.Image | np.ndarray[Any, Any] | Tensor"
"""A file, a Pillow image, or an array or tensor of uint8: [H, W], [C, H, W] or [H, W, C] (see `Reader`)."""


class Reader:
    """Makes inputs of a model from images, as validation does.

    Files, Pillow images, arrays and tensors of pixels are converted to the model's channels, resized, cropped
    and normalized. Where the run's dataset gave tensors, a tensor of the model's own shape is the input as it
    is, and nothing else is taken.

    Args:
        spec: input of the model.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        if spec.preprocessing is not None:
            self._transform = spec.preprocessing.transform()
            self._normalise = spec.preprocessing.normalise()

    def __repr__(self) -> str:
        preprocessing = self._spec.preprocessing
        return f"Reader({'of tensors as they are' if preprocessing is None else preprocessing})"

    @torch.no_grad()
    def __call__(self, image: ImageLike) -> Tensor:
        """Return the input [C, H, W], float32.

        Raises:
            DataError: the image cannot be read or used; the message says why, and leaves naming it to the
            caller.
        """
        if self._spec.preprocessing is None:
            return self._own_input(image)
        pixels = self._pixels(image, self._spec.preprocessing)
        try:
            result: Tensor = self._normalise(self._transform(pixels))
            return result
        except (
            ValueError,
            RuntimeError,
            ZeroDivisionError,
        ) as error:  # such as for a single row of pixels
            if is_out_of_memory(error):
                raise
            size = "x".join(map(str, pixels.shape[-2:]))
            raise DataError(
                f"{size} pixels cannot be resized and cropped: {first_line(error)}"
            ) from error

    def _pixels(self, image: ImageLike, preprocessing: Preprocessing) -> Tensor:
        """[channels, any, any], uint8."""
        channels, decoding = preprocessing.channels, preprocessing.decoding
        if isinstance(image, Tensor):
            image = image.cpu().numpy()
        if isinstance(image, np.ndarray):
            if channels in (1, 3) and image.dtype != np.uint8:
                raise DataError(f"it has values of {image.dtype}; give an image of uint8, 0 to 255")
            return array_to_tensor(image, channels, decoding)
        if not isinstance(image, str | os.PathLike | Image.Image):
            raise DataError(
                f"{type(image).__name__} is not an image: pass a path, a Pillow image, or a uint8 array or "
                "tensor"
            )
        if not isinstance(image, Image.Image):
            return decode(image, channels, decoding, self._transform.min_size)
        with readable():  # Pillow may decode it only now
            return to_tensor(image, channels, decoding)

    def _own_input(self, image: ImageLike) -> Tensor:
        shape = (self._spec.in_chans, *(self._spec.img_size or ()))
        expected = "of its inputs" if None in shape else f"[{', '.join(map(str, shape))}]"
        if isinstance(image, np.ndarray):
            image = torch.from_numpy(image)
        if not isinstance(image, Tensor):
            raise DataError(
                "the run's dataset gave tensors, so Linnaeus cannot turn an image file into an input of "
                f"its model; in Python, give run.predict tensors {expected} as the dataset made them"
            )
        if None not in shape and tuple(image.shape) != shape:
            raise DataError(
                f"a tensor {list(image.shape)} is no input of the model, which takes {expected}"
            )
        return image.float()
