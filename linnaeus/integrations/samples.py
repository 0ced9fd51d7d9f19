"""The longest samples of a dataset: the worst batch that its own data can make."""

from __future__ import annotations

import copy
import heapq
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import cycle, islice
from numbers import Integral
from operator import itemgetter
from random import Random
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from linnaeus.autobatch import nest
from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.memory.loader import largest_host_batch
from linnaeus.autobatch.settings import check_count
from linnaeus.autobatch.state.rng import preserved_generators

STORED = ("length", "lengths")
"""Columns in which the samples' lengths are looked for."""
PROBED = 64
"""Number of samples whose batches show whether sizes differ."""
LOOKED_AT, LOOK_S = 2000, 30.0
"""Maximum number of samples to look at if their shapes differ, and the seconds for it."""
PARTS = 8
"""Number of parts of the samples looked at. Their largest samples show how far the largest may grow."""

_CPU = torch.device("cpu")
_LOADING = (
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "worker_init_fn",
    "multiprocessing_context",
)

Shapes = tuple[tuple[int, ...], ...]
"""Of each tensor in a batch."""

logger = logging.getLogger("linnaeus.autobatch")


def longest(
    dataset: Any, n: int, *, length: str | Callable[[Any], int] | Sequence[int] | None = None
) -> list[Any]:
    """Return the n longest samples of a dataset, the longest first; equal ones in the order of the dataset.

    Stored lengths are read instead of the samples: a column `length` or `lengths` (of Hugging Face's
    `datasets`), also through a `Subset`. Else every sample is read, once, and n of them are kept in memory.

    Examples:
        >>> longest(["ab", "abcd", "a", "abc"], 2)
        ['abcd', 'abc']
        >>> longest([{"input_ids": [5]}, {"input_ids": [1, 2]}], 1)
        [{'input_ids': [1, 2]}]
        >>> longest(["ab", "c"], 3)
        ['ab', 'c', 'ab']

    Args:
        dataset: samples by index, or to be iterated over (to the end).
        n: how many samples; a dataset with fewer repeats.
        length: where the lengths are: the name of a column, a function of a sample, or one number for each
            sample in the dataset's order. By default a stored column, else `num_values` of each sample.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of its range, an empty dataset, or a
            `length` that cannot be used with the dataset.
    """
    check_count("n", n)
    with preserved_generators():
        lengths = None if callable(length) else stored_lengths(dataset, length)
        if lengths is None:
            measure = length if callable(length) else num_values
            # Not every dataset that is read by index says where it ends.
            rows = (
                dataset
                if hasattr(dataset, "__iter__")
                else map(dataset.__getitem__, range(len(dataset)))
            )
            measured = ((_integer(measure(sample)), sample) for sample in rows)
            samples = [sample for _, sample in heapq.nlargest(n, measured, key=itemgetter(0))]
        else:
            samples = [dataset[index] for index in _descending(lengths)[:n]]
    if not samples:
        raise ValueError("dataset is empty; it must have a sample")
    return list(islice(cycle(samples), n))


class Largest:
    """The samples of a dataset that make its largest batches.

    Up to `LOOKED_AT` samples, drawn evenly, are read and collated, each with a copy of itself. Where the
    first `PROBED` of these batches have the same shapes, any samples will do. Else the samples with the most
    in each dimension of each tensor come first, then the others by their values, and the log says so. Global
    random number generators on the CPU are left as they were.

    >>> texts = ["a", "abcd", "ab"]
    >>> Largest(texts, lambda samples: torch.zeros(len(samples), max(map(len, samples)))).indices(4)
    [1, 2, 0, 1]

    Args:
        dataset: samples by index.
        collate: makes a batch of samples.
        remedy: advice for the messages, where the largest batch cannot be known.
        timeout_minutes: limit of the search. Looking at samples may take half of it.
        device: device of the search. On an accelerator, samples of batches stay in host memory. On the host,
            the samples that a loader reads for each batch count.
        **loading: the loader's arguments, such as `num_workers`, to read the samples as it does.

    Attributes:
        margin: ratio of the largest possible batch of all samples to the largest batch of the samples looked
            at, estimated from its growth with their number.

    Raises:
        AutoBatchError: the dataset is not read by index, no tensors are found in a batch, or equal batches
            differ in size.
        ValueError: the dataset is empty.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        *,
        remedy: str = "make the largest batch by hand",
        timeout_minutes: float = 1.0,
        device: torch.device = _CPU,
        **loading: Any,
    ) -> None:
        self._num_needed, self._remedy, self._name = 1, remedy, type(dataset).__name__
        self._loading = loading
        if not is_read_by_index(dataset):
            raise self._refusal("it cannot be read by index")
        if not len(dataset):
            raise ValueError("dataset is empty; it must have a sample")
        started, seconds = time.monotonic(), min(LOOK_S, 30 * timeout_minutes)
        self.margin = self._share = 1.0
        self._collate, self._read = collate, dataset.__getitem__
        if device.type != "cpu":
            self._read = cache(self._read)
        with preserved_generators():
            indices = Random(0).sample(range(len(dataset)), min(len(dataset), LOOKED_AT))
            measure = _Measure(collate)
            read = DataLoader(
                Subset(dataset, indices), batch_size=None, collate_fn=measure, **loading
            )
            shapes: list[Shapes] = []
            for measured in read:
                shapes.append(self._checked(measured))
                count = len(shapes)
                if count == PROBED < len(indices):
                    if len(set(shapes)) == 1:
                        break
                    logger.info(
                        "samples differ in size: looking at %d of %d, for %.3g s at most. Samples of your "
                        "own (`longest`) save this",
                        len(indices),
                        len(dataset),
                        seconds,
                    )
                if count >= PARTS and time.monotonic() > started + seconds:
                    break
                if count % 500 == 0:
                    logger.info("looked at %d of %d samples", count, len(indices))
            del indices[len(shapes) :]
            if len(set(shapes)) == 1:
                self._order = sorted(indices)
                return
            self._order_by_shapes(indices, shapes, len(dataset))
            logger.info(
                "samples differ in size: trials use the largest of %d, by the batches of %d of them",
                len(dataset),
                len(shapes),
            )
            for index in self._order[:3]:
                again = self._checked(measure(dataset[index]))
                if _num_values(again) < 0.9 * _num_values(shapes[indices.index(index)]):
                    raise self._refusal("a sample made twice has two sizes")

    def batch(self, size: int) -> Any:
        """Collate the largest batch of this number of samples."""
        return self._collate([copied(self._read(index)) for index in self.indices(size)])

    def host_bound(self, device: torch.device, num_ranks: int) -> int:
        """The largest batch whose copies in the loader fit into host memory, without sparse tensors."""
        sizes = [
            math.prod(_shape(leaf)) * getattr(leaf, "itemsize", 0)
            for leaf in tensors_and_arrays(self.batch(2))
            if not getattr(leaf, "is_sparse", False)
        ]
        return largest_host_batch(
            sum(sizes) / 2,
            self._loading.get("num_workers", 0),
            self._loading.get("prefetch_factor"),
            pinned=device.type == "cuda" and self._loading.get("pin_memory", True),
            num_ranks=num_ranks,
        )

    def indices(self, size: int) -> list[int]:
        """The samples of a batch of so many; where few were looked at or there are few, they repeat.

        Of a share of all samples, the share of the size is as large as the size is of all.
        """
        count = max(math.ceil(size * self._share), self._num_needed)
        return list(islice(cycle(self._order[: min(count, size)]), size))

    def _order_by_shapes(self, indices: list[int], shapes: list[Shapes], num_samples: int) -> None:
        if len({tuple(map(len, shape)) for shape in shapes}) > 1:  # different tensors
            shapes = [((_num_values(shape),),) for shape in shapes]
        most = max(map(len, shapes[0]))
        rows = torch.tensor(
            [[dims + (1,) * (most - len(dims)) for dims in shape] for shape in shapes]
        )
        rows = rows[torch.tensor(indices).argsort()].double().clamp(min=1)
        largest, held, first = rows.amax(0), torch.zeros(()), list[int]()
        while not torch.equal(held, largest):
            grown = torch.maximum(rows, held)
            first.append(_descending(_products(grown))[0])
            held = grown[first[-1]]
        order = dict.fromkeys([*first, *_descending(_products(rows))])
        self._order, self._num_needed = [sorted(indices)[place] for place in order], len(first)
        if len(shapes) < num_samples:
            self._share = len(shapes) / num_samples
            parts = torch.stack([rows[part::PARTS].amax(0) for part in range(PARTS)])
            growth = 1 - float(_products(parts).mean() / _products(largest))
            self.margin += growth * math.log(1 / self._share, PARTS)

    def _checked(self, measured: tuple[Shapes, Shapes]) -> Shapes:
        one, other = measured
        if not one:
            raise self._refusal("a batch contains no tensor")
        if one != other:
            raise self._refusal("the same batch has two sizes")
        return one

    def _refusal(self, why: str) -> AutoBatchError:
        return AutoBatchError(
            f"AutoBatch: dataset {self._name}: {why}, so the largest batch is unknown; {self._remedy}"
        )


@dataclass(frozen=True)
class _Measure:
    """Collates a sample with a copy of itself, twice; the shapes of both batches."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, sample: Any) -> tuple[Shapes, Shapes]:
        one, other = (shapes_in(self.collate([copied(sample), copied(sample)])) for _ in range(2))
        return one, other


def _products(rows: torch.Tensor) -> torch.Tensor:
    """The values of all tensors together."""
    return rows.prod(-1).sum(-1)


def is_read_by_index(dataset: Any) -> bool:
    """Whether a dataset has a length, and gives a sample for an index."""
    is_other = isinstance(dataset, IterableDataset | Mapping | str)
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not is_other


def loading_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments by which a loader reads samples."""
    return {name: getattr(loader, name) for name in _LOADING}


def copied(sample: Any) -> Any:
    """Return a shallow copy from which a collate function may remove items. Arrays are returned uncopied."""
    return sample if nest.is_array(sample) else copy.copy(sample)


def tensors_and_arrays(value: Any, depth: int = 4) -> Iterator[Any]:
    """The tensors and arrays in a batch or in its objects; outside of objects, texts and lists of numbers."""
    is_list = isinstance(value, list | tuple)
    is_row = is_list and value and all(isinstance(part, int | float) for part in value)
    if isinstance(value, torch.Tensor | str | bytes) or nest.is_array(value) or is_row:
        yield value
    elif is_list or isinstance(value, Mapping):
        for part in value if is_list else value.values():
            yield from tensors_and_arrays(part, depth)
    elif depth and not isinstance(value, type | ModuleType | torch.nn.Module):
        names = [field.name for field in fields(value)] if is_dataclass(value) else ()  # with slots
        content = {
            **getattr(value, "__dict__", {}),
            **{name: getattr(value, name) for name in names},
        }
        found = [each for each in tensors_and_arrays(content, depth - 1) if hasattr(each, "shape")]
        yield from (
            found or tensors_and_arrays(value.to_dict(), 0) if hasattr(value, "to_dict") else found
        )


def shapes_in(batch: Any) -> Shapes:
    """The shape of each tensor and array in a batch."""
    return tuple(map(_shape, tensors_and_arrays(batch)))


def _shape(leaf: Any) -> tuple[int, ...]:
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return (leaf.values().numel(),)
    return tuple(leaf.shape) if hasattr(leaf, "shape") else (len(leaf),)


def _num_values(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))


def _descending(lengths: Iterable[Any]) -> list[int]:
    """The indices of these lengths, the largest first; of equal ones, in their order."""
    numbers = lengths if isinstance(lengths, torch.Tensor) else list(map(_integer, lengths))
    return torch.as_tensor(numbers).argsort(descending=True, stable=True).tolist()


def num_values(sample: Any) -> int:
    """The length of a sample: of `input_ids` in a dictionary, of a text, or else the values that it holds.

    >>> num_values({"input_ids": [1, 2, 3], "labels": [0] * 9}), num_values({"a": "5", "b": [1, 2]})
    (3, 3)
    """
    if isinstance(sample, Mapping) and "input_ids" in sample:
        sample = sample["input_ids"]
    return _num_values(map(_shape, tensors_and_arrays(sample)))


def stored_lengths(
    dataset: Any, length: str | Sequence[int] | None = None, argument: str = "length"
) -> Sequence[Any] | None:
    """One length for each sample, without a look at the samples; None if there are none.

    Raises:
        ValueError: a `length` that cannot be used with the dataset; see `longest`.
    """
    columns = getattr(dataset, "column_names", None) or []
    if isinstance(length, str):
        if length not in columns:
            raise ValueError(
                f"{argument} is {length!r}, but the dataset's columns are {columns or 'unknown'}. Pass a "
                f"function: {argument}=lambda sample: sample[{length!r}]"
            )
        return dataset[length]  # type: ignore[no-any-return]
    if length is not None:
        if not hasattr(length, "__len__") or len(length) != len(dataset):
            raise ValueError(
                f"{argument} must be a column's name, a function, or one number for each of the "
                f"{len(dataset)} samples"
            )
        return length
    if isinstance(dataset, Subset):
        inner = stored_lengths(dataset.dataset)
        return None if inner is None else list(map(list(inner).__getitem__, dataset.indices))
    has_columns = isinstance(columns, list) and hasattr(dataset, "__len__")
    return next((dataset[name] for name in STORED if has_columns and name in columns), None)


def _integer(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, Integral | torch.Tensor):
        raise TypeError(f"length gives {number!r}; it must be an integer for each sample")
    return int(number)
