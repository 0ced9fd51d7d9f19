"""Model, loss, optimizer and all else that the two steps need, put together once.

The trainer, AutoBatch, the tools and the benchmarks start from here, so that all of them run the same step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from linnaeus.config.schema import Config, TrainConfig
from linnaeus.data.bundle import DataBundle
from linnaeus.data.taxonomy import Taxonomy
from linnaeus.models.build import build_model, set_gradient_checkpointing
from linnaeus.training.ema import Ema
from linnaeus.training.losses import build_loss
from linnaeus.training.metrics import ClassificationMetrics
from linnaeus.training.optim import build_optimizer
from linnaeus.training.step import Precision, TrainStep, ValidationStep

_AUTOCAST = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Assembly:
    """What training needs, on its device and without a wrapper.

    Attributes:
        model: the module that trains.
        ema: its average; validation uses it where there is one.
    """

    model: nn.Module
    criterion: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: Ema | None
    metrics: ClassificationMetrics
    train_step: TrainStep
    validation_step: ValidationStep

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything that a step may change."""
        return (self.model, self.criterion, self.optimizer, self.scaler, self.ema)


def assemble(
    *,
    model_node: Any,
    loss_node: Any,
    optimizer_node: Any,
    config: TrainConfig,
    taxonomy: Taxonomy | None,
    in_chans: int | None,
    img_size: tuple[int, int] | None,
    device: torch.device,
) -> Assembly:
    """Build everything that a step needs.

    Args:
        model_node, loss_node, optimizer_node: the nodes MODEL, LOSS and OPTIMIZER.
        config: the TRAIN node.
        taxonomy: ranks of the labels; None when a user's dataset has none.
        in_chans: channels of the images.
        img_size: [height, width] of the images.
        device: where training runs.

    Raises:
        ConfigError: a node that cannot be built.
    """
    model = build_model(model_node, taxonomy=taxonomy, in_chans=in_chans, img_size=img_size)
    if config.GRADIENT_CHECKPOINTING:
        set_gradient_checkpointing(model)
    memory_format = torch.channels_last if config.CHANNELS_LAST else torch.preserve_format
    model = model.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
    if config.COMPILE:
        model.compile()
    criterion = build_loss(loss_node, taxonomy).to(device)
    optimizer = build_optimizer(optimizer_node, model)
    ema = Ema(model, config.EMA.DECAY) if config.EMA.ENABLED else None
    metrics = ClassificationMetrics(taxonomy).to(device)
    scaler = torch.amp.GradScaler(device.type, enabled=config.AMP == "fp16")
    precision = Precision(device, _AUTOCAST[config.AMP], channels_last=config.CHANNELS_LAST)
    return Assembly(
        model=model,
        criterion=criterion,
        optimizer=optimizer,
        scaler=scaler,
        ema=ema,
        metrics=metrics,
        train_step=TrainStep(
            model=model,
            criterion=criterion,
            optimizer=optimizer,
            scaler=scaler,
            precision=precision,
            clip_grad_norm=config.CLIP_GRAD_NORM,
            after_step=ema.update if ema is not None else None,
        ),
        validation_step=ValidationStep(
            model=ema.module if ema is not None else model,
            criterion=criterion,
            precision=precision,
            update_metrics=metrics.update,
        ),
    )


def assemble_for(config: Config, data: DataBundle, device: torch.device) -> Assembly:
    """What the whole configuration asks for, on its data.

    Raises:
        ConfigError: a node that cannot be built.
    """
    return assemble(
        model_node=config.MODEL,
        loss_node=config.LOSS,
        optimizer_node=config.OPTIMIZER,
        config=config.TRAIN,
        taxonomy=data.taxonomy,
        in_chans=data.in_chans,
        img_size=data.img_size,
        device=device,
    )
