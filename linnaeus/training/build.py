"""Model, loss, optimizer and everything else that the training and the validation step need.

Runs, commands and benchmarks all call `assemble`, so that they run the same steps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import timm.layers
import torch
from torch import nn

from linnaeus.batch_plan.effective_batch import Facts
from linnaeus.config.instantiate import is_target
from linnaeus.config.schema import DistConfig, TrainConfig
from linnaeus.data.bundle import DataBundle, dataset_length
from linnaeus.data.taxonomy import UNKNOWN
from linnaeus.models.build import (
    batchnorm_kind,
    build_model,
    check_takes_sides,
    set_gradient_checkpointing,
)
from linnaeus.models.freeze import Freezing, build_freezing
from linnaeus.models.lora import check_lora
from linnaeus.models.timm_source import find_source
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import ConfigError
from linnaeus.training.accuracy import ClassificationMetrics, headline
from linnaeus.training.checkpoint import TrainingState
from linnaeus.training.class_weights import class_statistics
from linnaeus.training.ddp import BatchNormBroadcast
from linnaeus.training.distill import build_distillation, check_teacher
from linnaeus.training.ema import Ema
from linnaeus.training.losses import (
    SingleLevel,
    build_loss,
    gives_log_probabilities,
    trainable_parameters,
)
from linnaeus.training.optim import build_optimizer, check_optimizer_name, peak_values
from linnaeus.training.precision import build_precision
from linnaeus.training.resume import flat
from linnaeus.training.sharding import check_sharding, shard, shards_model
from linnaeus.training.step import TrainStep, ValidationStep
from linnaeus.version import __version__


def check_before_data(
    model: Any, optimizer: Any, config: TrainConfig, sharding: DistConfig, world: World
) -> None:
    """Check settings that need no data: MODEL, OPTIMIZER, TRAIN and DIST on this device and number of ranks.

    Raises:
        ConfigError: an unknown model or optimizer, LoRA beside FREEZE or without peft, SyncBatchNorm on the
            CPU, or a key that cannot be used with sharding.
    """
    check_sharding(sharding, config, world)
    if not is_target(model):
        find_source(model.NAME)
        check_lora(model, config.UNFREEZE_EPOCH)
        check_teacher(model.TEACHER)
    check_optimizer_name(optimizer)
    if config.SYNC_BATCHNORM and world.is_distributed and world.device.type == "cpu":
        raise ConfigError(
            "TRAIN.SYNC_BATCHNORM: True, but SyncBatchNorm needs an accelerator; set it False on the CPU"
        )
    if config.VALIDATE_EVERY_STEPS is not None and config.VALIDATE_EVERY != 1:
        raise ConfigError(
            f"TRAIN.VALIDATE_EVERY: {config.VALIDATE_EVERY} epochs and TRAIN.VALIDATE_EVERY_STEPS "
            f"{config.VALIDATE_EVERY_STEPS:g}; set one of them"
        )
    last = config.EMA.SWA_EPOCHS
    if last is not None and (config.MAX_STEPS is not None or last >= config.EPOCHS):
        raise ConfigError(
            f"TRAIN.EMA.SWA_EPOCHS: {last} last epochs are averaged; give TRAIN.EPOCHS above that, and no "
            "TRAIN.MAX_STEPS"
        )
    if (last is not None or config.EMA.VALIDATE_RAW) and not config.EMA.ENABLED:
        raise ConfigError(
            "TRAIN.EMA.ENABLED: False, but SWA_EPOCHS and VALIDATE_RAW need an average; set it True"
        )


def check_loss_takes_outputs(loss_node: Any, model: nn.Module) -> None:
    """Raise `ConfigError` for a loss that does not take the log-probabilities of a model."""
    sigmoids = ("bce", "asymmetric")
    if is_target(loss_node) or not gives_log_probabilities(model):
        return
    if loss_node.LOGIT_ADJUSTMENT:
        raise ConfigError(
            f"LOSS.LOGIT_ADJUSTMENT: {loss_node.LOGIT_ADJUSTMENT:g} balances the classes of each level, but "
            "with MODEL.HEAD 'marginal' a coarser level is the sum of the finest; set MODEL.HEAD independent"
        )
    if loss_node.NAME in sigmoids:
        raise ConfigError(
            f"LOSS.NAME: {loss_node.NAME!r} needs logits, but MODEL.HEAD 'marginal' gives log-probabilities; "
            "set MODEL.HEAD independent, or with one label in each level LOSS.NAME cross_entropy or focal"
        )


@dataclass(frozen=True)
class Assembly(TrainingState):
    """Parts of training, on its device.

    Attributes:
        freezing: parameters that do not train, or not yet.
        weights: one line that says which weights the model started with.
        best_metric: TRAIN.BEST_METRIC.
        teacher: one line on the teacher; None without.
    """

    metrics: ClassificationMetrics
    train_step: TrainStep
    validation_step: ValidationStep
    freezing: Freezing
    weights: str
    best_metric: str | None = None
    teacher: str | None = None

    @property
    def headline(self) -> str:
        """The metric that decides which checkpoint is best."""
        return self.best_metric or headline(self.metrics.names, self.criterion)


def assemble(
    model_node: Any,
    loss_node: Any,
    optimizer_node: Any,
    config: TrainConfig,
    data: DataBundle,
    world: World,
    *,
    load_weights: bool = True,
    sharding: DistConfig | None = None,
) -> Assembly:
    """Build everything that a step needs.

    Args:
        model_node, loss_node, optimizer_node: the nodes MODEL, LOSS and OPTIMIZER.
        config: the TRAIN node.
        data: its taxonomy and the shape of its inputs decide the model's outputs and inputs.
        world: the ranks and the device of training.
        load_weights: whether to load the weights that MODEL names; not where a checkpoint replaces them.
        sharding: the DIST node, if the model may be sharded over the ranks.

    Raises:
        ConfigError: a node that cannot be built.
    """
    device, taxonomy = world.device, data.taxonomy
    sides = [each.side for each in data.resized]
    shards = sharding if sharding is not None and shards_model(sharding, world) else None
    model, weights = build_model(
        model_node,
        taxonomy=taxonomy,
        in_chans=data.in_chans,
        img_size=data.img_size,
        load_weights=load_weights,
        sides=sides,
    )
    if sides:
        name = model_node["_target_"] if is_target(model_node) else model_node.NAME
        check_takes_sides(model, name, data.in_chans or 1, sides, "DATA.IMG_SIZE_SCHEDULE")
    check_loss_takes_outputs(loss_node, model)
    freezing = build_freezing(model_node, model, config.UNFREEZE_EPOCH)
    freezing.freeze()
    if config.GRADIENT_CHECKPOINTING:
        set_gradient_checkpointing(model)
    if config.SYNC_BATCHNORM and world.is_distributed:
        # torch's own conversion would drop the activation inside timm's BatchNormAct2d.
        timm.layers.convert_sync_batchnorm(model)
    average, callbacks = None, dict[str, Any]()
    if shards is not None:
        for split in (data.val, data.test):
            if split is not None and (length := dataset_length(split)) < world.world_size:
                raise ConfigError(
                    f"DIST.SHARDING: {shards.SHARDING!r} needs a validation sample for each of "
                    f"{world.world_size} ranks, but there are {length}; start fewer"
                )
        average = shard(model, shards, world, with_average=config.EMA.ENABLED)
        callbacks["BatchNorm"] = BatchNormBroadcast()
    else:
        memory_format = torch.channels_last if config.CHANNELS_LAST else torch.preserve_format
        model = model.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
    if config.COMPILE:
        model.compile(mode=config.COMPILE_MODE, dynamic=config.COMPILE_DYNAMIC)
    criterion = _build_criterion(loss_node, data, device)
    if shards is not None and trainable_parameters(criterion):
        raise ConfigError(
            f"DIST.SHARDING: {shards.SHARDING!r} cannot be used with the trainable parameters of "
            f"{loss_node['_target_']} (LOSS); set none, or put the parameters into the model"
        )
    distillation, teacher = build_distillation(model_node, loss_node, data, device)
    with freezing.unfrozen(only_if=freezing.keeps_optimizer_state):
        optimizer = build_optimizer(optimizer_node, model, trainable_parameters(criterion))
    ema = None
    if config.EMA.ENABLED:
        last = config.EMA.SWA_EPOCHS
        ema = Ema(model, config.EMA.DECAY, average, last and config.EPOCHS - last + 1)
    if ema is not None:
        callbacks["EMA"] = ema
    metrics = ClassificationMetrics(taxonomy).to(device)
    watched = {
        "TRAIN.BEST_METRIC": config.BEST_METRIC,
        "TRAIN.EARLY_STOPPING.METRIC": config.EARLY_STOPPING.METRIC,
    }
    if problems := [
        f"{key}: the validation of this run has no {wanted!r}; it has {', '.join(metrics.names)}"
        for key, wanted in watched.items()
        if wanted not in (None, *metrics.names)
    ]:
        raise ConfigError(problems)
    scaler = torch.amp.GradScaler(device.type, enabled=config.AMP == "fp16")
    precision = build_precision(config, device, data.on_device)
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
            distillation=distillation,
            callbacks=callbacks,
        ),
        validation_step=ValidationStep(
            model=ema.module if ema is not None else model,
            criterion=criterion,
            precision=precision,
            update_metrics=metrics.update,
        ),
        freezing=freezing,
        weights=weights,
        best_metric=config.BEST_METRIC,
        teacher=teacher,
    )


def _build_criterion(node: Any, data: DataBundle, device: torch.device) -> nn.Module:
    """The loss, on its device, with the class values that `LOSS` needs."""
    taxonomy = data.taxonomy
    statistics = None if is_target(node) or taxonomy is None else class_statistics(node, data)
    criterion = build_loss(node, taxonomy, device, statistics).to(device)
    if isinstance(criterion, SingleLevel) and taxonomy is not None and not taxonomy.is_multilabel:
        num_classes = len(taxonomy.levels[0].classes)
        criterion.check_takes_targets(num_classes, device, mixes=data.on_device.mixing is not None)
    elif isinstance(criterion, SingleLevel):
        for split in (data.train, data.val, data.test):
            labels = getattr(split, "targets", None)
            if isinstance(labels, torch.Tensor) and bool((labels == UNKNOWN).any()):
                name = type(criterion.loss).__name__
                raise ConfigError(
                    f"LOSS: {name} takes no unknown labels; LOSS.NAME bce leaves them out"
                )
    return criterion


def plan_facts(
    assembly: Assembly,
    model_node: Any,
    config: TrainConfig,
    *,
    max_micro_batch_size: int,
    world_size: int,
    num_samples: int,
    min_steps_per_epoch: int = 10,
) -> Facts:
    """The facts that the batch plan of a run starts from; see `Facts`.

    Args:
        assembly: the run's model and optimizer, before the learning rate is scaled.
        model_node, config: the nodes MODEL and TRAIN.
        max_micro_batch_size, world_size, num_samples, min_steps_per_epoch: as in `Facts`.
    """
    learning_rate, weight_decay = peak_values(assembly.optimizer)
    with assembly.freezing.unfrozen(only_if=assembly.freezing.ends_within(config.most_epochs)):
        batchnorm = batchnorm_kind(assembly.model)
        is_kept = "backbone" in getattr(
            assembly.model, "always_eval", ()
        )  # training cannot forget it
    if batchnorm == "local" and config.SYNC_BATCHNORM and world_size > 1:
        batchnorm = "synchronised"
    is_own = is_target(model_node)
    names_weights = (
        model_node.get("pretrained") if is_own else model_node.WEIGHTS or model_node.PRETRAINED
    )
    return Facts(
        max_micro_batch_size=max_micro_batch_size,
        world_size=world_size,
        num_samples=num_samples,
        min_steps_per_epoch=min_steps_per_epoch,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        batchnorm=batchnorm,
        pretrained=bool(names_weights) and not is_kept,
        pretrained_key="MODEL.WEIGHTS" if is_own or model_node.WEIGHTS else "MODEL.PRETRAINED",
    )


def configuration_facts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the configuration by key and the versions, which all ranks must have in common."""
    return {
        "version of Linnaeus": __version__,
        "version of torch": torch.__version__,
        **flat(config),
    }


def model_fingerprint(data: DataBundle, assembly: Assembly) -> dict[str, str]:
    """Return digests of samples, classes and parameters, which all ranks must have in common."""
    parameters = [
        (name, list(parameter.shape))
        for part in (assembly.model, assembly.criterion)
        for name, parameter in part.named_parameters()
    ]
    classes = (
        {}
        if data.taxonomy is None
        else {level.name: level.classes for level in data.taxonomy.levels}
    )
    return {
        "samples": str({name: dataset_length(split) for name, split in data.splits.items()}),
        "classes": f"{[len(names) for names in classes.values()]} {_digest(classes)}",
        "parameters": f"{len(parameters)} {_digest(parameters)}",
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:8]
