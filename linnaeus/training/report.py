"""What a training run says about itself: its batch plan at the start, its result at the end."""

from __future__ import annotations

import json
import logging
import math
import signal
from collections.abc import Iterable
from pathlib import Path

from linnaeus.batching.plan import BatchPlan, OptimizerNode
from linnaeus.batching.summary import summary_lines
from linnaeus.config.schema import TrainConfig
from linnaeus.files import write_text_atomically
from linnaeus.tracking import Tracker
from linnaeus.training.noise_scale import MEANING
from linnaeus.training.trainer import FitResult

logger = logging.getLogger("linnaeus.run")


def report_start(sentences: Iterable[str | None], warnings: Iterable[str]) -> None:
    """Log what a run starts with: its data, weights and settings, and what it should be warned of."""
    for sentence in filter(None, sentences):
        logger.info("%s", sentence)
    for warning in warnings:
        logger.warning("warning: %s", warning)


def report_plan(plan: BatchPlan, train: TrainConfig, optimizer: OptimizerNode) -> None:
    """Log the figures, notes and warnings of the batch plan; arguments as for `summary_lines`."""
    for line in summary_lines(plan, train, optimizer):
        logger.info(line)
    for note in plan.notes:
        logger.info("note: %s", note)
    for warning in plan.warnings:
        logger.warning("warning: %s", warning)


def report_result(
    result: FitResult,
    plan: BatchPlan,
    train: TrainConfig,
    batch_size_val: int,
    folder: Path,
    tracker: Tracker,
) -> None:
    """Log the result of a run and send it to the tracker; `train` is the TRAIN node."""
    noise = {} if result.noise_scale is None else {"noise_scale": result.noise_scale}
    tracker.summarise({**result.metrics, "images_per_s": result.images_per_s, **noise})
    if result.stop_signal:
        name = signal.Signals(result.stop_signal).name
        logger.info("stopped by %s; TRAIN.AUTO_RESUME True goes on from the checkpoint in %s", name, folder)
        return
    logger.info("batch sizes: training %d, validation %d", plan.micro_batch_size, batch_size_val)
    for name, value in result.metrics.items():
        logger.info("%-16s %.4f", name, value)
    if result.images_per_s:
        logger.info("training speed: %.0f images/s", result.images_per_s)
    if result.noise_scale is not None:
        logger.info(f"gradient noise scale: {MEANING}", result.noise_scale)
    elif train.NOISE_SCALE.ENABLED:
        logger.info("gradient noise scale: not known yet, noise still hides the gradient; train longer")
    logger.info("files: %s", folder.resolve())


def save_result(result: FitResult, plan: BatchPlan, path: Path, run_id: str) -> None:
    """Write the result of a run as JSON; metrics that are not finite become null."""
    metrics = {name: value if math.isfinite(value) else None for name, value in result.metrics.items()}
    content = {
        "run": run_id,
        "metrics": metrics,
        "headline": result.headline,
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
