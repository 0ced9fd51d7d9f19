"""The ranks of a process group that search for one batch size together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch.distributed as torch_dist

from linnaeus.control import ControlPlane, Failure, OverdueError, first_difference
from linnaeus.errors import AutoBatchError, LinnaeusError

Group = torch_dist.ProcessGroup | Literal[False] | None

ARRIVAL_S = 1800.0
"""How long the first ranks wait for the others to call: those may still load their data."""

_CLOSED = "closed"
"""Key that a search has which a rank did not come to."""


class AbsentError(AutoBatchError):
    """A rank has not called in time."""


def members(group: Group) -> torch_dist.ProcessGroup | None:
    """The process group to search with; None where this process searches alone.

    Args:
        group: None for the default group, if one is initialised; False for this process alone.

    Raises:
        TypeError: it is something else.
        ValueError: this process does not belong to it.
    """
    if group is False or not torch_dist.is_available() or not torch_dist.is_initialized():
        if group in (None, False):
            return None
        raise ValueError("group is given, but no process group is initialised: call init_process_group first")
    not_a_member: object = torch_dist.GroupMember.NON_GROUP_MEMBER
    if group == not_a_member:
        raise ValueError("group is a process group of other ranks: only its own ranks may search with it")
    group = torch_dist.group.WORLD if group is None else group
    if not isinstance(group, torch_dist.ProcessGroup):
        raise TypeError(f"group is {group!r}; it must be a torch.distributed.ProcessGroup, None or False")
    return group if group.size() > 1 else None


@contextlib.contextmanager
def joined(group: torch_dist.ProcessGroup | None) -> Iterator[ControlPlane | None]:
    """The control plane of a group, for one search; None for a process alone.

    Every rank of the group must enter and leave it. It uses the group's store, under keys of its own for each
    time, so that neither an earlier failure nor another group has a part in it. On leaving, its thread and
    its connection are gone. An error of one rank is told to all before it is raised.

    Raises:
        AutoBatchError: another rank has failed, died or not come; with its message.
    """
    if group is None:
        yield None
        return
    rank = group.rank()
    store = _store_of(group)
    store = torch_dist.PrefixStore(f"linnaeus/{_number(store, rank)}", store)
    with ControlPlane(store, rank, group.size()) as control:
        try:
            yield control
            control.broadcast(None)  # nobody's heartbeat ends before rank 0, which watches it, is done
            control.collect(None)  # rank 0 leaves last: it may host the store
        except BaseException as error:
            if isinstance(error, AbsentError):
                store.set(_CLOSED, "")
            cause = _cause(control, error)
            if cause is not None:
                raise _as_error(cause, group) from None
            if isinstance(error, torch_dist.DistError):
                raise AutoBatchError(
                    "AutoBatch: the store of the process group cannot be reached any more: the process that "
                    f"serves it, usually that of rank 0, has ended ({str(error).partition(chr(10))[0]})"
                ) from error
            raise


def _number(store: torch_dist.Store, rank: int) -> int:
    """The number of this search, the same on every rank, whatever became of earlier ones.

    Each rank counts those that it has come to. One that the others have given up waiting for joins the next.
    """
    while True:
        number = int(store.add(f"linnaeus/searches/{rank}", 1))
        if not store.check([f"linnaeus/{number}/{_CLOSED}"]):
            return number


def check_equal(control: ControlPlane, facts: Mapping[str, Any]) -> None:
    """Wait until all ranks have come, and compare facts that must be the same on all of them.

    Args:
        control: the ranks.
        facts: values that can be compared and pickled, by their names.

    Raises:
        LinnaeusError: a rank has not come, or a fact differs; on every rank.
    """
    try:
        rows = control.gather(dict(facts), limit_s=ARRIVAL_S)
    except OverdueError as error:
        raise AbsentError(
            f"rank {error.rank} has not called auto_find_batch_size within {ARRIVAL_S / 60:.3g} minutes of "
            "this one: every rank of the group must; group=False searches on this rank alone"
        ) from None
    found = first_difference(rows)
    if found is not None:
        rank, different = found
        listed = "; ".join(f"{name} is {main!r} and {other!r}" for name, (main, other) in different.items())
        raise AutoBatchError(
            f"AutoBatch: ranks 0 and {rank} call auto_find_batch_size with different arguments: {listed}. "
            "Give all ranks the same; memory_limit_gb alone may differ"
        )


def _store_of(group: torch_dist.ProcessGroup) -> torch_dist.Store:
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    store = torch_dist.distributed_c10d._world.pg_map[group][1]
    assert store is not None
    return store


def _cause(control: ControlPlane, error: BaseException) -> Failure | None:
    """The failure of another rank that an error comes from. If it is this rank's own, all others learn it."""
    with contextlib.suppress(torch_dist.DistError):
        failure = control.failure
        if failure is not None and str(error) == str(failure.as_error()):
            return failure
        is_ours = isinstance(error, LinnaeusError)
        message = str(error) if is_ours else f"{type(error).__name__}: {error}"
        control.fail(
            Failure(control.rank, message, error.exit_code if isinstance(error, LinnaeusError) else 1)
        )
    return None


def _as_error(failure: Failure, group: torch_dist.ProcessGroup) -> AutoBatchError:
    """The failure of another rank as this one raises it, with the rank's number among all ranks."""
    rank = torch_dist.get_global_rank(group, failure.rank)
    error = AutoBatchError(f"rank {rank}: {failure.message}")
    error.exit_code = failure.exit_code
    return error
