"""The head whose probabilities agree from coarse to fine, against sums over leaves by hand."""

import random
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from linnaeus.data.taxonomy import UNKNOWN
from linnaeus.models.hierarchical import MarginalHead
from linnaeus.training.losses import TaxonomicCrossEntropy
from tests.helpers.small_models import build

COUNTS = (2, 4, 6)
NESTED = ((0, 0, 1, 1), (0, 0, 1, 2, 3, 3))


def make_head(parents=NESTED, counts=COUNTS, scale=1):
    torch.manual_seed(0)
    head = MarginalHead(5, counts, parents).double()
    with torch.no_grad():
        head.leaves.weight.mul_(scale)
    return head


def features(num_samples=3):
    return torch.randn(
        num_samples, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def by_hand(head, inputs, parents):
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


@given(st.integers(0, 10**6), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_any_taxonomy_agrees(seed, counts):
    draw = random.Random(seed)
    parents = tuple(
        tuple(draw.choice([UNKNOWN, *range(above)]) for _ in range(count))
        for above, count in pairwise(counts)
    )
    head = make_head(parents, tuple(counts))
    for output, expected in zip(head(features()), by_hand(head, features(), parents), strict=True):
        torch.testing.assert_close(output.exp(), expected)


def test_very_sure_outputs_are_finite_and_so_are_their_gradients():
    head = make_head(scale=1e4)
    outputs = head(features())
    assert max(float(-output.detach().min()) for output in outputs) > 1e3
    loss = TaxonomicCrossEntropy(["a", "b", "c"], [1.0] * 3)(
        outputs, torch.zeros(3, 3, dtype=torch.long)
    )
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(head.leaves.weight.grad).all()


def test_a_coarse_label_alone_trains_the_leaves_below_it():
    head = make_head()
    targets = torch.tensor([[1, UNKNOWN, UNKNOWN]] * 3)
    TaxonomicCrossEntropy(["a", "b", "c"], [1.0] * 3)(head(features()), targets).backward()
    rise = head.leaves.bias.grad < 0  # a step against the gradient raises these
    assert rise.tolist() == [False, False, False, True, True, True]


def test_the_key_chooses_the_head_and_its_leaves_have_weights():
    marginal, independent = build(HEAD="marginal"), build()
    assert isinstance(marginal.heads, MarginalHead)
    assert (marginal.gives_log_probabilities, independent.gives_log_probabilities) == (True, False)
    own = {name for name in marginal.state_dict() if name.startswith("heads.")}
    assert own == {"heads.leaves.weight", "heads.leaves.bias"}
