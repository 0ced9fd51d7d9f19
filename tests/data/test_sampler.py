from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linnaeus.data.image_files import encoded, stratified_split
from linnaeus.data.sampler import ClassSampler, EpochSampler, PlannedBatches, ValSampler

LENGTHS, WORLDS = st.integers(0, 300), st.integers(1, 8)


@given(LENGTHS, WORLDS)
def test_validation_loses_and_repeats_nothing(length, world):
    samplers = [ValSampler(length, seed=0, rank=rank, world_size=world) for rank in range(world)]
    assert sorted(index for sampler in samplers for _, index in sampler) == list(range(length))
    sizes = [len(list(sampler)) for sampler in samplers]
    assert max(sizes) - min(sizes) <= 1


@given(
    length=st.integers(48, 300),
    world=st.sampled_from([1, 2, 4]),
    epoch=st.integers(0, 3),
    steps=st.lists(st.tuples(st.sampled_from([4, 8, 12]), st.integers(1, 2)), max_size=4),
)
def test_a_step_has_the_same_samples_on_any_number_of_processes(length, world, epoch, steps):
    """Each step is (effective batch, accumulation steps); sizes differ from step to step."""
    sizes = [
        effective // world // parts for effective, parts in steps if effective // world % parts == 0
    ]
    batches = []
    for rank in range(world):
        sampler = EpochSampler(length, seed=1, rank=rank, world_size=world)
        planned = PlannedBatches(sampler, lambda epoch, skip: iter(sizes))
        sampler.set_epoch(epoch)
        batches.append(list(planned))
        assert [len(batch) for batch in batches[-1]] == sizes
    whole = EpochSampler(length, seed=1)
    whole.set_epoch(epoch)
    order = list(whole)
    for number, size in enumerate(sizes):
        start = world * sum(sizes[:number])
        together = sorted(key for rank in range(world) for key in batches[rank][number])
        assert together == sorted(order[start : start + world * size])


LABELS = torch.tensor([[0, 0]] * 90 + [[0, 1]] * 7 + [[1, 2]] * 2 + [[1, -1]] * 3 + [[-1, -1]] * 5)
"""Labels of 107 samples: three fine classes, a coarse one whose fine label is unknown, and none at all."""


def drawn(epoch=0, skip=0, rank=0, world=1, seed=0, power=0.0, repeats=1):
    sampler = ClassSampler(
        LABELS, power=power, seed=seed, rank=rank, world_size=world, repeats=repeats
    )
    sampler.set_epoch(epoch, skip)
    return list(sampler)


def test_balanced_epochs_have_each_class_equally_often():
    keys = drawn()
    assert len(keys) == len(LABELS)
    counts = Counter(tuple(LABELS[index].tolist()) for _, index, _ in keys)
    assert set(counts) == {(0, 0), (0, 1), (1, 2), (1, -1)}
    assert max(counts.values()) - min(counts.values()) <= 1
    # Within a class, every sample may come.
    assert {index for epoch in range(4) for _, index, _ in drawn(epoch) if 90 <= index < 97} == {
        *range(90, 97)
    }
    plain = Counter(tuple(LABELS[index].tolist()) for _, index in EpochSampler(len(LABELS), seed=0))
    assert plain[0, 0] == 90


def test_square_root_epochs_have_classes_by_the_root_of_samples():
    sizes = {(0, 0): 90, (0, 1): 7, (1, 2): 2, (1, -1): 3}
    total = sum(size**0.5 for size in sizes.values())
    for epoch in range(3):
        counts = Counter(tuple(LABELS[index].tolist()) for _, index, _ in drawn(epoch, power=0.5))
        assert counts.keys() == sizes.keys()
        for label, size in sizes.items():
            assert abs(counts[label] - len(LABELS) * size**0.5 / total) < 1


@pytest.mark.parametrize("repeats", [2, 3])
def test_repeated_samples_come_together_with_seeds_of_their_own(repeats):
    """Each rank has another repetition of a sample, as with the RASampler of DeiT."""
    length = 23
    ranks = [
        EpochSampler(length, seed=0, rank=rank, world_size=repeats, repeats=repeats)
        for rank in range(repeats)
    ]
    keys = [list(sampler) for sampler in ranks]
    assert [len(share) for share in keys] == [length // repeats] * repeats
    assert all(len({index for _, index, _ in group}) == 1 for group in zip(*keys, strict=True))
    assert len({key for share in keys for key in share}) == length // repeats * repeats
    alone = list(EpochSampler(length, seed=0, repeats=repeats))
    assert max(Counter(index for _, index, _ in alone).values()) == repeats
    assert len(alone) == length


@given(WORLDS, st.integers(0, 150), st.integers(0, 3), st.sampled_from([0, 0.5]), st.integers(1, 3))
def test_epochs_by_class_are_split_and_resumed_as_others(world, skip, epoch, power, repeats):
    keys = {"power": power, "repeats": repeats}
    whole = drawn(epoch, **keys)
    assert drawn(epoch, skip, **keys) == whole[skip:]
    length = max(0, len(whole) - skip) // world
    shares = [drawn(epoch, skip, rank, world, **keys) for rank in range(world)]
    assert [share for group in zip(*shares, strict=True) for share in group] == whole[
        skip : skip + world * length
    ]


@given(st.lists(st.integers(0, 8), min_size=1, max_size=200), st.floats(0.01, 0.99))
def test_a_split_has_its_fraction_and_all_classes_in_training(strata, fraction):
    train, val = stratified_split(
        encoded(f"{i}.jpg" for i in range(len(strata))), np.array(strata), fraction
    )
    train, val = train.tolist(), val.tolist()
    assert sorted(train + val) == list(range(len(strata)))
    assert [train, val] == [sorted(train), sorted(val)]
    assert {strata[i] for i in train} == set(strata)
    assert len(val) <= fraction * len(strata) + 0.5
    counts, held_out = Counter(strata), Counter(strata[i] for i in val)
    if all(count > 10 for count in counts.values()) and fraction < 0.8:
        assert abs(len(val) - fraction * len(strata)) <= 1
        assert all(abs(held_out[s] - fraction * counts[s]) <= 2 for s in counts)


def test_split_is_the_same_for_ever_and_in_any_order():
    keys, strata = encoded(f"{i}.jpg" for i in range(40)), np.arange(40) % 2
    _, val = stratified_split(keys, strata, 0.2)
    assert val.tolist() == [0, 1, 11, 12, 15, 25, 30, 38]
    _, backwards = stratified_split(keys[::-1], strata[::-1], 0.2)
    assert sorted(39 - position for position in backwards) == val.tolist()
