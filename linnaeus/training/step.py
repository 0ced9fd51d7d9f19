"""THE training step and THE validation step. The trainer, AutoBatch and the benchmarks all call these.

Legend of shapes: B samples in a micro-batch, R ranks of the taxonomy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from linnaeus.data.batch import Batch, batch_size, to_device
from linnaeus.training.noise_scale import GradientProbe

Criterion = Callable[[Any, Any], Tensor]
"""From the model's outputs and the targets to a scalar loss."""


@dataclass(frozen=True)
class Precision:
    """How the forward pass computes.

    Attributes:
        autocast_dtype: bfloat16, float16, or None for the parameters' own.
        channels_last: whether images go to the model in channels-last memory format.
    """

    device: torch.device
    autocast_dtype: torch.dtype | None = None
    channels_last: bool = False

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of the forward pass and the loss."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype)

    def place(self, batch: Batch) -> Batch:
        """The batch on the device, in the memory format of the model."""
        return to_device(batch, self.device, non_blocking=True, channels_last=self.channels_last)


@dataclass
class TrainStep:
    """One optimizer step over one or several micro-batches.

    Attributes:
        model: the module, or its DistributedDataParallel wrapper.
        scaler: scales the loss under float16; a disabled one otherwise.
        clip_grad_norm: largest L2 norm of all gradients together; None does not clip.
        after_step: called once per optimizer step, after the parameters have changed (EMA).
        probe: looks at the gradients after each backward pass, before clipping.
    """

    model: nn.Module
    criterion: Criterion
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    precision: Precision
    clip_grad_norm: float | None = None
    after_step: Callable[[], None] | None = None
    probe: GradientProbe | None = None

    def __call__(self, micro_batches: Iterable[Batch], num_micro_batches: int = 1) -> Tensor:
        """Run the step.

        Args:
            micro_batches: batches of B samples, on any device; exactly `num_micro_batches` are taken.
            num_micro_batches: how many there really are; the gradient is the mean over them.

        Returns:
            The mean loss over the micro-batches: a detached scalar on the device, not synchronised.
        """
        batches = iter(micro_batches)
        total = torch.zeros((), device=self.precision.device)
        for number in range(1, num_micro_batches + 1):
            with self._alone() if number < num_micro_batches or self._probe_averages else nullcontext():
                # The batch gets no name here: a micro-batch is freed before the next one is made.
                total += self._backward(next(batches), number, num_micro_batches)
        self._update()
        return total

    def _backward(self, batch: Batch, number: int, num_micro_batches: int) -> Tensor:
        inputs, targets = self.precision.place(batch)
        with self.precision.autocast():
            loss = self.criterion(self.model(inputs), targets) / num_micro_batches
        self.scaler.scale(loss).backward()
        if self.probe is not None:
            self.probe.after_backward(number, num_micro_batches, batch_size(batch))
        return loss.detach()

    def _update(self) -> None:
        if self.clip_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.after_step is not None:
            self.after_step()

    @property
    def _probe_averages(self) -> bool:
        return self.probe is not None and self.probe.averages

    def _alone(self) -> AbstractContextManager[None]:
        """Inside, ranks keep their gradients to themselves."""
        if isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return nullcontext()


@dataclass
class ValidationStep:
    """The forward pass and the metrics of one validation batch.

    Attributes:
        model: the module without a wrapper, so that ranks may hold different numbers of batches.
        update_metrics: takes (outputs, targets, loss); the loss is the batch's mean.
    """

    model: nn.Module
    criterion: Criterion
    precision: Precision
    update_metrics: Callable[[Any, Any, Tensor], None]

    @torch.no_grad()
    def __call__(self, batch: Batch) -> None:
        """Run the step. The model must be in eval mode."""
        inputs, targets = self.precision.place(batch)
        with self.precision.autocast():
            outputs = self.model(inputs)
            loss = self.criterion(outputs, targets)
        self.update_metrics(outputs, targets, loss)
