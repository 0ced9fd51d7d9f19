"""Losses on labels and on mixed probabilities, against those of torch, timm and torchvision."""

import math
from collections import OrderedDict

import pytest
import torch
from timm.loss import BinaryCrossEntropy
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.ops import sigmoid_focal_loss

from linnaeus.config.schema import LossConfig
from linnaeus.data.mixing import soft_targets
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.runtime.errors import ConfigError
from linnaeus.training.losses import SingleLevel, build_loss, logits_per_level

NAMES, COUNTS = ("family", "species"), [3, 4]
LEVELS = tuple(
    Level(name, tuple(map(str, range(n)))) for name, n in zip(NAMES, COUNTS, strict=True)
)
TAXONOMY, ONE_LEVEL = Taxonomy(LEVELS), Taxonomy(LEVELS[1:])
STATISTICS = {
    "class_weights": [torch.tensor([0.5, 1.0, 2.0]), torch.tensor([1.0, 3.0, 0.2, 0.7])],
    "logit_offsets": [torch.tensor([-0.1, -3.0, -4.0]), torch.tensor([-1.0, -0.7, -2.0, -5.0])],
    "pos_weights": [torch.tensor([2.0, 1.0, 0.5]), torch.tensor([1.0, 9.0, 3.0, 0.4])],
}
TARGETS = torch.tensor([[0, 1], [1, 2], [-1, 0], [2, -1], [-1, -1]])
KNOWN = torch.tensor([[1], [2], [0], [3], [1]])
KINDS = ("cross_entropy", "bce", "focal")
VARIANTS = [(kind, 0.2, True) for kind in KINDS] + [("cross_entropy", 0.0, False)]
"""Kinds of losses, their label smoothing, and whether they have all statistics of classes that they take."""
PART = 0.3
"""Part of the first image of each pair in a mixed batch."""
CROSS_ENTROPY = "torch.nn.CrossEntropyLoss"


def logits(scale=2.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    parts = (torch.randn(5, n, generator=generator, dtype=dtype) * scale for n in COUNTS)
    return tuple(part.requires_grad_() for part in parts)


def built(kind, taxonomy=TAXONOMY, statistics=(), weighted=False, **keys):
    if weighted:
        statistics = ("class_weights", "pos_weights" if kind == "bce" else "logit_offsets")
    by_name = {name: STATISTICS[name][-len(taxonomy.levels) :] for name in statistics}
    loss = build_loss(LossConfig(NAME=kind, **keys), taxonomy, statistics=by_name)
    return loss.double()


def gradient(loss, targets):
    outputs = logits()
    return list(torch.autograd.grad(loss(outputs, targets), outputs))


class Weighted(nn.Module):
    """A user's loss with arguments of several types, which knows the classes."""

    def __init__(self, weight: torch.Tensor, names, taxonomy=None):
        super().__init__()
        self.weight, self.names, self.taxonomy = weight, names, taxonomy

    def forward(self, outputs, targets):
        return outputs, targets


# --- the value ---


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, [1.0, 3.0], [0.0, 2.0]])
def test_weighted_mean_of_the_levels_means_over_all_samples(smoothing, weights):
    coarse, fine = logits()
    known = ([0, 1, 3], [0, 1, 2])
    by_level = [
        cross_entropy(part[rows], TARGETS[rows, level], label_smoothing=smoothing) * 3 / 5
        for level, (part, rows) in enumerate(zip((coarse, fine), known, strict=True))
    ]
    first, second = weights or (1.0, 1.0)
    expected = (first * by_level[0] + second * by_level[1]) / (first + second)
    loss = built("cross_entropy", LEVEL_WEIGHTS=weights, LABEL_SMOOTHING=smoothing)
    torch.testing.assert_close(loss((coarse, fine), TARGETS), expected, rtol=1e-12, atol=0)


# --- both forms of targets ---


@pytest.mark.parametrize(("kind", "smoothing", "weighted"), VARIANTS)
def test_probabilities_give_the_loss_of_the_labels_that_they_mix(kind, smoothing, weighted):
    loss = built(kind, weighted=weighted, LABEL_SMOOTHING=smoothing)
    soft = soft_targets(TARGETS, COUNTS).double()
    torch.testing.assert_close(loss(logits(), soft), loss(logits(), TARGETS), rtol=1e-10, atol=0)
    for one, other in zip(gradient(loss, soft), gradient(loss, TARGETS), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
    assert loss(logits(), soft) != loss(logits(), soft.roll(1, 0))
    mixed = PART * soft + (1 - PART) * soft.roll(1, 0)
    either = PART * loss(logits(), TARGETS) + (1 - PART) * loss(logits(), TARGETS.roll(1, 0))
    torch.testing.assert_close(loss(logits(), mixed), either, rtol=1e-10, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_labels_add_nothing(kind):
    loss = built(kind, weighted=True, LABEL_SMOOTHING=0.1)
    unknown = torch.full((5, 2), -1)
    assert loss(logits(), unknown) == 0
    assert not any(part.any() for part in gradient(loss, unknown))
    for targets in (TARGETS, soft_targets(TARGETS, COUNTS).double()):
        coarse, fine = gradient(loss, targets)
        assert coarse.abs().sum(1).bool().tolist() == [True, True, False, True, False]
        assert fine.abs().sum(1).bool().tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_logits_in_half_precision_stay_finite_and_no_value_is_read(kind):
    loss = built(kind, LABEL_SMOOTHING=0.1, FOCAL_GAMMA=0.5)
    traced = built(kind, weighted=True, LABEL_SMOOTHING=0.1).to("meta")
    for targets in (TARGETS, soft_targets(TARGETS, COUNTS)):
        outputs = logits(300.0, torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(outputs, targets)
        assert value.isfinite()
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(value, outputs))
        found = traced(tuple(part.to("meta") for part in outputs), targets.to("meta"))
        assert found.device.type == "meta"


# --- against other libraries ---


@pytest.mark.parametrize("kind", ["cross_entropy", "bce"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_on_one_level_it_is_the_loss_of_torch_or_timm(kind, smoothing):
    loss, outputs = built(kind, ONE_LEVEL, LABEL_SMOOTHING=smoothing), logits()[1]
    soft = soft_targets(KNOWN, COUNTS[1:]).double()
    mixed = PART * soft + (1 - PART) * soft.roll(1, 0)
    smooth = mixed * (1 - smoothing) + smoothing / 4  # both libraries take soft targets as they are
    if kind == "cross_entropy":
        expected = cross_entropy(outputs, KNOWN[:, 0], label_smoothing=smoothing)
        expected_mixed = cross_entropy(outputs, smooth)
    else:
        expected = BinaryCrossEntropy(smoothing=smoothing)(outputs, KNOWN[:, 0])
        expected_mixed = BinaryCrossEntropy(smoothing=0.0)(outputs, smooth)
    torch.testing.assert_close(loss(outputs, KNOWN), expected)
    torch.testing.assert_close(loss(outputs, mixed), expected_mixed)


def test_weights_of_classes_weight_samples_and_the_divisor_stays():
    outputs, labels = logits()[1], KNOWN[:, 0]
    weights = STATISTICS["class_weights"][1].double()
    loss = built("cross_entropy", ONE_LEVEL, ["class_weights"], LABEL_SMOOTHING=0.1)
    total = cross_entropy(outputs, labels, weights, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(loss(outputs, KNOWN), total / 5)
    loss = built("bce", ONE_LEVEL, ["class_weights"], LABEL_SMOOTHING=0.1)
    each = BinaryCrossEntropy(smoothing=0.1, reduction="none")(outputs, labels).mean(dim=1)
    torch.testing.assert_close(loss(outputs, KNOWN), (each * weights[labels]).mean())


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_loss_of_two_classes_is_torchvisions(gamma):
    loss = built("focal", Taxonomy((Level("level", ("no", "yes")),)), FOCAL_GAMMA=gamma)
    score, labels = logits()[1][:, 0], torch.tensor([0, 1, 1, 0, 1])
    outputs = torch.stack([torch.zeros_like(score), score], dim=1)
    expected = sigmoid_focal_loss(score, labels.double(), alpha=-1, gamma=gamma, reduction="mean")
    torch.testing.assert_close(loss(outputs, labels[:, None]), expected)


@pytest.mark.parametrize(
    ("kind", "gamma"), [("cross_entropy", 0.0), ("focal", 0.0), ("focal", 2.0)]
)
def test_offsets_of_logits_are_the_balanced_softmax(kind, gamma):
    """n_y exp(z_y) / sum_c n_c exp(z_c) for 90, 9 and 1 samples of three classes."""
    counts, taxonomy = torch.tensor([90.0, 9.0, 1.0]), Taxonomy(LEVELS[:1])
    node, offsets = LossConfig(NAME=kind, FOCAL_GAMMA=gamma), (counts / 100).log()
    loss = build_loss(node, taxonomy, statistics={"logit_offsets": [offsets]})
    outputs = torch.tensor([[0.0, 0.0, 0.0], [0.0, math.log(2), math.log(3)]])
    first, second = 0.01, 9 * 2 / (90 + 9 * 2 + 3)
    values = [-((1 - p) ** gamma) * math.log(p) for p in (first, second)]
    labels = torch.tensor([[2], [1]])
    assert float(loss(outputs, labels)) == pytest.approx(sum(values) / 2, rel=1e-5)
    plain = build_loss(node, taxonomy)
    assert float(plain(outputs, labels)) != pytest.approx(sum(values) / 2, rel=0.1)


@pytest.mark.parametrize("separator", [None, ";"])
def test_the_weight_of_presence_counts_for_present_classes_alone(separator):
    """As in torch's BCEWithLogitsLoss; for one label and for several."""
    taxonomy = Taxonomy(LEVELS[:1], separator=separator)
    loss = build_loss(
        LossConfig(NAME="bce"), taxonomy, None, {"pos_weights": [torch.tensor([5.0, 3.0, 7.0])]}
    )
    outputs = torch.tensor([[0.0, math.log(3), 0.0]])  # sigmoids 1/2, 3/4, 1/2
    targets = torch.tensor([[0.0, 1.0, 0.0]]) if separator else torch.tensor([[1]])
    expected = (2 * math.log(2) - 3 * math.log(0.75)) / 3
    assert float(loss(outputs, targets)) == pytest.approx(expected, rel=1e-5)
    if separator:
        unknown = torch.tensor([[-1.0, 1.0, -1.0]])
        assert float(loss(outputs, unknown)) == pytest.approx(-3 * math.log(0.75) / 3, rel=1e-5)


# --- the outputs of a model ---


@pytest.mark.parametrize(
    "outputs",
    [
        list(logits()),
        OrderedDict(zip(NAMES[::-1], logits()[::-1], strict=True)),
        {**dict(zip(NAMES, logits(), strict=True)), "features": torch.zeros(5, 7)},
    ],
    ids=["list", "another order", "more than the levels"],
)
def test_outputs_are_taken_in_level_order(outputs):
    found = logits_per_level(outputs, NAMES)
    assert all(torch.equal(a, b) for a, b in zip(found, logits(), strict=True))


# --- losses of libraries and of the user's own ---


def test_a_users_loss_gets_the_models_outputs_the_taxonomy_and_its_lists():
    node = {"_target_": f"{__name__}.Weighted", "weight": [1, 2], "names": ["a"]}
    loss = build_loss(node, TAXONOMY, torch.device("meta"))
    assert (loss.names, loss.taxonomy) == (["a"], TAXONOMY)
    assert (loss.weight.dtype, loss.weight.device.type) == (torch.float32, "meta")
    one, outputs = build_loss({**node, "weight": None}, ONE_LEVEL), (logits()[1],)
    assert one.weight is None
    assert one(outputs, TARGETS[:, 1:])[0] is outputs
    assert isinstance(build_loss({"_target_": "torch.nn.MSELoss"}, None), nn.MSELoss)


@pytest.mark.parametrize(
    "form", [lambda fine: fine, lambda fine: (fine,), lambda fine: {"species": fine}]
)
def test_a_loss_of_torch_gets_plain_tensors_of_one_level_and_weights(form):
    fine = logits()[1].float()
    node = {"_target_": CROSS_ENTROPY, "label_smoothing": 0.1, "weight": [1, 2, 4, 8]}
    weight = torch.tensor([1.0, 2.0, 4.0, 8.0])
    expected = cross_entropy(fine, KNOWN[:, 0], weight, label_smoothing=0.1)
    torch.testing.assert_close(build_loss(node, ONE_LEVEL)(form(fine), KNOWN), expected)


def test_a_loss_of_torch_leaves_unknown_labels_out():
    fine, labels = logits()[1], TARGETS[:, 1:]
    expected = cross_entropy(fine[:3], labels[:3, 0])
    torch.testing.assert_close(
        build_loss({"_target_": CROSS_ENTROPY}, ONE_LEVEL)(fine, labels), expected
    )
    with pytest.raises(IndexError):
        build_loss({"_target_": CROSS_ENTROPY, "ignore_index": 2}, ONE_LEVEL)(fine, labels)


@pytest.mark.parametrize(
    ("target", "takes_labels", "takes_probabilities"),
    [
        (CROSS_ENTROPY, True, True),
        ("torch.nn.NLLLoss", True, False),
        ("timm.loss.SoftTargetCrossEntropy", False, True),
        ("torch.nn.MSELoss", False, False),
    ],
)
def test_losses_of_libraries_must_take_the_targets_of_the_run(
    target, takes_labels, takes_probabilities
):
    loss = build_loss({"_target_": target}, ONE_LEVEL)
    assert isinstance(loss, SingleLevel)
    for mixes, is_taken in ((False, takes_labels), (True, takes_labels and takes_probabilities)):
        if is_taken:
            loss.check_takes_targets(4, torch.device("cpu"), mixes=mixes)
        else:
            with pytest.raises(ConfigError, match="LOSS"):
                loss.check_takes_targets(4, torch.device("cpu"), mixes=mixes)
