"""The order of samples: shuffled for training, split between ranks, grouped into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, count, islice, repeat

import torch
from torch import Tensor
from torch.utils.data import Sampler

from linnaeus.runtime.errors import DataError
from linnaeus.runtime.rng import derive_seed

SampleKey = tuple[int, int] | tuple[int, int, int]
"""(epoch, index), and the position in the epoch where an index may come several times. With the seed of the
run, it determines the random numbers of a sample."""


class EpochSampler(Sampler[SampleKey]):
    """Training samples of one rank, in an order that depends on (seed, epoch) alone.

    All ranks shuffle alike, leave out the samples that are skipped, and take every world_size-th of the
    others. Each gets floor((length - skip) / world_size) of them, so that all make the same number of steps;
    the few left over differ from epoch to epoch. An epoch may be resumed on another number of ranks.

    With `repeats`, each drawn sample comes that often in a row, and an epoch draws fewer of them: repeated
    augmentation (Hoffer et al. 2020, arXiv:1901.09335), as in the `RASampler` of DeiT.
    """

    def __init__(
        self, length: int, *, seed: int, rank: int = 0, world_size: int = 1, repeats: int = 1
    ) -> None:
        self.length = length
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.repeats = repeats
        self.draws_again = repeats > 1
        """Whether an index may come several times in an epoch."""
        self.epoch = 0
        self.skip = 0

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """Select the next epoch, without its first `skip` samples over all ranks."""
        self.epoch = epoch
        self.skip = skip

    def __iter__(self) -> Iterator[SampleKey]:
        positions = count(self.skip + self.rank, self.world_size)
        if self.draws_again:  # without the position, a repeated sample would be augmented alike
            return zip(repeat(self.epoch), self._indices(), positions, strict=False)
        return zip(repeat(self.epoch), self._indices(), strict=False)

    def _indices(self) -> Iterator[int]:
        """The samples of this rank."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        order = self._draw(-(-self.length // self.repeats), generator)
        rest = order.repeat_interleave(self.repeats)[: self.length][self.skip :]
        mine = rest[self.rank :: self.world_size][: len(rest) // self.world_size].clone()
        # In chunks, so that an epoch of millions of samples is not a list of Python numbers.
        return chain.from_iterable(chunk.tolist() for chunk in mine.split(4096))

    def _draw(self, number: int, generator: torch.Generator) -> Tensor:
        """Indices of a number of samples, in order, for all ranks together."""
        return torch.randperm(self.length, generator=generator)[:number]


class ClassSampler(EpochSampler):
    """Draws each class of the finest level in a given proportion, with replacement.

    An epoch keeps its length. A class's number of draws differs from its share of the epoch by less than
    one; within a class each draw takes any sample with equal probability. A sample whose finest label is
    unknown counts for its finest known class, as a separate class. A sample without any
    label is never drawn.

    Args:
        targets: labels [N, L] of all training samples, -1 where unknown; a `DataError` if all are.
        power: a class with n samples is drawn in proportion to n ** power: 0 draws all equally often, 0.5 is
            square-root sampling (Mahajan et al. 2018, arXiv:1805.00932).
        order: arguments of `EpochSampler`.
    """

    def __init__(self, targets: Tensor, *, power: float = 0.0, **order: int) -> None:
        super().__init__(len(targets), **order)
        self.draws_again = True
        # The finest known class of each sample, over all levels.
        groups = torch.full((len(targets),), -1)
        start = 0
        for labels in targets.unbind(dim=1):
            groups = torch.where(labels >= 0, labels + start, groups)
            start += int(labels.max()) + 1 if len(labels) else 0
        drawn = torch.nonzero(groups >= 0).flatten()
        if not len(drawn):
            raise DataError(
                "DATA.SAMPLER: balanced or sqrt, but no training sample has a label; use shuffle"
            )
        _, members = torch.unique(groups[drawn], return_inverse=True)
        self._by_class = drawn[torch.argsort(members, stable=True)]
        """Indices of all samples that may be drawn, class after class."""
        self._counts = torch.bincount(members)
        """Samples of each class."""
        self._power = power

    def _draw(self, number: int, generator: torch.Generator) -> Tensor:
        # No `torch.multinomial`, which takes at most 2**24 categories.
        num_classes = len(self._counts)
        shuffled = torch.randperm(num_classes, generator=generator)
        places = torch.arange(number)
        if self._power:
            ends = (self._counts[shuffled].double() ** self._power).cumsum(0)
            places = torch.searchsorted(ends, (places.double() + 0.5) * (ends[-1] / number))
        quotas = shuffled[places % num_classes]
        classes = quotas[torch.randperm(number, generator=generator)]
        counts = self._counts[classes]
        # Float64 is exact for classes of up to 2**53 samples. The product may round up to the count.
        draws = torch.rand(number, dtype=torch.float64, generator=generator)
        within = torch.minimum((draws * counts).long(), counts - 1)
        starts = self._counts.cumsum(0) - self._counts
        return self._by_class[starts[classes] + within]


Sizes = Callable[[int, int], Iterator[int]]
"""Given an epoch and the samples to skip at its start, over all ranks: sizes of the remaining batches."""


class PlannedBatches(Sampler[list[SampleKey]]):
    """The samples of a sampler in batches of given sizes; those beyond the last one are left out."""

    def __init__(self, sampler: EpochSampler, sizes: Sizes) -> None:
        self.sampler = sampler
        self.sizes = sizes

    def __iter__(self) -> Iterator[list[SampleKey]]:
        keys = iter(self.sampler)
        for size in self.sizes(self.sampler.epoch, self.sampler.skip):
            batch = list(islice(keys, size))
            if not batch:
                return
            yield batch


class ValSampler(EpochSampler):
    """Validation samples of one rank, in order: over all ranks, each sample comes exactly once.

    The numbers of samples of two ranks may differ by one, so a validation batch must not run collectives.
    """

    def __iter__(self) -> Iterator[SampleKey]:
        return zip(repeat(0), range(self.rank, self.length, self.world_size), strict=False)
