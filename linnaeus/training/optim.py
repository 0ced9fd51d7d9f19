"""The optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import timm.optim
import torch
from torch import nn

from linnaeus.config.instantiate import call_target, is_target
from linnaeus.config.keys import suggest
from linnaeus.runtime.errors import ConfigError


def build_optimizer(
    node: Any, model: nn.Module, loss_parameters: Sequence[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """Build the optimizer over the trainable parameters of the model and of the loss.

    Args:
        node: `OptimizerConfig` (timm's factory: no weight decay on biases, norms and the model's
            `no_weight_decay` names), or a `_target_` node of a callable that takes the parameters first.
            A group's `lr_scale`, if it has one, is applied by the schedule.
        model: without DistributedDataParallel.
        loss_parameters: become the last group, without weight decay.

    Raises:
        ConfigError: an unknown optimizer, arguments that it does not accept, or one that differentiates the
            gradients again.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("MODEL: it has no trainable parameter")
    if is_target(node):
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = call_target(node, "OPTIMIZER", parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"OPTIMIZER: {node['_target_']} is not a torch.optim.Optimizer")
    else:
        optimizer = _from_timm(node, model)
    if loss_parameters:
        no_decay = {"weight_decay": 0.0} if "weight_decay" in optimizer.defaults else {}
        optimizer.add_param_group({"params": list(loss_parameters), **no_decay})
    if not is_target(node) and getattr(optimizer, "is_second_order", False):
        raise ConfigError(
            f"OPTIMIZER.NAME: {node.NAME!r} differentiates the gradients again (`create_graph`), which the "
            "training step does not prepare; choose another"
        )
    return optimizer


def check_optimizer_name(node: Any) -> None:
    """Raise `ConfigError` if an `OptimizerConfig` names no optimizer of timm."""
    names = timm.optim.list_optimizers()
    if not is_target(node) and node.NAME.lower() not in names:
        hint = suggest(node.NAME.lower(), names, most=3, cutoff=0.6)
        raise ConfigError(f"OPTIMIZER.NAME: {node.NAME!r} is not an optimizer of timm{hint}")


def _from_timm(node: Any, model: nn.Module) -> torch.optim.Optimizer:
    check_optimizer_name(node)
    arguments = dict(node.KWARGS)
    if node.LAYER_DECAY is not None:
        backbone = getattr(model, "backbone", model)
        if not hasattr(backbone, "group_matcher") or not hasattr(model, "group_matcher"):
            raise ConfigError(  # timm would take a guess
                f"OPTIMIZER.LAYER_DECAY: {node.LAYER_DECAY}, but {type(backbone).__name__} has no "
                "method group_matcher, which names the layers of a model, as in timm's models; leave it "
                "null"
            )
        arguments["layer_decay"] = node.LAYER_DECAY
    heads = getattr(model, "heads", None)
    if node.HEAD_LR_SCALE != 1 and heads is None:
        raise ConfigError(
            f"OPTIMIZER.HEAD_LR_SCALE: {node.HEAD_LR_SCALE}, but {type(model).__name__} has no `heads`; "
            "leave it at 1"
        )
    try:
        optimizer: torch.optim.Optimizer = timm.optim.create_optimizer_v2(
            model, opt=node.NAME, lr=node.LR, weight_decay=node.WEIGHT_DECAY, **arguments
        )
    except Exception as error:
        raise ConfigError(f"OPTIMIZER: {node.NAME!r} with KWARGS {node.KWARGS}: {error}") from error
    if node.HEAD_LR_SCALE != 1 and isinstance(heads, nn.Module):
        _scale_rate(optimizer, set(heads.parameters()), node.HEAD_LR_SCALE)
    return optimizer


def _scale_rate(
    optimizer: torch.optim.Optimizer, parameters: set[nn.Parameter], scale: float
) -> None:
    """Give some parameters a multiple of the learning rate, in groups of their own after those they left."""
    groups = []
    for group in optimizer.param_groups:
        chosen = [parameter for parameter in group["params"] if parameter in parameters]
        others = [parameter for parameter in group["params"] if parameter not in parameters]
        if others:
            groups.append({**group, "params": others})
        if chosen:
            groups.append(
                {**group, "params": chosen, "lr_scale": scale * group.get("lr_scale", 1.0)}
            )
    optimizer.param_groups[:] = groups


def peak_values(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Learning rate of the first parameter group, and the largest weight decay of all groups."""
    groups = optimizer.param_groups
    return float(groups[0].get("lr", 0.0)), max(
        float(group.get("weight_decay", 0.0)) for group in groups
    )


def scale_values(
    optimizer: torch.optim.Optimizer, *, lr_scale: float, weight_decay_scale: float
) -> None:
    """Multiply every group's learning rate and weight decay; a factor of 1 changes no bit."""
    for group in optimizer.param_groups:
        for name, scale in (("lr", lr_scale), ("weight_decay", weight_decay_scale)):
            if scale != 1:
                group[name] *= scale
