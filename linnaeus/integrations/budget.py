"""Batches within a budget of tokens, pixels or nodes: the search, and the batch sampler."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import nlargest
from itertools import accumulate
from numbers import Integral
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from linnaeus.autobatch.api import auto_find_batch_size
from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.autobatch.settings import check_count, check_number, kind_of
from linnaeus.autobatch.state.rng import preserved_generators
from linnaeus.integrations.common import find_size
from linnaeus.integrations.samples import (
    copied,
    is_read_by_index,
    loading_of,
    num_values,
    shapes_in,
    stored_lengths,
)

POOL = 64
"""Batches per rank in a pool of shuffled samples. Samples are sorted by cost within a pool."""
SPARE = 0.01
"""Fraction of batches added to the first epoch's, so that every epoch has the same number."""

Cost = str | Callable[[Any], int] | Sequence[int] | Tensor

logger = logging.getLogger("linnaeus.autobatch")


@dataclass(frozen=True)
class BudgetResult:
    """The budget of a batch that a search found.

    Attributes:
        budget: the largest cost of a batch that ran within the memory.
        padded: as requested.
        max_samples: as requested.
        costs: of each sample, for `BudgetBatchSampler`.
        search: with every trial; its `batch_size` is the budget.
    """

    budget: int
    padded: bool
    max_samples: int | None
    costs: Tensor = field(repr=False, compare=False)
    search: AutoBatchResult = field(repr=False)

    @property
    def certified(self) -> bool:
        """Whether the next larger budget was run and does not fit, or there is none."""
        return self.search.certified

    @property
    def limited_by(self) -> str:
        """Why the budget is not larger; `dataset` where a batch of all samples fits."""
        return self.search.limited_by

    @property
    def peak_bytes(self) -> int | None:
        """Peak of the last trial of the budget."""
        return self.search.peak_bytes


def find_budget(
    step: Callable[[Any], object],
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    *,
    cost: Cost | None = None,
    padded: bool = False,
    max_samples: int | None = None,
    unit: str = "values",
    state: Iterable[Any] = (),
    **options: Any,
) -> BudgetResult:
    """Find the largest cost of a batch, in tokens, pixels or nodes, that fits into the memory.

    Each trial runs batches of the dataset's own samples, one after the other: the longest samples that fill
    the budget, the most samples that fill it, and if padded, fuller batches between. The largest peak counts.
    If a sample of cost c needs a + b c + d c^2 bytes, the bytes per unit of cost are convex in c. So for
    batches of similar samples, as `BudgetBatchSampler` makes them, one of the ends is the worst. A batch of
    your own that joins the few longest samples with many of the shortest may need more.

    Examples:
        >>> texts = [torch.ones(length) for length in (9, 3, 5, 4)]
        >>> found = find_budget(lambda batch: batch * 2, texts, torch.cat, device="cpu", group=False)
        >>> found.budget, found.limited_by
        (21, 'dataset')

    Args:
        step: runs one full training (or validation) step on a batch.
        dataset: samples by index.
        collate: makes a batch of a list of samples.
        cost: the name of a column, a function of a sample, or one number for each sample: positive integers.
            By default a stored column `length` or `lengths`, else `num_values` of each sample.
        padded: whether `collate` pads. The cost of a batch is then its number of samples times its largest
            cost, else the sum of its costs.
        max_samples: the most samples of a batch.
        unit: of a cost, for messages, such as "tokens".
        state: as for `auto_find_batch_size`.
        options: further arguments of `auto_find_batch_size`, such as `memory_limit_gb`. `max_batch_size` is
            the largest budget to try.

    Raises:
        AutoBatchError: the longest sample does not fit, or as for `auto_find_batch_size`.
        TypeError, ValueError: an argument of the wrong type or out of its range, a cost below 1, or a
            `collate` that pads where `padded` is False.
    """
    if max_samples is not None:
        check_count("max_samples", max_samples)
    if not is_read_by_index(dataset):
        raise TypeError(f"dataset is a {type(dataset).__name__}; it must be read by index")
    with preserved_generators():
        costs = costs_of(dataset, cost)
        ends = Ends(dataset, collate, costs, unit, padded=padded, max_samples=max_samples)
        if ends.pads and not padded:
            raise ValueError(
                "collate pads: some samples have more values in one batch than alone. Give "
                "padded=True"
            )

    search = auto_find_batch_size(
        partial(ends.run, step),
        lambda budget: budget,
        min_batch_size=ends.least,
        bounds={"dataset": ends.most},
        state=state,
        unit=unit,
        **{"max_batch_size": None, **options},
    )
    return BudgetResult(search.batch_size, padded, max_samples, costs, search)


def costs_of(dataset: Any, cost: Cost | None = None) -> Tensor:
    """The cost of each sample, as `find_budget` takes it."""
    costs = None if callable(cost) else stored_lengths(dataset, cost, "cost")  # type: ignore[arg-type]
    if costs is None:
        measure = cost if callable(cost) else num_values
        costs = [measure(dataset[index]) for index in range(len(dataset))]
    return checked_costs(costs)


def ends_of_loader(loader: Any, cost: Cost, max_samples: int | None = None) -> Ends:
    """Return the batches of a loader's dataset that need the most memory.

    Raises:
        AutoBatchError: the dataset is not read by index.
        TypeError, ValueError: a cost is no positive integer.
    """
    dataset, unit = getattr(loader, "dataset", None), "units of cost"
    if not is_read_by_index(dataset):
        raise AutoBatchError(
            f"AutoBatch: with cost, the loader must be one DataLoader of a dataset that is read by index, "
            f"not {kind_of(loader)} of {kind_of(dataset)}"
        )
    with preserved_generators():
        costs = costs_of(dataset, cost)
        return Ends(dataset, loader.collate_fn, costs, unit, max_samples=max_samples)


def search_within(
    ends: Ends, run: Callable[[int], object], options: dict[str, Any], *known: Any, **arguments: Any
) -> AutoBatchResult:
    """Search the budget for an adapter.

    Args:
        ends: the batches of a trial.
        run: runs them, for a budget.
        options, known, arguments: as for `common.find_size`.
    """
    return find_size(
        run,
        lambda budget: budget,
        {**options, "min_batch_size": max(ends.least, options["min_batch_size"])},
        *known,
        looks=[],
        bounds={"dataset": ends.most},
        unit=ends.unit,
        **arguments,
    )


def with_budget(loader: Any, ends: Ends, budget: int, **options: Any) -> DataLoader[Any]:
    """Return a loader like this one, with batches within a budget; options as for `BudgetBatchSampler`."""
    sampler = BudgetBatchSampler(
        ends.costs, budget, padded=ends.padded, max_samples=ends.max_samples, **options
    )
    # Where accelerate looks for `set_epoch` after it has skipped batches.
    sampler.sampler = sampler  # type: ignore[attr-defined]
    return DataLoader(
        loader.dataset,
        batch_sampler=sampler,
        collate_fn=loader.collate_fn,
        persistent_workers=loader.persistent_workers,
        **loading_of(loader),
    )


def checked_costs(costs: Any) -> Tensor:
    """Return costs as integers.

    Raises:
        TypeError, ValueError: there are none, or one is no positive integer; names the first.
    """
    numbers = costs if isinstance(costs, Tensor) else list(costs)
    try:
        found = torch.as_tensor(numbers)
        is_whole = found.ndim == 1 and not found.is_floating_point() and found.dtype != torch.bool
    except (TypeError, ValueError, RuntimeError):  # texts, None, lists of different lengths
        is_whole = False
    if not len(numbers):
        raise ValueError("there are no costs: the dataset is empty; it must have a sample")
    if not is_whole or found.min() < 1:
        for index, number in enumerate(numbers):
            scalar = number.item() if getattr(number, "ndim", 1) == 0 else number
            check_count(f"the cost of sample {index}", scalar)
    return found.long().cpu()


class Ends:
    """The batches of a dataset that need most memory at a budget.

    Args:
        dataset, collate, max_samples: as for `find_budget`.
        costs: of each sample.
        unit: of the costs, for the log.
        padded: as for `find_budget`; None to detect it from `collate`.

    Attributes:
        costs, unit, padded, max_samples: of the batches.
        least, most: the smallest and the largest budget: of the longest sample, and of all samples.
        pads: whether a batch of long and short samples has more values than these alone.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        costs: Tensor,
        unit: str,
        *,
        padded: bool | None = None,
        max_samples: int | None = None,
    ) -> None:
        self._dataset, self._collate = dataset, collate
        self.costs, self.unit, self.max_samples = costs, unit, max_samples
        self._costs, self._order = costs.sort(stable=True)
        self._most_samples = min(max_samples or len(costs), len(costs))
        self._sums = torch.cat([torch.zeros(1, dtype=torch.long), self._costs.cumsum(0)])
        self._squares = torch.cat([torch.zeros(1), self._costs.double().square().cumsum(0)])
        mixed = [*self._order[:-1][:7].tolist(), int(self._order[-1])]
        alone = sum(_num_values(self.batch([index])) for index in mixed)
        self.pads = _num_values(self.batch(mixed)) > alone
        self.padded = self.pads if padded is None else padded
        ends = [int(each) for each in (self._costs[0], self._costs.median(), self._costs[-1])]
        logger.info("costs in %s: smallest %d, median %d, largest %d", unit, *ends)
        largest = self._costs[-self._most_samples :]
        self.least = int(largest[-1])
        self.most = self.least * len(largest) if self.padded else int(largest.sum())

    def run(self, step: Callable[[Any], object], budget: int) -> None:
        """Run the step on each batch, one after the other: only one is held."""
        for indices in self.indices(budget):
            step(self.batch(indices))

    def batch(self, indices: Iterable[int]) -> Any:
        """Collate these samples."""
        return self._collate([copied(self._dataset[index]) for index in indices])

    def indices(self, budget: int) -> list[list[int]]:
        """Return the batches of the longest and of the most samples; if padded, fuller ones too."""
        ends = self._padded_ends(budget) if self.padded else self._summed_ends(budget)
        distinct = dict.fromkeys(tuple(sorted(positions)) for positions in ends)
        return [self._order[list(positions)].tolist() for positions in distinct]

    def _padded_ends(self, budget: int) -> list[Sequence[int]]:
        counts = torch.arange(1, len(self._costs) + 1).minimum(budget // self._costs)
        counts = counts.clamp(max=self._most_samples)
        totals = counts * self._costs.double()
        # Memory grows by the cost, or faster; a batch of the longest samples alone may leave much room.
        scores = [totals * self._costs**power for power in (1.0, 0.25, 0.0)]
        scores.append(counts + totals / (2 * budget + 1))
        tops = dict.fromkeys(int(score.argmax()) for score in scores)
        return [range(top + 1 - int(counts[top]), top + 1) for top in tops]

    def _summed_ends(self, budget: int) -> list[Sequence[int]]:
        sums, squares = self._sums, self._squares
        firsts = torch.searchsorted(sums, sums[1:] - budget)
        firsts = firsts.maximum(torch.arange(len(firsts)) + 1 - self._most_samples)
        heaviest = int((squares[1:] - squares[firsts]).argmax()) + 1
        filled = [self._filled(budget, top) for top in (len(self._costs), heaviest)]
        count = min(_num_within(sums, budget) - 1, self._most_samples)
        first = _num_within(sums[count:] - sums[:-count], budget) - 1
        longest = max(filled, key=lambda positions: float(self._costs[positions].double().norm()))
        return [longest, range(first, first + count)]

    def _filled(self, budget: int, top: int) -> list[int]:
        """Positions below `top` that fill the budget, the longest first."""
        positions, rest = list[int](), budget
        while (room := self._most_samples - len(positions)) > 0:
            top = min(top, _num_within(self._costs, rest))
            first = max(int(torch.searchsorted(self._sums, self._sums[top] - rest)), top - room)
            if first >= top:
                break
            positions += range(first, top)
            rest, top = rest - int(self._sums[top] - self._sums[first]), first
        return positions


def _num_within(ascending: Tensor, limit: int) -> int:
    return int(torch.searchsorted(ascending, limit, right=True))


def _num_values(batch: Any) -> int:
    return sum(map(math.prod, shapes_in(batch)))


class BudgetBatchSampler(Sampler[list[int]]):
    """Batches within a budget: every sample once per epoch over all ranks, equally many batches on each.

    Samples of similar cost share a batch, so that little is padded, and the batches of the ranks in one step
    are alike. The number of batches is the same in every epoch. Batches differ in their number of samples:
    divide the loss by the samples or tokens of the whole optimizer step.

    To resume exactly, save `state_dict()` of each rank. A loader with workers reads ahead: count the batches
    yourself and call `set_epoch(epoch, skip=count)`, or use the `StatefulDataLoader` of torchdata.

    Examples:
        >>> sampler = BudgetBatchSampler([5, 1, 4, 2, 3], budget=6, shuffle=False)
        >>> list(sampler), len(sampler)
        ([[0], [2], [4, 3, 1]], 3)

    Args:
        costs: of each sample, positive integers.
        budget: of a batch, as of `find_budget`.
        padded: as for `find_budget`.
        max_samples: as for `find_budget`.
        shuffle: draw other batches, in another order, in each epoch.
        seed: of the shuffling; the same on all ranks.
        num_replicas: number of ranks; by default of the default process group.
        rank: of this process; by default in the default process group.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of its range, a sample above the budget,
            or too few samples for a batch on each rank.
    """

    def __init__(
        self,
        costs: Iterable[int] | Tensor,
        budget: int,
        *,
        padded: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        max_samples: int | None = None,
    ) -> None:
        is_joined = torch_dist.is_available() and torch_dist.is_initialized()
        if num_replicas is None:
            num_replicas = torch_dist.get_world_size() if is_joined else 1
        if rank is None:
            rank = torch_dist.get_rank() if is_joined else 0
        check_count("budget", budget)
        check_count("num_replicas", num_replicas)
        check_number("rank", rank, Integral, ge=0, lt=num_replicas)
        self._costs, self.rank = checked_costs(costs), rank
        self._most_samples = len(self._costs)
        if max_samples is not None:
            check_count("max_samples", max_samples)
            self._most_samples = min(max_samples, self._most_samples)
        index = int(self._costs.argmax())
        if self._costs[index] > budget:
            raise ValueError(
                f"sample {index} costs {self._costs[index]}, above the budget of {budget}; leave it out, or "
                "raise the budget"
            )
        self._recipe = {
            "seed": seed,
            "budget": budget,
            "padded": padded,
            "shuffle": shuffle,
            "max_samples": max_samples,
            "num_replicas": num_replicas,
            "num_samples": len(self._costs),
        }
        self.budget, self.padded, self.num_replicas = budget, padded, num_replicas
        self._shuffle, self._seed = shuffle, seed
        self._epoch = self._skip = self._num_given = 0
        fewest = len(self._drawn(self._generator()))
        most = len(self._costs) // num_replicas
        self._num_batches = min(-int(-fewest * (1 + shuffle * SPARE) // num_replicas), most)
        if fewest > most * num_replicas:
            raise ValueError(
                f"num_replicas is {num_replicas}, but {len(self._costs)} samples in {fewest} batches cannot "
                "be divided equally; raise the budget, or use fewer ranks"
            )

    def __len__(self) -> int:
        """The number of batches of an epoch on each rank."""
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        self._num_given = self._skip
        for batch in self._batches()[self._skip :]:
            self._num_given += 1
            yield batch
        self._skip = 0

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """Begin an epoch after a number of its batches. The epoch of a loaded state continues there."""
        check_number("epoch", epoch, Integral, ge=0)
        check_number("skip", skip, Integral, ge=0, le=len(self))
        if skip or epoch != self._epoch:
            self._epoch, self._skip, self._num_given = epoch, skip, skip

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the batches given in it, and the arguments."""
        return {"epoch": self._epoch, "batch": self._num_given, **self._recipe}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume after the batches given.

        Raises:
            ValueError: the state is of a sampler with another argument.
        """
        for name, value in self._recipe.items():
            if state_dict[name] != value:
                raise ValueError(
                    f"{name} is {value}; it was {state_dict[name]} in the run that is resumed, whose batches "
                    "were others"
                )
        self._epoch, self._skip = state_dict["epoch"], state_dict["batch"]
        self._num_given = self._skip

    def _batches(self) -> list[list[int]]:
        """This rank's batches of the epoch."""
        generator, wanted = self._generator(), len(self) * self.num_replicas
        while len(batches := self._drawn(generator)) > wanted:
            pass  # rarely: another draw of samples takes fewer batches
        while missing := wanted - len(batches):
            largest = nlargest(missing, range(len(batches)), key=lambda place: len(batches[place]))
            for place in sorted(largest, reverse=True):
                if middle := len(batches[place]) // 2:
                    batches.insert(place + 1, batches[place][middle:])
                    del batches[place][middle:]
        steps = range(len(self))
        if self._shuffle:
            steps = torch.randperm(len(self), generator=generator).tolist()  # type: ignore[assignment]
        return [batches[step * self.num_replicas + self.rank] for step in steps]

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed + self._epoch)

    def _drawn(self, generator: torch.Generator) -> list[list[int]]:
        """Batches of all samples: pools of shuffled samples, each sorted by falling cost and cut."""
        num_samples, mean = len(self._costs), float(self._costs.double().mean())
        order = torch.arange(num_samples)
        if self._shuffle:
            order = torch.randperm(num_samples, generator=generator)
        batches = list[list[int]]()
        for pool in order.split(max(int(POOL * self.num_replicas * self.budget / mean), 1)):
            costs, places = self._costs[pool].sort(descending=True, stable=True)
            batches += self._cut(pool[places].tolist(), costs.tolist())
        return batches

    def _cut(self, samples: list[int], costs: list[int]) -> Iterator[list[int]]:
        sums, first = [0, *accumulate(costs)], 0
        while first < len(samples):
            if self.padded:
                num_samples = self.budget // costs[first]
            else:
                num_samples = bisect_right(sums, sums[first] + self.budget) - 1 - first
            end = first + min(num_samples, self._most_samples)
            yield samples[first:end]
            first = end
