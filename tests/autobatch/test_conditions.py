"""Which keys the batch sizes found depend on: each one, by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from linnaeus.autobatch.conditions import memory_settings, search_key, shared_key
from linnaeus.config.keys import KEYS, dotted
from linnaeus.config.load import load_config
from linnaeus.config.schema import Config
from linnaeus.dist import World
from tests.autobatch.test_sizes import OWN_DATA, OWN_MODEL, prepared
from tests.conftest import SMALL

NODES = ("MODEL", "LOSS", "OPTIMIZER", "TRAIN", "DATA")
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
ONLY_WHETHER = {
    "MODEL.DROP_RATE": (0.1, 0.2), "MODEL.DROP_PATH_RATE": (0.1, 0.2), "LOSS.LABEL_SMOOTHING": (0.1, 0.2),
    "OPTIMIZER.WEIGHT_DECAY": (0.1, 0.2), "TRAIN.CLIP_GRAD_NORM": (1.0, 2.0),
}  # fmt: skip
"""Keys of which it only counts whether they are 0 or null, and two values that are neither."""
OF_SEARCHED = sorted(dotted(path) for path in KEYS if path[0] in NODES)
ON = ("DATA.AUTOBATCH.ENABLED=True",)


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


@pytest.mark.parametrize("key", OF_SEARCHED)
def test_each_key_counts_unless_no_memory_depends_on_it(key: str, config: Config) -> None:
    before = config
    for name in key.split("."):
        before = getattr(before, name)
    counts = settings(changed(config, key, another(before))) != settings(config)
    if key in ONLY_WHETHER:
        one, two = (settings(changed(config, key, value)) for value in ONLY_WHETHER[key])
        assert one == two
        counts = one != settings(changed(config, key, 0.0))
    assert counts == (key not in DROPPED)


def test_every_key_that_is_named_here_is_one() -> None:
    assert set(DROPPED) | set(ONLY_WHETHER) <= set(OF_SEARCHED)


def test_seed_schedule_and_names_do_not_count() -> None:
    def key(*argv: str) -> str:
        search, _ = prepared(*SMALL, *argv)
        config = load_config([*ON, *SMALL, "EXPERIMENT.DEVICE=cpu", *argv]).config
        nodes = (config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, config.DATA)
        return shared_key(search_key(*nodes, search.world), search)

    base = key()
    assert key("EXPERIMENT.SEED=5", "SCHEDULE.NAME=linear", "EXPERIMENT.NAME=x", "OPTIMIZER.LR=1") == base
    for other in ("DATA.IMG_SIZE=40", "DATA.DATASET.NUM_SAMPLES=90", "MODEL.NAME=test_vit"):
        assert key(other) != base


def test_a_seed_that_chooses_samples_of_another_shape_counts() -> None:
    """The trials of a run use the largest of the samples that its seed chooses."""

    def key(seed: int) -> str:
        search, _ = prepared(
            OWN_MODEL, OWN_DATA, "DATA.AUTOBATCH.NUM_SPEC_SAMPLES=1", f"EXPERIMENT.SEED={seed}"
        )
        return shared_key("", search)

    keys = {key(seed) for seed in range(4)}
    assert len(keys) > 1


def test_validation_beside_training_without_a_search_depends_on_its_size() -> None:
    def of_size(size: int, *argv: str) -> dict[str, Any]:
        return settings(load_config([f"DATA.BATCH_SIZE={size}", "DATA.BATCH_SIZE_VAL=9", *argv]).config)

    assert of_size(8, *ON) == of_size(16, *ON)
    assert of_size(8, "DATA.AUTOBATCH.ENABLED_VAL=True") != of_size(16, "DATA.AUTOBATCH.ENABLED_VAL=True")


def test_rates_of_an_optimizer_of_torch_do_not_count_and_those_of_ones_own_do() -> None:
    def of_rate(rate: float, target: str, name: str = "lr") -> dict[str, Any]:
        return settings(load_config([f"OPTIMIZER._target_={target}", f"OPTIMIZER.{name}={rate}"]).config)

    assert of_rate(0.1, "torch.optim.SGD") == of_rate(0.2, "torch.optim.SGD")
    assert of_rate(0.1, "my.SGD") != of_rate(0.2, "my.SGD")
    decay = [of_rate(value, "torch.optim.SGD", "weight_decay") for value in (0.1, 0.2, 0.0)]
    assert (decay[0] == decay[1], decay[0] == decay[2]) == (True, False)


def peaks(*argv: str) -> list[int]:
    """Peaks of the training step at two sizes, as a trace of it predicts them."""
    base = ("MODEL.DROP_RATE=0.1", "OPTIMIZER.NAME=sgd", "TRAIN.EMA.ENABLED=True", "LOSS.LABEL_SMOOTHING=0.1")
    search, _ = prepared(*SMALL, *base, *argv)
    prediction = search.predict("train")
    return [prediction.peak_bytes(size) for size in (8, 64)]


def test_the_step_needs_the_same_memory_whatever_the_keys_left_out_are() -> None:
    left_out = [f"{key}={value}" for key, value in DROPPED.items() if not key.startswith("DATA.BATCH_SIZE")]
    other_numbers = [f"{key}={two}" for key, (_, two) in ONLY_WHETHER.items()]
    base = peaks("MODEL.DROP_PATH_RATE=0.1")
    assert peaks(*left_out, *other_numbers) == base
    without = peaks("OPTIMIZER.WEIGHT_DECAY=0", "TRAIN.CLIP_GRAD_NORM=null", "MODEL.DROP_RATE=0")
    assert without != base, "whether they are there matters"


def test_the_device_counts(config: Config) -> None:
    nodes = (config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, config.DATA)
    cpu = World(torch.device("cpu"))
    assert search_key(*nodes, cpu) == search_key(*nodes, cpu)
    assert search_key(*nodes, cpu) != search_key(*nodes, World(torch.device("meta")))
    assert search_key(*nodes, cpu) != search_key(*nodes, dataclasses.replace(cpu, world_size=2))
