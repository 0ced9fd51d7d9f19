"""Advice about batch sizes that often cause trouble: one sentence, with the remedy and its key."""

from __future__ import annotations

from collections.abc import Sequence

from linnaeus.autobatch.split import MANY_ACCUMULATION_STEPS, Split
from linnaeus.batch_plan.effective_batch import EFFECTIVE, SCHEDULE, Facts, keeps_rest
from linnaeus.config.schema import TrainConfig
from linnaeus.runtime.words import counted

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


def plan_advice(
    train: TrainConfig,
    facts: Facts,
    splits: Sequence[Split],
    *,
    optimizer: str,
    learning_rate: float,
    min_steps: int,
) -> str | None:
    """Return the most urgent advice on the splits of a run; None if there is none.

    It is the only advice on batch sizes that a run gives: two would ask for opposite things.

    Args:
        train, facts, splits: inputs of the plan.
        optimizer: the name of the optimizer or of its class.
        learning_rate: the peak, after scaling.
        min_steps: optimizer steps of the epoch that has the fewest.
    """
    key = _effective_batch_key(train, facts)
    size = max(split.samples_per_rank for split in splits) * facts.world_size
    return (
        _few_steps(facts, size, key, min_steps)
        or _fine_tuning(facts, size, key, optimizer, learning_rate)
        or _batchnorm(train, facts, splits)
        or _accumulation(facts, splits, key)
    )


def _few_steps(facts: Facts, size: int, key: str, min_steps: int) -> str | None:
    """Advise smaller batches where batches of two samples per rank, or larger ones, give the steps."""
    least = facts.min_steps_per_epoch
    if min_steps >= least or facts.epoch_samples_per_rank < 2 * least:
        return None
    return (
        f"an effective batch of {size} leaves {counted(min_steps, 'optimizer step')} in an epoch of "
        f"{facts.num_samples} training samples, fewer than {least} "
        f"(DATA.AUTOBATCH.MIN_STEPS_PER_EPOCH); lower {key} or train for more epochs (TRAIN.EPOCHS)"
    )


def _fine_tuning(
    facts: Facts, size: int, key: str, optimizer: str, learning_rate: float
) -> str | None:
    is_sgd = any(name in optimizer.lower() for name in ("sgd", "momentum", "nesterov"))
    limit = MAX_LR_SGD if is_sgd else MAX_LR_ADAPTIVE
    if not facts.pretrained or size < LARGE_FOR_FINE_TUNING or learning_rate <= limit:
        return None
    return (
        f"pretrained weights ({facts.pretrained_key}) may be forgotten with an effective batch of {size} "
        f"and a learning rate of {learning_rate:.3g}; lower the learning rate to {limit:g} or less with "
        f"OPTIMIZER.LR, or lower {key}, and set SCHEDULE.WARMUP_EPOCHS"
    )


def _accumulation(facts: Facts, splits: Sequence[Split], key: str) -> str | None:
    split = max(splits, key=lambda split: split.accumulation_steps)
    if split.accumulation_steps <= MANY_ACCUMULATION_STEPS:
        return None
    return (
        f"{split.accumulation_steps} accumulation steps of {counted(split.micro_batch_size, 'sample')} make "
        f"each optimizer step slow; lower {key}, start more ranks, or save memory with TRAIN.AMP bf16 "
        "or TRAIN.GRADIENT_CHECKPOINTING True"
    )


def _batchnorm(train: TrainConfig, facts: Facts, splits: Sequence[Split]) -> str | None:
    if facts.batchnorm == "none":
        return None
    micro_batch = min(split.micro_batch_size for split in splits)
    samples, where = micro_batch, "per rank"
    if facts.batchnorm == "synchronised":
        samples, where = samples * facts.world_size, "of all ranks"
    if samples >= FEW_FOR_BATCHNORM:
        return None
    can_synchronise = facts.world_size > 1 and facts.batchnorm == "local"
    sync = "TRAIN.SYNC_BATCHNORM True, " if can_synchronise else ""
    larger, least, num_samples = "", facts.min_steps_per_epoch, facts.epoch_samples_per_rank
    if facts.can_grow and keeps_rest(train) and num_samples >= FEW_FOR_BATCHNORM * least:
        larger = f", or a larger micro-batch ({facts.batch_size_key})"
    elif least > 1 and num_samples < (micro_batch + 1) * least:
        larger = f", or allow larger batches (DATA.AUTOBATCH.MIN_STEPS_PER_EPOCH below {least})"
    return (
        f"BatchNorm sees only {counted(samples, 'sample')} {where}, fewer than {FEW_FOR_BATCHNORM}: its "
        f"statistics are noisy; use {sync}a model with GroupNorm or LayerNorm (MODEL.NAME){larger}"
    )


def _effective_batch_key(train: TrainConfig, facts: Facts) -> str:
    """Return the key that sets the largest effective batch size."""
    name = train.BATCH_SCHEDULE.NAME
    if name == "milestones":
        return f"{SCHEDULE}.MILESTONES"
    if name != "constant" or train.EFFECTIVE_BATCH_SIZE is not None:
        return EFFECTIVE
    return "TRAIN.ACCUMULATION_STEPS" if train.ACCUMULATION_STEPS > 1 else facts.batch_size_key
