"""All pictures, as PNG or SVG.

Axes and text are dark on white, so that they can be read on paper and on any page. Series have the colors
of Okabe and Ito (2008), which readers with any color vision can tell apart.
"""

from __future__ import annotations

import io
import statistics
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnaeus.cli.tables import shortened
from linnaeus.runtime.files import GIB, not_written, write_atomically
from linnaeus.runtime.words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from linnaeus.cli.analyze.rates import RateTest
    from linnaeus.cli.analyze.results import Analysis
    from linnaeus.cli.runs import Comparison
    from linnaeus.inference.figures import LevelFigures, SetFigures

INK = "#404040"
SERIES = BLUE, VERMILION, GREEN, *_ = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
)
"""Colours of series, in order."""
DASHES = "-", "--", "-.", ":"
"""Styles of lines, so that equal curves do not hide each other."""
CHARACTERS_PER_INCH = 12
"""Of a title."""
MAX_NAMES = 30
"""Runs, or classes of a confusion matrix, that are drawn with their names."""
FONTS = ("Noto Sans CJK", "Source Han Sans", "WenQuanYi", "PingFang", "Microsoft YaHei")
"""How the names of fonts begin that have Chinese, Japanese and Korean letters."""
_STYLE = {
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    ),
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # also a name with dollar signs
    "svg.hashsalt": "linnaeus",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


@contextmanager
def drawing(path: Path, title: str, width: float, height: float) -> Iterator[Figure]:
    """Draw in a figure of these inches; the picture is written at the end of the context, atomically.

    The path's ending is the format.

    Raises:
        LinnaeusError: the file cannot be written.
    """
    # Here and not above: matplotlib takes a second to import.
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.font_manager import fontManager

    installed = sorted({font.name for font in fontManager.ttflist if font.name.startswith(FONTS)})
    with (
        mpl.rc_context({**_STYLE, "font.family": ["sans-serif", *installed]}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a reader sees the box
        figure = Figure((width, height), layout="constrained")
        figure.suptitle(textwrap.fill(title, int(CHARACTERS_PER_INCH * width)), fontsize=11)
        yield figure
        buffer, kind = io.BytesIO(), path.suffix.lower().removeprefix(".")
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(buffer, format=kind, dpi=120, metadata=metadata)
        try:
            write_atomically(path, lambda file: file.write(buffer.getvalue()))
        except OSError as error:
            raise not_written(path, error) from error


# Runs.


def draw_runs(runs: Comparison, path: Path) -> None:
    """Draw the learning curves of runs, their best values and their training times, the best first.

    Runs that differ in the seed alone are one line, their mean, in a band from the lowest to the highest.
    A curve has the color of its run's name.
    """
    import pandas as pd
    from matplotlib.ticker import MaxNLocator

    metric = runs.metric
    num_finished = sum(row.state.status == "finished" for row in runs.rows)
    title = f"{num_finished} of {counted(len(runs.rows), 'run')} finished"
    lines, colors = runs.lines()[:MAX_NAMES], [*SERIES, *[INK] * MAX_NAMES]
    labels = [textwrap.fill(shortened(label, 60), 30) for label, _ in lines]
    num_text_lines = max(len(label.split("\n")) for label in labels)
    height = 1 + len(labels) * (0.12 + 0.15 * num_text_lines)
    with drawing(path, title, 8, 4 + height) as figure:
        panels: dict[str, Any] = figure.subplot_mosaic(
            [["curves", "curves"], ["best", "time"]], height_ratios=[4, height]
        )
        curves, best = panels["curves"], panels["best"]
        curves.set(title="learning curves", xlabel="epoch", ylabel=metric)
        curves.xaxis.set_major_locator(MaxNLocator(integer=True))
        for number, (_, rows) in enumerate(lines):
            found = {n: row.curve(metric) for n, row in enumerate(rows)}
            values = pd.DataFrame(found, dtype=float).sort_index().dropna(how="all")
            color, dash = colors[number], DASHES[number % len(DASHES)]
            if not values.empty:
                strength = 1 if number < len(SERIES) else 0.3
                [line] = curves.plot(values.index, values.mean(axis=1), dash, marker=".")
                line.set(color=color, alpha=strength, zorder=1 + strength)
                ends = values.min(axis=1), values.max(axis=1)
                curves.fill_between(values.index, *ends, color=color, alpha=0.18, linewidth=0)
        for panel, title, name in (
            (best, f"best {metric}", f"best {metric}"),
            (panels["time"], "training time (s)", "training_s"),
        ):
            panel.set(title=title, ylim=(len(lines) - 0.5, -0.5))
            panel.set_yticks(range(len(lines)), labels, fontsize=9)
            panel.tick_params(labelleft=panel is best)
            for number, (_, rows) in enumerate(lines):
                color = colors[number]
                for row in rows:
                    value = row.figures([metric])[name]
                    face = color if row.state.status == "finished" else "none"
                    if value is not None:
                        panel.plot([value], [number], "o", color=color, markerfacecolor=face)
                    elif panel is best:
                        panel.text(
                            0.5,
                            number,
                            "not measured",
                            transform=panel.get_yaxis_transform(),
                            va="center",
                        )
        for label, color in zip(best.get_yticklabels(), colors, strict=False):
            label.set_color(color)
        panels["time"].set_xlim(left=0)


# Analyses.


def draw_analysis(analysis: Analysis, title: str, path: Path) -> None:
    """Draw measured peaks, budgets and the sizes chosen of the unchanged configuration."""
    first = [row for row in analysis.sorted_rows() if row.variant == analysis.rows[0].variant]
    modes = list(dict.fromkeys(row.mode for row in first))
    with drawing(path, title, 7, 4.2 * len(modes)) as figure:
        panels = figure.subplots(len(modes), squeeze=False)
        for axes, mode in zip(panels.flat, modes, strict=True):
            axes.set(title=f"{mode}: memory", xlabel="batch size", ylabel="peak memory (GiB)")
            rows = [row for row in first if row.mode == mode]
            trials = [trial for row in rows for trial in row.trials]
            measured = sorted({(t.size, t.peak_bytes / GIB) for t in trials if t.peak_bytes})
            if len(measured) > 1:
                slope, start = statistics.linear_regression(*zip(*measured, strict=True))
                axes.axline((0, start), slope=slope, color=BLUE, alpha=0.8)
            axes.plot(*zip(*measured, strict=True), "o", color=BLUE) if measured else None
            for row in rows:
                if row.budget_bytes is not None:
                    height = row.budget_bytes / GIB
                    axes.axhline(height, color=VERMILION, linestyle="--")
                    text = f"{row.memory}: {row.size}"
                    axes.annotate(
                        text,
                        (1, height),
                        xycoords=("axes fraction", "data"),
                        xytext=(-2, 3),
                        textcoords="offset points",
                        ha="right",
                    )
                    refused = [trial.size for trial in row.trials if trial.peak_bytes is None]
                    axes.plot(refused, [height] * len(refused), "x", color=VERMILION)
                if row.batch_size is not None and row.peak_bytes is not None:
                    point = [row.batch_size], [row.peak_bytes / GIB]
                    axes.plot(*point, "D", color=GREEN, markerfacecolor="none", markersize=9)
            axes.set_xlim(left=0)
            axes.margins(y=0.15)


def draw_rates(test: RateTest, title: str, path: Path) -> None:
    """Draw the loss against the learning rate."""
    from matplotlib.ticker import LogFormatter

    rates, losses, smoothed = zip(*(row.values() for row in test.rows), strict=True)
    with drawing(path, title, 7, 4.8) as figure:
        axes = figure.subplots()
        axes.set(title="learning rate range test", xlabel="OPTIMIZER.LR", ylabel="training loss")
        axes.plot(rates, losses, color=INK, alpha=0.4, label="each step")
        axes.plot(rates, smoothed, color=BLUE, label="smoothed")
        if test.suggestion is not None:
            axes.axvline(test.suggestion, color=GREEN, linestyle=":", label="suggested")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(LogFormatter())  # the labels are plain text
        axes.xaxis.set_minor_formatter(LogFormatter())
        axes.set_ylim(min(losses), 1.5 * max(losses[: len(losses) // 2 + 1]))
        axes.legend()


# Evaluations.


def draw_evaluation(levels: Sequence[LevelFigures | SetFigures], title: str, path: Path) -> None:
    """Draw calibration and confusions of each level; where samples have several labels, its classes."""
    from linnaeus.inference.figures import SetFigures

    with drawing(path, title, 12.8, 5.4 * len(levels)) as figure:
        panels = figure.subplots(len(levels), 2, squeeze=False)
        for level, (left, right) in zip(levels, panels, strict=True):
            name = level.level.name
            has_samples = level.classes.num_samples > 0
            if isinstance(level, SetFigures):
                _ascending(left, level.average_precision[has_samples], f"{name}: average precision")
                _ascending(right, level.classes.f1[has_samples], f"{name}: F1")
                continue
            samples, confidence, accuracy = level.bins.numpy()
            edges = [number / len(samples) for number in range(len(samples))]
            left.set(title=f"{name}: calibration error {level.calibration_error:.3f}")
            left.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.03))
            left.plot([0, 1], [0, 1], "--", color=INK)
            shares, width = samples / level.num_samples, 1 / len(samples)
            label = "share of the samples"
            left.bar(edges, shares, width, align="edge", color=INK, alpha=0.25, label=label)
            left.plot(confidence[samples > 0], accuracy[samples > 0], "o-", color=BLUE)
            left.legend()
            if len(level.level.classes) <= MAX_NAMES:
                _matrix(right, level)
            else:
                title = f"{name}: recall, top-1 {level.top1:.4f}"
                _ascending(right, level.classes.recall[has_samples], title)


def _matrix(axes: Axes, level: LevelFigures) -> None:
    """The confusion matrix: numbers of samples, colored by their share of the true class.

    Classes without a sample have no row, and without a prediction either no column.
    """
    import numpy as np

    classes, count = level.level.classes, len(level.level.classes)
    matrix = np.zeros((count, count))
    matrix.flat[level.pairs.numpy()] = level.pair_counts.numpy()
    rows = np.flatnonzero(matrix.any(axis=1))
    columns = np.flatnonzero(matrix.any(axis=1) | matrix.any(axis=0))
    matrix = matrix[rows][:, columns]
    shares = matrix / matrix.sum(axis=1, keepdims=True)
    title = f"{level.level.name}: top-1 {level.top1:.4f}"
    axes.set(title=title, xlabel="predicted class", ylabel="true class")
    axes.grid(visible=False)
    # The root of a share, so that rare confusions can be seen.
    axes.imshow(shares**0.5, cmap="Blues", vmin=0, vmax=1, aspect="auto", alpha=0.9)
    fontsize = 9 if len(columns) <= MAX_NAMES // 2 else 7
    names = [shortened(name, 24) for name in classes]
    axes.set_xticks(
        range(len(columns)), [names[i] for i in columns], rotation=45, ha="right", fontsize=fontsize
    )
    axes.set_yticks(range(len(rows)), [names[i] for i in rows], fontsize=fontsize)
    for row, column in zip(*matrix.nonzero(), strict=True):
        color = "white" if shares[row, column] > 0.25 else "black"
        axes.text(
            column,
            row,
            f"{int(matrix[row, column]):,}",
            ha="center",
            va="center",
            color=color,
            fontsize=fontsize,
        )


def _ascending(axes: Axes, values: Tensor, title: str) -> None:
    """A metric of all classes with samples, ascending."""
    axes.set(title=title, xlabel="classes, ascending", ylim=(0, 1.03))
    axes.plot(range(1, len(values) + 1), values.sort().values.tolist(), color=BLUE)
