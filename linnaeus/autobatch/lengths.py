"""The longest samples of a dataset: the worst batch that its own data can make."""

from __future__ import annotations

import copy
import heapq
import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle, islice, pairwise
from numbers import Integral
from operator import itemgetter
from typing import Any

import torch

from linnaeus.autobatch import nest
from linnaeus.autobatch.arguments import check_count
from linnaeus.autobatch.rng import preserved_generators

STORED = ("length", "lengths")
"""Columns in which the samples' lengths are looked for."""
PROBED = 64
"""Samples whose batches tell whether samples differ in size."""

logger = logging.getLogger("linnaeus.autobatch")


def longest(
    dataset: Any, n: int, *, length: str | Callable[[Any], int] | Sequence[int] | None = None
) -> list[Any]:
    """The n longest samples of a dataset, the longest first; of equal ones, those that come first in it.

    Stored lengths are read instead of the samples: a column `length` or `lengths` (of Hugging Face's
    `datasets`), also through a `Subset`. Else every sample is read, once, and n of them are kept in memory.

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
            `length` that does not go with the dataset.
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
            samples = [dataset[index] for index in _descending(lengths)[:n].tolist()]
    if not samples:
        raise ValueError("dataset is empty; it must have a sample")
    return list(islice(cycle(samples), n))


def largest_first(
    dataset: Any, collate: Callable[[list[Any]], Any], lengths: Sequence[Any] | None = None
) -> torch.Tensor | None:
    """The indices of a dataset's samples, those that make the largest batch first; shape (samples,).

    The collate function gets up to `PROBED` samples, spread evenly, each twice in a batch of its own. Where
    all these batches have the same shapes, there is no order: None. Else it goes by `lengths`, or by
    `num_values` of every sample, if a probed batch is never smaller where that is larger; or else by the
    batch of every sample, and the samples with most values in one of its tensors come first of all. The log
    says which. Global random number generators on the CPU are left as they were.

    >>> texts = ["a", "abcd", "ab"]
    >>> largest_first(texts, lambda samples: torch.zeros(len(samples), max(map(len, samples)))).tolist()
    [1, 2, 0]
    >>> largest_first(texts, lambda samples: torch.zeros(len(samples), 8))

    Args:
        dataset: samples by index.
        collate: makes a batch of samples, with tensors or arrays.
        lengths: one number for each sample, which may be about something else.

    Raises:
        ValueError: the dataset is empty.
    """
    num_samples = len(dataset)
    if not num_samples:
        raise ValueError("dataset is empty; it must have a sample")
    with preserved_generators():
        probed = sorted({place * num_samples // PROBED for place in range(PROBED)})
        samples = [dataset[index] for index in probed]
        values = [num_values(sample) for sample in samples]
        shapes = [_batch_values(collate, sample) for sample in samples]
        if len(set(shapes)) == 1:
            return None
        text = "samples differ in size: trials use the largest of %d, by %s"
        if lengths is not None and _follow([_integer(lengths[index]) for index in probed], shapes):
            logger.info(text, num_samples, "the lengths that are stored")
            return _descending(lengths)
        if _follow(values, shapes):
            logger.info(text, num_samples, "the values of each, for which all are read")
            return _descending(num_values(dataset[index]) for index in range(num_samples))
        logger.info(text, num_samples, "the batch of each, for which all are read")
        sizes = [_batch_values(collate, dataset[index]) for index in range(num_samples)]
        # Of batches that differ in their number of tensors, those that all have are compared.
        worst = [
            max(range(num_samples), key=each.__getitem__) for each in zip(*sizes, strict=False)
        ]
        return torch.tensor(list(dict.fromkeys([*worst, *_descending(map(sum, sizes)).tolist()])))


def _batch_values(collate: Callable[[list[Any]], Any], sample: Any) -> tuple[int, ...]:
    """Values of each tensor and array in a batch of a sample and its copy; else the number of all leaves."""
    leaves = list(nest.leaves(collate([copy.copy(sample), copy.copy(sample)])))
    found = [
        num_values(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) or nest.is_array(leaf)
    ]
    return tuple(found) or (len(leaves),)


def _follow(lengths: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether no batch has fewer values in a tensor than one of a shorter sample; equal ones are the same."""
    pairs = sorted(zip(lengths, shapes, strict=True))
    return all(
        a == b if short == long else len(a) == len(b) and all(map(operator.le, a, b))
        for (short, a), (long, b) in pairwise(pairs)
    )


def _descending(lengths: Iterable[Any]) -> torch.Tensor:
    """The indices of these lengths, the largest first; of equal ones, in their order."""
    return torch.tensor([_integer(number) for number in lengths]).argsort(
        descending=True, stable=True
    )


def num_values(sample: Any) -> int:
    """The length of a sample: of `input_ids` in a dictionary, of a text, or else the values that it holds.

    >>> num_values({"input_ids": [1, 2, 3], "labels": [0] * 9}), num_values({"a": 5, "b": [1, 2]})
    (3, 3)
    """
    if isinstance(sample, Mapping):
        return sum(
            map(num_values, [sample["input_ids"]] if "input_ids" in sample else sample.values())
        )
    if isinstance(sample, str | bytes):
        return len(sample)
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if nest.is_array(sample):
        return int(sample.size)
    if isinstance(sample, list | tuple):
        return (
            len(sample)
            if sample and isinstance(sample[0], int | float)
            else sum(map(num_values, sample))
        )
    return 1


def stored_lengths(dataset: Any, length: str | Sequence[int] | None = None) -> Sequence[Any] | None:
    """One length for each sample, without a look at the samples; None where there are none.

    Raises:
        ValueError: a `length` that does not go with the dataset; see `longest`.
    """
    columns = getattr(dataset, "column_names", None)
    if isinstance(length, str):
        if length not in (columns or ()):
            raise ValueError(
                f"length is {length!r}; the dataset's columns are {columns or 'unknown'}"
            )
        return dataset[length]  # type: ignore[no-any-return]
    if length is not None:
        if not hasattr(length, "__len__") or len(length) != len(dataset):
            needed = (
                f"a column's name, a function, or one number for each of the {len(dataset)} samples"
            )
            raise ValueError(f"length must be {needed}")
        return length
    if isinstance(dataset, torch.utils.data.Subset):
        inner = stored_lengths(dataset.dataset)
        return None if inner is None else [list(inner)[index] for index in dataset.indices]
    if not isinstance(columns, list) or not hasattr(dataset, "__len__"):
        return None
    return next((dataset[name] for name in STORED if name in columns), None)


def _integer(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, Integral | torch.Tensor):
        raise TypeError(f"length gives {number!r}; it must be an integer for each sample")
    return int(number)
