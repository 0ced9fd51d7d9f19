"""Replay every search strategy on measured memory curves; print how many trials it takes and what it finds.

    python benchmarks/search_replay.py [--curves FILE] [--seeds N] [--predict] [--models N] [--seed S]

A curve is the peak memory of one model's training step at a few batch sizes (rows of
`model,batch_size,memory_mib`; `benchmarks/data/README.md` names the source). Between the measured sizes the
curve is interpolated linearly; beyond them its first and last segments are extended, to no less than 1 MiB.
The result is multiplied by noise of 1 %, drawn once for each quarter octave of batch sizes. Each strategy
then searches the sizes from 1 to 8192 with a budget of 80 % of a card of 40,000 MiB. A trial that needs more
than the card has raises `OutOfMemory`.

The last rows are searches of as many lines, without noise, whose peaks jump by 8 % at a size drawn from
0.9 to 1 times the best one.

With `--predict`, the guided search starts from what traces of each model predict
(`benchmarks/prediction_accuracy.py`), beside the same search without it: at the size that is to need the
budget, and with a strict cap, which is what a search meets on CUDA, at the size that starts a search there.
"""

from __future__ import annotations

import argparse
import bisect
import csv
import math
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from linnaeus.autobatch.predicted import START_FRACTION
from linnaeus.autobatch.search import (
    STRATEGIES,
    OutOfMemory,
    PredictedPoint,
    SearchResult,
    find_largest,
)

CURVES = Path(__file__).parent / "data" / "memory_curves.csv"
CAPACITY_MIB = 40_000
BUDGET_MIB = 0.8 * CAPACITY_MIB
MAX_SIZE = 8192
NOISE = 0.01
USABLE_MIB = (
    39_000  # rows above this come from runs that met the end of the card they were measured on
)
MIB = 2**20

HEADER = (
    f"{'':<19}{'strategy':<11}  mean  p50  p90  max   beyond     fits  certified    ratio    >=99 %"
)
LEGEND = """\
mean, p50, p90, max: trials per search
beyond: trials per search that need more memory than the card has
fits: searches that return a size within the budget
certified: searches that also tried the next larger candidate, which did not fit
ratio: size found / best size, the largest up to which every size fits; mean over the searches
>=99 %: searches with a ratio of at least 0.99"""

Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Mode:
    name: str
    multiple_of: int = 1
    hint: float | None = None  # the search starts within this fraction of the best size
    strict: bool = False  # every size above the budget raises OutOfMemory
    tolerance: float = 0.0


MODES = (
    Mode("exact"),
    Mode("multiple of 8", multiple_of=8),
    Mode("start within 10 %", hint=0.1),
    Mode("strict cap", strict=True),
)
JUMP = 0.08
JUMP_MODES = (
    Mode("jump"),
    Mode("jump, 0.01", tolerance=0.01),
    Mode("jump, strict", strict=True),
)
PREDICTED_MODES = (
    Mode("exact"),
    Mode("multiple of 8", multiple_of=8),
    Mode("tolerance 0.01", tolerance=0.01),
    Mode("strict cap", strict=True),
)
"""The last is what a trial meets on CUDA, where the allocator refuses what is above the budget."""


@dataclass(frozen=True)
class Curve:
    """Peak memory in bytes by batch size: a model's measured points with one draw of noise."""

    points: Points
    noise: Sequence[float]

    def __call__(self, size: int) -> int:
        right = next((i for i, (n, _) in enumerate(self.points) if n >= size), len(self.points) - 1)
        right = max(right, 1)
        (n0, mib0), (n1, mib1) = self.points[right - 1 : right + 1]
        mib = mib0 + (mib1 - mib0) * (size - n0) / (n1 - n0)
        return int(max(mib, 1) * self.noise[int(4 * math.log2(size))] * MIB)


@dataclass(frozen=True)
class Line:
    """A line that jumps at one size: peak memory in bytes by batch size."""

    fixed: float
    per_sample: float
    jumps_at: int

    def __call__(self, size: int) -> int:
        return int((self.fixed + self.per_sample * size) * (1 + JUMP * (size >= self.jumps_at)))


@dataclass(frozen=True)
class Case:
    """A curve to search, its best size (0: none fits), the size to start from, or what is predicted."""

    curve: Curve | Line
    best: int
    start: int | None
    predicted: PredictedPoint | None = None


@dataclass(frozen=True)
class Replay:
    """One search: its result, whether the size fits, size / best size, and trials beyond the card."""

    result: SearchResult
    fits: bool
    ratio: float
    num_beyond: int


def read_curves(path: Path) -> dict[str, Points]:
    """Each model's points up to the first that is too large or does not grow; models with two or more."""
    curves: dict[str, Points] = {}
    ended: set[str] = set()
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            model, size, mib = row["model"], int(row["batch_size"]), float(row["memory_mib"])
            points = curves.setdefault(model, [])
            if mib > USABLE_MIB or (points and mib <= points[-1][1]):
                ended.add(model)
            if model not in ended:
                points.append((size, mib))
    return {model: points for model, points in curves.items() if len(points) >= 2}


def with_noise(model: str, points: Points, seed: int) -> Curve:
    rng = random.Random(f"{model}/{seed}")
    return Curve(points, [1 + rng.gauss(0, NOISE) for _ in range(4 * MAX_SIZE.bit_length())])


def best_size(curve: Callable[[int], int], multiple_of: int) -> int:
    best = 0
    for size in (*range(1, multiple_of), *range(multiple_of, MAX_SIZE + 1, multiple_of)):
        if curve(size) > BUDGET_MIB * MIB:
            break
        best = size
    return best


def make_cases(curves: dict[str, Points], seeds: Sequence[int], mode: Mode) -> list[Case]:
    cases = []
    for seed in seeds:
        for model, points in curves.items():
            curve = with_noise(model, points, seed)
            best = best_size(curve, mode.multiple_of)
            off = random.Random(f"start/{model}/{seed}").uniform(-1, 1)
            start = None if mode.hint is None else max(1, round(best * (1 + mode.hint * off)))
            cases.append(Case(curve, best, start))
    return cases


def jump_cases(number: int) -> list[Case]:
    cases, rng, budget = [], random.Random("jump"), BUDGET_MIB * MIB
    for _ in range(number):
        best, fixed = int(2 ** rng.uniform(4, 11)), budget * rng.uniform(0.02, 0.3)
        line = Line(fixed, (budget - fixed) / (best + 0.5), max(2, int(best * rng.uniform(0.9, 1))))
        cases.append(Case(line, best_size(line, 1), None))
    return cases


def replay(case: Case, mode: Mode, strategy: str) -> Replay:
    num_beyond = 0

    def measure(size: int) -> int:
        nonlocal num_beyond
        peak = case.curve(size)
        num_beyond += peak > CAPACITY_MIB * MIB
        if peak > (BUDGET_MIB if mode.strict else CAPACITY_MIB) * MIB:
            raise OutOfMemory
        return peak

    result = find_largest(
        measure,
        budget_bytes=int(BUDGET_MIB * MIB),
        min_size=1,
        max_size=MAX_SIZE,
        multiple_of=mode.multiple_of,
        strategy=strategy,
        tolerance=mode.tolerance,
        start=case.start,
        predicted=case.predicted,
    )
    fits = case.best == 0 if result.size is None else case.curve(result.size) <= BUDGET_MIB * MIB
    ratio = (result.size or 0) / case.best if case.best else 1.0
    return Replay(result, fits, ratio, num_beyond)


def percentile(values: Sequence[int], fraction: float) -> int:
    return sorted(values)[math.ceil(fraction * len(values)) - 1]


def summary(runs: Sequence[Replay]) -> dict[str, float]:
    """Compute the columns of the table."""
    trials = [len(run.result.trials) for run in runs]

    def mean(value: Callable[[Replay], float]) -> float:
        return sum(map(value, runs)) / len(runs)

    return {
        "mean": sum(trials) / len(trials),
        "p50": percentile(trials, 0.5),
        "p90": percentile(trials, 0.9),
        "max": max(trials),
        "beyond": mean(lambda run: run.num_beyond),
        "fits": mean(lambda run: run.fits),
        "certified": mean(lambda run: run.result.certified),
        "ratio": mean(lambda run: run.ratio),
        "near_best": mean(lambda run: run.ratio >= 0.99),
    }


@dataclass(frozen=True)
class Starts:
    """Where a search starts: at the size that is predicted to need the budget, or a fraction of it."""

    whole: PredictedPoint
    below: PredictedPoint

    def of(self, mode: Mode) -> PredictedPoint:
        """Below, where a size above the budget leaves no peak, as on CUDA."""
        return self.below if mode.strict else self.whole


def predicted_starts(model: str) -> Starts | None:
    """The prediction for a model; None where its step cannot be traced."""
    from prediction_accuracy import BASE_BYTES, predicted_mib, traces_of

    from linnaeus.autobatch.predict.allocator import AllocatorSettings
    from linnaeus.autobatch.predict.prediction import Prediction
    from linnaeus.autobatch.predict.trace import UntraceableError

    warnings.simplefilter("ignore")
    try:
        num_elements, traces = traces_of(model)
        prediction = Prediction.of(*traces, base_bytes=BASE_BYTES, settings=AllocatorSettings())
    except (UntraceableError, RuntimeError):
        return None

    def needed_mib(size: int) -> float:
        return predicted_mib(prediction, size, num_elements)

    def point(mib: float) -> PredictedPoint:
        size = max(1, bisect.bisect_right(range(1, MAX_SIZE + 1), mib, key=needed_mib))
        slope_mib = (needed_mib(2 * size) - needed_mib(size)) / size
        return PredictedPoint(size, needed_mib(size) * MIB, slope_mib * MIB)

    return Starts(point(BUDGET_MIB), point(START_FRACTION * BUDGET_MIB))


def print_predicted(curves: dict[str, Points], seeds: Sequence[int], jobs: int) -> None:
    """The guided search of each model with and without its prediction."""
    with ProcessPoolExecutor(jobs) as pool:
        found = dict(zip(curves, pool.map(predicted_starts, curves), strict=True))
    starts = {model: start for model, start in found.items() if start is not None}
    print(f"{len(starts)} of {len(curves)} models predicted, {len(seeds)} draws of noise each\n")
    print(HEADER)
    for mode in PREDICTED_MODES:
        models = [model for _ in seeds for model in curves]
        alone = make_cases(curves, seeds, mode)
        predicted = [
            replace(case, predicted=starts[model].of(mode)) if model in starts else case
            for model, case in zip(models, alone, strict=True)
        ]
        runs = {
            name: [replay(case, mode, "guided") for case in cases]
            for name, cases in (("alone", alone), ("predicted", predicted))
        }
        for name, each in runs.items():
            print(line(mode, name, summary(each)))
        longer = Counter(
            len(one.result.trials) - len(other.result.trials)
            for one, other in zip(runs["predicted"], runs["alone"], strict=True)
        )
        share = sum(count for more, count in longer.items() if more > 1) / len(alone)
        print(f"{'':<19}longer by more than one trial: {share:.1%}, by {max(longer)} at most")


def line(mode: Mode, strategy: str, row: dict[str, float]) -> str:
    counts = (
        f"{row['mean']:6.2f}{row['p50']:5.0f}{row['p90']:5.0f}{row['max']:5.0f}{row['beyond']:9.3f}"
    )
    fractions = (
        f"{row['fits']:9.1%}{row['certified']:11.1%}{row['ratio']:9.3f}{row['near_best']:10.1%}"
    )
    return f"{mode.name:<19}{strategy:<11}{counts}{fractions}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Replay the search strategies on measured memory curves."
    )
    parser.add_argument("--curves", type=Path, default=CURVES, help="CSV of measured peaks")
    parser.add_argument("--seeds", type=int, default=10, help="draws of noise for each curve")
    parser.add_argument("--predict", action="store_true", help="start from a prediction")
    parser.add_argument("--models", type=int, help="so many models, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of that draw")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that predict")
    args = parser.parse_args(argv)
    if not args.curves.is_file():
        print(
            f"{args.curves}: no such file; name the measured peaks with --curves FILE",
            file=sys.stderr,
        )
        return 2
    curves = read_curves(args.curves)
    if args.models is not None and args.models < len(curves):
        chosen = random.Random(args.seed).sample(sorted(curves), args.models)
        curves = {model: curves[model] for model in chosen}
    if args.predict:
        print_predicted(curves, range(args.seeds), args.jobs)
        print(f"\n{LEGEND}")
        return 0
    print(f"{len(curves)} curves, {args.seeds} draws of noise each\n")
    print(HEADER)
    for mode in MODES:
        cases = make_cases(curves, range(args.seeds), mode)
        for strategy in STRATEGIES:
            print(line(mode, strategy, summary([replay(case, mode, strategy) for case in cases])))
    cases = jump_cases(len(curves))
    for mode in JUMP_MODES:
        print(line(mode, "guided", summary([replay(case, mode, "guided") for case in cases])))
    print(f"\n{LEGEND}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
