"""Upper bounds of the batch size besides device memory: the dataset, its steps, host memory of the loader."""

from __future__ import annotations

from collections.abc import Sequence

from linnaeus.autobatch.memory.loader import largest_host_batch
from linnaeus.autobatch.result import Mode
from linnaeus.batch_plan.effective_batch import keeps_rest
from linnaeus.config.schema import DataConfig, TrainConfig
from linnaeus.data.bundle import DataBundle, dataset_length
from linnaeus.runtime.distributed import World

SMALLEST = 2
"""The steps of an epoch bound no size below this one: BatchNorm takes no single sample."""


def max_batch_sizes(
    config: DataConfig,
    train: TrainConfig,
    data: DataBundle,
    mode: Mode,
    world: World,
    *,
    tensor_bytes: Sequence[int],
) -> dict[str, int]:
    """Upper bounds of the batch size, each at least 1, by the name that `limited_by` reports.

    Args:
        config, train: the nodes DATA and TRAIN.
        data: the datasets.
        mode: `train` or `val`.
        world: the ranks.
        tensor_bytes: host bytes of each tensor of one collated sample.

    Returns:
        `dataset`: samples of one rank. `host_memory`: the largest size at which all batches that the loader
        holds at once fit in this rank's part of `HOST_MEMORY_FRACTION` of the available host memory.
        `steps_per_epoch`: see `max_for_steps`; for training alone.
    """
    length = dataset_length(data.train if mode == "train" else data.val)
    samples_per_rank = (
        length // world.world_size if mode == "train" else -(-length // world.world_size)
    )
    bounds = {
        "dataset": max(1, samples_per_rank),
        "host_memory": largest_host_batch(
            sum(tensor_bytes),
            config.NUM_WORKERS or 0,
            config.PREFETCH_FACTOR,
            pinned=config.PIN_MEMORY and world.device.type == "cuda",
            num_ranks=world.local_world_size,
        ),
    }
    min_steps = config.AUTOBATCH.MIN_STEPS_PER_EPOCH
    # Without the rest of an epoch as a step of its own, the user has said how many samples a step takes.
    if mode == "train" and min_steps > 1 and keeps_rest(train):
        size = max_for_steps(samples_per_rank, min_steps, train.ACCUMULATION_STEPS)
        bounds["steps_per_epoch"] = max(SMALLEST, size, config.AUTOBATCH.MIN_BATCH_SIZE)
    return bounds


def max_for_steps(samples_per_rank: int, min_steps: int, accumulation_steps: int = 1) -> int:
    """Return the largest micro-batch with which an epoch has this number of optimizer steps; 0 if none has.

    The last step of an epoch may have fewer micro-batches than the others.

    >>> max_for_steps(1437, 10), max_for_steps(1437, 10, accumulation_steps=2), max_for_steps(9, 10)
    (143, 75, 0)
    """
    return samples_per_rank // ((min_steps - 1) * accumulation_steps + 1)
