"""Accuracy, loss and consistency, against numpy by hand, in one process and in several."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
)

from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import LinnaeusError
from linnaeus.training.accuracy import (
    ClassificationMetrics,
    LossMeter,
    figures_of_sets,
    headline,
)
from linnaeus.training.losses import TaxonomicCrossEntropy

CPU = torch.device("cpu")
NUM_CLASSES = (3, 8)
PARENTS = (0, 0, 0, 1, 1, 1, 2, 2)
NUM_SAMPLES = 11


def make_taxonomy(parents=(PARENTS,)):
    names = ("family", "species")
    levels = [
        Level(name, tuple(f"{name}{i}" for i in range(n)))
        for name, n in zip(names, NUM_CLASSES, strict=True)
    ]
    return Taxonomy(tuple(levels), parents)


def samples():
    """Logits per level, targets with unknown labels, and a loss per sample that adds up without rounding."""
    generator = torch.Generator().manual_seed(3)
    logits = [torch.randn(NUM_SAMPLES, count, generator=generator) for count in NUM_CLASSES]
    targets = torch.stack(
        [torch.randint(0, count, (NUM_SAMPLES,), generator=generator) for count in NUM_CLASSES], 1
    )
    targets[:4, 1] = logits[1][:4].argmax(1)
    targets[2, 0] = targets[5, 1] = targets[7, 0] = targets[7, 1] = -1
    return logits, targets, torch.arange(NUM_SAMPLES) / 8


def fill(metrics, indices, batch_size=4):
    logits, targets, losses = samples()
    for rows in torch.tensor(list(indices), dtype=torch.long).split(batch_size):
        if len(rows):
            metrics.update(
                tuple(level[rows] for level in logits), targets[rows], losses[rows].mean()
            )


def computed(metrics):
    return metrics.compute(World(CPU))


def computed_by_hand():
    logits, targets, losses = samples()
    logits, targets = [level.numpy() for level in logits], targets.numpy()
    values = {"loss": float(losses.mean())}
    for level, name in enumerate(("family", "species")):
        known = targets[:, level] >= 0
        best_first = np.argsort(-logits[level], axis=1)
        hits = best_first == targets[:, level, None]
        values[f"top1/{name}"] = hits[known, :1].any(1).mean()
        values[f"top5/{name}"] = hits[known, :5].any(1).mean()
        labels, predicted = targets[known, level], best_first[known, 0]
        values[f"macro/{name}"] = balanced_accuracy_score(labels, predicted)
        present = np.unique(labels)  # as `evaluate` does
        values[f"f1/{name}"] = f1_score(labels, predicted, labels=present, average="macro")
    del values["top5/family"]
    parents = np.array(PARENTS)[logits[1].argmax(1)]
    values["consistent"] = (parents == logits[0].argmax(1)).mean()
    return values


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.parametrize("batch_size", [1, 4, NUM_SAMPLES])
def test_values_against_numpy_for_any_batches_since_the_reset(batch_size):
    metrics = ClassificationMetrics(make_taxonomy())
    fill(metrics, [0, 1, 2])
    metrics.reset()
    fill(metrics, range(NUM_SAMPLES), batch_size)
    expected = computed_by_hand()
    assert all(0 < value < 2 for value in expected.values())
    assert computed(metrics) == pytest.approx(expected, rel=1e-6)
    assert expected["macro/species"] != expected["top1/species"], "classes are not uneven"


# --- consistency ---


@pytest.mark.parametrize(
    ("parents", "expected"),
    [
        (((-1, *PARENTS[1:]),), 0.5),  # the parent of 0 is not known
        ((), None),
    ],
)
def test_consistent_is_the_share_under_the_predicted_parent(parents, expected):
    metrics = ClassificationMetrics(make_taxonomy(parents))
    coarse, fine = torch.eye(3)[[0, 0, 1]], torch.eye(8)[[0, 1, 1]]
    metrics.update((coarse, fine), torch.zeros(3, 2, dtype=torch.long), torch.tensor(0.0))
    assert computed(metrics).get("consistent") == expected


# --- several labels per sample ---


@pytest.mark.parametrize("num_values", [4, 10**6], ids=["equal probabilities", "distinct"])
def test_figures_of_many_classes_are_those_by_hand(num_values):
    generator = torch.Generator().manual_seed(2)
    scores = torch.randint(0, num_values, (30, 70), generator=generator) / num_values
    targets = torch.randint(-1, 2, (30, 70), generator=generator).to(torch.int8)
    targets[:, 5] = targets[:, 5].clamp(max=0)  # no positive sample
    found = figures_of_sets(scores, targets)
    assert found[3:].isnan().any(0).nonzero().tolist() == [[5]]
    for label in (i for i in range(70) if i != 5):
        known = targets[:, label] >= 0
        truth, values = targets[known, label].numpy(), scores[known, label].double().numpy()
        ascending = np.unique(values)
        is_predicted = values >= ascending[:, None]
        num_correct = (is_predicted & (truth == 1)).sum(axis=1)
        f1 = 2 * num_correct / (is_predicted.sum(axis=1) + truth.sum())
        best = f1.argmax()
        threshold = (ascending[best] + (ascending[best - 1] if best else 0.0)) / 2
        expected = [average_precision_score(truth, values), f1[best], threshold]
        assert found[3:, label].tolist() == pytest.approx(expected, rel=1e-12)


# --- special cases ---


def test_without_a_taxonomy_there_is_only_the_loss():
    metrics = ClassificationMetrics(None)
    for size, loss in ((3, 2.0), (1, 4.0)):
        metrics.update({"boxes": torch.zeros(size, 4)}, torch.zeros(size, 7), torch.tensor(loss))
    assert computed(metrics) == {"loss": 2.5}


TWO_LEVELS = {"loss": 2.0, "top1/family": 0.9, "top1/species": 0.5, "consistent": 1.0}


@pytest.mark.parametrize(
    ("values", "level_weights", "expected"),
    [
        ({"loss": 2.0}, None, "loss"),
        (TWO_LEVELS, None, "top1/species"),
        (TWO_LEVELS, [1.0, 0.0], "top1/family"),  # the species are not learnt
    ],
)
def test_the_headline_is_the_finest_weighted_level_or_the_loss(values, level_weights, expected):
    loss = (
        torch.nn.Module()
        if level_weights is None
        else TaxonomicCrossEntropy(["f", "s"], level_weights)
    )
    assert headline([*values], loss) == expected


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_steps_that_a_scaler_skips_are_left_out_of_the_mean(bad):
    meter, plain = (
        LossMeter(World(CPU), torch.amp.GradScaler("cpu", enabled=scales))
        for scales in (True, False)
    )
    for loss in (1.0, bad, 2.0, bad, 6.0):
        meter.add(torch.tensor(loss))
    assert meter.state() == (9.0, 3)
    assert meter.drain() == 3.0
    meter.add(torch.tensor(bad))
    assert math.isnan(meter.drain()), "no step counts"
    for loss in (1.0, bad):
        plain.add(torch.tensor(loss))
    with pytest.raises(LinnaeusError, match="training loss"):
        plain.mean()


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_gradients_that_always_overflow_end_the_run(start):
    """Also where the loss is finite: the gradient of a square root at 0 is not."""
    weight = torch.full((1,), start, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=0.0), torch.amp.GradScaler("cpu")
    meter = LossMeter(World(CPU), scaler)
    for number in range(40):
        if number == 10:
            assert meter.mean() == start, "the scaler may look for its scale"
        loss = weight.sqrt().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        meter.add(loss.detach())
    if start:
        assert meter.mean() == start
    else:
        with pytest.raises(LinnaeusError, match=r"TRAIN\.AMP bf16"):
            meter.mean()
