"""One training run, from a configuration to its files. Building order is reading order."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import timm.layers
import torch
from rich.console import Console

from linnaeus.assembly import Assembly, assemble_for
from linnaeus.autobatch.report import device_environment, save_results, summary, trials_table
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.autobatch.sizes import SizeSearch, find_sizes
from linnaeus.checkpoint import CheckpointFolder, TrainingState, load_checkpoint
from linnaeus.config.load import save_config, with_batch_sizes
from linnaeus.config.schema import Config, TrainConfig
from linnaeus.data.bundle import DataBundle
from linnaeus.data.datasets import build_data
from linnaeus.data.loader import build_loaders
from linnaeus.dist import World, join, wrap
from linnaeus.errors import ConfigError
from linnaeus.files import prepare_run_folder, write_text_atomically
from linnaeus.log import MetricsFile, Progress, close_logging, make_console, set_up_logging
from linnaeus.metrics import headline
from linnaeus.rng import seed_all
from linnaeus.schedule import build_schedule
from linnaeus.tracking import NullTracker, Tracker, start_tracking
from linnaeus.trainer import FitResult, Outlets, Trainer

RESULT = "result.json"
"""A run's file that is there when it has ended well."""

logger = logging.getLogger("linnaeus.run")


def run(config: Config) -> FitResult:
    """Train as the configuration says.

    Raises:
        LinnaeusError: something the user can mend; the message says how.
    """
    seed, train = config.EXPERIMENT.SEED, config.TRAIN
    folder = Path(config.EXPERIMENT.OUTPUT_DIR) / config.EXPERIMENT.NAME
    with ExitStack() as stack:
        world = stack.enter_context(
            join(
                config.EXPERIMENT.DEVICE, config.DIST.BACKEND, timedelta(minutes=config.DIST.TIMEOUT_MINUTES)
            )
        )
        console = stack.enter_context(_folder_and_logs(folder, world, keep=train.AUTO_RESUME))
        _check_device(train, world)
        torch.use_deterministic_algorithms(train.DETERMINISTIC)
        seed_all(seed)

        checkpoints = CheckpointFolder(folder / "checkpoints")
        latest = world.on_main(checkpoints.find_latest) if train.AUTO_RESUME else None
        checkpoint = load_checkpoint(latest) if latest is not None else None
        data = build_data(config.DATA, seed=seed)
        assembly = assemble_for(config, data, world.device)
        if train.SYNC_BATCHNORM and world.is_distributed:
            # torch's own conversion would drop the activation inside timm's BatchNormAct2d.
            timm.layers.convert_sync_batchnorm(assembly.model)
        found = _search(config, data, assembly, world, checkpoint)
        config = with_batch_sizes(config, **{mode: result.batch_size for mode, result in found.items()})
        tracker = stack.enter_context(_tracker(config, folder, world, resume=checkpoint is not None))
        _record(config, data, found, world, folder, console, tracker)

        loaders = stack.enter_context(
            build_loaders(
                data, batch_size=config.DATA.BATCH_SIZE, batch_size_val=config.DATA.BATCH_SIZE_VAL,
                data_config=config.DATA, seed=seed, rank=world.rank, world_size=world.world_size,
                device=world.device,
            )
        )  # fmt: skip
        schedule = build_schedule(
            config.SCHEDULE,
            assembly.optimizer,
            steps_per_epoch=math.ceil(len(loaders.train) / train.ACCUMULATION_STEPS),
            num_epochs=train.EPOCHS,
        )
        trainer = Trainer(
            config=train,
            world=world,
            loaders=loaders,
            train_step=dataclasses.replace(
                assembly.train_step,
                model=wrap(assembly.model, world, find_unused_parameters=config.DIST.FIND_UNUSED_PARAMETERS),
            ),
            validation_step=assembly.validation_step,
            metrics=assembly.metrics,
            state=TrainingState(assembly.model, assembly.optimizer, assembly.scaler, schedule, assembly.ema),
            checkpoints=checkpoints,
            outlets=Outlets(
                stack.enter_context(
                    MetricsFile(
                        folder / "metrics.jsonl",
                        enabled=world.is_main,
                        last_step=checkpoint["progress"]["step"] if checkpoint is not None else 0,
                    )
                ),
                tracker,
                partial(Progress, console if world.is_main else None),
            ),
            checkpoint_extras={
                "autobatch": {mode: result.as_dict() for mode, result in found.items()},
                "searched_for": _searched_for(config, world),
            },
        )
        seed_all(seed + world.rank)  # dropout differs between ranks; the weights are rank 0's
        if checkpoint is not None:
            trainer.resume(checkpoint)
        result = trainer.fit()
        _conclude(config, result, folder, tracker)
        if world.is_main and not result.interrupted:
            _save_result(config, result, world, folder / RESULT)
        return result


@contextmanager
def _folder_and_logs(folder: Path, world: World, *, keep: bool) -> Iterator[Console]:
    """The run's folder, with the log going to the console and to each rank's file."""
    aside = world.on_main(partial(prepare_run_folder, folder, keep=keep))
    console = make_console()
    set_up_logging(folder / "logs", rank=world.rank, console=console)
    try:
        if aside is not None:
            logger.info("an earlier run of this name is now in %s", aside)
        yield console
    finally:
        close_logging()


@contextmanager
def _tracker(config: Config, folder: Path, world: World, *, resume: bool) -> Iterator[Tracker]:
    """Rank 0's tracker, closed with the run's outcome."""
    tracker: Tracker = NullTracker()
    if world.is_main:
        node = config.EXPERIMENT
        tracker = start_tracking(
            node.WANDB,
            name=node.NAME,
            folder=folder / "logs",
            config=dataclasses.asdict(config),
            resume=resume,
        )
    exit_code = 1
    try:
        yield tracker
        exit_code = 0
    finally:
        tracker.finish(exit_code)


def _check_device(config: TrainConfig, world: World) -> None:
    if config.SYNC_BATCHNORM and world.is_distributed and world.device.type == "cpu":
        raise ConfigError(
            "TRAIN.SYNC_BATCHNORM: True, but SyncBatchNorm needs an accelerator; set it False on the CPU"
        )


def _search(
    config: Config, data: DataBundle, assembly: Assembly, world: World, checkpoint: Mapping[str, Any] | None
) -> dict[str, AutoBatchResult]:
    """What AutoBatch finds for each mode that asks for it; what it found, where that still holds."""
    if checkpoint is not None and checkpoint["searched_for"] == _searched_for(config, world):
        logger.info("AutoBatch: same device and configuration, so the checkpoint's batch sizes are kept")
        return {
            mode: AutoBatchResult.from_dict(mode, entry) for mode, entry in checkpoint["autobatch"].items()
        }
    search = SizeSearch(
        config.DATA, data, assembly, world, config.TRAIN.ACCUMULATION_STEPS, config.EXPERIMENT.SEED
    )
    return find_sizes(search)


def _searched_for(config: Config, world: World) -> str:
    """All that the sizes found depend on, as text that can be compared."""
    train = dataclasses.asdict(config.TRAIN)
    for name in ("EPOCHS", "LOG_EVERY", "VALIDATE_EVERY", "CHECKPOINT_EVERY", "AUTO_RESUME"):
        del train[name]
    data = dataclasses.asdict(config.DATA)
    for name in ("BATCH_SIZE", "BATCH_SIZE_VAL"):
        del data[name]
    nodes = dataclasses.asdict(config)
    relevant = {name: nodes[name] for name in ("MODEL", "LOSS", "OPTIMIZER")} | {"TRAIN": train, "DATA": data}
    device = device_environment(world.device)
    return json.dumps({**relevant, "world_size": world.world_size, "environment": device}, sort_keys=True)


def _record(
    config: Config, data: DataBundle, found: Mapping[str, AutoBatchResult], world: World, folder: Path,
    console: Console, tracker: Tracker,
) -> None:  # fmt: skip
    """Write down and show what this run is: data, sizes and how they were found, configuration."""
    if not world.is_main:
        return
    (folder / RESULT).unlink(missing_ok=True)  # of a run that is gone on with
    for sentence in data.report:
        logger.info(sentence)
    for mode, result in found.items():
        console.print(trials_table(result))
        logger.info(summary(result))
        columns = ("batch_size", "status", "peak_bytes", "seconds")
        rows = [[trial[name] for name in columns] for trial in result.as_dict()["trials"]]
        tracker.table(f"autobatch/{mode}_trials", columns, rows)
        tracker.summarise({f"autobatch/{mode}_batch_size": result.batch_size})
    if found:
        save_results(found, device_environment(world.device), folder / "autobatch.json")
    save_config(config, folder / "config.yaml")


def _conclude(config: Config, result: FitResult, folder: Path, tracker: Tracker) -> None:
    """Say what the run came to, on rank 0."""
    tracker.summarise({**result.metrics, "images_per_s": result.images_per_s})
    if result.interrupted:
        logger.info("interrupted; TRAIN.AUTO_RESUME True goes on from the checkpoint in %s", folder)
        return
    data = config.DATA
    logger.info("batch sizes: training %d, validation %d", data.BATCH_SIZE, data.BATCH_SIZE_VAL)
    for name, value in result.metrics.items():
        logger.info("%-16s %.4f", name, value)
    if result.images_per_s:
        logger.info("training speed: %.0f images/s", result.images_per_s)
    logger.info("files: %s", folder.resolve())


def _save_result(config: Config, result: FitResult, world: World, path: Path) -> None:
    """Write what a run that has ended well came to; what is not finite becomes null."""
    metrics = {name: value if math.isfinite(value) else None for name, value in result.metrics.items()}
    content = {
        "metrics": metrics,
        "headline": headline(result.metrics)[0].removeprefix("-"),
        "training_s": round(result.training_s, 3),
        "images_per_s": round(result.images_per_s, 3) or None,  # none where nothing was left to train
        "batch_size": config.DATA.BATCH_SIZE,
        "accumulation_steps": config.TRAIN.ACCUMULATION_STEPS,
        "world_size": world.world_size,
    }
    write_text_atomically(path, json.dumps(content, indent=2) + "\n")
