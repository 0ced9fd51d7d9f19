"""Warnings about batch sizes that often cause trouble: one sentence each, with the remedy and its key."""

from __future__ import annotations

from collections.abc import Sequence

from linnaeus.autobatch.split import MANY_ACCUMULATION_STEPS, Split
from linnaeus.batching.sizes import EFFECTIVE, SCHEDULE, Facts
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
    train: TrainConfig,
    facts: Facts,
    splits: Sequence[Split],
    *,
    optimizer: str,
    learning_rate: float,
) -> list[str]:
    """Every warning that applies to the splits of a run, each once.

    `optimizer` is the name of the optimizer or of its class, `learning_rate` the peak, after scaling.
    """
    key = _effective_batch_key(train, facts)
    size = max(split.samples_per_rank for split in splits) * facts.world_size
    found = [_accumulation(facts, splits, key), _batchnorm(train, facts, splits)]
    is_sgd = any(name in optimizer.lower() for name in ("sgd", "momentum", "nesterov"))
    limit = MAX_LR_SGD if is_sgd else MAX_LR_ADAPTIVE
    if facts.pretrained and size >= LARGE_FOR_FINE_TUNING and learning_rate > limit:
        found.append(
            f"pretrained weights ({facts.pretrained_key}) may be forgotten with an effective batch of {size} "
            f"and a learning rate of {learning_rate:.3g}; bring the rate to {limit:g} or less with "
            f"OPTIMIZER.LR, or lower {key}, and set SCHEDULE.WARMUP_EPOCHS"
        )
    if size > LARGE_DATASET_FRACTION * facts.num_samples:
        found.append(
            f"an effective batch of {size} is {size / facts.num_samples:.0%} of the {facts.num_samples} "
            f"training samples, so an epoch has few optimizer steps; lower {key} or raise TRAIN.EPOCHS"
        )
    return [text for text in found if text is not None]


def _accumulation(facts: Facts, splits: Sequence[Split], key: str) -> str | None:
    split = max(splits, key=lambda split: split.accumulation_steps)
    if split.accumulation_steps <= MANY_ACCUMULATION_STEPS:
        return None
    fewest = -(-split.samples_per_rank // facts.max_micro_batch_size)
    remedy = (
        f"lower {key}, start more processes, or save memory with TRAIN.AMP bf16 or "
        "TRAIN.GRADIENT_CHECKPOINTING True"
    )
    if fewest <= MANY_ACCUMULATION_STEPS:
        remedy = (
            f"{key} {split.samples_per_rank // fewest * fewest * facts.world_size} divides better"
        )
    return (
        f"{split.accumulation_steps} accumulation steps of {counted(split.micro_batch_size, 'sample')} make "
        f"each optimizer step slow; {remedy}"
    )


def _batchnorm(train: TrainConfig, facts: Facts, splits: Sequence[Split]) -> str | None:
    if facts.batchnorm == "none":
        return None
    samples, where = min(split.micro_batch_size for split in splits), "per process"
    if facts.batchnorm == "synchronised":
        samples, where = samples * facts.world_size, "of all processes"
    if samples >= FEW_FOR_BATCHNORM:
        return None
    key = facts.batch_size_key  # that of the smallest micro-batch
    if train.BATCH_SCHEDULE.NAME != "constant":
        key = f"{SCHEDULE}.FIRST"
    elif train.EFFECTIVE_BATCH_SIZE is not None:
        key = f"{key}, {EFFECTIVE}"
    can_synchronise = facts.world_size > 1 and facts.batchnorm == "local"
    sync = "TRAIN.SYNC_BATCHNORM True, " if can_synchronise else ""
    return (
        f"BatchNorm sees only {counted(samples, 'sample')} {where}, fewer than {FEW_FOR_BATCHNORM}: its "
        f"statistics are noisy; use {sync}a model with GroupNorm or LayerNorm (MODEL.NAME), or a larger "
        f"micro-batch ({key})"
    )


def _effective_batch_key(train: TrainConfig, facts: Facts) -> str:
    """The key that sets the largest effective batch size."""
    name = train.BATCH_SCHEDULE.NAME
    if name != "constant":
        return f"{SCHEDULE}.MILESTONES" if name == "milestones" else f"{SCHEDULE}.LAST"
    if train.EFFECTIVE_BATCH_SIZE is not None:
        return EFFECTIVE
    return "TRAIN.ACCUMULATION_STEPS" if train.ACCUMULATION_STEPS > 1 else facts.batch_size_key
