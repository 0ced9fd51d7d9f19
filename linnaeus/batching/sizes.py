"""From the sizes that the TRAIN node asks for to the split of each optimizer step, or to an error."""

from __future__ import annotations

from dataclasses import dataclass

from linnaeus.batching.stages import (
    Piece,
    Split,
    Stage,
    changing_epochs,
    equal_epochs,
    growth,
    milestones,
    nearest,
    split_share,
)
from linnaeus.config.schema import TrainConfig
from linnaeus.errors import ConfigError

EFFECTIVE, SCHEDULE = "TRAIN.EFFECTIVE_BATCH_SIZE", "TRAIN.BATCH_SCHEDULE"
_GROWING = ("linear", "exponential")


@dataclass(frozen=True)
class Room:
    """What bounds the sizes.

    Attributes:
        max_micro_batch: samples per process and forward pass that fit.
        world_size: processes.
        num_samples: of the training data.
        batchnorm: whether each process normalises its own micro-batches, which a single sample cannot do.
    """

    max_micro_batch: int
    world_size: int
    num_samples: int
    batchnorm: bool = False

    @property
    def samples_per_process(self) -> int:
        """Samples that each process sees in an epoch."""
        return self.num_samples // self.world_size


def largest_share(train: TrainConfig, room: Room) -> int | None:
    """The most samples per process that an optimizer step is asked to take; None: whatever fits.

    A search for what fits need not look further, and what is wrong here no device could mend.

    Args:
        train: the TRAIN node.
        room: before such a search, with the largest micro-batch that it may find.

    Raises:
        ConfigError: lists every size that cannot be had.

    >>> room = Room(max_micro_batch=64, world_size=4, num_samples=1000)
    >>> largest_share(TrainConfig(EFFECTIVE_BATCH_SIZE=96), room), largest_share(TrainConfig(), room)
    (24, None)
    """
    asked = _asked_for(train)
    problems = _contradictions(train)
    problems += [text for key, size in asked if (text := _misfit(key, size, room))]
    if problems:
        raise ConfigError(problems)
    is_open = train.BATCH_SCHEDULE.NAME in _GROWING and len(asked) == 1
    return None if is_open or not asked else max(size for _, size in asked) // room.world_size


def plan_epochs(train: TrainConfig, room: Room) -> tuple[list[Split], tuple[tuple[Stage, ...], ...]]:
    """The splits that occur, in order, and the stages of each epoch.

    Raises:
        ConfigError: the sizes asked for cannot be had; the message names sizes that can.
    """
    largest_share(train, room)
    for name, size in _asked_for(train):
        _check_split(name, size, room)
    per_process, schedule = room.samples_per_process, train.BATCH_SCHEDULE
    if schedule.NAME == "constant":
        split = _constant(train, room)
        keep_rest = train.EFFECTIVE_BATCH_SIZE is None
        epochs = equal_epochs(split, train.EPOCHS, per_process, room.world_size, keep_rest=keep_rest)
        return [split], epochs
    pieces = _pieces(train, room)
    epochs = changing_epochs(pieces, schedule.UNIT, train.EPOCHS, per_process, room.world_size)
    num_steps = sum(stage.num_steps for stages in epochs for stage in stages)
    if schedule.UNIT == "steps" and pieces[-1][0] >= num_steps:
        key = "MILESTONES" if schedule.NAME == "milestones" else "LENGTH"
        raise ConfigError(
            f"{SCHEDULE}.{key}: the last size would come after {pieces[-1][0]} optimizer steps, but the run "
            f"has only {num_steps}; lower it or raise TRAIN.EPOCHS"
        )
    return [split for _, split in pieces], epochs


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


def better_sizes(share: int, room: Room, at_most: int) -> list[int]:
    """The nearest effective batches that need no more accumulation steps than `at_most`."""
    world_size = room.world_size
    shares = nearest(
        share,
        min(2 * share, room.samples_per_process),
        lambda other: _splits_well(other, room) and _num_steps(other, room) <= at_most,
    )
    return [other * world_size for other in shares]


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


def _misfit(name: str, size: int, room: Room) -> str | None:
    """What is wrong with an effective batch on any device."""
    world_size, num_samples = room.world_size, room.num_samples
    largest = room.samples_per_process * world_size
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
            min(largest, 2 * size + world_size * room.max_micro_batch),
            lambda other: other % world_size == 0 and _splits_well(other // world_size, room),
        )
        return f"{name}: {size} does not divide by {world_size} processes; {_either(near)} would"
    if size == world_size and room.batchnorm:
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


def _check_split(name: str, size: int, room: Room) -> None:
    """Refuse a size that only single samples make up, where BatchNorm needs more."""
    share = size // room.world_size
    if _splits_well(share, room):
        return
    limit = min(2 * share + room.max_micro_batch, room.samples_per_process)
    near = nearest(share, limit, lambda other: _splits_well(other, room)) if room.max_micro_batch > 1 else []
    remedy = f"; {_either([other * room.world_size for other in near])} would do" if near else ""
    other_way = "TRAIN.SYNC_BATCHNORM True" if room.world_size > 1 else "a model without it"
    raise ConfigError(
        f"{name}: {size} is {share} for each process, of which {room.max_micro_batch} fit at once, and only "
        f"micro-batches of 1 divide that: too few for BatchNorm{remedy} (or {other_way})"
    )


def _splits_well(share: int, room: Room) -> bool:
    return not room.batchnorm or split_share(share, room.max_micro_batch).micro_batch > 1


def _num_steps(share: int, room: Room) -> int:
    return split_share(share, room.max_micro_batch).accumulation_steps


def _either(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes)) or "no other size"


def _constant(train: TrainConfig, room: Room) -> Split:
    if train.EFFECTIVE_BATCH_SIZE is not None:
        return split_share(train.EFFECTIVE_BATCH_SIZE // room.world_size, room.max_micro_batch)
    micro_batch = min(room.max_micro_batch, room.samples_per_process)
    return Split(micro_batch, min(train.ACCUMULATION_STEPS, room.samples_per_process // micro_batch))


def _pieces(train: TrainConfig, room: Room) -> list[Piece]:
    schedule, world_size = train.BATCH_SCHEDULE, room.world_size
    assert schedule.FIRST is not None  # `largest_share` has refused it
    first = schedule.FIRST // world_size
    if schedule.NAME == "milestones":
        later = [(start, size // world_size) for start, size in schedule.MILESTONES]
        return milestones(first, later, room.max_micro_batch)
    size = schedule.LAST if schedule.LAST is not None else train.EFFECTIVE_BATCH_SIZE
    last = _constant(train, room).share if size is None else size // world_size
    if size is None and last < first:
        raise ConfigError(
            f"{SCHEDULE}.FIRST: {schedule.FIRST} is above {last * world_size}, what fits x processes x "
            f"TRAIN.ACCUMULATION_STEPS, where the batch would end; lower it or set {SCHEDULE}.LAST"
        )
    length = schedule.LENGTH if schedule.LENGTH is not None else train.EPOCHS - 1
    return growth(schedule.NAME, first, last, length, room.max_micro_batch)
