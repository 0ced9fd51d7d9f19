"""What a plan consists of so far, as objects and as plain data for files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from linnaeus.commands.plan import arithmetic


@dataclass(frozen=True)
class Goal:
    """What the run to come is.

    Attributes:
        num_samples: of the training data.
        epochs: passes over them.
        world_size: processes.
        noise_scale: gradient noise scale, in samples; None where nobody knows it.
        time_budget_s: seconds that the run may take.
    """

    num_samples: int
    epochs: int
    world_size: int = 1
    noise_scale: float | None = None
    time_budget_s: float | None = None


@dataclass(frozen=True)
class Row:
    """One size that was timed, and the run with it.

    Attributes:
        goal: what the run to come is.
        batch_size: samples per process and forward pass.
        accumulation_steps: forward passes per optimizer step.
        samples_per_s_each: of one process, as measured.
        learning_rate: the peak; None where the configuration allows no run of this size.
        warmup_steps, total_steps: optimizer steps.
        warnings: of the batch plan, or why there is none.
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
        """Over all processes, if they do not wait for each other."""
        return self.samples_per_s_each * self.goal.world_size

    @property
    def seconds_per_step(self) -> float:
        """Of one optimizer step."""
        return arithmetic.seconds_per_step(self.effective_batch_size, self.samples_per_s)

    @property
    def epoch_s(self) -> float:
        """Seconds of one epoch."""
        return arithmetic.seconds_per_epoch(self.goal.num_samples, self.samples_per_s)

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
        """Optimizer steps to the same loss as a multiple of the least possible; None without noise scale."""
        noise_scale = self.goal.noise_scale
        return (
            None if noise_scale is None else arithmetic.relative_steps(self.effective_batch_size, noise_scale)
        )

    @property
    def relative_samples(self) -> float | None:
        """Samples to the same loss per least possible step; None without a noise scale."""
        noise_scale = self.goal.noise_scale
        return (
            None
            if noise_scale is None
            else arithmetic.relative_samples(self.effective_batch_size, noise_scale)
        )

    @property
    def relative_seconds(self) -> float | None:
        """Seconds to the same loss per least possible step; None without a noise scale."""
        if self.goal.noise_scale is None:
            return None
        return arithmetic.relative_seconds(
            self.effective_batch_size, self.goal.noise_scale, self.seconds_per_step
        )


@dataclass
class Plan:
    """Everything measured so far; filled while it is measured, so that an interruption loses nothing.

    Attributes:
        goal: what the run to come is.
        tolerance: share of the best samples per second that a recommended size may miss.
        environment: where the figures hold.
        search: how the largest size was found, as in `autobatch.json`.
        rows: sizes that were timed, ascending.
        left_out: why a size that was asked for was not timed.
        interrupted: the measuring was cut short.
    """

    goal: Goal
    tolerance: float
    environment: dict[str, Any] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    left_out: dict[int, str] = field(default_factory=dict)
    interrupted: bool = False

    def choice(self) -> Choice:
        """The marked sizes among those timed; there must be one."""
        return Choice({row.batch_size: row for row in self.rows}, self.goal, self.tolerance)

    @property
    def columns(self) -> list[str]:
        """Of a table for programs."""
        return list(self.scalars()[0]) if self.rows else ["batch_size"]

    def scalars(self) -> list[dict[str, Any]]:
        """The rows of a table for programs."""
        if not self.rows:
            return []
        choice = self.choice()
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
                "relative_time": choice.relative_time(row),
                "learning_rate": row.learning_rate,
                "warmup_steps": row.warmup_steps,
                "total_steps": row.total_steps,
                "marks": " ".join(choice.marks(row)),
                "warnings": " ".join(row.warnings),
            }
            for row in self.rows
        ]

    def as_dict(self) -> dict[str, Any]:
        """The content of the JSON file."""
        goal = self.goal
        choice = self.choice() if self.rows else None
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
            "largest": choice and choice.largest,
            "fastest": choice and choice.fastest,
            "recommended": choice and choice.recommended,
            "sizes": sizes,
            "left_out": {str(size): reason for size, reason in self.left_out.items()},
            "search": self.search,
            "interrupted": self.interrupted,
        }


@dataclass(frozen=True)
class Choice:
    """Which of the timed sizes stand out.

    Attributes:
        rows: by size; at least one.
        goal: what the run to come is.
        tolerance: share of the best samples per second that may be missing.
    """

    rows: Mapping[int, Row]
    goal: Goal
    tolerance: float

    @property
    def largest(self) -> int:
        """The largest size timed."""
        return max(self.rows)

    @cached_property
    def fastest(self) -> int:
        """The size with the most samples per second."""
        return max(self.rows, key=lambda size: self.rows[size].samples_per_s)

    @cached_property
    def recommended(self) -> int:
        """The size with the least time to the same loss; without a noise scale the smallest fast one."""
        allowed = {size: row for size, row in self.rows.items() if row.learning_rate is not None}
        rows = allowed or self.rows
        times = {size: row.relative_seconds for size, row in rows.items() if row.relative_seconds is not None}
        if times:
            return arithmetic.least(times)
        return arithmetic.smallest_fast(
            {size: row.samples_per_s for size, row in rows.items()}, self.tolerance
        )

    def relative_time(self, row: Row) -> float | None:
        """Time to the same loss as a multiple of the recommended size's."""
        best = self.rows[self.recommended].relative_seconds
        return None if row.relative_seconds is None or best is None else row.relative_seconds / best

    def marks(self, row: Row) -> list[str]:
        """What a size is among all."""
        names = ("largest", "fastest", "recommended")
        return [name for name in names if getattr(self, name) == row.batch_size]
