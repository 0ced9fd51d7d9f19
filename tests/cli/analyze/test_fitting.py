"""The largest size that fits, where needs are a sawtooth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from linnaeus.autobatch.predict.prediction import largest_within
from linnaeus.autobatch.search import Candidates
from linnaeus.cli.analyze.predict import LARGEST, PredictedStep, largest_size
from linnaeus.training.state_bytes import StateBytes

Need = Callable[[int], int]


def step_of(low: int, high: int, multiple_of: int = 1) -> PredictedStep:
    """A step of which only the sizes that are allowed count."""
    return PredictedStep(
        "train", cast(Any, None), StateBytes(), Candidates(low, high, multiple_of),
        Candidates(1, max(high, LARGEST), multiple_of), "max_batch_size", has_buckets=False,
    )  # fmt: skip


def sawtooth(heights: list[int]) -> Need:
    return lambda size: 40 * size + heights[size % len(heights)]


@given(
    st.lists(st.integers(0, 200), min_size=2, max_size=9),
    st.integers(300, 60_000),
    st.lists(st.integers(50, 2000), min_size=2, max_size=5),
    st.sampled_from([1, 1, 4]),
)
def test_a_bound_only_bounds(heights: list[int], budget: int, bounds: list[int], multiple_of: int) -> None:
    """Whatever the bound: the largest size that fits, up to the one that is found without a bound."""
    need = sawtooth(heights)
    free = largest_size(step_of(1, LARGEST, multiple_of), budget, need)
    assert free is not None
    assert need(free) <= budget < need(free + multiple_of if free >= multiple_of else free + 1)
    for bound in bounds:
        found = largest_size(step_of(1, bound, multiple_of), budget, need)
        sizes = Candidates(1, min(free, bound), multiple_of)
        assert found == max(size for size in sizes if need(size) <= budget)


def test_halving_the_range_that_is_allowed_would_give_several_answers() -> None:
    """The negative control: what was done before."""
    need = sawtooth([0, 90, 150, 30, 200])
    found = {largest_within(range(1, bound + 1), 6000, need) for bound in range(160, 700)}
    assert len(found) > 1
    assert len({largest_size(step_of(1, bound), 6000, need) for bound in range(160, 700)}) == 1


def test_a_lower_bound_only_bounds() -> None:
    need = sawtooth([0, 90, 150, 30, 200])
    free = largest_size(step_of(1, 700), 6000, need)
    assert free is not None
    assert free > 145
    for low in (100, 140, 145):
        assert largest_size(step_of(low, 700), 6000, need) == free
    assert largest_size(step_of(free + 5, 700), 6000, need) is None


def test_far_below_the_bound() -> None:
    """Where nothing fits in a long range below the bound, the rest of the sizes is still looked at."""

    def need(size: int) -> int:
        return 10**6 if 100 < size < 2000 else size

    assert largest_size(step_of(1, 1999), 5000, need) == 100
    assert largest_size(step_of(1, 150), 5000, need) == 100
    assert largest_size(step_of(150, 1999), 5000, need) is None


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(0, 3000), st.integers(1, 8),
    st.integers(1, 9),
)  # fmt: skip
def test_the_largest_size_within_a_budget(steps: list[int], budget: int, first: int, apart: int) -> None:
    """Against looking at every candidate, for needs that never fall."""
    candidates = [first + apart * index for index in range(len(steps))]
    needs = dict(zip(candidates, (sum(steps[: index + 1]) for index in range(len(steps))), strict=True))
    fitting = [size for size in candidates if needs[size] <= budget]
    assert largest_within(candidates, budget, needs.__getitem__) == max(fitting, default=None)
