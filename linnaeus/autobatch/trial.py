"""Run one batch size under the budget and measure its peak."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from linnaeus.autobatch import nest
from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.memory.interface import DeviceMemory, empty_cache, synchronize
from linnaeus.autobatch.memory.oom import exceeds_a_kernel
from linnaeus.autobatch.memory.storages import num_compiled_graphs
from linnaeus.autobatch.observer import sized
from linnaeus.autobatch.search import KernelLimit, OutOfMemory
from linnaeus.autobatch.state.snapshot import Snapshot, parameters_of

MIN_TIMED_STEPS = 5
MAX_TIMED_STEPS = 50
MIN_TIMED_S = 0.25
"""Steps are timed until there are at least `MIN_TIMED_STEPS` and they took `MIN_TIMED_S` seconds together, or
until there are `MAX_TIMED_STEPS`."""

NEARLY_FULL = 0.9
"""Fraction of the budget above which a trial empties the cache and repeats its steps. Fragmentation then adds
less than 10 %, so lower peaks cannot cross the budget."""
MORE_STEPS = 5
"""Steps that a warm-up takes more than a trial, to see whether equal steps allocate equal memory. If not, all
trials take them too."""
STEADY = 0.001
"""Fraction by which the allocations of equal steps may differ in a warm-up, where other tensors are small."""

logger = logging.getLogger("linnaeus.autobatch")


@contextlib.contextmanager
def existing_objects_frozen() -> Iterator[None]:
    """Make garbage collection skip all objects that exist now.

    After importing torch a full collection takes half a second, and every trial runs several. Where the
    caller has frozen objects, nothing is done, because unfreezing would release the caller's objects too.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class NoMoreSamples(Exception):  # noqa: N818 (it names an event, as `OutOfMemory` does)
    """Raised by a trial whose batch has fewer samples than its size, because there are no more.

    Attributes:
        num_samples: all that there are.
    """

    def __init__(self, num_samples: int) -> None:
        super().__init__(f"there are no more than {num_samples} samples")
        self.num_samples = num_samples


@dataclass(eq=False)
class TrialRunner:
    """Runs batch sizes one at a time: the `measure` function of the search.

    Each trial starts with an empty cache and runs under a cap, so that the allocator itself refuses memory
    above the budget. By its end, a trial has allocated everything that training keeps.

    A training trial begins with the optimizer state of the snapshot, usually none. An optimizer that has not
    stepped by the end of the first step (a scaler skipped it, or the step only accumulates) then takes a step
    with zero gradients; in trials of a single step it does so before. Where training empties the cache of an
    accelerator between its steps, a trial that nearly fills the budget does so too, and repeats its steps:
    tensors that training keeps then lie between gaps of activations.

    With `torch.backends.cudnn.benchmark`, a first step is not counted: cuDNN times kernels in it, with
    workspaces up to all that is free. The first validation trial begins with a training step. Its
    optimizer state stays until the last trial.

    Args:
        memory: of the device.
        snapshot: the copies of `state`.
        num_steps: steps per trial.
        training: whether modules run in training mode.
        budget_bytes: most bytes that the process may hold on the device; the search sets it.
        step, make_batch, and the others: as for `BatchSizeFinder`.

    Attributes:
        is_steady: whether equal steps allocate equal memory, as far as the warm-up shows. If not, trials take
            more steps, and the largest peak counts.
        varies_by: by size, the fraction by which the peaks of equal steps differed; empty if steady.
        num_calls: calls of the step so far.
    """

    step: Callable[[Any], object]
    make_batch: Callable[[int], Any]
    state: Sequence[Any]
    memory: DeviceMemory
    snapshot: Snapshot
    num_steps: int
    training: bool
    empties_cache: bool = False
    train_once: Callable[[], object] | None = None
    before_trial: Callable[[int], object] = lambda size: None
    unit: str | None = None
    budget_bytes: int = 0

    def __post_init__(self) -> None:
        self.empties_cache &= (
            self.training and self.num_steps > 1 and self.memory.device.type != "cpu"
        )
        self._optimizers = self.snapshot.stepping_optimizers()
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self._optimizers):
            raise AutoBatchError(
                "AutoBatch: LBFGS in state fills its history over many steps, long after a trial has ended. "
                "Set the batch size by hand, or use another optimizer."
            )
        self._modules = [part for part in self.state if isinstance(part, nn.Module)]
        self._is_prepared = self.training
        self._largest_fitted = 0
        self._sizes_given: set[int] = set()
        self._sizes_of: dict[tuple[torch.Size, ...], set[int]] = {}
        self._kinds_given: set[tuple[int, ...]] = set()
        self._num_retries = 0
        self.num_calls = 0
        self.is_steady = True
        self.varies_by: dict[int, float] = {}
        self._allocations_vary_by = 0.0

    def __call__(self, size: int) -> int:
        """Run one trial and return the peak: bytes that the process held on the device.

        Raises:
            OutOfMemory: the size did not fit under the budget.
            NoMoreSamples: `make_batch` has given fewer samples, and gives no more.
            AutoBatchError: the training state beside a validation does not fit on the device.
        """
        try:
            with self._clean_slate(size):
                failure, peak_bytes = self._run(size)
            if failure is not None:
                raise failure
        except (OutOfMemory, NoMoreSamples, AutoBatchError) as error:
            logger.debug("%s: %s", sized(size, self.unit), error)
            raise
        except Exception as error:
            if not self._largest_fitted:
                error.add_note(
                    f"AutoBatch called the step with {sized(size, self.unit)}, its first. Where a step "
                    "needs batches of another size, set min_batch_size or multiple_of"
                )
            raise
        self._largest_fitted = max(self._largest_fitted, size)
        return peak_bytes

    def warm_up(self, size: int) -> None:
        """Run a size first: kernels are loaded, and whether equal steps allocate equal memory shows.

        Raises:
            OutOfMemory: the size did not fit under the budget.
        """
        self.is_steady, self._allocations_vary_by = False, math.inf  # until it is measured
        try:
            self(size)
        finally:  # code that `torch.compile` has generated for the CPU allocates unseen
            is_seen = self.memory.device.type != "cpu" or not num_compiled_graphs()
            self.is_steady = not is_seen or self._allocations_vary_by <= STEADY
            self.varies_by.clear()

    def time(self, size: int) -> list[float]:
        """Seconds of each of several steps, after one warm-up step and without a cap.

        Infinity if the size no longer fits: less memory is free than when it ran.
        """
        with self._clean_slate(size):
            return self._time_steps(size)

    def run_jointly(self, size: int, lockstep: AbstractContextManager[object]) -> int:
        """Run the steps of a trial together with all other ranks, and return the peak in bytes.

        Every rank takes the same number of steps regardless of its measurements: there is no budget and no
        second attempt, and an error is raised unchanged.

        Args:
            size: the batch size.
            lockstep: the context of the steps.

        Raises:
            OutOfMemory: the device is full.
        """
        with self._clean_slate(size):
            failure, peak_bytes = self._run(size, lockstep)
        if failure is not None:
            raise failure
        return peak_bytes

    @contextlib.contextmanager
    def _clean_slate(self, size: int) -> Iterator[None]:
        """Begin with an empty cache, and release the context's allocations unless it raises."""
        self.before_trial(size)
        self.memory.clean()
        graphs = num_compiled_graphs()
        yield
        if num_compiled_graphs() > graphs:
            torch.compiler.reset()  # each size is compiled for its own shape, as in training
        self.clean()

    def clean(self) -> None:
        """Undo a trial and release all that it has allocated. A validation search keeps optimizer state."""
        for module in self._modules:
            for parameter in module.parameters():
                parameter.grad = None
        self.snapshot.restore_parts(with_optimizers=self.training)
        self.memory.clean()

    def _run(
        self, size: int, lockstep: AbstractContextManager[object] | None = None
    ) -> tuple[Exception | None, int]:
        """Run the trial under the cap; return why it failed (None if it did not), and the peak in bytes.

        In lockstep with other ranks there is no budget, and the number of steps depends on nothing measured.
        """
        memory, is_alone = self.memory, lockstep is None
        lockstep = lockstep or contextlib.nullcontext()
        if not self._is_prepared:
            with (
                memory.cap(memory.total_bytes),
                lockstep,
                self._failures_caught() as failures,
            ):
                self._prepare_validation()  # training may use more than validation
            if failures:
                raise AutoBatchError(
                    f"AutoBatch (val): the training before validation does not fit on {memory.device}, so no "
                    f"validation size can be measured: {failures[0]}. Remedies: free memory on "
                    f"{memory.device}; choose a smaller model; train with a smaller batch size."
                )
        if is_alone and memory.in_use() >= self.budget_bytes:
            return OutOfMemory("the process holds the whole budget before the first sample"), 0
        further = list[_Step]()
        with memory.cap(self.budget_bytes if is_alone else memory.total_bytes):
            with lockstep, self._failures_caught(size) as failures:
                if self.training and self.num_steps == 1:
                    self._allocate_optimizer_state()
                for module in self._modules:
                    module.train(self.training)
                # Not in functions: the fewer frames lie above the model, the easier is a traceback to read.
                first = int(memory.device.type == "cuda" and torch.backends.cudnn.benchmark)
                last = first + self.num_steps
                num_steps = last if self.is_steady or not is_alone else last + MORE_STEPS
                for number in range(num_steps):
                    if number == first:
                        memory.reset_peak()
                        self._num_retries = memory.num_retries()
                    with contextlib.ExitStack() as stack:
                        stepped = stack.enter_context(_stepped(self._optimizers))
                        if number >= last:
                            stack.enter_context(_measured(memory, stepped, further))
                        self.step(self._batch(size))
                    self.num_calls += 1
                    if self.training and number == 0:
                        for optimizer in self._optimizers:
                            if optimizer not in stepped:
                                step_with_zero_gradients(optimizer, memory.refused)
                if (
                    is_alone
                    and self.empties_cache
                    and memory.peak() > NEARLY_FULL * self.budget_bytes
                ):
                    empty_cache(memory.device)
                    for _ in range(self.num_steps):
                        self.step(self.make_batch(size))
                        self.num_calls += 1
                synchronize(memory.device)  # errors of kernels belong to this trial
            peak_bytes = max([memory.peak(), *(step.peak_before for step in further)])
        if further:
            equal = [step for step in further if step.num_stepped == further[-1].num_stepped]
            self._allocations_vary_by = _variation([step.allocated_bytes for step in equal])
            grown = _variation([step.grown_bytes for step in equal])
            self.varies_by[size] = max(grown, self.varies_by.get(size, 0.0))
        if is_alone and not failures and memory.num_retries() > self._num_retries:
            failures.append(OutOfMemory("an allocation did not fit at once"))
        return (failures[0] if failures else None), peak_bytes + memory.placement_bytes

    def _batch(self, size: int) -> Any:
        """Make a batch, and notice where `make_batch` has no more samples.

        A first dimension counts samples if it was the size in a smaller batch, with as many tensors and the
        same shape otherwise, and grows. Fewer samples than requested are all if twice the size gives no more.
        """
        batch = self.make_batch(size)
        self._sizes_of.setdefault(tuple(x.shape for x in nest.tensors(batch)), set()).add(size)
        given = self._num_given(batch, size)
        if given < size:
            del batch
            if self._num_given(self.make_batch(2 * size), 2 * size) == given:
                raise NoMoreSamples(given)
            batch = self.make_batch(size)
        return batch

    def check_batches(self) -> None:
        """Refuse a `make_batch` that gave tensors of the same shapes for all sizes, where samples count.

        Raises:
            AutoBatchError: the largest size was twice the smallest or more.
        """
        if self.unit is not None or len(self._sizes_of) != 1:
            return
        [(shapes, sizes)] = self._sizes_of.items()
        if shapes and max(sizes) >= 2 * min(sizes):
            raise AutoBatchError(
                f"AutoBatch: make_batch gives tensors of the same shapes for {min(sizes)} and for "
                f"{max(sizes)} samples, such as {list(shapes[0])}. Let make_batch(n) return n samples. If "
                "there are no more, set max_batch_size"
            )

    def _num_given(self, batch: Any, size: int) -> int:
        """Samples in a batch of a size: the size, where nothing says that there are fewer."""
        shapes = [tensor.shape for tensor in nest.tensors(batch) if tensor.ndim]
        kinds = {shape: (len(shapes), *shape[1:]) for shape in shapes}
        if any(shape[0] == size for shape in shapes):
            self._sizes_given.add(size)
            self._kinds_given.update(kinds.values())
            return size
        least = max(self._sizes_given, default=0) + (len(self._sizes_given) < 2)
        given = (shape[0] for shape in shapes if kinds[shape] in self._kinds_given)
        return max((number for number in given if least <= number < size), default=size)

    def _time_steps(self, size: int) -> list[float]:
        seconds: list[float] = []
        with self._failures_caught() as failures:
            for module in self._modules:
                module.train(self.training)
            self.step(self.make_batch(size))
            while len(seconds) < MAX_TIMED_STEPS and (
                len(seconds) < MIN_TIMED_STEPS or sum(seconds) < MIN_TIMED_S
            ):
                synchronize(self.memory.device)
                began = time.perf_counter()
                self.step(self.make_batch(size))
                synchronize(self.memory.device)
                seconds.append(time.perf_counter() - began)
        return [math.inf] if failures else seconds

    @contextlib.contextmanager
    def _failures_caught(self, size: int = 0) -> Iterator[list[Exception]]:
        """Catch an out-of-memory error inside the context; the list then has one with its first line.

        That there are no more samples counts too, and that a kernel takes no tensors of this size, where a
        smaller size has fitted.
        """
        failures: list[Exception] = []
        try:
            yield failures
        except Exception as error:
            message = str(error).partition("\n")[0] or type(error).__name__
            failure = error if isinstance(error, NoMoreSamples) else OutOfMemory(message)
            if failure is not error and not self.memory.refused(error):
                if not (0 < self._largest_fitted < size and exceeds_a_kernel(error)):
                    raise
                logger.warning(
                    "warning: %s fails where smaller ones fit: %s",
                    sized(size, self.unit),
                    message,
                )
                failure = KernelLimit(message)
            release_frames(error)
            failures.append(failure)

    def _prepare_validation(self) -> None:
        """Allocate all that training keeps: optimizer state, gradient buckets, state of the average."""
        if self.train_once is not None:
            for module in self._modules:
                module.train()
            self.train_once()
            self.clean()
        self._allocate_optimizer_state()
        self._is_prepared = True

    def _allocate_optimizer_state(self) -> None:
        """Allocate optimizer state by a step with zero gradients; the trial resets the peak afterwards."""
        for optimizer in self._optimizers:
            if not all(optimizer.state.get(parameter) for parameter in _trainable(optimizer)):
                step_with_zero_gradients(optimizer, self.memory.refused)
        self.snapshot.restore_parts(with_optimizers=False)
        self.memory.clean()


def step_with_zero_gradients(
    optimizer: torch.optim.Optimizer, refused: Callable[[BaseException], bool]
) -> None:
    """Make the optimizer allocate its state, by a step with zero gradients.

    Gradients that a scaler has skipped may be infinite, so they are set to zero. An optimizer that needs
    sparse gradients or a closure is left alone: the trial's own steps make it allocate. An exception that
    means out of memory, by `refused`, is raised on.
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
        logger.debug("%s cannot step with zero gradients: %s", type(optimizer).__name__, error)
    finally:
        for parameter in without_gradient:
            parameter.grad = None


def _trainable(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]


@contextlib.contextmanager
def _stepped(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[list[torch.optim.Optimizer]]:
    """Collect the optimizers that take a step inside the context."""
    seen: list[torch.optim.Optimizer] = []
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            handle = optimizer.register_step_post_hook(lambda stepped, *_: seen.append(stepped))
            stack.callback(handle.remove)
        yield seen


class _Step(NamedTuple):
    """Memory of one step: the peak before it, the sum of its allocations, and its peak above the memory held.

    Steps are equal if as many optimizers have stepped in them.
    """

    num_stepped: int
    peak_before: int
    allocated_bytes: int
    grown_bytes: int


@contextlib.contextmanager
def _measured(memory: DeviceMemory, stepped: Sequence[Any], steps: list[_Step]) -> Iterator[None]:
    """Measure the step inside the context, and add it to the steps."""
    peak_bytes = memory.peak()
    memory.reset_peak()
    allocated_bytes, held_bytes = memory.allocated_bytes(), memory.tensor_bytes()
    yield
    allocated_bytes = memory.allocated_bytes() - allocated_bytes
    grown_bytes = memory.tensor_peak() - held_bytes
    steps.append(_Step(len(stepped), peak_bytes, allocated_bytes, grown_bytes))


def _variation(values: Sequence[int]) -> float:
    """Return the fraction by which the smallest value is below the largest; 0 if nothing was allocated."""
    largest = max(values)
    return 1 - min(values) / largest if largest > 0 else 0.0


def release_frames(error: BaseException) -> None:
    """Clear the frames that the error passed through, because their locals keep the trial's tensors alive."""
    seen: set[int] = set()
    chain: BaseException | None = error
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
