"""What an evaluation says about its checkpoint, data and settings, and how it compares with training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from linnaeus.cli.evaluate.context import Session
from linnaeus.cli.evaluate.results import Logged
from linnaeus.config.schema import Config
from linnaeus.data.evaluation import EvaluationData
from linnaeus.dist import World
from linnaeus.inference.evaluate import Outcome
from linnaeus.inference.trained import TrainedRun
from linnaeus.sizing.report import device_environment


def describe_checkpoint(trained: TrainedRun) -> dict[str, Any]:
    """The checkpoint that is evaluated: its file and run, and when in training it was saved."""
    progress = trained.content["progress"]
    folder = trained.folder
    name = trained.checkpoint.name if folder is None else f"{folder.name}/{trained.checkpoint.name}"
    return {
        "name": name,
        "file": str(trained.checkpoint.resolve()),
        "run": None if folder is None else str(folder.resolve()),
        "epoch": progress["epoch"],
        "step": progress["step"],
        "model": trained.spec.node.get("NAME", trained.spec.node.get("_target_")),
        "ema": bool(trained.content.get("config", {}).get("TRAIN", {}).get("EMA", {}).get("ENABLED")),
    }


def describe_data(session: Session, data: EvaluationData) -> dict[str, Any]:
    """What tells this data, as the model sees it, from other data."""
    dataset, preprocessing = session.run.config.DATA.DATASET, data.bundle.preprocessing
    return {
        "source": data.source,
        "part": data.part,
        "dataset": dict(dataset) if isinstance(dataset, Mapping) else dataclasses.asdict(dataset),
        "image_size": None if preprocessing is None else list(preprocessing.size),
        "crop_fraction": None if preprocessing is None else preprocessing.crop_fraction,
    }


def describe_settings(config: Config, world: World) -> dict[str, Any]:
    """What the evaluation runs with: batch size, processes, device, precision."""
    return {
        "batch_size_val": config.DATA.BATCH_SIZE_VAL,
        "processes": world.world_size,
        **{name: value for name, value in device_environment(world.device).items() if name != "python"},
        "amp": config.TRAIN.AMP,
        "channels_last": config.TRAIN.CHANNELS_LAST,
        "compile": config.TRAIN.COMPILE,
    }


def compare_with_training(
    session: Session, config: Config, outcome: Outcome, data: EvaluationData
) -> Logged | None:
    """The comparison with the figures in the checkpoint; None where they are not of this data and state."""
    content, own = session.trained.content, session.run.own
    progress = content["progress"]
    was_validated = progress["epoch"] % own.TRAIN.VALIDATE_EVERY == 0 or progress["epoch"] == own.TRAIN.EPOCHS
    if not session.is_own_dataset or data.num_left_out or progress["samples"] or not was_validated:
        return None
    if not progress["metrics"]:
        return None
    return Logged.of(progress["metrics"], outcome.metrics, _other_settings(session, config, data))


def _other_settings(session: Session, config: Config, data: EvaluationData) -> list[str]:
    """What is not as it was in training, of all that the last digits of the figures depend on."""
    content, own, world = session.trained.content, session.run.own, session.world
    before: dict[str, Any] = {
        "DATA.BATCH_SIZE_VAL": own.DATA.BATCH_SIZE_VAL if session.trained.folder is not None else None,
        "TRAIN.AMP": own.TRAIN.AMP,
        "TRAIN.CHANNELS_LAST": own.TRAIN.CHANNELS_LAST,
        "TRAIN.COMPILE": own.TRAIN.COMPILE,
        "DATA.ON_BAD_IMAGE": own.DATA.ON_BAD_IMAGE,
        "processes": content.get("plan", {}).get("WORLD_SIZE"),
    }
    now: dict[str, Any] = {
        "DATA.BATCH_SIZE_VAL": config.DATA.BATCH_SIZE_VAL,
        "TRAIN.AMP": config.TRAIN.AMP,
        "TRAIN.CHANNELS_LAST": config.TRAIN.CHANNELS_LAST,
        "TRAIN.COMPILE": config.TRAIN.COMPILE,
        "DATA.ON_BAD_IMAGE": config.DATA.ON_BAD_IMAGE,
        "processes": world.world_size,
    }
    trained_with, preprocessing = session.trained.spec.preprocessing, data.bundle.preprocessing
    if trained_with is not None and preprocessing is not None:
        before |= {"image size": trained_with.size, "crop fraction": trained_with.crop_fraction}
        now |= {"image size": preprocessing.size, "crop fraction": preprocessing.crop_fraction}
    saved, environment = content.get("environment", {}), device_environment(world.device)
    for name in ("device_name", "torch"):
        before[name], now[name] = saved.get(name), environment[name]
    return [
        f"{name} {now[name]} ({'not known' if value is None else value} in the run)"
        for name, value in before.items()
        if value != now[name]
    ]
