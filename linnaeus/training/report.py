"""Log lines and files of a run: its batch plan at the start, its result at the end."""

from __future__ import annotations

import json
import logging
import math
import signal
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linnaeus.batch_plan.plan import BatchPlan, OptimizerNode
from linnaeus.batch_plan.summary import summary_lines
from linnaeus.config.instantiate import is_target
from linnaeus.config.schema import SCHEDULES, Config, LossConfig, ScheduleConfig, TrainConfig
from linnaeus.data.bundle import DataBundle
from linnaeus.data.mixing import is_mixing
from linnaeus.runtime.files import write_text_atomically
from linnaeus.training.tracking import Tracker

if TYPE_CHECKING:
    from linnaeus.training.trainer import FitResult

logger = logging.getLogger("linnaeus.run")


def settings_without_effect(config: Config) -> Iterator[str]:
    """A sentence for each key that is set and changes nothing, because of the value of another key."""
    loss, augment, epoch = config.LOSS, config.DATA.AUGMENT, config.TRAIN.UNFREEZE_EPOCH
    schedule, stopping = config.SCHEDULE, config.TRAIN.EARLY_STOPPING
    unused = {key for keys in SCHEDULES.values() for key in keys} - {*SCHEDULES[schedule.NAME]}
    changed = [
        name for name in unused if getattr(schedule, name) != getattr(ScheduleConfig(), name)
    ]
    if changed:
        names = ", ".join(f"SCHEDULE.{name}" for name in sorted(changed))
        yield f"{names}: no effect with SCHEDULE.NAME {schedule.NAME}"
    is_read = stopping.PATIENCE is not None or schedule.NAME == "plateau"
    if not is_read and (stopping.MIN_DELTA or stopping.METRIC):
        yield "TRAIN.EARLY_STOPPING: no effect without its key PATIENCE"
    if (
        not is_target(loss)
        and loss.NAME != "focal"
        and loss.FOCAL_GAMMA != LossConfig().FOCAL_GAMMA
    ):
        yield f"LOSS.FOCAL_GAMMA: {loss.FOCAL_GAMMA:g} has no effect with LOSS.NAME {loss.NAME}"
    if augment.MIX_OFF_EPOCHS and not is_mixing(augment):
        yield (
            f"DATA.AUGMENT.MIX_OFF_EPOCHS: {augment.MIX_OFF_EPOCHS} has no effect, since DATA.AUGMENT.MIXUP "
            "and CUTMIX are 0"
        )
    if epoch is None or is_target(config.MODEL):
        return
    key, num_epochs = f"TRAIN.UNFREEZE_EPOCH: {epoch}", config.TRAIN.EPOCHS
    if config.MODEL.FREEZE in (None, "none", []):
        yield f"{key} has no effect, since nothing is frozen (MODEL.FREEZE none)"
    elif epoch == 1:
        yield f"{key} unfreezes before the first epoch, so that MODEL.FREEZE has no effect"
    elif epoch > num_epochs and config.TRAIN.MAX_STEPS is None:
        yield f"{key} comes after the last epoch (TRAIN.EPOCHS {num_epochs}): nothing is unfrozen in this run"


def uneven_classes(data: DataBundle, headline: str) -> str | None:
    """Return a sentence where top-1 decides and training has over 10 times as many samples of one class."""
    kind, _, name = headline.partition("/")
    targets = getattr(data.train, "targets", None)
    if kind != "top1" or data.taxonomy is None or not isinstance(targets, Tensor):
        return None
    level = data.taxonomy.names.index(name)
    labels = targets[:, level]
    counts = torch.bincount(labels[labels >= 0])
    classes, present = data.taxonomy.levels[level].classes, counts.nonzero().flatten()
    if not len(present) or counts.max() <= 10 * counts[present].min():
        return None
    most, least = int(counts.argmax()), int(present[counts[present].argmin()])
    return (
        f"uneven classes: {classes[most]} has {counts[most]} training samples, {classes[least]} "
        f"{counts[least]}, and {headline} favors the common ones; TRAIN.BEST_METRIC=macro/{name} counts each "
        "class alike"
    )


def report_start(config: Config, sentences: Iterable[str | None]) -> None:
    """Log sentences on data and weights, and a warning for each setting without effect."""
    for sentence in filter(None, sentences):
        logger.info("%s", sentence)
    for warning in settings_without_effect(config):
        logger.warning("warning: %s", warning)


def report_plan(plan: BatchPlan, train: TrainConfig, optimizer: OptimizerNode) -> None:
    """Log the numbers, notes and warnings of the batch plan; arguments as for `summary_lines`."""
    for line in summary_lines(plan, train, optimizer):
        logger.info(line)
    for note in plan.notes:
        logger.info("note: %s", note)
    for warning in plan.warnings:
        logger.warning("warning: %s", warning)


def report_result(
    result: FitResult, plan: BatchPlan, batch_size_val: int, folder: Path, tracker: Tracker
) -> None:
    """Log the result of a run and send it to the tracker."""
    test = {f"test/{name}": value for name, value in (result.test or {}).items()}
    tracker.summarise({**result.metrics, **test, "images_per_s": result.images_per_s})
    if result.stop_signal:
        name = signal.Signals(result.stop_signal).name
        logger.info(
            "stopped by %s; TRAIN.AUTO_RESUME True resumes from the checkpoint in %s", name, folder
        )
        return
    if result.stopped_early:
        logger.info("%s", result.stopped_early)
    logger.info("batch sizes: training %d, validation %d", plan.micro_batch_size, batch_size_val)
    for name, value in result.metrics.items():
        logger.info("%-16s %.4f", name, value)
    if result.best_epoch is not None:
        logger.info(
            "best epoch: %d, by %s (checkpoints/best.pt)", result.best_epoch, result.headline
        )
    if result.test is not None:
        shown = "  ".join(f"{name} {value:.4f}" for name, value in result.test.items())
        logger.info("test split, with checkpoints/best.pt:  %s", shown)
    if result.images_per_s:
        logger.info("training speed: %.0f images/s", result.images_per_s)
    logger.info("files: %s", folder.resolve())


def save_result(result: FitResult, plan: BatchPlan, path: Path, run_id: str) -> None:
    """Write the result of a run as JSON; metrics that are not finite become null."""
    content = {
        "run": run_id,
        "metrics": _finite(result.metrics),
        "best": result.best_metrics,
        **({} if result.test is None else {"test": _finite(result.test)}),
        "headline": result.headline,
        "best_epoch": result.best_epoch,
        "stopped_early": bool(result.stopped_early),
        "training_s": round(result.training_s, 3),
        "images_per_s": round(result.images_per_s, 3) or None,  # 0 where no step was left to train
        "batch_size": plan.micro_batch_size,
        "accumulation_steps": plan.accumulation_steps,
        "world_size": plan.world_size,
        "effective_batch": plan.effective_batch_size,
        "learning_rate": plan.learning_rate,
        "warmup_steps": plan.warmup_steps,
        "total_steps": result.num_steps,
    }
    write_text_atomically(path, json.dumps(content, indent=2) + "\n")


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
