"""The ranks of a process group that search for one batch size together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch.distributed as torch_dist

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.ranks.exchange import JobFailedError, OverdueError, first_difference
from linnaeus.autobatch.ranks.heartbeat import ControlPlane

Group = torch_dist.ProcessGroup | Literal[False] | None

ARRIVAL_S = 1800.0
"""Longest wait for the last rank to call, which may still load its data."""

_open: dict[torch_dist.ProcessGroup, ControlPlane] = {}
"""The control planes of the groups that have joined."""


def members(group: Group) -> torch_dist.ProcessGroup | None:
    """Return the process group to search with; None where this process searches alone.

    Args:
        group: None for the default group, if one is initialized; False for this process alone.

    Raises:
        TypeError: it is something else.
        ValueError: this process does not belong to it.
    """
    if group is False or not torch_dist.is_available() or not torch_dist.is_initialized():
        if group in (None, False):
            return None
        raise ValueError(
            "group is given, but no process group is initialized: call init_process_group first"
        )
    not_a_member: object = torch_dist.GroupMember.NON_GROUP_MEMBER
    if group == not_a_member:
        raise ValueError(
            "group is a process group of other ranks: only its own ranks may search with it"
        )
    group = torch_dist.group.WORLD if group is None else group
    if not isinstance(group, torch_dist.ProcessGroup):
        raise TypeError(
            f"group is {group!r}; it must be a torch.distributed.ProcessGroup, None or False"
        )
    return group if group.size() > 1 else None


@contextlib.contextmanager
def joined_ranks(group: Group = None) -> Iterator[ControlPlane | None]:
    """Join the ranks of a group: `with joined_ranks(group) as control: ...`.

    Yields the control plane of the ranks; None for a process alone. Every rank of the group must enter and
    leave it; entering waits until all have. An error of one rank is published before it is raised. So
    prepare a search inside: searches in it, and the same context entered once more, use the same
    control plane. Use it in the same order on every rank.

        with joined_ranks(group) as control:
            loader = ...  # may raise on one rank
            checkpoint = of_main(control, newest_checkpoint())
            result = auto_find_batch_size(step, make_batch, group=group)

    The control plane uses the group's store, under keys of its own for each time, so that neither an earlier
    failure nor another group has a part in it. On leaving, its thread and its connection are gone.

    Args:
        group: as for `auto_find_batch_size`.

    Raises:
        AutoBatchError: another rank has failed, died or not come; with its message.
        TypeError, ValueError: see `members`.
    """
    ranks = members(group)
    if ranks is None:
        yield None
    elif ranks in _open:
        with sharing_errors(_open[ranks]):
            yield _open[ranks]
    else:
        with _new_plane(ranks) as control:
            yield control


def of_main(control: ControlPlane | None, value: Any) -> Any:
    """Return rank 0's value on every rank, which must all call this; without a control plane `value`."""
    return value if control is None else control.broadcast(value)


@contextlib.contextmanager
def _new_plane(group: torch_dist.ProcessGroup) -> Iterator[ControlPlane]:
    """Make a control plane for a group, once all its ranks have come."""
    rank = group.rank()
    # No public function returns the store of a group.
    store = torch_dist.distributed_c10d._get_process_group_store(group)
    number = store.add(f"linnaeus/searches/{rank}", 1)  # each rank counts its own calls
    store = torch_dist.PrefixStore(f"linnaeus/{number}", store)
    name_of = partial(torch_dist.get_global_rank, group)
    with (
        ControlPlane(store, rank, group.size(), name_of=name_of) as control,
        sharing_errors(control),
    ):
        try:
            control.gather(None, limit_s=ARRIVAL_S)
        except OverdueError as error:
            raise AutoBatchError(
                f"AutoBatch: rank {error.rank} has not called auto_find_batch_size within "
                f"{ARRIVAL_S / 60:.3g} minutes of rank {name_of(rank)}: every rank of the group must; "
                "group=False searches on this rank alone"
            ) from None
        _open[group] = control
        try:
            yield control
        finally:
            del _open[group]
        control.broadcast(None)  # no heartbeat ends before rank 0, which watches it, is done
        control.collect(None)  # rank 0 leaves last: it may host the store


@contextlib.contextmanager
def sharing_errors(control: ControlPlane) -> Iterator[None]:
    """Publish this rank's exception; raise another rank's as `AutoBatchError`."""
    try:
        try:
            yield
        except JobFailedError:
            raise
        except BaseException as error:
            with contextlib.suppress(torch_dist.DistError):
                control.publish(error)
            raise
    except JobFailedError as error:
        ours = AutoBatchError(f"AutoBatch: {error}")
        ours.exit_code = error.exit_code
        raise ours from error.__cause__
    except torch_dist.DistError as error:
        if isinstance(error, torch_dist.DistBackendError):
            raise
        raise AutoBatchError(
            "AutoBatch: the store of the process group can no longer be reached: the process that "
            f"serves it, usually rank {control.name_of(0)}, has ended "
            f"({str(error).partition(chr(10))[0]})"
        ) from error


def check_equal(control: ControlPlane, facts: Mapping[str, Any]) -> None:
    """Wait for all ranks, and compare arguments that must be the same on all, by name.

    Raises:
        LinnaeusError: a rank has not called in time, or a fact differs; on every rank.
    """
    found = first_difference(control.gather(dict(facts), limit_s=ARRIVAL_S))
    if found is not None:
        rank, different = found
        listed = "; ".join(
            f"{name} is {main!r} and {other!r}" for name, (main, other) in different.items()
        )
        raise AutoBatchError(
            f"AutoBatch: ranks {control.name_of(0)} and {control.name_of(rank)} call auto_find_batch_size "
            f"with different arguments: {listed}. Use the same on all ranks; only step, make_batch, "
            "state, device, observer, memory_limit_gb and bounds may differ"
        )
