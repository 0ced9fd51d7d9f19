"""The one training step and the one validation step: trainer, AutoBatch and benchmarks all call these.

Shapes: B is the number of samples in a micro-batch, L the number of levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from linnaeus.data.batch import Batch, batch_size
from linnaeus.training.callbacks import CallbackState, MicroBatch, call_back
from linnaeus.training.distill import Distillation
from linnaeus.training.losses import trainable_parameters
from linnaeus.training.precision import Precision

Criterion = Callable[[Any, Any], Tensor]
"""Maps the model's outputs and the targets to a scalar loss: a mean over the B samples.

Steps average it over micro-batches, by their samples, and over the ranks, and so get the mean over the
effective batch. A loss that divides by anything else, such as the number of known labels, has another
gradient for each way to split the batch.
"""


@dataclass
class TrainStep:
    """One optimizer step over one or several micro-batches.

    Attributes:
        model: the module, or its DistributedDataParallel wrapper.
        criterion: its own parameters train too; the step averages their gradients over the ranks.
        scaler: scales the loss for float16; disabled for other formats.
        clip_grad_norm: largest L2 norm of all gradients together; None does not clip.
        distillation: adds a teacher's soft targets to the loss; None without.
        callbacks: called at the moments of the step, by key.
        state: their argument; the trainer sets it before each step.
        measures_norm: whether to measure the norm of the gradient where it is not clipped.
        grad_norm: norm of the whole gradient of the last step, before clipping; None where not measured.
        is_updating: whether parameters, optimizer, loss scale or average are changing. After a step that
            failed it says whether they may have changed.
    """

    model: nn.Module
    criterion: Criterion
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    precision: Precision
    clip_grad_norm: float | None = None
    distillation: Distillation | None = None
    callbacks: dict[str, Any] = field(default_factory=dict)
    state: CallbackState | None = None
    measures_norm: bool = field(default=False, init=False)
    grad_norm: Tensor | None = field(default=None, init=False)
    is_updating: bool = field(default=False, init=False)

    def __call__(
        self,
        micro_batches: Iterable[Batch],
        num_micro_batches: int = 1,
        num_samples: int | None = None,
    ) -> Tensor:
        """Run the step.

        Args:
            micro_batches: batches of B samples, on any device; exactly `num_micro_batches` are taken.
            num_micro_batches: micro-batches of this step; the gradient is the mean over them.
            num_samples: samples of all of them, where their sizes differ: the mean is then over samples.

        Returns:
            The mean loss over the micro-batches: a detached scalar on the device, not synchronized.
        """
        batches = iter(micro_batches)
        self._call_back("on_step_start")
        total: Tensor | None = None
        for number in range(1, num_micro_batches + 1):
            is_last = number == num_micro_batches
            with nullcontext() if is_last else self._no_sync():
                batch = next(batches)
                divisor: float = num_micro_batches
                if num_samples is not None:
                    divisor = num_samples / batch_size(batch)
                inputs, targets = self.precision.place(batch)
                with self.precision.autocast():
                    outputs = self.model(inputs)
                    loss = self.criterion(outputs, targets)
                    if self.distillation is not None:
                        loss = self.distillation(loss, outputs, inputs)
                    del outputs
                if divisor != 1:
                    loss = loss / divisor
                self.scaler.scale(loss).backward()
                if self.callbacks:
                    place = MicroBatch(number, num_micro_batches, batch_size(batch), divisor)
                    self._call_back("on_backward", place)
                part = loss.detach().float()
                total = part if total is None else total + part
                del batch, inputs, targets, loss  # freed before the next batch is made
        self._update()
        assert total is not None
        return total

    def _call_back(self, moment: str, micro_batch: MicroBatch | None = None) -> None:
        if self.callbacks:
            state = self.state or CallbackState(self.model, self.optimizer)
            call_back(self.callbacks, moment, replace(state, micro_batch=micro_batch))

    def _update(self) -> None:
        of_loss = trainable_parameters(self.criterion)
        if isinstance(self.model, DistributedDataParallel):
            _average_gradients(of_loss, self.model.process_group)
        if self.clip_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            parameters = [*self.model.parameters(), *of_loss]
            self.grad_norm = nn.utils.clip_grad_norm_(parameters, self.clip_grad_norm)
        elif self.measures_norm:
            self.scaler.unscale_(self.optimizer)
            parameters = [*self.model.parameters(), *of_loss]
            gradients = [each.grad for each in parameters if each.grad is not None]
            self.grad_norm = nn.utils.get_total_norm(gradients)
        self.is_updating = True
        scale = self._scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self._scale() >= scale:
            self._call_back("on_update")
        self.is_updating = False

    def _scale(self) -> float:
        """The scale of the loss, which falls where the scaler skips a step; 1 where nothing depends on it."""
        is_read = self.callbacks and self.precision.device.type != "meta"
        return self.scaler.get_scale() if is_read else 1.0

    def _no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are not averaged over the ranks."""
        if isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return nullcontext()


def _average_gradients(parameters: Iterable[nn.Parameter], group: torch_dist.ProcessGroup) -> None:
    """Average gradients over the ranks, in place. A rank without one counts as zero."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= group.size()  # before the sum, as DistributedDataParallel does
        torch_dist.all_reduce(parameter.grad, group=group)


@dataclass
class ValidationStep:
    """The forward pass and the metrics of one validation batch.

    Attributes:
        model: without DistributedDataParallel, so that ranks may have different numbers of batches.
        update_metrics: called with (outputs, targets, mean loss of the batch).
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
