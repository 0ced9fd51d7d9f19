"""Cross-entropy per rank, against torch by hand."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from linnaeus.config.schema import LossConfig
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.errors import ConfigError
from linnaeus.training.losses import TaxonomicCrossEntropy, build_loss, logits_per_level

RANKS = ("family", "species")
TAXONOMY = Taxonomy(
    (Level("family", ("cats", "dogs")), Level("species", ("lion", "lynx", "wolf"))), ((0, 0, 1),)
)
TARGETS = torch.tensor([[0, 1], [1, 2], [-1, 0], [0, -1]])


def logits(requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    coarse, fine = (torch.randn(4, count, generator=generator, dtype=torch.float64) for count in (2, 3))
    return coarse.requires_grad_(requires_grad), fine.requires_grad_(requires_grad)


class Distance(nn.Module):
    """A user's loss that knows the classes."""

    def __init__(self, taxonomy: Taxonomy, power: float = 1.0) -> None:
        super().__init__()
        self.taxonomy, self.power = taxonomy, power


def not_a_module() -> int:
    return 3


# --- the value ---


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0), (0.0, 2.0)])
def test_weighted_mean_of_the_ranks_means_over_all_samples(
    smoothing: float, weights: tuple[float, float]
) -> None:
    coarse, fine = logits()
    by_rank = (
        cross_entropy(coarse[[0, 1, 3]], torch.tensor([0, 1, 0]), label_smoothing=smoothing) * 3 / 4,
        cross_entropy(fine[[0, 1, 2]], torch.tensor([1, 2, 0]), label_smoothing=smoothing) * 3 / 4,
    )
    expected = (weights[0] * by_rank[0] + weights[1] * by_rank[1]) / sum(weights)
    loss = TaxonomicCrossEntropy(RANKS, weights, smoothing)((coarse, fine), TARGETS)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_unknown_labels_have_no_gradient() -> None:
    coarse, fine = logits(requires_grad=True)
    TaxonomicCrossEntropy(RANKS, (1, 1), 0.1)((coarse, fine), TARGETS).backward()
    assert coarse.grad is not None
    assert fine.grad is not None
    assert coarse.grad.abs().sum(1).bool().tolist() == [True, True, False, True]
    assert fine.grad.abs().sum(1).bool().tolist() == [True, True, True, False]


def test_a_rank_without_known_labels_adds_nothing() -> None:
    coarse, fine = logits()
    targets = torch.tensor([[0, -1], [1, -1], [1, -1], [0, -1]])
    loss = TaxonomicCrossEntropy(RANKS, (1, 1))((coarse, fine), targets)
    torch.testing.assert_close(loss, cross_entropy(coarse, targets[:, 0]) / 2)


def test_no_known_label_at_all_gives_zero_and_a_finite_gradient() -> None:
    coarse, fine = logits(requires_grad=True)
    loss = TaxonomicCrossEntropy(RANKS, (1, 1), 0.1)((coarse, fine), torch.full((4, 2), -1))
    loss.backward()
    assert loss.item() == 0
    assert coarse.grad is not None
    assert fine.grad is not None
    assert not coarse.grad.any()
    assert not fine.grad.any()


# --- the outputs of a model ---


@pytest.mark.parametrize(
    "outputs",
    [
        logits(),
        list(logits()),
        dict(zip(RANKS, logits(), strict=True)),
        OrderedDict(zip(RANKS[::-1], logits()[::-1], strict=True)),
        {**dict(zip(RANKS, logits(), strict=True)), "features": torch.zeros(4, 7)},
    ],
    ids=["tuple", "list", "dict", "another order", "more than the ranks"],
)
def test_outputs_are_taken_in_rank_order(outputs: Any) -> None:
    found = logits_per_level(outputs, RANKS)
    assert all(torch.equal(a, b) for a, b in zip(found, logits(), strict=True))


def test_one_rank_may_be_a_plain_tensor() -> None:
    coarse, _ = logits()
    assert logits_per_level(coarse, ["family"])[0] is coarse
    loss = TaxonomicCrossEntropy(["family"], [5.0])(coarse, torch.tensor([[0], [1], [1], [0]]))
    torch.testing.assert_close(loss, cross_entropy(coarse, torch.tensor([0, 1, 1, 0])))


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (torch.zeros(4, 3), r"MODEL: it gives 1 outputs for 2 ranks \['family', 'species'\]"),
        ((torch.zeros(4, 3),) * 3, "MODEL: it gives 3 outputs for 2 ranks"),
        ({"family": 0, "genus": 0}, r"no key for rank 'species'; it has \['family', 'genus'\]"),
        (None, "MODEL: it gives a NoneType"),
        (3.0, "MODEL: it gives a float"),
    ],
)
def test_outputs_that_do_not_fit_say_so(outputs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        logits_per_level(outputs, RANKS)


# --- from the LOSS node ---


def test_ranks_count_the_same_unless_told_otherwise() -> None:
    loss = build_loss(LossConfig(LABEL_SMOOTHING=0.2), TAXONOMY)
    assert isinstance(loss, TaxonomicCrossEntropy)
    assert (loss.level_names, loss.level_weights, loss.label_smoothing) == (RANKS, (0.5, 0.5), 0.2)


def test_weights_are_normalised() -> None:
    loss = build_loss(LossConfig(RANK_WEIGHTS=[1.0, 3.0]), TAXONOMY)
    assert loss.level_weights == (0.25, 0.75)


@pytest.mark.parametrize(
    ("node", "taxonomy", "message"),
    [
        (LossConfig(RANK_WEIGHTS=[1.0]), TAXONOMY, r"LOSS.RANK_WEIGHTS: \[1.0\] has 1 weights for 2 ranks"),
        (LossConfig(RANK_WEIGHTS=[0.0, 0.0]), TAXONOMY, "LOSS.RANK_WEIGHTS: .* at least one rank must count"),
        (LossConfig(), None, "no class labels; name your own loss in LOSS._target_"),
        (
            {"_target_": "torch.nn.NoSuchLoss"},
            None,
            "LOSS._target_: 'torch.nn.NoSuchLoss' cannot be imported",
        ),
        ({"_target_": f"{__name__}.not_a_module"}, None, "LOSS: .*not_a_module gave a int, not an nn.Module"),
    ],
)
def test_nodes_that_cannot_be_used_say_why(node: Any, taxonomy: Taxonomy | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_loss(node, taxonomy)


def test_a_users_loss_is_offered_the_taxonomy() -> None:
    loss = build_loss({"_target_": f"{__name__}.Distance", "power": 2.0}, TAXONOMY)
    assert isinstance(loss, Distance)
    assert loss.taxonomy is TAXONOMY
    assert loss.power == 2.0


def test_a_users_loss_need_not_know_the_taxonomy() -> None:
    assert isinstance(build_loss({"_target_": "torch.nn.MSELoss"}, None), nn.MSELoss)


# --- losses of torch ---

ONE_RANK = Taxonomy((Level("species", ("lion", "lynx", "wolf")),), ())
CROSS_ENTROPY = "torch.nn.CrossEntropyLoss"


class Weighted(nn.Module):
    """A user's loss with arguments of several types."""

    def __init__(self, weight: Tensor | None, names: list[str], factors: list[float]) -> None:
        super().__init__()
        self.weight, self.names, self.factors = weight, names, factors

    def forward(self, outputs: Any, targets: Tensor) -> Any:
        return outputs, targets


@pytest.mark.parametrize("form", [lambda fine: fine, lambda fine: (fine,), lambda fine: {"species": fine}])
def test_a_loss_of_torch_gets_plain_tensors_of_one_rank(form: Any) -> None:
    fine, labels = logits()[1], TARGETS[:3, 1:]
    loss = build_loss({"_target_": CROSS_ENTROPY, "label_smoothing": 0.1}, ONE_RANK)
    expected = cross_entropy(fine[:3], labels[:, 0], label_smoothing=0.1)
    torch.testing.assert_close(loss(form(fine[:3]), labels), expected)


def test_a_loss_of_torch_leaves_unknown_labels_out() -> None:
    fine, labels = logits()[1], TARGETS[:, 1:]
    expected = cross_entropy(fine[:3], labels[:3, 0])
    torch.testing.assert_close(build_loss({"_target_": CROSS_ENTROPY}, ONE_RANK)(fine, labels), expected)
    with pytest.raises(IndexError, match="Target -1 is out of bounds"):
        build_loss({"_target_": CROSS_ENTROPY, "ignore_index": 2}, ONE_RANK)(fine, labels)


@pytest.mark.parametrize("weights", [[1.0, 2.0, 4.0], [1, 2, 4]])
def test_a_list_is_a_tensor_where_the_signature_asks_for_one(weights: list[Any]) -> None:
    fine, labels = logits()[1].float(), TARGETS[:3, 1:]
    loss = build_loss({"_target_": CROSS_ENTROPY, "weight": weights}, ONE_RANK)
    expected = cross_entropy(fine[:3], labels[:, 0], weight=torch.tensor([1.0, 2.0, 4.0]))
    torch.testing.assert_close(loss(fine[:3], labels), expected)


def test_other_lists_stay_lists() -> None:
    node = {"_target_": f"{__name__}.Weighted", "weight": [1, 2], "names": ["a"], "factors": [1.5]}
    loss = build_loss(node, TAXONOMY, torch.device("meta"))
    assert (loss.names, loss.factors) == (["a"], [1.5])
    assert (loss.weight.dtype, loss.weight.device.type) == (torch.float32, "meta")
    assert build_loss({**node, "weight": None}, TAXONOMY).weight is None


def test_a_users_own_loss_gets_what_the_model_gives() -> None:
    node = {"_target_": f"{__name__}.Weighted", "weight": None, "names": [], "factors": []}
    outputs = (logits()[1],)
    assert build_loss(node, ONE_RANK)(outputs, TARGETS[:, 1:])[0] is outputs


@pytest.mark.parametrize(
    ("arguments", "taxonomy", "message"),
    [
        ({}, TAXONOMY, r"LOSS: torch\.nn\.Cross.* one taxonomic rank, but there are 2 \(family, "),
        ({"weight": [1.0, 2.0]}, ONE_RANK, r"LOSS\.weight: \[1.0, 2.0\] has 2 weights for 3 classes"),
        ({"weight": ["a"]}, ONE_RANK, "weight must be a list of numbers, not .'a'.*"),
        ({"WEIGHT": [1.0]}, ONE_RANK, r"argument 'WEIGHT'; did you mean LOSS\.weight\?"),
    ],
)  # fmt: skip
def test_what_a_loss_of_torch_cannot_do_is_said(
    arguments: dict[str, Any], taxonomy: Taxonomy, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_loss({"_target_": CROSS_ENTROPY, **arguments}, taxonomy)
