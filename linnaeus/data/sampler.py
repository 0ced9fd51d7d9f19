"""Which sample comes when: shuffled and shared between processes, and the arithmetic of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch.utils.data import Sampler

from linnaeus.rng import derive_seed

SampleKey = tuple[int, int]
"""(epoch, index): all that the random numbers of a sample depend on, beside the seed of the run."""


class EpochSampler(Sampler[SampleKey]):
    """Training samples of one process, in an order that follows from (seed, epoch) alone.

    All processes shuffle alike and take every world_size-th sample; each gets floor(length / world_size), so
    that all make the same number of steps. The few samples that are left over differ from epoch to epoch.

    Args:
        length: samples of the whole dataset.
        seed: seed of the run.
        rank, world_size: this process, and how many there are.
    """

    def __init__(self, length: int, *, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.length = length
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.skip = 0

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """Choose the epoch that the next iteration gives.

        Args:
            epoch: number of the epoch, from 0.
            skip: samples of this process to leave out at the start, which a resumed run has seen already.
        """
        self.epoch = epoch
        self.skip = skip

    def __len__(self) -> int:
        return max(0, samples_per_rank(self.length, self.world_size) - self.skip)

    def __iter__(self) -> Iterator[SampleKey]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        order = torch.randperm(self.length, generator=generator)
        count = samples_per_rank(self.length, self.world_size)
        mine = order[self.rank :: self.world_size][self.skip : count].clone()
        epoch = self.epoch
        # In chunks, so that an epoch of millions of samples is not a list of Python numbers.
        for start in range(0, len(mine), 4096):
            for index in mine[start : start + 4096].tolist():
                yield epoch, index


Sizes = Callable[[int, int], Iterator[int]]
"""From an epoch and the samples of it to leave out at the start, to the size of each batch that is left."""


class PlannedBatches(Sampler[list[SampleKey]]):
    """The samples of an `EpochSampler` in batches of given sizes.

    Args:
        sampler: decides which samples come, and where an epoch starts.
        sizes: gives the size of each batch. The samples that are left over come in no batch.
    """

    def __init__(self, sampler: EpochSampler, sizes: Sizes) -> None:
        self.sampler = sampler
        self.sizes = sizes

    def __len__(self) -> int:
        return sum(1 for _ in self.sizes(self.sampler.epoch, self.sampler.skip))

    def __iter__(self) -> Iterator[list[SampleKey]]:
        keys = iter(self.sampler)
        for size in self.sizes(self.sampler.epoch, self.sampler.skip):
            yield list(islice(keys, size))


class ValSampler(Sampler[SampleKey]):
    """Validation samples of one process, in order: no sample is counted twice, and none is lost.

    Processes may get different numbers of samples (they differ by one at most), so nothing that all of them
    must join may happen per batch.

    Args:
        length: samples of the whole dataset.
        rank, world_size: this process, and how many there are.
    """

    def __init__(self, length: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.indices = range(rank, length, world_size)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[SampleKey]:
        return ((0, index) for index in self.indices)


def samples_per_rank(length: int, world_size: int) -> int:
    """Training samples that each process sees in an epoch."""
    return length // world_size


def drops_last(length: int, world_size: int, batch_size: int) -> bool:
    """Whether training leaves out an incomplete last batch: yes, unless there would be no batch at all."""
    return samples_per_rank(length, world_size) >= batch_size


def steps_per_epoch(length: int, world_size: int, batch_size: int) -> int:
    """Training batches per process and epoch.

    >>> steps_per_epoch(100, 2, 16), steps_per_epoch(10, 2, 16)
    (3, 1)
    """
    count = samples_per_rank(length, world_size)
    return count // batch_size if drops_last(length, world_size, batch_size) else min(1, count)


def val_steps(length: int, world_size: int, batch_size: int, rank: int) -> int:
    """Validation batches of one process.

    >>> [val_steps(33, 2, 16, rank) for rank in (0, 1)]
    [2, 1]
    """
    return -(-len(range(rank, length, world_size)) // batch_size)
