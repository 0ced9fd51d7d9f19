"""`longest`: the samples that make the worst batch."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset

from linnaeus.autobatch import longest
from linnaeus.autobatch.lengths import PROBED, largest_first


class Rows(Dataset[dict[str, Any]]):
    """Samples of given lengths, read by index, that remember who was read."""

    def __init__(self, lengths: list[int]) -> None:
        self.sizes = lengths
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return {"input_ids": [index] * self.sizes[index], "labels": 0}  # without an end of its own


class Columns(Rows):
    """With the lengths in a column, as `datasets` has it."""

    column_names = ["input_ids", "length"]  # noqa: RUF012

    def __getitem__(self, index: Any) -> Any:
        return self.sizes if index == "length" else super().__getitem__(index)


def indices(samples: list[dict[str, Any]]) -> list[int]:
    return [sample["input_ids"][0] for sample in samples]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 40))
def test_it_is_what_sorting_gives_with_or_without_stored_lengths(
    lengths: list[int], n: int
) -> None:
    ordered = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    expected = [ordered[place % len(ordered)] for place in range(n)]
    given_lengths: list[Any] = [None, lengths, torch.tensor(lengths), np.array(lengths)]
    for rows in (Rows(lengths), Columns(lengths)):
        for length in (*given_lengths, lambda sample: len(sample["input_ids"])):
            assert indices(longest(rows, n, length=length)) == expected


def test_stored_lengths_save_the_reading() -> None:
    lengths = [3, 9, 1, 7, 5]
    column, named, sequence = Columns(lengths), Columns(lengths), Rows(lengths)
    longest(column, 2)
    longest(named, 2, length="length")
    longest(sequence, 2, length=lengths)
    assert column.read == named.read == sequence.read == [1, 3]
    subset = Subset(Columns(lengths), [4, 0, 3])
    assert indices(longest(subset, 2)) == [3, 4]
    assert subset.dataset.read == [3, 4]  # type: ignore[attr-defined]


def test_without_them_each_sample_is_read_once_and_few_are_kept() -> None:
    class Sample(list[int]):
        """A list that can be referred to weakly."""

    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = reads = 0

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            nonlocal most, reads
            for index in range(500):
                sample = Sample([index] * (index % 100))
                sample.__class__.__hash__ = object.__hash__  # type: ignore[method-assign]
                alive.add(sample)
                reads += 1
                most = max(most, len(alive))
                yield sample

    found = longest(Stream(), 4)
    gc.collect()
    assert [sample[0] for sample in found] == [99, 199, 299, 399]
    assert reads == 500
    assert most <= 4 + 3, "the heap's, and those on their way"


def test_global_random_numbers_stay_where_they_were() -> None:
    class Random(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            size = int(torch.randint(1, 9, ())) + random.randint(0, 3) + np.random.randint(3)
            return {"input_ids": [index] * size}

    def draws() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    first = longest(Random([1] * 20), 3)
    assert longest(Random([1] * 20), 3) == first, "the same again"
    after = draws()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    assert draws() == after


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest_row = max(len(sample["input_ids"]) for sample in samples)
    return {"ids": torch.zeros(len(samples), longest_row), "labels": torch.zeros(len(samples))}


def test_the_largest_come_first_where_batches_differ_in_size() -> None:
    sizes = [3, 9, 4, 9] * 50
    expected = sorted(range(200), key=lambda index: -sizes[index])
    assert largest_first(Rows(sizes), padded).tolist() == expected
    rows = Rows(sizes)
    assert largest_first(rows, padded, lengths=sizes).tolist() == expected
    assert len(rows.read) == PROBED
    unrelated = [1, 2, 3, 4, 5] * 40
    assert largest_first(Rows(sizes), padded, lengths=unrelated).tolist() == expected, (
        "of something else"
    )
    rows = Rows(sizes)
    assert (
        largest_first(rows, lambda samples: torch.zeros(len(samples), 9), lengths=unrelated) is None
    )
    assert len(rows.read) == PROBED
    with pytest.raises(ValueError, match="empty"):
        largest_first([], padded)


def test_what_the_collate_function_leaves_out_or_pads_on_its_own_is_seen() -> None:
    texts = [
        {"text": "x" * (1 + index % 9), "note": "y" * (index * 7 % 200)} for index in range(100)
    ]
    found = largest_first(texts, lambda samples: torch.zeros(2, len(samples[0]["text"])))
    assert len(texts[found[0]]["text"]) == 9

    def sides(samples: list[tuple[int, int]]) -> list[torch.Tensor]:
        return [torch.zeros(len(samples), max(side)) for side in zip(*samples, strict=True)]

    pairs = [(index % 10, 50 - index % 10) for index in range(80)]
    pairs[33], pairs[44] = (20, 0), (0, 60)
    assert set(largest_first(pairs, sides)[:2].tolist()) == {33, 44}
