"""Sharded models (FSDP2, DTensor) in a search: one rank steps alone, in groups that communicate nothing.

torch's fake process group has the size of the job and one process. A step in it allocates the
same memory as in the job (shards, gathered parameters, buffers of reductions). Only values are meaningless.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as torch_dist
from torch import nn

from linnaeus.autobatch.state.contents import Contents

_FSDP = "torch.distributed.fsdp._fully_shard"
_FAKE = "fake"


def is_fake(group: Any) -> bool:
    """Return whether a process group communicates nothing."""
    return bool(getattr(group, "group_desc", "") == _FAKE)


def modules_of(state: Iterable[Any]) -> list[nn.Module]:
    """Return the modules, with their submodules, in `state` and in attributes of its objects."""
    held = [value for part in state for value in (part, *getattr(part, "__dict__", {}).values())]
    modules = (module for each in held if isinstance(each, nn.Module) for module in each.modules())
    return list(dict.fromkeys(modules))


def is_sharded(state: Iterable[Any]) -> bool:
    """Return whether a parameter in `state` is a DTensor: each rank holds a part of it."""
    parameters = (each for module in modules_of(state) for each in module.parameters(recurse=False))
    return any(hasattr(each, "device_mesh") for each in parameters)


def parts_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Return FSDP2's own objects behind the modules: states, parameter groups and shared contexts."""
    found: dict[int, Any] = {}
    sharded: list[Any] = [module for module in modules if hasattr(module, "_get_fsdp_state")]
    waiting = [module._get_fsdp_state() for module in sharded]
    while waiting:
        part = waiting.pop()
        if (
            id(part) not in found
            and type(part).__module__.startswith(_FSDP)
            and hasattr(part, "__dict__")
        ):
            found[id(part)] = part
            for value in vars(part).values():
                waiting += value if isinstance(value, list | tuple) else [value]
    return list(found.values())


@contextlib.contextmanager
def fake_groups(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Replace the process groups of sharded modules by fake ones that communicate nothing.

    FSDP2 holds its groups as objects, and DTensor asks for them by name; both get fake ones in their place.
    """
    parts = parts_of(modules)
    held = [(vars(part), name, value) for part in parts for name, value in vars(part).items()]
    held = [each for each in held if isinstance(each[2], torch_dist.ProcessGroup)]
    parameters = (each for module in modules for each in module.parameters(recurse=False))
    meshes: set[Any] = {getattr(each, "device_mesh", None) for each in parameters} - {None}
    groups = {group for mesh in meshes for group in mesh.get_all_groups()}
    fakes = {group: _fake_of(group) for group in groups | {group for *_, group in held}}
    try:
        for container, name, group in held:
            container[name] = fakes[group]
        for group, fake in fakes.items():
            _register(group.group_name, fake)
        yield
    finally:
        for container, name, group in held:
            container[name] = group
        for group in fakes:
            _register(group.group_name, group)


@contextlib.contextmanager
def fake_job(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a job whose groups communicate nothing, inside the context."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch_dist.init_process_group(_FAKE, store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        torch_dist.destroy_process_group()


def _fake_of(group: torch_dist.ProcessGroup) -> torch_dist.ProcessGroup:
    """Make a group of the same ranks that communicates nothing, by a private class of torch's tests."""
    from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore

    kind = torch_dist.ProcessGroup.BackendType.CUSTOM
    fake = torch_dist.ProcessGroup(FakeStore(), group.rank(), group.size())
    backend = FakeProcessGroup._create_internal(group.rank(), group.size())
    fake._set_default_backend(kind)
    for device in {"cpu", "meta", *(device.type for device in group._device_types)}:
        fake._register_backend(torch.device(device), kind, backend)
    fake._set_group_name(group.group_name)
    fake._set_group_desc(_FAKE)
    return fake


def _register(name: Any, group: torch_dist.ProcessGroup) -> None:
    """Register a group under the name that FSDP2 keeps; no public function does."""
    torch._C._distributed_c10d._unregister_process_group(name)
    torch._C._distributed_c10d._register_process_group(name, group)


@contextlib.contextmanager
def on_meta(modules: Sequence[nn.Module]) -> Iterator[list[Any]]:
    """Let sharded modules run on `meta`, in groups that communicate nothing, inside the context.

    FSDP2 keeps its device, and finds streams in the module of torch that has the device's name. `torch.cpu`
    tells which stream is current. Its tensors are for `state_on_meta` to replace.

    Yields:
        FSDP2's objects behind the modules.
    """
    if not (parts := parts_of(modules)):
        yield []
        return
    meta = torch.device("meta")
    groups = sys.modules[f"{_FSDP}._fsdp_param_group"]
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (torch, "meta", torch.cpu),
            (torch.cpu.Stream, "record_event", lambda stream: torch.cpu.Event()),
            *((torch.cpu.Stream, name, 0) for name in ("stream_id", "device_index", "device_type")),
            (groups.FSDPParamGroup, "_validate_no_meta_params", lambda group: None),
        ):
            stack.enter_context(mock.patch.object(target, name, value, create=True))
        stack.callback(reset_of(modules))
        stack.enter_context(fake_groups(modules))
        for part in parts:
            held = vars(part)
            held.update({name: meta for name in ("device", "_device") if name in held})
            held.update(
                {name: torch.cpu for name in ("device_handle", "_device_handle") if name in held}
            )
            if "all_gather_outputs" in held:
                held["all_gather_outputs"] = []
                held.pop("_unsharded_param", None)
            if "all_gather_stream" in held:
                part.lazy_init(meta)
        yield parts


def reset_of(modules: Sequence[nn.Module]) -> Callable[[], None]:
    """Reshard the modules; return a function that puts FSDP2 back to this.

    A step that fails leaves it in the middle of a pass: with gathered parameters and outstanding results.
    """
    sharded: list[Any] = [module for module in modules if hasattr(module, "_get_fsdp_state")]
    for module in sharded:
        module.reshard()
    parts = parts_of(sharded)
    hooks = (
        value for each in sharded for name, value in vars(each).items() if name.endswith("hooks")
    )
    registered = (module._parameters for each in sharded for module in each.modules())
    contents = Contents([*map(vars, parts), *hooks, *registered], without_tensors=True)

    def reset() -> None:
        contents.restore()
        for part in parts:
            for gathered in vars(part).get("all_gather_outputs", ()):
                gathered.untyped_storage().resize_(0)

    return reset
