"""An evaluation for people: tables, and notes about it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from linnaeus.cli.evaluate.results import Evaluation
from linnaeus.cli.tables import cell
from linnaeus.inference.figures import LevelFigures
from linnaeus.words import counted

NUM_SHOWN = 5
"""Classes and confusions in a table."""


def show(evaluation: Evaluation, console: Console) -> None:
    """Print the tables and the notes."""
    if evaluation.levels:
        console.print(levels_table(evaluation))
        finest = next((level for level in reversed(evaluation.levels) if level.num_samples), None)
        if finest is not None:
            for table in (worst_table(finest), confusions_table(finest)):
                if table.row_count:
                    console.print(table)
    for note in notes(evaluation):
        console.print(note, markup=False, soft_wrap=True)


def levels_table(evaluation: Evaluation) -> Table:
    """One line per level."""
    data = evaluation.data
    title = f"{counted(data['samples'], 'sample')} of {data['source']} ({data['part']})"
    table = Table(title=title, title_justify="left")
    headings = {
        "samples": ("samples", "d"), "unlabelled": ("unlabelled", "d"), "top1": ("top-1", ".4f"),
        "top5": ("top-5", ".4f"), "macro_recall": ("macro recall", ".4f"),
        "macro_precision": ("precision", ".4f"), "macro_f1": ("F1", ".4f"),
        "calibration_error": ("calib. error", ".4f"), "cross_entropy": ("cross-entropy", ".4f"),
    }  # fmt: skip
    if not any(level.num_unlabelled for level in evaluation.levels):
        del headings["unlabelled"]
    table.add_column("rank")
    for heading, _ in headings.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for level in evaluation.levels:
        row = evaluation.level_row(level)
        table.add_row(level.level.name, *(cell(row[name], form) for name, (_, form) in headings.items()))
    return table


def worst_table(level: LevelFigures) -> Table:
    """The classes with the lowest recall."""
    table = Table(title=f"Lowest recall: {level.level.name}", title_justify="left")
    table.add_column("class")
    for heading in ("samples", "recall", "precision"):
        table.add_column(heading, justify="right")
    recall, precision = level.classes.recall, level.classes.precision
    for label in level.worst(NUM_SHOWN):
        shown = "" if precision[label].isnan() else f"{precision[label]:.4f}"
        samples = str(int(level.classes.num_samples[label]))
        table.add_row(level.level.classes[label], samples, f"{recall[label]:.4f}", shown)
    return table


def confusions_table(level: LevelFigures) -> Table:
    """The largest confusions."""
    table = Table(title=f"Largest confusions: {level.level.name}", title_justify="left")
    for heading in ("class", "taken for"):
        table.add_column(heading)
    for heading in ("samples", "of the class"):
        table.add_column(heading, justify="right")
    for confusion in level.confusions(NUM_SHOWN):
        table.add_row(confusion.true, confusion.predicted, str(confusion.samples), f"{confusion.share:.1%}")
    return table


def notes(evaluation: Evaluation) -> list[str]:
    """Notes below the tables: loss, consistency, distance of mistakes, the comparison with training."""
    metrics, distance = evaluation.metrics, evaluation.distance
    found = [f"loss {metrics['loss']:.4f}"]
    if "consistent" in metrics:
        found[0] += (
            f"; of the samples whose predicted classes have known parents, {metrics['consistent']:.2%} agree "
            "with the taxonomy"
        )
    if distance is not None and distance.mean_over_mistakes is not None:
        found.append(
            f"mean distance of {counted(distance.num_mistakes, 'mistake')} to the lowest common ancestor: "
            f"{distance.mean_over_mistakes:.3f} ranks ({distance.mean_over_samples:.3f} over all samples, "
            "correct ones as 0)"
        )
        if distance.num_left_out:
            found[-1] += f"; {counted(distance.num_left_out, 'mistake')} with an unknown ancestor left out"
    if evaluation.logged is not None:
        found.append(evaluation.logged.sentence(metrics))
    return found
