"""The style of all pictures, and their files: PNG, SVG or an HTML page.

One drawing serves all formats. Axes and text are middle grey on a transparent background, so that they can be
read on white and on black; in the HTML file they follow the reader's colour scheme. Series have the colours
of Okabe and Ito (Color Universal Design, 2008), which readers with any colour vision can tell apart.
"""

from __future__ import annotations

import html
import io
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from linnaeus.cli.tables import Figures
from linnaeus.runtime.files import not_written, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#7d7d7d"
BLUE, GREEN, VERMILION, PURPLE = "#0072b2", "#009e73", "#d55e00", "#cc79a7"
SERIES = (BLUE, VERMILION, GREEN, PURPLE, "#e69f00", "#56b4e9")
"""Colours of series, in order."""
PAGE = Path(__file__).with_name("page.html")
CHARACTERS_PER_PANEL = 76
"""Of a title, in the width of one panel."""
LABELS_APART = 1.3
"""Least factor between two batch sizes that both have a label."""
LINES_PER_PANEL = 18
"""Labels beside a panel that find room below each other."""
FONTS = (
    "Noto Sans CJK",
    "Source Han Sans",
    "WenQuanYi",
    "PingFang",
    "Hiragino Sans",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Arial Unicode MS",
    "Droid Sans Fallback",
)
"""How the names of fonts begin that have Chinese, Japanese and Korean letters."""
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
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # also a name with dollar signs
    "svg.hashsalt": "linnaeus",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}


@contextmanager
def drawing(
    path: Path,
    title: str,
    figures: Figures,
    columns: Sequence[str],
    *,
    num_rows: int = 1,
    num_columns: int = 2,
    panel_height: float = 4.8,
) -> Iterator[list[list[Axes]]]:
    """Draw in the panels, rows of them; the picture is written at the end of the context, atomically.

    The path's ending is the format. `figures` are the rows of an HTML page's table, `columns` its columns. A
    panel is 6.4 inches wide and `panel_height` inches high.

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
        figure = Figure((6.4 * num_columns, panel_height * num_rows), layout="constrained")
        lines = textwrap.fill(title, CHARACTERS_PER_PANEL * num_columns, break_on_hyphens=False)
        figure.suptitle(lines, fontsize=11)
        yield figure.subplots(num_rows, num_columns, squeeze=False).tolist()
        buffer, ending = io.BytesIO(), path.suffix.lower()
        kind = "png" if ending == ".png" else "svg"
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(buffer, format=kind, dpi=120, transparent=True, metadata=metadata)
        content = buffer.getvalue()
        if ending == ".html":
            content = _html_page(content.decode(), title, columns, figures).encode()
        try:
            write_atomically(path, lambda file: file.write(content))
        except OSError as error:
            raise not_written(path, error) from error


def decorate(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Title, labels and grid of one panel."""
    axes.set_title(title, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color=INK, alpha=0.25, linewidth=0.7)


def log_axis(axes: Axes) -> None:
    """Scale the x axis by powers of ten; the labels are plain text."""
    from matplotlib.ticker import LogFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(LogFormatter())
    axes.xaxis.set_minor_formatter(LogFormatter())


def size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    """Scale an x axis of ascending batch sizes by powers of two. Where they lie close, some have no label."""
    shown = [sizes[-1]]
    for size in reversed(sizes):
        if size * LABELS_APART <= shown[-1]:
            shown.append(size)
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [str(size) for size in shown])
    axes.minorticks_off()
    axes.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)


def label_heights(axes: Axes, labels: Sequence[tuple[float, str]], colour: str) -> None:
    """Write labels right of a panel, at heights in its data, so that none covers another; limits are set."""
    bottom, top = axes.get_ylim()
    place = -1.0
    for height, text in sorted(labels):
        place = max((height - bottom) / (top - bottom), place + 1 / LINES_PER_PANEL)
        axes.text(
            1.01, place, text, transform=axes.transAxes, color=colour, va="center", fontsize=9
        )


def _html_page(svg: str, title: str, columns: Sequence[str], figures: Figures) -> str:
    """The picture and its figures in one file that needs nothing else."""

    def shown(value: Any) -> str:
        return (
            "" if value is None else html.escape(f"{value:,}" if type(value) is int else str(value))
        )

    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{shown(row.get(column))}</td>" for column in columns) + "</tr>"
        for row in figures.scalars()
    )
    page = Template(PAGE.read_text(encoding="utf-8"))
    return page.substitute(title=html.escape(title), svg=svg, head=head, body=body)
