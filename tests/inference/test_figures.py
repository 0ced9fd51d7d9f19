"""Figures of an evaluation, against torchmetrics and by hand."""

import math

import pytest
import torch
from torchmetrics import functional as reference

from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.inference import figures as module
from linnaeus.inference.figures import EvaluationMetrics, distance_of_mistakes
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import LinnaeusError

CPU = torch.device("cpu")
LEVELS = (
    Level("order", tuple("pq")),
    Level("family", tuple("abc")),
    Level("species", tuple("uvwxyz")),
)
TAXONOMY = Taxonomy(LEVELS, ((0, 0, 1), (0, 0, 1, 1, 2, -1)))
TWO = Taxonomy((Level("class", ("a", "b")),))
COUNTS = list(TAXONOMY.num_classes.values())


def make_batches(num_batches=7, size=11):
    """Logits and labels, of which some are unknown; class `w` never occurs."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(num_batches):
        logits = tuple(4 * torch.randn(size, count, generator=generator) for count in COUNTS)
        labels = torch.stack(
            [torch.randint(-1, count, (size,), generator=generator) for count in COUNTS], 1
        )
        labels[labels[:, 2] == 2, 2] = 3
        batches.append((logits, labels))
    return batches


def figures(batches, taxonomy=TAXONOMY, *, are_logs=False):
    metrics = EvaluationMetrics(taxonomy, CPU, are_logs=are_logs)
    for logits, labels in batches:
        metrics.update(logits, labels, torch.zeros(()))
    return metrics.figures(World(CPU))


def test_figures_are_those_of_torchmetrics():
    batches = make_batches()
    for level, found in enumerate(figures(batches)):
        logits = torch.cat([batch[0][level] for batch in batches])
        labels = torch.cat([batch[1][:, level] for batch in batches])
        known = labels != -1
        logits, labels = logits[known], labels[known]
        count = COUNTS[level]
        assert (found.num_samples, found.num_unlabelled) == (len(labels), int((~known).sum()))
        assert found.top1 == pytest.approx(float((logits.argmax(1) == labels).float().mean()))
        expected = reference.classification.multiclass_calibration_error(
            logits, labels, count, n_bins=15
        )
        assert found.calibration_error == pytest.approx(float(expected), abs=1e-6)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        assert found.cross_entropy == pytest.approx(float(loss), rel=1e-5)
        present = labels.bincount(minlength=count) > 0
        assert int(present.sum()) == (5 if level == 2 else count)
        means = {
            "recall": found.macro_recall,
            "precision": found.macro_precision,
            "f1_score": found.macro_f1,
        }
        for name, mean in means.items():
            compute = getattr(reference.classification, f"multiclass_{name}")
            values = compute(logits, labels, count, average="none")[present]
            assert mean == pytest.approx(float(values.mean()))
            own = getattr(found.classes, name.removesuffix("_score"))[present].nan_to_num(0.0)
            assert torch.allclose(own.float(), values)


def test_the_sizes_of_batches_and_waiting_parts_change_nothing(monkeypatch):
    batches = make_batches()
    logits, labels = zip(*batches, strict=True)
    expected = figures([(tuple(map(torch.cat, zip(*logits, strict=True))), torch.cat(labels))])
    monkeypatch.setattr(module, "HELD_ON_DEVICE", 25)
    for one, other in zip(figures(batches), expected, strict=True):
        for name in ("pairs", "pair_counts", "bins"):
            assert torch.allclose(getattr(one, name), getattr(other, name), equal_nan=True)
        assert one.cross_entropy == pytest.approx(other.cross_entropy)


@pytest.mark.parametrize(
    ("are_logs", "expected", "bins"), [(True, 0.6, [9, 14]), (False, 0.75, [11, 14])]
)
def test_log_probabilities_are_counted_as_they_are(are_logs, expected, bins):
    """Those of a marginal head need not add up to 1. A certain prediction is in the last bin."""
    logs = torch.tensor([[0.6, 0.2], [1.0, 0.0]]).log()
    (found,) = figures([(logs, torch.tensor([[0], [0]]))], TWO, are_logs=are_logs)
    assert float(found.bins[1].nansum()) == pytest.approx(1 + expected)
    assert found.bins[0].nonzero().flatten().tolist() == bins
    assert found.cross_entropy == pytest.approx(-math.log(expected) / 2)


def test_outputs_that_are_not_finite_are_an_error():
    """With or without a label."""
    logits = torch.tensor([[math.nan, 0.0], [3.0, 0.0], [0.0, math.inf]])
    labels = torch.tensor([[0], [0], [-1]])
    with pytest.raises(LinnaeusError, match=r"'class'.* 2 samples"):
        figures([(logits, labels)], TWO)


def test_a_level_without_a_label_has_no_figures():
    logits = tuple(torch.randn(4, count) for count in COUNTS)
    found = figures([(logits, torch.tensor([[0, -1, 1]] * 4))])[1]
    assert (found.num_samples, found.num_unlabelled) == (0, 4)
    assert found.top1 is found.macro_f1 is found.calibration_error is found.cross_entropy is None
    assert found.confusions(5) == found.worst(5) == []


def predicting(num_classes, pairs):
    """Outputs and labels with so many samples of each (true, predicted) pair at the only or finest level."""
    labels = torch.tensor([pair for pair, number in pairs.items() for _ in range(number)])
    return torch.nn.functional.one_hot(labels[:, 1], num_classes).float(), labels[:, :1]


def test_confusions_are_the_largest_ones_with_their_share():
    pairs = {(0, 0): 6, (0, 1): 2, (1, 0): 2, (1, 2): 5, (2, 2): 1}
    (found,) = figures([predicting(3, pairs)], Taxonomy((Level("class", ("a", "b", "c")),)))
    shown = [(each.true, each.predicted, each.samples, each.share) for each in found.confusions(2)]
    assert shown == [("b", "c", 5, 5 / 7), ("b", "a", 2, 2 / 7)]
    assert found.worst(5) == [1, 0]


def test_a_mistake_is_as_far_as_the_common_ancestor_is_high():
    """u and v share a family, u and w an order, u and y the root; the parent of z is unknown."""
    u, v, w, y, z = 0, 1, 2, 4, 5
    for pair, height in {(u, v): 1, (u, w): 2, (y, u): 3}.items():
        batch = predicting(6, {(u, u): 3, pair: 2, (u, z): 4})
        (finest,) = figures([batch], Taxonomy(LEVELS[2:]))
        found = distance_of_mistakes(TAXONOMY, finest)
        assert (found.mean_over_mistakes, found.mean_over_samples) == (height, 2 * height / 5)
        assert (found.num_mistakes, found.num_left_out) == (2, 4)
    assert distance_of_mistakes(Taxonomy(LEVELS), finest) is None
