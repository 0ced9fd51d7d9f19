"""The training loop: epochs of the training step, validation, metrics, checkpoints."""

from __future__ import annotations

import gc
import logging
import math
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from linnaeus.autobatch.memory.device import failed_allocations
from linnaeus.autobatch.memory.interface import empty_cache
from linnaeus.autobatch.state.rng import rng_state
from linnaeus.batch_plan.plan import BatchPlan
from linnaeus.batch_plan.stages import Stage
from linnaeus.config.schema import TrainConfig
from linnaeus.data.batch import Batch
from linnaeus.data.loader import BatchLoader, Loaders
from linnaeus.metrics import score
from linnaeus.runtime.console import ProgressBar
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import CheckpointError, ConfigError, LinnaeusError, first_line
from linnaeus.training.accuracy import LossMeter
from linnaeus.training.build import Assembly
from linnaeus.training.callbacks import (
    CallbackState,
    call_back,
    callback_states,
    load_callback_states,
)
from linnaeus.training.checkpoint import CheckpointFolder, TrainingProgress
from linnaeus.training.ddp import broadcast_tensors, distribute_batchnorm
from linnaeus.training.out_of_memory import (
    OutOfMemoryReport,
    SizeOrigin,
    StepStart,
    end_with_checkpoint,
    wait_unless_first,
)
from linnaeus.training.recording import Recording
from linnaeus.training.resume import early_stopping_metric, restore_generators, resumed_progress
from linnaeus.training.schedule import Schedule
from linnaeus.training.sharding import reshard
from linnaeus.training.step import ValidationStep
from linnaeus.training.stop import StopAgreement
from linnaeus.training.watch import Speed, TimedBatches, loader_advice, peak_memory_gib

logger = logging.getLogger("linnaeus.trainer")

_TOO_FEW_FOR_BATCHNORM = "Expected more than 1 value per channel when training"
"""Start of torch's error for a micro-batch of one sample and a feature map of one pixel."""


@dataclass
class FitResult:
    """The result of a training run.

    Attributes:
        metrics: metrics of the last validation.
        best_metrics: the best value of each metric over all validations.
        images_per_s: training samples per second over all ranks, since this process started training.
        training_s: seconds of training without validation, including those before the run was resumed.
        stop_signal: the signal that stopped the run with a checkpoint; 0 if the run is complete.
        headline: name of the metric that selects the best checkpoint.
        num_steps: optimizer steps of the run so far.
        best_epoch: the epoch of the best checkpoint; None if unknown.
        stopped_early: reason why the run ended before its last epoch; empty if it did not.
        test: metrics of the best checkpoint on the test split; None if there is no such split.
    """

    metrics: dict[str, float]
    images_per_s: float
    training_s: float
    stop_signal: int = 0
    headline: str = "loss"
    num_steps: int = 0
    best_epoch: int | None = None
    stopped_early: str = ""
    best_metrics: dict[str, float] = field(default_factory=dict)
    test: dict[str, float] | None = None


@dataclass
class Trainer:
    """The training loop. The caller builds all parts and passes them in.

    It changes the assembly, `progress`, and after running out of memory the sizes of the training loader. The
    frames above the model are `fit`, `train_epoch`, `TrainStep.__call__`.

    Attributes:
        config: the TRAIN node; how often to log, validate and save.
        plan: the batch sizes of all optimizer steps; replaced when micro-batches must be smaller.
        assembly: model, optimizer, losses and metrics; a checkpoint holds their state.
        schedule: sets the learning rate of each optimizer step.
        stop: the ranks' agreement on stopping.
        checkpoint_extras: further entries of each checkpoint, such as the batch sizes and the configuration.
        size_origins: origin of the batch sizes of `train` and `val`, for errors.
        progress: steps, epochs and metrics so far.
        wrap: wraps the model for several ranks, at the start and again after parameters are unfrozen.
        recording: files and loggers of the run. Opened after the first optimizer step, or before the first
            validation if no step is left. Nothing is saved before.
        callbacks: the user's callbacks by key; called on every rank.

    Attributes:
        train_step: a copy of the assembly's training step, with a wrapped model and all callbacks.
    """

    config: TrainConfig
    plan: BatchPlan
    world: World
    assembly: Assembly
    loaders: Loaders
    schedule: Schedule
    checkpoints: CheckpointFolder
    progress_bar: ProgressBar
    stop: StopAgreement
    recording: Recording = field(default_factory=Recording)
    checkpoint_extras: dict[str, Any] = field(default_factory=dict)
    size_origins: Mapping[str, SizeOrigin] = field(default_factory=dict)
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    callbacks: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._num_images = 0
        self._line_speed, self._epoch_speed, self._side_speed = Speed(), Speed(), Speed()
        self._side: int | None = None
        self._advises_loader = True
        self._seconds = self._waited_s = 0.0
        self._clock = time.monotonic()
        self._saved_step = 0
        self._micro_batch_limit: int | None = (
            None  # set by this process; the plan has an earlier process's limit
        )
        self._memory = failed_allocations(self.world.device)
        self._out_of_memory = OutOfMemoryReport(
            self.config, self.assembly, self.world, self.size_origins
        )
        self._meter = LossMeter(self.world, self.assembly.scaler)
        broadcast_tensors(self.assembly.criterion, self.world)
        step = self.train_step = replace(
            self.assembly.train_step, model=self.wrap(self.assembly.model)
        )
        self._step_start = StepStart(self.assembly, self.world.device)
        before = {"out of memory": self._step_start} if self._splits else {}
        step.callbacks = {**before, **step.callbacks, **self.callbacks}

    def resume(self, entries: Mapping[str, Any], seed: int) -> None:
        """Resume from a checkpoint, whose state is already loaded.

        Args:
            entries: the checkpoint without the state.
            seed: seed of the run.
        """
        headline = self.assembly.headline
        self.progress = resumed_progress(entries, headline, self.config.EARLY_STOPPING)
        self._saved_step = self.progress.step
        restore_generators(entries, self.world, seed)
        self._meter.load_states(entries["train_loss"])
        before, now = entries["config"], self.checkpoint_extras["config"]
        if all(before.get(name) == now.get(name) for name in ("OPTIMIZER", "SCHEDULE")):
            watched = self.config.EARLY_STOPPING.METRIC or headline
            self.schedule.load_state_dict(  # a new learning rate starts without drops
                entries["schedule"], same_metric=early_stopping_metric(entries) == watched
            )
        states = entries["callbacks"]
        load_callback_states(self.callbacks, states[self.world.rank % len(states)])
        if entries["headline"] != headline:
            logger.warning(
                "warning: %s now selects the best checkpoint, %s did before: the comparison restarts",
                headline,
                entries["headline"],
            )
        self._set_lr()
        epoch = self.progress.epoch + 1
        place = f"in epoch {epoch}"
        if self._is_trained:
            key = "EPOCHS" if self.plan.max_steps is None else "MAX_STEPS"
            place = f"after epoch {self.progress.current_epoch}: raise TRAIN.{key} to train longer"
        logger.info("resumed after %d optimizer steps, %s", self.progress.step, place)
        if changes := self.plan.differences(entries["plan"]):
            logger.warning(
                "warning: the checkpoint has another batch plan (%s); training resumes with the new plan and "
                "its learning rate, at the same position in the schedule",
                ", ".join(changes),
            )

    def _set_lr(self) -> None:
        """Set the learning rate of the next optimizer step."""
        self.schedule.apply(self.plan.position(self.progress.epoch, self.progress.samples))

    def fit(self) -> FitResult:
        """Train until the last epoch, early stopping or a stop signal.

        After an error, save the last completed step and raise the error unchanged.

        Raises:
            CheckpointError: a checkpoint cannot be written.
            LinnaeusError: the loss is not finite.
            OutOfMemoryError: memory ran out, and the step cannot be repeated with smaller micro-batches.
        """
        if self._splits and self.world.is_distributed:
            self.recording.open()  # the first step may end with a checkpoint
        with self._errors_explained():
            with self.stop.deferred(), self.progress_bar:
                try:
                    while not (self._is_over or self.stop.stop_signal):
                        self.train_epoch()
                        if not self.stop.stop_signal:
                            self._end_epoch()
                    self._report_side()
                    self.recording.open()
                    if self.stop.stop_signal:
                        self._save()
                    elif self.progress.validated != self.progress.step:
                        self._end_epoch()  # resumed at the end, before its validation
                except Exception as error:
                    self._save_before_ending(error)
                    raise
            self.checkpoints.wait()
            test = None if self.stop.stop_signal else self._test()
        return FitResult(
            self.progress.metrics,
            self._num_images / self._seconds if self._seconds else 0.0,
            self.progress.seconds,
            stop_signal=self.stop.stop_signal,
            headline=self.assembly.headline,
            num_steps=self.progress.step,
            best_epoch=self.progress.best_epoch,
            stopped_early="" if self._is_trained else self._stop_reason,
            best_metrics=self.progress.best_metrics,
            test=test,
        )

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        """Context that raises errors of running out of memory as `OutOfMemoryError` with remedies."""
        try:
            yield
        except LinnaeusError:
            raise
        except Exception as error:
            if not self._memory.refused(error):
                raise
            traceback.clear_frames(error.__traceback__)  # the message needs memory too
            raise self._out_of_memory.between_steps(error, self.progress.step) from error

    def _save_before_ending(self, error: Exception) -> None:
        """Save the last completed step when an error ends the run.

        Skip a state that is incomplete or already saved. The first rank to fail saves, and the others wait.
        """
        step = self.progress.step
        if (
            step == self._saved_step
            or not self.recording.is_open
            or isinstance(error, CheckpointError)
            or not self.world.is_cause(error)
        ):
            return
        problem = ""
        try:
            if self.train_step.is_updating:
                problem = "the next update had begun, which cannot be undone"
            elif not math.isfinite(self._meter.state()[0]):
                problem = "the training loss is not finite"
            elif isinstance(self.assembly.model, FSDPModule):
                problem = "saving a sharded model needs all ranks"
            elif self.world.is_distributed:
                wait_unless_first(self.world)
                self._save_for_next_attempt()
            else:
                self._save()
                self.checkpoints.wait()
        except Exception as failure:
            if not self.world.is_cause(error):  # another rank failed first and reported its error
                return
            problem = first_line(failure)
        if not problem:
            logger.info(
                "An error ended the run. Optimizer step %d is saved; set TRAIN.AUTO_RESUME=True to resume "
                "from it",
                step,
            )
        elif problem != first_line(error):
            logger.warning("warning: optimizer step %d is not saved: %s", step, problem)

    def _test(self) -> dict[str, float] | None:
        """Load the best checkpoint and return its metrics on the test split; None without this split.

        This replaces the last weights, which are already saved.
        """
        if self.loaders.test is None:
            return None
        self.world.update("evaluating the test split")
        best = self.checkpoints.load_best(self.world)
        if best is not None:
            best.restore(self.assembly, self.world)
        empty_cache(self.world.device)
        values = self._validation_metrics(self.loaders.test)
        if values is None:
            self.stop.exchange()
        return values

    @property
    def _stop_reason(self) -> str:
        return self.progress.early_stop_reason(self.config.EARLY_STOPPING)

    @property
    def _is_trained(self) -> bool:
        return self.plan.is_over(self.progress.epoch, self.progress.samples)

    @property
    def _is_over(self) -> bool:
        return self._is_trained or bool(self._stop_reason)

    @property
    def _splits(self) -> bool:
        return self.config.ON_OUT_OF_MEMORY == "split"

    def train_epoch(self) -> None:
        """Train until the next validation, the end of the epoch or a stop signal."""
        batches, stages = self._start_epoch()
        while stages:
            stage, lr, loss = stages.pop(), self.schedule.lr, None
            sizes, epoch = stage.micro_batches, self.progress.epoch + 1
            if self.train_step.callbacks:
                self.train_step.state = self._callback_state(epoch)
            is_logged = (self.progress.step + 1) % self.config.LOG_EVERY == 0 or not stages
            self.train_step.measures_norm = is_logged
            try:
                num_samples = sum(sizes) if len(set(sizes)) > 1 else None
                loss = self.train_step(batches, len(sizes), num_samples)
            except Exception as error:
                self._handle_step_error(error, stage)  # raises, or the step is repeated
            if loss is None:
                self._memory.clean()  # frees the failed step's memory
                batches, stages = self._rest_of_epoch()
                continue
            self._count_step(stage, loss)
            if is_logged:
                self._log_training(lr, stage)
            if self.callbacks:
                call_back(self.callbacks, "on_step_end", self._callback_state(epoch, loss))
            self.stop.after_step()
            every_steps = self.config.CHECKPOINT_EVERY_STEPS
            is_due = every_steps is not None and self.progress.step % every_steps == 0
            if is_due and not self.stop.stop_signal:  # a stopping run saves anyway
                self._meter.mean()  # raises if the loss is not finite, so that no good checkpoint is replaced
                self._count_seconds()
                self._save()
                self._clock = time.monotonic()
            if self.stop.stop_signal:
                self._meter.mean()
                break
        self._count_seconds()

    def dry_run(self) -> None:
        """Take one optimizer step and validate one batch without writing files. Collective.

        Raises:
            LinnaeusError: as `fit`.
        """
        with self._errors_explained(), self.progress_bar:
            batches, stages = self._start_epoch()
            self.train_step.state = self._callback_state(self.progress.epoch + 1)
            while stages:
                stage = stages.pop()
                try:
                    loss = self.train_step(
                        batches, len(stage.micro_batches), sum(stage.micro_batches)
                    )
                except Exception as error:
                    self._handle_step_error(error, stage)  # raises, or the step is repeated
                    self._memory.clean()
                    batches, stages = self._rest_of_epoch()
                else:
                    self._meter.add(loss)
                    logger.info("dry run: one optimizer step, loss %.4f", self._meter.mean())
                    break
            empty_cache(self.world.device)
            values = self._validation_metrics(list(islice(self.loaders.val, 1)))
        shown = "  ".join(f"{name} {value:.4f}" for name, value in (values or {}).items())
        logger.info("dry run: validated one batch: %s; no files were written", shown)

    def _start_epoch(self) -> tuple[Iterator[Batch], list[Stage]]:
        """Prepare the rest of the current epoch; see `_rest_of_epoch`."""
        epoch, samples = self.progress.epoch, self.progress.samples
        if self.assembly.freezing.is_frozen and self.assembly.freezing.ends_within(epoch + 1):
            self._unfreeze()
        self.world.update(lambda: f"training in epoch {epoch + 1}, step {self.progress.step + 1}")
        self.train_step.model.train()
        self.assembly.criterion.train()
        self._clock = time.monotonic()
        batches, stages = self._rest_of_epoch()
        if (side := self.loaders.train.side) != self._side:
            self._report_side()
            logger.info("epoch %d: training images of %d x %d pixels", epoch + 1, side, side)
            empty_cache(self.world.device)  # AutoBatch measured each side without another's blocks
            self._side = side
        done = round(self.plan.position(epoch, samples) - self.plan.position(epoch, 0))
        left = sum(stage.num_steps for stage in self.plan.rest_of_epoch(epoch, samples))
        self.progress_bar.start(f"epoch {epoch + 1}/{self.plan.num_epochs}", done + left)
        self.progress_bar.advance(done)
        return batches, stages

    def _rest_of_epoch(self) -> tuple[Iterator[Batch], list[Stage]]:
        """Return the remaining batches, and the sizes of each remaining optimizer step, the next one last.

        The steps end at the next validation.
        """
        epoch, samples_done = self.progress.epoch, self.progress.samples
        self.loaders.train.set_epoch(epoch, skip=samples_done)
        rest, most = self.plan.rest_of_epoch(epoch, samples_done), None
        if self.config.VALIDATE_EVERY_STEPS is not None:
            most = 0 if self._is_validation_due else self._validation_steps[1]
        steps = (stage for stage in rest for _ in range(stage.num_steps))
        batches = TimedBatches(iter(self.loaders.train), self._add_wait)
        return batches, [*islice(steps, most)][::-1]

    def _add_wait(self, seconds: float) -> None:
        self._waited_s += seconds

    def _count_step(self, stage: Stage, loss: torch.Tensor) -> None:
        """Count a completed step. The first one opens the run's files."""
        self.progress.step += 1
        self.progress.samples += stage.effective_batch_size
        self._num_images += stage.effective_batch_size
        self._set_lr()
        self._count_seconds()
        self.recording.open()
        self._clock = time.monotonic()
        self._meter.add(loss)
        self.progress_bar.advance(1)

    def _report_side(self) -> None:
        """Log the speed of training with the current side of DATA.IMG_SIZE_SCHEDULE."""
        if self._side is not None:
            speed = self._side_speed.read(self._seconds, self._waited_s, self._num_images)
            logger.info("side %d: %.4g samples per second", self._side, speed["samples_per_s"])

    def _unfreeze(self) -> None:
        """Unfreeze all parameters and rebuild DistributedDataParallel, which would ignore them otherwise."""
        self.world.update(f"unfreezing before epoch {self.progress.epoch + 1}")
        self.train_step.model = self.assembly.model
        gc.collect()  # frees the old wrapper with its hooks on the parameters
        empty_cache(
            self.world.device
        )  # AutoBatch measured this phase without cached blocks of the frozen one
        self.assembly.freezing.freeze(False)
        self.train_step.model = self.wrap(self.assembly.model)
        logger.info("epoch %d: the frozen parameters train from now on", self.progress.epoch + 1)

    def _handle_step_error(self, error: Exception, stage: Stage) -> None:
        """After a step ran out of memory, restore the state before it and halve the micro-batches.

        A single rank continues. Several ranks end with a checkpoint, because the others wait for gradients.

        Raises:
            OutOfMemoryError: from `error`; this rank does not repeat the step.
            ConfigError: a micro-batch has one sample, and BatchNorm needs more.
            Exception: `error`, if it is anything else.
        """
        if _TOO_FEW_FOR_BATCHNORM in str(error):
            origin = self.size_origins.get("train")
            raise ConfigError(
                f"{'DATA.BATCH_SIZE' if origin is None else origin.key}: BatchNorm cannot train on a "
                "micro-batch of one sample with one value per channel; set 2 or more, or a model without "
                "BatchNorm (MODEL.NAME)"
            ) from error
        if not self._memory.refused(error):
            raise error
        limit = -(-stage.micro_batch_size // 2)
        limited = self.plan.with_max_micro_batch(limit)
        text = (
            f"out of memory in optimizer step {self.progress.step + 1}, with micro-batches of "
            f"{stage.micro_batch_size} (x {stage.accumulation_steps} accumulation x {stage.world_size} "
            f"ranks): {first_line(error)}"
        )
        problem = self._out_of_memory.of_step(
            text,
            stage,
            is_updating=self.train_step.is_updating,
            smallest=limited.smallest_micro_batch,
        )
        if problem is not None:
            raise problem from error
        self._step_start.restore()
        self.plan, self._micro_batch_limit = limited, limit
        if self.world.is_distributed:
            traceback.clear_frames(error.__traceback__)  # frees the activations
            raise end_with_checkpoint(
                self.world, text, limit, self._save_for_next_attempt
            ) from error
        self.loaders.train.set_sizes(limited.micro_batches)
        logger.warning(
            "warning: %s. TRAIN.ON_OUT_OF_MEMORY split: repeating the step. From now on micro-batches have "
            "at most %d sample%s; the effective batch stays %d",
            text,
            limit,
            "s" * (limit > 1),
            stage.effective_batch_size,
        )

    def _count_seconds(self) -> None:
        """Add the time since the last call, or since `_clock` was set, to the training time."""
        now = time.monotonic()
        self._seconds += now - self._clock
        self.progress.seconds += now - self._clock
        self._clock = now

    def _log_training(self, lr: float, stage: Stage) -> None:
        values = {"loss": self._meter.drain(), "lr": lr}
        if self.plan.changes:
            values["effective_batch"] = stage.effective_batch_size
        if self._side is not None:
            values["img_size"] = self._side
        self.progress_bar.describe(values)
        if (norm := self.train_step.grad_norm) is not None:
            values["grad_norm"] = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        values |= self._line_speed.read(self._seconds, self._waited_s, self._num_images)
        values["peak_memory_gib"] = peak_memory_gib(self.world.device)
        self._write("train", self.progress.epoch + 1, values)

    def _advise_on_loader(self) -> None:
        """Log once that an epoch spent much of its time waiting for data."""
        speed = self._epoch_speed.read(self._seconds, self._waited_s, self._num_images)
        advice = loader_advice(speed, self.loaders.train.num_workers)
        if advice is not None and self._advises_loader:
            self._advises_loader = False
            logger.info("%s", advice)

    def _write(self, split: str, epoch: float, values: dict[str, float]) -> None:
        self.recording.write(split, values, epoch=epoch, step=self.progress.step)

    def _callback_state(self, epoch: int, loss: torch.Tensor | None = None) -> CallbackState:
        return CallbackState(
            self.assembly.model,
            self.assembly.optimizer,
            epoch,
            self.progress.step,
            loss,
            dict(self.progress.metrics),
            self.world.is_main,
            self.checkpoints.folder.parent,
        )

    def _end_epoch(self) -> None:
        """Validate and save if due, and always after the last step. The epoch may be incomplete.

        If a stop or an error interrupts the validation, the epoch does not count as finished. A resumed run
        then validates before its next step.
        """
        self.recording.open()
        before, schedule = replace(self.progress), self.schedule.state_dict()
        is_end, is_complete = self._is_end_of_epoch, False
        if is_end:
            self._advise_on_loader()
        if is_end and not self._is_trained:  # a longer run continues within the last epoch
            self.progress.epoch, self.progress.samples = before.epoch + 1, 0
            self._set_lr()
        epoch = self.progress.current_epoch
        try:
            if self._is_validation_due:
                self._validate()
            if not self.stop.stop_signal:
                if is_end:
                    call_back(self.callbacks, "on_epoch_end", self._callback_state(epoch))
                is_complete = True
        finally:
            if not is_complete:
                self.progress = before
                self.schedule.load_state_dict(schedule)
        is_due = is_end and epoch % self.config.CHECKPOINT_EVERY == 0
        is_ranked = self.progress.step in self.progress.best_steps
        if is_complete and (self._is_over or is_ranked or is_due):
            self._save()

    @property
    def _is_end_of_epoch(self) -> bool:
        epoch, samples = self.progress.epoch, self.progress.samples
        is_over = epoch >= self.plan.num_epochs or not samples
        return is_over or not self.plan.rest_of_epoch(epoch, samples)

    @property
    def _is_validation_due(self) -> bool:
        """Whether to validate before the next optimizer step."""
        progress = self.progress
        if progress.validated == progress.step:
            return False
        if self._is_end_of_epoch and progress.current_epoch >= self.plan.num_epochs:
            return True
        if self.config.VALIDATE_EVERY_STEPS is not None:
            return self._validation_steps[0]
        is_due = progress.current_epoch % self.config.VALIDATE_EVERY == 0
        return is_due and self._is_end_of_epoch

    @property
    def _validation_steps(self) -> tuple[bool, int]:
        """Whether VALIDATE_EVERY_STEPS requires a validation now, and the steps until the next one."""
        progress, every = self.progress, self.config.VALIDATE_EVERY_STEPS or 1
        if every < 1:
            return self.plan.parts(progress.epoch, progress.samples, every)
        done = int(progress.step % every)
        return done == 0, int(every) - done

    def _validate(self) -> None:
        """Validate and log. If any rank gets a stop signal, all ranks interrupt the validation."""
        epoch = self.progress.current_epoch
        is_whole = self.progress.samples == 0
        moment = f"epoch {self.progress.epoch}" if is_whole else f"step {self.progress.step}"
        self.world.update(f"validating after {moment}")
        self._distribute_batchnorm()
        # AutoBatch measured training and validation without each other's cached blocks.
        empty_cache(self.world.device)
        started = time.perf_counter()
        try:
            values = self._validation_metrics(self.loaders.val)
            if self.config.EMA.VALIDATE_RAW and values is not None:
                step = replace(self.assembly.validation_step, model=self.assembly.model)
                raw = self._validation_metrics(self.loaders.val, step)
                values = raw and values | {f"raw/{name}": value for name, value in raw.items()}
        except Exception as error:
            if not self._memory.refused(error):
                raise
            raise self._out_of_memory.of_validation(error, epoch) from error
        empty_cache(self.world.device)
        if values is None:
            self.stop.exchange()
            return
        seconds = time.perf_counter() - started
        self.progress.metrics, self.progress.validated = values, self.progress.step
        place: float = self.progress.epoch  # epochs trained, with a fraction within an epoch
        if self.progress.samples:
            place = round(place + self.progress.samples / self.plan.num_samples, 4)
        self._write("val", place, values)
        self._update_best(values)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        is_best = self.progress.best_steps[:1] == [self.progress.step]
        note = ", best so far" * is_best
        logger.info(
            "validation after epoch %g/%d:  %s  (%.1f s%s)",
            place,
            self.plan.num_epochs,
            shown,
            seconds,
            note,
        )
        call_back(self.callbacks, "on_validation_end", self._callback_state(epoch))

    def _update_best(self, values: Mapping[str, float]) -> None:
        """Compare a validation with earlier ones, for checkpoints, early stopping and learning rate."""
        progress, headline = self.progress, self.assembly.headline
        best, finite = progress.best_metrics, {k: v for k, v in values.items() if math.isfinite(v)}
        progress.best_metrics = best | {
            name: max(best.get(name, value), value, key=partial(score, name))
            for name, value in finite.items()
        }
        metric = self.config.EARLY_STOPPING.METRIC or headline
        progress.watch(score(metric, values[metric]), self.config.EARLY_STOPPING.MIN_DELTA)
        self.schedule.validated(values[metric])
        self._set_lr()
        keep = max(self.config.KEEP_BEST, 1)
        progress.rank(headline, values, keep)

    def _validation_metrics(
        self, batches: Collection[Batch] | BatchLoader, step: ValidationStep | None = None
    ) -> dict[str, float] | None:
        """Return the metrics over all batches of a split; None on every rank if one got a stop signal."""
        step, metrics = step or self.assembly.validation_step, self.assembly.metrics
        step.model.eval()
        self.assembly.criterion.eval()
        metrics.reset()
        if isinstance(step.model, FSDPModule):
            self._validate_together(step, batches)
            reshard(step.model)
        else:
            for batch in batches:
                if self.stop.is_requested:
                    break
                step(batch)
                del batch  # do not hold it while the next one is loaded
        values = metrics.compute(self.world, aborted=self.stop.is_requested)
        metrics.reset()  # frees the scores of several labels per sample
        return values

    def _validate_together(
        self, step: ValidationStep, loader: Collection[Batch] | BatchLoader
    ) -> None:
        """Validate a sharded model. Its forward passes are collectives, so all ranks run the same number.

        A rank with fewer batches repeats its last one, uncounted. All ranks stop at the same batch.
        """
        uncounted, own = replace(step, update_metrics=lambda *_: None), len(loader)
        batches = iter(loader)
        for number in range(int(self.world.reduce(torch.tensor(own), "MAX"))):
            if int(self.world.reduce(torch.tensor(int(self.stop.is_requested)), "MAX")):
                return
            if number < own:
                batch: Any = None  # do not hold it while the next one is loaded
                batch = next(batches)
            (step if number < own else uncounted)(batch)

    def _distribute_batchnorm(self) -> None:
        ema = self.assembly.ema
        average = None if ema is None else ema.module
        distribute_batchnorm(self.assembly.model, average, self.world)

    def _save(self) -> None:
        """Write a checkpoint on rank 0. Collective."""
        self.world.update("saving a checkpoint")
        if self.progress.samples and self._is_validation_due:
            self._distribute_batchnorm()  # a resumed run validates first
        shards = {}
        if isinstance(self.assembly.model, FSDPModule):
            state = self.assembly.state_dict()
            shards = self.checkpoints.save_shards(state, self.progress.step, self.world)
        states = self.world.gather_on_host(self._rank_state())
        if states is not None:
            is_best = self.progress.best_steps[:1] == [self.progress.step]
            self.checkpoints.save(self._content(states) | shards, is_best=is_best)
        self._saved_step = self.progress.step

    def _save_for_next_attempt(self) -> None:
        self.checkpoints.save_for_next_attempt(self._content([self._rank_state()]))
        self._saved_step = self.progress.step

    def _rank_state(self) -> tuple[Any, Any, Any]:
        """Return the state of this rank: generators, losses since the last `train` line, callbacks."""
        return rng_state(self.world.device), self._meter.state(), callback_states(self.callbacks)

    def _content(self, rank_states: list[tuple[Any, Any, Any]]) -> dict[str, Any]:
        """Return the entries of a checkpoint. `rank_states` has the `_rank_state` of all ranks, or of one."""
        generators, losses, callbacks = zip(*rank_states, strict=True)
        limit = self._micro_batch_limit
        limited = {"plan": self.plan.as_dict(), "micro_batch_limit": limit} if limit else {}
        return {
            "progress": vars(self.progress).copy(),
            "state": self.assembly.state_dict(),
            "rng": list(generators),
            "train_loss": list(losses),
            "callbacks": list(callbacks),
            "headline": self.assembly.headline,
            "optimized": self.assembly.optimized,
            "schedule": self.schedule.state_dict(),
            "run": self.recording.run_id,
            **self.checkpoint_extras,
            **limited,
        }
