"""Configurations as a command line loads them, the files that it names, and batch plans."""

from pathlib import Path

import pytest

from linnaeus.batch_plan.effective_batch import Facts
from linnaeus.batch_plan.plan import plan_batches
from linnaeus.config.load import load_config
from linnaeus.config.schema import (
    BatchScheduleConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from linnaeus.runtime.errors import ConfigError

FACTS = Facts(
    max_micro_batch_size=64, world_size=1, num_samples=100_000, learning_rate=0.1, weight_decay=0.05
)


def load(*argv):
    return load_config(argv).config


def problems(*argv):
    """What is wrong with a command line."""
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    assert caught.value.exit_code == 2
    return caught.value.problems


def write(files):
    """Write YAML files below the current folder; names have no ending."""
    for name, text in files.items():
        path = Path(f"{name}.yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def plan_of(
    facts=FACTS,
    optimizer=None,
    warmup=None,
    schedule=None,
    **train,
):
    node = TrainConfig(**train, BATCH_SCHEDULE=BatchScheduleConfig(**(schedule or {})))
    return plan_batches(
        node, optimizer or OptimizerConfig(), ScheduleConfig(**(warmup or {})), facts
    )
