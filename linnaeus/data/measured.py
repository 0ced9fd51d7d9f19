"""Measures what decides how the images of a dataset become inputs: significant bits, mean, deviation."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any, TypeVar

import torch
from torch import Tensor

from linnaeus.data.image import Decoding, load_image, significant_bits
from linnaeus.errors import DataError

T = TypeVar("T")

MOST_IMAGES = 1000
"""Images that mean and standard deviation are measured on."""


def measure_bits(files: Sequence[str], channels: int) -> int:
    """Significant bits of the values in 16-bit files, at least 8; 0 where no file has 16 bits.

    All files are read, up to the first with a value of 16 bits. Damaged ones do not count.
    """
    most = 0
    with ThreadPool(num_threads()) as pool:
        for bits in pool.imap_unordered(partial(_or_none, significant_bits, channels), files, 16):
            most = max(most, bits or 0)
            if most == 16:
                break
    return most


def measure_channels(
    files: Sequence[str], channels: int, decoding: Decoding
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel on the 0-1 scale, of images evenly spread over the files.

    Raises:
        DataError: no image can be read.
    """
    some = files[:: -(-len(files) // MOST_IMAGES)]
    moments = partial(_or_none, _moments, channels, decoding=decoding)
    with ThreadPool(num_threads()) as pool:
        found = [each for each in pool.imap(moments, some) if each is not None]
    if not found:
        load_image(some[0], channels, decoding)  # says why
        raise DataError(f"{some[0]}: cannot be read twice")
    mean, square = torch.stack(found).mean(dim=0)
    std = (square - mean**2).clamp(min=0).sqrt().clamp(min=1 / 255)
    return [round(value, 6) for value in mean.tolist()], [round(value, 6) for value in std.tolist()]


def num_threads() -> int:
    """Threads that decode images together; Pillow releases Python's global lock while it decodes."""
    return min(32, len(os.sched_getaffinity(0)))


def _or_none(function: Callable[..., T], channels: int, file: str, **arguments: Any) -> T | None:
    with suppress(Exception):  # whatever a damaged file raises
        return function(file, channels, **arguments)
    return None


def _moments(file: str, channels: int, decoding: Decoding) -> Tensor:
    """[2, channels], float64: the means of the pixels and of their squares."""
    pixels = load_image(file, channels, decoding).double().flatten(1) / 255
    return torch.stack([pixels.mean(dim=1), pixels.square().mean(dim=1)])
