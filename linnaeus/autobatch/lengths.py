"""The longest samples of a dataset: the worst batch that its own data can make."""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from numbers import Integral
from operator import itemgetter
from typing import Any

import torch

from linnaeus.autobatch.arguments import check_count, kind_of
from linnaeus.autobatch.rng import rng_state, set_rng_state

Length = str | Callable[[Any], int] | Sequence[int] | None

STORED = ("length", "lengths")
"""Columns in which the samples' lengths are looked for."""
NOTABLE_S = 5.0
"""Reading a dataset that takes longer is logged, with what would make it unnecessary."""

logger = logging.getLogger("linnaeus.autobatch")


def longest(dataset: Any, n: int, *, length: Length = None, read: Any = None) -> list[Any]:
    """The n longest samples of a dataset, the longest first; of equal ones, those that come first in it.

    Where lengths are stored, they are read instead of the samples: in a column `length` or `lengths` of a
    dataset with columns (of Hugging Face's `datasets`), and through `torch.utils.data.Subset`. Else every
    sample is read, once, of which no more than n are kept in memory. Global random number generators on the
    CPU are left as they were.

    >>> longest(["ab", "abcd", "a", "abc"], 2)
    ['abcd', 'abc']
    >>> longest([{"input_ids": [5]}, {"input_ids": [1, 2]}], 1)
    [{'input_ids': [1, 2]}]
    >>> longest(["ab", "c"], 5)
    ['ab', 'c', 'ab', 'c', 'ab']
    >>> longest(["ab", "c"], 1, read=["the first", "the second"])
    ['the first']

    Args:
        dataset: samples by index, or to be iterated over (to the end).
        n: how many samples; a dataset with fewer repeats.
        length: where the lengths are: the name of a column, a function of a sample, or one number for each
            sample in the dataset's order. By default a stored column, else `num_values` of each sample.
        read: the same samples by the same index, in another form: these are given. Lengths are the dataset's.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of its range, an empty dataset, or a
            `length` that does not go with the dataset.
    """
    check_count("n", n)
    cpu, length_of = torch.device("cpu"), length if callable(length) else num_values
    random_state = rng_state(cpu)
    try:
        stored = stored_lengths(dataset, length)
        if stored is None and read is not None:
            stored = map(length_of, _samples(dataset))
        if stored is None:
            samples = _longest_read(dataset, n, length_of)
        else:
            samples = _longest_stored(dataset if read is None else read, n, stored)
    finally:
        set_rng_state(random_state, cpu)
    if not samples:
        raise ValueError("dataset is empty; it must have a sample")
    return list(islice(cycle(samples), n))


def num_values(sample: Any) -> int:
    """The length of a sample: of `input_ids` in a dictionary, of a text, or else the values that it holds.

    >>> num_values({"input_ids": [1, 2, 3], "labels": [0] * 9}), num_values("abc"), num_values(([1, 2], 7))
    (3, 3, 3)
    >>> num_values(torch.zeros(3, 4)), num_values({"prompt": [1, 2], "answer": [3]})
    (12, 3)
    """
    if isinstance(sample, Mapping):
        if "input_ids" in sample:
            return num_values(sample["input_ids"])
        return sum(map(num_values, sample.values()))
    if isinstance(sample, str | bytes):
        return len(sample)
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if isinstance(size := getattr(sample, "size", None), int):  # a NumPy array
        return size
    if isinstance(sample, list | tuple):
        if sample and isinstance(sample[0], int | float):
            return len(sample)
        return sum(map(num_values, sample))
    return 1


def stored_lengths(dataset: Any, length: Length = None) -> Iterable[Any] | None:
    """One length for each sample, without a look at the samples; None where there are none.

    Args:
        dataset, length: as for `longest`.

    Raises:
        TypeError, ValueError: a `length` that does not go with the dataset.
    """
    if callable(length):
        return None
    columns = getattr(dataset, "column_names", None)
    if isinstance(length, str):
        if not isinstance(columns, list) or length not in columns:
            listed = ", ".join(map(repr, columns)) if isinstance(columns, list) else "unknown"
            raise ValueError(f"length is {length!r}; the dataset's columns are {listed}")
        return dataset[length]  # type: ignore[no-any-return]
    if length is not None:
        if not hasattr(length, "__len__"):
            raise TypeError(
                f"length is {kind_of(length)}; it must be a column's name, a function or a sequence"
            )
        if len(length) != len(dataset):
            raise ValueError(f"length has {len(length)} entries; the dataset has {len(dataset)} samples")
        return length
    if isinstance(dataset, torch.utils.data.Subset):
        inner = stored_lengths(dataset.dataset, None)
        if inner is None:
            return None
        lengths = list(inner)
        return (lengths[index] for index in dataset.indices)
    if not isinstance(columns, list) or not hasattr(dataset, "__len__"):
        return None
    return next((dataset[name] for name in STORED if name in columns), None)


def _longest_stored(dataset: Any, n: int, lengths: Iterable[Any]) -> list[Any]:
    """The n longest of the samples with these lengths; only they are read."""
    if not hasattr(dataset, "__getitem__"):
        raise TypeError(f"dataset is {kind_of(dataset)}; stored lengths need one that is read by index")
    order = heapq.nlargest(n, ((_integer(number), -index) for index, number in enumerate(lengths)))
    return [dataset[-negative] for _, negative in order]


def _integer(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, Integral | torch.Tensor):
        raise TypeError(f"length gives {number!r}; it must be an integer for each sample")
    return int(number)


def _longest_read(dataset: Any, n: int, length: Callable[[Any], int]) -> list[Any]:
    """The n longest of all samples, each of which is read."""
    started, count = time.monotonic(), 0

    def measured() -> Iterator[tuple[int, Any]]:
        nonlocal count
        for sample in _samples(dataset):
            count += 1
            yield _integer(length(sample)), sample

    found = heapq.nlargest(n, measured(), key=itemgetter(0))
    seconds = time.monotonic() - started
    if seconds > NOTABLE_S:
        logger.info(
            "read %d samples in %.0f s to find the longest; a column `length` in the dataset saves this, "
            "and so does the argument `length`",
            count, seconds,
        )  # fmt: skip
    return [sample for _, sample in found]


def _samples(dataset: Any) -> Iterator[Any]:
    """Every sample, in order. Not every dataset that is read by index says where it ends."""
    if hasattr(dataset, "__iter__"):
        yield from dataset
    else:
        yield from (dataset[index] for index in range(len(dataset)))
