"""Sharded training: FSDP2 (`fully_shard`) over the processes of a run, as `DIST.SHARDING` says."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from linnaeus.config.schema import DistConfig, TrainConfig
from linnaeus.dist import World
from linnaeus.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Number format by the value of `DIST.PARAM_DTYPE` and `DIST.REDUCE_DTYPE`."""


def is_sharded(config: DistConfig, world: World) -> bool:
    """Whether this run shards its model: a single process has nobody to share it with."""
    return config.SHARDING != "none" and world.is_distributed


def check_sharding(config: DistConfig, train: TrainConfig, world: World) -> None:
    """Check that the keys beside `DIST.SHARDING` go with it.

    Raises:
        ConfigError: one does not; names it with the remedy.
    """
    if not is_sharded(config, world):
        return
    refused = {
        "TRAIN.COMPILE True": (train.COMPILE, "False"),
        "TRAIN.CHANNELS_LAST True": (train.CHANNELS_LAST, "False"),
        "TRAIN.NOISE_SCALE.ENABLED True": (train.NOISE_SCALE.ENABLED, "False"),
        f"TRAIN.UNFREEZE_EPOCH {train.UNFREEZE_EPOCH}": (train.UNFREEZE_EPOCH is not None, "null"),
        "TRAIN.ON_OUT_OF_MEMORY split": (train.ON_OUT_OF_MEMORY == "split", "raise"),
        "DIST.CPU_OFFLOAD True on the CPU": (config.CPU_OFFLOAD and world.device.type == "cpu", "False"),
    }
    found = [f"{name} (set {remedy})" for name, (is_set, remedy) in refused.items() if is_set]
    if found:
        raise ConfigError(f"DIST.SHARDING: {config.SHARDING!r} does not go with {', '.join(found)}")


def make_mesh(config: DistConfig, world: World) -> DeviceMesh:
    """The processes as FSDP2 sees them: all share one copy, or with `hybrid` those of each node do."""
    kind = "cpu" if world.device.type == "meta" else world.device.type  # on `meta` there are no groups
    if config.SHARDING == "full":
        return init_device_mesh(kind, (world.world_size,), mesh_dim_names=("shard",))
    shape = (world.world_size // world.local_world_size, world.local_world_size)
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))


def find_blocks(model: nn.Module, patterns: list[str] | None) -> list[nn.Module]:
    """The submodules that are gathered one at a time, inner ones before those around them.

    Args:
        model: the whole model.
        patterns: `DIST.SHARD_BLOCKS`: names of modules or of their classes, with wildcards. By default each
            module whose class stands at least twice in a `Sequential` or `ModuleList` and has submodules; of
            several inside each other, the innermost.

    Raises:
        ConfigError: a pattern matches no submodule.
    """
    named = {name: module for name, module in model.named_modules() if name}
    if patterns is not None:
        for pattern in patterns:
            if not any(_matches(pattern, name, module) for name, module in named.items()):
                close = difflib.get_close_matches(
                    pattern, [*named, *{type(m).__name__ for m in named.values()}]
                )
                hint = f"; did you mean {', '.join(close)}?" if close else ""
                raise ConfigError(f"DIST.SHARD_BLOCKS: {pattern!r} matches no submodule of the model{hint}")
        chosen = {n for n, m in named.items() if any(_matches(pattern, n, m) for pattern in patterns)}
    else:
        listed = {
            name: type(module)
            for name, module in named.items()
            if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Sequential | nn.ModuleList)
            and any(module.children())
            and not isinstance(module, nn.Sequential | nn.ModuleList)
        }
        counts = Counter(listed.values())
        repeated = {name for name, kind in listed.items() if counts[kind] > 1}
        chosen = {name for name in repeated if not any(other.startswith(f"{name}.") for other in repeated)}
    return [module for name, module in reversed(named.items()) if name in chosen]


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern)


def shard(
    model: nn.Module, config: DistConfig, world: World, *, with_average: bool
) -> tuple[nn.Module, nn.Module | None]:
    """Shard a model in place, each process keeping its part of every parameter on its device.

    Args:
        model: on the CPU, the same on every rank.
        config: the DIST node.
        world: several processes.
        with_average: whether a second model with the same values, for EMA, is made too.

    Returns:
        The model, and the second one or None.

    Raises:
        ConfigError: a pattern of `DIST.SHARD_BLOCKS` matches nothing, or FSDP2 refuses the model.
    """
    values = dict(model.named_parameters())
    _to_meta(model)
    average = deepcopy(model) if with_average else None
    mesh = make_mesh(config, world)
    for module in filter(None, (model, average)):
        _fully_shard(module, config, mesh)
        if world.device.type != "meta":
            device = torch.device("cpu") if config.CPU_OFFLOAD else world.device
            _fill(module, values.__getitem__, mesh, device)
    return model, average


def _fully_shard(model: nn.Module, config: DistConfig, mesh: DeviceMesh) -> None:
    param_dtype, reduce_dtype = DTYPES[config.PARAM_DTYPE], DTYPES[config.REDUCE_DTYPE]
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype),
        "reshard_after_forward": None if config.RESHARD_AFTER_FORWARD else False,
    }
    if param_dtype == reduce_dtype == torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy()
    if config.CPU_OFFLOAD:
        options["offload_policy"] = CPUOffloadPolicy()
    try:
        for block in find_blocks(model, config.SHARD_BLOCKS):
            fully_shard(block, **options)
        if param_dtype != torch.float32:  # of the whole: what follows a block takes the block's format
            options["mp_policy"] = replace(options["mp_policy"], output_dtype=torch.float32)
        fully_shard(model, **options)
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise ConfigError(f"DIST.SHARDING: {config.SHARDING!r} cannot shard this model: {error}") from error


def _to_meta(model: nn.Module) -> None:
    """Replace the parameters by such without values; shared ones stay shared, buffers stay as they are."""
    replaced: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in replaced:
                    on_meta = torch.empty_like(parameter, device="meta")
                    replaced[parameter] = nn.Parameter(on_meta, parameter.requires_grad)
                module._parameters[name] = replaced[parameter]


@torch.no_grad()
def _fill(
    model: nn.Module, value_of: Callable[[str], Tensor], mesh: DeviceMesh, device: torch.device
) -> None:
    """Give the sharded parameters of a model on `meta` their values, by name, one parameter at a time."""
    place = mesh.get_local_rank("shard")
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    for name, parameter in model.named_parameters():
        parts = value_of(name).chunk(mesh.size(mesh.ndim - 1))
        if place < len(parts):
            parameter.to_local().copy_(parts[place])  # type: ignore[attr-defined]


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules of a model that FSDP2 gathers; none where the model is not sharded."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))
