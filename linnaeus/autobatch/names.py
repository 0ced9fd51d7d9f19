"""What messages call the settings of a search: a library call has arguments, the framework has keys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    """Names of settings and remedies in messages; by default those of `auto_find_batch_size`.

    Attributes:
        batch_maker: must return as many samples as it is asked for.
        smaller_training: how the training before a validation takes less memory.
    """

    target_memory_fraction: str = "target_memory_fraction"
    memory_limit_gb: str = "memory_limit_gb"
    min_batch_size: str = "min_batch_size"
    max_batch_size: str = "max_batch_size"
    max_trials: str = "max_trials"
    timeout_minutes: str = "timeout_minutes"
    sample_size: str = "the size of a sample"
    checkpointing: str = "gradient checkpointing"
    half_precision: str = "bf16 autocast"
    model: str = "model"
    optimizer: str = "optimizer"
    batch_maker: str = "make_batch(n)"
    smaller_training: str = "choose a smaller model"
    without_search: str = "train with a batch size of your own"


ARGUMENTS = Names()


def last_part(name: str) -> str:
    """The name without the nodes that it lies in, for log lines.

    >>> last_part("DATA.AUTOBATCH.MEMORY_LIMIT_GB"), last_part("memory_limit_gb")
    ('MEMORY_LIMIT_GB', 'memory_limit_gb')
    """
    return name.rpartition(".")[2]
