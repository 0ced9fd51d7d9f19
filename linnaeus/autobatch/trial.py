"""Run one batch size under the budget and measure its peak."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from linnaeus.autobatch.search import OutOfMemory
from linnaeus.autobatch.snapshot import Snapshot
from linnaeus.memory import DeviceMemory

logger = logging.getLogger("linnaeus.autobatch")


class TrialRunner:
    """`measure` of the search: a size goes in, its peak in bytes comes out, or `OutOfMemory` is raised.

    Each trial starts from a clean slate, under a cap that makes the allocator itself refuse what is above the
    budget, with everything training keeps resident: optimizer state is allocated once, by a real step with
    zero gradients, so that a gradient scaler that skips its first steps does not hide it.

    Args:
        step: runs one full training or validation step on what `make_batch` gave.
        make_batch: from a size to a batch on the device.
        state: everything the step may change.
        memory: of the device.
        budget_bytes: what the process may hold there.
        num_steps: steps that one trial runs.
        training: whether modules are in training mode.
        snapshot: of `state`; its copies on the host are not counted where the host is the device.
    """

    def __init__(
        self,
        step: Callable[[Any], object],
        make_batch: Callable[[int], Any],
        *,
        state: Sequence[Any],
        memory: DeviceMemory,
        budget_bytes: int,
        num_steps: int,
        training: bool,
        snapshot: Snapshot,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._step = step
        self._make_batch = make_batch
        self._optimizers = [part for part in state if isinstance(part, torch.optim.Optimizer)]
        self._modules = [part for part in state if isinstance(part, nn.Module)]
        self._memory = memory
        self._num_steps = num_steps
        self._training = training
        self._snapshot = snapshot
        self._ours_bytes = snapshot.host_bytes if memory.device.type == "cpu" else 0
        self._allocated = False

    def __call__(self, size: int) -> int:
        """Run the trial.

        Args:
            size: the batch size.

        Returns:
            Peak bytes of the process on the device.

        Raises:
            OutOfMemory: the size did not fit under the budget.
        """
        self.clean()
        failure, peak_bytes = self._memory.isolate(partial(self._measure, size))
        self.clean()
        if failure is not None:
            logger.debug("batch size %d: %s", size, failure)
            raise OutOfMemory(failure)
        return peak_bytes

    def warm_up(self, size: int) -> None:
        """Run a size without measuring it, so that libraries and kernels are loaded when the budget is taken.

        A size that does not fit is no error here: the search finds that out by itself.
        """
        with contextlib.suppress(OutOfMemory):
            self(size)

    def clean(self) -> None:
        """Leave nothing of a trial behind but the optimizer's state."""
        for module in self._modules:
            for parameter in module.parameters():
                parameter.grad = None
        self._snapshot.restore_between_trials()
        if _is_compiled(self._modules):
            torch.compiler.reset()  # each size is compiled for its own shape, as in training
        self._memory.clean()

    def _measure(self, size: int) -> tuple[str | None, int]:
        """Why the size did not run under the cap (None when it did), and the peak."""
        memory = self._memory
        cap_bytes = self.budget_bytes + self._ours_bytes
        if memory.in_use() >= cap_bytes:
            return "the process holds the whole budget before the first sample", 0
        retries = memory.num_retries()
        with memory.cap(cap_bytes):
            memory.reset_peak()
            failure = self._run(size)
            peak_bytes = memory.peak() - self._ours_bytes
        if failure is None and memory.num_retries() > retries:
            failure = "the allocator had to flush its cache"
        return failure, peak_bytes

    def _run(self, size: int) -> str | None:
        """The out-of-memory error's first line, or None when the size ran. Other exceptions pass."""
        try:
            self._allocate_optimizer_state()
            for module in self._modules:
                module.train(self._training)
            for _ in range(self._num_steps):
                self._step(self._make_batch(size))
        except Exception as error:
            if not self._memory.refused(error):
                raise
            _release_frames(error)
            return str(error).partition("\n")[0] or type(error).__name__
        return None

    def _allocate_optimizer_state(self) -> None:
        if self._allocated:
            return
        for optimizer in self._optimizers:
            allocate_state(optimizer, self._memory.refused)
        self._snapshot.restore_between_trials()
        self._allocated = True


def allocate_state(optimizer: torch.optim.Optimizer, refused: Callable[[BaseException], bool]) -> None:
    """Make the optimizer allocate what it keeps per parameter, by a real step with zero gradients.

    Gradients are gone afterwards; parameters may have moved (weight decay). An optimizer that cannot take a
    step with dense zero gradients or without a closure is left as it is: the trial's own steps allocate.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if all(optimizer.state.get(parameter) for parameter in trainable):
        return
    try:
        for parameter in trainable:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    except Exception as error:
        if refused(error):
            raise
        logger.debug("%s allocates in the trial itself: %s", type(optimizer).__name__, error)
    finally:
        for parameter in trainable:
            parameter.grad = None


def _is_compiled(modules: Sequence[nn.Module]) -> bool:
    return any(
        submodule._compiled_call_impl is not None or hasattr(submodule, "_orig_mod")
        for module in modules
        for submodule in module.modules()
    )


def _release_frames(error: BaseException) -> None:
    """Clear the frames that the error passed through: their locals hold the trial's tensors."""
    seen: set[int] = set()
    chain: BaseException | None = error
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
