"""Batch sizes of the TRAIN node, turned into the split of each optimizer step or into an error."""

from __future__ import annotations

from dataclasses import dataclass

from linnaeus.autobatch.split import Split, split_samples
from linnaeus.batch_plan.stages import SizeChange, Stage, growth, milestones, split_epochs
from linnaeus.config.schema import TrainConfig
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.words import counted

EFFECTIVE, SCHEDULE = "TRAIN.EFFECTIVE_BATCH_SIZE", "TRAIN.BATCH_SCHEDULE"
_GROWING = ("linear", "exponential")


@dataclass(frozen=True)
class Facts:
    """Inputs of a batch plan that are not in the configuration.

    Attributes:
        max_micro_batch_size: most samples that one forward pass of a rank may take.
        world_size: number of ranks.
        num_samples: number of training samples.
        learning_rate, weight_decay: the optimizer's, before scaling; the learning rate is its peak.
        batchnorm: `none`, `local` (each rank normalizes its own micro-batches) or `synchronised` over all
            ranks.
        pretrained: whether training starts from pretrained weights.
        pretrained_key: the key that names those weights.
        batch_size_key: the key that bounds the batch size; another one where AutoBatch chose it.
        can_grow: whether a larger value of that key gives a larger batch size.
        min_steps_per_epoch: with fewer optimizer steps, an epoch has few.
    """

    max_micro_batch_size: int
    world_size: int
    num_samples: int
    learning_rate: float
    weight_decay: float = 0.0
    batchnorm: str = "none"
    pretrained: bool = False
    pretrained_key: str = "MODEL.WEIGHTS"
    batch_size_key: str = "DATA.BATCH_SIZE"
    can_grow: bool = True
    min_steps_per_epoch: int = 10

    @property
    def epoch_samples_per_rank(self) -> int:
        """Samples that each rank sees in an epoch."""
        return self.num_samples // self.world_size


def max_samples_per_rank(train: TrainConfig, facts: Facts) -> int | None:
    """The most samples per rank and optimizer step that the TRAIN node allows; None: as many as fit.

    A search for the largest size that fits need not go beyond it; before the search, `facts` have the largest
    micro-batch size that it may find.

    Raises:
        ConfigError: lists every size that is not possible on any device.

    >>> facts = Facts(max_micro_batch_size=64, world_size=4, num_samples=1000, learning_rate=0.1)
    >>> max_samples_per_rank(TrainConfig(EFFECTIVE_BATCH_SIZE=96), facts)
    24
    >>> max_samples_per_rank(TrainConfig(), facts) is None
    True
    """
    sizes = _configured_sizes(train)
    problems = _contradictions(train)
    problems += [text for key, size in sizes if (text := _misfit(key, size, facts))]
    if problems:
        raise ConfigError(problems)
    if not sizes or _ends_at_what_fits(train):
        return None
    return max(size for _, size in sizes) // facts.world_size


def plan_epochs(
    train: TrainConfig, facts: Facts
) -> tuple[list[Split], tuple[tuple[Stage, ...], ...]]:
    """The splits of the run in the order of their use, and the stages of each epoch.

    Raises:
        ConfigError: a size is not possible; the message names sizes that are.
    """
    max_samples_per_rank(train, facts)  # raises where a size is wrong on any device
    for key, size in _configured_sizes(train):
        _check_split(key, size, facts)
    schedule, changes = train.BATCH_SCHEDULE, _size_changes(train, facts)
    epochs = split_epochs(
        changes,
        schedule.UNIT,
        train.EPOCHS,
        facts.epoch_samples_per_rank,
        facts.world_size,
        keep_rest=keeps_rest(train),
        max_steps=train.MAX_STEPS,
    )
    num_steps = sum(stage.num_steps for stages in epochs for stage in stages)
    if schedule.UNIT == "steps" and changes[-1].start >= num_steps:
        key = "MILESTONES" if schedule.NAME == "milestones" else "LENGTH"
        end = "EPOCHS" if train.MAX_STEPS is None else "MAX_STEPS"
        raise ConfigError(
            f"{SCHEDULE}.{key}: the last size would come after {changes[-1].start} optimizer steps, but the "
            f"run has only {num_steps}; lower it or raise TRAIN.{end}"
        )
    return [change.split for change in changes], epochs


def keeps_rest(train: TrainConfig) -> bool:
    """Whether an epoch ends with a smaller step: no effective batch size is set."""
    return train.BATCH_SCHEDULE.NAME == "constant" and train.EFFECTIVE_BATCH_SIZE is None


def unused_keys(train: TrainConfig) -> list[str]:
    """One sentence for each key that is set but has no effect because of another key."""
    schedule = train.BATCH_SCHEDULE
    keys = {"constant": ("FIRST", "LENGTH", "MILESTONES"), "milestones": ("LENGTH",)}
    notes = [
        f"{SCHEDULE}.{name} is not used where {SCHEDULE}.NAME is {schedule.NAME}"
        for name in keys.get(schedule.NAME, ("MILESTONES",))
        if getattr(schedule, name)
    ]
    if train.ACCUMULATION_STEPS > 1 and _configured_sizes(train) and not _ends_at_what_fits(train):
        notes.append("TRAIN.ACCUMULATION_STEPS is not used: the effective batch is set")
    return notes


def nearby_size(train: TrainConfig, facts: Facts) -> list[str]:
    """Name the next effective batch size that takes the fewest micro-batches, if this one takes more."""
    if train.EFFECTIVE_BATCH_SIZE is None:
        return []
    samples_per_rank = train.EFFECTIVE_BATCH_SIZE // facts.world_size
    split = split_samples(samples_per_rank, facts.max_micro_batch_size)
    fewest = -(-samples_per_rank // facts.max_micro_batch_size)
    size = -(-samples_per_rank // fewest)
    if split.accumulation_steps == fewest or size * fewest > facts.epoch_samples_per_rank:
        return []
    return [
        f"{EFFECTIVE} {train.EFFECTIVE_BATCH_SIZE} takes {split.accumulation_steps} micro-batches of "
        f"{split.micro_batch_size} per step and rank; {size * fewest * facts.world_size} would take "
        f"{fewest} of {size}"
    ]


def _configured_sizes(train: TrainConfig) -> list[tuple[str, int]]:
    """The key and the value of each effective batch size that is set."""
    schedule = train.BATCH_SCHEDULE
    sizes: list[tuple[str, int | None]] = [(EFFECTIVE, train.EFFECTIVE_BATCH_SIZE)]
    if schedule.NAME != "constant":
        sizes.append((f"{SCHEDULE}.FIRST", schedule.FIRST))
    if schedule.NAME == "milestones":
        sizes += [(f"{SCHEDULE}.MILESTONES", size) for _, size in schedule.MILESTONES]
    return [(name, size) for name, size in sizes if size is not None]


def _ends_at_what_fits(train: TrainConfig) -> bool:
    """Whether a growing batch has no configured end."""
    return train.BATCH_SCHEDULE.NAME in _GROWING and train.EFFECTIVE_BATCH_SIZE is None


def _contradictions(train: TrainConfig) -> list[str]:
    """Return missing and contradicting keys of a batch schedule."""
    schedule, problems = train.BATCH_SCHEDULE, []
    if schedule.NAME == "constant":
        return []
    if schedule.UNIT == "epochs" and train.MAX_STEPS is not None:
        return [f"{SCHEDULE}.UNIT: set it to steps where TRAIN.MAX_STEPS ends the run"]
    if schedule.FIRST is None:
        problems.append(f"{SCHEDULE}.FIRST: needs a value where {SCHEDULE}.NAME is {schedule.NAME}")
    if schedule.NAME == "milestones":
        if not schedule.MILESTONES:
            return [*problems, f"{SCHEDULE}.MILESTONES: needs at least one pair [at, size]"]
        start, last = schedule.MILESTONES[-1]
        if train.EFFECTIVE_BATCH_SIZE not in (None, last):
            problems.append(
                f"{EFFECTIVE}: {train.EFFECTIVE_BATCH_SIZE} is not the last size of {SCHEDULE}, {last}; "
                "leave it null"
            )
        if schedule.UNIT == "epochs" and start >= train.EPOCHS:
            epochs = counted(train.EPOCHS, "epoch")
            problems.append(f"{SCHEDULE}.MILESTONES: {start} comes after the last of {epochs}")
    elif schedule.UNIT == "steps":
        if schedule.LENGTH is None:
            problems.append(f"{SCHEDULE}.LENGTH: needs a value where {SCHEDULE}.UNIT is steps")
    elif train.EPOCHS < 2:
        problems.append(
            f"{SCHEDULE}: a batch that changes by epochs needs TRAIN.EPOCHS of at least 2"
        )
    elif schedule.LENGTH is not None and schedule.LENGTH >= train.EPOCHS:
        problems.append(
            f"{SCHEDULE}.LENGTH: {schedule.LENGTH} epochs are not before the last of TRAIN.EPOCHS "
            f"{train.EPOCHS}; {train.EPOCHS - 1} is the maximum"
        )
    return problems


def _misfit(name: str, size: int, facts: Facts) -> str | None:
    """Why an effective batch size is not possible on any device; None if it is."""
    world_size, largest = facts.world_size, facts.epoch_samples_per_rank * facts.world_size
    if size < world_size:
        return f"{name}: {size} is below the {world_size} ranks, and each rank takes at least one sample"
    if size > largest:
        return (
            f"{name}: {size} is above the samples of one epoch: "
            f"{counted(facts.num_samples, 'training sample')} on {counted(world_size, 'rank')}; "
            f"{largest} is the maximum"
        )
    if size % world_size:
        lower = size // world_size
        near = [n for n in (lower, lower + 1) if not _leaves_one_sample(n, facts)]
        would = " or ".join(str(n * world_size) for n in near or [lower])
        return f"{name}: {size} does not divide by {world_size} ranks; {would} would"
    return None


def micro_batches_held(train: TrainConfig) -> int:
    """Micro-batches per step in a trial: 1 without accumulation, else 2; more need no more memory.

    >>> micro_batches_held(TrainConfig()), micro_batches_held(TrainConfig(EFFECTIVE_BATCH_SIZE=64))
    (1, 2)
    """
    return 2 if train.ACCUMULATION_STEPS > 1 or _configured_sizes(train) else 1


def _leaves_one_sample(samples_per_rank: int, facts: Facts) -> bool:
    """Whether a micro-batch would hold one sample, where BatchNorm needs more."""
    split = split_samples(samples_per_rank, facts.max_micro_batch_size)
    return facts.batchnorm == "local" and split.micro_batch_size == 1


def _check_split(name: str, size: int, facts: Facts) -> None:
    """Refuse an effective batch size that leaves micro-batches of one sample, where BatchNorm needs more."""
    samples_per_rank, largest_fit = size // facts.world_size, facts.max_micro_batch_size
    if _leaves_one_sample(samples_per_rank, facts):
        remedy = "TRAIN.SYNC_BATCHNORM True" if facts.world_size > 1 else "a model without it"
        if largest_fit > 1:  # then every even number splits
            remedy = f"{max(samples_per_rank // 2 * 2, 2) * facts.world_size}, or {remedy}"
        raise ConfigError(
            f"{name}: {size} leaves micro-batches of one sample ({samples_per_rank} for each rank, "
            f"{largest_fit} at once), too few for BatchNorm; take {remedy}"
        )


def _constant_split(train: TrainConfig, facts: Facts) -> Split:
    if train.EFFECTIVE_BATCH_SIZE is not None:
        return split_samples(
            train.EFFECTIVE_BATCH_SIZE // facts.world_size, facts.max_micro_batch_size
        )
    micro_batch_size = min(facts.max_micro_batch_size, facts.epoch_samples_per_rank)
    num_micro_batches = facts.epoch_samples_per_rank // micro_batch_size
    return Split(micro_batch_size, min(train.ACCUMULATION_STEPS, num_micro_batches))


def _size_changes(train: TrainConfig, facts: Facts) -> list[SizeChange]:
    schedule, world_size = train.BATCH_SCHEDULE, facts.world_size
    if schedule.NAME == "constant":
        return [SizeChange(0, _constant_split(train, facts))]
    assert schedule.FIRST is not None  # `max_samples_per_rank` has refused it
    first = schedule.FIRST // world_size
    if schedule.NAME == "milestones":
        later = [(start, size // world_size) for start, size in schedule.MILESTONES]
        return milestones([(0, first), *later], facts.max_micro_batch_size)
    size = train.EFFECTIVE_BATCH_SIZE
    last = _constant_split(train, facts).samples_per_rank if size is None else size // world_size
    if size is None and last < first:
        raise ConfigError(
            f"{SCHEDULE}.FIRST: {schedule.FIRST} is above the last batch, {last * world_size} (maximum "
            f"micro-batch x ranks x TRAIN.ACCUMULATION_STEPS); lower it or set {EFFECTIVE}"
        )
    length = schedule.LENGTH if schedule.LENGTH is not None else train.EPOCHS - 1
    return growth(schedule.NAME, first, last, length, facts.max_micro_batch_size)
