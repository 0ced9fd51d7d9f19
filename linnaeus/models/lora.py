"""Low-rank adapters on a frozen backbone, by peft (MODEL.LORA); Hu et al. 2021, LoRA, section 4."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from linnaeus.config.instantiate import is_target
from linnaeus.config.schema import LoraConfig
from linnaeus.runtime.errors import ConfigError


def check_lora(node: Any, unfreeze_epoch: int | None) -> None:
    """Raise `ConfigError` for a key that MODEL.LORA excludes, and where peft is not installed."""
    if is_target(node) or LoraConfig() == node.LORA:
        return
    if node.LORA.RANK is None:
        raise ConfigError("MODEL.LORA: other keys are set, but RANK is null; set MODEL.LORA.RANK")
    if node.FREEZE != "none" or unfreeze_epoch is not None:
        raise ConfigError(
            f"MODEL.LORA.RANK: {node.LORA.RANK} freezes the backbone in all epochs, but MODEL.FREEZE is "
            f"{node.FREEZE} and TRAIN.UNFREEZE_EPOCH {unfreeze_epoch}; set them none and null"
        )
    if find_spec("peft") is None:
        raise ConfigError("MODEL.LORA.RANK: peft is not installed: pip install 'linnaeus[lora]'")


def add_adapters(backbone: nn.Module, node: LoraConfig) -> None:
    """Put adapters beside the layers of TARGETS.

    Raises:
        ConfigError: a pattern names no linear layer.
    """
    if node.RANK is None:
        return
    import peft  # here: transformers, which it imports, takes seconds

    linear = [name for name, module in backbone.named_modules() if isinstance(module, nn.Linear)]
    ends = ", ".join(list(dict.fromkeys(name.rpartition(".")[2] for name in linear))[:12]) or "none"
    chosen = set[str]()
    for pattern in node.TARGETS:
        named = {
            name
            for name in linear
            if f".{name}".endswith(f".{pattern}") or fnmatchcase(name, pattern)
        }
        if not named:
            found = f"names no linear layer; the model has {ends}. Name those, or leave MODEL.LORA.RANK out"
            raise ConfigError(f"MODEL.LORA.TARGETS: {pattern!r} {found}")
        chosen |= named
    trainable = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
    config = peft.LoraConfig(
        r=node.RANK,
        lora_alpha=node.ALPHA or node.RANK,
        lora_dropout=node.DROPOUT,
        target_modules=chosen,
    )
    peft.inject_adapter_in_model(config, backbone)
    for parameter in trainable:  # peft has frozen them, which is for `Freezing` to do
        parameter.requires_grad_()


def merged_weights(state: Mapping[str, Tensor], node: LoraConfig) -> dict[str, Tensor]:
    """The weights W [out, in] without the adapters B [out, RANK] and A [RANK, in]: W + ALPHA / RANK * B A."""
    rank = node.RANK or 1
    merged = {
        name.replace(".base_layer.", "."): each
        for name, each in state.items()
        if ".lora_" not in name
    }
    for name, down in state.items():
        layer, is_adapter, end = name.partition(".lora_A.")
        if is_adapter:
            up = state[f"{layer}.lora_B.{end}"]
            merged[f"{layer}.weight"] = (
                merged[f"{layer}.weight"] + (node.ALPHA or rank) / rank * up @ down
            )
    return merged
