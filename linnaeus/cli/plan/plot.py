"""The picture of a plan: speed, and time to the same loss or of the run, against batch size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from linnaeus.cli.duration import UNITS, show_duration
from linnaeus.cli.picture import BLUE, VERMILION, Picture, decorate, drawing, mark_size, size_axis
from linnaeus.cli.plan.results import Plan
from linnaeus.words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = (
    "batch_size", "effective_batch", "samples_per_s", "epoch_s", "run_s", "in_time", "relative_steps",
    "relative_time", "learning_rate", "marks",
)  # fmt: skip


def save_plot(plan: Plan, path: Path) -> None:
    """Draw the picture and write it, atomically, in the format that the ending names."""
    with drawing(path, _headline(plan), plan, COLUMNS) as picture:
        [[left, right]] = picture.panels
        speeds = [(row.batch_size, row.samples_per_s) for row in plan.rows]
        picture.speeds(left, speeds, title="throughput")
        if plan.goal.noise_scale is None:
            _run_panel(picture, right, plan)
        else:
            _loss_panel(picture, right, plan)
        if plan.rows:
            size, largest = plan.recommended.batch_size, plan.largest.batch_size
            for axes in (left, right):
                size_axis(axes, [row.batch_size for row in plan.rows])
                axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
                mark_size(axes, size, f"recommended: {size}", text_on_the_right=size < largest)


def _headline(plan: Plan) -> str:
    goal = plan.goal
    processes = "" if goal.world_size == 1 else f", {goal.world_size} processes"
    noise = "" if goal.noise_scale is None else f", noise scale {goal.noise_scale:g}"
    model = plan.environment.get("model", "")
    return f"{model}: {counted(goal.epochs, 'epoch')} of {goal.num_samples:,} samples{processes}{noise}"


def _run_panel(picture: Picture, axes: Axes, plan: Plan) -> None:
    """Time of the run, and the time budget."""
    longest = max([row.run_s for row in plan.rows], default=1.0)
    unit = next(unit for unit in ("d", "h", "m", "s") if unit == "s" or longest >= 2 * UNITS[unit])
    name = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}[unit]
    decorate(axes, "time of the run", "batch size", name)
    if plan.goal.time_budget_s is not None:
        height = plan.goal.time_budget_s / UNITS[unit]
        axes.axhline(height, color=VERMILION, linestyle=(0, (5, 3)), gid="budget")
    points = [(row.batch_size, row.run_s / UNITS[unit]) for row in plan.rows]
    texts = [f"batch size {row.batch_size}: {show_duration(row.run_s)}" for row in plan.rows]
    picture.line(axes, points, texts, BLUE)


def _loss_panel(picture: Picture, axes: Axes, plan: Plan) -> None:
    """Predicted time to the same loss, as a multiple of the recommended size's."""
    decorate(axes, "predicted time to the same loss", "batch size", "multiple of the recommended size's")
    times = [(row.batch_size, plan.relative_time(row) or 0.0) for row in plan.rows]
    texts = [f"batch size {size}: {time:.2f} x the time" for size, time in times]
    picture.line(axes, times, texts, BLUE)
