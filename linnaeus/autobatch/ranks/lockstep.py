"""Joint steps: no rank enters a collective before all ranks of its group have come to it."""

from __future__ import annotations

from typing import Any

import torch.distributed as torch_dist

from linnaeus.autobatch.memory.storages import (
    WatchingMode,
    accumulates_in_place,
    references_of_a_gradient,
)
from linnaeus.autobatch.ranks.control import ControlPlane
from linnaeus.autobatch.ranks.single_rank import group_of_collective, num_ranks


class Lockstep(WatchingMode):
    """Inside the mode, ranks meet on the control plane before each collective.

    So an error of one rank is raised on all of them, and leaves none waiting inside a collective, where only
    the timeout of the process group would free it.
    """

    def __init__(self, control: ControlPlane) -> None:
        super().__init__()
        self._control = control
        references_of_a_gradient()  # found by a backward pass of its own, so not inside of one

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if accumulates_in_place(func, args, kwargs):
            return args[0].add_(args[1])
        group = group_of_collective(func, args)
        waits_for_all = not any(part in str(func) for part in ("send", "recv", "p2p"))
        if group is not None and num_ranks(group) > 1 and waits_for_all:
            members = torch_dist.get_process_group_ranks(group)
            self._control.barrier(f"{group.group_name} {members}", len(members))
        return func(*args, **(kwargs or {}))
