"""The parts of a run, built in its order: checks, checkpoint, data and model, trainer."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from linnaeus.config.schema import Config, DataConfig
from linnaeus.data.bundle import DataBundle
from linnaeus.data.datasets import build_data, check_sides, resized_data
from linnaeus.data.loader import build_loaders, with_num_workers
from linnaeus.data.mixing import mixed_epochs
from linnaeus.models.preprocessing import with_preprocessing
from linnaeus.runtime.console import ProgressBar
from linnaeus.runtime.context import RunContext
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.files import CHECKPOINTS, RESULT
from linnaeus.runtime.rng import derive_seed, seed_all
from linnaeus.runtime.run_folder import RunFolder
from linnaeus.training.build import (
    Assembly,
    assemble,
    check_before_data,
    configuration_facts,
    model_fingerprint,
)
from linnaeus.training.callbacks import build_callbacks
from linnaeus.training.checkpoint import Checkpoint, CheckpointFolder, TrainingProgress
from linnaeus.training.ddp import wrap
from linnaeus.training.optim import scale_values
from linnaeus.training.out_of_memory import SizeOrigin
from linnaeus.training.recording import RunRecording
from linnaeus.training.report import report_start, uneven_classes
from linnaeus.training.resume import (
    changed_samples,
    check_classes,
    find_checkpoint,
    is_finished,
    resumed_nodes,
    resumed_progress,
)
from linnaeus.training.schedule import Schedule
from linnaeus.training.sharding import sharding_sentence, shards_model
from linnaeus.training.stop import StopAgreement
from linnaeus.training.tracking import check_loggers
from linnaeus.training.trainer import Trainer

_RESUMED_WEIGHTS = "weights: from this run's checkpoint, in place of MODEL's"

logger = logging.getLogger("linnaeus.run")


def check_start(config: Config, world: World) -> dict[str, Any]:
    """Check settings that need neither folder nor data; return the callbacks of the user. Collective.

    Raises:
        LinnaeusError: ranks have different configurations, or one cannot be used.
    """
    world.check_equal(configuration_facts(dataclasses.asdict(config)))
    check_before_data(config.MODEL, config.OPTIMIZER, config.TRAIN, config.DIST, world)
    check_sides(config.DATA, config.TRAIN)
    world.on_main(partial(check_loggers, config.EXPERIMENT.LOGGERS))
    mixed_epochs(
        config.DATA.AUGMENT, config.TRAIN.most_epochs
    )  # an error must show before the search
    return build_callbacks(config.TRAIN.CALLBACKS)


def checkpoints_of(config: Config, folder: RunFolder, world: World) -> CheckpointFolder:
    """Return the checkpoints of a run."""
    if world.is_main:
        logger.info("run directory: %s", folder.path)
        logger.info("training on %s", world)
    return CheckpointFolder(
        folder.path / CHECKPOINTS,
        keep=config.TRAIN.KEEP_CHECKPOINTS,
        keep_best=config.TRAIN.KEEP_BEST > 0,
        check=folder.check,
        is_sharded=shards_model(config.DIST, world),
        # On the CPU the copy would take memory that AutoBatch counts.
        background=world.device.type != "cpu",
    )


def resumed_checkpoint(
    config: Config, checkpoints: CheckpointFolder, folder: RunFolder, world: World
) -> Checkpoint | None:
    """Return the checkpoint to resume from; None without TRAIN.AUTO_RESUME or a checkpoint. Collective."""
    if not config.TRAIN.AUTO_RESUME:
        return None
    checkpoint = find_checkpoint(
        checkpoints, resumed_nodes(config), config.TRAIN.RESUME_WITH, world
    )
    if checkpoint is not None and folder.claim is not None:
        folder.claim.check_id(checkpoint.entries["run"], checkpoints.last)
    return checkpoint


def finished_progress(
    config: Config, checkpoint: Checkpoint | None, world: World
) -> TrainingProgress | None:
    """Return the progress of a run with nothing left to train; else None. Collective."""
    if checkpoint is None:
        return None
    stopping = config.TRAIN.EARLY_STOPPING
    progress = resumed_progress(checkpoint.entries, checkpoint.entries["headline"], stopping)
    result = config.EXPERIMENT.folder / RESULT
    return progress if is_finished(progress, config.TRAIN, result, world) else None


@dataclass(frozen=True)
class Setup:
    """The data and the model of a run, as new or as in its checkpoint.

    Attributes:
        config: with the preprocessing of the weights.
        loading: its DATA node with the number of loader workers that was measured.
        progress: how far training has come.
    """

    config: Config
    data: DataBundle
    assembly: Assembly
    progress: TrainingProgress
    loading: DataConfig


def with_overfit_limit(config: Config, world: World) -> DataConfig:
    """Return the DATA node, limited to the samples of TRAIN.OVERFIT_BATCHES.

    Raises:
        ConfigError: another key decides which samples train, or how many a batch has.
    """
    train, data = config.TRAIN, config.DATA
    if train.OVERFIT_BATCHES is None:
        return data
    others = {
        "DATA.LIMIT_TRAIN_SAMPLES": data.LIMIT_TRAIN_SAMPLES is not None,
        "DATA.LIMIT_VAL_SAMPLES": data.LIMIT_VAL_SAMPLES is not None,
        "DATA.SAMPLER balanced": data.SAMPLER == "balanced",
        "DATA.AUTOBATCH.ENABLED": data.AUTOBATCH.ENABLED,
        "TRAIN.BATCH_SCHEDULE": train.BATCH_SCHEDULE.NAME != "constant",
    }
    if wrong := [key for key, is_set in others.items() if is_set]:
        raise ConfigError(
            f"TRAIN.OVERFIT_BATCHES: {train.OVERFIT_BATCHES} cannot be used with {', '.join(wrong)}; leave "
            "one out"
        )
    batch = data.BATCH_SIZE * world.world_size * train.ACCUMULATION_STEPS
    num_samples = train.OVERFIT_BATCHES * (train.EFFECTIVE_BATCH_SIZE or batch)
    return dataclasses.replace(data, LIMIT_TRAIN_SAMPLES=num_samples)


def build_setup(config: Config, world: World, checkpoint: Checkpoint | None) -> Setup:
    """Build data and model, restore the checkpoint, and log the start of the run. Collective."""
    data_node, note = with_preprocessing(
        config.DATA, config.MODEL, None if checkpoint is None else checkpoint.config
    )
    config = dataclasses.replace(config, DATA=data_node)
    train, seed, folder = config.TRAIN, config.EXPERIMENT.SEED, config.EXPERIMENT.folder
    seed_all(seed)
    world.update("building data and model")
    data = build_data(with_overfit_limit(config, world), seed=seed, on_main=world.on_main)
    data.resized = resized_data(data, config.DATA)
    if train.OVERFIT_BATCHES is not None:
        transform = data.val.transform  # type: ignore[attr-defined]
        data.val = copy.copy(data.train)
        data.val.transform = transform  # type: ignore[attr-defined]
    if checkpoint is not None:
        check_classes(checkpoint.entries["model_spec"], data.taxonomy, folder)
        checkpoint.changes += world.on_main(partial(changed_samples, checkpoint, data, folder))
    assembly = assemble(
        config.MODEL,
        config.LOSS,
        config.OPTIMIZER,
        train,
        data,
        world,
        load_weights=checkpoint is None,
        sharding=config.DIST,
    )
    world.check_equal(model_fingerprint(data, assembly))
    progress, weights = TrainingProgress(), assembly.weights
    if checkpoint is not None:
        checkpoint.restore(assembly, world)
        weights = _RESUMED_WEIGHTS
        progress = resumed_progress(checkpoint.entries, assembly.headline, train.EARLY_STOPPING)
    if world.is_main:
        preprocessing = None if data.preprocessing is None else note
        sharding = sharding_sentence(assembly.model, config.DIST, world)
        uneven = uneven_classes(data, assembly.headline) if train.BEST_METRIC is None else None
        compiling = "TRAIN.COMPILE: the first steps take minutes" if train.COMPILE else None
        sentences = (
            weights,
            assembly.teacher,
            preprocessing,
            assembly.freezing.sentence,
            sharding,
            uneven,
            compiling,
        )
        report_start(config, (*data.report, *sentences))
    loading = with_num_workers(config.DATA, data, world)
    return Setup(config, data, assembly, progress, loading)


def build_trainer(
    recording: RunRecording,
    context: RunContext,
    checkpoints: CheckpointFolder,
    checkpoint: Checkpoint | None,
    *,
    size_origins: Mapping[str, SizeOrigin],
    callbacks: dict[str, Any],
) -> Trainer:
    """Return the trainer of a run, at the place of its checkpoint; arguments as for `Trainer`."""
    config, setup, plan = recording.config, recording.setup, recording.plan
    assembly, world = setup.assembly, context.world
    train, seed = config.TRAIN, config.EXPERIMENT.SEED
    scale_values(
        assembly.optimizer, lr_scale=plan.lr_scale, weight_decay_scale=plan.weight_decay_scale
    )
    trainer = Trainer(
        train,
        plan,
        world,
        assembly,
        loaders=context.enter(
            build_loaders(
                setup.data,
                setup.loading,
                world,
                sizes=plan.micro_batches,
                batch_size_val=config.DATA.BATCH_SIZE_VAL,
                seed=seed,
                mixed_epochs=mixed_epochs(config.DATA.AUGMENT, plan.num_epochs),
            )
        ),
        schedule=Schedule(
            config.SCHEDULE,
            assembly.optimizer,
            steps_per_epoch=plan.steps_per_epoch[: plan.num_epochs - (train.EMA.SWA_EPOCHS or 0)],
            warmup_steps=plan.warmup_steps,
            batch_size_lr_factor=plan.batch_size_lr_factor,
            metric=train.EARLY_STOPPING.METRIC or assembly.headline,
            min_delta=train.EARLY_STOPPING.MIN_DELTA,
        ),
        checkpoints=checkpoints,
        progress_bar=ProgressBar(recording.folder.console if world.is_main else None),
        stop=StopAgreement(world, context.stop),
        recording=recording,
        checkpoint_extras=recording.extras,
        size_origins=size_origins,
        wrap=partial(wrap, world=world, find_unused_parameters=config.DIST.FIND_UNUSED_PARAMETERS),
        callbacks=callbacks,
    )
    # Dropout differs between ranks; the weights are rank 0's.
    seed_all(derive_seed(seed, world.rank) if world.rank else seed)
    if checkpoint is not None:
        trainer.resume(checkpoint.entries, seed)
    return trainer
