"""A trained run on labeled data: the validation step of training, and metrics beyond those that it logs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linnaeus.autobatch.memory.device import failed_allocations
from linnaeus.autobatch.memory.oom import is_out_of_memory
from linnaeus.config.schema import TrainConfig
from linnaeus.data.batch import Batch
from linnaeus.data.mixing import DeviceTransform
from linnaeus.data.transforms import Preprocessing
from linnaeus.inference.figures import EvaluationMetrics, LevelFigures, SetFigures
from linnaeus.inference.trained import TrainedRun
from linnaeus.models.freeze import Freezing
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import (
    CheckpointError,
    ConfigError,
    OutOfMemoryError,
    first_detail,
    first_line,
)
from linnaeus.training.build import Assembly
from linnaeus.training.losses import build_loss, gives_log_probabilities
from linnaeus.training.out_of_memory import SizeOrigin, validation_remedies
from linnaeus.training.precision import build_precision
from linnaeus.training.step import TrainStep, ValidationStep


@dataclass(frozen=True)
class Outcome:
    """Results of an evaluation.

    Attributes:
        metrics: those that training logs, computed as there; equal on all ranks.
        levels: the metrics of each level, coarse to fine, on rank 0; None on the others.
        duration_s: of the pass over the data.
        samples: see `EvaluationMetrics.samples`.
    """

    metrics: dict[str, float]
    levels: list[LevelFigures | SetFigures] | None
    duration_s: float
    samples: tuple[Tensor, Tensor, list[int]] | None = None


def assemble_evaluation(
    trained: TrainedRun, loss_node: Any, config: TrainConfig
) -> tuple[Assembly, EvaluationMetrics]:
    """Return the run's model with the validation step of training.

    Args:
        trained: the run; its loss's state, such as class weights, is restored.
        loss_node: the LOSS node of the run.
        config: the TRAIN node; precision, memory format and compilation are read from it.

    Returns:
        The step in an assembly, as the search for a batch size needs it, and the objects that it updates. The
        model takes no gradients, and the optimizer has one unused parameter.

    Raises:
        CheckpointError: the state of the loss does not fit.
        ConfigError: a loss that cannot be built.
    """
    device, taxonomy = trained.device, trained.spec.taxonomy
    memory_format = torch.channels_last if config.CHANNELS_LAST else torch.preserve_format
    model = trained.model.to(memory_format=memory_format)
    model.requires_grad_(False)
    if config.COMPILE:
        model.compile(mode=config.COMPILE_MODE, dynamic=config.COMPILE_DYNAMIC)
    criterion = build_loss(loss_node, taxonomy, device).to(device).eval()
    try:
        criterion.load_state_dict(dict(trained.criterion_state))
    except RuntimeError as error:
        raise CheckpointError(
            f"{trained.checkpoint}: the state of its loss does not fit LOSS: {first_detail(error)}"
        ) from error
    metrics = EvaluationMetrics(taxonomy, device, are_logs=gives_log_probabilities(model))
    preprocessing = trained.spec.preprocessing
    transform = DeviceTransform(None if preprocessing is None else preprocessing.normalise())
    precision = build_precision(config, device, transform)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros((), device=device), requires_grad=False)])
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    assembly = Assembly(
        model=model,
        criterion=criterion,
        optimizer=optimizer,
        scaler=scaler,
        ema=None,
        metrics=metrics.logged,
        train_step=TrainStep(model, criterion, optimizer, scaler, precision),
        validation_step=ValidationStep(model, criterion, precision, metrics.update),
        freezing=Freezing(model),
        weights=str(trained.checkpoint),
    )
    return assembly, metrics


def check_takes_size(trained: TrainedRun, preprocessing: Preprocessing) -> None:
    """Check that the model takes images of another size than in training.

    Raises:
        ConfigError: it does not.
        OutOfMemoryError: not even one such image fits into memory.
    """
    if trained.spec.preprocessing is None or trained.spec.preprocessing.size == preprocessing.size:
        return
    height, width = preprocessing.size
    image = torch.zeros(1, preprocessing.channels, height, width, device=trained.device)
    try:
        with torch.no_grad():
            trained.model(image)
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemoryError(
                f"DATA.IMG_SIZE: out of memory with a single image of {height}x{width} pixels: "
                f"{first_line(error)}; choose smaller images"
            ) from error
        before = "x".join(map(str, trained.spec.preprocessing.size))
        raise ConfigError(
            f"DATA.IMG_SIZE: this model does not take images of {height}x{width} pixels, only {before} as in "
            f"training: {first_line(error)}; leave DATA.IMG_SIZE out"
        ) from error


def evaluate(
    step: ValidationStep,
    metrics: EvaluationMetrics,
    batches: Iterable[Batch],
    world: World,
    origin: SizeOrigin,
    on_batch: Callable[[], object] = lambda: None,
) -> Outcome:
    """Run the step on all batches of this rank, and sum over the ranks. Every rank must call this.

    Args:
        step: updates `metrics`, which are reset before.
        batches: this rank's part of the samples.
        origin: of the batch size, for the error when memory runs out.
        on_batch: called after each batch.

    Raises:
        DataError: a sample cannot be read.
        OutOfMemoryError: a batch does not fit.
        LinnaeusError: the model's outputs are not finite; on rank 0.
    """
    memory = failed_allocations(world.device)
    step.model.eval()
    metrics.reset()
    started = time.perf_counter()
    try:
        for batch in batches:
            step(batch)
            del batch  # or it would be held while the next one is loaded
            on_batch()
    except Exception as error:
        if not memory.refused(error):
            raise
        remedies = ", ".join(validation_remedies(origin))
        raise OutOfMemoryError(
            f"out of memory in the evaluation, with batches of {origin.size}: {first_line(error)}. "
            f"{origin.sentence}. Remedies: {remedies}"
        ) from error
    values = metrics.logged.compute(world)
    assert values is not None  # no rank breaks off
    levels = metrics.figures(world)
    return Outcome(values, levels, time.perf_counter() - started, metrics.samples)


def evaluated_preprocessing(
    trained: TrainedRun, changes: Mapping[str, Any]
) -> Preprocessing | None:
    """Return the run's preprocessing, with other attributes.

    Raises:
        ConfigError: the run's dataset gave tensors, so there is no preprocessing to change.
    """
    before = trained.spec.preprocessing
    if before is None and changes:
        raise ConfigError(
            "DATA.IMG_SIZE and DATA.AUGMENT: the dataset of the run gave tensors, which pass as they are; "
            "leave both out"
        )
    return before if before is None else dataclasses.replace(before, **changes)
