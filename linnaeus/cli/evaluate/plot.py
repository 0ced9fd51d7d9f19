"""The picture of an evaluation: calibration and classes of each level."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnaeus.cli.evaluate.results import Evaluation
from linnaeus.cli.plots import BLUE, INK, VERMILION, Picture, decorate, drawing
from linnaeus.inference.figures import LevelFigures
from linnaeus.inference.tally import NUM_BINS
from linnaeus.words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LEVELS = 4
"""Levels that are drawn: the finest ones."""
MAX_MATRIX_CLASSES = 30
"""Up to this many classes, the confusion matrix of a level is drawn; for more, their recall."""
MAX_CELL_NUMBERS = 12
"""Up to this many classes, the cells of a matrix show their numbers."""
MAX_HOVER_POINTS = 400
"""Classes of a recall curve with a text on hover."""
MAX_LABEL_CHARACTERS = 60
"""Up to this many characters in all, the labels of an axis are horizontal; more are slanted."""
_MAX_ROW_NAME_CHARACTERS = 30
_MAX_COLUMN_NAME_CHARACTERS = 18


def save_plot(evaluation: Evaluation, path: Path) -> None:
    """Draw the picture and write it, atomically, in the format that the ending names."""
    levels = [level for level in evaluation.levels if level.num_samples][-MAX_LEVELS:]
    data = evaluation.data
    title = (
        f"{evaluation.checkpoint['name']} on {counted(data['samples'], 'sample')} of {data['source']} "
        f"({data['part']})"
    )
    columns = evaluation.COLUMNS
    with drawing(path, title, evaluation, columns, num_rows=len(levels), panel_height=5.4) as picture:
        for level, (left, right) in zip(levels, picture.panels, strict=True):
            _reliability(picture, left, level)
            if len(level.level.classes) <= MAX_MATRIX_CLASSES:
                _matrix(picture, right, level)
            else:
                _recall(picture, right, level)


def _reliability(picture: Picture, axes: Axes, level: LevelFigures) -> None:
    """Accuracy against confidence, and how many samples have that confidence."""
    title = f"{level.level.name}: calibration error {level.calibration_error:.3f}"
    decorate(axes, title, "confidence", "accuracy")
    axes.plot([0, 1], [0, 1], color=INK, linestyle=(0, (5, 3)), linewidth=1.2, zorder=2)
    samples, confidence, accuracy = level.bins.tolist()
    width = 1 / NUM_BINS
    shares = [number / level.num_samples for number in samples]
    lefts = [number * width for number in range(NUM_BINS)]
    axes.bar(
        lefts, shares, width, align="edge", color=INK, alpha=0.25, linewidth=0, label="share of the samples"
    )
    filled = [number for number in range(NUM_BINS) if samples[number]]
    axes.plot(
        [confidence[i] for i in filled], [accuracy[i] for i in filled], "-", color=BLUE, linewidth=1.6,
        marker="o", markersize=6, zorder=3, label="accuracy",
    )  # fmt: skip
    for i in filled:
        text = (
            f"{counted(int(samples[i]), 'sample')} with confidence {lefts[i]:.2f} to {lefts[i] + width:.2f}: "
            f"{confidence[i]:.3f} on average, {accuracy[i]:.3f} right"
        )
        picture.point(axes, confidence[i], accuracy[i], "o", text, color=BLUE)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    # Outside of the axes, where it covers nothing.
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False)


def _matrix(picture: Picture, axes: Axes, level: LevelFigures) -> None:
    """The confusion matrix: numbers of samples, coloured by their share of the true class.

    Classes without a sample have no row, and without a prediction either no column.
    """
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    classes, count = level.level.classes, len(level.level.classes)
    matrix = np.zeros((count, count))
    pairs, numbers = level.counts.pairs.tolist(), level.counts.counts.tolist()
    for pair, number in zip(pairs, numbers, strict=True):
        matrix[divmod(pair, count)] = number
    rows = np.flatnonzero(matrix.any(axis=1))
    columns = np.flatnonzero(matrix.any(axis=1) | matrix.any(axis=0))
    matrix = matrix[rows][:, columns]
    shares = matrix / matrix.sum(axis=1, keepdims=True)
    row_names = [_short(classes[row], _MAX_ROW_NAME_CHARACTERS) for row in rows]
    column_names = [_short(classes[column], _MAX_COLUMN_NAME_CHARACTERS) for column in columns]
    decorate(axes, f"{level.level.name}: top-1 {level.top1:.4f}", "predicted class", "true class")
    axes.grid(visible=False)
    colours = LinearSegmentedColormap.from_list("share", [(0, 0.447, 0.698, 0), (0, 0.447, 0.698, 1)])
    # The root of a share, so that rare confusions can be seen.
    axes.imshow(shares**0.5, cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    size = 10 if len(columns) <= MAX_CELL_NUMBERS else 7
    is_long = len(columns) * max(map(len, column_names)) > MAX_LABEL_CHARACTERS
    rotation: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if is_long else {}
    axes.set_xticks(range(len(columns)), column_names, fontsize=size, **rotation)
    axes.set_yticks(range(len(rows)), row_names, fontsize=size)
    for row, column in zip(*matrix.nonzero(), strict=True):
        share, number = shares[row, column], int(matrix[row, column])
        if len(columns) <= MAX_CELL_NUMBERS:
            axes.text(
                column, row, f"{number:,}", ha="center", va="center", fontsize=9,
                color="white" if share > 0.25 else INK, zorder=5,
            )  # fmt: skip
        text = f"{classes[rows[row]]} taken for {classes[columns[column]]}: {number} ({share:.1%})"
        picture.point(axes, column, row, "s", text, color=BLUE, alpha=0, markersize=6)


def _recall(picture: Picture, axes: Axes, level: LevelFigures) -> None:
    """The recall of all classes with samples, ascending."""
    recall = level.classes.recall
    order = [label for label in recall.argsort().tolist() if level.classes.num_samples[label]]
    values = [float(recall[label]) for label in order]
    x_label = f"{len(order):,} classes with samples, by recall"
    decorate(axes, f"{level.level.name}: top-1 {level.top1:.4f}", x_label, "recall")
    axes.fill_between(range(len(order)), values, color=BLUE, alpha=0.15, linewidth=0, step="mid")
    axes.plot(
        range(len(order)), values, "-", color=BLUE, linewidth=1.6, drawstyle="steps-mid", label="recall"
    )
    if level.macro_recall is not None:
        axes.axhline(
            level.macro_recall, color=VERMILION, linestyle=(0, (5, 3)), linewidth=1.4,
            label=f"mean {level.macro_recall:.3f}",
        )  # fmt: skip
    for x in range(0, len(order), max(1, len(order) // MAX_HOVER_POINTS)):
        label = order[x]
        samples = int(level.classes.num_samples[label])
        text = f"{level.level.classes[label]}: recall {values[x]:.3f} of {counted(samples, 'sample')}"
        picture.point(axes, x, values[x], "o", text, color=BLUE, alpha=0, markersize=5)
    axes.set_xlim(0, max(1, len(order) - 1))
    axes.set_ylim(0, 1.02)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False)


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"
