"""One training run, from a configuration to its files: config -> data -> model -> plan -> training."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from contextlib import ExitStack
from functools import partial

from linnaeus.autobatch.memory.device import device_memory
from linnaeus.config.dump import save_config, with_batch_sizes
from linnaeus.config.schema import Config
from linnaeus.data.datasets import build_data
from linnaeus.data.loader import build_loaders, with_measured_workers
from linnaeus.data.mixing import mixed_epochs
from linnaeus.data.split_file import SPLIT_FILE, save_split
from linnaeus.models.model_spec import MODEL_FILE, ModelSpec
from linnaeus.models.preprocessing import with_preprocessing
from linnaeus.runtime.console import ProgressBar
from linnaeus.runtime.distributed import errors_told_first, join
from linnaeus.runtime.files import (
    AUTOBATCH,
    CHECKPOINTS,
    CONFIG,
    METRICS,
    RESULT,
    write_text_atomically,
)
from linnaeus.runtime.rng import derive_seed, deterministic, seed_all
from linnaeus.runtime.run_folder import TRIAL, RunFolder, stopped_reason
from linnaeus.runtime.signals import StopRequest
from linnaeus.size_search.fit_attempts import Ladder, find_planned_sizes, size_search
from linnaeus.size_search.report import device_environment, save_searches, summary
from linnaeus.training.build import assemble, built_facts, check_before_data, configuration_facts
from linnaeus.training.callbacks import build_callbacks
from linnaeus.training.checkpoint import CheckpointFolder, TrainingProgress
from linnaeus.training.ddp import wrap
from linnaeus.training.metrics_file import MetricsFile
from linnaeus.training.noise_scale import build_probe
from linnaeus.training.optim import scale_values
from linnaeus.training.report import report_plan, report_result, report_start, save_result
from linnaeus.training.resume import (
    check_classes,
    find_checkpoint,
    is_finished,
    resumed_nodes,
    resumed_progress,
)
from linnaeus.training.schedule import Schedule
from linnaeus.training.sharding import sharding_sentence, shards_model
from linnaeus.training.stop import StopAgreement
from linnaeus.training.tracking import check_loggers, start_tracking
from linnaeus.training.trainer import FitResult, Trainer

_RESUMED_WEIGHTS = "weights: those of this run's checkpoint, which replace any that MODEL names"

logger = logging.getLogger("linnaeus.run")


def run(config: Config) -> FitResult:
    """Train as the configuration says.

    Raises:
        LinnaeusError: something the user can mend; the message says how.
    """
    experiment, train, seed = config.EXPERIMENT, config.TRAIN, config.EXPERIMENT.SEED
    path = experiment.folder
    with (
        deterministic(train.DETERMINISTIC),
        StopRequest().listening() as stop,
        join(experiment.DEVICE, config.DIST) as world,
        ExitStack() as stack,
        errors_told_first(world),
    ):
        world.check_equal(configuration_facts(dataclasses.asdict(config)))
        check_before_data(config.MODEL, config.OPTIMIZER, train, config.DIST, world)
        world.on_main(partial(check_loggers, experiment.LOGGERS))
        callbacks = build_callbacks(train.CALLBACKS)
        mixed_epochs(config.DATA.AUGMENT, train.EPOCHS)  # an error must show before the search
        folder = stack.enter_context(RunFolder(path, world, keep=train.AUTO_RESUME))
        if world.is_main:
            logger.info("run directory: %s", path)
        checkpoints = stack.enter_context(
            CheckpointFolder(
                path / CHECKPOINTS,
                keep=train.KEEP_CHECKPOINTS,
                check=folder.check,
                is_sharded=shards_model(config.DIST, world),
                background=world.device.type
                != "cpu",  # there the copy would take memory that AutoBatch counts
            )
        )
        checkpoint = None
        if train.AUTO_RESUME:
            checkpoint = find_checkpoint(
                checkpoints, resumed_nodes(config), train.RESUME_WITH, world
            )
            if checkpoint is not None and folder.claim is not None:
                folder.claim.check_id(checkpoint.content.get("run"), checkpoints.last)
        progress = TrainingProgress()
        content = None if checkpoint is None else checkpoint.content
        saved = None if content is None else content.get("config", {})
        data_node, note = with_preprocessing(config.DATA, config.MODEL, saved)
        config = dataclasses.replace(config, DATA=data_node)
        ladder = Ladder(config, world, content)
        while not ladder.is_done:
            config, train = ladder.config, ladder.config.TRAIN
            seed_all(seed)
            world.update("building data and model")
            data = build_data(config.DATA, seed=seed, on_main=world.on_main)
            if content is not None:
                check_classes(content.get("model_spec"), data.taxonomy, path)
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
            world.check_equal(built_facts(data, assembly))
            if checkpoint is not None:
                checkpoint.restore(assembly, world)
                progress = resumed_progress(
                    checkpoint.content, assembly.headline, train.EARLY_STOPPING
                )
                if is_finished(progress, train, path / RESULT, world):
                    return FitResult(
                        progress.metrics, images_per_s=0.0, training_s=progress.seconds
                    )
            if world.is_main:
                weights = assembly.weights if checkpoint is None else _RESUMED_WEIGHTS
                sharding = sharding_sentence(assembly.model, config.DIST, world)
                report_start(
                    config,
                    (
                        *data.report,
                        weights,
                        None if data.preprocessing is None else note,
                        assembly.freezing.sentence,
                        sharding,
                    ),
                )
            loading = with_measured_workers(config.DATA, data, world, seed)
            search, plan_for = size_search(
                dataclasses.replace(config, DATA=loading), data, assembly, world, folder.console
            )
            with ladder.attempt(search) as search:
                sized = ladder.noted(find_planned_sizes(search, plan_for, content))
            if not ladder.is_done:
                del data, assembly, search, plan_for  # their memory is for the next attempt
                device_memory(world.device).clean()
        config, plan = with_batch_sizes(config, **sized.batch_sizes), sized.plan
        scale_values(
            assembly.optimizer, lr_scale=plan.lr_scale, weight_decay_scale=plan.weight_decay_scale
        )
        loaders = build_loaders(
            data,
            loading,
            world,
            sizes=plan.micro_batches,
            batch_size_val=config.DATA.BATCH_SIZE_VAL,
            seed=seed,
            mixed_epochs=mixed_epochs(config.DATA.AUGMENT, train.EPOCHS),
        )
        stack.enter_context(loaders)
        probe = build_probe(train.NOISE_SCALE, assembly.model, assembly.scaler, plan)
        spec = ModelSpec.of(config.MODEL, data).as_dict()

        if world.is_main:
            for found in sized.found.values():
                logger.info(summary(found))
            report_plan(plan, train, config.OPTIMIZER)

        def begin() -> None:
            """Give the run its name and its files. What fails before the first step leaves nothing behind."""
            if folder.has_begun:
                return
            run_id = trainer.checkpoint_extras["run"] = folder.begin()
            chosen = {**plan.as_dict(), "NUM_WORKERS": loading.NUM_WORKERS}
            if world.is_main:
                metrics_file = MetricsFile(
                    path / METRICS,
                    last_step=progress.step,
                    within_epoch=progress.samples > 0,
                    check=folder.check,
                )
                trainer.metrics_file = stack.enter_context(metrics_file)
                tracker = start_tracking(
                    experiment,
                    run_id=run_id,
                    folder=path,
                    num_steps=progress.step,
                    config={**dataclasses.asdict(config), "PLAN": chosen},
                )
                trainer.tracker = stack.enter_context(tracker)
                if TRIAL in os.environ:
                    from linnaeus.sweep.search import Pruning

                    trainer.callbacks[TRIAL] = Pruning(folder, stop, trainer)
                (path / RESULT).unlink(missing_ok=True)  # left over from the run being resumed
                save_searches(sized.found, world.device, path / AUTOBATCH, tracker)
                save_split(data, path / SPLIT_FILE)
                save_config(config, path / CONFIG, {"RUN": run_id, **chosen})
                write_text_atomically(
                    path / MODEL_FILE, json.dumps(spec, indent=1, ensure_ascii=False) + "\n"
                )

        trainer = Trainer(
            train,
            plan,
            world,
            assembly,
            loaders=loaders,
            train_step=dataclasses.replace(assembly.train_step, probe=probe),
            schedule=Schedule(
                config.SCHEDULE,
                assembly.optimizer,
                steps_per_epoch=plan.steps_per_epoch,
                warmup_steps=plan.warmup_steps,
                batch_size_lr_factor=plan.batch_size_lr_factor,
                metric=train.EARLY_STOPPING.METRIC or assembly.headline,
                min_delta=train.EARLY_STOPPING.MIN_DELTA,
            ),
            checkpoints=checkpoints,
            progress_bar=ProgressBar(folder.console if world.is_main else None),
            stop=StopAgreement(world, stop),
            checkpoint_extras={
                "config": resumed_nodes(config),
                "model_spec": spec,
                "environment": device_environment(world.device),
                **sized.as_dict(),
            },
            size_origins=sized.origins(config.DATA),
            wrap=partial(
                wrap, world=world, find_unused_parameters=config.DIST.FIND_UNUSED_PARAMETERS
            ),
            begin=begin,
            folder=folder,
            callbacks=callbacks,
        )
        # Dropout differs between ranks; the weights are rank 0's.
        seed_all(derive_seed(seed, world.rank) if world.rank else seed)
        if checkpoint is not None:
            trainer.resume(checkpoint.content, seed)
        result = trainer.fit()
        plan = trainer.plan  # its micro-batches are smaller where memory ran out
        report_result(result, plan, train, config.DATA.BATCH_SIZE_VAL, path, trainer.tracker)
        if result.stop_signal:
            folder.end(128 + result.stop_signal, stopped_reason(path, result.stop_signal))
        elif folder.claim is not None:
            folder.check()
            save_result(result, plan, path / RESULT, folder.claim.id)
            folder.end(0)
        return result
