"""Whether a run may resume from a checkpoint: allowed changes of its configuration, and whether it ended."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from linnaeus.autobatch.state.rng import set_rng_state
from linnaeus.config.keys import dotted
from linnaeus.config.overrides import leaves
from linnaeus.config.schema import Config, EarlyStoppingConfig, TrainConfig
from linnaeus.data.bundle import DataBundle, dataset_length
from linnaeus.data.split_file import SPLIT_FILE, read_rows
from linnaeus.data.taxonomy import Taxonomy
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.rng import derive_seed, seed_all
from linnaeus.runtime.words import several
from linnaeus.training.checkpoint import REMEDY, Checkpoint, CheckpointFolder, TrainingProgress

logger = logging.getLogger("linnaeus.run")

FIXED_NODES = (
    "OPTIMIZER",
    "SCHEDULE",
    "EXPERIMENT",
    "MODEL.LORA",
    "MODEL.WEIGHTS",
    "MODEL.PRETRAINED",
)
"""Nodes and keys that may not change on resuming, unless TRAIN.RESUME_WITH allows it."""

_RATE_KEYS = {
    "OPTIMIZER.LR",
    "OPTIMIZER.WEIGHT_DECAY",
    "OPTIMIZER.LR_SCALING",
    "OPTIMIZER.WEIGHT_DECAY_SCALING",
    "OPTIMIZER.BASE_BATCH_SIZE",
    "OPTIMIZER.lr",
    "OPTIMIZER.weight_decay",
}
"""Keys of OPTIMIZER that may change with TRAIN.RESUME_WITH lr; all keys of SCHEDULE may."""

_TAKEN_WHERE_NULL = (
    "DATA.IMG_SIZE",
    "DATA.AUGMENT.INTERPOLATION",
    "DATA.AUGMENT.CROP_FRACTION",
    "DATA.AUGMENT.RESIZE",
    "DATA.AUGMENT.MEAN",
    "DATA.AUGMENT.STD",
)
"""Keys whose null takes the checkpoint's value; see `linnaeus.models.preprocessing`."""

_NOT_SET = "not set"


class Change(NamedTuple):
    """A key whose value differs between checkpoint and configuration, both as text."""

    key: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.key} ({self.before} in the checkpoint, {self.now} now)"

    @property
    def is_fixed(self) -> bool:
        """Whether it needs TRAIN.RESUME_WITH."""
        return self.key.startswith(FIXED_NODES)

    @property
    def is_rate(self) -> bool:
        """Whether TRAIN.RESUME_WITH=lr accepts the change.

        Weight decay to or from 0 regroups parameters, so it is refused.
        """
        if self.key == "OPTIMIZER.WEIGHT_DECAY" and repr(0.0) in (self.before, self.now):
            return False
        return self.key.startswith("SCHEDULE.") or self.key in _RATE_KEYS

    @property
    def has_effect(self) -> bool:
        """Not where null takes the checkpoint's value, nor for a new key with its default."""
        if self.key in _TAKEN_WHERE_NULL:
            return self.now != repr(None)
        return self.before != _NOT_SET or self.now != _defaults().get(self.key)


def resumed_nodes(config: Config) -> dict[str, Any]:
    """The nodes that a checkpoint keeps, as plain values, to be compared when the run is resumed."""
    kept = {
        "EXPERIMENT": ("SEED",),
        "TRAIN": (
            "AMP",
            "CLIP_GRAD_NORM",
            "EMA",
            "SYNC_BATCHNORM",
            "UNFREEZE_EPOCH",
            "EARLY_STOPPING",
            "OVERFIT_BATCHES",
        ),
        "DATA": (
            "DATASET",
            "AUGMENT",
            "SAMPLER",
            "IMG_SIZE",
            "IMG_SIZE_SCHEDULE",
            "DECODE",
            "BACKGROUND",
            "BIT_DEPTH",
            "LIMIT_TRAIN_SAMPLES",
            "LIMIT_VAL_SAMPLES",
        ),
    }
    nodes = dataclasses.asdict(config)
    whole = {name: nodes[name] for name in ("MODEL", "LOSS", "OPTIMIZER", "SCHEDULE")}
    return whole | {name: {key: nodes[name][key] for key in keys} for name, keys in kept.items()}


def changes_of(saved: Mapping[str, Any], nodes: Mapping[str, Any]) -> list[Change]:
    """The keys that differ, in the order of the nodes. Nodes that were not saved are not compared.

    >>> changes_of({"MODEL": {"NAME": "a", "KWARGS": {}}}, {"MODEL": {"NAME": "b", "KWARGS": {}}, "LOSS": {}})
    [Change(key='MODEL.NAME', before="'a'", now="'b'")]
    """
    before = flat({name: saved[name] for name in nodes if name in saved})
    now = flat({name: node for name, node in nodes.items() if name in saved})
    changes = (
        Change(key, before.get(key, _NOT_SET), now.get(key, _NOT_SET)) for key in now | before
    )
    return [change for change in changes if change.before != change.now]


def flat(tree: Mapping[str, Any]) -> dict[str, str]:
    """The values of nested mappings as text, by dotted key; an empty mapping has none."""
    return {dotted(path): repr(value) for path, value in leaves(tree) if value != {}}


@cache
def _defaults() -> dict[str, str]:
    return flat(dataclasses.asdict(Config()))


def find_checkpoint(
    checkpoints: CheckpointFolder, nodes: Mapping[str, Any], resume_with: str | None, world: World
) -> Checkpoint | None:
    """Return the checkpoint to resume from. Without one, log this and return None.

    Every rank must call this.

    Args:
        checkpoints: of the run.
        nodes: the `resumed_nodes` of this configuration.
        resume_with: TRAIN.RESUME_WITH.
        world: the ranks.

    Raises:
        CheckpointError, ConfigError: it cannot be read; it has another optimizer, schedule or seed.
    """
    checkpoint = checkpoints.load_latest(world)
    if checkpoint is None:
        if world.is_main:
            logger.info("no checkpoint in %s: starting fresh", checkpoints.folder.parent)
        return None
    found = changes_of(checkpoint.config, nodes)
    changes = [change for change in found if change.has_effect]
    check_changes(changes, resume_with)
    checkpoint.changes = [str(change) for change in changes if not change.is_fixed]
    return checkpoint


def check_changes(changes: Iterable[Change], resume_with: str | None) -> None:
    """Refuse another optimizer, schedule or seed unless TRAIN.RESUME_WITH allows it. Log allowed changes.

    Raises:
        ConfigError: names each key with both values, and the remedies.
    """
    fixed = [change for change in changes if change.is_fixed]
    refused = [change for change in fixed if resume_with is None or not change.is_rate]
    if refused:
        remedy = "Set them back" if len(refused) > 1 else "Set it back"
        if all(change.is_rate for change in refused):
            remedy += ", take this configuration's with TRAIN.RESUME_WITH lr"
        raise ConfigError(
            f"EXPERIMENT.NAME: the checkpoint was written with another configuration: "
            f"{', '.join(map(str, refused))}. {remedy}, or start over: {REMEDY[0].lower()}{REMEDY[1:]}"
        )
    for change in fixed:
        logger.info("TRAIN.RESUME_WITH %s: %s", resume_with, change)


def check_classes(spec: Mapping[str, Any], taxonomy: Taxonomy | None, run: Path) -> None:
    """Refuse data with other levels or classes than the checkpoint, or in another order.

    Args:
        spec: the checkpoint's `ModelSpec` as plain values.
        taxonomy: of the data; None if it has no classes.
        run: folder of the run, for the remedy.

    Raises:
        ConfigError: names the levels, or some of the classes that were added and removed.
    """
    levels = [] if spec["taxonomy"] is None else spec["taxonomy"]["levels"]
    before = {level["name"]: list(level["classes"]) for level in levels}
    levels = () if taxonomy is None else taxonomy.levels
    now = {level.name: list(level.classes) for level in levels}
    changes = []
    if list(before) != list(now):
        names = [", ".join(levels) or "none" for levels in (before, now)]
        changes.append(f"levels {names[0]} in the checkpoint, {names[1]} now")
    for level in now if not changes else ():
        old, new = dict.fromkeys(before[level]), dict.fromkeys(now[level])
        sides = {"added": new.keys() - old.keys(), "removed": old.keys() - new.keys()}
        parts = [f"{how} {several(sorted(map(repr, n)))}" for how, n in sides.items() if n]
        if before[level] != now[level]:
            changes.append(f"{level}: {', '.join(parts) or 'in another order'}")
    if changes:
        raise ConfigError(
            f"DATA.DATASET: the classes differ from the checkpoint ({'; '.join(changes)}). Restore the data, "
            f"or fine-tune in a new run: MODEL.WEIGHTS={run} with another EXPERIMENT.NAME copies the "
            "heads whose classes are the same"
        )


def changed_samples(checkpoint: Checkpoint, data: DataBundle, run: Path) -> list[str]:
    """Return how the samples differ from the checkpoint's and from `split.csv`, as text; reads no image.

    Args:
        checkpoint: to resume from. An older one does not hold the number of its samples.
        data: of this process.
        run: folder of the run.

    Raises:
        ConfigError: image files are in another split than before.
    """
    now, files = dataset_length(data.train), ""
    before = checkpoint.entries.get("num_samples", now)
    if (split_file := run / SPLIT_FILE).is_file():
        paths, splits, _ = read_rows(split_file)
        was = {*zip(paths, splits, strict=True)}
        held = {
            (file, split)
            for split, dataset in data.splits.items()
            for file in map(os.path.abspath, getattr(dataset, "files", ()))
        }
        if {*dict(was)}.isdisjoint(dict(held)):  # the data may lie in another folder now
            was, held = _below_common(was), _below_common(held)
        old, new = {*dict(was)}, {*dict(held)}
        if moved := old & {*dict(held - was)}:
            raise ConfigError(
                f"DATA.DATASET: {len(moved)} of the images would change their split. Restore the data, or "
                f"keep the splits with DATA.DATASET.NAME=manifest DATA.DATASET.TRAIN={split_file.resolve()}"
            )
        if old != new:
            files = (
                f": {len(old - new)} of the files in split.csv are gone, {len(new - old)} are new"
            )
    if not files and before == now:
        return []
    return [f"DATA.DATASET{files} ({before} training samples in the checkpoint, {now} now)"]


def _below_common(files: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """The files with their splits, each relative to the deepest folder that holds all of them."""
    files = list(files)
    common = os.path.commonpath({os.path.dirname(file) for file, _ in files}) if files else ""  # noqa: PTH120
    return {(os.path.relpath(file, common), split) for file, split in files}


def resumed_progress(
    content: Mapping[str, Any], headline: str, config: EarlyStoppingConfig
) -> TrainingProgress:
    """Return the progress in a checkpoint; its ranking by another metric than this run's restarts.

    Args:
        content: of the checkpoint.
        headline: the metric that decides which checkpoint is best.
        config: names the metric that early stopping watches; by default it is the headline.
    """
    progress = TrainingProgress(**content["progress"])
    if content["headline"] != headline:
        progress.best, progress.best_epoch = [], None
    if early_stopping_metric(content) != (config.METRIC or headline):
        progress.watched_best, progress.num_stale = -math.inf, 0
    return progress


def early_stopping_metric(content: Mapping[str, Any]) -> str:
    """The metric that the run of a checkpoint watched."""
    return str(content["config"]["TRAIN"]["EARLY_STOPPING"]["METRIC"] or content["headline"])


def is_finished(progress: TrainingProgress, train: TrainConfig, result: Path, world: World) -> bool:
    """Whether a run has nothing left to do; says so. Every rank must call this.

    Args:
        progress: of the run's checkpoint.
        train: the TRAIN node.
        result: the file with the run's result. Where a killed run has not written it, there is still work.
        world: the ranks.
    """
    stalled = progress.early_stop_reason(train.EARLY_STOPPING)
    key, done, planned = "TRAIN.EPOCHS", progress.epoch, train.EPOCHS
    if train.MAX_STEPS is not None:
        key, done, planned = "TRAIN.MAX_STEPS", progress.step, train.MAX_STEPS
    if (done < planned and not stalled) or not world.on_main(result.is_file):
        return False
    reason = f"{done} {'steps' if train.MAX_STEPS else 'epochs'} are done ({key} {planned})"
    if done < planned:
        key = "TRAIN.EARLY_STOPPING.PATIENCE"
        reason = f"{stalled} ({key} {train.EARLY_STOPPING.PATIENCE})"
    logger.info(
        "this run is finished: %s, so nothing is trained; raise %s to train on. Files: %s",
        reason,
        key,
        result.parent.resolve(),
    )
    return True


def restore_generators(content: Mapping[str, Any], world: World, seed: int) -> None:
    """Restore this rank's random number generators; on another number of ranks, reseed them.

    Args:
        content: of a checkpoint.
        world: the ranks.
        seed: seed of the run.
    """
    states = content["rng"]
    seed_all(derive_seed(seed, world.rank, content["progress"]["step"]))
    if len(states) == world.world_size:
        set_rng_state(states[world.rank], world.device)
