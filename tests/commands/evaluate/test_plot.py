"""The picture of an evaluation."""

from __future__ import annotations

from pathlib import Path

import torch

from linnaeus.commands.evaluate.plot import save_plot
from linnaeus.commands.evaluate.results import Evaluation
from linnaeus.data.taxonomy import Level
from linnaeus.inference.figures import LevelFigures
from linnaeus.inference.tally import NUM_BINS, LevelCounts

NAMES = ("raven", "tit", "wryneck", "thrush", "nuthatch", "woodpecker")


def test_a_matrix_has_the_classes_that_occur(tmp_path: Path) -> None:
    """Rows are those with samples, columns also those that are predicted; a table below names all classes."""
    count = len(NAMES)
    true_and_predicted = [(0, 0), (0, 1), (1, 1), (2, 0), (2, 2), (2, 3)]
    counts = LevelCounts(
        count,
        torch.tensor([true * count + predicted for true, predicted in true_and_predicted]),
        torch.tensor([5, 2, 7, 4, 1, 2]),
        torch.ones(3, NUM_BINS, dtype=torch.float64),
    )
    level = LevelFigures.of(Level("species", NAMES), counts)
    data = {"samples": 21, "source": "birds", "part": "validation split"}
    evaluation = Evaluation(
        {"name": "best.pt"}, data, {}, {}, {"loss": 1.0}, [level], None, None, duration_s=1.0
    )
    save_plot(evaluation, tmp_path / "plot.html")
    text = (tmp_path / "plot.html").read_text()
    named = {name: text.count(f">{name}<") for name in NAMES}
    assert named == {"raven": 3, "tit": 3, "wryneck": 3, "thrush": 2, "nuthatch": 1, "woodpecker": 1}
