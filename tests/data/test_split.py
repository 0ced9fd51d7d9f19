from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from linnaeus.data.image_files import stratified_split

STRATA = st.lists(st.integers(0, 8), min_size=1, max_size=200)
FRACTIONS = st.floats(0.01, 0.99)


@given(STRATA, FRACTIONS)
def test_split_is_a_partition_near_the_fraction_with_every_class_in_training(
    strata: list[int], fraction: float
) -> None:
    train, val = stratified_split([f"{i}.jpg" for i in range(len(strata))], strata, fraction)
    assert sorted(train + val) == list(range(len(strata)))
    assert train == sorted(train)
    assert val == sorted(val)
    assert {strata[i] for i in train} == set(strata)
    assert len(val) <= fraction * len(strata) + 0.5
    counts, held_out = Counter(strata), Counter(strata[i] for i in val)
    if all(count > 10 for count in counts.values()) and fraction < 0.8:
        assert abs(len(val) - fraction * len(strata)) <= 1
        assert all(abs(held_out[s] - fraction * counts[s]) <= 2 for s in counts)


def test_split_is_the_same_for_ever_and_in_any_order() -> None:
    keys, strata = [f"{i}.jpg" for i in range(40)], [i % 2 for i in range(40)]
    _, val = stratified_split(keys, strata, 0.2)
    assert val == [0, 1, 11, 12, 15, 25, 30, 38]
    _, backwards = stratified_split(keys[::-1], strata[::-1], 0.2)
    assert sorted(39 - position for position in backwards) == val
