"""One training run, from a configuration to its files: config -> data -> model -> plan -> training."""

from __future__ import annotations

import os
from dataclasses import replace

from linnaeus.autobatch.memory.device import device_memory
from linnaeus.config.dump import with_batch_sizes
from linnaeus.config.schema import Config
from linnaeus.models.model_spec import ModelSpec
from linnaeus.runtime.context import running
from linnaeus.runtime.files import LOGS
from linnaeus.runtime.run_folder import TRIAL, RunFolder
from linnaeus.size_search.fit_attempts import FitAttempts
from linnaeus.size_search.planned_sizes import find_planned_sizes, prepare_search
from linnaeus.size_search.report import device_environment
from linnaeus.sweep.search import Pruning
from linnaeus.training.recording import RunRecording
from linnaeus.training.resume import resumed_nodes
from linnaeus.training.setup import (
    build_setup,
    build_trainer,
    check_start,
    checkpoints_of,
    finished_progress,
    resumed_checkpoint,
)
from linnaeus.training.trainer import FitResult
from linnaeus.training.watch import Profiler


def run(config: Config, *, dry_run: bool = False) -> FitResult:
    """Train as the configuration says.

    Args:
        config: of the run.
        dry_run: take one optimizer step, validate one batch and leave no file.

    Raises:
        LinnaeusError: an error that the user can fix; the message says how.
    """
    experiment, train = config.EXPERIMENT, config.TRAIN
    with running(experiment, config.DIST, is_deterministic=train.DETERMINISTIC) as context:
        world = context.world
        callbacks = check_start(config, world)
        folder = context.enter(RunFolder(experiment.folder, world, keep=train.AUTO_RESUME))
        checkpoints = context.enter(checkpoints_of(config, folder, world))
        checkpoint = resumed_checkpoint(config, checkpoints, folder, world)
        if (progress := finished_progress(config, checkpoint, world)) is not None:
            return FitResult(progress.metrics, images_per_s=0.0, training_s=progress.seconds)
        entries = None if checkpoint is None else checkpoint.entries
        attempts, sizes = FitAttempts(config, world, entries), None
        while sizes is None:
            setup = build_setup(attempts.config, world, checkpoint)
            measured = replace(setup.config, DATA=setup.loading)
            search, plan_for = prepare_search(
                measured, setup.data, setup.assembly, world, folder.console
            )
            with attempts.next(search) as search:
                sizes = attempts.record(find_planned_sizes(search, plan_for, entries))
            if sizes is None:
                del setup, search, plan_for  # their memory is for the next attempt
                device_memory(world.device).clean()
        config = with_batch_sizes(setup.config, **sizes.batch_sizes)
        extras = {
            "config": resumed_nodes(config),
            "model_spec": ModelSpec.of(config.MODEL, setup.data).as_dict(),
            "environment": device_environment(world.device),
            **sizes.as_dict(),
        }
        recording = context.enter(RunRecording(config, world, folder, setup, sizes.plan, extras))
        if world.is_main:
            sizes.report(config)
            if train.PROFILE is not None:
                first, last = train.PROFILE[0], min(train.PROFILE[1], sizes.plan.total_steps)
                trace = folder.path / LOGS / "profile.json.gz"
                callbacks["TRAIN.PROFILE"] = Profiler(first, last, trace)
            if TRIAL in os.environ:
                headline = setup.assembly.headline
                callbacks[TRIAL] = Pruning(folder, context.stop, headline, sizes.plan.num_epochs)
        origins = sizes.origins(config.DATA)
        trainer = build_trainer(
            recording, context, checkpoints, checkpoint, size_origins=origins, callbacks=callbacks
        )
        if dry_run:
            trainer.dry_run()
            return FitResult({}, images_per_s=0.0, training_s=0.0)
        result = trainer.fit()
        recording.finish(result, trainer.plan)
        return result
