"""Which of the sizes that fit is fast enough, on curves of known shape."""

import math

from hypothesis import given
from hypothesis import strategies as st

from linnaeus.autobatch.search import Candidates
from linnaeus.autobatch.throughput import sizes_by_speed


class Device:
    """Times steps, one of them disturbed, and remembers what it was asked."""

    def __init__(self, seconds):
        self.seconds, self.asked = seconds, []

    def __call__(self, size):
        self.asked.append(size)
        return [*[self.seconds(size)] * 4, 100.0]


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


@given(st.integers(1, 5000), st.integers(1, 64), st.floats(0, 10), st.floats(1e-6, 1))
def test_any_curve_ends_with_a_size_that_was_timed(largest, multiple, overhead, per_sample):
    candidates = list(Candidates(1, largest, multiple))
    device = Device(line(overhead, per_sample))
    fast, seconds = sizes_by_speed(device, candidates)
    assert fast
    assert {*fast} <= {*seconds} <= {*candidates}
    assert len(device.asked) <= 6 * (math.log2(largest) + 5)
