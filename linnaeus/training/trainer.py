"""The training loop: epochs of THE step, validation, metrics, checkpoints."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, repeat
from types import FrameType
from typing import Any

import torch

from linnaeus.batching.plan import BatchPlan
from linnaeus.batching.stages import Stage
from linnaeus.config.schema import TrainConfig
from linnaeus.data.loader import Loaders
from linnaeus.dist import World
from linnaeus.errors import LinnaeusError
from linnaeus.log import MetricsFile, Progress
from linnaeus.rng import rng_state, set_rng_state
from linnaeus.tracking import Tracker
from linnaeus.training.checkpoint import CheckpointFolder, TrainingState
from linnaeus.training.metrics import ClassificationMetrics, headline
from linnaeus.training.step import TrainStep, ValidationStep

logger = logging.getLogger("linnaeus.trainer")

STOP_CHECK_EVERY = 8
"""Optimizer steps between two agreements of the ranks on whether somebody asked to stop."""


@dataclass
class TrainingProgress:
    """How far training has come; part of every checkpoint.

    Attributes:
        epoch: epochs finished.
        samples: samples of the unfinished epoch that are done, over all processes.
        step: optimizer steps done.
        best: best headline metric so far; None before the first validation.
        metrics: of the last validation.
        seconds: spent in training steps, data included and validation left out.
    """

    epoch: int = 0
    samples: int = 0
    step: int = 0
    best: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class FitResult:
    """What a training run came to.

    Attributes:
        metrics: of the last validation.
        images_per_s: training samples per second over all processes, of this process's lifetime.
        training_s: seconds of training without validation, those before a resumption included.
        interrupted: whether somebody stopped the run; a checkpoint has been saved.
        noise_scale: the gradient noise scale in samples, where it was measured.
    """

    metrics: dict[str, float]
    images_per_s: float
    training_s: float
    interrupted: bool = False
    noise_scale: float | None = None


@dataclass
class MetricsWriter:
    """Where a run's figures go; on ranks other than 0 nothing is written."""

    metrics_file: MetricsFile
    tracker: Tracker
    progress: Callable[[], Progress]

    def write(self, *, step: int, epoch: int, split: str, values: dict[str, float]) -> None:
        """Metrics at an optimizer step."""
        self.metrics_file.write(step=step, epoch=epoch, split=split, values=values)
        self.tracker.log({f"{split}/{name}": value for name, value in values.items()}, step=step)


@dataclass
class Trainer:
    """Runs the epochs. Everything it needs is built before and handed in.

    Attributes:
        config: the TRAIN node; how often to log, validate and save.
        plan: what each optimizer step takes, and how many there are.
        train_step: THE training step.
        validation_step: THE validation step.
        metrics: what the validation step updates.
        state: what a checkpoint holds.
        checkpoint_extras: written into each checkpoint beside the state (sizes, configuration).
    """

    config: TrainConfig
    plan: BatchPlan
    world: World
    loaders: Loaders
    train_step: TrainStep
    validation_step: ValidationStep
    metrics: ClassificationMetrics
    state: TrainingState
    checkpoints: CheckpointFolder
    metrics_writer: MetricsWriter
    checkpoint_extras: dict[str, Any] = field(default_factory=dict)
    done: TrainingProgress = field(default_factory=TrainingProgress)

    def __post_init__(self) -> None:
        self._stop = StopRequest(self.world)
        self._num_images = 0
        self._seconds = 0.0

    def resume(self, checkpoint: dict[str, Any]) -> None:
        """Go on from a checkpoint.

        Raises:
            CheckpointError: it belongs to another model or another configuration.
        """
        self.state.load_state_dict(checkpoint["state"])
        self.done = TrainingProgress(**checkpoint["progress"])
        if self.train_step.probe is not None and checkpoint.get("noise_scale") is not None:
            self.train_step.probe.scale.load_state_dict(checkpoint["noise_scale"])
        generators = checkpoint["rng"]
        if self.world.rank < len(generators):
            set_rng_state(generators[self.world.rank], self.world.device)
        logger.info("resumed after %d optimizer steps, in epoch %d", self.done.step, self.done.epoch + 1)

    def fit(self) -> FitResult:
        """Train until the last epoch or until somebody asks to stop."""
        with self._stop.listening(), self.metrics_writer.progress() as progress:
            while self.done.epoch < self.plan.num_epochs:
                self.train_epoch(progress)
                if self._stop.agreed:
                    self._save()
                    break
                self.done.epoch, self.done.samples = self.done.epoch + 1, 0
                self._end_epoch()
        images_per_s = self._num_images / self._seconds if self._seconds else 0.0
        return FitResult(
            self.done.metrics, images_per_s, self.done.seconds, self._stop.agreed, self._noise_scale
        )

    @property
    def _noise_scale(self) -> float | None:
        probe = self.train_step.probe
        return None if probe is None else probe.scale.value

    def train_epoch(self, progress: Progress) -> None:
        """The rest of the present epoch's steps, or fewer when somebody asks to stop."""
        epoch, samples_done = self.done.epoch, self.done.samples // self.world.world_size
        self.loaders.train.set_epoch(epoch, skip=samples_done)
        stages = self.plan.rest_of_epoch(epoch, samples_done)
        remaining = sum(stage.num_steps for stage in stages)
        progress.start(f"epoch {epoch + 1}/{self.plan.num_epochs}", remaining)
        self.train_step.model.train()
        meter = LossMeter(self.world)
        batches = iter(self.loaders.train)
        started = time.perf_counter()
        for stage in chain.from_iterable(repeat(stage, stage.num_steps) for stage in stages):
            if self._stop.check(self.done.step):
                break
            rate = self.state.optimizer.param_groups[0]["lr"]
            probe = self.train_step.probe
            if probe is not None and self.done.step % self.config.NOISE_SCALE.EVERY == 0:
                probe.arm()
            meter.add(self.train_step(batches, stage.accumulation_steps))
            self.state.schedule.step()
            remaining -= 1
            self.done.step += 1
            self.done.samples += stage.effective_batch_size
            self._num_images += stage.effective_batch_size
            progress.advance(1)
            if self.done.step % self.config.LOG_EVERY == 0 or not remaining:
                self._log_training(meter, rate, stage, progress)
        seconds = time.perf_counter() - started
        self._seconds += seconds
        self.done.seconds += seconds

    def _log_training(self, meter: LossMeter, rate: float, stage: Stage, progress: Progress) -> None:
        values = {"loss": meter.drain(), "lr": rate}
        if self.plan.changes:
            values["effective_batch"] = stage.effective_batch_size
        if self._noise_scale is not None:
            values["noise_scale"] = self._noise_scale
        progress.describe(values)
        self.metrics_writer.write(step=self.done.step, epoch=self.done.epoch, split="train", values=values)

    def _end_epoch(self) -> None:
        """Validate and save where it is due; always after the last epoch."""
        epoch, config = self.done.epoch, self.config
        is_last = epoch == self.plan.num_epochs
        is_best = False
        if is_last or epoch % config.VALIDATE_EVERY == 0:
            is_best = self._validate()
        if is_last or is_best or epoch % config.CHECKPOINT_EVERY == 0:
            self._save(is_best=is_best)

    def _validate(self) -> bool:
        """Validate, log, and say whether this is the best so far."""
        self.validation_step.model.eval()
        if self.world.device.type != "cpu":
            torch.accelerator.empty_cache()  # AutoBatch measured validation without training's cached blocks
        self.metrics.reset()
        started = time.perf_counter()
        for batch in self.loaders.val:
            self.validation_step(batch)
        values = self.metrics.compute()
        seconds = time.perf_counter() - started
        self.done.metrics = values
        self.metrics_writer.write(step=self.done.step, epoch=self.done.epoch, split="val", values=values)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        logger.info("epoch %d/%d  %s  (%.1f s)", self.done.epoch, self.plan.num_epochs, shown, seconds)
        _, value = headline(values)
        if math.isnan(value) or (self.done.best is not None and value <= self.done.best):
            return False
        self.done.best = value
        return True

    def _save(self, *, is_best: bool = False) -> None:
        """Write a checkpoint on rank 0; every rank must call this."""
        generators = self.world.gather(rng_state(self.world.device))
        probe = self.train_step.probe
        if self.world.is_main:
            content = {
                "progress": vars(self.done).copy(),
                "state": self.state.state_dict(),
                "rng": generators,
                "noise_scale": None if probe is None else probe.scale.state_dict(),
                **self.checkpoint_extras,
            }
            self.checkpoints.save(content, is_best=is_best)


class LossMeter:
    """Sums the loss on the device and looks at it only when asked, so that no step waits for it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._total: torch.Tensor | None = None
        self._count = 0

    def add(self, loss: torch.Tensor) -> None:
        """One optimizer step's mean loss."""
        self._total = loss if self._total is None else self._total + loss
        self._count += 1

    def drain(self) -> float:
        """The mean since the last call, over all ranks; NaN without any. Every rank must call this.

        Raises:
            LinnaeusError: the loss is not finite.
        """
        if self._total is None:
            return math.nan
        mean = float(self._world.mean(self._total / self._count))
        self._total, self._count = None, 0
        if not math.isfinite(mean):
            raise LinnaeusError(
                f"the training loss is {mean}. Lower OPTIMIZER.LR, raise SCHEDULE.WARMUP_EPOCHS, set "
                "TRAIN.CLIP_GRAD_NORM, or use TRAIN.AMP bf16 or off; the last checkpoint is kept"
            )
        return mean


class StopRequest:
    """Ctrl-C, turned into a stop at the end of a step; a second one interrupts at once.

    Every rank sees the stop at the same step, or the others would wait for it in a collective.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._requested = False
        self.agreed = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGINT inside the context."""
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def check(self, step: int) -> bool:
        """Whether to stop before this optimizer step. Every rank must call this for every step."""
        if not self._world.is_distributed:
            self.agreed = self._requested
        elif step % STOP_CHECK_EVERY == 0:
            self.agreed = any(self._world.gather(self._requested))
        return self.agreed

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
        logger.info("stopping after this step and saving a checkpoint (Ctrl-C again: at once)")
