"""The order of samples: shuffled for training, split between processes, grouped into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch.utils.data import Sampler

from linnaeus.rng import derive_seed

SampleKey = tuple[int, int]
"""(epoch, index). With the seed of the run, it determines the random numbers of a sample."""


class EpochSampler(Sampler[SampleKey]):
    """Training samples of one process, in an order that depends on (seed, epoch) alone.

    All processes shuffle alike, leave out the samples that are skipped, and take every world_size-th of the
    others. Each gets floor((length - skip) / world_size) of them, so that all make the same number of steps;
    the few left over differ from epoch to epoch. An epoch may be resumed on another number of processes.

    Args:
        length: samples of the whole dataset.
        seed: seed of the run.
        rank, world_size: this process, and the number of processes.
    """

    def __init__(self, length: int, *, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.length = length
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.skip = 0

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """Choose what the next iteration yields.

        Args:
            epoch: number of the epoch, from 0.
            skip: samples over all processes to leave out at the start, which a resumed run has seen already.
        """
        self.epoch = epoch
        self.skip = skip

    def __iter__(self) -> Iterator[SampleKey]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        order = torch.randperm(self.length, generator=generator)
        rest = order[self.skip :]
        mine = rest[self.rank :: self.world_size][: len(rest) // self.world_size].clone()
        epoch = self.epoch
        # In chunks, so that an epoch of millions of samples is not a list of Python numbers.
        for start in range(0, len(mine), 4096):
            for index in mine[start : start + 4096].tolist():
                yield epoch, index


Sizes = Callable[[int, int], Iterator[int]]
"""Given an epoch and the samples to skip at its start, over all processes: sizes of the remaining batches."""


class PlannedBatches(Sampler[list[SampleKey]]):
    """The samples of an `EpochSampler` in batches of given sizes.

    Args:
        sampler: chooses the samples, the epoch and where in the epoch to start.
        sizes: gives the size of each batch; samples beyond the last batch are left out.
    """

    def __init__(self, sampler: EpochSampler, sizes: Sizes) -> None:
        self.sampler = sampler
        self.sizes = sizes

    def __iter__(self) -> Iterator[list[SampleKey]]:
        keys = iter(self.sampler)
        for size in self.sizes(self.sampler.epoch, self.sampler.skip):
            yield list(islice(keys, size))


class ValSampler(Sampler[SampleKey]):
    """Validation samples of one process, in order: over all processes, each sample comes exactly once.

    The numbers of samples of two processes may differ by one, so a validation batch must not run collectives.

    Args:
        length: samples of the whole dataset.
        rank, world_size: this process, and the number of processes.
    """

    def __init__(self, length: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.indices = range(rank, length, world_size)

    def __iter__(self) -> Iterator[SampleKey]:
        return ((0, index) for index in self.indices)
