"""Everything that the batch sizes found depend on, as text: runs with the same text need one search."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, get_args

from linnaeus import __version__, nest
from linnaeus.autobatch.report import device_environment
from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.sizes import SizeSearch
from linnaeus.config.instantiate import is_target
from linnaeus.config.schema import DataConfig, TrainConfig
from linnaeus.dist import World
from linnaeus.memory.device import device_memory
from linnaeus.training import fingerprint

IRRELEVANT = (
    *(f"OPTIMIZER.{name}" for name in ("LR", "LR_SCALING", "WEIGHT_DECAY_SCALING", "BASE_BATCH_SIZE")),
    *(f"TRAIN.{name}" for name in ("EPOCHS", "LOG_EVERY", "VALIDATE_EVERY", "KEEP_CHECKPOINTS")),
    *(f"TRAIN.CHECKPOINT_EVERY{unit}" for unit in ("", "_STEPS", "_MINUTES")),
    *(f"TRAIN.{name}" for name in ("AUTO_RESUME", "RESUME_WITH", "DISTRIBUTE_BN", "ON_OUT_OF_MEMORY")),
    *(f"TRAIN.{name}" for name in ("EMA.DECAY", "NOISE_SCALE.EVERY", "NOISE_SCALE.DECAY")),
    *(f"DATA.AUTOBATCH.{name}" for name in ("LOG_LEVEL", "LOG_LEVEL_VAL", "SHARED_FOLDER")),
    "DATA.BATCH_SIZE_VAL",
    "DATA.SAMPLER",
)
"""Keys of the nodes below that no step's memory depends on."""
ONLY_WHETHER = (
    "MODEL.DROP_RATE", "MODEL.DROP_PATH_RATE", "LOSS.LABEL_SMOOTHING", "OPTIMIZER.WEIGHT_DECAY",
    "TRAIN.CLIP_GRAD_NORM",
)  # fmt: skip
"""Keys of which only this counts: whether they are 0 or null. A step then leaves something out."""
_OF_TORCH_OPTIMIZERS = {"OPTIMIZER.lr": IRRELEVANT, "OPTIMIZER.weight_decay": ONLY_WHETHER}
"""The same for a `_target_` of torch.optim. What a class of one's own makes of its arguments is not known."""

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
    rules = dict.fromkeys(IRRELEVANT, IRRELEVANT) | dict.fromkeys(ONLY_WHETHER, ONLY_WHETHER)
    if data.AUTOBATCH.ENABLED or not data.AUTOBATCH.ENABLED_VAL:
        rules["DATA.BATCH_SIZE"] = IRRELEVANT  # else validation is searched beside training at this size
    if is_target(optimizer_node) and str(optimizer_node["_target_"]).startswith("torch.optim."):
        rules |= _OF_TORCH_OPTIMIZERS
    return {
        key: bool(value) if rules.get(key) is ONLY_WHETHER else value
        for key, value in content.items()
        if rules.get(key) is not IRRELEVANT
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
    """A `search_key` with what the data, the model and the device really are.

    Runs of different seeds have it in common where the seed chooses samples of the same shapes.
    """
    content = {
        "version": __version__,
        "searched_for": key,
        "data_and_model": fingerprint.of_data_and_model(search.data, search.assembly),
        "samples": {mode: _shapes(search, mode) for mode in get_args(Mode)},
        "max_samples_per_rank": search.max_samples_per_rank,
        "total_bytes": device_memory(search.world.device).total_bytes,
    }
    return json.dumps(content, sort_keys=True)


def _shapes(search: SizeSearch, mode: Mode) -> list[str]:
    return [f"{tensor.dtype} {list(tensor.shape)}" for tensor in nest.tensors(search.spec(mode).load(1))]
