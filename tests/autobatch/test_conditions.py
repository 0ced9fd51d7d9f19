"""Which keys the batch sizes found depend on: each one, by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from linnaeus.config.keys import KEYS, dotted
from linnaeus.config.load import load_config
from linnaeus.config.schema import Config
from linnaeus.dist import World
from linnaeus.sizing.conditions import memory_settings, process_conditions, search_key, shared_key
from tests.helpers.searches import OWN_DATA, OWN_MODEL, prepared

DROPPED = {
    "OPTIMIZER.LR": 0.5, "OPTIMIZER.LR_SCALING": "linear", "OPTIMIZER.WEIGHT_DECAY_SCALING": "sqrt",
    "OPTIMIZER.BASE_BATCH_SIZE": 7, "TRAIN.EPOCHS": 3, "TRAIN.LOG_EVERY": 3, "TRAIN.VALIDATE_EVERY": 3,
    "TRAIN.KEEP_CHECKPOINTS": 3, "TRAIN.CHECKPOINT_EVERY": 3, "TRAIN.CHECKPOINT_EVERY_STEPS": 3,
    "TRAIN.CHECKPOINT_EVERY_MINUTES": 3, "TRAIN.AUTO_RESUME": True, "TRAIN.RESUME_WITH": "lr",
    "TRAIN.DISTRIBUTE_BN": "none", "TRAIN.ON_OUT_OF_MEMORY": "split", "TRAIN.EMA.DECAY": 0.5,
    "TRAIN.NOISE_SCALE.EVERY": 3, "TRAIN.NOISE_SCALE.DECAY": 0.5, "DATA.AUTOBATCH.LOG_LEVEL": "ERROR",
    "DATA.AUTOBATCH.LOG_LEVEL_VAL": "ERROR", "DATA.AUTOBATCH.SHARED_FOLDER": "there",
    "DATA.BATCH_SIZE": 3, "DATA.BATCH_SIZE_VAL": 3, "DATA.SAMPLER": "balanced",
}  # fmt: skip
"""Keys that no search depends on, and another value of each."""
OF_NO_STEP = (
    "EXPERIMENT.NAME", "EXPERIMENT.OUTPUT_DIR", "EXPERIMENT.WANDB.ENABLED", "EXPERIMENT.WANDB.PROJECT",
    "EXPERIMENT.WANDB.ENTITY", "EXPERIMENT.WANDB.GROUP", "EXPERIMENT.WANDB.TAGS", "SCHEDULE.NAME",
    "SCHEDULE.WARMUP_EPOCHS", "SCHEDULE.WARMUP_FRACTION", "SCHEDULE.WARMUP_STEPS", "SCHEDULE.MIN_LR_FRACTION",
    "DIST.TIMEOUT_MINUTES", "DIST.START_MINUTES",
)  # fmt: skip
"""Keys of other nodes, of names, rates and times, that no step's memory depends on. A new key has to be named
here, or to count."""
IN_OTHER_FORM = ("EXPERIMENT.SEED", "EXPERIMENT.DEVICE", "DIST.BACKEND", "DIST.FIND_UNUSED_PARAMETERS")
"""Keys that do not count, but what they choose does."""
ONLY_WHETHER = {
    "MODEL.DROP_RATE": (0.1, 0.2), "MODEL.DROP_PATH_RATE": (0.1, 0.2), "LOSS.LABEL_SMOOTHING": (0.1, 0.2),
    "OPTIMIZER.WEIGHT_DECAY": (0.1, 0.2), "TRAIN.CLIP_GRAD_NORM": (1.0, 2.0),
}  # fmt: skip
"""Keys of which it only counts whether they are 0 or null, and two values that are neither."""
ALL_KEYS = sorted(map(dotted, KEYS))
ON = ("DATA.AUTOBATCH.ENABLED=True",)
CPU = World(torch.device("cpu"))


def changed(config: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    return dataclasses.replace(
        config, **{name: changed(getattr(config, name), rest, value) if rest else value}
    )


def settings(config: Config) -> dict[str, Any]:
    return memory_settings(config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, config.DATA)


def another(value: Any) -> Any:
    """Some other value of the same kind."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return value + type(value)("x") if isinstance(value, (str, list)) else {**value, "x": 1}


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(ON).config


def test_each_key_counts_unless_no_memory_depends_on_it(config: Config) -> None:
    named = [*DROPPED, *ONLY_WHETHER, *OF_NO_STEP, *IN_OTHER_FORM]
    assert set(named) <= set(ALL_KEYS)
    assert len(named) == len(set(named))
    base = settings(config)
    for key in ALL_KEYS:
        before = config
        for name in key.split("."):
            before = getattr(before, name)
        counts = settings(changed(config, key, another(before))) != base
        if key in ONLY_WHETHER:
            one, two = (settings(changed(config, key, value)) for value in ONLY_WHETHER[key])
            assert one == two, key
            counts = one != settings(changed(config, key, 0.0))
        assert counts == (key not in {*DROPPED, *OF_NO_STEP, *IN_OTHER_FORM}), key


def test_the_device_the_ranks_and_unused_parameters_count(config: Config) -> None:
    nodes = (config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, config.DATA)
    base = search_key(*nodes, CPU)
    assert search_key(*nodes, CPU) == base
    assert search_key(*nodes, World(torch.device("meta"))) != base
    assert search_key(*nodes, dataclasses.replace(CPU, world_size=2)) != base
    assert search_key(*nodes, CPU, find_unused_parameters=True) != base


COUNT = (
    "PYTORCH_CUDA_ALLOC_CONF", "TIMM_FUSED_ATTN", "CUBLAS_WORKSPACE_CONFIG", "CUDA_MODULE_LOADING",
    "NCCL_BUFFSIZE", "MALLOC_ARENA_MAX", "LD_PRELOAD", "LINNAEUS_MEMORY_LIMIT_GB",
)  # fmt: skip
"""Variables that change what is allocated."""
OF_A_LAUNCHER = ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "RANK", "HOSTNAME")
"""Variables that differ between runs."""


def test_of_variables_those_count_that_change_what_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*COUNT, *OF_A_LAUNCHER):
        conditions = []
        for value in ("1", "2"):
            monkeypatch.setenv(name, value)
            conditions.append(process_conditions(CPU))
        monkeypatch.delenv(name)
        conditions.append(process_conditions(CPU))
        assert (conditions[0] == conditions[1] == conditions[2]) == (name in OF_A_LAUNCHER), name
        assert (conditions[0] != conditions[1] != conditions[2]) == (name in COUNT), name


def test_what_the_model_is_made_of_counts_and_not_the_seed_that_built_it() -> None:
    search, assembly = prepared(OWN_MODEL, OWN_DATA)
    base = shared_key("", search)
    assert shared_key("", prepared(OWN_MODEL, OWN_DATA, "EXPERIMENT.SEED=5")[0]) == base
    assembly.model.activation = torch.nn.ReLU()
    assert shared_key("", search) != base
    del assembly.model.activation
    assert shared_key("", search) == base
    next(assembly.model.parameters()).requires_grad_(requires_grad=False)
    assert shared_key("", search) != base
