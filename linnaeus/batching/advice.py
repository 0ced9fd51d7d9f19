"""Warnings about batch sizes that often cause trouble: one sentence each, with the remedy and its key."""

from __future__ import annotations

from collections.abc import Sequence

from linnaeus.autobatch.split import MANY_ACCUMULATION_STEPS, Split
from linnaeus.batching.facts import Facts
from linnaeus.batching.sizes import EFFECTIVE, SCHEDULE, better_sizes
from linnaeus.config.schema import TrainConfig
from linnaeus.words import counted

FEW_FOR_BATCHNORM = 16
"""With fewer samples BatchNorm's error grows fast ("Group Normalization", Wu and He 2018, figure 1)."""

LARGE_FOR_FINE_TUNING = 512
"""Effective batch size of fine-tuning large pretrained models ("Big Transfer", Kolesnikov et al. 2020,
section 3.3; "An Image is Worth 16x16 Words", Dosovitskiy et al. 2021, table 4)."""

MAX_LR_SGD = 0.06
"""Highest learning rate with which those papers fine-tune by SGD."""

MAX_LR_ADAPTIVE = 5e-4
"""A rule of thumb for Adam and similar optimizers: the learning rate of training from scratch at a batch size
of 512 (DeiT, Touvron et al. 2021, table 9). Fine-tuning stays well below it."""

LARGE_DATASET_FRACTION = 0.1
"""With a larger effective batch an epoch has fewer than ten optimizer steps."""


def plan_warnings(
    train: TrainConfig, facts: Facts, splits: Sequence[Split], *, optimizer: str, learning_rate: float
) -> list[str]:
    """Every warning that applies, each once.

    Args:
        train: the TRAIN node.
        facts: what the plan was made from.
        splits: the splits of the run.
        optimizer: name of the optimizer, or of its class.
        learning_rate: the peak learning rate, after scaling.
    """
    key = _effective_batch_key(train, facts)
    effective_batch_size = max(split.samples_per_rank for split in splits) * facts.world_size
    found = [
        _accumulation(facts, splits, key),
        _epoch_of_one_batch(facts, splits) or _batchnorm(facts, splits, _micro_batch_key(train, facts)),
        _fine_tuning(facts, effective_batch_size, optimizer, learning_rate, key),
        _dataset(effective_batch_size, facts.num_samples, key),
    ]
    return [text for text in found if text is not None]


def _accumulation(facts: Facts, splits: Sequence[Split], key: str) -> str | None:
    split = max(splits, key=lambda split: split.accumulation_steps)
    if split.accumulation_steps <= MANY_ACCUMULATION_STEPS:
        return None
    fewest = -(-split.samples_per_rank // facts.max_micro_batch_size)
    better = better_sizes(split.samples_per_rank, facts, max(fewest, MANY_ACCUMULATION_STEPS))
    if fewest <= MANY_ACCUMULATION_STEPS and better:
        remedy = f"{key} {' or '.join(map(str, better))} divides better"
    else:
        remedy = (
            f"lower {key}, start more processes, or save memory with TRAIN.AMP bf16 or "
            "TRAIN.GRADIENT_CHECKPOINTING True"
        )
    return (
        f"{split.accumulation_steps} accumulation steps of {counted(split.micro_batch_size, 'sample')} make "
        f"each optimizer step slow; {remedy}"
    )


def _batchnorm(facts: Facts, splits: Sequence[Split], key: str) -> str | None:
    if facts.batchnorm == "none":
        return None
    samples, where = min(split.micro_batch_size for split in splits), "per process"
    if facts.batchnorm == "synchronised":
        samples, where = samples * facts.world_size, "of all processes"
    if samples >= FEW_FOR_BATCHNORM:
        return None
    can_synchronise = facts.world_size > 1 and facts.batchnorm == "local"
    sync = "TRAIN.SYNC_BATCHNORM True, " if can_synchronise else ""
    return (
        f"BatchNorm sees only {counted(samples, 'sample')} {where}, fewer than {FEW_FOR_BATCHNORM}: its "
        f"statistics are noisy; use {sync}a model with GroupNorm or LayerNorm (MODEL.NAME), or a larger "
        f"micro-batch ({key})"
    )


def _epoch_of_one_batch(facts: Facts, splits: Sequence[Split]) -> str | None:
    """Warn of an epoch shorter than one micro-batch; all other epochs have full batches only."""
    samples = facts.epoch_samples_per_rank
    is_short = splits[0].micro_batch_size == samples < facts.max_micro_batch_size
    if facts.batchnorm == "none" or not is_short or samples >= FEW_FOR_BATCHNORM:
        return None
    return (
        f"the last batch of each epoch, which is also its only one, has {samples} of DATA.BATCH_SIZE "
        f"{facts.max_micro_batch_size} samples, too few for BatchNorm; start fewer processes or use more "
        "data (DATA.DATASET)"
    )


def _fine_tuning(
    facts: Facts, effective_batch_size: int, optimizer: str, learning_rate: float, key: str
) -> str | None:
    is_sgd = any(name in optimizer.lower() for name in ("sgd", "momentum", "nesterov"))
    limit = MAX_LR_SGD if is_sgd else MAX_LR_ADAPTIVE
    is_small = effective_batch_size < LARGE_FOR_FINE_TUNING or learning_rate <= limit
    if not facts.pretrained or is_small:
        return None
    return (
        f"pretrained weights ({facts.pretrained_key}) may be forgotten with an effective batch of "
        f"{effective_batch_size} and a learning rate of {learning_rate:.3g}; bring the rate to {limit:g} or "
        f"less with OPTIMIZER.LR, or lower {key}, and set SCHEDULE.WARMUP_EPOCHS"
    )


def _dataset(effective_batch_size: int, num_samples: int, key: str) -> str | None:
    if effective_batch_size <= LARGE_DATASET_FRACTION * num_samples:
        return None
    return (
        f"an effective batch of {effective_batch_size} is {effective_batch_size / num_samples:.0%} of the "
        f"{num_samples} training samples, so an epoch has few optimizer steps; lower {key} or raise "
        "TRAIN.EPOCHS"
    )


def _effective_batch_key(train: TrainConfig, facts: Facts) -> str:
    """The key that sets the largest effective batch size."""
    name = train.BATCH_SCHEDULE.NAME
    if name != "constant":
        return f"{SCHEDULE}.MILESTONES" if name == "milestones" else f"{SCHEDULE}.LAST"
    if train.EFFECTIVE_BATCH_SIZE is not None:
        return EFFECTIVE
    return "TRAIN.ACCUMULATION_STEPS" if train.ACCUMULATION_STEPS > 1 else facts.batch_size_key


def _micro_batch_key(train: TrainConfig, facts: Facts) -> str:
    """The key that sets the smallest micro-batch size."""
    if train.BATCH_SCHEDULE.NAME != "constant":
        return f"{SCHEDULE}.FIRST"
    key = facts.batch_size_key
    return key if train.EFFECTIVE_BATCH_SIZE is None else f"{key}, {EFFECTIVE}"
