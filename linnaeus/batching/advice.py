"""Where experience says that trouble is near: one sentence each, with the remedy and the key."""

from __future__ import annotations

from dataclasses import dataclass

from linnaeus.batching.sizes import SizeLimits, better_sizes
from linnaeus.batching.stages import MANY_ACCUMULATION_STEPS, Split

FEW_FOR_BATCHNORM = 16
"""Below so many samples BatchNorm's error grows fast ("Group Normalization", Wu and He 2018, figure 1)."""

LARGE_FOR_FINE_TUNING = 512
"""Batch with which large pretrained models are fine-tuned, at the rates that follow ("Big Transfer",
Kolesnikov et al. 2020, section 3.3; "An Image is Worth 16x16 Words", Dosovitskiy et al. 2021, table 4)."""

HIGH_RATE_SGD = 0.06
"""Highest rate of SGD in those papers' fine-tuning."""

HIGH_RATE_ADAPTIVE = 5e-4
"""A rule of thumb for Adam and its kin: the rate of training from scratch at a batch of 512 (DeiT, Touvron et
al. 2021, table 9), which fine-tuning stays well below."""

LARGE_DATASET_FRACTION = 0.1
"""An effective batch above this fraction of the data leaves fewer than ten optimizer steps per epoch."""


@dataclass(frozen=True)
class AdviceContext:
    """What the warnings look at.

    Attributes:
        splits: of all optimizer steps that occur.
        limits: what bounds the sizes.
        batchnorm: `none`, `local` or `synchronised`.
        pretrained: whether training starts from somebody's weights.
        optimizer: its name.
        learning_rate: the peak, scaled.
        size_key, micro_batch_key: the keys that set the largest effective batch and the smallest micro-batch.
    """

    splits: list[Split]
    limits: SizeLimits
    batchnorm: str
    pretrained: bool
    optimizer: str
    learning_rate: float
    size_key: str
    micro_batch_key: str

    @property
    def effective_batch_size(self) -> int:
        """The largest, over all processes."""
        return max(split.samples_per_rank for split in self.splits) * self.limits.world_size


def warnings(context: AdviceContext) -> list[str]:
    """Every warning that applies, each once."""
    checks = (_accumulation, _batchnorm, _last_batch, _fine_tuning, _dataset)
    return [text for check in checks if (text := check(context)) is not None]


def _accumulation(context: AdviceContext) -> str | None:
    split = max(context.splits, key=lambda split: split.accumulation_steps)
    if split.accumulation_steps <= MANY_ACCUMULATION_STEPS:
        return None
    limits = context.limits
    fewest = -(-split.samples_per_rank // limits.max_micro_batch_size)
    better = better_sizes(split.samples_per_rank, limits, max(fewest, MANY_ACCUMULATION_STEPS))
    if fewest <= MANY_ACCUMULATION_STEPS and better:
        remedy = f"{context.size_key} {' or '.join(map(str, better))} divides better"
    else:
        remedy = (
            f"lower {context.size_key}, start more processes, or save memory with TRAIN.AMP bf16 or "
            "TRAIN.GRADIENT_CHECKPOINTING True"
        )
    return (
        f"{split.accumulation_steps} accumulation steps of {split.micro_batch_size} samples make each "
        f"optimizer step slow; {remedy}"
    )


def _batchnorm(context: AdviceContext) -> str | None:
    if context.batchnorm == "none" or _last_batch(context):
        return None
    micro_batch_size = min(split.micro_batch_size for split in context.splits)
    samples, where = micro_batch_size, "per process"
    if context.batchnorm == "synchronised":
        samples, where = micro_batch_size * context.limits.world_size, "of all processes"
    if samples >= FEW_FOR_BATCHNORM:
        return None
    several = context.limits.world_size > 1 and context.batchnorm == "local"
    sync = "TRAIN.SYNC_BATCHNORM True, " if several else ""
    return (
        f"BatchNorm sees only {samples} samples {where}, fewer than {FEW_FOR_BATCHNORM}: its statistics are "
        f"noisy; use {sync}a model with GroupNorm or LayerNorm (MODEL.NAME), or a larger micro-batch "
        f"({context.micro_batch_key})"
    )


def _last_batch(context: AdviceContext) -> str | None:
    """Only an epoch shorter than one micro-batch has a batch that is not whole."""
    limits = context.limits
    per_process = limits.epoch_samples_per_rank
    is_short = context.splits[0].micro_batch_size == per_process < limits.max_micro_batch_size
    if context.batchnorm == "none" or not is_short or per_process >= FEW_FOR_BATCHNORM:
        return None
    return (
        f"the last batch of each epoch, which is also its only one, has {per_process} of DATA.BATCH_SIZE "
        f"{limits.max_micro_batch_size} samples, too few for BatchNorm; start fewer processes or use more "
        "data (DATA.DATASET)"
    )


def _fine_tuning(context: AdviceContext) -> str | None:
    if not context.pretrained or context.effective_batch_size < LARGE_FOR_FINE_TUNING:
        return None
    is_sgd = any(name in context.optimizer.lower() for name in ("sgd", "momentum", "nesterov"))
    limit = HIGH_RATE_SGD if is_sgd else HIGH_RATE_ADAPTIVE
    if context.learning_rate <= limit:
        return None
    return (
        f"pretrained weights (MODEL.WEIGHTS) may be forgotten with an effective batch of "
        f"{context.effective_batch_size} and a learning rate of {context.learning_rate:.3g}; bring the rate "
        f"to {limit:g} or less with OPTIMIZER.LR, or lower {context.size_key}, and set "
        "SCHEDULE.WARMUP_EPOCHS"
    )


def _dataset(context: AdviceContext) -> str | None:
    effective, num_samples = context.effective_batch_size, context.limits.num_samples
    if effective <= LARGE_DATASET_FRACTION * num_samples:
        return None
    return (
        f"an effective batch of {effective} is {effective / num_samples:.0%} of the {num_samples} training "
        f"samples, so an epoch has few optimizer steps; lower {context.size_key} or raise TRAIN.EPOCHS"
    )
