"""Run one batch size under the budget and measure its peak."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from linnaeus.autobatch.search import OutOfMemory
from linnaeus.autobatch.snapshot import Snapshot
from linnaeus.memory.device import DeviceMemory

MIN_TIMED_STEPS = 5
MAX_TIMED_STEPS = 50
MIN_TIMED_S = 0.25
"""Steps are timed until they are so many and took so long together."""

logger = logging.getLogger("linnaeus.autobatch")


@contextlib.contextmanager
def existing_objects_frozen() -> Iterator[None]:
    """Let collections look at what is made inside alone: what torch has loaded takes them half a second."""
    if gc.get_freeze_count():  # somebody else's; thawing would end theirs too
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class TrialRunner:
    """`measure` of the search: a size goes in, its peak in bytes comes out, or `OutOfMemory` is raised.

    Each trial starts from a clean slate, under a cap that makes the allocator itself refuse what is above the
    budget, and ends with everything resident that training keeps. A training trial starts as training does,
    with the optimizer state of the snapshot, and allocates it where training would: after the first backward
    pass, among the memory that it has left. An optimizer that did not step there (a gradient scaler that
    skips, a step that only accumulates) then takes one with gradients of zero. A trial of a single step and
    a validation trial have the state from the beginning.

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

    @property
    def floor_bytes(self) -> int:
        """What the process holds between trials."""
        return self._memory.in_use() - self._ours_bytes

    def warm_up(self, size: int) -> None:
        """Run a size without measuring it, so that libraries and kernels are loaded when the budget is taken.

        A size that does not fit is no error here: the search finds that out by itself.
        """
        with contextlib.suppress(OutOfMemory):
            self(size)

    def time(self, size: int) -> list[float]:
        """Seconds of each of several steps, after one that warms up; without a cap, for a size that fits.

        Raises:
            OutOfMemory: it does not fit any more.
        """
        self.clean()
        seconds = self._memory.isolate(partial(self._timed_steps, size))
        self.clean()
        if not seconds:
            raise OutOfMemory(f"batch size {size} does not fit any more")
        return seconds

    def clean(self) -> None:
        """Leave nothing of a trial behind; a validation search keeps the optimizer's state."""
        for module in self._modules:
            for parameter in module.parameters():
                parameter.grad = None
        self._snapshot.restore_parts(with_optimizers=self._training)
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # each size is compiled for its own shape, as in training
        self._memory.clean()

    def _measure(self, size: int) -> tuple[str | None, int]:
        """Why the size did not run under the cap (None when it did), and the peak."""
        memory = self._memory
        cap_bytes = self.budget_bytes + self._ours_bytes
        if memory.in_use() >= cap_bytes:
            return "the process holds the whole budget before the first sample", 0
        with memory.cap(cap_bytes):
            retries = memory.num_retries()
            failure = self._run(size)
            peak_bytes = memory.peak() - self._ours_bytes
        if failure is None and memory.num_retries() > retries:
            failure = "the allocator had to flush its cache"
        return failure, peak_bytes

    def _timed_steps(self, size: int) -> list[float]:
        """Seconds of each step; nothing after an out-of-memory error."""
        seconds: list[float] = []
        try:
            for module in self._modules:
                module.train(self._training)
            self._step(self._make_batch(size))
            while len(seconds) < MAX_TIMED_STEPS and (
                len(seconds) < MIN_TIMED_STEPS or sum(seconds) < MIN_TIMED_S
            ):
                self._wait()
                began = time.perf_counter()
                self._step(self._make_batch(size))
                self._wait()
                seconds.append(time.perf_counter() - began)
        except Exception as error:
            if not self._memory.refused(error):
                raise
            _release_frames(error)
            return []
        return seconds

    def _wait(self) -> None:
        """Until the device has done what it was told."""
        if self._memory.device.type != "cpu":
            torch.accelerator.synchronize(self._memory.device)

    def _run(self, size: int) -> str | None:
        """The out-of-memory error's first line, or None when the size ran. Other exceptions pass."""
        try:
            if not self._training or self._num_steps == 1:
                self._allocate_optimizer_state()
            for module in self._modules:
                module.train(self._training)
            self._memory.reset_peak()
            for number in range(self._num_steps):
                with _stepped(self._optimizers) as stepped:
                    self._step(self._make_batch(size))
                if self._training and number == 0:
                    for optimizer in self._optimizers:
                        if optimizer not in stepped:
                            step_with_zero_gradients(optimizer, self._memory.refused)
        except Exception as error:
            if not self._memory.refused(error):
                raise
            _release_frames(error)
            return str(error).partition("\n")[0] or type(error).__name__
        return None

    def _allocate_optimizer_state(self) -> None:
        """By a step that leaves nothing else behind. What it takes at its peak is not this trial's."""
        for optimizer in self._optimizers:
            if not _has_state(optimizer):
                step_with_zero_gradients(optimizer, self._memory.refused)
        self._snapshot.restore_parts(with_optimizers=False)
        self._memory.clean()


def step_with_zero_gradients(
    optimizer: torch.optim.Optimizer, refused: Callable[[BaseException], bool]
) -> None:
    """Let the optimizer take a step with gradients of zero, so that it allocates.

    The gradients there are may be infinite (a gradient scaler skipped them): with those, the trial's next
    step would run on NaN. Parameters may still move (weight decay). An optimizer that cannot take a step with
    dense gradients or without a closure is left as it is: the trial's own steps allocate.

    Args:
        optimizer: the optimizer.
        refused: whether an exception says that there was no memory; such a one passes.
    """
    trainable = _trainable(optimizer)
    without_gradient = [parameter for parameter in trainable if parameter.grad is None]
    try:
        for parameter in trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                with torch.no_grad():
                    parameter.grad.zero_()
        optimizer.step()
    except Exception as error:
        if refused(error):
            raise
        logger.debug("%s allocates in the trial itself: %s", type(optimizer).__name__, error)
    finally:
        for parameter in without_gradient:
            parameter.grad = None


def _trainable(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter for parameter in parameters if parameter.requires_grad]


def _has_state(optimizer: torch.optim.Optimizer) -> bool:
    return all(optimizer.state.get(parameter) for parameter in _trainable(optimizer))


@contextlib.contextmanager
def _stepped(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[list[torch.optim.Optimizer]]:
    """A list that receives every optimizer that takes a step inside."""
    seen: list[torch.optim.Optimizer] = []
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            handle = optimizer.register_step_post_hook(lambda stepped, *_: seen.append(stepped))
            stack.callback(handle.remove)
        yield seen


def _release_frames(error: BaseException) -> None:
    """Clear the frames that the error passed through: their locals hold the trial's tensors."""
    seen: set[int] = set()
    chain: BaseException | None = error
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
