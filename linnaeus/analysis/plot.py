"""The picture of an analysis: memory against batch size, and samples per second where sizes were timed.

One drawing serves all formats. Axes and text have a middle grey on a transparent ground, so that it reads on
white and on black; in the HTML file they follow the reader's colour scheme. Series have the colours of Okabe
and Ito (Color Universal Design, 2008), which readers with any colour vision can tell apart.
"""

from __future__ import annotations

import html
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from linnaeus.analysis.options import Mode
from linnaeus.analysis.results import Analysis, Curve, Row, fit_line
from linnaeus.files import write_atomically
from linnaeus.memory import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#7d7d7d"
BLUE, GREEN, VERMILION, PURPLE = "#0072b2", "#009e73", "#d55e00", "#cc79a7"
_MIB = 1024**2
_STYLE = {
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.labelsize": 11,
    "font.size": 10,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "linnaeus",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}


@dataclass
class _Tips:
    """What each point says on hover, by the id of its element."""

    texts: dict[str, str] = field(default_factory=dict)

    def add(self, text: str) -> str:
        name = f"point-{len(self.texts)}"
        self.texts[name] = text
        return name


def save_plot(analysis: Analysis, path: Path) -> None:
    """Draw the picture and write it, atomically, in the format that the ending names."""
    ending = path.suffix.lower()
    if ending == ".png":
        figure, _ = draw(analysis)
        write_atomically(path, lambda file: _save(figure, file, "png"))
        return
    text = svg_text(analysis) if ending == ".svg" else html_page(analysis)
    write_atomically(path, lambda file: file.write(text.encode()))


def draw(analysis: Analysis) -> tuple[Figure, dict[str, str]]:
    """The figure, and what its points say on hover."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with_speed = any(curve.knee is not None for curve in analysis.curves.values())
    num_rows, num_columns = 1 + with_speed, len(analysis.curves)
    tips = _Tips()
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(6.4 * num_columns, 4.4 * num_rows), layout="constrained")
        panels = figure.subplots(num_rows, num_columns, squeeze=False)
        for column, (mode, curve) in enumerate(analysis.curves.items()):
            _memory_panel(panels[0][column], analysis, mode, curve, tips)
            if with_speed:
                _speed_panel(panels[1][column], analysis, mode, curve, tips)
        figure.suptitle(_headline(analysis), fontsize=11)
    return figure, tips.texts


def svg_text(analysis: Analysis) -> str:
    """The picture as SVG, with what each point says as its title, which browsers show on hover."""
    figure, tips = draw(analysis)
    buffer = io.BytesIO()
    _save(figure, buffer, "svg")
    text = buffer.getvalue().decode()
    for name, tip in tips.items():
        text = text.replace(
            f'<g id="{name}">', f'<g id="{name}" class="point"><title>{html.escape(tip)}</title>'
        )
    return text


def html_page(analysis: Analysis) -> str:
    """The picture and its figures in one file that needs nothing else; values appear on hover."""
    svg = svg_text(analysis)
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    rows = [row.scalars() for row in analysis.sorted_rows()]
    columns = (
        "mode",
        "memory_fraction",
        "batch_size",
        "limited_by",
        "peak_bytes",
        "budget_bytes",
        "samples_per_s",
    )
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(_cell(row[column]))}</td>" for column in columns) + "</tr>"
        for row in rows
    )
    headline = html.escape(_headline(analysis))
    return _PAGE.format(title=headline, svg=svg, head=head, body=body)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else str(value)


def _save(figure: Figure, file: BinaryIO | io.BytesIO, kind: str) -> None:
    import matplotlib as mpl

    metadata = {"Date": None} if kind == "svg" else None
    with mpl.rc_context(_STYLE):
        figure.savefig(file, format=kind, dpi=120, transparent=True, metadata=metadata)


def _headline(analysis: Analysis) -> str:
    environment = analysis.environment
    size = "×".join(map(str, environment["image_size"] or []))
    limit = environment["memory_limit_gb"] or environment["total_bytes"] / GIB
    return ", ".join(
        part
        for part in (
            environment["model"],
            size and f"{size} pixels",
            environment["precision"],
            environment["optimizer"],
            f"{environment['device']} with {limit:.3g} GiB",
        )
        if part
    )


def _memory_panel(axes: Axes, analysis: Analysis, mode: Mode, curve: Curve, tips: _Tips) -> None:
    """Measured peaks, the line through them, the budgets and the sizes chosen."""
    rows = analysis.sorted_rows(mode)
    points = curve.measured()
    budgets = [row.budget_bytes for row in rows if row.budget_bytes is not None]
    heights = [*budgets, *(peak for _, peak in points)]
    refused = _refused(rows)
    unit, name = (GIB, "GiB") if max(heights, default=0) >= GIB else (_MIB, "MiB")
    _decorate(axes, f"{mode}: memory", f"peak memory ({name})")
    if not heights:
        return
    right = 1.12 * max([size for size, _ in points] + list(refused), default=1)
    _budget_lines(axes, rows, unit, right)
    _fitted_line(axes, points, unit, right)
    for size, peak in points:
        tip = tips.add(f"{mode}, batch size {size}: {peak / unit:.3f} {name}")
        axes.plot([size], [peak / unit], "o", color=BLUE, markersize=6, gid=tip, zorder=4)
    top = max(heights) / unit
    for size, budget in refused.items():
        tip = tips.add(f"{mode}, batch size {size}: out of memory")
        axes.plot(
            [size], [budget / unit], "x", color=VERMILION, markersize=7, markeredgewidth=2, gid=tip, zorder=4
        )
    _chosen_sizes(axes, rows, unit, name, tips)
    low = min(heights) / unit
    axes.set_xlim(0, right)
    axes.set_ylim(0 if low < 0.5 * top else low - 0.15 * (top - low), top + 0.12 * (top - low or top))
    _legend(axes, with_refused=bool(refused))


def _refused(rows: list[Row]) -> dict[int, int]:
    """The budget under which each size ran out of memory."""
    return {
        trial.size: row.budget_bytes
        for row in rows
        for trial in row.trials
        if trial.peak_bytes is None and row.budget_bytes is not None
    }


def _budget_lines(axes: Axes, rows: list[Row], unit: int, right: float) -> None:
    for row in rows:
        if row.budget_bytes is not None:
            height = row.budget_bytes / unit
            axes.axhline(height, color=VERMILION, linestyle=(0, (5, 3)), linewidth=1.3, zorder=2)
            axes.text(
                0.01 * right, height, f"{row.memory_fraction:.0%}", color=VERMILION, va="bottom", zorder=5,
                fontweight="bold",
            )  # fmt: skip


def _fitted_line(axes: Axes, points: list[tuple[int, int]], unit: int, right: float) -> None:
    fit = fit_line(points)
    if fit is not None:
        start, slope = fit
        ends = [0.0, right]
        heights = [(start + slope * end) / unit for end in ends]
        axes.plot(ends, heights, "-", color=BLUE, alpha=0.8, linewidth=1.6, gid="fitted-line", zorder=3)


def _chosen_sizes(axes: Axes, rows: list[Row], unit: int, name: str, tips: _Tips) -> None:
    for size, row in {row.batch_size: row for row in rows}.items():
        if size is None or row.peak_bytes is None:
            continue
        fractions = ", ".join(f"{other.memory_fraction:.0%}" for other in rows if other.batch_size == size)
        speed = "" if row.samples_per_s is None else f", {row.samples_per_s:.4g} samples/s"
        tip = tips.add(
            f"{row.mode}, chosen for {fractions}: batch size {size}, "
            f"{row.peak_bytes / unit:.3f} {name}{speed}"
        )
        height = row.peak_bytes / unit
        axes.plot(
            [size], [height], "D", markerfacecolor="none", markeredgecolor=GREEN, markeredgewidth=2.2,
            markersize=11, gid=tip, zorder=5,
        )  # fmt: skip
        axes.annotate(
            str(size), (size, height), xytext=(-9, 5), textcoords="offset points", ha="right", color=GREEN,
            fontsize=12, fontweight="bold", zorder=6,
        )  # fmt: skip


def _legend(axes: Axes, *, with_refused: bool) -> None:
    from matplotlib.lines import Line2D

    entries = [
        Line2D([], [], color=BLUE, marker="o", alpha=0.9, label="measured, and fitted line"),
        Line2D([], [], color=VERMILION, linestyle="--", label="budget"),
        Line2D(
            [], [], color=GREEN, marker="D", linestyle="", markerfacecolor="none", markeredgewidth=2,
            label="size chosen",
        ),
    ]  # fmt: skip
    if with_refused:
        entries.append(
            Line2D(
                [], [], color=VERMILION, marker="x", linestyle="", markeredgewidth=2, label="out of memory"
            )
        )
    axes.legend(handles=entries, loc="lower right", frameon=False, fontsize=9)


def _speed_panel(axes: Axes, analysis: Analysis, mode: Mode, curve: Curve, tips: _Tips) -> None:
    """Samples per second, and the smallest size that is about as fast as the fastest."""
    _decorate(axes, f"{mode}: throughput", "samples per second")
    sizes = [timing.batch_size for timing in curve.timings]
    speeds = [timing.samples_per_s for timing in curve.timings]
    axes.plot(sizes, speeds, "-", color=PURPLE, alpha=0.7, linewidth=1.6, zorder=3)
    for size, speed in zip(sizes, speeds, strict=True):
        tip = tips.add(f"{mode}, batch size {size}: {speed:.4g} samples/s")
        axes.plot([size], [speed], "o", color=PURPLE, markersize=6, gid=tip, zorder=4)
    axes.set_ylim(0, 1.2 * max(speeds, default=1))
    axes.set_xlim(0, 1.12 * max(sizes, default=1))
    if curve.knee is not None:
        axes.axvline(curve.knee, color=GREEN, linewidth=1.6, linestyle=":", gid="knee", zorder=2)
        axes.annotate(
            f"knee: {curve.knee}", (curve.knee, 0.04), xycoords=("data", "axes fraction"), xytext=(5, 0),
            textcoords="offset points", color=GREEN, fontsize=12, fontweight="bold",
            ha="left" if curve.knee < 0.7 * max(sizes, default=1) else "right",
        )  # fmt: skip


def _decorate(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xlabel("batch size")
    axes.set_ylabel(label)
    axes.grid(color=INK, alpha=0.25, linewidth=0.7)


_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
body {{ margin: 1.5rem auto; max-width: 90rem; font: 15px/1.4 system-ui, sans-serif;
  background: #ffffff; color: #333333; }}
svg {{ width: 100%; height: auto; }}
.point {{ cursor: pointer; }}
#tip {{ position: fixed; pointer-events: none; padding: .35rem .6rem; border-radius: .3rem;
  background: #222222; color: #ffffff; visibility: hidden; }}
table {{ border-collapse: collapse; margin: 1rem 0; }}
th, td {{ padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #8888; }}
@media (prefers-color-scheme: dark) {{
  body {{ background: #14171c; color: #d5d9df; }}
  #tip {{ background: #e8eaee; color: #14171c; }}
}}
</style>
</head>
<body>
{svg}
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
<div id="tip" role="status"></div>
<script>
const tip = document.getElementById("tip");
const points = [...document.querySelectorAll(".point")].map(point => {{
  const title = point.querySelector("title");
  const text = title.textContent;
  title.remove();  // the box below shows it at once
  point.setAttribute("aria-label", text);
  return {{point, text}};
}});
document.addEventListener("mousemove", event => {{
  let nearest = null, least = 24;
  for (const {{point, text}} of points) {{
    const box = point.getBoundingClientRect();
    const x = event.clientX - box.x - box.width / 2, y = event.clientY - box.y - box.height / 2;
    const distance = Math.hypot(x, y);
    if (distance <= least) [nearest, least] = [text, distance];
  }}
  tip.style.visibility = nearest ? "visible" : "hidden";
  if (!nearest) return;
  tip.textContent = nearest;
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  tip.style.left = left + "px";
  tip.style.top = event.clientY + 14 + "px";
}});
</script>
</body>
</html>
"""
