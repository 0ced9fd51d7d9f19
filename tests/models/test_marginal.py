"""The head whose probabilities agree from coarse to fine, against sums over leaves by hand."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from linnaeus.config.schema import ModelConfig
from linnaeus.data.taxonomy import UNKNOWN, Level, Taxonomy
from linnaeus.models.build import build_model
from linnaeus.models.hierarchical import HierarchicalClassifier, MarginalHead
from linnaeus.training.losses import TaxonomicCrossEntropy

Parents = tuple[tuple[int, ...], ...]

COUNTS = (2, 4, 6)
NESTED: Parents = ((0, 0, 1, 1), (0, 0, 1, 2, 3, 3))
CHILDLESS: Parents = ((0, 0, 0, 0), (0, 0, 2, 2, 2, 0))
"""Class 1 of the first level and classes 1 and 3 of the second have nothing below them."""
ORPHANS: Parents = ((0, UNKNOWN, 1, 1), (0, 0, 1, 2, UNKNOWN, 3))


def make_head(parents: Parents = NESTED, counts: tuple[int, ...] = COUNTS, scale: float = 1) -> MarginalHead:
    torch.manual_seed(0)
    head = MarginalHead(5, counts, parents).double()
    with torch.no_grad():
        head.leaves.weight.mul_(scale)
    return head


def features(num_samples: int = 3) -> Tensor:
    return torch.randn(num_samples, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_hand(head: MarginalHead, inputs: Tensor, parents: Parents) -> list[Tensor]:
    """Probabilities of each level: each leaf's goes to itself and to all classes above it, one by one."""
    counts = head.num_classes
    levels = [torch.zeros(len(inputs), count, dtype=torch.float64) for count in counts]
    leaves = [
        (level, label)
        for level, count in enumerate(counts)
        for label in range(count)
        if level == len(counts) - 1 or label not in parents[level]
    ]
    for column, (level, label) in enumerate(leaves):
        probability = head.leaves(inputs).softmax(dim=1)[:, column]
        while label != UNKNOWN:
            levels[level][:, label] += probability
            if level == 0:
                break
            level, label = level - 1, parents[level - 1][label]
    return levels


def gap(outputs: tuple[Tensor, ...], parents: Parents) -> float:
    """Largest |p(class) - sum of p(child)| over classes with children."""
    found = 0.0
    for coarse, fine, row in zip(outputs, outputs[1:], parents, strict=False):
        for label in set(row) - {UNKNOWN}:
            children = [child for child, parent in enumerate(row) if parent == label]
            total = fine.detach()[:, children].exp().sum(dim=1)
            found = max(found, float((coarse.detach()[:, label].exp() - total).abs().max()))
    return found


# --- the probabilities ---


@pytest.mark.parametrize(
    ("parents", "complete"), [(NESTED, [0, 1, 2]), (CHILDLESS, [0]), (ORPHANS, [2])],
    ids=["nested", "childless", "orphans"],
)  # fmt: skip
def test_a_class_has_the_probability_of_all_leaves_below_it(parents: Parents, complete: list[int]) -> None:
    head = make_head(parents)
    outputs = head(features())
    for output, expected in zip(outputs, by_hand(head, features(), parents), strict=True):
        torch.testing.assert_close(output.exp(), expected)
    assert gap(outputs, parents) < 1e-12
    ones = torch.ones(3, dtype=torch.float64)
    assert [n for n, output in enumerate(outputs) if torch.allclose(output.exp().sum(1), ones)] == complete


def test_layers_that_know_nothing_of_each_other_do_not_agree() -> None:
    torch.manual_seed(0)
    model = HierarchicalClassifier(nn.Identity(), 5, COUNTS).double()
    outputs = tuple(logits.log_softmax(dim=1) for logits in model(features()))
    assert gap(outputs, NESTED) > 0.05


@given(st.integers(0, 10**6), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_any_taxonomy_agrees(seed: int, counts: list[int]) -> None:
    draw = random.Random(seed)
    parents = tuple(
        tuple(draw.choice([UNKNOWN, *range(above)]) for _ in range(count))
        for above, count in pairwise(counts)
    )
    head = make_head(parents, tuple(counts))
    for output, expected in zip(head(features()), by_hand(head, features(), parents), strict=True):
        torch.testing.assert_close(output.exp(), expected)


def test_very_sure_outputs_are_finite_and_so_are_their_gradients() -> None:
    head = make_head(scale=1e4)
    outputs = head(features())
    assert max(float(-output.detach().min()) for output in outputs) > 1e3
    loss = TaxonomicCrossEntropy(["a", "b", "c"], [1.0] * 3)(outputs, torch.zeros(3, 3, dtype=torch.long))
    loss.backward()
    assert torch.isfinite(loss)
    assert head.leaves.weight.grad is not None
    assert torch.isfinite(head.leaves.weight.grad).all()


# --- learning ---


def test_a_coarse_label_alone_trains_the_leaves_below_it() -> None:
    head = make_head()
    targets = torch.tensor([[1, UNKNOWN, UNKNOWN]] * 3)
    loss = TaxonomicCrossEntropy(["a", "b", "c"], [1.0] * 3)
    loss(head(features()), targets).backward()
    assert head.leaves.bias.grad is not None
    below = head.leaves.bias.grad < 0  # a step against the gradient raises these
    assert below.tolist() == [False, False, False, True, True, True]


# --- as part of a model ---


def make_taxonomy(parents: Parents) -> Taxonomy:
    names = ("family", "genus", "species")
    levels = tuple(
        Level(name, tuple(f"{name}{i}" for i in range(count)))
        for name, count in zip(names, COUNTS, strict=True)
    )
    return Taxonomy(levels, parents)


def build(parents: Parents = NESTED, **changes: Any) -> HierarchicalClassifier:
    torch.manual_seed(0)
    node = ModelConfig(NAME="test_resnet", **changes)
    model, _ = build_model(node, taxonomy=make_taxonomy(parents), in_chans=1, img_size=(16, 16))
    assert isinstance(model, HierarchicalClassifier)
    return model


def test_the_head_is_chosen_by_its_key_and_a_checkpoint_holds_its_weights_alone() -> None:
    marginal, independent = build(HEAD="marginal"), build()
    assert isinstance(marginal.heads, MarginalHead)
    assert (marginal.gives_log_probabilities, independent.gives_log_probabilities) == (True, False)
    outputs = marginal(torch.randn(2, 1, 16, 16))
    assert [tuple(output.shape) for output in outputs] == [(2, 2), (2, 4), (2, 6)]
    own = {name for name in marginal.state_dict() if name.startswith("heads.")}
    assert own == {"heads.leaves.weight", "heads.leaves.bias"}


def test_an_exported_model_gives_the_same_for_any_number_of_images() -> None:
    model = HierarchicalClassifier(nn.Flatten(), 5, COUNTS, parents=CHILDLESS).eval()
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (torch.randn(2, 1, 5),), dynamic_shapes=({0: batch},))
    images = torch.randn(7, 1, 5)
    assert all(torch.equal(a, b) for a, b in zip(program.module()(images), model(images), strict=True))
