"""Everything that the batch sizes found depend on, as text: runs with the same text need one search."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as torch_dist

from linnaeus import __version__
from linnaeus.autobatch import nest
from linnaeus.autobatch.memory.device import device_memory
from linnaeus.autobatch.result import Mode
from linnaeus.config.instantiate import is_target
from linnaeus.config.schema import DataConfig, TrainConfig
from linnaeus.dist import World
from linnaeus.sizing.report import device_environment
from linnaeus.sizing.sizes import SizeSearch
from linnaeus.training import fingerprint

IRRELEVANT = frozenset(
    {
        "OPTIMIZER.LR",
        "OPTIMIZER.LR_SCALING",
        "OPTIMIZER.WEIGHT_DECAY_SCALING",
        "OPTIMIZER.BASE_BATCH_SIZE",
        "TRAIN.EPOCHS",
        "TRAIN.LOG_EVERY",
        "TRAIN.VALIDATE_EVERY",
        "TRAIN.CHECKPOINT_EVERY",
        "TRAIN.CHECKPOINT_EVERY_STEPS",
        "TRAIN.CHECKPOINT_EVERY_MINUTES",
        "TRAIN.KEEP_CHECKPOINTS",
        "TRAIN.AUTO_RESUME",
        "TRAIN.RESUME_WITH",
        "TRAIN.DISTRIBUTE_BN",
        "TRAIN.ON_OUT_OF_MEMORY",
        "TRAIN.EMA.DECAY",
        "TRAIN.NOISE_SCALE.EVERY",
        "TRAIN.NOISE_SCALE.DECAY",
        "DATA.AUTOBATCH.LOG_LEVEL",
        "DATA.AUTOBATCH.LOG_LEVEL_VAL",
        "DATA.AUTOBATCH.SHARED_FOLDER",
        "DATA.BATCH_SIZE_VAL",
        "DATA.SAMPLER",
    }
)
"""Keys of the nodes below that no step's memory depends on."""
ZERO_OR_NOT = frozenset(
    {
        "MODEL.DROP_RATE",
        "MODEL.DROP_PATH_RATE",
        "LOSS.LABEL_SMOOTHING",
        "OPTIMIZER.WEIGHT_DECAY",
        "TRAIN.CLIP_GRAD_NORM",
    }
)
"""Keys of which only zero or null versus any other value matters: the step then skips a computation."""
_WITH_VERSION = ("linnaeus", "torch", "timm", "torchvision")
"""Packages whose version says what their code is."""
_OF_LIBRARY = re.compile(
    "|".join(re.escape(sysconfig.get_path(name) + os.sep) for name in ("stdlib", "platstdlib"))
    + r"|.*/(site|dist)-packages/"
)
"""Begins the path of a file that nobody edits."""
_VARIABLE = re.compile(
    r"(PYTORCH|TORCH|CUDA|CUBLAS|CUDNN|NVIDIA|NCCL|GLOO|HIP|MIOPEN|TRITON|TIMM|LINNAEUS_MEMORY|ONEDNN|DNNL|MALLOC"
    r"|LD_PRELOAD|GLIBC)(?!ELASTIC_)\w*"
)
"""Environment variables that may change what a step allocates, or what an allocator makes of it."""
_PATH_VARIABLE = re.compile(r"\w*(VISIBLE_DEVICES|_DIR|_DIRECTORY|_HOME|_PATH|_ROOT|_FILE|_LOGS?)")
"""Those of them that say which device, folder or file is used, as launchers set them for each run."""

Nodes = dict[str, Any]


def memory_settings(
    model_node: Any, loss_node: Any, optimizer_node: Any, train: TrainConfig, data: DataConfig
) -> dict[str, Any]:
    """The part of a configuration that the sizes found depend on, by dotted key."""
    nodes = {
        "MODEL": model_node, "LOSS": loss_node, "OPTIMIZER": optimizer_node, "TRAIN": train, "DATA": data,
    }  # fmt: skip
    content = {
        key: value
        for name, node in nodes.items()
        for key, value in _flat(name, node if isinstance(node, dict) else dataclasses.asdict(node))
    }
    if train.UNFREEZE_EPOCH is not None:  # only whether unfreezing happens within this run affects memory
        content["TRAIN.UNFREEZE_EPOCH"] = train.UNFREEZE_EPOCH <= train.EPOCHS
    irrelevant, zero_or_not = set(IRRELEVANT), set(ZERO_OR_NOT)
    if data.AUTOBATCH.ENABLED or not data.AUTOBATCH.ENABLED_VAL:
        irrelevant.add("DATA.BATCH_SIZE")  # else validation is searched beside training at this size
    if is_target(optimizer_node) and str(optimizer_node["_target_"]).startswith("torch.optim."):
        irrelevant.add("OPTIMIZER.lr")  # what a class of one's own makes of its arguments is not known
        zero_or_not.add("OPTIMIZER.weight_decay")
    return {
        key: bool(value) if key in zero_or_not else value
        for key, value in content.items()
        if key not in irrelevant
    }


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}", inner)
    else:
        yield key, value


def search_key(
    model_node: Any, loss_node: Any, optimizer_node: Any, train: TrainConfig, data: DataConfig, world: World,
    *, find_unused_parameters: bool = False,
) -> str:  # fmt: skip
    """Everything that the sizes found depend on beside the data, as text that can be compared."""
    content = memory_settings(model_node, loss_node, optimizer_node, train, data)
    # The index of the device differs between ranks.
    environment = device_environment(world.device) | {"device": world.device.type}
    content |= {"world_size": world.world_size, "environment": environment}
    content["find_unused_parameters"] = find_unused_parameters
    return json.dumps(content, sort_keys=True)


def shared_key(key: str, search: SizeSearch) -> str:
    """A `search_key` with what the data, the model, the device and the software of this rank really are.

    Runs of different seeds have it in common where the seed chooses samples of the same shapes.
    """
    content = {
        "version": __version__,
        "searched_for": key,
        "data_and_model": fingerprint.of_data_and_model(search.data, search.assembly),
        "module_classes_and_tensors": _of_modules(search),
        "code": _own_code(search),
        "samples": {mode: _shapes(search, mode) for mode in get_args(Mode)},
        "max_samples_per_rank": search.max_samples_per_rank,
        "process": process_conditions(search.world),
    }
    return json.dumps(content, sort_keys=True)


def process_conditions(world: World) -> dict[str, Any]:
    """What the memory of a step depends on beside configuration, data and model: of this rank."""
    device, cudnn, cuda = world.device, torch.backends.cudnn, torch.backends.cuda
    content: dict[str, Any] = {
        "total_bytes": device_memory(device).total_bytes,
        "local_world_size": world.local_world_size,
        "backend": torch_dist.get_backend() if torch_dist.is_initialized() else None,
        "versions": {name: version(name) for name in ("timm", "torchvision")},
        "cudnn": [cudnn.version(), cudnn.enabled, cudnn.benchmark, cudnn.deterministic],
        "attention": [
            cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(),
            cuda.math_sdp_enabled(),
        ],
        "precision": [str(torch.get_default_dtype()), _matmul_precision()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if _VARIABLE.fullmatch(name) and not _PATH_VARIABLE.fullmatch(name)
        },
    }  # fmt: skip
    if device.type == "cuda":
        content["processors"] = torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "cpu":  # kernels allocate for each thread
        content |= {
            "threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        }
    return content


def _matmul_precision() -> str:
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # since torch 2.9, whose old function may raise
        return str(matmul.fp32_precision)
    return torch.get_float32_matmul_precision()


def _of_modules(search: SizeSearch) -> str:
    """A digest of the classes of all modules, and of the kinds of their tensors."""
    model = search.assembly.model
    tensors = (*model.named_parameters(), *model.named_buffers())
    content = [
        [
            (name, f"{type(module).__module__}.{type(module).__qualname__}")
            for name, module in model.named_modules()
        ],
        [(name, str(each.dtype), list(each.shape), each.requires_grad) for name, each in tensors],
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _own_code(search: SizeSearch) -> dict[str, str]:
    """A digest of each file of one's own that is loaded: files are edited.

    Of libraries without a version here, only files with a class or function that a step calls count.
    """
    assembly, data = search.assembly, search.data
    called = (
        *assembly.model.modules(), *assembly.criterion.modules(), assembly.optimizer, data.train, data.val,
        data.collate, data.mixing,
    )  # fmt: skip
    names = {str(each.__module__) for each in called if each is not None}
    files = {
        name: str(getattr(module, "__dict__", {}).get("__file__"))  # attributes of some modules import others
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] not in _WITH_VERSION
    }
    return {
        name: hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for name, file in files.items()
        if (name in names or (name != "__main__" and not _OF_LIBRARY.match(file))) and Path(file).is_file()
    }


def _shapes(search: SizeSearch, mode: Mode) -> list[str]:
    return [f"{tensor.dtype} {list(tensor.shape)}" for tensor in nest.tensors(search.spec(mode).load(1))]
