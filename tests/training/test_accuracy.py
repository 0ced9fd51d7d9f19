"""Accuracy, loss and consistency, against scikit-learn, in one process; `test_ranks.py` has several."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    top_k_accuracy_score,
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


def make_taxonomy(parents=PARENTS):
    names = ("family", "species")
    levels = [
        Level(name, tuple(f"{name}{i}" for i in range(n)))
        for name, n in zip(names, NUM_CLASSES, strict=True)
    ]
    return Taxonomy(tuple(levels), (parents,))


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


def fill(metrics, num_samples):
    logits, targets, losses = samples()
    for rows in torch.arange(num_samples).split(4):
        metrics.update(tuple(level[rows] for level in logits), targets[rows], losses[rows].mean())


def computed(metrics):
    return metrics.compute(World(CPU))


def computed_by_hand():
    logits, targets, losses = samples()
    logits, targets = [level.numpy() for level in logits], targets.numpy()
    values = {"loss": float(losses.mean())}
    for level, name in enumerate(("family", "species")):
        known = targets[:, level] >= 0
        labels, scores = targets[known, level], logits[level][known]
        predicted = scores.argmax(1)
        values[f"top1/{name}"] = accuracy_score(labels, predicted)
        values[f"macro/{name}"] = balanced_accuracy_score(labels, predicted)
        present = np.unique(labels)  # as `evaluate` does
        values[f"f1/{name}"] = f1_score(labels, predicted, labels=present, average="macro")
    values["top5/species"] = top_k_accuracy_score(labels, scores, k=5, labels=np.arange(8))
    parents = np.array(PARENTS)[logits[1].argmax(1)]
    values["consistent"] = (parents == logits[0].argmax(1)).mean()
    return values


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_values_of_uneven_batches_since_the_reset():
    metrics = ClassificationMetrics(make_taxonomy())
    fill(metrics, 3)
    metrics.reset()
    fill(metrics, NUM_SAMPLES)
    expected = computed_by_hand()
    assert all(0 < value < 2 for value in expected.values())
    assert computed(metrics) == pytest.approx(expected, rel=1e-6)
    assert expected["macro/species"] != expected["top1/species"], "classes are not uneven"


# --- consistency ---


def test_consistent_leaves_out_classes_without_a_known_parent():
    metrics = ClassificationMetrics(make_taxonomy((-1, *PARENTS[1:])))
    coarse, fine = torch.eye(3)[[0, 0, 1]], torch.eye(8)[[0, 1, 1]]
    metrics.update((coarse, fine), torch.zeros(3, 2, dtype=torch.long), torch.tensor(0.0))
    assert computed(metrics)["consistent"] == 0.5


# --- several labels per sample ---


def test_figures_of_many_classes_are_those_by_hand():
    generator = torch.Generator().manual_seed(2)
    scores = torch.randint(0, 20, (30, 40), generator=generator) / 20  # some are equal
    targets = torch.randint(-1, 2, (30, 40), generator=generator).to(torch.int8)
    targets[:, 5] = targets[:, 5].clamp(max=0)  # no positive sample
    found = figures_of_sets(scores, targets)[3:]
    assert found.isnan().any(0).nonzero().tolist() == [[5]]
    for label in {*range(40)} - {5}:
        known = targets[:, label] >= 0
        truth, values = targets[known, label].numpy(), scores[known, label].double().numpy()
        ascending = np.unique(values)
        f1 = [f1_score(truth, values >= each) for each in ascending]
        best = np.argmax(f1)
        threshold = (ascending[best] + (ascending[best - 1] if best else 0.0)) / 2
        expected = [average_precision_score(truth, values), f1[best], threshold]
        assert found[:, label].tolist() == pytest.approx(expected, rel=1e-12)


# --- special cases ---


def test_the_headline_is_the_finest_weighted_level_or_the_loss():
    names, own = ["loss", "top1/family", "top1/species", "consistent"], torch.nn.Module()
    assert (headline(["loss"], own), headline(names, own)) == ("loss", "top1/species")
    assert headline(names, TaxonomicCrossEntropy(["f", "s"], [1.0, 0.0])) == "top1/family"


def test_steps_that_a_scaler_skips_are_left_out_of_the_mean():
    meter = LossMeter(World(CPU), torch.amp.GradScaler("cpu"))
    for loss in (1.0, math.inf, 2.0, math.nan, 6.0):
        meter.add(torch.tensor(loss))
    assert meter.state() == (9.0, 3)
    assert meter.drain() == 3.0
    meter.add(torch.tensor(math.nan))
    assert math.isnan(meter.drain()), "no step counts"


def test_a_loss_scale_that_is_too_small_ends_the_run():
    small, too_small = (
        LossMeter(World(CPU), torch.amp.GradScaler("cpu", init_scale=scale))
        for scale in (2.0**-4, 2.0**-5)
    )
    for meter in (small, too_small):
        meter.add(torch.tensor(1.0))
    assert small.mean() == 1.0
    with pytest.raises(LinnaeusError, match=r"TRAIN\.AMP bf16"):
        too_small.mean()
