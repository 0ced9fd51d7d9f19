"""Builds the network of the MODEL node."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from linnaeus.config.instantiate import call_target, is_target
from linnaeus.config.schema import ModelConfig
from linnaeus.data.taxonomy import UNKNOWN, Taxonomy
from linnaeus.errors import ConfigError
from linnaeus.models.hierarchical import HierarchicalClassifier


def build_model(
    node: Any, *, taxonomy: Taxonomy | None, in_chans: int | None, img_size: tuple[int, int] | None
) -> nn.Module:
    """Build the network on the CPU.

    Args:
        node: `ModelConfig`, or a `_target_` node. The user's callable is offered `num_classes` (an int for
            one level, else {name of the level: int}), `in_chans` and `img_size` if its signature names them.
        taxonomy: levels of the labels; None where a user's dataset declares none.
        in_chans: channels of the images; None where inputs are not images.
        img_size: height and width of the images, in pixels; None where inputs are not images.

    Raises:
        ConfigError: an unknown model, weights that do not load, or images that the model cannot take.
    """
    if is_target(node):
        return _custom_model(node, taxonomy, in_chans, img_size)
    if taxonomy is None or in_chans is None or img_size is None:
        raise ConfigError(
            "MODEL: a timm model needs a dataset of images with class labels; "
            "give the dataset `classes` (or `num_classes`), or name your own model in MODEL._target_"
        )
    backbone = _backbone(node, in_chans, img_size)
    num_features = _probe(node.NAME, backbone, in_chans, img_size)
    parents = _known_parents(taxonomy) if node.HEAD == "marginal" else None
    return HierarchicalClassifier(
        backbone, num_features, list(taxonomy.num_classes.values()), node.DROP_RATE, parents
    )


def set_gradient_checkpointing(model: nn.Module) -> None:
    """Make the model recompute activations in the backward pass.

    Raises:
        ConfigError: when the model has no such switch.
    """
    target: Any = getattr(model, "backbone", model)
    try:
        target.set_grad_checkpointing(True)
    except (AttributeError, AssertionError) as error:
        raise ConfigError(
            "TRAIN.GRADIENT_CHECKPOINTING: True, but this model has no gradient checkpointing "
            f"(set_grad_checkpointing: {error})"
        ) from error


def has_gradient_checkpointing(model: nn.Module) -> bool:
    """Whether `set_gradient_checkpointing` would take effect. The model's switch is off afterwards."""
    try:
        set_gradient_checkpointing(model)
    except ConfigError:
        return False
    target: Any = getattr(model, "backbone", model)
    target.set_grad_checkpointing(False)
    return True


def _known_parents(taxonomy: Taxonomy) -> tuple[tuple[int, ...], ...]:
    """The parents, of which each level must know at least one."""
    for above, level, row in zip(taxonomy.levels, taxonomy.levels[1:], taxonomy.parents, strict=False):
        if max(row) == UNKNOWN:
            raise ConfigError(
                f"MODEL.HEAD: 'marginal' adds up classes under their parents, but no class of rank "
                f"{level.name!r} has a known parent in rank {above.name!r}; give the dataset a `taxonomy` "
                "with `parents`, order its ranks from coarse to fine, or set MODEL.HEAD independent"
            )
    return taxonomy.parents


def _custom_model(
    node: Any, taxonomy: Taxonomy | None, in_chans: int | None, img_size: tuple[int, int] | None
) -> nn.Module:
    offer: dict[str, Any] = {"in_chans": in_chans, "img_size": img_size}
    if taxonomy is not None:
        counts = taxonomy.num_classes
        offer["num_classes"] = counts if len(counts) > 1 else next(iter(counts.values()))
    known = {name: value for name, value in offer.items() if value is not None}
    model = call_target(node, "MODEL", offer=known)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"MODEL: {node['_target_']} gave a {type(model).__name__}, not an nn.Module")
    return model


def _backbone(config: ModelConfig, in_chans: int, img_size: tuple[int, int]) -> nn.Module:
    if not timm.is_model(config.NAME):
        close = difflib.get_close_matches(config.NAME, timm.list_models(), n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else "; `timm.list_models()` lists them"
        raise ConfigError(f"MODEL.NAME: {config.NAME!r} is not a timm model{hint}")
    arguments: dict[str, Any] = {"drop_path_rate": config.DROP_PATH_RATE} if config.DROP_PATH_RATE else {}
    pretrained_cfg = timm.get_pretrained_cfg(config.NAME, allow_unregistered=False)
    if pretrained_cfg is not None and pretrained_cfg.fixed_input_size:
        arguments["img_size"] = img_size
    arguments |= config.KWARGS
    create = partial(timm.create_model, config.NAME, num_classes=0, in_chans=in_chans, **arguments)
    before = torch.get_rng_state()
    try:
        backbone: nn.Module = create()
    except Exception as error:
        raise ConfigError(f"MODEL: timm cannot build {config.NAME!r} with {arguments}: {error}") from error
    if config.WEIGHTS is None:
        return backbone
    torch.set_rng_state(before)
    return _with_weights(config, create, untrained=backbone)


def _with_weights(config: ModelConfig, create: Callable[..., nn.Module], untrained: nn.Module) -> nn.Module:
    """The backbone with the weights of a file, which timm adapts to the channels and the size of the images.

    timm loads the tensors whose names match and is silent about the others, so a file of another model would
    go unnoticed. `untrained` is the same network from the same random numbers: a parameter that equals its
    own was not loaded.
    """
    if not Path(str(config.WEIGHTS)).is_file():
        raise ConfigError(f"MODEL.WEIGHTS: {config.WEIGHTS!r} is not a file")
    problem = f"MODEL.WEIGHTS: {config.WEIGHTS!r} does not load into {config.NAME!r}: "
    try:
        backbone = create(pretrained=True, pretrained_cfg_overlay={"file": config.WEIGHTS})
    except Exception as error:
        raise ConfigError(f"{problem}{type(error).__name__}: {error}") from error
    initial = dict(untrained.named_parameters())
    missed = [
        name
        for name, parameter in backbone.named_parameters()
        if parameter.requires_grad and torch.equal(parameter, initial[name]) and len(parameter.unique()) > 1
    ]
    if missed:
        raise ConfigError(f"{problem}{len(missed)} parameters are not in the file, such as {missed[0]!r}")
    return backbone


def _probe(name: str, backbone: nn.Module, in_chans: int, img_size: tuple[int, int]) -> int:
    """Number of pooled features, from a forward pass of one image in eval mode."""
    backbone.eval()
    try:
        with torch.no_grad():
            features = backbone(torch.zeros(1, in_chans, *img_size))
    except Exception as error:
        shape = f"{in_chans}×{img_size[0]}×{img_size[1]}"
        raise ConfigError(
            f"MODEL.NAME: {name!r} cannot take images of {shape} (DATA.IMG_SIZE): {error}"
        ) from error
    finally:
        backbone.train()
    return int(features.shape[-1])


def batchnorm_kind(model: nn.Module) -> str:
    """How BatchNorm takes its statistics: `local` or `synchronised` over processes; `none` without it."""
    kinds = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if not kinds:
        return "none"
    return "synchronised" if all(isinstance(module, nn.SyncBatchNorm) for module in kinds) else "local"
