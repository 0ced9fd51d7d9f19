"""Let one rank step alone while the others wait: wrappers of the model do without the other ranks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as torch_dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.ranks.collectives import collectives_refused
from linnaeus.autobatch.state.sharded import fake_groups, modules_of

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


def check_can_step_alone(state: Sequence[Any]) -> None:
    """Check that one rank can run a step alone with the objects in `state`.

    Raises:
        AutoBatchError: it cannot with one of the objects; names its class.
    """
    inside = [getattr(part, "optimizer", None) for part in state]  # of wrappers
    for part in (*state, *inside, *modules_of(state)):
        for name in _COMMUNICATING.intersection(kind.__name__ for kind in type(part).__mro__):
            raise AutoBatchError(
                f"AutoBatch: {name} in state communicates in every step, but only one rank steps during a "
                "search. Set the batch size by hand."
            )
    for wrapper in wrappers_in(state):
        has_builtin_hook = (
            wrapper._get_ddp_logging_data().get("comm_hook") and not wrapper._comm_hooks
        )
        kept = [
            held
            for hook, hook_state in wrapper._comm_hooks
            for held in (hook_state, getattr(hook, "__self__", None))
            if held is not None and not isinstance(held, torch_dist.ProcessGroup)
        ]
        options = {
            "mixed_precision": wrapper.mixed_precision,
            "delay_all_reduce_named_params": wrapper._delay_all_reduce_params,
            "a built-in communication hook": has_builtin_hook,
            **{f"a communication hook that keeps a {type(held).__name__}": True for held in kept},
        }
        for option in (name for name, is_used in options.items() if is_used):
            raise AutoBatchError(
                f"AutoBatch: DistributedDataParallel with {option} cannot step on one rank alone, as in a "
                f"search, and train afterwards as without it; leave {option} out, or search before the model "
                "is wrapped."
            )


def check_members(
    wrappers: Sequence[DistributedDataParallel], group: torch_dist.ProcessGroup
) -> None:
    """Check that the wrappers work over ranks of a group, which can take joint steps.

    Raises:
        AutoBatchError: a wrapper works over other ranks too.
    """
    members = set(torch_dist.get_process_group_ranks(group))
    for wrapper in wrappers:
        outside = {*torch_dist.get_process_group_ranks(wrapper.process_group)} - members
        if outside:
            raise AutoBatchError(
                "AutoBatch: DistributedDataParallel in state works over ranks that do not search, "
                f"{', '.join(map(str, sorted(outside)))}. Give group the process group of the wrapper."
            )


@contextlib.contextmanager
def stepping_alone(state: Sequence[Any]) -> Iterator[Callable[[], None]]:
    """Let this rank run steps with the objects in `state` while the others wait.

    DistributedDataParallel and SyncBatchNorm work over a group of this rank alone, with the same buckets, but
    without communication hooks. FSDP2 and DTensor work over fake groups of the same size.
    Any other collective of several ranks is refused.

    Yields:
        A function for before each trial, see `reducers_renewed`.
    """
    modules, wrappers = modules_of(state), wrappers_in(state)
    norms = [module for module in modules if isinstance(module, nn.SyncBatchNorm)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_groups(modules))
        if torch_dist.is_available() and torch_dist.is_initialized():
            stack.enter_context(collectives_refused())
        alone = None
        if wrappers or norms:
            alone = group_of_this_rank()
            stack.callback(torch_dist.destroy_process_group, alone)
        for norm in norms:
            stack.callback(setattr, norm, "process_group", norm.process_group)
            norm.process_group = alone
        yield stack.enter_context(reducers_renewed(wrappers, alone))


def wrappers_in(state: Sequence[Any]) -> list[DistributedDataParallel]:
    """Return the DistributedDataParallel wrappers in `state`."""
    return [module for module in modules_of(state) if isinstance(module, DistributedDataParallel)]


@contextlib.contextmanager
def reducers_renewed(
    wrappers: Sequence[DistributedDataParallel], alone: torch_dist.ProcessGroup | None = None
) -> Iterator[Callable[[], None]]:
    """Give wrappers new reducers. On exit each wrapper gets another new reducer over its own group.

    Args:
        wrappers: the wrappers.
        alone: the group that they work over inside the context, without communication hooks; None is the
            group of each, with its hooks.

    Yields:
        A function that rebuilds the reducers. Call it before each trial: buckets are laid out again in the
        second step of training, and a reducer is unusable after an error in the middle of a step.
    """
    own = [partial(_make_reducer, each, each.process_group, each._comm_hooks) for each in wrappers]
    used = [partial(_make_reducer, each, alone, ()) for each in wrappers] if alone else own

    def renew() -> None:
        for make in used:
            make()

    try:
        renew()
        yield renew
    finally:
        for make in own:
            make()


def _make_reducer(wrapper: DistributedDataParallel, group: Any, hooks: Sequence[Any]) -> None:
    """Make a new reducer, as the wrapper's constructor does: no public function does it later."""
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


def group_of_this_rank(
    backend: str | None = None, timeout: timedelta | None = None
) -> torch_dist.ProcessGroup:
    """Make a process group of this rank alone, by default with the backend of the default group."""
    name = backend or torch_dist.get_backend_config()
    if hasattr(
        torch_dist, "ProcessGroupNCCL2"
    ):  # torch 2.15: "nccl" would wait for the ranks of that group
        name = re.sub(r"\bnccl[\w-]*", "nccl-legacy", name)
    group = torch_dist.new_group(
        [torch_dist.get_rank()], timeout, name, use_local_synchronization=True
    )
    assert isinstance(group, torch_dist.ProcessGroup)  # this rank is a member
    return group
