"""Builds the network of the MODEL node."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import timm
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # no public class is the base of all

from linnaeus.autobatch.state.rng import preserved_generators
from linnaeus.config.instantiate import call_target, is_target
from linnaeus.config.schema import ModelConfig
from linnaeus.data.taxonomy import UNKNOWN, Taxonomy
from linnaeus.models.hierarchical import HierarchicalClassifier
from linnaeus.models.lora import add_adapters
from linnaeus.models.timm_source import (
    Source,
    check_weights_exist,
    find_source,
    unusable_weights_error,
)
from linnaeus.models.weights import (
    SavedWeights,
    load_backbone,
    load_heads,
    missing_tensors,
    read_weights,
)
from linnaeus.runtime.errors import ConfigError, first_line

_OTHER_KEYS = {"pretrained": "MODEL.PRETRAINED", "checkpoint_path": "MODEL.WEIGHTS"}
"""Arguments of `timm.create_model` that have a key of their own."""

_ANY_SIZE = {"dynamic_img_size": True, "strict_img_size": False}
"""Arguments of timm's models with a fixed size that make them take others."""


def build_model(
    node: Any,
    *,
    taxonomy: Taxonomy | None,
    in_chans: int | None,
    img_size: tuple[int, int] | None,
    load_weights: bool = True,
    sides: Sequence[int] = (),
) -> tuple[nn.Module, str]:
    """Build the network on the CPU, and say in one line which weights it has.

    Args:
        node: `ModelConfig`, or a `_target_` node. The user's callable is offered `num_classes` (an int for
            one level, else {name of the level: int}), `in_chans` and `img_size` if its signature names them.
        taxonomy: levels of the labels; None where a user's dataset declares none.
        in_chans, img_size: channels, height and width of the images; None where inputs are not images.
        load_weights: whether to load the weights that the node names; without, they are random, and nothing
            is read or downloaded for them.
        sides: of DATA.IMG_SIZE_SCHEDULE. A model of timm with a fixed size becomes one that takes several,
            with the same parameters.

    Raises:
        ConfigError: an unknown model, weights that do not load, or images that the model cannot take.
    """
    if is_target(node):
        offer: dict[str, Any] = {"in_chans": in_chans, "img_size": img_size}
        if taxonomy is not None:
            counts = taxonomy.num_classes
            offer["num_classes"] = counts if len(counts) > 1 else next(iter(counts.values()))
        known = {name: value for name, value in offer.items() if value is not None}
        own = call_target(node, "MODEL", offer=known)
        if not isinstance(own, nn.Module):
            raise ConfigError(
                f"MODEL: {node['_target_']} gave a {type(own).__name__}, not an nn.Module"
            )
        return own, f"weights: as {node['_target_']} makes them"
    own_model = "or name your own model in MODEL._target_"
    if taxonomy is None:
        raise ConfigError(
            "MODEL: a timm model needs class labels; give the dataset `classes` (or `num_classes`), "
            f"{own_model}"
        )
    if in_chans is None or img_size is None:
        raise ConfigError(
            "MODEL: a timm model needs images of one size; let the dataset give Pillow images, or tensors "
            f"[channels, height, width] that have one shape, {own_model}"
        )
    backbone, source, saved = _backbone(
        node, in_chans, img_size, load_weights, is_resized=bool(sides)
    )
    add_adapters(backbone, node.LORA)
    num_features = _probe(node.NAME, backbone, in_chans, img_size)
    num_classes = list(taxonomy.num_classes.values())
    parents = _known_parents(taxonomy) if node.HEAD == "marginal" else None
    model = HierarchicalClassifier(backbone, num_features, num_classes, node.DROP_RATE, parents)
    new = list(taxonomy.num_classes) if saved is None else load_heads(model, saved, taxonomy)
    num_new = min(len(new), 1) if node.HEAD == "marginal" else len(new)
    copied = [level for level in taxonomy.num_classes if level not in new]
    heads = [f"new {_heads(new, taxonomy)}"] if new else []
    if saved is not None and copied:
        by = "class names" if saved.classes else "number of classes: the file does not name them"
        heads.insert(0, f"{_heads(copied, taxonomy)} copied by {by}")
    if saved is not None:
        num_tensors = sum(".lora_" not in name for name in model.state_dict())
        note = f" ({saved.note})" if saved.note else ""
        loaded = f"{num_tensors - 2 * num_new} tensors of {saved.path}{note}"  # a head has two
    elif node.PRETRAINED and load_weights:
        loaded = source.origin
    elif source.kind or "." in source.name:
        return (
            model,
            f"weights: random ({node.NAME} names weights that only MODEL.PRETRAINED True loads)",
        )
    else:
        return model, "weights: random"
    return model, "; ".join([f"weights: {loaded}", *heads])


def _heads(levels: Collection[str], taxonomy: Taxonomy) -> str:
    of = f" of {', '.join(levels)}" if len(taxonomy.levels) > 1 else ""
    return f"{'head' if len(levels) == 1 else 'heads'}{of}"


def set_gradient_checkpointing(model: nn.Module, enable: bool = True) -> None:
    """Make the model recompute activations in the backward pass, or no longer.

    Raises:
        ConfigError: when the model has no such switch.
    """
    target: Any = getattr(model, "backbone", model)
    try:
        target.set_grad_checkpointing(enable)
    except (AttributeError, AssertionError) as error:
        raise ConfigError(
            "TRAIN.GRADIENT_CHECKPOINTING: True, but this model has no gradient checkpointing "
            f"(set_grad_checkpointing: {error})"
        ) from error


def _known_parents(taxonomy: Taxonomy) -> tuple[tuple[int, ...], ...]:
    """Return the parents. Each level must know at least one."""
    for above, level, row in zip(
        taxonomy.levels, taxonomy.levels[1:], taxonomy.parents, strict=False
    ):
        if max(row) == UNKNOWN:
            raise ConfigError(
                f"MODEL.HEAD: 'marginal' adds up classes under their parents, but no class of level "
                f"{level.name!r} has a known parent in level {above.name!r}; give the dataset a `taxonomy` "
                "with `parents`, order its levels from coarse to fine, or set MODEL.HEAD independent"
            )
    return taxonomy.parents


def _backbone(
    node: ModelConfig,
    in_chans: int,
    img_size: tuple[int, int],
    load_weights: bool,
    *,
    is_resized: bool = False,
) -> tuple[nn.Module, Source, SavedWeights | None]:
    """Return the backbone, its source in timm, and the tensors read from a file, if any."""
    for argument in _OTHER_KEYS.keys() & node.KWARGS.keys():
        raise ConfigError(
            f"MODEL.KWARGS.{argument}: {node.KWARGS[argument]!r}; use {_OTHER_KEYS[argument]} instead"
        )
    if node.PRETRAINED and node.WEIGHTS is not None:
        raise ConfigError(
            f"MODEL.WEIGHTS: {node.WEIGHTS!r}, but MODEL.PRETRAINED is True too; keep one of them: "
            "MODEL.WEIGHTS null or MODEL.PRETRAINED False"
        )
    source = find_source(node.NAME)
    if node.PRETRAINED and load_weights:
        check_weights_exist(source)
    arguments: dict[str, Any] = (
        {"drop_path_rate": node.DROP_PATH_RATE} if node.DROP_PATH_RATE else {}
    )
    if source.cfg.get("fixed_input_size"):
        arguments["img_size"] = img_size
    arguments |= node.KWARGS
    before = torch.get_rng_state()

    def create(**more: Any) -> nn.Module:
        torch.set_rng_state(before)
        with _quiet_timm():
            return timm.create_model(  # type: ignore[no-any-return]
                source.name, num_classes=0, in_chans=in_chans, **arguments, **more
            )

    if is_resized and "img_size" in arguments:
        for name, value in _ANY_SIZE.items():
            with suppress(TypeError):  # the model has no such argument
                create(**{name: value})
                arguments[name] = value
                break
    try:
        backbone = create()
    except Exception as error:
        raise ConfigError(
            f"MODEL: timm cannot build {node.NAME!r} with {arguments}: {error}"
        ) from error
    if load_weights and node.WEIGHTS is not None:
        saved = read_weights(node.WEIGHTS, backbone.state_dict().keys())
        return load_backbone(saved, node.NAME, backbone, create), source, saved
    if not (load_weights and node.PRETRAINED):
        return backbone, source, None
    try:
        pretrained = create(pretrained=True)
    except Exception as error:  # of the hub's client, of files, of shapes
        raise unusable_weights_error(source, error) from error
    missed = missing_tensors(pretrained, backbone)
    if missed:
        raise unusable_weights_error(
            source, ValueError(f"parameters such as {missed[0]!r} are missing")
        )
    return pretrained, source, None


@contextmanager
def _quiet_timm() -> Iterator[None]:
    """Keep back timm's warnings: of a file that does not fit, one lists all names."""
    logger = logging.getLogger("timm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


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


def check_takes_sides(
    model: nn.Module, name: str, in_chans: int, sides: Iterable[int], key: str
) -> None:
    """Raise `ConfigError`, which names the key or option, for a side that the model does not take."""
    model.eval()
    for side in sides:
        try:
            with torch.no_grad(), preserved_generators():
                model(torch.zeros(1, in_chans, side, side))
        except Exception as error:
            raise ConfigError(
                f"{key}: {name} cannot take images of side {side}: "
                f"{first_line(error)}. Choose multiples of its patch or stride, or a MODEL.NAME "
                "that takes several sizes: a convolutional network, or a ViT or Swin of timm"
            ) from error
    model.train()


def batchnorm_kind(model: nn.Module) -> str:
    """How BatchNorm takes its statistics: `local`, `synchronised` over ranks, or `none` at all."""
    frozen = tuple(f"{name}." for name in getattr(model, "always_eval", ()))
    kinds = [
        module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not f"{name}.".startswith(frozen)
    ]
    if not kinds:
        return "none"
    return (
        "synchronised" if all(isinstance(module, nn.SyncBatchNorm) for module in kinds) else "local"
    )
