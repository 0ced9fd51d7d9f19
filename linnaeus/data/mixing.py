"""Mixup and CutMix: training batches whose images and labels are mixed in pairs.

Shapes: B is the number of samples in a batch, L the number of levels, C the sum of the classes of
all levels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2

from linnaeus.config.schema import AugmentConfig
from linnaeus.data.batch import Batch, describe, is_image_batch
from linnaeus.data.taxonomy import UNKNOWN, Taxonomy
from linnaeus.runtime.errors import ConfigError, DataError

_BOTH = "DATA.AUGMENT.MIXUP and DATA.AUGMENT.CUTMIX"


class Mixing:
    """Mixes each sample of a batch with the one before it, and the first with the last.

    Random choices use torch's global generator, which the loader has seeded for the last sample of the batch.

    Args:
        num_classes: classes of each level.
        mixup: alpha of Mixup (Zhang et al. 2018, arXiv:1710.09412); 0 is off.
        cutmix: alpha of CutMix (Yun et al. 2019, arXiv:1905.04899); 0 is off. With both, each batch takes
            one of them with equal probability.
        in_place: write the mixed images over the batch; otherwise over a copy.
        is_multilabel: whether targets are those of several labels per sample, [B, C] with -1 where unknown.
    """

    def __init__(
        self,
        num_classes: Sequence[int],
        mixup: float,
        cutmix: float,
        *,
        in_place: bool = True,
        is_multilabel: bool = False,
    ) -> None:
        self.num_classes = tuple(num_classes)
        self.is_multilabel = is_multilabel
        self.in_place = in_place
        kinds = ((v2.MixUp, mixup), (v2.CutMix, cutmix))
        self.transforms = [kind(alpha=alpha) for kind, alpha in kinds if alpha > 0]

    def to_soft_targets(self, batch: Batch) -> Batch:
        """The batch with its labels [B, L] as probabilities [B, C], and unmixed: what mixing starts from.

        Raises:
            DataError: inputs that are not float [B, channels, height, width], or targets of another form.
        """
        inputs, targets = batch
        num_levels = len(self.num_classes)
        is_labels = isinstance(targets, Tensor) and not targets.is_floating_point()
        is_labels = is_labels and targets.shape == (len(inputs), num_levels)
        if not is_image_batch(inputs) or not (self.is_multilabel or is_labels):
            raise DataError(
                f"{_BOTH} mix images, float [batch, channels, height, width], with labels, whole numbers "
                f"[batch, {num_levels}], not {describe(inputs)} with {describe(targets)}; set both to 0"
            )
        if self.is_multilabel:
            return batch
        return Batch(inputs, soft_targets(targets, self.num_classes))

    @property
    def num_copies(self) -> int:
        """Copies of a batch of images that mixing holds beside it."""
        return 0 if self.in_place else 1

    def soft_collate(self, collate: Callable[[list[Any]], Batch]) -> Callable[[list[Any]], Batch]:
        """Return a collate function whose batches have soft targets."""
        return lambda samples: self.to_soft_targets(collate(samples))

    def __call__(self, batch: Batch) -> Batch:
        """The mixed batch; errors are those of `to_soft_targets`."""
        return self.mix(self.to_soft_targets(batch))

    def mix(self, batch: Batch) -> Batch:
        """Mix what `to_soft_targets` returned; a batch of one sample stays as it is.

        torchvision draws the parts and rectangles. Its own kernels hold two more batches of images and take
        eleven times as long: 101 ms instead of 9 for 128 images of 224 pixels.
        """
        images, targets = batch
        if len(targets) == 1:
            return batch
        which = int(torch.randint(len(self.transforms), ())) if len(self.transforms) > 1 else 0
        drawn = self.transforms[which].make_params([images])
        if not self.in_place:
            images = images.clone()
        if "box" in drawn:
            part, (left, top, right, bottom) = drawn["lam_adjusted"], drawn["box"]
            _write_over(images[..., top:bottom, left:right], lambda box, other: box.copy_(other))
        else:
            part = drawn["lam"]
            _write_over(images, lambda image, other: image.mul_(part).add_(other, alpha=1 - part))
        others = targets.roll(1, 0)
        is_unknown = (targets < 0) | (others < 0)
        return Batch(
            images, (targets * part + others * (1 - part)).masked_fill(is_unknown, UNKNOWN)
        )


def _write_over(images: Tensor, write: Callable[[Tensor, Tensor], object]) -> None:
    """Call `write(image, the one before it)` for each image, which may change the first of both in place."""
    last = images[-1].clone()
    for index in range(
        len(images) - 1, 0, -1
    ):  # from the end, so that the one before is still as it was
        write(images[index], images[index - 1])
    write(images[0], last)


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
    """Which class each label names, as bool [B, num_classes]; False throughout where it is unknown (-1).

    Unlike `torch.nn.functional.one_hot` it reads no value, so it can be traced.
    """
    return labels.unsqueeze(1) == torch.arange(num_classes, device=labels.device)


def build_mixing(
    augment: AugmentConfig, taxonomy: Taxonomy | None, *, in_place: bool = True
) -> Mixing | None:
    """What `DATA.AUGMENT` asks for; None where both keys are 0.

    Raises:
        ConfigError: mixing is on, and there are no classes.
    """
    if not is_mixing(augment):
        return None
    if taxonomy is None:
        raise ConfigError(
            f"{_BOTH}: mixed labels need classes, which the dataset does not declare; give it "
            f"`taxonomy`, `classes` or `num_classes`, or set {_BOTH} to 0"
        )
    counts, is_multilabel = list(taxonomy.num_classes.values()), taxonomy.is_multilabel
    return Mixing(
        counts, augment.MIXUP, augment.CUTMIX, in_place=in_place, is_multilabel=is_multilabel
    )


def is_mixing(augment: AugmentConfig) -> bool:
    """Whether training batches are mixed."""
    return augment.MIXUP > 0 or augment.CUTMIX > 0


def mixed_epochs(augment: AugmentConfig, num_epochs: int) -> int:
    """Number of epochs, from the first, whose batches are mixed.

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
