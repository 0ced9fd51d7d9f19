"""Sharded training: FSDP2 (`fully_shard`) over the ranks of a run, as `DIST.SHARDING` says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from linnaeus.config.keys import suggest
from linnaeus.config.schema import DistConfig, TrainConfig
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import ConfigError


def shards_model(config: DistConfig, world: World) -> bool:
    """Whether this run shards its model: a single rank has no other rank to share with."""
    return config.SHARDING != "none" and world.is_distributed


def check_sharding(config: DistConfig, train: TrainConfig, world: World) -> None:
    """Check that the keys beside `DIST.SHARDING` go with it.

    Raises:
        ConfigError: one does not; names it with the remedy.
    """
    if not shards_model(config, world):
        return
    refused = {
        "TRAIN.COMPILE True": (train.COMPILE, "False"),
        "TRAIN.CHANNELS_LAST True": (train.CHANNELS_LAST, "False"),
        f"TRAIN.UNFREEZE_EPOCH {train.UNFREEZE_EPOCH}": (train.UNFREEZE_EPOCH is not None, "null"),
        "TRAIN.ON_OUT_OF_MEMORY split": (train.ON_OUT_OF_MEMORY == "split", "raise"),
        f"{world.local_world_size} ranks on some nodes only": (
            config.SHARDING == "hybrid" and world.world_size % world.local_world_size > 0,
            "full",
        ),
        "DIST.CPU_OFFLOAD True on the CPU": (
            config.CPU_OFFLOAD and world.device.type == "cpu",
            "False",
        ),
    }
    found = [f"{name} (set {remedy})" for name, (is_set, remedy) in refused.items() if is_set]
    if found:
        raise ConfigError(
            f"DIST.SHARDING: {config.SHARDING!r} cannot be used with {', '.join(found)}"
        )


def sharding_sentence(model: nn.Module, config: DistConfig, world: World) -> str | None:
    """Describe the sharding, for people; None without any."""
    if not shards_model(config, world):
        alone = f"DIST.SHARDING {config.SHARDING} has no effect: there is a single rank"
        return alone if config.SHARDING != "none" else None
    parameters: list[Any] = list(model.parameters())
    num_modules = sum(isinstance(module, FSDPModule) for module in model.modules())
    own, total = (
        sum(p.numel() for p in each) for each in ([p.to_local() for p in parameters], parameters)
    )
    return (
        f"sharded ({config.SHARDING}): {own:,} of {total:,} values on this rank, gathered in "
        f"{num_modules} parts"
    )


def make_mesh(config: DistConfig, world: World) -> DeviceMesh:
    """Return the mesh for FSDP2: all ranks share one copy, or with `hybrid` the ranks of each node."""
    kind = (
        "cpu" if world.device.type == "meta" else world.device.type
    )  # on `meta` there are no groups
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
                kinds = {type(module).__name__ for module in named.values()}
                hint = suggest(pattern, [*named, *kinds], most=3, cutoff=0.6)
                raise ConfigError(
                    f"DIST.SHARD_BLOCKS: {pattern!r} matches no submodule of the model{hint}"
                )
        chosen = {
            n for n, m in named.items() if any(_matches(pattern, n, m) for pattern in patterns)
        }
    else:
        listed = {
            name: type(module)
            for name, module in named.items()
            if isinstance(
                model.get_submodule(name.rpartition(".")[0]), nn.Sequential | nn.ModuleList
            )
            and any(module.children())
            and not isinstance(module, nn.Sequential)
            and type(module).forward is not nn.Module.forward  # a container, whose parts are called
        }
        counts = Counter(listed.values())
        repeated = {name for name, kind in listed.items() if counts[kind] > 1}
        chosen = {
            name for name in repeated if not any(other.startswith(f"{name}.") for other in repeated)
        }
    return [module for name, module in reversed(named.items()) if name in chosen]


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern)


def shard(
    model: nn.Module, config: DistConfig, world: World, *, with_average: bool
) -> nn.Module | None:
    """Shard a model in place, each rank keeping its part of every parameter on its device.

    Args:
        model: on the CPU, the same on every rank.
        config: the DIST node.
        world: several ranks.
        with_average: whether to make a second model with the same values, for EMA.

    Returns:
        The second model, sharded too; None without.

    Raises:
        ConfigError: a pattern of `DIST.SHARD_BLOCKS` matches nothing, FSDP2 refuses the model, or BatchNorm
            refuses `DIST.PARAM_DTYPE`.
    """
    has_batchnorm = any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()
    )
    if config.PARAM_DTYPE != "fp32" and has_batchnorm:
        raise ConfigError(
            f"DIST.PARAM_DTYPE: {config.PARAM_DTYPE!r} cannot be used with BatchNorm, whose statistics are "
            "fp32; set fp32, and TRAIN.AMP bf16"
        )
    sources = dict(model.named_parameters(remove_duplicate=False))
    _to_meta(model)
    average = deepcopy(model) if with_average else None
    mesh = make_mesh(config, world)
    for each in filter(None, (model, average)):
        _fully_shard(each, config, mesh)
        if world.device.type != "meta":
            device = torch.device("cpu") if config.CPU_OFFLOAD else world.device
            _fill(each, sources, device)
    return average


def _fully_shard(model: nn.Module, config: DistConfig, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy()  # the model's own format
    if "bf16" in (config.PARAM_DTYPE, config.REDUCE_DTYPE):
        formats = {"fp32": torch.float32, "bf16": torch.bfloat16}
        policy = MixedPrecisionPolicy(formats[config.PARAM_DTYPE], formats[config.REDUCE_DTYPE])
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "reshard_after_forward": None if config.RESHARD_AFTER_FORWARD else False,
    }
    if config.CPU_OFFLOAD:
        options["offload_policy"] = CPUOffloadPolicy()
    blocks = find_blocks(model, config.SHARD_BLOCKS)
    _check_ties(model, blocks)
    try:
        for block in blocks:
            fully_shard(block, **options)
        options["mp_policy"] = replace(policy, output_dtype=policy.param_dtype and torch.float32)
        fully_shard(model, **options)
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise ConfigError(
            f"DIST.SHARDING: {config.SHARDING!r} cannot shard this model: {error}"
        ) from error


def _check_ties(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Raise `ConfigError` for a parameter that several blocks use: FSDP2 would make one for each of them."""
    names = {name for name, module in model.named_modules() if module in blocks}
    owners: dict[nn.Parameter, nn.Module] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = name.rpartition(".")[0]
        while block and block not in names:
            block = block.rpartition(".")[0]
        module = model.get_submodule(block)
        if owners.setdefault(parameter, module) is not module:
            raise ConfigError(
                f"DIST.SHARD_BLOCKS: {name} is shared by modules that are gathered apart; set "
                "DIST.SHARD_BLOCKS to modules, one of which holds all uses of it, or to []"
            )


def _to_meta(model: nn.Module) -> None:
    """Move the parameters to `meta`; tied ones stay tied."""
    replaced: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in replaced:
                    on_meta = torch.empty_like(parameter, device="meta")
                    replaced[parameter] = nn.Parameter(on_meta, parameter.requires_grad)
                module._parameters[name] = replaced[parameter]


def _fill(model: nn.Module, values: Mapping[str, Tensor], device: torch.device) -> None:
    """Give the parameters of a sharded model memory and their values by name: the part of this rank."""
    model._apply(
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
    )
    for name, parameter in model.named_parameters():
        fill_part(parameter, values[name])


@torch.no_grad()
def fill_part(tensor: Any, value: Tensor) -> None:
    """Copy this rank's part of `value` into a sharded tensor."""
    mesh = tensor.device_mesh
    parts, place = value.chunk(mesh.size(mesh.ndim - 1)), mesh.get_local_rank("shard")
    if place < len(parts):
        tensor.to_local().copy_(parts[place])


def reshard(model: nn.Module) -> None:
    """Free parameters that a forward pass without backward pass left gathered: FSDP2 keeps the root."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
