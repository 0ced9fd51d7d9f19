"""Steps, samples and times: values worked out by hand, and what must hold for all."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from linnaeus.cli import duration
from linnaeus.cli.duration import read_duration, show_duration
from linnaeus.cli.plan.arithmetic import relative_samples, relative_steps, smallest_fast
from linnaeus.cli.plan.results import Goal, Plan, Row

SIZES = st.integers(1, 10**6)
SCALES = st.floats(1e-3, 1e7)


def test_values_worked_out_by_hand() -> None:
    assert relative_steps(100, 300) == 4  # 1 + 300 / 100
    assert relative_samples(100, 300) == 400  # 100 + 300
    goal = Goal(num_samples=50_000, epochs=1, noise_scale=300)
    row = Row(goal, batch_size=100, accumulation_steps=1, samples_per_s_each=200.0)
    assert row.seconds_per_step == 0.5
    assert row.relative_seconds == 2  # 4 steps of half a second
    assert row.epoch_s == 250


@given(SIZES, SIZES, SCALES)
def test_a_larger_batch_takes_fewer_steps_and_more_samples(a: int, b: int, scale: float) -> None:
    small, large = sorted((a, b))
    assert relative_steps(small, scale) >= relative_steps(large, scale) >= 1
    assert relative_samples(small, scale) <= relative_samples(large, scale) * (1 + 1e-9)


@given(st.dictionaries(SIZES, st.floats(0.1, 1e6), min_size=1), st.floats(0, 0.5))
def test_the_smallest_fast_size(speeds: dict[int, float], tolerance: float) -> None:
    size = smallest_fast(speeds, tolerance)
    limit = (1 - tolerance) * max(speeds.values())
    assert speeds[size] >= limit
    assert all(speed < limit for other, speed in speeds.items() if other < size)


def rows(speeds: dict[int, float], goal: Goal, **more: object) -> list[Row]:
    fields = {"learning_rate": 0.1, **more}
    return [Row(goal, size, 1, speed, **fields) for size, speed in speeds.items()]  # type: ignore[arg-type]


SPEEDS = {32: 640.0, 64: 980.0, 128: 1000.0, 256: 990.0}


def test_a_plan_without_a_noise_scale() -> None:
    goal = Goal(num_samples=10_000, epochs=9, time_budget_s=94)
    plan = Plan(goal, rows=rows(SPEEDS, goal))
    found = {row["batch_size"]: row for row in plan.scalars()}
    assert {size: row["marks"] for size, row in found.items()} == {
        32: "", 64: "recommended", 128: "fastest", 256: "largest",
    }  # fmt: skip
    assert found[128]["epoch_s"] == 10
    assert found[128]["run_s"] == 90
    assert found[128]["seconds_per_step"] == 0.128
    assert [row["in_time"] for row in plan.scalars()] == [False, True, True, True]  # 140.6, 91.8, 90, 90.9 s
    assert found[128]["relative_time"] is None


def test_a_plan_with_a_noise_scale() -> None:
    """(1 + 1000 / B) B / speed: 32 -> 1.6125, 64 -> 1.0857, 128 -> 1.128, 256 -> 1.2687 seconds."""
    goal = Goal(num_samples=10_000, epochs=9, noise_scale=1000)
    plan = Plan(goal, rows=rows(SPEEDS, goal))
    assert plan.recommended.batch_size == 64
    relative = [row["relative_time"] for row in plan.scalars()]
    expected = [1032 / 640, 1064 / 980, 1128 / 1000, 1256 / 990]
    assert relative == pytest.approx([value / (1064 / 980) for value in expected])
    assert [row["relative_steps"] for row in plan.scalars()] == [32.25, 16.625, 8.8125, 4.90625]


def test_processes_add_up() -> None:
    goal = Goal(num_samples=8000, epochs=2, world_size=4, noise_scale=64)
    row = Row(goal, batch_size=8, accumulation_steps=2, samples_per_s_each=100.0)
    assert (row.effective_batch_size, row.samples_per_s, row.seconds_per_step) == (64, 400, 0.16)
    assert (row.epoch_s, row.run_s) == (20, 40)
    assert (row.relative_steps, row.relative_samples) == (2, 128)


def test_a_size_that_the_configuration_refuses_is_not_recommended() -> None:
    goal = Goal(num_samples=10_000, epochs=9)
    refused = rows({32: 1000.0}, goal, learning_rate=None)
    plan = Plan(goal, rows=[*refused, *rows({64: 1000.0}, goal)])
    assert plan.recommended.batch_size == 64


def test_lengths_of_time() -> None:
    lengths = {"90s": 90, "30m": 1800, "2h": 7200, "1d": 86400, "1.5h": 5400, "1h30m": 5400}
    assert {text: read_duration(text) for text in lengths} == lengths
    for text in ("", "2", "h", "2 h", "2w", "-1h", "0s", "1h30", "h2", "9" * 400 + "d"):
        with pytest.raises(ValueError, match="90s"):
            read_duration(text)


@given(st.floats(0.001, 1e8))
@example(134_546.0)
def test_lengths_of_time_are_shown_to_half_of_the_smaller_unit(seconds: float) -> None:
    parts = show_duration(seconds).split()
    shown = sum(float(parts[i]) * duration.UNITS[parts[i + 1]] for i in range(0, len(parts), 2))
    smallest = duration.UNITS[parts[-1]] if len(parts) == 4 else 0.01 * seconds
    assert abs(shown - seconds) <= 0.5 * smallest * (1 + 1e-9)
