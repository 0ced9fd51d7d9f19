"""The search is tested on curves of every shape, against an oracle that knows the whole curve."""

import functools
import math
import random

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from benchmarks.research import search_replay
from linnaeus.autobatch.search import (
    GRID_LIMIT,
    STRATEGIES,
    KernelLimit,
    OutOfMemory,
    TrialRecord,
    find_largest,
)

BUDGET = 10_000
CERTIFYING = ["guided", "binary", "binsearch"]
find = functools.partial(find_largest, budget_bytes=BUDGET, min_size=1, max_size=512)


class Device:
    """A `measure` that records its calls, refuses to run a size twice, and has a capacity."""

    def __init__(self, curve, capacity=math.inf):
        self.curve, self.capacity = curve, capacity
        self.peaks = {}

    def __call__(self, size):
        assert size not in self.peaks, f"{size} was measured twice"
        peak = self.curve(size)
        self.peaks[size] = peak if peak <= self.capacity else math.inf
        if peak > self.capacity:
            raise OutOfMemory
        return peak


def line(fixed, per_sample):
    return lambda size: fixed + per_sample * size


def sizes(result):
    return [trial.size for trial in result.trials]


def candidates_of(min_size, max_size, multiple_of):
    return [n for n in range(min_size, max_size + 1) if n < multiple_of or n % multiple_of == 0]


def check_honest(result, device, candidates, max_trials):
    """What holds for every search that does not stop before it has a proof, whatever the curve."""
    fitting = {size for size, peak in device.peaks.items() if peak <= BUDGET}
    assert sizes(result) == list(device.peaks)
    assert device.peaks.keys() <= set(candidates)
    assert len(result.trials) <= min(max_trials, 2 * math.log2(len(candidates)) + 3)
    for trial in result.trials:
        peak = device.peaks[trial.size]
        assert trial.peak_bytes == (None if peak == math.inf else peak)
        assert trial.status == ("oom" if peak == math.inf else "fits" if peak <= BUDGET else "over")
    assert result.size == max(fitting, default=None)
    if result.size == candidates[-1]:
        assert (result.certified, result.limited_by) == (True, "max_batch_size")
    else:
        following = candidates[0 if result.size is None else candidates.index(result.size) + 1]
        proved = following in device.peaks.keys() - fitting
        assert (result.certified, result.limited_by) == (
            proved,
            "memory" if proved else "max_trials",
        )
        assert proved or len(result.trials) == max_trials


# -- curves


@st.composite
def rising_curves(draw):
    """Never falls: a line, a power, stairs, plateaus or a jump of 4×."""
    fixed = draw(st.integers(0, BUDGET))
    slope = draw(st.sampled_from([0.01, 0.3, 1, 7, 60, 900, 20_000]))
    exponent = draw(st.sampled_from([0.3, 0.7, 1.5, 3]))
    at = draw(st.integers(1, 2000))
    curves = [
        lambda n: int(fixed + slope * n),
        lambda n: int(fixed + slope * n**exponent),
        lambda n: int(fixed + slope * at * (n // at)),
        lambda n: int(fixed + slope * max(n - at, 0)),
        lambda n: int((fixed + slope * n) * (4 if n >= at else 1)),
    ]
    return draw(st.sampled_from(curves))


@st.composite
def unruly_curves(draw):
    """Noise, dips, a falling curve, peaks around the budget only, or an answer that ignores the size."""
    curve = draw(rising_curves())
    rng = random.Random(draw(st.integers(0, 10**6)))
    peak = draw(st.sampled_from([0, BUDGET, BUDGET + 1, 10**15]))
    curves = [
        lambda n: int(curve(n) * rng.uniform(0.9, 1.1)),
        lambda n: int(curve(n) * (0.5 if n % 5 == 0 else 1)),
        lambda n: max(3 * BUDGET - curve(n), 0),
        lambda n: BUDGET + rng.choice([0, 0, 1]),
        lambda n: int(BUDGET * rng.lognormvariate(0, 1)),
        lambda n: peak,
    ]
    return draw(st.sampled_from(curves))


bounds = st.one_of(
    st.tuples(st.just(1), st.integers(1, 8192)),
    st.tuples(st.integers(1, 300), st.integers(0, 3000)).map(lambda pair: (pair[0], sum(pair))),
    st.integers(1, 500).map(lambda n: (n, n)),
)
capacities = st.sampled_from([BUDGET, 1.25 * BUDGET, math.inf])
starts = st.one_of(st.none(), st.integers(1, 9000))
strategies = st.sampled_from(sorted(STRATEGIES))


# -- properties


@given(
    curve=st.one_of(rising_curves(), unruly_curves()),
    capacity=capacities,
    bounds=bounds,
    multiple_of=st.sampled_from([1, 1, 2, 8, 32]),
    strategy=strategies,
    start=starts,
    max_trials=st.sampled_from([1, 2, 3, 5, 10, 25, 10**9]),
)
@example(line(0, 0), math.inf, (1, 1), 1, "guided", None, 10**9)
@example(line(BUDGET, 0), BUDGET, (1, 8192), 1, "guided", None, 10**9)
@example(line(2 * BUDGET, 0), BUDGET, (1, 8192), 1, "guided", None, 1)
def test_every_search_is_bounded_and_honest(
    curve, capacity, bounds, multiple_of, strategy, start, max_trials
):
    candidates = candidates_of(*bounds, multiple_of)
    assume(candidates)  # that there are none is an error in `test_messages.py`
    device = Device(curve, capacity)
    result = find(
        device,
        min_size=bounds[0],
        max_size=bounds[1],
        multiple_of=multiple_of,
        strategy=strategy,
        start=start,
        max_trials=max_trials,
    )
    if strategy == "power" and not result.certified:  # it stops before it has a proof, by design
        assert result.size == max(
            (n for n, peak in device.peaks.items() if peak <= BUDGET), default=None
        )
        assert len(result.trials) <= math.log2(bounds[1]) + 2
    else:
        check_honest(result, device, candidates, max_trials)


@given(
    curve=st.one_of(rising_curves(), unruly_curves()),
    budgets=st.lists(st.integers(-1, 2 * BUDGET), min_size=2, max_size=4),
    multiple_of=st.sampled_from([1, 8]),
    strategy=st.sampled_from(CERTIFYING),
    strict=st.booleans(),
    start=starts,
)
def test_known_trials_are_never_run_again(curve, budgets, multiple_of, strategy, strict, start):
    candidates = candidates_of(1, 2000, multiple_of)
    device = Device(curve)  # one device for all searches: it refuses to measure a size twice
    known = ()
    for old, budget in zip([0, *budgets], budgets, strict=False):
        known = tuple(trial for trial in known if trial.peak_bytes is not None or budget <= old)
        for size in device.peaks.keys() - {trial.size for trial in known}:
            del device.peaks[size]  # an out-of-memory event that a larger budget may not meet
        device.capacity = budget if strict else math.inf
        result = find(
            device,
            budget_bytes=budget,
            max_size=2000,
            multiple_of=multiple_of,
            strategy=strategy,
            start=start,
            max_trials=10**9,
            known=known,
        )
        known += result.trials
        fitting = [size for size, peak in device.peaks.items() if peak <= budget]
        assert result.size == max(fitting, default=None)
        assert result.certified
        if result.size != candidates[-1]:
            following = candidates[0 if result.size is None else candidates.index(result.size) + 1]
            assert device.peaks[following] > budget


# -- the guided strategy


def known_at(*sizes):
    """Trials of these sizes on the first of the curves below."""
    return [TrialRecord(size, "fits", 1000 + 40 * size, 1.0) for size in sizes]


@pytest.mark.parametrize(
    ("curve", "arguments", "size", "at_most"),
    [
        (line(1000, 40), {}, 225, 5),  # two probes, a guess and the proof
        (line(1000, 40), {"budget_bytes": 8000, "known": known_at(16, 56, 205)}, 175, 3),
        # peaks of sizes that are no candidates guide only
        (
            line(1000, 40),
            {"known": known_at(3, 100, 205, 600), "min_size": 8, "multiple_of": 8},
            224,
            3,
        ),
        # the model is too large for the first trial, and whatever does not fit leaves no peak
        (Device(line(1000, 4000), BUDGET), {}, 2, 5),
        (
            line(0, 1),
            {"budget_bytes": 10**8 + 3, "max_size": 10**9, "multiple_of": 8, "max_trials": 99},
            10**8,
            60,
        ),
        # a plateau just below the budget: every line says that the next size is the last
        (
            lambda n: BUDGET - 10 if n <= 4321 else 2 * BUDGET,
            {"max_size": 8192, "max_trials": 99},
            4321,
            35,
        ),
        # the line starts from the largest size that fits, even when a smaller one came closer to the budget
        (lambda n: 5300 if n <= 45 else 5250 + 20 * max(n - 96, 0), {}, 333, 8),
        # beside resident training state, as in a validation: the peak hardly grows at first
        (line(8500, 7), {"max_size": 2048}, 214, 11),
    ],
)
def test_a_guided_search_takes_few_trials(curve, arguments, size, at_most):
    result = find(curve, **arguments)
    assert (result.size, result.certified, result.limited_by) == (size, True, "memory")
    assert len(result.trials) <= at_most


def hundredths(fixed, linear, squared, largest):
    """Shares of a budget of 10⁹ at half a sample more than the largest size that fits."""
    shares = (fixed, linear, squared)
    return lambda n: int(sum(10**9 * s * (n / (largest + 0.5)) ** k for k, s in enumerate(shares)))


def chunked(chunk, largest):
    """Flat up to a chunk, then a parabola: GradCache."""
    beyond = hundredths(0.1, 0, 0.9, largest - chunk)
    return lambda n: beyond(max(n - chunk, 0))


@pytest.mark.parametrize("capacity", [10**9, math.inf])
@pytest.mark.parametrize(
    ("curve", "largest", "at_most"),
    [
        (hundredths(0.05, 0.02, 0.93, 3482), 3482, 7),  # similarities of all pairs
        (hundredths(0.85, 0.15, 0, 1000), 1000, 9),
        (chunked(128, 450), 450, 11),
    ],
)
def test_plateaus_and_parabolas_take_few_trials(curve, largest, at_most, capacity):
    device = Device(curve, capacity)
    result = find(device, budget_bytes=10**9, max_size=2**31, tolerance=0.01)
    assert largest / 1.01 <= result.size <= largest
    assert len(result.trials) <= at_most


def test_a_grid_limit_ends_the_search_and_is_named():
    def measure(size):
        if size > GRID_LIMIT:
            raise KernelLimit
        return 10**7 + 10**3 * size

    search = functools.partial(find, measure, max_size=2**31, tolerance=0.01)
    result = search(budget_bytes=10**9, multiple_of=8)
    assert result.size == GRID_LIMIT // 8 * 8
    assert result.limited_by == "kernel"
    assert {trial.status for trial in result.trials} == {"fits", "kernel"}
    assert len(result.trials) <= 7
    again = search(budget_bytes=10**9, known=result.trials)
    assert (again.limited_by, again.trials) == ("kernel", ())


def test_the_first_trial_is_small_whatever_the_bounds():
    for max_size in (1, 5, 16, 512, 10**9):
        assert sizes(find(line(0, BUDGET), max_size=max_size))[0] <= 16


# -- the other strategies


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("binary", [50, 25, 12, 6, 9, 10, 11]),
        ("power", [1, 2, 4, 8, 16]),
        ("binsearch", [1, 2, 4, 8, 16, 12, 10, 11]),
    ],
)
def test_the_plain_strategies_try_what_their_names_say(strategy, expected):
    result = find(line(0, 1), budget_bytes=10, max_size=100, strategy=strategy)
    assert sizes(result) == expected
    assert (result.size, result.certified) == ((8, False) if strategy == "power" else (10, True))
    assert result.limited_by == "memory"


# -- figures on measured curves


@pytest.mark.parametrize(
    ("mode", "mean", "p90"),
    [
        ("exact", 5.0, 6),
        ("start within 10 %", 3.4, 4),
        ("strict cap", 5.6, 7),
    ],
)
def test_figures_on_measured_curves(mode, mean, p90):
    curves = search_replay.read_curves(search_replay.CURVES)
    chosen = next(each for each in search_replay.MODES if each.name == mode)
    cases = search_replay.make_cases(curves, range(3), chosen)
    row = search_replay.summary([search_replay.replay(case, chosen, "guided") for case in cases])
    assert len(curves) > 400
    assert row["mean"] <= mean
    assert row["p90"] <= p90
    assert row["beyond"] <= 0.05
    assert row["fits"] == 1
    assert row["near_best"] >= 0.99


# -- tolerance


@pytest.mark.parametrize("strategy", CERTIFYING)
@given(
    curve=rising_curves(),
    tolerance=st.sampled_from([0, 0.001, 0.01, 0.05, 0.3, 0.99]),
    bounds=bounds,
    multiple_of=st.sampled_from([1, 8, 60]),
    capacity=capacities,
    start=starts,
)
def test_a_search_with_a_tolerance_ends_within_it(
    strategy, curve, tolerance, bounds, multiple_of, capacity, start
):
    device, candidates = Device(curve, capacity), candidates_of(*bounds, multiple_of)
    assume(candidates)
    result = find(
        device,
        min_size=bounds[0],
        max_size=bounds[1],
        multiple_of=multiple_of,
        strategy=strategy,
        tolerance=tolerance,
        start=start,
        max_trials=10**6,
    )
    largest = max((size for size in candidates if curve(size) <= BUDGET), default=None)
    assert len(result.trials) <= 2 * math.log2(len(candidates)) + 3
    if largest is None or result.size is None:
        assert (result.size, result.certified, result.within) == (largest, True, 0)
        return
    assert device.peaks[result.size] <= BUDGET
    assert largest <= result.size * (1 + result.within) * (1 + 1e-12)
    assert result.within <= tolerance * (1 + 1e-9)
    assert result.certified == (result.within == 0)
    if result.size == candidates[-1]:
        assert result.limited_by == "max_batch_size"
    else:
        assert result.limited_by == "memory"
        smallest_failure = min(size for size, peak in device.peaks.items() if peak > BUDGET)
        may_fit = candidates[candidates.index(smallest_failure) - 1]
        assert result.within == (may_fit - result.size) / result.size
