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

from linnaeus.autobatch.report import device_environment, save_results, summary, trials_table
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.autobatch.sizes import SizeSearch, confirm, find_sizes
from linnaeus.batching.plan import BatchPlan, Facts, plan_batches
from linnaeus.batching.sizes import SizeLimits, max_samples_per_rank, micro_batches_held
from linnaeus.batching.summary import summary_lines
from linnaeus.config.load import save_config, with_batch_sizes
from linnaeus.config.schema import Config, OptimizerConfig, TrainConfig
from linnaeus.data.bundle import DataBundle, dataset_length
from linnaeus.data.datasets import build_data
from linnaeus.data.loader import build_loaders
from linnaeus.dist import World, join, wrap
from linnaeus.errors import ConfigError
from linnaeus.files import prepare_run_folder, write_text_atomically
from linnaeus.log import MetricsFile, Progress, close_logging, make_console, set_up_logging
from linnaeus.models.build import batchnorm_kind
from linnaeus.rng import seed_all
from linnaeus.tracking import NullTracker, Tracker, start_tracking
from linnaeus.training.build import Assembly, assemble_for
from linnaeus.training.checkpoint import CheckpointFolder, TrainingState, load_checkpoint
from linnaeus.training.metrics import headline
from linnaeus.training.noise_scale import MEANING, GradientProbe
from linnaeus.training.optim import peak_values, scale_values
from linnaeus.training.schedule import build_schedule
from linnaeus.training.step import TrainStep
from linnaeus.training.trainer import FitResult, MetricsWriter, Trainer

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
        _check_device(train, world)
        _check_noise_scale(train, world, micro_batches_held(train))
        console = stack.enter_context(_folder_and_logs(folder, world, keep=train.AUTO_RESUME))
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
        config, plan = _plan_sizes_that_ran(config, data, assembly, world, found)
        scale_values(assembly.optimizer, lr_scale=plan.lr_scale, weight_decay_scale=plan.weight_decay_scale)
        tracker = stack.enter_context(_tracker(config, plan, folder, world, resume=checkpoint is not None))
        _record(config, data, found, plan, world, folder, console, tracker)

        loaders = stack.enter_context(
            build_loaders(
                data, sizes=plan.micro_batches, batch_size_val=config.DATA.BATCH_SIZE_VAL,
                data_config=config.DATA, seed=seed, rank=world.rank, world_size=world.world_size,
                device=world.device,
            )
        )  # fmt: skip
        schedule = build_schedule(
            config.SCHEDULE,
            assembly.optimizer,
            total_steps=plan.total_steps,
            warmup_steps=plan.warmup_steps,
            batch_size_lr_factor=plan.batch_size_lr_factor,
        )
        trainer = Trainer(
            config=train,
            plan=plan,
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
            metrics_writer=MetricsWriter(
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
                "plan": plan.as_dict(),
            },
        )
        trainer.train_step.probe = _probe(train, trainer.train_step, plan, world)
        seed_all(seed + world.rank)  # dropout differs between ranks; the weights are rank 0's
        if checkpoint is not None:
            trainer.resume(checkpoint)
            _compare_plans(plan, checkpoint)
        result = trainer.fit()
        _conclude(config, plan, result, folder, tracker)
        if world.is_main and not result.interrupted:
            _save_result(plan, result, folder / RESULT)
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
def _tracker(
    config: Config, plan: BatchPlan, folder: Path, world: World, *, resume: bool
) -> Iterator[Tracker]:
    """Rank 0's tracker, closed with the run's outcome."""
    tracker: Tracker = NullTracker()
    if world.is_main:
        node = config.EXPERIMENT
        tracker = start_tracking(
            node.WANDB,
            name=node.NAME,
            folder=folder / "logs",
            config={**dataclasses.asdict(config), "PLAN": plan.as_dict()},
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


def _check_noise_scale(config: TrainConfig, world: World, accumulation_steps: int) -> None:
    if config.NOISE_SCALE.ENABLED and world.world_size * accumulation_steps == 1:
        raise ConfigError(
            "TRAIN.NOISE_SCALE.ENABLED: True, but with one process and one micro-batch per optimizer step "
            "there is only one batch size to measure gradients at, and two are needed: set "
            "TRAIN.ACCUMULATION_STEPS 2 or more, a TRAIN.EFFECTIVE_BATCH_SIZE above DATA.BATCH_SIZE, or run "
            "several processes under torchrun"
        )


def _probe(config: TrainConfig, step: TrainStep, plan: BatchPlan, world: World) -> GradientProbe | None:
    """What measures the noise scale, where the plan leaves two batch sizes to do so."""
    if not config.NOISE_SCALE.ENABLED:
        return None
    stages = (stage for stages in plan.epochs for stage in stages)
    _check_noise_scale(config, world, max(stage.accumulation_steps for stage in stages))
    return GradientProbe(step.model, step.scaler, decay=config.NOISE_SCALE.DECAY)


def _search(
    config: Config, data: DataBundle, assembly: Assembly, world: World, checkpoint: Mapping[str, Any] | None
) -> dict[str, AutoBatchResult]:
    """What AutoBatch finds for each mode that asks for it; what it found, where that still holds."""
    search = _size_search(config, data, assembly, world)
    if checkpoint is not None and checkpoint["searched_for"] == _searched_for(config, world):
        logger.info("AutoBatch: same device and configuration, so the checkpoint's batch sizes are kept")
        return {
            mode: AutoBatchResult.from_dict(mode, entry) for mode, entry in checkpoint["autobatch"].items()
        }
    return find_sizes(search)


def _size_search(config: Config, data: DataBundle, assembly: Assembly, world: World) -> SizeSearch:
    """The searches of this run, which look no further than the effective batch asked for."""
    autobatch, train = config.DATA.AUTOBATCH, config.TRAIN
    limits = SizeLimits(
        autobatch.MAX_BATCH_SIZE if autobatch.ENABLED else config.DATA.BATCH_SIZE,
        world.world_size,
        dataset_length(data.train),
        batchnorm=batchnorm_kind(assembly.model) == "local",
    )
    largest = max_samples_per_rank(train, limits)
    seed = config.EXPERIMENT.SEED
    return SizeSearch(config.DATA, train, data, assembly, world, seed, max_samples_per_rank=largest)


def _plan_sizes_that_ran(
    config: Config, data: DataBundle, assembly: Assembly, world: World, found: dict[str, AutoBatchResult]
) -> tuple[Config, BatchPlan]:
    """The configuration with the sizes found, and the plan; what AutoBatch has not tried of it, it tries."""
    while True:
        config = with_batch_sizes(config, **{mode: result.batch_size for mode, result in found.items()})
        plan = _plan(config, data, assembly, world)
        if "train" not in found:
            return config, plan
        ran = {trial.size for trial in found["train"].trials if trial.status == "fits"}
        untried = {stage.micro_batch_size for stages in plan.epochs for stage in stages} - ran
        if not untried:
            return config, plan
        search = _size_search(config, data, assembly, world)
        found["train"] = confirm(search, found["train"], max(untried))


def _plan(config: Config, data: DataBundle, assembly: Assembly, world: World) -> BatchPlan:
    """All that depends on the batch size, now that this is known."""
    learning_rate, weight_decay = peak_values(assembly.optimizer)
    node, model = config.OPTIMIZER, config.MODEL
    facts = Facts(
        max_micro_batch_size=config.DATA.BATCH_SIZE,
        world_size=world.world_size,
        num_samples=dataset_length(data.train),
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        optimizer=node.NAME if isinstance(node, OptimizerConfig) else str(node["_target_"]),
        batchnorm=batchnorm_kind(assembly.model),
        pretrained=bool(model.get("pretrained") if isinstance(model, dict) else model.WEIGHTS),
    )
    return plan_batches(config.TRAIN, _own_optimizer(config), config.SCHEDULE, facts)


def _own_optimizer(config: Config) -> OptimizerConfig | None:
    """The OPTIMIZER node where it is no `_target_` node."""
    return config.OPTIMIZER if isinstance(config.OPTIMIZER, OptimizerConfig) else None


def _compare_plans(plan: BatchPlan, checkpoint: Mapping[str, Any]) -> None:
    """Say so where a resumed run would go on with other sizes."""
    before, now = checkpoint.get("plan", {}), plan.as_dict()
    names = ("EFFECTIVE_BATCH", "LEARNING_RATE", "TOTAL_STEPS", "WARMUP_STEPS")
    changed = [
        f"{name} {before[name]} -> {now[name]}" for name in names if before.get(name, now[name]) != now[name]
    ]
    if changed:
        logger.warning(
            "warning: the checkpoint was written with another batch plan (%s); its peak rate and weight "
            "decay are kept",
            ", ".join(changed),
        )


def _searched_for(config: Config, world: World) -> str:
    """All that the sizes found depend on, as text that can be compared."""
    train = dataclasses.asdict(config.TRAIN)
    for name in ("EPOCHS", "LOG_EVERY", "VALIDATE_EVERY", "CHECKPOINT_EVERY", "AUTO_RESUME", "NOISE_SCALE"):
        del train[name]
    data = dataclasses.asdict(config.DATA)
    for name in ("BATCH_SIZE", "BATCH_SIZE_VAL"):
        del data[name]
    nodes = dataclasses.asdict(config)
    relevant = {name: nodes[name] for name in ("MODEL", "LOSS", "OPTIMIZER")} | {"TRAIN": train, "DATA": data}
    device = device_environment(world.device)
    return json.dumps({**relevant, "world_size": world.world_size, "environment": device}, sort_keys=True)


def _record(
    config: Config, data: DataBundle, found: Mapping[str, AutoBatchResult], plan: BatchPlan, world: World,
    folder: Path, console: Console, tracker: Tracker,
) -> None:  # fmt: skip
    """Write down and show what this run is: data, sizes and how they were found, plan, configuration."""
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
    for line in summary_lines(plan, config.TRAIN, _own_optimizer(config)):
        logger.info(line)
    for note in plan.notes:
        logger.info("note: %s", note)
    for warning in plan.warnings:
        logger.warning("warning: %s", warning)
    save_config(config, folder / "config.yaml", plan.as_dict())


def _conclude(config: Config, plan: BatchPlan, result: FitResult, folder: Path, tracker: Tracker) -> None:
    """Say what the run came to, on rank 0."""
    noise = {} if result.noise_scale is None else {"noise_scale": result.noise_scale}
    tracker.summarise({**result.metrics, "images_per_s": result.images_per_s, **noise})
    if result.interrupted:
        logger.info("interrupted; TRAIN.AUTO_RESUME True goes on from the checkpoint in %s", folder)
        return
    logger.info("batch sizes: training %d, validation %d", plan.micro_batch_size, config.DATA.BATCH_SIZE_VAL)
    for name, value in result.metrics.items():
        logger.info("%-16s %.4f", name, value)
    if result.images_per_s:
        logger.info("training speed: %.0f images/s", result.images_per_s)
    if result.noise_scale is not None:
        logger.info(f"gradient noise scale: {MEANING}", result.noise_scale)
    elif config.TRAIN.NOISE_SCALE.ENABLED:
        logger.info("gradient noise scale: not known yet, noise still hides the gradient; train longer")
    logger.info("files: %s", folder.resolve())


def _save_result(plan: BatchPlan, result: FitResult, path: Path) -> None:
    """Write what a run that has ended well came to; what is not finite becomes null."""
    metrics = {name: value if math.isfinite(value) else None for name, value in result.metrics.items()}
    content = {
        "metrics": metrics,
        "headline": headline(result.metrics)[0].removeprefix("-"),
        "training_s": round(result.training_s, 3),
        "images_per_s": round(result.images_per_s, 3) or None,  # none where nothing was left to train
        "batch_size": plan.micro_batch_size,
        "accumulation_steps": plan.accumulation_steps,
        "world_size": plan.world_size,
        "effective_batch": plan.effective_batch_size,
        "learning_rate": plan.learning_rate,
        "warmup_steps": plan.warmup_steps,
        "total_steps": plan.total_steps,
    }
    write_text_atomically(path, json.dumps(content, indent=2) + "\n")
