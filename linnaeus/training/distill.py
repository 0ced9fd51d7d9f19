"""Distillation: the probabilities of a frozen teacher as soft targets (MODEL.TEACHER)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as functional
from timm.data import ImageNetInfo, infer_imagenet_subset, resolve_data_config
from torch import Tensor, nn

from linnaeus.autobatch.state.rng import preserved_generators
from linnaeus.config.instantiate import is_target
from linnaeus.config.schema import LossConfig
from linnaeus.data.bundle import DataBundle
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.data.transforms import Normalise
from linnaeus.models.timm_source import (
    check_weights_exist,
    find_source,
    unusable_weights_error,
)
from linnaeus.runtime.errors import ConfigError, LinnaeusError, TrustError, first_line
from linnaeus.training.losses import logits_per_level
from linnaeus.training.saved_run import read_run


class Distillation(nn.Module):
    """Adds the soft targets of a teacher to a loss (Hinton, Vinyals and Dean 2015, arXiv:1503.02531).

    With the weight w, the temperature T, and the logits t of the teacher and s of the student:
    `(1 - w) loss + w T^2 KL(softmax(t / T) || softmax(s / T))`, a mean over the samples and, by
    LOSS.LEVEL_WEIGHTS, over the levels. Log-probabilities serve as logits.

    Args:
        teacher: stays in eval mode; its parameters take no gradients.
        taxonomy: levels of both models.
        loss: the LOSS node.
        convert: from inputs of the student to inputs of the teacher.
    """

    def __init__(
        self, teacher: nn.Module, taxonomy: Taxonomy, loss: LossConfig, convert: nn.Module
    ) -> None:
        super().__init__()
        self.teacher, self.convert = teacher.requires_grad_(False), convert
        self._levels, self._loss = taxonomy.names, loss
        self._weights = loss.LEVEL_WEIGHTS or [1.0] * len(taxonomy.names)
        self.eval()

    def train(self, mode: bool = True) -> Distillation:
        """Stay in eval mode."""
        return super().train(False)

    def forward(self, loss: Tensor, outputs: Any, inputs: Tensor) -> Tensor:
        """The loss with soft targets, for inputs [B, C, H, W] and outputs of the student."""
        share, temperature = self._loss.DISTILL_WEIGHT, self._loss.DISTILL_TEMPERATURE
        loss = (1 - share) * loss
        for weight, *both in zip(
            self._weights,
            logits_per_level(outputs, self._levels),
            self.soft_targets(inputs),
            strict=True,
        ):
            student, teacher = ((each.float() / temperature).log_softmax(dim=1) for each in both)
            divergence = functional.kl_div(student, teacher, reduction="batchmean", log_target=True)
            loss = loss + share * temperature**2 * weight / sum(self._weights) * divergence
        return loss

    @torch.no_grad()
    def soft_targets(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """The teacher's logits of each level, for inputs of the student."""
        return logits_per_level(self.teacher(self.convert(inputs)), self._levels)


def check_teacher(name: str | None) -> None:
    """Raise `ConfigError` for a MODEL.TEACHER that is no file, no folder and no timm model with weights."""
    if name is not None and not Path(name).expanduser().exists():
        check_weights_exist(find_source(name, "MODEL.TEACHER"), f"MODEL.TEACHER: {name!r}")


def build_distillation(
    model_node: Any, loss_node: Any, data: DataBundle, device: torch.device
) -> tuple[Distillation | None, str | None]:
    """The distillation of a run and a line for the log; None without MODEL.TEACHER.

    Raises:
        ConfigError: the teacher cannot be read, has other classes or another order, or takes other images.
    """
    if is_target(model_node) or (name := model_node.TEACHER) is None:
        return None, None
    problem, taxonomy, own = f"MODEL.TEACHER: {name!r}", data.taxonomy, data.preprocessing
    if taxonomy is None or taxonomy.is_multilabel or data.in_chans is None or data.img_size is None:
        raise ConfigError(f"{problem} needs images with one label in each level; set it to null")
    if is_target(loss_node):
        raise ConfigError(
            f"{problem} needs LOSS.DISTILL_WEIGHT, which LOSS._target_ does not have; choose LOSS.NAME"
        )
    try:
        with preserved_generators():
            teacher, levels, colors = _read_teacher(name, data, Level(taxonomy.names[-1], ()))
    except TrustError as error:
        raise ConfigError(
            f"{problem} is a run with its own model class; name a timm model, or a run of one"
        ) from error
    except LinnaeusError as error:
        reasons = "; ".join(getattr(error, "problems", [str(error)]))
        raise ConfigError(f"{problem} cannot be used: {reasons}") from error
    both = (_classes(each) for each in (levels, taxonomy.levels))
    for theirs, ours in zip_longest(*both, fillvalue="nothing"):
        if theirs != ours:
            raise ConfigError(
                f"{problem} has {theirs} where the data have {ours}; name a teacher of the same levels and "
                "classes in the same order"
            )
    convert: nn.Module = nn.Identity()
    if own is not None and colors not in (None, (own.mean, own.std)):
        mean, std, own_mean, own_std = map(torch.tensor, (*colors, own.mean, own.std))
        convert = Normalise(((mean - own_mean) / own_std).tolist(), (std / own_std).tolist())
    found = Distillation(teacher, taxonomy, loss_node, convert)
    try:
        for size in (data.img_size, *((each.side, each.side) for each in data.resized)):
            found.soft_targets(torch.zeros(1, data.in_chans, *size))
    except Exception as error:  # of any model
        raise ConfigError(
            f"{problem} cannot take the images of this run: {first_line(error)}"
        ) from error
    note = "" if isinstance(convert, nn.Identity) else ", with its own mean and std of images"
    return found.to(device), f"teacher: {name}{note}"


def _classes(levels: Sequence[Level]) -> list[str]:
    """The classes of all levels, for people."""
    return [f"{name!r} of level {level.name!r}" for level in levels for name in level.classes]


def _read_teacher(
    name: str, data: DataBundle, finest: Level
) -> tuple[nn.Module, tuple[Level, ...], Any]:
    """The model of a run or of timm, its levels, and mean and std of its images; None if not known."""
    path = Path(name).expanduser()
    if path.exists():
        saved = read_run(path)
        taxonomy, look = saved.spec.taxonomy, saved.spec.preprocessing
        return saved.model, taxonomy.levels if taxonomy else (), look and (look.mean, look.std)
    source = find_source(name)
    cfg = dict(source.cfg)
    labels = cfg.get("label_names")
    if not labels and (subset := infer_imagenet_subset(cfg)):
        labels = ImageNetInfo(subset).label_names()
    size = {"img_size": data.img_size} if cfg.get("fixed_input_size") else {}
    try:
        model = timm.create_model(source.name, pretrained=True, in_chans=data.in_chans, **size)
    except Exception as error:  # of the hub's client, of files, of shapes
        raise unusable_weights_error(source, error) from error
    images = resolve_data_config(pretrained_cfg=cfg)
    return model, (replace(finest, classes=tuple(labels or ())),), (images["mean"], images["std"])
