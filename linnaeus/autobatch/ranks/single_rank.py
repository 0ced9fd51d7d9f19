"""Steps that one rank runs alone: what wraps a model for several ranks is kept from waiting for the others.

In a search of several ranks, rank 0 steps while the others wait, so that a collective would never end.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.memory.storages import WatchingMode
from linnaeus.autobatch.optimizers import subclasses
from linnaeus.autobatch.ranks.control import group_of_this_rank
from linnaeus.autobatch.sharded import fake_groups, is_fake, modules_of
from linnaeus.autobatch.snapshot import parameters_of

A = TypeVar("A")
T = TypeVar("T")

_COMMUNICATING = frozenset(
    {
        "FullyShardedDataParallel",
        "DeepSpeedEngine",
        "ZeroRedundancyOptimizer",
        "DeepSpeedZeroOptimizer",
        "DeepSpeedZeroOptimizer_Stage3",
    }
)
"""Classes, by name, that no rank can use alone. Their packages need not be installed."""


def check_silenceable(state: Sequence[Any]) -> None:
    """Check that one rank can run a step alone with what is in `state`.

    Raises:
        AutoBatchError: it cannot with one of the objects; names its class.
    """
    inside = [getattr(part, "optimizer", None) for part in state]  # of wrappers
    parameters = (tensor for part in state for tensor in parameters_of(part))
    for part in (*state, *inside, *_modules(state), *parameters):
        for name in (
            kind.__name__ for kind in type(part).__mro__ if kind.__name__ in _COMMUNICATING
        ):
            raise AutoBatchError(
                f"AutoBatch: {name} in state communicates in every step, but only one rank steps during a "
                "search. Give a batch size of your own."
            )
    for wrapper in _wrappers(state):
        has_builtin_hook = (
            wrapper._get_ddp_logging_data().get("comm_hook") and not wrapper._comm_hooks
        )
        options = {
            "mixed_precision": wrapper.mixed_precision is not None,
            "delay_all_reduce_named_params": bool(wrapper._delay_all_reduce_params),
            "a built-in communication hook": bool(has_builtin_hook),
        }
        for option in (name for name, is_used in options.items() if is_used):
            raise AutoBatchError(
                f"AutoBatch: DistributedDataParallel with {option} cannot step on one rank alone, as in a "
                f"search, and train afterwards as without it; leave {option} out, or search before the model "
                "is wrapped."
            )


@contextlib.contextmanager
def stepping_alone(state: Sequence[Any]) -> Iterator[Callable[[], None]]:
    """Inside the context, this rank alone can run steps with what is in `state`.

    DistributedDataParallel and SyncBatchNorm work over a group of this rank alone, with the same buckets, but
    without communication hooks. Afterwards a reducer is as it was when its wrapper was made. What shards a
    model (FSDP2, DTensor) works over fake groups of the same size.

    Wrappers are found by their module too, so that `state` may hold a model without its wrapper.

    Yields:
        Makes the reducers anew. Call it before each trial: buckets are laid anew in the second step of
        training, and a reducer is unusable after an error in the middle of a step.
    """
    gc.collect()  # wrappers that nothing uses any more
    wrappers = _wrappers(state)
    modules = modules_of([*state, *wrappers])
    norms = [module for module in modules if isinstance(module, nn.SyncBatchNorm)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_groups(modules))
        if not wrappers and not norms:
            yield lambda: None
            return
        alone = group_of_this_rank()
        stack.callback(torch_dist.destroy_process_group, alone)
        for wrapper in wrappers:
            stack.callback(_make_reducer, wrapper, wrapper.process_group, wrapper._comm_hooks)
        for norm in norms:
            stack.callback(setattr, norm, "process_group", norm.process_group)
            norm.process_group = alone

        def renew() -> None:
            for wrapper in wrappers:
                _make_reducer(wrapper, alone, ())

        renew()
        yield renew


def _make_reducer(wrapper: DistributedDataParallel, group: Any, hooks: Sequence[Any]) -> None:
    """Make what sums the gradients anew, as when the wrapper was made: nothing public does it later."""
    made: Any = wrapper
    made.process_group = group
    made.reducer = made.logger = None  # its hooks on the parameters go with it
    parameters, expects_sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, expects_sparse, names, wrapper.static_graph)
    made._has_rebuilt_buckets = made._static_graph_delay_allreduce_enqueued = False
    made.require_forward_param_sync = True
    if wrapper.static_graph:
        made.reducer._set_static_graph()
        made.logger._set_static_graph()
    for hook, hook_state in hooks:
        torch_dist._register_comm_hook(made.reducer, hook_state, hook)


class CollectivesRefused(WatchingMode):
    """Inside the mode, a collective of several ranks raises an error, which says where, and does not wait."""

    def __init__(self, where: str = "the step") -> None:
        super().__init__()
        self._where = where

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if num_ranks(group_of_collective(func, args)) > 1:
            name = str(getattr(func, "_opname", func)).removesuffix("_")
            raise AutoBatchError(
                f"AutoBatch: {self._where} runs a collective, {name}, but only one rank steps during a "
                "search, so that it would wait for the others for ever. Leave reductions and gathers (of "
                f"losses, of metrics) out of {self._where} of the search, and give state the "
                "DistributedDataParallel wrapper, whose own collectives are switched off."
            )
        return func(*args, **(kwargs or {}))


def num_ranks(group: torch_dist.ProcessGroup | None) -> int:
    """How many ranks a collective over a group waits for, this one included."""
    return 1 if group is None or is_fake(group) else group.size()


def group_of_collective(func: Any, args: tuple[Any, ...]) -> torch_dist.ProcessGroup | None:
    """The process group among the arguments of a collective; None for any other operator.

    Functional collectives name their group; those of their operators that name none wait for no rank. Any
    other collective without a group is one of all ranks.
    """
    namespace = getattr(func, "namespace", "")
    is_functional = namespace.startswith("_c10d_functional")
    if not is_functional and namespace != "c10d":
        return None
    for argument in args:
        with contextlib.suppress(RuntimeError, TypeError, ValueError, LookupError):
            named: Any = argument
            if isinstance(argument, torch.ScriptObject):
                return torch_dist.ProcessGroup.unbox(argument)
            if is_functional and isinstance(argument, str):  # the name of a reduction is no group's
                return torch_dist.distributed_c10d._resolve_process_group(named)
    return None if is_functional else torch_dist.group.WORLD


def refusing_collectives(
    function: Callable[[A], T], num_calls: int, where: str
) -> Callable[[A], T]:
    """The function, whose first calls refuse collectives; looking for them would slow down all."""
    calls = iter(range(num_calls))

    def guarded(argument: A) -> T:
        with contextlib.nullcontext() if next(calls, None) is None else CollectivesRefused(where):
            return function(argument)

    return guarded


def _modules(state: Sequence[Any]) -> list[nn.Module]:
    return [module for part in state if isinstance(part, nn.Module) for module in part.modules()]


def _wrappers(state: Sequence[Any]) -> list[DistributedDataParallel]:
    """The wrappers in `state`, and those of modules in `state` in the order of these modules."""
    modules = _modules(state)
    found = [module for module in modules if isinstance(module, DistributedDataParallel)]
    places = {id(module): place for place, module in enumerate(modules)}
    kinds = {
        id(kind) for kind in subclasses(DistributedDataParallel)
    }  # quicker than to ask each object
    outside = [
        existing
        for existing in gc.get_objects()
        if id(type(existing)) in kinds
        and id(existing) not in places
        and id(existing.module) in places
    ]
    return [*found, *sorted(outside, key=lambda wrapper: places[id(wrapper.module)])]
