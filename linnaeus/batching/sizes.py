"""From the sizes that the TRAIN node asks for to the split of each optimizer step, or to an error."""

from __future__ import annotations

from dataclasses import dataclass

from linnaeus.batching.stages import (
    SizeChange,
    Split,
    Stage,
    changing_epochs,
    equal_epochs,
    growth,
    milestones,
    nearest,
    split_samples,
)
from linnaeus.config.schema import TrainConfig
from linnaeus.errors import ConfigError

EFFECTIVE, SCHEDULE = "TRAIN.EFFECTIVE_BATCH_SIZE", "TRAIN.BATCH_SCHEDULE"
_GROWING = ("linear", "exponential")


@dataclass(frozen=True)
class SizeLimits:
    """What bounds the sizes.

    Attributes:
        max_micro_batch_size: samples per process and forward pass that fit.
        world_size: processes.
        num_samples: of the training data.
        batchnorm: whether each process normalises its own micro-batches, which a single sample cannot do.
    """

    max_micro_batch_size: int
    world_size: int
    num_samples: int
    batchnorm: bool = False

    @property
    def epoch_samples_per_rank(self) -> int:
        """Samples that each process sees in an epoch."""
        return self.num_samples // self.world_size


def max_samples_per_rank(train: TrainConfig, limits: SizeLimits) -> int | None:
    """The most samples per process that an optimizer step is asked to take; None: whatever fits.

    A search for what fits need not look further, and what is wrong here no device could mend.

    Args:
        train: the TRAIN node.
        limits: before such a search, with the largest micro-batch that it may find.

    Raises:
        ConfigError: lists every size that cannot be had.

    >>> limits = SizeLimits(max_micro_batch_size=64, world_size=4, num_samples=1000)
    >>> max_samples_per_rank(TrainConfig(EFFECTIVE_BATCH_SIZE=96), limits)
    24
    >>> max_samples_per_rank(TrainConfig(), limits) is None
    True
    """
    asked = _asked_for(train)
    problems = _contradictions(train)
    problems += [text for key, size in asked if (text := _misfit(key, size, limits))]
    if problems:
        raise ConfigError(problems)
    is_open = train.BATCH_SCHEDULE.NAME in _GROWING and len(asked) == 1
    return None if is_open or not asked else max(size for _, size in asked) // limits.world_size


def plan_epochs(train: TrainConfig, limits: SizeLimits) -> tuple[list[Split], tuple[tuple[Stage, ...], ...]]:
    """The splits that occur, in order, and the stages of each epoch.

    Raises:
        ConfigError: the sizes asked for cannot be had; the message names sizes that can.
    """
    max_samples_per_rank(train, limits)
    for name, size in _asked_for(train):
        _check_split(name, size, limits)
    per_process, schedule = limits.epoch_samples_per_rank, train.BATCH_SCHEDULE
    if schedule.NAME == "constant":
        split = _constant(train, limits)
        keep_rest = train.EFFECTIVE_BATCH_SIZE is None
        epochs = equal_epochs(split, train.EPOCHS, per_process, limits.world_size, keep_rest=keep_rest)
        return [split], epochs
    changes = _changes_of_size(train, limits)
    epochs = changing_epochs(changes, schedule.UNIT, train.EPOCHS, per_process, limits.world_size)
    num_steps = sum(stage.num_steps for stages in epochs for stage in stages)
    if schedule.UNIT == "steps" and changes[-1][0] >= num_steps:
        key = "MILESTONES" if schedule.NAME == "milestones" else "LENGTH"
        raise ConfigError(
            f"{SCHEDULE}.{key}: the last size would come after {changes[-1][0]} optimizer steps, but the run "
            f"has only {num_steps}; lower it or raise TRAIN.EPOCHS"
        )
    return [split for _, split in changes], epochs


def unused_keys(train: TrainConfig) -> list[str]:
    """Keys that are set but that another key overrules, each with that reason."""
    schedule, notes = train.BATCH_SCHEDULE, []
    unused = {
        "constant": ("FIRST", "LAST", "LENGTH", "MILESTONES"),
        "milestones": ("LENGTH",),
    }.get(schedule.NAME, ("MILESTONES",))
    for name in unused:
        if getattr(schedule, name):
            notes.append(f"{SCHEDULE}.{name} is not used where {SCHEDULE}.NAME is {schedule.NAME}")
    if train.ACCUMULATION_STEPS > 1 and _asked_for(train) and not _is_open(train):
        notes.append("TRAIN.ACCUMULATION_STEPS is not used: the effective batch is set")
    return notes


def better_sizes(samples_per_rank: int, limits: SizeLimits, at_most: int) -> list[int]:
    """The nearest effective batches that need no more accumulation steps than `at_most`."""
    world_size = limits.world_size
    samples_per_rank_of = nearest(
        samples_per_rank,
        min(2 * samples_per_rank, limits.epoch_samples_per_rank),
        lambda other: _splits_well(other, limits) and _num_steps(other, limits) <= at_most,
    )
    return [other * world_size for other in samples_per_rank_of]


def _asked_for(train: TrainConfig) -> list[tuple[str, int]]:
    """The key and the value of each effective batch that is set."""
    schedule = train.BATCH_SCHEDULE
    sizes: list[tuple[str, int | None]] = [(EFFECTIVE, train.EFFECTIVE_BATCH_SIZE)]
    if schedule.NAME != "constant":
        sizes.append((f"{SCHEDULE}.FIRST", schedule.FIRST))
    if schedule.NAME in _GROWING:
        sizes.append((f"{SCHEDULE}.LAST", schedule.LAST))
    if schedule.NAME == "milestones":
        sizes += [(f"{SCHEDULE}.MILESTONES", size) for _, size in schedule.MILESTONES]
    return [(name, size) for name, size in sizes if size is not None]


def _is_open(train: TrainConfig) -> bool:
    """Whether a growing batch ends at what fits."""
    return train.BATCH_SCHEDULE.NAME in _GROWING and len(_asked_for(train)) == 1


def _contradictions(train: TrainConfig) -> list[str]:
    """What is missing from a schedule, and what contradicts itself."""
    schedule, problems = train.BATCH_SCHEDULE, []
    if schedule.NAME == "constant":
        return []
    if schedule.FIRST is None:
        problems.append(f"{SCHEDULE}.FIRST: needs a value where {SCHEDULE}.NAME is {schedule.NAME}")
    if schedule.NAME == "milestones":
        starts = [start for start, _ in schedule.MILESTONES]
        if not starts:
            problems.append(f"{SCHEDULE}.MILESTONES: needs at least one pair [at, size]")
        elif schedule.UNIT == "epochs" and starts[-1] >= train.EPOCHS:
            problems.append(
                f"{SCHEDULE}.MILESTONES: {starts[-1]} comes after the last of {train.EPOCHS} epochs"
            )
        for name, value in ((f"{SCHEDULE}.LAST", schedule.LAST), (EFFECTIVE, train.EFFECTIVE_BATCH_SIZE)):
            if value is not None and starts and value != schedule.MILESTONES[-1][1]:
                problems.append(
                    f"{name}: {value} is not the last size of {SCHEDULE}.MILESTONES; leave it null"
                )
        return problems
    if (
        None not in (schedule.LAST, train.EFFECTIVE_BATCH_SIZE)
        and schedule.LAST != train.EFFECTIVE_BATCH_SIZE
    ):
        problems.append(
            f"{EFFECTIVE}: {train.EFFECTIVE_BATCH_SIZE} is not {SCHEDULE}.LAST {schedule.LAST}; "
            "leave one of them null"
        )
    if schedule.UNIT == "steps":
        if schedule.LENGTH is None:
            problems.append(f"{SCHEDULE}.LENGTH: needs a value where {SCHEDULE}.UNIT is steps")
    elif train.EPOCHS < 2:
        problems.append(f"{SCHEDULE}: a batch that changes by epochs needs TRAIN.EPOCHS of at least 2")
    elif schedule.LENGTH is not None and schedule.LENGTH >= train.EPOCHS:
        problems.append(
            f"{SCHEDULE}.LENGTH: after {schedule.LENGTH} epochs a run of TRAIN.EPOCHS {train.EPOCHS} is "
            f"over, and {SCHEDULE}.LAST would not be reached; {train.EPOCHS - 1} is the most"
        )
    return problems


def _misfit(name: str, size: int, limits: SizeLimits) -> str | None:
    """What is wrong with an effective batch on any device."""
    world_size, num_samples = limits.world_size, limits.num_samples
    largest = limits.epoch_samples_per_rank * world_size
    if size < world_size:
        return f"{name}: {size} is below the {world_size} processes, each of which takes at least one sample"
    if size > largest:
        return (
            f"{name}: {size} is above what one epoch holds: {num_samples} training samples on {world_size} "
            f"{'process' if world_size == 1 else 'processes'}; {largest} is the most"
        )
    if size % world_size:
        near = nearest(
            size,
            min(largest, 2 * size + world_size * limits.max_micro_batch_size),
            lambda other: other % world_size == 0 and _splits_well(other // world_size, limits),
        )
        return f"{name}: {size} does not divide by {world_size} processes; {_either(near)} would"
    if size == world_size and limits.batchnorm:
        remedy = "TRAIN.SYNC_BATCHNORM True" if world_size > 1 else "a model without it"
        return (
            f"{name}: {size} is one sample for each process, too few for BatchNorm; "
            f"{2 * world_size} would do (or {remedy})"
        )
    return None


def micro_batches_held(train: TrainConfig) -> int:
    """Micro-batches that a trial runs in an optimizer step: where there may be several, two hold as much.

    >>> micro_batches_held(TrainConfig()), micro_batches_held(TrainConfig(EFFECTIVE_BATCH_SIZE=64))
    (1, 2)
    """
    return 2 if train.ACCUMULATION_STEPS > 1 or _asked_for(train) else 1


def _check_split(name: str, size: int, limits: SizeLimits) -> None:
    """Refuse a size that only single samples make up, where BatchNorm needs more."""
    samples_per_rank = size // limits.world_size
    if _splits_well(samples_per_rank, limits):
        return
    limit = min(2 * samples_per_rank + limits.max_micro_batch_size, limits.epoch_samples_per_rank)
    near = (
        nearest(samples_per_rank, limit, lambda other: _splits_well(other, limits))
        if limits.max_micro_batch_size > 1
        else []
    )
    remedy = f"; {_either([other * limits.world_size for other in near])} would do" if near else ""
    other_way = "TRAIN.SYNC_BATCHNORM True" if limits.world_size > 1 else "a model without it"
    raise ConfigError(
        f"{name}: {size} is {samples_per_rank} for each process, of which {limits.max_micro_batch_size} fit "
        f"at once, and only micro-batches of 1 divide that: too few for BatchNorm{remedy} (or {other_way})"
    )


def _splits_well(samples_per_rank: int, limits: SizeLimits) -> bool:
    return (
        not limits.batchnorm
        or split_samples(samples_per_rank, limits.max_micro_batch_size).micro_batch_size > 1
    )


def _num_steps(samples_per_rank: int, limits: SizeLimits) -> int:
    return split_samples(samples_per_rank, limits.max_micro_batch_size).accumulation_steps


def _either(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes)) or "no other size"


def _constant(train: TrainConfig, limits: SizeLimits) -> Split:
    if train.EFFECTIVE_BATCH_SIZE is not None:
        return split_samples(train.EFFECTIVE_BATCH_SIZE // limits.world_size, limits.max_micro_batch_size)
    micro_batch_size = min(limits.max_micro_batch_size, limits.epoch_samples_per_rank)
    return Split(
        micro_batch_size, min(train.ACCUMULATION_STEPS, limits.epoch_samples_per_rank // micro_batch_size)
    )


def _changes_of_size(train: TrainConfig, limits: SizeLimits) -> list[SizeChange]:
    schedule, world_size = train.BATCH_SCHEDULE, limits.world_size
    assert schedule.FIRST is not None  # `max_samples_per_rank` has refused it
    first = schedule.FIRST // world_size
    if schedule.NAME == "milestones":
        later = [(start, size // world_size) for start, size in schedule.MILESTONES]
        return milestones(first, later, limits.max_micro_batch_size)
    size = schedule.LAST if schedule.LAST is not None else train.EFFECTIVE_BATCH_SIZE
    last = _constant(train, limits).samples_per_rank if size is None else size // world_size
    if size is None and last < first:
        raise ConfigError(
            f"{SCHEDULE}.FIRST: {schedule.FIRST} is above {last * world_size}, what fits x processes x "
            f"TRAIN.ACCUMULATION_STEPS, where the batch would end; lower it or set {SCHEDULE}.LAST"
        )
    length = schedule.LENGTH if schedule.LENGTH is not None else train.EPOCHS - 1
    return growth(schedule.NAME, first, last, length, limits.max_micro_batch_size)
