"""`longest`: the samples that make the worst batch."""

import itertools
import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset

from linnaeus.autobatch import longest
from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.state.snapshot import Snapshot
from linnaeus.integrations.samples import LOOKED_AT, PROBED, Largest, copied
from linnaeus.runtime.rng import seed_all


class Rows(Dataset):
    """Samples of given lengths, read by index, that remember who was read."""

    def __init__(self, lengths):
        self.sizes = lengths
        self.read = []

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        self.read.append(index)
        return {"input_ids": [index] * self.sizes[index], "labels": 0}  # without an end of its own


class Columns(Rows):
    """With the lengths in a column, as `datasets` has it."""

    column_names = ["input_ids", "length"]  # noqa: RUF012

    def __getitem__(self, index):
        return self.sizes if index == "length" else super().__getitem__(index)


def indices(samples):
    return [sample["input_ids"][0] for sample in samples]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 40))
def test_it_is_what_sorting_gives_with_or_without_stored_lengths(lengths, n):
    ordered = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    expected = [ordered[place % len(ordered)] for place in range(n)]
    given_lengths = [None, lengths, torch.tensor(lengths), np.array(lengths)]
    for rows in (Rows(lengths), Columns(lengths)):
        for length in (*given_lengths, lambda sample: len(sample["input_ids"])):
            assert indices(longest(rows, n, length=length)) == expected


def test_stored_lengths_save_the_reading():
    lengths = [3, 9, 1, 7, 5]
    column, named, sequence = Columns(lengths), Columns(lengths), Rows(lengths)
    longest(column, 2)
    longest(named, 2, length="length")
    longest(sequence, 2, length=lengths)
    assert column.read == named.read == sequence.read == [1, 3]
    subset = Subset(Columns(lengths), [4, 0, 3])
    assert indices(longest(subset, 2)) == [3, 4]
    assert subset.dataset.read == [3, 4]


def test_without_them_each_sample_is_read_once_and_few_are_kept():
    alive, counts = weakref.WeakSet(), []

    class Stream(IterableDataset):
        def __iter__(self):
            for index in range(500):
                sample = torch.full((index % 100,), index)
                alive.add(sample)
                counts.append(len(alive))
                yield sample

    found = longest(Stream(), 4)
    assert [sample[0] for sample in found] == [99, 199, 299, 399]
    assert len(counts) == 500
    assert max(counts) <= 4 + 3, "the heap's, and those on their way"


def test_global_random_numbers_stay_where_they_were():
    class Random(Rows):
        def __getitem__(self, index):
            size = int(torch.randint(1, 9, ())) + random.randint(0, 3) + np.random.randint(3)
            return {"input_ids": [index] * size}

    def draws():
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    seed_all(0)
    longest(Random([1] * 20), 3)
    after = draws()
    seed_all(0)
    assert draws() == after


def padded(samples):
    longest_row = max(len(sample["input_ids"]) for sample in samples)
    return {"ids": torch.zeros(len(samples), longest_row), "labels": torch.zeros(len(samples))}


def test_the_largest_come_first_where_batches_differ_in_size():
    sizes = [3, 9, 4, 9] * 50
    expected = sorted(range(200), key=lambda index: -sizes[index])
    assert Largest(Rows(sizes), padded).indices(200) == expected
    rows = Rows(sizes)
    alike = Largest(rows, lambda samples: torch.zeros(len(samples), 9))
    assert len(rows.read) == len({*alike.indices(200)}) == PROBED


def test_fields_that_collate_drops_are_not_seen():
    texts = [
        {"text": "x" * (1 + index % 9), "note": "y" * (index * 7 % 200)} for index in range(100)
    ]
    found = Largest(texts, lambda samples: torch.zeros(2, len(samples[0]["text"]))).indices(1)
    assert len(texts[found[0]]["text"]) == 9


def images(sizes):
    """Padded to the largest height and the largest width."""
    return torch.zeros(len(sizes), *map(max, zip(*sizes, strict=True)))


def test_a_batch_has_the_maximum_of_each_dimension():
    dataset = [(40, 40)] * 300
    dataset[50], dataset[70] = (10, 100), (100, 10)
    largest = Largest(dataset, images)
    assert largest.batch(16).shape == (16, 100, 100)
    assert largest.batch(1).numel() == 1600


class Hidden:
    """An object that gives its content on request alone."""

    __slots__ = ("_x",)

    def __init__(self, x):
        self._x = x

    def to_dict(self):
        return {"x": self._x}


@pytest.mark.parametrize("kind", [lambda x: SimpleNamespace(x=x), Hidden])
def test_batches_that_are_objects_are_looked_into(kind):
    lengths = [10 + 37 * index % 90 for index in range(200)]
    largest = Largest(lengths, lambda batch: kind(torch.ones(sum(batch), 4)))
    found = [lengths[index] for index in largest.indices(200)]
    assert found == sorted(lengths, reverse=True)


def test_samples_of_random_size_are_refused():
    sizes = itertools.cycle([8, 16, 32])

    class Drawing(Rows):
        def __getitem__(self, index):
            return {"input_ids": [index] * next(sizes)}

    with pytest.raises(AutoBatchError, match="ask"):
        Largest(Drawing([1] * 100), padded, remedy="ask")


def test_a_large_dataset_is_read_in_part_and_estimated():
    rows = Rows([5 + index % 50 for index in range(30_000)])
    largest = Largest(rows, padded)
    assert len(rows.read) <= LOOKED_AT + 3
    assert len({*largest.indices(512)}) == 512 * LOOKED_AT // 30_000 + 1
    assert largest.margin == 1, "the largest are many"
    assert rows.sizes[largest.indices(1)[0]] == 54
    heavy = [int(1 / (1e-3 + index * 7919 % 30_000 / 30_000)) for index in range(30_000)]
    assert 1.02 < Largest(Rows(heavy), padded).margin < 3
    in_a_hurry = Rows(rows.sizes)
    Largest(in_a_hurry, padded, timeout_minutes=0)
    assert len(in_a_hurry.read) < PROBED


def test_workers_look_at_the_samples():
    """The process itself reads the largest alone."""
    rows = Rows([3, 9, 4, 9] * 50)
    largest = Largest(rows, padded, num_workers=1)
    assert largest.indices(2) == [1, 3]
    assert {*rows.read} == {*largest.indices(3)}


def test_memory_maps_are_not_copied(tmp_path):
    mapped = np.memmap(tmp_path / "x", np.uint8, "w+", shape=(4, 8))
    assert copied(mapped) is mapped
    module = torch.nn.Linear(1, 1)
    module.images, module.mean = mapped, np.zeros(3)
    snapshot = Snapshot([module], torch.device("cpu"))
    mapped[0], module.mean[0] = 1, 1
    snapshot.restore()
    assert mapped[0, 0] == 1
    assert module.mean[0] == 0, "a small array of one's own is"
