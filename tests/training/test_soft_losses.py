"""Losses on labels and on mixed probabilities, against those of torch, timm and torchvision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.loss import BinaryCrossEntropy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.ops import sigmoid_focal_loss

from linnaeus.config.schema import LossConfig
from linnaeus.data.mixing import soft_targets
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.errors import ConfigError
from linnaeus.training.losses import SingleRank, TaxonomicLoss, build_loss

COUNTS = [3, 4]
LEVELS = tuple(Level(f"rank{i}", tuple(map(str, range(n)))) for i, n in enumerate(COUNTS))
TAXONOMY, ONE_RANK = Taxonomy(LEVELS), Taxonomy(LEVELS[1:])
WEIGHTS = [torch.tensor([0.5, 1.0, 2.0]), torch.tensor([1.0, 3.0, 0.2, 0.7])]
TARGETS = torch.tensor([[0, 1], [1, 2], [-1, 0], [2, -1], [-1, -1]])
KINDS = ("cross_entropy", "bce", "focal")
PART = 0.3
"""Part of the first image of each pair in a mixed batch."""


def logits(scale: float = 2.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    parts = (torch.randn(5, n, generator=generator, dtype=dtype) * scale for n in COUNTS)
    return tuple(part.requires_grad_() for part in parts)


def built(kind: str, taxonomy: Taxonomy = TAXONOMY, *, weighted: bool = False, **keys: Any) -> TaxonomicLoss:
    weights = WEIGHTS[-len(taxonomy.levels) :] if weighted else None
    loss = build_loss(LossConfig(NAME=kind, **keys), taxonomy, class_weights=weights)
    assert isinstance(loss, TaxonomicLoss)
    return loss.double()


def gradient(loss: nn.Module, targets: Tensor) -> list[Tensor]:
    outputs = logits()
    return list(torch.autograd.grad(loss(outputs, targets), outputs))


# --- both forms of targets ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_unmixed_probabilities_give_the_loss_of_the_labels(
    kind: str, smoothing: float, weighted: bool
) -> None:
    loss = built(kind, weighted=weighted, LABEL_SMOOTHING=smoothing)
    soft = soft_targets(TARGETS, COUNTS).double()
    torch.testing.assert_close(loss(logits(), soft), loss(logits(), TARGETS), rtol=1e-10, atol=0)
    for one, other in zip(gradient(loss, soft), gradient(loss, TARGETS), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
    assert loss(logits(), soft) != loss(logits(), soft.roll(1, 0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_mixed_batch_has_the_mean_of_the_losses_with_either_label(
    kind: str, smoothing: float, weighted: bool
) -> None:
    loss = built(kind, weighted=weighted, LABEL_SMOOTHING=smoothing)
    soft = soft_targets(TARGETS, COUNTS).double()
    mixed = PART * soft + (1 - PART) * soft.roll(1, 0)
    either = PART * loss(logits(), TARGETS) + (1 - PART) * loss(logits(), TARGETS.roll(1, 0))
    torch.testing.assert_close(loss(logits(), mixed), either, rtol=1e-10, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("soft", [False, True])
def test_unknown_labels_add_nothing_and_count_in_the_divisor(kind: str, soft: bool) -> None:
    loss = built(kind, weighted=True, LABEL_SMOOTHING=0.1)
    targets = soft_targets(TARGETS, COUNTS).double() if soft else TARGETS
    coarse, fine = gradient(loss, targets)
    assert coarse.abs().sum(1).bool().tolist() == [True, True, False, True, False]
    assert fine.abs().sum(1).bool().tolist() == [True, True, True, False, False]
    outputs = tuple(part[:4] for part in logits())
    torch.testing.assert_close(loss(logits(), targets), loss(outputs, targets[:4]) * 4 / 5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(kind: str) -> None:
    loss = built(kind, weighted=True)
    outputs = logits()
    parts = [(tuple(part[rows] for part in outputs), TARGETS[rows]) for rows in (slice(2), slice(2, 5))]
    split = sum(loss(part, labels) * len(labels) / 5 for part, labels in parts)
    for one, other in zip(torch.autograd.grad(split, outputs), gradient(loss, TARGETS), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_logits_in_half_precision_stay_finite(kind: str) -> None:
    loss = built(kind, LABEL_SMOOTHING=0.1, FOCAL_GAMMA=0.5)
    for targets in (TARGETS, soft_targets(TARGETS, COUNTS)):
        outputs = logits(300.0, torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(outputs, targets)
        assert value.isfinite()
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(value, outputs))


@pytest.mark.parametrize("kind", KINDS)
def test_losses_read_no_value_so_they_can_be_traced(kind: str) -> None:
    loss = built(kind, weighted=True, LABEL_SMOOTHING=0.1).to("meta")
    outputs = tuple(part.to("meta") for part in logits())
    for targets in (TARGETS, soft_targets(TARGETS, COUNTS)):
        assert loss(outputs, targets.to("meta")).device.type == "meta"


# --- against other libraries ---

KNOWN = torch.tensor([[1], [2], [0], [3], [1]])


def reference(kind: str, outputs: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    if kind == "cross_entropy":
        return cross_entropy(outputs, labels, label_smoothing=smoothing)
    return BinaryCrossEntropy(smoothing=smoothing)(outputs, labels)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["cross_entropy", "bce"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_on_one_rank_it_is_the_loss_of_torch_or_timm(kind: str, smoothing: float) -> None:
    loss = built(kind, ONE_RANK, LABEL_SMOOTHING=smoothing)
    outputs = logits()[1]
    expected = reference(kind, outputs, KNOWN[:, 0], smoothing)
    torch.testing.assert_close(loss(outputs, KNOWN), expected)
    # Soft targets, which both libraries take as they are.
    soft = soft_targets(KNOWN, COUNTS[1:]).double()
    mixed = PART * soft + (1 - PART) * soft.roll(1, 0)
    expected = reference(kind, outputs, mixed * (1 - smoothing) + smoothing / 4, 0.0)
    torch.testing.assert_close(loss(outputs, mixed), expected)
    assert not torch.allclose(loss(outputs, soft), expected)


def test_weighted_cross_entropy_is_torchs_sum_over_the_number_of_samples() -> None:
    loss, outputs = built("cross_entropy", ONE_RANK, weighted=True, LABEL_SMOOTHING=0.1), logits()[1]
    weights, labels = WEIGHTS[1].double(), KNOWN[:, 0]
    total = cross_entropy(outputs, labels, weights, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(loss(outputs, KNOWN), total / 5)
    mean = cross_entropy(outputs, labels, weights, label_smoothing=0.1)
    assert not torch.allclose(loss(outputs, KNOWN), mean)  # torch divides by the sum of the weights


def test_weighted_bce_weights_samples_by_their_class() -> None:
    loss, outputs = built("bce", ONE_RANK, weighted=True, LABEL_SMOOTHING=0.1), logits()[1]
    each = BinaryCrossEntropy(smoothing=0.1, reduction="none")(outputs, KNOWN[:, 0]).mean(dim=1)
    torch.testing.assert_close(loss(outputs, KNOWN), (each * WEIGHTS[1].double()[KNOWN[:, 0]]).mean())


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_loss_of_two_classes_is_torchvisions(gamma: float) -> None:
    two = Taxonomy((Level("rank", ("no", "yes")),))
    loss = built("focal", two, FOCAL_GAMMA=gamma)
    score = logits()[1][:, 0]
    labels = torch.tensor([0, 1, 1, 0, 1])
    outputs = torch.stack([torch.zeros_like(score), score], dim=1)
    expected = sigmoid_focal_loss(score, labels.double(), alpha=-1, gamma=gamma, reduction="mean")
    torch.testing.assert_close(loss(outputs, labels[:, None]), expected)
    other = sigmoid_focal_loss(score, labels.double(), alpha=-1, gamma=gamma + 1, reduction="mean")
    assert not torch.allclose(loss(outputs, labels[:, None]), other)


def test_focal_loss_without_gamma_is_cross_entropy() -> None:
    keys: dict[str, Any] = {"LABEL_SMOOTHING": 0.1, "weighted": True}
    expected = built("cross_entropy", **keys)(logits(), TARGETS)
    torch.testing.assert_close(built("focal", FOCAL_GAMMA=0.0, **keys)(logits(), TARGETS), expected)
    assert built("focal", FOCAL_GAMMA=1.0, **keys)(logits(), TARGETS) < expected


# --- weights of classes in checkpoints ---


def test_weights_are_loaded_from_a_checkpoint() -> None:
    saved = built("cross_entropy", weighted=True)
    assert sorted(saved.state_dict()) == ["class_weights_0", "class_weights_1"]
    loaded = built("cross_entropy", CLASS_WEIGHTS="balanced")
    assert loaded(logits(), TARGETS) != saved(logits(), TARGETS)
    loaded.load_state_dict(saved.state_dict())
    torch.testing.assert_close(loaded(logits(), TARGETS), saved(logits(), TARGETS))
    assert not built("cross_entropy").state_dict()


# --- losses of libraries with mixed batches ---


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("torch.nn.CrossEntropyLoss", None),
        ("timm.loss.BinaryCrossEntropy", None),
        ("torch.nn.NLLLoss", "probabilities"),
        ("timm.loss.LabelSmoothingCrossEntropy", "probabilities"),
        ("timm.loss.SoftTargetCrossEntropy", "labels"),
    ],
)
def test_losses_of_libraries_must_take_labels_and_probabilities(target: str, problem: str | None) -> None:
    loss: Callable[..., Any] = build_loss({"_target_": target}, ONE_RANK)
    assert isinstance(loss, SingleRank)
    if problem is None:
        loss.check_takes_targets(4, torch.device("cpu"), mixes=True)
        soft = soft_targets(KNOWN, COUNTS[1:])
        assert loss(logits(dtype=torch.float32)[1], soft).isfinite()
        return
    name = target.rpartition(".")[2]
    with pytest.raises(ConfigError, match=rf"LOSS: {name} does not take {problem} of classes\. With .*MIXUP"):
        loss.check_takes_targets(4, torch.device("cpu"), mixes=True)


@pytest.mark.parametrize(
    ("target", "is_taken"),
    [("torch.nn.NLLLoss", True), ("timm.loss.LabelSmoothingCrossEntropy", True), ("torch.nn.MSELoss", False),
     ("torch.nn.BCEWithLogitsLoss", False), ("timm.loss.SoftTargetCrossEntropy", False)],
)  # fmt: skip
def test_losses_of_libraries_must_take_labels(target: str, is_taken: bool) -> None:
    loss: Callable[..., Any] = build_loss({"_target_": target}, ONE_RANK)
    assert isinstance(loss, SingleRank)
    if is_taken:
        loss.check_takes_targets(4, torch.device("cpu"), mixes=False)
        return
    with pytest.raises(
        ConfigError, match=r"does not take labels of classes\. A loss gets logits .* LOSS.NAME"
    ):
        loss.check_takes_targets(4, torch.device("cpu"), mixes=False)
