"""The picture of a plan: speed, and time to the same loss or of the run, against batch size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from linnaeus.commands.duration import UNITS, show_duration
from linnaeus.commands.picture import (
    BLUE,
    GREEN,
    PURPLE,
    VERMILION,
    Tips,
    decorate,
    save_picture,
    size_axis,
    style,
)
from linnaeus.commands.plan.results import Choice, Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = (
    "batch_size", "effective_batch", "samples_per_s", "epoch_s", "run_s", "in_time", "relative_steps",
    "relative_time", "learning_rate", "marks",
)  # fmt: skip


def save_plot(plan: Plan, path: Path) -> None:
    """Draw the picture and write it, atomically, in the format that the ending names."""
    figure, tips = draw(plan)
    save_picture(path, figure, tips, title=_headline(plan), columns=COLUMNS, rows=plan.scalars())


def draw(plan: Plan) -> tuple[Figure, Tips]:
    """The figure, and what its points say on hover."""
    from matplotlib.figure import Figure

    tips = Tips()
    with style():
        figure = Figure(figsize=(12.8, 4.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        decorate(left, "throughput", "batch size", "samples per second")
        if plan.goal.noise_scale is None:
            _run_panel(right, plan, tips)
        else:
            _loss_panel(right, plan, tips)
        if plan.rows:
            speeds = [(row.batch_size, row.samples_per_s) for row in plan.rows]
            texts = [f"batch size {size}: {speed:.4g} samples/s" for size, speed in speeds]
            _line(left, speeds, texts, PURPLE, tips)
            _mark(left, plan.choice())
            _mark(right, plan.choice())
        figure.suptitle(_headline(plan), fontsize=11)
    return figure, tips


def _headline(plan: Plan) -> str:
    goal = plan.goal
    processes = "" if goal.world_size == 1 else f", {goal.world_size} processes"
    noise = "" if goal.noise_scale is None else f", noise scale {goal.noise_scale:g}"
    model = plan.environment.get("model", "")
    return f"{model}: {goal.epochs} epochs of {goal.num_samples:,} samples{processes}{noise}"


def _run_panel(axes: Axes, plan: Plan, tips: Tips) -> None:
    """Time of the run, and the budget."""
    longest = max([row.run_s for row in plan.rows], default=1.0)
    unit = next(unit for unit in ("d", "h", "m", "s") if unit == "s" or longest >= 2 * UNITS[unit])
    decorate(
        axes,
        "time of the run",
        "batch size",
        {"d": "days", "h": "hours", "m": "minutes"}.get(unit, "seconds"),
    )
    points = [(row.batch_size, row.run_s / UNITS[unit]) for row in plan.rows]
    texts = [f"batch size {row.batch_size}: {show_duration(row.run_s)}" for row in plan.rows]
    if plan.goal.time_budget_s is not None:
        axes.axhline(
            plan.goal.time_budget_s / UNITS[unit], color=VERMILION, linestyle=(0, (5, 3)), gid="budget"
        )
    if points:
        _line(axes, points, texts, BLUE, tips)


def _loss_panel(axes: Axes, plan: Plan, tips: Tips) -> None:
    """Predicted time to the same loss, as a multiple of the recommended size's."""
    decorate(axes, "predicted time to the same loss", "batch size", "multiple of the recommended size's")
    if not plan.rows:
        return
    choice = plan.choice()
    times = [(row.batch_size, choice.relative_time(row) or 0.0) for row in plan.rows]
    texts = [f"batch size {size}: {time:.2f} x the time" for size, time in times]
    _line(axes, times, texts, BLUE, tips)


def _line(axes: Axes, points: list[tuple[int, float]], texts: list[str], colour: str, tips: Tips) -> None:
    sizes = [size for size, _ in points]
    size_axis(axes, sizes)
    axes.plot(sizes, [value for _, value in points], "-", color=colour, alpha=0.7, linewidth=1.6, zorder=3)
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    for (size, value), text in zip(points, texts, strict=True):
        axes.plot([size], [value], "o", color=colour, markersize=6, gid=tips.add(text), zorder=4)


def _mark(axes: Axes, choice: Choice) -> None:
    """A line at the recommended size."""
    size = choice.recommended
    axes.axvline(size, color=GREEN, linewidth=1.6, linestyle=":", zorder=2)
    axes.annotate(
        f"recommended: {size}", (size, 0.04), xycoords=("data", "axes fraction"), xytext=(5, 0),
        textcoords="offset points", color=GREEN, fontsize=12, fontweight="bold",
        ha="left" if size < choice.largest else "right",
    )  # fmt: skip
