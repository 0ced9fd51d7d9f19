"""Fit the constants of `linnaeus.autobatch.predict.workspace` and of `prediction_accuracy.py`; print them.

    python benchmarks/fit_workspaces.py [--curves FILE] [--every N] [--jobs J]

Every Nth model of the part `fit` is traced once. Then each constant in turn is moved by its step, for as
long as that lowers the loss: the mean of the absolute relative errors, where an error above 20 % counts as
20 %, so that spikes of cuDNN's do not draw the fit. Two rounds over all constants are made.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import prediction_accuracy as accuracy
from prediction_accuracy import is_fitted, predicted_mib, traces_of
from search_replay import CURVES, Points, read_curves

from linnaeus.autobatch.predict import workspace
from linnaeus.autobatch.predict.allocator import MIB, AllocatorSettings
from linnaeus.autobatch.predict.prediction import Prediction
from linnaeus.autobatch.predict.trace import Trace, UntraceableError

LARGEST_ERROR = 0.2
LEAST_GAIN = 1e-4
Traced = tuple[Points, int, tuple[Trace, Trace]]


def traced(name: str, points: Points) -> Traced | None:
    warnings.simplefilter("ignore")
    try:
        return points, *traces_of(name)
    except (UntraceableError, RuntimeError):
        return None


def loss(models: Sequence[Traced]) -> float:
    errors = []
    for points, elements, (first, second) in models:
        base_bytes = accuracy.BASE_BYTES
        prediction = Prediction.of(first, second, base_bytes=base_bytes, settings=AllocatorSettings())
        errors += [abs(predicted_mib(prediction, n, elements) / mib - 1) for n, mib in points]
    return sum(min(error, LARGEST_ERROR) for error in errors) / len(errors)


def constants() -> dict[str, tuple[float, float, Callable[[float], None]]]:
    """Present value, step, and what sets another value, by name."""

    def factor(kind: str) -> Callable[[float], None]:
        return lambda value: workspace.GRADIENT_FACTORS.update({kind: value})

    return {
        "base": (
            accuracy.BASE_BYTES, 50 * MIB, lambda value: setattr(accuracy, "BASE_BYTES", int(value)),
        ),
        "loaded batches": (
            accuracy.LOADED_BATCHES, 0.5, lambda value: setattr(accuracy, "LOADED_BATCHES", value),
        ),
        "weight": (workspace.WEIGHT_FACTOR, 0.5, lambda value: setattr(workspace, "WEIGHT_FACTOR", value)),
        **{kind: (value, 0.25, factor(kind)) for kind, value in workspace.GRADIENT_FACTORS.items()},
    }  # fmt: skip


def descend(models: Sequence[Traced], name: str, best: float) -> float:
    """Move one constant up, or else down, for as long as the loss falls; return the loss."""
    value, step, set_to = constants()[name]
    for direction in (step, -step):
        moved = False
        while value + direction >= 0:
            set_to(value + direction)
            found = loss(models)
            if found > best - LEAST_GAIN:
                break
            best, value, moved = found, value + direction, True
        set_to(value)
        if moved:
            break
    return best


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--curves", type=Path, default=CURVES)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    curves = read_curves(options.curves)
    names = [name for name in sorted(curves) if is_fitted(name)][:: options.every]
    with ProcessPoolExecutor(options.jobs) as pool:
        found = list(pool.map(traced, names, [curves[name] for name in names]))
    models = [model for model in found if model is not None]
    best = loss(models)
    print(f"{len(models)} models, loss {best:.4f}")
    for _ in range(2):
        for name in constants():
            best = descend(models, name, best)
            print(f"{name:<20}{constants()[name][0]:>14,.2f}   loss {best:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
