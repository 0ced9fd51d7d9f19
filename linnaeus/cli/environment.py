"""The environment in which measured figures hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from linnaeus.autobatch.memory.device import GIB, device_memory
from linnaeus.config.instantiate import is_target
from linnaeus.sizing.report import device_environment
from linnaeus.sizing.sizes import SizeSearch

_DRIVER = Path("/proc/driver/nvidia/version")


def describe(model_node: Any, search: SizeSearch) -> dict[str, Any]:
    """Device, versions, and the settings that memory and speed depend on."""
    device, autobatch = search.world.device, search.config.AUTOBATCH
    return {
        **device_environment(device),
        "total_bytes": device_memory(device).total_bytes,
        "driver": driver_version() if device.type == "cuda" else None,
        **run_settings(model_node, search),
        "steps_per_trial": autobatch.STEPS_PER_TRIAL,
        "strategy": autobatch.STRATEGY,
    }


def run_settings(model_node: Any, search: SizeSearch) -> dict[str, Any]:
    """The settings that memory depends on."""
    train, taxonomy = search.train, search.data.taxonomy
    parameters = list(search.assembly.model.parameters())
    freezing = search.assembly.freezing
    num_frozen = 0 if freezing.ends_within(train.EPOCHS) else freezing.num_elements
    return {
        "memory_limit_gb": search.config.AUTOBATCH.MEMORY_LIMIT_GB,
        "model": str(model_node["_target_"] if is_target(model_node) else model_node.NAME),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "frozen_parameters": num_frozen,
        "precision": _precision(parameters, train.AMP),
        "optimizer": type(search.assembly.optimizer).__name__,
        "image_size": None if search.data.img_size is None else list(search.data.img_size),
        "num_classes": None if taxonomy is None else list(taxonomy.num_classes.values()),
        "gradient_checkpointing": train.GRADIENT_CHECKPOINTING,
        "accumulation_steps": train.ACCUMULATION_STEPS,
        "ema": train.EMA.ENABLED,
    }


def device_sentence(environment: Mapping[str, Any]) -> str:
    """One line for people: the device, and the model that is measured on it."""
    limit = environment["memory_limit_gb"]
    return (
        f"measured on {environment['device']} ({environment['device_name']}) with "
        f"{environment['total_bytes'] / GIB:.1f} GiB{'' if limit is None else f', taken as {limit:g} GiB'}, "
        f"torch {environment['torch']}; {settings_sentence(environment)}"
    )


def settings_sentence(environment: Mapping[str, Any]) -> str:
    """What is run, for people: of `run_settings` all that memory depends on; what is off is left out.

    >>> settings = {"model": "vit", "parameters": 5000, "frozen_parameters": 0, "image_size": [32, 32],
    ...     "num_classes": [2, 6], "precision": "float32", "optimizer": "SGD", "gradient_checkpointing": True,
    ...     "accumulation_steps": 1, "ema": True}
    >>> settings_sentence(settings)
    'vit, 5,000 parameters, 32×32 pixels, 2 + 6 classes, float32, SGD, gradient checkpointing, EMA'
    """
    size, classes = environment["image_size"], environment["num_classes"]
    num_steps = environment["accumulation_steps"]
    parts = {
        environment["model"]: True,
        f"{environment['parameters']:,} parameters": True,
        f"{environment['frozen_parameters']:,} of them frozen": environment["frozen_parameters"] > 0,
        f"{'×'.join(map(str, size or []))} pixels": size is not None,
        f"{' + '.join(map(str, classes or []))} classes": classes is not None,
        environment["precision"]: True,
        environment["optimizer"]: True,
        "gradient checkpointing": environment["gradient_checkpointing"],
        f"{num_steps} accumulation steps": num_steps > 1,
        "EMA": environment["ema"],
    }
    return ", ".join(part for part, applies in parts.items() if applies)


def driver_version(path: Path = _DRIVER) -> str | None:
    """Version of the NVIDIA driver; None where there is none."""
    try:
        text = path.read_text()
    except OSError:
        return None
    found = re.search(r"Module.*?\s(\d+(?:\.\d+)+)", text)
    return found.group(1) if found else None


def _precision(parameters: list[torch.nn.Parameter], amp: str) -> str:
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})
    return ", ".join(dtypes) if amp == "off" else f"{amp} autocast over {', '.join(dtypes)}"
