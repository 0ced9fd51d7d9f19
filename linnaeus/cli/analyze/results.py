"""The results of an analysis, as objects and as plain data for files.

How many optimizer steps and samples it takes to reach some loss at batch size B follows from the gradient
noise scale B_noise, in samples: McCandlish, Kaplan, Amodei et al., An Empirical Model of Large-Batch Training
(2018), section 2. Between the least possible steps S_min (at B -> infinity) and the least possible samples
E_min (at B -> 0) they find (S / S_min - 1)(E / E_min - 1) = 1. With E = B S and B_noise = E_min / S_min that
is S = S_min (1 + B_noise / B) and E = S_min (B + B_noise). The figures here are multiples of S_min. It is the
same for all sizes, so that sizes can be compared although S_min is not known.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.search import TrialRecord
from linnaeus.autobatch.throughput import fast_sizes
from linnaeus.cli.tables import Figures
from linnaeus.training.out_of_memory import StateBytes


@dataclass
class Breakdown(StateBytes):
    """The parts of a peak, in bytes; they add up to it.

    Attributes:
        activations: the peak less all other parts: activations, the batch, workspaces of kernels.
        rest: all else that the process holds between steps: runtime and libraries on the CPU, workspaces and
            rounding of the caching allocator on an accelerator.
    """

    activations: int = 0
    rest: int = 0


@dataclass(frozen=True)
class Remedy:
    """The effect of one change of the configuration on the memory of one size.

    Attributes:
        keys: the changed keys and their new values.
        batch_size: micro-batch size with the change.
        peak_bytes_before: peak without the change, measured like the one with it.
        peak_bytes: peak with the change; None when it was skipped or did not fit.
        reason: why there is no peak.
        safe_batch_size: with the change, the largest micro-batch size predicted to fit with the margin; None
            where it was measured, or none fits.
    """

    keys: dict[str, Any]
    batch_size: int
    peak_bytes_before: int | None = None
    peak_bytes: int | None = None
    samples_per_s: float | None = None
    reason: str | None = None
    safe_batch_size: int | None = None

    @property
    def saved_bytes(self) -> int | None:
        """Reduction of the peak; negative when it is higher."""
        if self.peak_bytes is None or self.peak_bytes_before is None:
            return None
        return self.peak_bytes_before - self.peak_bytes


@dataclass
class Row:
    """One mode at one fraction of the memory.

    Attributes:
        batch_size: the largest size that fits; None when none was found.
        certified: whether the next candidate ran and did not fit, or there is none.
        limited_by: as in `AutoBatchResult`, and `interrupted`.
        peak_bytes: peak of a trial at that size; if predicted, that of the device, with its base.
        budget_bytes: bytes that the process may hold; if predicted, bytes of the device that may be in use.
        samples_per_s: speed of one process at that size.
        trials: those run for this row; sizes measured for earlier rows are not repeated.
        reason: why there is no size.
        remedies: at that size, with `--remedies`.
        device: GPU that the row is predicted for, or its memory, such as `24 GiB`; empty if measured.
        base_bytes: in use on that device beside the allocator.
        safe_batch_size: the largest size that is predicted to run with the margin; None when there is none.
    """

    mode: Mode
    memory_fraction: float
    batch_size: int | None = None
    certified: bool = False
    limited_by: str | None = None
    peak_bytes: int | None = None
    budget_bytes: int | None = None
    samples_per_s: float | None = None
    trials: tuple[TrialRecord, ...] = ()
    reason: str | None = None
    breakdown: Breakdown | None = None
    remedies: list[Remedy] = field(default_factory=list)
    device: str = ""
    device_bytes: int = 0
    base_bytes: int = 0
    safe_batch_size: int | None = None

    @property
    def memory(self) -> str:
        """The fraction and of what: `90%`, or `90% of rtx-4090`."""
        return f"{self.memory_fraction:.0%}" + (f" of {self.device}" if self.device else "")

    def figures(self) -> dict[str, Any]:
        """The entries that all files have."""
        lists = {"trials", "breakdown", "remedies"}
        predicted = (
            set() if self.device else {"device", "device_bytes", "base_bytes", "safe_batch_size"}
        )
        return {name: value for name, value in vars(self).items() if name not in lists | predicted}

    def as_dict(self) -> dict[str, Any]:
        """The entry of the JSON file."""
        return {
            **self.figures(),
            "trials": [trial.as_dict() for trial in self.trials],
            "breakdown": None if self.breakdown is None else asdict(self.breakdown),
            "remedies": [
                {**asdict(each), "saved_bytes": each.saved_bytes} for each in self.remedies
            ],
        }


@dataclass(frozen=True)
class Goal:
    """The run whose time is predicted; the gradient noise scale counts samples."""

    dataset_length: int
    epochs: int
    world_size: int = 1
    noise_scale: float | None = None
    time_budget_s: float | None = None


@dataclass(frozen=True)
class TimedSize:
    """A training size with its speed and the run with it. The module explains S_min.

    Attributes:
        batch_size: micro-batch size: samples per process and forward pass.
        samples_per_s: of all processes, if they do not wait for each other.
        effective_batch: samples per optimizer step over all processes.
        seconds_per_step: of one optimizer step.
        in_time: whether the run ends within the time budget; None without one.
        relative_steps, relative_seconds: to the same loss, as multiples of S_min; None without a noise scale.
        learning_rate: its peak; None where the configuration allows no run with this size.
        warmup_steps, total_steps: optimizer steps; None where the learning rate is.
        warnings: those of the batch plan, or why there is none.
    """

    batch_size: int
    samples_per_s: float
    accumulation_steps: int
    effective_batch: int
    seconds_per_step: float
    epoch_s: float
    run_s: float
    in_time: bool | None = None
    relative_steps: float | None = None
    relative_seconds: float | None = None
    learning_rate: float | None = None
    warmup_steps: int | None = None
    total_steps: int | None = None
    warnings: tuple[str, ...] = ()


def timed_size(
    batch_size: int, rate: float, goal: Goal, accumulation_steps: int = 1, **plan: Any
) -> TimedSize:
    """What follows from the speed of a training size.

    >>> size = timed_size(100, 200.0, Goal(50_000, epochs=2, noise_scale=300))
    >>> size.seconds_per_step, size.epoch_s, size.relative_steps, size.relative_seconds
    (0.5, 250.0, 4.0, 2.0)

    `batch_size` is that of a micro-batch, `rate` counts samples per second of one process, and `plan` has the
    attributes that the batch plan gives.
    """
    rate *= goal.world_size
    batch = batch_size * accumulation_steps * goal.world_size
    epoch_s = goal.dataset_length / rate
    run_s = epoch_s * goal.epochs
    scale, limit_s = goal.noise_scale, goal.time_budget_s
    return TimedSize(
        batch_size,
        rate,
        accumulation_steps,
        batch,
        batch / rate,
        epoch_s,
        run_s,
        in_time=None if limit_s is None else run_s <= limit_s,
        relative_steps=None if scale is None else 1 + scale / batch,
        relative_seconds=None if scale is None else (batch + scale) / rate,
        **plan,
    )


@dataclass
class Speeds:
    """The training sizes that were timed, and why others were not; choosing among them needs at least one."""

    sizes: dict[int, TimedSize] = field(default_factory=dict)
    left_out: dict[int, str] = field(default_factory=dict)

    def ascending(self) -> list[TimedSize]:
        """The sizes in order."""
        return [self.sizes[size] for size in sorted(self.sizes)]

    @property
    def largest(self) -> TimedSize:
        """The size with the most samples."""
        return self.sizes[max(self.sizes)]

    @property
    def fastest(self) -> TimedSize:
        """The size with the most samples per second; of two as fast, the smaller."""
        return max(self.ascending(), key=lambda size: size.samples_per_s)

    @property
    def recommended(self) -> TimedSize:
        """The size with the least time to the same loss; without a noise scale, the smallest fast one.

        Sizes with which the configuration allows no run, or none in time, count where there are no others.
        """
        sizes = self.ascending()
        sizes = [each for each in sizes if each.learning_rate is not None] or sizes
        sizes = [each for each in sizes if each.in_time is not False] or sizes
        if sizes[0].relative_seconds is not None:
            return min(sizes, key=lambda each: each.relative_seconds or math.inf)
        return self.sizes[fast_sizes({each.batch_size: each.samples_per_s for each in sizes})[0]]

    def figures(self, size: TimedSize) -> dict[str, Any]:
        """The entries of a size in all files."""
        figures = asdict(size)
        best, seconds = self.recommended.relative_seconds, figures.pop("relative_seconds")
        marks = (
            mark for mark in ("largest", "fastest", "recommended") if getattr(self, mark) is size
        )
        return {
            **figures,
            "relative_time": None if best is None or seconds is None else seconds / best,
            "marks": " ".join(marks),
        }

    def as_dict(self) -> dict[str, Any]:
        """The entry of the JSON file."""
        return {
            **{
                mark: getattr(self, mark).batch_size
                for mark in ("largest", "fastest", "recommended")
            },
            "timings": [self.figures(each) for each in self.ascending()],
            "left_out": {str(size): reason for size, reason in self.left_out.items()},
        }


@dataclass
class Analysis(Figures):
    """Sizes and speeds; filled while they are measured, so that an interruption loses nothing.

    Attributes:
        environment: where the figures hold; empty until there is something to measure.
        interrupted: whether Ctrl-C or an error ended the measuring early.
        fraction: that of the sizes to paste, where it is among those asked for.
        rows: in the order measured.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = True
    fraction: float = 0.8
    rows: list[Row] = field(default_factory=list)
    speeds: Speeds = field(default_factory=Speeds)
    goal: Goal | None = None

    @property
    def is_predicted(self) -> bool:
        """Whether the sizes were predicted and not measured."""
        return any(row.device for row in self.rows)

    @property
    def modes(self) -> list[Mode]:
        """Those with rows, in order."""
        return list(dict.fromkeys(row.mode for row in self.rows))

    @property
    def reasons(self) -> list[str]:
        """Why there is no size: for each mode and device at the largest fraction where nothing fits."""
        found: dict[tuple[Mode, str], str] = {}
        for row in self.rows:  # of each mode, the largest fraction comes first
            if row.reason is not None:
                found.setdefault((row.mode, row.device), row.reason)
        return list(dict.fromkeys(found.values()))

    def sorted_rows(self) -> list[Row]:
        """The rows by mode and device, each in the order asked for, and fraction."""
        places = [(row.mode, row.device) for row in self.rows]
        return sorted(
            self.rows, key=lambda row: (places.index((row.mode, row.device)), row.memory_fraction)
        )

    def chosen_rows(self) -> list[Row]:
        """Of each mode and device, the row of the fraction to paste: `fraction`, else the largest."""
        fractions = {row.memory_fraction for row in self.rows}
        fraction = (
            self.fraction if self.fraction in fractions else max(fractions, default=self.fraction)
        )
        return [row for row in self.sorted_rows() if row.memory_fraction == fraction]

    def scalars(self) -> list[dict[str, Any]]:
        """One row for each mode and fraction, and one for each other size that was timed."""
        rows = []
        for row in self.sorted_rows():
            parts = asdict(row.breakdown or Breakdown())
            sizes = {
                f"{name}_bytes": row.breakdown and num_bytes for name, num_bytes in parts.items()
            }
            rows.append({**row.figures(), "num_trials": len(row.trials), **sizes})
        for size in self.speeds.ascending():
            cells = {
                "mode": "train",
                **self.speeds.figures(size),
                "warnings": " ".join(size.warnings),
            }
            same = [
                each
                for each in rows
                if (each["mode"], each["batch_size"]) == ("train", size.batch_size)
            ]
            for each in same:
                each.update(cells)
            if not same:
                rows.append(cells)
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Content of the JSON file."""
        return {
            "environment": self.environment,
            "results": [row.as_dict() for row in self.sorted_rows()],
            **({} if self.goal is None else {"run": asdict(self.goal)}),
            **({"throughput": {"train": self.speeds.as_dict()}} if self.speeds.sizes else {}),
            "interrupted": self.interrupted,
        }
