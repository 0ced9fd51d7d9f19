"""Losses on labels and on mixed probabilities, against those of torch, timm and torchvision."""

import pytest
import torch
from timm.loss import BinaryCrossEntropy
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torchvision.ops import sigmoid_focal_loss

from linnaeus.config.schema import LossConfig
from linnaeus.data.mixing import soft_targets
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.training.losses import build_loss, logits_per_level
from tests.helpers.bits import bits

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


# --- both forms of targets ---


@pytest.mark.parametrize(("kind", "smoothing", "weighted"), VARIANTS)
def test_probabilities_give_the_loss_of_the_labels_that_they_mix(kind, smoothing, weighted):
    loss = built(kind, weighted=weighted, LABEL_SMOOTHING=smoothing)
    soft = soft_targets(TARGETS, COUNTS).double()
    torch.testing.assert_close(loss(logits(), soft), loss(logits(), TARGETS), rtol=1e-10, atol=0)
    for one, other in zip(gradient(loss, soft), gradient(loss, TARGETS), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
    mixed = PART * soft + (1 - PART) * soft.roll(1, 0)
    either = PART * loss(logits(), TARGETS) + (1 - PART) * loss(logits(), TARGETS.roll(1, 0))
    torch.testing.assert_close(loss(logits(), mixed), either, rtol=1e-10, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_labels_add_nothing(kind):
    loss = built(kind, weighted=True, LABEL_SMOOTHING=0.1)
    assert loss(logits(), torch.full((5, 2), -1)) == 0
    for targets in (TARGETS, soft_targets(TARGETS, COUNTS).double()):
        for level, part in enumerate(gradient(loss, targets)):
            assert torch.equal(part.any(dim=1), TARGETS[:, level] >= 0)


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_logits_give_finite_losses_and_no_value_is_read(kind):
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


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_on_one_level_it_is_the_loss_of_torch_or_timm_by_sample(smoothing):
    """Times the weights of the classes, which leave the divisor alone."""
    outputs, labels, weights = logits()[1], KNOWN[:, 0], STATISTICS["class_weights"][1].double()
    options = {"reduction": "none"}
    by_class = BinaryCrossEntropy(smoothing=smoothing, **options)(outputs, labels)
    expected = {
        "cross_entropy": cross_entropy(
            outputs, labels, weights, label_smoothing=smoothing, **options
        ),
        "bce": by_class.mean(dim=1) * weights[labels],
    }
    for kind, by_sample in expected.items():
        loss = built(kind, ONE_LEVEL, ["class_weights"], LABEL_SMOOTHING=smoothing)
        torch.testing.assert_close(loss(outputs, KNOWN), by_sample.mean())


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_focal_loss_of_two_classes_is_torchvisions(gamma):
    loss = built("focal", Taxonomy((Level("level", ("no", "yes")),)), FOCAL_GAMMA=gamma)
    score, labels = logits()[1][:, 0], torch.tensor([0, 1, 1, 0, 1])
    outputs = torch.stack([torch.zeros_like(score), score], dim=1)
    expected = sigmoid_focal_loss(score, labels.double(), alpha=-1, gamma=gamma, reduction="mean")
    torch.testing.assert_close(loss(outputs, labels[:, None]), expected)


@pytest.mark.parametrize("kind", ["cross_entropy", "focal"])
def test_offsets_are_added_to_the_logits(kind):
    offsets = [level.double() for level in STATISTICS["logit_offsets"]]
    shifted = tuple(level + each for level, each in zip(logits(), offsets, strict=True))
    plain, adjusted = built(kind), built(kind, statistics=["logit_offsets"])
    torch.testing.assert_close(adjusted(logits(), TARGETS), plain(shifted, TARGETS))
    assert plain(logits(), TARGETS) != plain(shifted, TARGETS)


@pytest.mark.parametrize("separator", [None, ";"])
def test_the_weight_of_presence_is_that_of_torch(separator):
    """For one label and for several, of which unknown ones add nothing."""
    loss = built("bce", Taxonomy(LEVELS[1:], separator=separator), ["pos_weights"])
    outputs, one_hot = logits()[1], torch.eye(4).double()[KNOWN[:, 0]]
    options = {"pos_weight": STATISTICS["pos_weights"][1].double(), "reduction": "none"}
    expected = binary_cross_entropy_with_logits(outputs, one_hot, **options)
    torch.testing.assert_close(loss(outputs, one_hot if separator else KNOWN), expected.mean())
    if separator:
        is_known = torch.rand(5, 4, generator=torch.Generator().manual_seed(0)) < 0.5
        targets = torch.where(is_known, one_hot, -1.0)
        torch.testing.assert_close(loss(outputs, targets), (expected * is_known).mean())


# --- the outputs of a model ---


def test_outputs_are_taken_in_level_order():
    coarse, fine = logits()
    by_name = {"features": torch.zeros(5, 7), "species": fine, "family": coarse}
    for outputs in ([coarse, fine], by_name):
        assert bits(logits_per_level(outputs, NAMES)) == bits([coarse, fine])


# --- losses of libraries and of the user's own ---


def test_a_users_loss_gets_the_outputs_taxonomy_and_its_lists():
    node = {"_target_": f"{__name__}.Weighted", "weight": [1, 2], "names": ["a"]}
    loss = build_loss(node, TAXONOMY, torch.device("meta"))
    assert (loss.names, loss.taxonomy) == (["a"], TAXONOMY)
    assert (loss.weight.dtype, loss.weight.device.type) == (torch.float32, "meta")
    one, outputs = build_loss({**node, "weight": None}, ONE_LEVEL), (logits()[1],)
    assert one.weight is None
    assert one(outputs, TARGETS[:, 1:])[0] is outputs


def test_a_torch_loss_gets_plain_tensors_without_unknown_labels():
    fine, labels, weight = logits()[1].float(), TARGETS[:, 1:], [1.0, 2.0, 4.0, 8.0]
    node = {"_target_": "torch.nn.CrossEntropyLoss", "label_smoothing": 0.1, "weight": weight}
    loss = build_loss(node, ONE_LEVEL)
    expected = cross_entropy(fine[:3], labels[:3, 0], torch.tensor(weight), label_smoothing=0.1)
    torch.testing.assert_close(loss((fine,), labels), expected)
    loss.check_takes_targets(4, torch.device("cpu"), mixes=True)
