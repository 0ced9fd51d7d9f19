"""Act before each collective: ranks of a joint step meet; a rank that steps alone raises an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as torch_dist
from torch import library

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.ranks.heartbeat import ControlPlane
from linnaeus.autobatch.state.sharded import is_fake

_BUCKET_BYTES = 25 * 1024**2  # default of DistributedDataParallel


class BeforeCollectives:
    """Context in which `call(name, group)` runs before each collective of several ranks, in any thread.

    Each collective of torch is an operator of `c10d`, whether Python, compiled code or the reducer of
    DistributedDataParallel calls it. A kernel for the key BackendSelect, which every call of an operator
    passes, comes before the backend's own. All other operators run as always.
    """

    def __init__(self, call: Callable[[str, torch_dist.ProcessGroup], object]) -> None:
        self._call = call

    def __enter__(self) -> Self:
        # Nothing public removes kernels at once.
        self._scope = library._scoped_library("c10d", "IMPL")
        kernels = self._scope.__enter__()
        for name in torch._C._dispatch_get_all_op_names():  # no public function lists them
            namespace, _, operator = name.partition("::")
            if namespace == "c10d":
                kernel = partial(self._kernel, operator)
                kernels.impl(operator, kernel, "BackendSelect", with_keyset=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._scope.__exit__(None, None, None)

    def _kernel(self, name: str, keys: Any, *arguments: Any) -> Any:
        held = next((each for each in arguments if isinstance(each, torch.ScriptObject)), None)
        if held is not None:  # an operator's group comes before its other objects
            group = torch_dist.ProcessGroup.unbox(held)
            if group.size() > 1 and not is_fake(group):
                self._call(name, group)
        rest = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        return getattr(torch.ops.c10d, name).default.redispatch(keys & rest, *arguments)


def lockstep(control: ControlPlane) -> BeforeCollectives:
    """Return a context in which ranks meet on the control plane before each collective.

    So an error of one rank is raised on all of them, and leaves none waiting inside a collective, where only
    the timeout of the process group would free it.
    """
    return BeforeCollectives(partial(_meet, control))


def _meet(control: ControlPlane, name: str, group: torch_dist.ProcessGroup) -> None:
    if not name.startswith(("send", "recv")):  # which not all ranks of the group call
        members = torch_dist.get_process_group_ranks(group)
        control.barrier(f"{group.group_name} {members}", len(members))


def collectives_refused() -> BeforeCollectives:
    """Return a context in which a collective of several ranks raises an error instead of waiting."""
    return BeforeCollectives(_refuse)


def _refuse(name: str, group: torch_dist.ProcessGroup) -> None:
    raise AutoBatchError(
        f"AutoBatch: the step runs a collective, {name.strip('_')}, but only one rank steps during a search, "
        "so it would wait for the others forever. Leave reductions and gathers (of losses, of metrics) "
        "out of step and make_batch of the search, and give state the DistributedDataParallel wrapper, whose "
        "own collectives are switched off."
    )


def warm_up_collectives(group: Any, device: torch.device) -> None:
    """Run each kind of collective that training uses, so that the backend allocates its buffers now.

    NCCL connects an algorithm when it uses it first, and chooses it by kind and size. Collective; it does
    nothing on the CPU, and in a group without a backend for the device.
    """
    if device.type not in {each.type for each in group._device_types} - {"cpu"}:
        return
    for num_bytes in (8, _BUCKET_BYTES):
        values = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        torch_dist.all_reduce(values, group=group)
        torch_dist.broadcast(values, group=group, group_src=0)
    gathered = [torch.empty_like(values[:8]) for _ in range(group.size())]
    torch_dist.all_gather(gathered, values[:8], group=group)
