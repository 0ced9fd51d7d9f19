"""Figures of an evaluation, against torchmetrics and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torchmetrics import functional as reference

from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.dist import World
from linnaeus.inference import tally as module
from linnaeus.inference.figures import LevelFigures, distance_of_mistakes, figures_of, pair_heights
from linnaeus.inference.tally import LevelCounts, Tally

WORLD = World(torch.device("cpu"))
TAXONOMY = Taxonomy(
    (Level("order", ("p", "q")), Level("family", ("a", "b", "c")), Level("species", tuple("uvwxyz"))),
    ((0, 0, 1), (0, 0, 1, 1, 2, -1)),
)
COUNTS = list(TAXONOMY.num_classes.values())


def make_batches(num_batches: int = 7, size: int = 11) -> list[tuple[tuple[Tensor, ...], Tensor]]:
    """Logits and labels, of which some are unknown; class `w` never occurs."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(num_batches):
        logits = tuple(4 * torch.randn(size, count, generator=generator) for count in COUNTS)
        labels = torch.stack([torch.randint(-1, count, (size,), generator=generator) for count in COUNTS], 1)
        labels[labels[:, 2] == 2, 2] = 3
        batches.append((logits, labels))
    return batches


def figures(batches: list[tuple[tuple[Tensor, ...], Tensor]]) -> list[LevelFigures]:
    tally = Tally(TAXONOMY)
    for logits, labels in batches:
        tally.update(logits, labels)
    counts = tally.collect(WORLD)
    assert counts is not None
    return figures_of(TAXONOMY, counts)


def test_figures_are_those_of_torchmetrics() -> None:
    batches = make_batches()
    for level, found in enumerate(figures(batches)):
        logits = torch.cat([batch[0][level] for batch in batches])
        labels = torch.cat([batch[1][:, level] for batch in batches])
        known = labels != -1
        logits, labels = logits[known], labels[known]
        count = COUNTS[level]
        assert (found.num_samples, found.num_unknown) == (len(labels), int((~known).sum()))
        assert found.top1 == pytest.approx(float((logits.argmax(1) == labels).float().mean()))
        expected = reference.classification.multiclass_calibration_error(logits, labels, count, n_bins=15)
        assert found.calibration_error == pytest.approx(float(expected), abs=1e-6)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        assert found.cross_entropy == pytest.approx(float(loss), rel=1e-5)
        per_class = {
            name: getattr(reference.classification, f"multiclass_{name}")(
                logits, labels, count, average="none"
            )
            for name in ("recall", "precision", "f1_score")
        }
        present = labels.bincount(minlength=count) > 0
        assert found.num_classes_with_samples == int(present.sum()) == (5 if level == 2 else count)
        for name, value in zip(
            per_class, (found.macro_recall, found.macro_precision, found.macro_f1), strict=True
        ):
            assert value == pytest.approx(float(per_class[name][present].mean()))
        assert torch.allclose(found.classes.recall[present].float(), per_class["recall"][present])


def test_the_size_of_batches_and_of_waiting_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = make_batches()
    whole = [
        (
            tuple(torch.cat([batch[0][level] for batch in batches]) for level in range(len(COUNTS))),
            torch.cat([labels for _, labels in batches]),
        )
    ]
    expected = figures(whole)
    monkeypatch.setattr(module, "HELD_ON_DEVICE", 8)
    monkeypatch.setattr(module, "HELD_ON_HOST", 20)
    for one, other in zip(figures(batches), expected, strict=True):
        assert torch.equal(one.pairs.pairs, other.pairs.pairs)
        assert torch.equal(one.pairs.counts, other.pairs.counts)
        assert torch.allclose(one.bins, other.bins, equal_nan=True)
        assert one.cross_entropy == pytest.approx(other.cross_entropy)


def test_a_certain_prediction_is_in_the_last_bin() -> None:
    tally = Tally(Taxonomy((Level("class", ("a", "b")),)))
    tally.update(torch.tensor([[1000.0, 0.0], [0.0, 0.0]]), torch.tensor([[0], [0]]))
    counts = tally.collect(WORLD)
    assert counts is not None
    assert counts[0].bins[0].nonzero().flatten().tolist() == [7, 14]
    assert counts[0].bins[0].sum() == 2


def test_a_level_without_a_label_has_no_figures() -> None:
    logits = tuple(torch.randn(4, count) for count in COUNTS)
    found = figures([(logits, torch.tensor([[0, -1, 1]] * 4))])[1]
    assert (found.num_samples, found.num_unknown) == (0, 4)
    assert found.top1 is found.macro_f1 is found.calibration_error is found.cross_entropy is None
    assert found.confusions(5) == found.worst(5) == []


def test_confusions_are_the_largest_ones_with_their_share() -> None:
    counts = LevelCounts(3, torch.tensor([0, 1, 3, 5, 8]), torch.tensor([6, 2, 2, 5, 1]))
    found = LevelFigures.of(Level("class", ("a", "b", "c")), counts)
    shown = [(each.true, each.predicted, each.samples, each.share) for each in found.confusions(2)]
    assert shown == [("b", "c", 5, 5 / 7), ("b", "a", 2, 2 / 7)]
    assert found.worst(5) == [1, 0]


def test_the_distance_of_a_mistake_is_the_height_of_the_common_ancestor() -> None:
    """u and v share a family, u and w an order, u and y the root; the parent of z is unknown."""
    u, v, w, y, z = 0, 1, 2, 4, 5
    pairs = torch.tensor([(u, u), (u, v), (u, w), (y, u), (u, z), (z, z)])
    assert pair_heights(TAXONOMY, pairs[:, 0], pairs[:, 1]).tolist() == [0, 1, 2, 3, -1, 0]
    counts = LevelCounts(6, pairs[:, 0] * 6 + pairs[:, 1], torch.tensor([10, 1, 2, 3, 4, 0]))
    found = distance_of_mistakes(TAXONOMY, counts)
    assert found is not None
    assert (found.mistakes, found.samples, found.num_left_out) == (14 / 6, 14 / 16, 4)
    assert distance_of_mistakes(Taxonomy(TAXONOMY.levels), counts) is None


def test_ten_thousand_classes_take_the_memory_of_the_pairs_that_occur() -> None:
    """A dense matrix would have 10^8 entries."""
    count, generator = 10_000, torch.Generator().manual_seed(0)
    taxonomy = Taxonomy((Level("class", tuple(map(str, range(count)))),))
    tally = Tally(taxonomy)
    labels = torch.randint(count, (64, 1), generator=generator)
    for _ in range(3):
        tally.update(torch.randn(64, count, generator=generator), labels)
    counts = tally.collect(WORLD)
    assert counts is not None
    assert len(counts[0].pairs) <= 192
    assert counts[0].num_samples == 192
    assert math.isclose(figures_of(taxonomy, counts)[0].top1 or 0.0, 0.0, abs_tol=0.05)
