"""How all pictures look, and how they are written as PNG, SVG or an HTML page.

One drawing serves all formats. Axes and text have a middle grey on a transparent ground, so that it reads on
white and on black; in the HTML file they follow the reader's colour scheme. Series have the colours of Okabe
and Ito (Color Universal Design, 2008), which readers with any colour vision can tell apart.
"""

from __future__ import annotations

import html
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from linnaeus.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#7d7d7d"
BLUE, GREEN, VERMILION, PURPLE = "#0072b2", "#009e73", "#d55e00", "#cc79a7"
SERIES = (BLUE, VERMILION, GREEN, PURPLE, "#e69f00", "#56b4e9")
"""Colours of series, in order."""
LABELS_APART = 1.3
"""Factor between two batch sizes that both have a label."""
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
class Tips:
    """What each point says on hover, by the id of its element."""

    texts: dict[str, str] = field(default_factory=dict)

    def add(self, text: str) -> str:
        """Note a text; returns the id (`gid`) that the point must have."""
        name = f"point-{len(self.texts)}"
        self.texts[name] = text
        return name


@contextmanager
def style() -> Iterator[None]:
    """Inside, matplotlib draws in this style."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        yield


def decorate(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Title, labels and grid of one panel."""
    axes.set_title(title, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color=INK, alpha=0.25, linewidth=0.7)


def size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    """An axis of batch sizes, by powers of two; where sizes lie close, not every one has a label.

    Args:
        axes: whose x axis it is.
        sizes: ascending, at least one.
    """
    shown = [sizes[-1]]
    for size in reversed(sizes):
        if size * LABELS_APART <= shown[-1]:
            shown.append(size)
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [str(size) for size in shown])
    axes.minorticks_off()
    axes.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)


def save_picture(
    path: Path, figure: Figure, tips: Tips, *, title: str, columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
) -> None:  # fmt: skip
    """Write a picture, atomically, in the format that the ending names.

    Args:
        path: ends in `.png`, `.svg` or `.html`.
        figure: drawn inside `style()`.
        tips: what its points say.
        title: of the HTML page.
        columns: of the HTML page's table, in order.
        rows: its rows, by column.
    """
    ending = path.suffix.lower()
    if ending == ".png":
        write_atomically(path, lambda file: _save(figure, file, "png"))
        return
    text = _svg_text(figure, tips)
    if ending == ".html":
        text = _html_page(text, title, columns, rows)
    write_atomically(path, lambda file: file.write(text.encode()))


def _svg_text(figure: Figure, tips: Tips) -> str:
    """SVG with what each point says as its title, which browsers show on hover."""
    buffer = io.BytesIO()
    _save(figure, buffer, "svg")
    text = buffer.getvalue().decode()
    for name, tip in tips.texts.items():
        text = text.replace(
            f'<g id="{name}">', f'<g id="{name}" class="point"><title>{html.escape(tip)}</title>'
        )
    return text


def _html_page(svg: str, title: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """The picture and its figures in one file that needs nothing else; values appear on hover."""
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(_cell(row[column]))}</td>" for column in columns) + "</tr>"
        for row in rows
    )
    return _PAGE.format(title=html.escape(title), svg=svg, head=head, body=body)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else str(value)


def _save(figure: Figure, file: BinaryIO | io.BytesIO, kind: str) -> None:
    metadata = {"Date": None} if kind == "svg" else None
    with style():
        figure.savefig(file, format=kind, dpi=120, transparent=True, metadata=metadata)


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
