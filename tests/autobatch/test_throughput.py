"""Which of the sizes that fit is fast enough, on curves of known shape and in real runs."""

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from linnaeus.autobatch.throughput import sizes_by_speed


class Device:
    """Steps of an overhead and a time per sample, with noise; remembers what it was asked."""

    def __init__(self, seconds, noise=0.0, seed=0):
        self.seconds, self.noise, self.random = seconds, noise, random.Random(seed)
        self.asked = []

    def __call__(self, size):
        self.asked.append(size)
        return [self.seconds(size) * (1 + abs(self.random.gauss(0, self.noise))) for _ in range(5)]


def line(overhead, per_sample):
    return lambda size: overhead + per_sample * size


def test_a_device_busy_with_few_samples_gets_a_small_size():
    device = Device(line(0.010, 0.001))
    fast, seconds = sizes_by_speed(device, range(1, 1025))
    best = max(size / second for size, second in seconds.items())
    exact = next(size for size in range(1, 1025) if size / device.seconds(size) >= 0.95 * best)
    assert exact <= fast[0] <= 1.1 * exact
    assert len(device.asked) <= 11


def test_a_fastest_size_below_the_largest_is_found():
    """As where the largest sizes fall back to a slow kernel."""
    device = Device(lambda n: 0.01 + 0.001 * n * (2 if n > 600 else 1))
    fast, _ = sizes_by_speed(device, range(1, 1025))
    assert 512 <= fast[-1] <= 600


def test_nothing_is_timed_after_the_deadline_but_the_first():
    device = Device(line(0.1, 0.001))
    fast, _ = sizes_by_speed(device, range(1, 1025), deadline_s=0.0)
    assert (fast, device.asked) == ([1024], [1024])


@given(
    st.integers(1, 5000),
    st.integers(1, 64),
    st.floats(0, 10),
    st.floats(1e-6, 1),
    st.floats(0, 0.2),
    st.integers(0, 99),
)
def test_any_curve_ends_with_a_size_that_was_timed(
    largest, multiple, overhead, per_sample, noise, seed
):
    candidates = sorted(
        {*range(1, min(multiple, largest)), *range(multiple, largest + 1, multiple)} or {1}
    )
    device = Device(line(overhead, per_sample), noise, seed)
    fast, seconds = sizes_by_speed(device, candidates)
    assert fast
    assert {*fast} <= {*seconds} <= {*candidates}
    best = max(size / second for size, second in seconds.items())
    assert all(size / seconds[size] >= 0.95 * best * (1 - 1e-9) for size in fast)
    assert len(device.asked) <= 6 * (math.log2(largest) + 5)
