"""AutoBatch for loops with accelerate: search for the batch size in place of shrinking it after crashes.

    @autobatch(starting_batch_size=256)         in place of @find_executable_batch_size(...)
    def train(batch_size): ...

    batch_size = find_batch_size(accelerator, model, optimizer, loss_fn, dataset)     after `prepare`

A decorated function is a whole training loop. A trial runs it with a size and stops it after a few optimizer
steps; what it built is thrown away. With several processes, one tries sizes while the others wait: in a trial
the default process group, and what accelerate knows of it, is that of one process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any, TypeVar, overload

import torch
import torch.distributed as torch_dist
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import send_to_device
from torch.distributed.distributed_c10d import _update_default_pg
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import default_collate

from linnaeus.autobatch.api import auto_find_batch_size
from linnaeus.autobatch.arguments import check_bounds, check_count, kind_of
from linnaeus.autobatch.attributes import is_optimizer, restore_of_generator
from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.optimizers import subclasses
from linnaeus.autobatch.ranks.group import together
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.autobatch.trial import release_frames
from linnaeus.integrations.common import group_of_this_process

R = TypeVar("R")

logger = logging.getLogger("linnaeus.autobatch")

_STATES = (PartialState, AcceleratorState, GradientState)
_SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TP")
_MOST_PARTS = 100
"""Longer containers among a function's variables are data, and not looked into."""
_MOST_STEPS = 10
"""A trial waits for an optimizer until another one has taken so many times `steps_per_trial` steps."""
_NOT_HERE = {"step", "make_batch", "mode", "start", "predict", "objective"}
_NOT_AFTER_PREPARE = {"step", "make_batch", "mode", "device"}


@overload
def autobatch(function: Callable[..., R]) -> Callable[..., R]: ...
@overload
def autobatch(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: None = None,
    *,
    max_batch_size: int | None = None,
    steps_per_trial: int = 2,
    state: Iterable[Any] = (),
    split_batches: bool | None = None,
    **search: Any,
) -> Callable[[Callable[..., R]], Callable[..., R]]: ...
def autobatch(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: None = None,
    *,
    max_batch_size: int | None = None,
    steps_per_trial: int = 2,
    state: Iterable[Any] = (),
    split_batches: bool | None = None,
    **search: Any,
) -> Any:
    """Call a training function with the largest batch size that fits, found before it runs.

    Each trial calls the function with a size and the caller's arguments, and stops it after `steps_per_trial`
    steps of every optimizer, or when it returns. What it does until then happens: files, logs, trackers.
    Afterwards random number generators, `state`, and the accelerators that exist are what they were, and the
    function runs once more, with the size found.

    The decorated function has the attributes `batch_size`, the size found, and `result`, its
    `AutoBatchResult`; both are None before the first call. Where batches are split, all sizes given here and
    `batch_size` are those of all processes together, and the sizes in `result` those of one process.

    Args:
        function: gets the batch size, as it gives it to its loader, as its first argument.
        starting_batch_size: the size tried first, and the largest unless `max_batch_size` is given.
        reduce_batch_size_fn: refused; a search does not shrink sizes by a rule.
        max_batch_size: the largest size tried.
        steps_per_trial: steps that every optimizer takes in a trial: those that the function prepares, and
            those in `state` and among its variables. One that has not when another has taken ten times as
            many is not waited for.
        state: what the function changes and has not built itself, as for `auto_find_batch_size`. Models,
            optimizers, schedulers and generators among its arguments, in its closure and in the global
            variables that it uses are found without this.
        split_batches: whether the loader's batches are split between the processes, so that sizes are those
            of all together. None asks the Accelerator, which must exist when the function is called then.
        search: further arguments of `auto_find_batch_size`, such as `target_memory_fraction`.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of its range; from the call of the
            function, where it gets a batch size from its caller.
        AutoBatchError: from the call of the function: no size fits; another process failed; FSDP, DeepSpeed.
    """
    if function is None:
        return functools.partial(
            autobatch, starting_batch_size=starting_batch_size, reduce_batch_size_fn=reduce_batch_size_fn,
            max_batch_size=max_batch_size, steps_per_trial=steps_per_trial, state=state,
            split_batches=split_batches, **search,
        )  # fmt: skip
    if reduce_batch_size_fn is not None:
        raise ValueError(
            "reduce_batch_size_fn is given, but sizes are searched for, not reduced by a rule; leave it out. "
            "min_batch_size and multiple_of choose which sizes are tried"
        )
    for name, count in {
        "starting_batch_size": starting_batch_size,
        "steps_per_trial": steps_per_trial,
    }.items():
        check_count(name, count)
    if max_batch_size is not None:
        check_count("max_batch_size", max_batch_size)
        if max_batch_size < starting_batch_size:
            raise ValueError(
                f"max_batch_size is {max_batch_size}; it must be at least starting_batch_size, "
                f"{starting_batch_size}"
            )
    if taken := _NOT_HERE & search.keys():
        raise TypeError(f"@autobatch takes no {', '.join(sorted(taken))}: a trial is a call of the function")

    def call(*args: Any, **kwargs: Any) -> Any:
        sizes = {
            "start": run.batch_size or starting_batch_size,
            "max_batch_size": max_batch_size or starting_batch_size,
        }
        with together(search.get("group")):
            _check_call(function, args)
            trials = _Trials(function, args, kwargs, steps_per_trial, state, split_batches)
            run.batch_size, run.result = trials.find({**search, **sizes})
        return function(run.batch_size, *args, **kwargs)

    run: Any = functools.wraps(function)(call)
    run.batch_size = run.result = None
    return run


def find_batch_size(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: Any,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    dataset: Any,
    *,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    state: Iterable[Any] = (),
    **search: Any,
) -> int:
    """Find the batch size for a loader of a dataset, after `prepare(model, optimizer)` and before the loader.

    A trial takes optimizer steps as the loop will: with `accelerator.backward`, its mixed precision, and with
    gradient accumulation two batches for each. In a process group every process must call this.

    Args:
        accelerator: as the loop uses it.
        model: prepared.
        optimizer: prepared.
        loss_fn: the loss of a batch, from the model and the batch.
        dataset: its first n samples make a batch of n; where samples differ in size, give the largest, such
            as `longest(dataset, 512)`.
        collate_fn: the loader's.
        state: what else a step changes, as for `auto_find_batch_size`.
        search: further arguments of `auto_find_batch_size`. If the accelerator splits batches, sizes are
            those of all processes together.

    Returns:
        The `batch_size` of the loader: for all processes together if the accelerator splits batches, else for
        each.

    Raises:
        TypeError, ValueError, AutoBatchError: as for `auto_find_batch_size`.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator is {kind_of(accelerator)}; it must be an accelerate.Accelerator")
    if taken := _NOT_AFTER_PREPARE & search.keys():
        raise TypeError(f"find_batch_size takes no {', '.join(sorted(taken))}: it makes its own")
    num_batches = min(accelerator.gradient_accumulation_steps, 2)

    def make_batch(size: int) -> list[Any]:
        samples = [dataset[index] for index in islice(cycle(range(len(dataset))), size)]
        return [send_to_device(collate_fn(samples), accelerator.device) for _ in range(num_batches)]

    def step(batches: list[Any]) -> None:
        while batches:
            accelerator.backward(loss_fn(model, batches.pop(0)))
        optimizer.step()
        optimizer.zero_grad()

    parts = [model, optimizer, accelerator.scaler, *state]
    share = accelerator.num_processes if accelerator.split_batches else 1
    with together(search.get("group")), _restored_accelerate([accelerator]):
        result = auto_find_batch_size(
            step, make_batch, state=[part for part in parts if part is not None], device=accelerator.device,
            **_of_one_process(search, share),
        )  # fmt: skip
    return result.batch_size * share


def _of_one_process(search: Mapping[str, Any], share: int) -> dict[str, Any]:
    """The arguments of a search in sizes of one process, of which so many share a batch.

    Raises:
        TypeError, ValueError: a size of the wrong type or out of its range, or none that can be shared.
    """
    if share == 1:
        return dict(search)
    sizes = {"min_batch_size": 1, "max_batch_size": 512, "multiple_of": 1, **search}
    for name in ("min_batch_size", "max_batch_size", "multiple_of"):
        check_count(name, sizes[name])
    check_bounds(sizes.get("bounds"))
    smallest, largest = -(-sizes["min_batch_size"] // share), sizes["max_batch_size"] // share
    if largest < smallest:
        raise ValueError(
            f"no batch size from min_batch_size, {sizes['min_batch_size']}, to max_batch_size, "
            f"{sizes['max_batch_size']}, is a multiple of the {share} processes that share it (split_batches)"
        )
    sizes["min_batch_size"], sizes["max_batch_size"] = smallest, largest
    sizes["multiple_of"] //= math.gcd(sizes["multiple_of"], share)
    if sizes.get("bounds") is not None:
        sizes["bounds"] = {name: bound // share for name, bound in sizes["bounds"].items()}
    if sizes.get("start") is not None:
        sizes["start"] = max(sizes["start"] // share, 1)
    return sizes


class _Trials:
    """The trials of one call of a decorated function."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        num_steps: int,
        state: Iterable[Any],
        split_batches: bool | None,
    ) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        self._num_steps = num_steps
        self._has_warned = False
        self._lacks_samples = False  # for BatchNorm, in a model that the function builds
        around = _reached(function, args, kwargs)
        self._state = [*state, *filter(_is_state, around)]
        self._accelerators = _accelerators(around)
        self._splits = self._splits_batches(around) if split_batches is None else split_batches

    def find(self, search: Mapping[str, Any]) -> tuple[int, AutoBatchResult]:
        """The size to give to the function, and the result of the search, in sizes of one process.

        Args:
            search: arguments of `auto_find_batch_size`, in sizes as the function gets them.

        Raises:
            AutoBatchError: see `autobatch`.
        """
        _check_processes()
        num_processes = PartialState().num_processes if PartialState._shared_state else 1
        share = num_processes if self._splits else 1
        arguments = _of_one_process(search, share)
        if PartialState._shared_state:
            arguments.setdefault("device", PartialState().device)
        with group_of_this_process() as alone:
            try:
                result = auto_find_batch_size(
                    functools.partial(self._run, alone), int, state=self._state, steps_per_trial=1,
                    predict=False, **arguments,
                )  # fmt: skip
            except AutoBatchError as error:
                if not self._lacks_samples or "no batch size fits" not in str(error):
                    raise
                raise AutoBatchError(
                    f"{error} In each process, batch size 1 has failed for another reason than memory: "
                    "BatchNorm needs two samples. Give a min_batch_size, and a largest size, of at least "
                    f"{2 * share}."
                ) from None
        logger.info("AutoBatch: %s runs with %d", self._function.__qualname__, result.batch_size * share)
        return result.batch_size * share, result

    def _run(self, alone: torch_dist.ProcessGroup | None, size: int) -> None:
        """Call the function until it has taken its steps.

        Raises:
            AutoBatchError: it returned without an optimizer step, or in a mode that no rank can run alone.
        """
        steps: Counter[int] = Counter()
        earlier = {id(each) for accelerator in self._accelerators for each in accelerator._optimizers}

        def count(optimizer: torch.optim.Optimizer, *_: object) -> None:
            steps[id(optimizer)] += 1
            if self._has_enough(steps, earlier):
                raise _EnoughSteps

        with _restored_accelerate(self._accelerators), _one_process(alone):
            handle = register_optimizer_step_post_hook(count)
            try:
                self._function(size, *self._args, **self._kwargs)
            except _EnoughSteps as stopped:
                release_frames(stopped)  # their locals hold the model
            except ValueError as error:
                if size > 1 or "more than 1 value per channel" not in str(error):
                    raise
                self._lacks_samples = True
                raise MemoryError(f"not enough: {error}") from None  # a search goes on, with more samples
            finally:
                handle.remove()
                self._check_accelerators()
        if not steps:
            raise AutoBatchError(
                f"AutoBatch: {self._function.__qualname__}({size}) returned without an optimizer step, so "
                "nothing was measured: its dataset may have fewer samples than a batch. Lower "
                "starting_batch_size or max_batch_size"
            )

    def _has_enough(self, steps: Counter[int], earlier: set[int]) -> bool:
        """Whether a trial has measured a step of every optimizer.

        Args:
            steps: that each optimizer has taken, by its id.
            earlier: ids of those that were prepared before the trial, perhaps for something else.
        """
        if min(steps.values()) < self._num_steps:
            return self._is_too_long(steps)
        prepared = [
            each
            for accelerator in _accelerators(self._accelerators)  # and those made in the trial
            for each in accelerator._optimizers
            if id(each) not in earlier
        ]
        known = map(_unwrapped, filter(is_optimizer, [*self._state, *prepared]))
        is_complete = all(steps[id(optimizer)] >= self._num_steps for optimizer in known)
        return is_complete or self._is_too_long(steps)

    def _is_too_long(self, steps: Counter[int]) -> bool:
        is_too_long = max(steps.values()) >= _MOST_STEPS * self._num_steps
        if is_too_long and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "AutoBatch: an optimizer of %s has taken less than %d steps when another one had taken %d; "
                "trials may not measure its steps", self._function.__qualname__, self._num_steps,
                max(steps.values()),
            )  # fmt: skip
        return is_too_long

    def _splits_batches(self, around: Sequence[Any]) -> bool:
        """What the accelerators say that the function reaches; where it reaches none, those that exist."""
        reached = [each for each in self._accelerators if any(each is value for value in around)]
        answers = {bool(each.split_batches) for each in reached or self._accelerators}
        if len(answers) > 1:
            raise AutoBatchError(
                "AutoBatch: of several Accelerators, some split the loader's batches and some do not; give "
                "@autobatch(split_batches=True) or False"
            )
        return True in answers

    def _check_accelerators(self) -> None:
        """Check that one that the function has made treats batches as was assumed."""
        known = {id(each) for each in self._accelerators}
        made = (each for each in _accelerators(()) if id(each) not in known)
        if any(bool(each.split_batches) != self._splits for each in made):
            raise AutoBatchError(
                f"AutoBatch: The function's Accelerator has split_batches={not self._splits}, but the search "
                f"assumed {self._splits}. Pass @autobatch(split_batches={not self._splits})"
            )


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer that steps: accelerate's wrappers hold another."""
    while is_optimizer(inner := getattr(optimizer, "optimizer", None)):
        optimizer = inner
    return optimizer


class _EnoughSteps(BaseException):
    """Ends a trial; no `except Exception` of the function catches it."""


@contextlib.contextmanager
def _one_process(alone: torch_dist.ProcessGroup | None) -> Iterator[None]:
    """Inside the context, this process is the only one of torch's default group, and of accelerate's."""
    if alone is None:
        yield
        return
    everyone = torch_dist.group.WORLD
    for state in (PartialState, AcceleratorState):
        if state._shared_state:
            state._shared_state["num_processes"] = 1  # `_restored_accelerate` puts it back
    _update_default_pg(alone)
    try:
        yield
    finally:
        _update_default_pg(everyone)


@contextlib.contextmanager
def _restored_accelerate(accelerators: Sequence[Accelerator]) -> Iterator[None]:
    """Put back what accelerate keeps for the whole process, the accelerators, and their gradient scalers."""
    contents = [state._shared_state for state in _STATES] + [vars(each) for each in accelerators]
    contents += [vars(each.scaler) for each in accelerators if each.scaler is not None]
    before = [{name: (value, _copied(value)) for name, value in content.items()} for content in contents]
    try:
        yield
    finally:
        for content, saved in zip(contents, before, strict=True):
            content.clear()
            content.update({name: _refilled(value, copy) for name, (value, copy) in saved.items()})


def _copied(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict) else value


def _refilled(value: Any, content: Any) -> Any:
    """The same list or dictionary, which others may hold too, with its former content."""
    if type(value) is list:
        value[:] = content
    elif type(value) is dict:
        value.clear()
        value.update(content)
    return value


def _accelerators(around: Iterable[Any]) -> list[Accelerator]:
    """The accelerators among some values, and all others that garbage collection sees."""
    kinds = subclasses(Accelerator)
    found = {id(each): each for each in [*around, *gc.get_objects()] if type(each) in kinds}
    return list(found.values())


def _check_processes() -> None:
    """Check that the processes know of each other, and that one of them can step alone.

    Raises:
        AutoBatchError: they do not, or it cannot.
    """
    world_size = int(os.environ.get("WORLD_SIZE") or 1)
    if world_size > 1 and not torch_dist.is_initialized():
        raise AutoBatchError(
            f"AutoBatch: this is one of {world_size} processes (WORLD_SIZE), but they are not connected yet. "
            "Create the Accelerator before the decorated function is called; the function may use it"
        )
    kinds = {
        str(state._shared_state.get("distributed_type", "")) for state in (PartialState, AcceleratorState)
    }
    for name in _SHARDED:
        if any(kind.rpartition(".")[2] == name for kind in kinds):
            raise AutoBatchError(
                f"AutoBatch: with {name} no process can take a step alone, as one does in a search; give a "
                "batch size of your own"
            )


def _check_call(function: Callable[..., Any], args: Sequence[Any]) -> None:
    """As `find_executable_batch_size` does: the caller must not give the batch size."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_POSITIONAL for each in parameters.values()):
        return
    positional = [each for each in parameters.values() if each.kind is not each.KEYWORD_ONLY]
    if len(positional) < len(args) + 1:
        raise TypeError(
            f"{function.__name__} gets the batch size as its first argument from @autobatch: call it without "
            f"(it takes {len(positional)} arguments, and was given {len(args)})"
        )


def _reached(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What a function can reach: in its arguments, its closure and the global variables that it names."""
    inner = inspect.unwrap(function)
    cells = [cell.cell_contents for cell in getattr(inner, "__closure__", None) or () if _is_filled(cell)]
    variables = getattr(inner, "__globals__", {})
    names = getattr(getattr(inner, "__code__", None), "co_names", ())
    values = [*args, *kwargs.values(), *cells, *(variables[name] for name in names if name in variables)]
    for value in list(values):
        if type(value) in (list, tuple, dict) and len(value) <= _MOST_PARTS:
            values.extend(value.values() if isinstance(value, dict) else value)
    return list({id(value): value for value in values}.values())


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_state(value: Any) -> bool:
    """Whether a trial may change it and can put it back."""
    kinds = (
        torch.nn.Module,
        torch.amp.GradScaler,
        torch.optim.lr_scheduler.LRScheduler,
        AcceleratedScheduler,
    )
    if isinstance(value, type):
        return False
    return isinstance(value, kinds) or is_optimizer(value) or restore_of_generator(value) is not None
