"""Trace two steps on `meta`: the memory that they allocate and release on a CUDA device, in order.

>>> model = torch.nn.Linear(1000, 100)
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> def step(batch):
...     model(batch).sum().backward()
...     optimizer.step()
...     optimizer.zero_grad()
>>> found = trace(step, lambda n: torch.empty(n, 1000), 8, state=(model, optimizer))
>>> [event.num_bytes for event in found.events if event.label == "state"]  # weight and bias
[400000, 400]

No data is computed and the model is not touched, so a trace of a large model takes a second and no memory.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_map_only  # torch 2.11 has no public one

from linnaeus.autobatch import nest
from linnaeus.autobatch.predict.allocator import MIB
from linnaeus.autobatch.predict.cuda_paths import cuda_paths
from linnaeus.autobatch.predict.recorder import Event, Recorder, untraceable
from linnaeus.autobatch.predict.swap import UntraceableError, state_on_meta
from linnaeus.autobatch.state.rng import preserved_generators

__all__ = ["Buckets", "Trace", "UntraceableError", "trace"]

NUM_STEPS = 2
"""The first step allocates the optimizer's state, the second starts with it."""


@dataclass(frozen=True)
class Trace:
    """Memory events of two steps of one batch size, after the events of their state."""

    batch_size: int
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Buckets:
    """DistributedDataParallel's gradient buckets: `bucket_cap_mb` in bytes, and `gradient_as_bucket_view`."""

    cap_bytes: int = 25 * MIB
    as_view: bool = False

    @classmethod
    def of(cls, state: Iterable[Any]) -> Buckets | None:
        """Return the buckets of the first wrapper in `state`; None without one."""
        wrapper = next((part for part in state if isinstance(part, DistributedDataParallel)), None)
        return (
            None
            if wrapper is None
            else cls(wrapper.bucket_bytes_cap, wrapper.gradient_as_bucket_view)
        )


def trace(
    step: Callable[[Any], object],
    make_batch: Callable[[int], Any],
    n: int,
    *,
    state: Any = (),
    buckets: Buckets | None = None,
    before: Callable[[], object] | None = None,
) -> Trace:
    """Run a step twice on `meta`.

    Args:
        step: runs one step on a batch: training with the optimizer's update, or validation. It may move
            tensors to a CUDA device and use `torch.autocast` for it; they go to `meta`.
        make_batch: makes a batch of n samples, on any device.
        n: the batch size.
        state: everything with tensors that the step uses: modules, optimizers, scalers, moving averages. It
            may be on any device, `meta` too. Afterwards it is as it was.
        buckets: of DistributedDataParallel, around the first module of the state; None where they are held
            already, or there are none.
        before: called once on `meta` before the steps, such as a training step before validation. Only memory
            that is still held when it returns counts.

    Raises:
        UntraceableError: an operation needs the values of a tensor (`.item()`, boolean indexing) or has no
            implementation on `meta`; the message names it.
    """
    if torch.__version__ < "2.15":
        importlib.import_module(
            "torch._dynamo"
        )  # older torch would do it within the trace, and fail there
    recorder = Recorder()
    with contextlib.ExitStack() as stack:
        if gc.isenabled():  # only calls collect garbage
            gc.disable()
            stack.callback(gc.enable)
        stack.enter_context(preserved_generators())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        held = stack.enter_context(state_on_meta(state))
        recorder.keep_state(held)
        stack.enter_context(cuda_paths())
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", recorder.resizer()))
        stack.callback(register_optimizer_step_pre_hook(recorder.enter_optimizer).remove)
        stack.callback(register_optimizer_step_post_hook(recorder.leave_optimizer).remove)
        stack.enter_context(recorder)
        if buckets is not None:
            _attach_buckets(state, buckets)
        if before is not None:
            with _traced(recorder):
                before()
            recorder.forget_what_was_released()
        for _ in range(NUM_STEPS):
            with _traced(recorder):
                step(tree_map_only(Tensor, partial(_on_meta, recorder), make_batch(n)))
            recorder.events.append(Event("mark"))
    return Trace(n, tuple(recorder.events))


@contextlib.contextmanager
def _traced(recorder: Recorder) -> Iterator[None]:
    """Name operations that have no implementation on `meta` in errors, with the line that called them."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        after = f"the code after {recorder.last_operation}"
        found = error if isinstance(error, UntraceableError) else untraceable(error, after)
        if found is None:
            raise
        raise UntraceableError(f"{found}{_place(error)}") from error
    gc.collect(1)  # reference cycles are freed at the same place each time


def _on_meta(recorder: Recorder, tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    substitute = torch.empty_like(tensor, device="meta")
    recorder.values.know(substitute, tensor)
    return substitute


def _place(error: BaseException) -> str:
    """Return the innermost line of the user's code; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_STEP)]
    return f" (line {own[-1].lineno} of {Path(own[-1].filename).name})" if own else ""


_NOT_THE_STEP = (
    *(f"{Path(str(module.__file__)).parent}{os.sep}" for module in (torch, contextlib)),
    f"{Path(__file__).parents[2]}{os.sep}",
    "<",
)


def _attach_buckets(state: Any, buckets: Buckets) -> None:
    """Allocate the flat buckets around the first module; with `as_view`, gradients become views of them."""
    module = next((part for part in nest.leaves(state) if isinstance(part, nn.Module)), None)
    if module is None:
        raise ValueError("gradient buckets need a module in `state`")
    # Gradients come in about the reverse order. The wrapper itself calls this private function.
    backwards = reversed(list(module.parameters()))
    parameters: list[Tensor] = [parameter for parameter in backwards if parameter.requires_grad]
    if not parameters:
        return
    groups, _ = torch_dist._compute_bucket_assignment_by_size(parameters, [buckets.cap_bytes])
    for indices in groups:
        group = [parameters[index] for index in indices]
        sizes = [parameter.numel() for parameter in group]
        flat = torch.empty(sum(sizes), dtype=group[0].dtype, device="meta")
        for parameter, part in zip(group, flat.split(sizes), strict=True):
            view = part.view_as(parameter)

            def use(parameter: Tensor, view: Tensor = view) -> None:
                if buckets.as_view:  # otherwise the mean is copied back into the gradient
                    parameter.grad = view

            parameter.register_post_accumulate_grad_hook(use)
