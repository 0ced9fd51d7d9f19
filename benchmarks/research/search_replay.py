"""Replay every search strategy on measured memory curves; print how many trials it takes and what it finds.

    python benchmarks/research/search_replay.py [--curves FILE] [--seeds N]

A curve is the peak memory of one model's training step at a few batch sizes (rows of
`model,batch_size,memory_mib`; `benchmarks/data/README.md` names the source). Between the measured sizes the
curve is interpolated linearly; beyond them its first and last segments are extended, to no less than 1 MiB.
The result is multiplied by noise of 1 %, drawn once for each quarter octave of batch sizes. Each strategy
then searches the sizes from 1 to 8192 with a budget of 80 % of a GPU of 40,000 MiB. A trial that needs more
than the GPU has raises `OutOfMemory`.

The last rows are searches of as many lines, without noise, whose peaks jump by 8 % at a size drawn from
0.9 to 1 times the best one.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from linnaeus.autobatch.search import (
    STRATEGIES,
    OutOfMemory,
    SearchResult,
    find_largest,
)

CURVES = Path(__file__).parents[1] / "data" / "memory_curves.csv"
CAPACITY_MIB = 40_000
BUDGET_MIB = 0.8 * CAPACITY_MIB
MAX_SIZE = 8192
NOISE = 0.01
USABLE_MIB = (
    39_000  # rows above this come from runs that met the end of the GPU they were measured on
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
    """A curve to search, its best size (0: none fits), the size to start from."""

    curve: Curve | Line
    best: int
    start: int | None


@dataclass(frozen=True)
class Replay:
    """One search: its result, whether the size fits, size / best size, and trials beyond the GPU."""

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
    args = parser.parse_args(argv)
    if not args.curves.is_file():
        print(
            f"{args.curves}: no such file; name the measured peaks with --curves FILE",
            file=sys.stderr,
        )
        return 2
    curves = read_curves(args.curves)
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
