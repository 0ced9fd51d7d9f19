"""How learning rate, weight decay and warm-up follow the effective batch size.

`k` is the effective batch size (samples per optimizer step over all ranks) divided by the batch size that the
learning rate was tuned for. Accumulation alone does not change `k`, nor does the number of ranks.
"""

from __future__ import annotations

import math

WARMUP_ADDED_FROM = 8.0
"""A learning rate scaled up this many times gets a warm-up where none is set."""

WARMUP_HINT_FROM = 4.0
"""A learning rate scaled up this many times without a warm-up gets a hint."""

WARMUP_FRACTION = 0.05
"""Length of an added warm-up, as a fraction of all optimizer steps. Large batches fail in the first epochs
unless the learning rate rises slowly (Goyal et al. 2017, section 2.2)."""

WARMUP_MAX_EPOCHS = 5
"""Longest added warm-up, in epochs: as long as that of Goyal et al. 2017."""


def scale_factor(rule: str, effective_batch_size: int, base_batch_size: int) -> float:
    """The factor of the learning rate or of the weight decay.

    `linear`: k. A step of k times as many samples replaces k steps of SGD ("Accurate, Large Minibatch SGD",
    Goyal et al. 2017, section 2.1).

    `sqrt`: the square root of k. For the learning rate it keeps the noise of Adam and RMSprop alike ("On the
    SDEs and Scaling Rules for Adaptive Gradient Algorithms", Malladi et al. 2022, definition 5.1; that rule
    also changes the betas and epsilon, which are left alone here). The best weight decay is proportional to
    the root of batch size / (samples × epochs) ("Decoupled Weight Decay Regularization", Loshchilov and
    Hutter 2019, appendix B.1); with a learning rate that also grows by the root, the decay per epoch stays
    the same.

    `none`: 1.

    Args:
        rule: `none`, `linear` or `sqrt`.
        effective_batch_size: samples per optimizer step over all ranks.
        base_batch_size: the effective batch size that the learning rate was tuned for.

    >>> [scale_factor(rule, 1024, 256) for rule in ("linear", "sqrt", "none")]
    [4.0, 2.0, 1.0]
    """
    match rule:
        case "linear":
            return effective_batch_size / base_batch_size
        case "sqrt":
            return math.sqrt(effective_batch_size / base_batch_size)
        case _:
            return 1.0
