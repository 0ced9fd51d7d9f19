"""The device's part of preparing a batch: normalization, erasing, and Mixup and CutMix of pairs of samples.

Shapes: B is the number of samples in a batch, L the number of levels, C the sum of the classes of
all levels.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import v2

from linnaeus.autobatch.state.rng import preserved_generators
from linnaeus.config.schema import AugmentConfig
from linnaeus.data.batch import Batch, describe
from linnaeus.data.taxonomy import UNKNOWN, Taxonomy
from linnaeus.data.transforms import Normalise, Preprocessing
from linnaeus.runtime.errors import ConfigError, DataError
from linnaeus.runtime.rng import seed_generators

_BOTH = "DATA.AUGMENT.MIXUP and DATA.AUGMENT.CUTMIX"


class Mixing:
    """Mixes each sample of a batch with the one before it, and the first with the last.

    With DATA.AUGMENT.REPEATS, it is the last one before it that shows another image.

    The loader draws how (`draw`), and the device mixes (`__call__`).

    Args:
        num_classes: classes of each level.
        augment: the node DATA.AUGMENT. `MIXUP` and `CUTMIX` are the alphas of Mixup (Zhang et al. 2018,
            arXiv:1710.09412) and CutMix (Yun et al. 2019, arXiv:1905.04899).
        is_multilabel: whether samples have several labels: targets are [B, C] with -1 where unknown.
    """

    def __init__(
        self, num_classes: Sequence[int], augment: AugmentConfig, *, is_multilabel: bool = False
    ) -> None:
        self.num_classes = tuple(num_classes)
        self.is_multilabel = is_multilabel
        self.augment = augment
        self.mixup = v2.MixUp(alpha=augment.MIXUP or 1.0)
        self.cutmix = v2.CutMix(alpha=augment.CUTMIX or 1.0)

    def draw(self, images: Tensor) -> Mapping[str, Any]:
        """The parameters of torchvision's transform for a batch of images, from torch's global generator."""
        augment = self.augment
        share = augment.MIX_SWITCH if augment.MIXUP else 1.0
        if not augment.CUTMIX or (share < 1 and float(torch.rand(())) >= share):
            return self.mixup.make_params([images])  # type: ignore[no-any-return]
        if augment.CUTMIX_MINMAX is None:
            return self.cutmix.make_params([images])  # type: ignore[no-any-return]
        sides = images.shape[:-3:-1]  # width, height
        cut = [int(side * torch.empty(()).uniform_(*augment.CUTMIX_MINMAX)) for side in sides]
        start = [
            int(torch.randint(side - part + 1, ())) for side, part in zip(sides, cut, strict=True)
        ]
        end = map(operator.add, start, cut)
        return {"box": (*start, *end), "lam_adjusted": 1 - math.prod(cut) / math.prod(sides)}

    def __call__(
        self, images: Tensor, targets: Tensor, drawn: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Mixed float images [B, channels, height, width], and their targets as probabilities [B, C].

        An unknown label stays unknown: with several labels per sample -1, else zeros in its level.
        """
        shift = max(1, min(self.augment.REPEATS, len(images) - 1))
        if "box" in drawn:
            part, (left, top, right, bottom) = drawn["lam_adjusted"], drawn["box"]
            box = (..., slice(top, bottom), slice(left, right))
            before, images = images, images.clone()
            images[shift:][box], images[:shift][box] = before[:-shift][box], before[-shift:][box]
        else:
            part = drawn["lam"]
            images = images.roll(shift, 0).lerp_(images, part)
        if not self.is_multilabel:
            targets = soft_targets(targets, self.num_classes)
        others = targets.roll(shift, 0)
        is_unknown = (targets < 0) | (others < 0)
        return images, (targets * part + others * (1 - part)).masked_fill(is_unknown, UNKNOWN)


@dataclass(frozen=True)
class DeviceTransform:
    """Makes inputs and targets of the model from a batch of the loader, on the device of the batch.

    Attributes:
        normalise: for pixels (uint8); other inputs are inputs of the model already.
        erasing: erases rectangles of normalized pixels, in training.
        mixing: Mixup and CutMix, in training.
    """

    normalise: Normalise | None = None
    erasing: RandomErasing | None = None
    mixing: Mixing | None = None

    def check(self, batch: Batch) -> None:
        """Raise `DataError` for a batch that cannot be mixed, where batches are."""
        if self.mixing is None:
            return
        inputs, targets, _ = batch
        num_levels = len(self.mixing.num_classes)
        is_images = isinstance(inputs, Tensor) and inputs.ndim == 4
        is_pixels = is_images and inputs.dtype == torch.uint8 and self.normalise is not None
        is_images = is_pixels or (is_images and inputs.is_floating_point())
        is_labels = isinstance(targets, Tensor) and not targets.is_floating_point()
        is_labels = is_labels and targets.shape == (len(inputs), num_levels)
        if not is_images or not (self.mixing.is_multilabel or is_labels):
            raise DataError(
                f"{_BOTH} mix images, float [batch, channels, height, width], with labels, whole numbers "
                f"[batch, {num_levels}], not {describe(inputs)} with {describe(targets)}; set both to 0"
            )

    def choose(
        self, batch: Batch, *, mixes: bool = True, always: bool = False
    ) -> dict[str, Any] | None:
        """Draw the `choices` of a training batch, from torch's global generator.

        `mixes` is whether its epoch is mixed; with `always`, the batch is always mixed.
        """
        choices: dict[str, Any] = {}
        if self.mixing is not None and mixes:
            self.check(batch)
            share = self.mixing.augment.MIX_PROB
            is_drawn = len(batch.inputs) > 1 and (share == 1 or float(torch.rand(())) < share)
            if is_drawn or always:
                choices["mix"] = self.mixing.draw(batch.inputs)
        if self.erasing is not None:
            choices["seed"] = int(torch.randint(1 << 62, ()))
        return choices or None

    def __call__(self, batch: Batch) -> tuple[Any, Any]:
        """Inputs and targets."""
        inputs, targets, choices = batch[0], batch[1], batch.choices or {}
        is_pixels = isinstance(inputs, Tensor) and inputs.dtype == torch.uint8
        if self.normalise is not None and is_pixels:
            inputs = self.normalise(inputs)
            if self.erasing is not None and "seed" in choices:
                with preserved_generators():
                    seed_generators(choices["seed"])
                    self.erasing.device = inputs.device
                    self.erasing(inputs)
        if self.mixing is not None and "mix" in choices:
            inputs, targets = self.mixing(inputs, targets, choices["mix"])
        return inputs, targets


def soft_targets(labels: Tensor, num_classes: Sequence[int]) -> Tensor:
    """Labels [B, L] of all levels as probabilities [B, C], one level beside the other.

    1 stands at the class of each known label; an unknown label (-1) is a row of zeros in its level.

    >>> soft_targets(torch.tensor([[1, 0], [-1, 2]]), [2, 3]).tolist()
    [[0.0, 1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]]
    """
    result = torch.zeros(len(labels), sum(num_classes), device=labels.device)
    for column, part in enumerate(result.split(list(num_classes), dim=1)):
        part.copy_(one_hot(labels[:, column], part.shape[1]))
    return result


def one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Return the class of each label as bool [B, num_classes]; all False if it is unknown (-1).

    Unlike `torch.nn.functional.one_hot` it reads no value, so it can be traced.
    """
    return labels.unsqueeze(1) == torch.arange(num_classes, device=labels.device)


def build_device_transform(
    augment: AugmentConfig, taxonomy: Taxonomy | None, preprocessing: Preprocessing | None
) -> DeviceTransform:
    """The device's part of `DATA.AUGMENT`; without a preprocessing, inputs are neither normalized nor erased.

    Raises:
        ConfigError: mixing is on, and there are no classes.
    """
    mixing = erasing = None
    if is_mixing(augment):
        if taxonomy is None:
            raise ConfigError(
                f"{_BOTH}: mixed labels need classes, which the dataset does not declare; give it "
                f"`taxonomy`, `classes` or `num_classes`, or set {_BOTH} to 0"
            )
        counts = [*taxonomy.num_classes.values()]
        mixing = Mixing(counts, augment, is_multilabel=taxonomy.is_multilabel)
    if preprocessing is None:
        return DeviceTransform(mixing=mixing)
    if augment.ERASING:
        erasing = RandomErasing(
            augment.ERASING, mode=augment.ERASING_MODE, max_count=augment.ERASING_COUNT
        )
    return DeviceTransform(preprocessing.normalise(), erasing, mixing)


def is_mixing(augment: AugmentConfig) -> bool:
    """Return whether training batches are mixed."""
    return augment.MIXUP > 0 or augment.CUTMIX > 0


def mixed_epochs(augment: AugmentConfig, num_epochs: int) -> int:
    """Return the number of epochs, from the first, whose batches are mixed.

    Raises:
        ConfigError: mixing is on, and no epoch is left for it.
    """
    if not is_mixing(augment):
        return 0
    if num_epochs <= augment.MIX_OFF_EPOCHS:
        raise ConfigError(
            f"DATA.AUGMENT.MIX_OFF_EPOCHS: {augment.MIX_OFF_EPOCHS} of TRAIN.EPOCHS {num_epochs} leaves no "
            f"epoch to mix; lower it, or set {_BOTH} to 0"
        )
    return num_epochs - augment.MIX_OFF_EPOCHS
