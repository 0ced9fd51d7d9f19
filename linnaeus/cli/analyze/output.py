"""The figures of an analysis for people: tables, notes on them, and YAML to paste."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.throughput import TOLERANCE
from linnaeus.cli.analyze.results import PARTS, Analysis, Row
from linnaeus.cli.measure import Speeds
from linnaeus.cli.tables import cell

_MIB = 1024**2
_TITLES = {
    "average": "EMA copy", "optimizer_state": "optimizer state", "buckets": "gradient buckets",
    "rest": "the rest",
}  # fmt: skip


def show(analysis: Analysis, console: Console) -> None:
    """Print tables of sizes, speeds, parts of the memory and remedies, each with its notes, and the YAML.

    Of an analysis whose other figures have been shown, the remedies alone.
    """
    if not analysis.rows:
        return
    if not analysis.is_shown:
        _show_sizes(analysis, console)
    if any(row.remedies for row in analysis.rows):
        console.print(remedies_table(analysis))
        _print(console, "the effects of remedies are in a .json file only, not in .csv or .jsonl")


def _show_sizes(analysis: Analysis, console: Console) -> None:
    console.print(results_table(analysis))
    if analysis.has_sizes:  # otherwise the reasons are the command's error
        _print(console, *analysis.reasons, *analysis.notes)
    knees = {mode: speeds for mode, speeds in analysis.speeds.items() if speeds.knee is not None}
    if knees:
        console.print(throughput_table(knees))
        _print(console, *(knee_sentence(mode, speeds) for mode, speeds in knees.items()))
    for mode in analysis.speeds:
        rows = analysis.one_per_device(analysis.sorted_rows(mode))
        if any(row.breakdown for row in rows):
            console.print(breakdown_table(rows))
    if lines := yaml_lines(analysis):
        _print(console, f"To paste into a configuration:\n\n{lines}")


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def results_table(analysis: Analysis) -> Table:
    """One line per mode and fraction."""
    margin = next((row.predicted.margin for row in analysis.rows if row.predicted is not None), None)
    title = "Batch sizes" if margin is None else "Batch sizes, predicted"
    table = Table(title=title, title_justify="left")
    lines = [_figures(row) for row in analysis.sorted_rows()]
    for heading in lines[0]:
        is_text = heading in ("device", "mode", "limited by", "certified")
        width = len("max_batch_size") if heading == "limited by" else None
        table.add_column(heading, justify="left" if is_text else "right", min_width=width)
    for line in lines:
        table.add_row(*line.values())
    return table


def _figures(row: Row) -> dict[str, str]:
    """The cells of a row, by column."""
    start = {
        "mode": row.mode,
        "memory": row.share,
        "batch size": _size(row.batch_size),
    }
    figures = {
        "limited by": row.limited_by or "",
        "peak GiB": _gib(row.peak_bytes),
        "budget GiB": _gib(row.budget_bytes),
    }
    if row.predicted is None:
        limited_by = figures.pop("limited by")
        return {
            **start, "limited by": limited_by, "certified": "yes" if row.certified else "no", **figures,
            "samples/s": cell(row.samples_per_s, ".4g"), "trials": str(len(row.trials)),
        }  # fmt: skip
    with_margin = f"with {_percent(row.predicted.margin)} margin"
    return {"device": row.device, **start, with_margin: _size(row.safe_size), **figures}


def _size(size: int | None) -> str:
    return "none" if size is None else str(size)


def _percent(margin: float) -> str:
    return f"{100 * (margin - 1):.3g} %"


def throughput_table(speeds: Mapping[Mode, Speeds]) -> Table:
    """One line per size that was timed, for modes whose knee is known."""
    table = Table(title="Samples per second", title_justify="left")
    for heading in ("mode", "batch size", "samples/s", "of best"):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    table.add_column("", min_width=len("knee, fastest"))
    for mode, found in speeds.items():
        best = found.fastest
        for timing in found.ascending():
            marks = {"knee": timing.batch_size == found.knee, "fastest": timing is best}
            table.add_row(
                mode, str(timing.batch_size), f"{timing.samples_per_s:.4g}",
                f"{timing.samples_per_s / best.samples_per_s:.0%}",
                ", ".join(name for name, applies in marks.items() if applies),
            )  # fmt: skip
    return table


def knee_sentence(mode: Mode, speeds: Speeds) -> str:
    """Which size is the knee, and what that means."""
    return (
        f"knee of {mode}: batch size {speeds.knee}, the smallest within {100 * TOLERANCE:g} % of the best "
        "samples per second"
    )


def breakdown_table(rows: Sequence[Row]) -> Table:
    """The parts of the memory at each size of one mode."""
    note = "" if rows[0].predicted is None else ", predicted"
    table = Table(title=f"Memory at the {rows[0].mode} sizes{note}", title_justify="left")
    table.add_column("part")
    shown = {row.batch_size: row for row in rows if row.breakdown is not None}
    for size in shown:
        table.add_column(f"batch size {size}", justify="right")
    for name in PARTS:
        parts = [row.breakdown.parts()[name] for row in shown.values() if row.breakdown is not None]
        if any(parts):
            cells = [_part(part, row) for part, row in zip(parts, shown.values(), strict=True)]
            table.add_row(_TITLES.get(name, name), *cells)
    table.add_section()
    table.add_row("peak", *(_mib(row.peak_bytes or 0) for row in shown.values()))
    return table


def remedies_table(analysis: Analysis) -> Table:
    """The memory that each remedy saves at each size; a reason why one does not apply is shown once."""
    is_predicted = analysis.is_predicted
    table = Table(title=f"Remedies, {'predicted' if is_predicted else 'measured'}", title_justify="left")
    last = "then fits with margin" if is_predicted else "samples/s"
    for heading in ("mode", "batch size", "remedy", "before", "after", "saved", last):
        table.add_column(heading, justify="left" if heading in ("mode", "remedy") else "right")
    reasons: set[tuple[Mode, str, str | None]] = set()
    for row in _rows_with_remedies(analysis):
        for remedy in row.remedies:
            keys = " ".join(f"{key}={value}" for key, value in remedy.keys.items())
            before, after = remedy.peak_bytes_before, remedy.peak_bytes
            start = (row.mode, str(row.batch_size))
            if after is None:
                if (shown := (row.mode, keys, remedy.reason)) not in reasons:
                    reasons.add(shown)
                    cells = (f"{keys}: {remedy.reason}", "" if before is None else _mib(before), "", "", "")
                    table.add_row(*start, *cells)
                continue
            saved = "" if remedy.saved_percent is None else f"{remedy.saved_percent:.1f} %"
            unit = max(before or 0, after)
            gain = cell(remedy.samples_per_s, ".4g")
            if is_predicted:
                gain = f"{_size(remedy.safe_batch_size)} in {row.memory}"
            figures = "" if before is None else _mib(before, unit), _mib(after, unit)
            table.add_row(*start, keys, *figures, saved, gain)
    return table


def _rows_with_remedies(analysis: Analysis) -> list[Row]:
    """Measured rows of the same size have the same effects; predicted ones differ by what then fits."""
    rows = analysis.sorted_rows()
    if analysis.is_predicted:
        return analysis.one_per_device(rows)
    return list({(row.mode, row.batch_size): row for row in rows}.values())


def yaml_lines(analysis: Analysis) -> str:
    """YAML to paste into a configuration: one block for each fraction that has a size."""
    keys = {"train": "BATCH_SIZE", "val": "BATCH_SIZE_VAL"}
    blocks = []
    places = {(row.device, row.memory_fraction): row for row in analysis.sorted_rows()}
    for (device, fraction), one in sorted(places.items(), key=lambda place: _order(analysis, place[1])):
        rows = [
            row for row in analysis.sorted_rows() if (row.device, row.memory_fraction) == (device, fraction)
        ]
        lines = [f"  {keys[row.mode]}: {row.safe_size}" for row in rows if row.safe_size is not None]
        if lines:
            blocks.append("\n".join([f"# {_heading(one)}", "DATA:", *lines]))
    return "\n\n".join(blocks)


def _order(analysis: Analysis, row: Row) -> tuple[int, float]:
    return analysis.devices.index(row.device), row.memory_fraction


def _heading(row: Row) -> str:
    if row.predicted is None:
        return f"{row.memory} of the memory"
    return f"{row.memory}: predicted, the size that fits with {_percent(row.predicted.margin)} margin"


def _gib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / GIB:.3f}"


def _mib(num_bytes: int, like: int = 0) -> str:
    """MiB, or GiB where the number, or another one that stands beside it, is large."""
    in_mib = max(num_bytes, like) < 10 * GIB
    return f"{num_bytes / _MIB:.1f} MiB" if in_mib else f"{num_bytes / GIB:.2f} GiB"


def _part(num_bytes: int, row: Row) -> str:
    return f"{_mib(num_bytes)} {num_bytes / (row.peak_bytes or 1):6.1%}"
