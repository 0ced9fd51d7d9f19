"""The results of a plan, as objects and as plain data for files."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from linnaeus.autobatch.throughput import TOLERANCE
from linnaeus.cli.plan.arithmetic import relative_samples, relative_steps, smallest_fast
from linnaeus.cli.tables import Measurement


@dataclass(frozen=True)
class Goal:
    """The run that is planned.

    Attributes:
        num_samples: number of training samples.
        epochs: passes over them.
        world_size: number of processes.
        noise_scale: gradient noise scale, in samples; None where it is not known.
        time_budget_s: seconds that the run may take; None for no limit.
    """

    num_samples: int
    epochs: int
    world_size: int = 1
    noise_scale: float | None = None
    time_budget_s: float | None = None


@dataclass(frozen=True)
class Row:
    """One size that was timed, and the run with it. `S_min` is explained in `arithmetic`.

    Attributes:
        goal: the run that is planned.
        batch_size: micro-batch size: samples per process and forward pass.
        accumulation_steps: micro-batches per optimizer step.
        samples_per_s_each: measured speed of one process.
        learning_rate: its peak; None where the configuration allows no run with this size.
        warmup_steps, total_steps: optimizer steps; None where the learning rate is.
        warnings: those of the batch plan, or why there is none.
    """

    goal: Goal
    batch_size: int
    accumulation_steps: int
    samples_per_s_each: float
    learning_rate: float | None = None
    warmup_steps: int | None = None
    total_steps: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step over all processes."""
        return self.batch_size * self.accumulation_steps * self.goal.world_size

    @property
    def samples_per_s(self) -> float:
        """Speed of all processes, if they do not wait for each other."""
        return self.samples_per_s_each * self.goal.world_size

    @property
    def seconds_per_step(self) -> float:
        """Seconds of one optimizer step."""
        return self.effective_batch_size / self.samples_per_s

    @property
    def epoch_s(self) -> float:
        """Seconds of one epoch."""
        return self.goal.num_samples / self.samples_per_s

    @property
    def run_s(self) -> float:
        """Seconds of all epochs."""
        return self.epoch_s * self.goal.epochs

    @property
    def in_time(self) -> bool | None:
        """Whether the run ends within the time budget; None without one."""
        return None if self.goal.time_budget_s is None else self.run_s <= self.goal.time_budget_s

    @property
    def relative_steps(self) -> float | None:
        """Optimizer steps to the same loss, as a multiple of S_min; None without a noise scale."""
        scale = self.goal.noise_scale
        return None if scale is None else relative_steps(self.effective_batch_size, scale)

    @property
    def relative_samples(self) -> float | None:
        """Samples to the same loss, as a multiple of S_min; None without a noise scale."""
        scale = self.goal.noise_scale
        return None if scale is None else relative_samples(self.effective_batch_size, scale)

    @property
    def relative_seconds(self) -> float | None:
        """Seconds to the same loss, as a multiple of S_min; None without a noise scale."""
        return None if self.relative_steps is None else self.relative_steps * self.seconds_per_step


@dataclass
class Plan(Measurement):
    """Sizes with their times.

    Attributes:
        goal: the run that is planned.
        search: how the largest size was found, as in `autobatch.json`.
        rows: the sizes that were timed, ascending.
        left_out: why a size could not be timed, by size.
    """

    goal: Goal
    search: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    left_out: dict[int, str] = field(default_factory=dict)

    @property
    def largest(self) -> Row:
        """The row of the largest size. This and the properties below need at least one row."""
        return self.rows[-1]

    @property
    def fastest(self) -> Row:
        """The row with the most samples per second; of two as fast, the smaller size."""
        return max(self.rows, key=lambda row: row.samples_per_s)

    @property
    def recommended(self) -> Row:
        """The row with the least time to the same loss; without a noise scale, the smallest fast one."""
        rows = [row for row in self.rows if row.learning_rate is not None] or self.rows
        if self.goal.noise_scale is not None:
            return min(rows, key=lambda row: row.relative_seconds or math.inf)
        size = smallest_fast({row.batch_size: row.samples_per_s for row in rows}, TOLERANCE)
        return next(row for row in rows if row.batch_size == size)

    def relative_time(self, row: Row) -> float | None:
        """Time to the same loss as a multiple of the recommended size's; None without a noise scale."""
        best = self.recommended.relative_seconds
        return None if row.relative_seconds is None or best is None else row.relative_seconds / best

    def marks(self, row: Row) -> list[str]:
        """Which of the three a row is."""
        return [name for name in ("largest", "fastest", "recommended") if getattr(self, name) is row]

    @property
    def columns(self) -> list[str]:
        """Columns of the table."""
        return super().columns if self.rows else ["batch_size"]

    def scalars(self) -> list[dict[str, Any]]:
        """Rows of the table."""
        return [
            {
                "batch_size": row.batch_size,
                "accumulation_steps": row.accumulation_steps,
                "effective_batch": row.effective_batch_size,
                "samples_per_s": round(row.samples_per_s, 3),
                "seconds_per_step": row.seconds_per_step,
                "epoch_s": row.epoch_s,
                "run_s": row.run_s,
                "in_time": row.in_time,
                "relative_steps": row.relative_steps,
                "relative_samples": row.relative_samples,
                "relative_time": self.relative_time(row),
                "learning_rate": row.learning_rate,
                "warmup_steps": row.warmup_steps,
                "total_steps": row.total_steps,
                "marks": " ".join(self.marks(row)),
                "warnings": " ".join(row.warnings),
            }
            for row in self.rows
        ]

    def as_dict(self) -> dict[str, Any]:
        """Content of the JSON file."""
        goal = self.goal
        sizes = [
            {**fields, "marks": fields["marks"].split(), "warnings": list(row.warnings)}
            for fields, row in zip(self.scalars(), self.rows, strict=True)
        ]
        return {
            "environment": self.environment,
            "dataset_length": goal.num_samples,
            "epochs": goal.epochs,
            "world_size": goal.world_size,
            "noise_scale": goal.noise_scale,
            "time_budget_s": goal.time_budget_s,
            "largest": self.largest.batch_size if self.rows else None,
            "fastest": self.fastest.batch_size if self.rows else None,
            "recommended": self.recommended.batch_size if self.rows else None,
            "sizes": sizes,
            "left_out": {str(size): reason for size, reason in self.left_out.items()},
            "search": self.search,
            "interrupted": self.interrupted,
        }
