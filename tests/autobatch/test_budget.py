"""`find_budget` and `BudgetBatchSampler`: batches by tokens, pixels or nodes."""

from itertools import chain, islice

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from linnaeus import BudgetBatchSampler, find_budget
from tests.helpers.greedy import allocate_too_much


def lengths(num_samples=600):
    """As of texts: most are short, few are long."""
    numbers = torch.randn(num_samples, generator=torch.Generator().manual_seed(0))
    return (4 + 0.8 * numbers).exp().clamp(5, 400).long()


def cost_of(costs, batch, padded):
    return len(batch) * max(costs[batch]) if padded else sum(costs[batch])


def need(costs, padded, per_sample, per_unit, per_square):
    """Bytes of a batch, as of a model with attention."""
    if padded:
        costs = costs.new_full((len(costs),), int(costs.max()))
    return int((per_sample + per_unit * costs + per_square * costs.square()).sum())


def epochs_of(sampler, num_epochs):
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        yield list(sampler)


def pad(samples):
    return pad_sequence(samples, batch_first=True)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("model", "above"), [((9, 1, 0), 1.4), ((0, 100, 1), 1.05)])
def test_every_batch_within_the_budget_found_fits(padded, model, above):
    costs, ends = lengths(), (torch.full((12,), 400), torch.full((960,), 5))
    limit = max(need(end, False, *model) for end in ends)
    texts = [torch.ones(int(length)) for length in costs]

    def step(batch):
        row = batch.sum(1).long() if padded else batch
        if need(row, padded, *model) > limit:
            allocate_too_much()

    def concatenated(samples):
        return torch.tensor([len(sample) for sample in samples])

    collate = pad if padded else concatenated
    cost = len if padded else None
    found = find_budget(step, texts, collate, cost=cost, padded=padded, device="cpu")
    assert (found.limited_by, found.padded) == ("memory", padded)
    assert found.peak_bytes <= found.search.budget_bytes
    assert torch.equal(found.costs, costs)

    def largest(budget):
        sampler = BudgetBatchSampler(found.costs, budget, padded=padded)
        batches = chain.from_iterable(epochs_of(sampler, 5))
        return max(need(costs[batch], padded, *model) for batch in batches)

    assert largest(found.budget) <= limit
    assert largest(int(found.budget * above)) > limit, "the control"


def test_trials_run_the_longest_and_the_most_samples():
    costs, seen = torch.tensor([50, 2, 3, 40, 4, 1, 30]), []
    options = {"max_samples": 2, "max_batch_size": 51, "device": "cpu"}
    found = find_budget(seen.append, costs, torch.stack, cost=costs, **options)
    assert (found.budget, found.limited_by) == (51, "max_batch_size")
    batches = {tuple(sorted(batch.tolist())) for batch in seen[-2:]}
    assert batches == {(1, 50), (4, 30)}


ARGUMENTS = {
    "costs": st.lists(st.integers(1, 30), min_size=1, max_size=60),
    "factor": st.floats(1, 8),
    "padded": st.booleans(),
    "shuffle": st.booleans(),
    "num_ranks": st.integers(1, 3),
    "max_samples": st.none() | st.integers(1, 5),
    "seed": st.integers(0, 3),
}


@given(**ARGUMENTS)
def test_each_sample_comes_once_within_the_budget(costs, factor, padded, num_ranks, **options):
    costs, budget, most = torch.tensor(costs), int(factor * max(costs)), options["max_samples"]
    options |= {"padded": padded, "num_replicas": num_ranks}
    try:
        ranks = [
            BudgetBatchSampler(costs, budget, rank=rank, **options) for rank in range(num_ranks)
        ]
    except ValueError:
        assert len(costs) % num_ranks
        reject()
    for shares in zip(*(epochs_of(sampler, 3) for sampler in ranks), strict=True):
        assert [len(share) for share in shares] == [len(ranks[0])] * num_ranks
        batches = list(chain.from_iterable(shares))
        assert sorted(chain.from_iterable(batches)) == list(range(len(costs)))
        assert all(cost_of(costs, batch, padded) <= budget for batch in batches)
        assert max(map(len, batches)) <= (most or len(costs))


@pytest.mark.parametrize("position", [0, 7])
def test_a_run_resumes_at_any_batch(position):
    first, stopped, resumed, skipped = (
        BudgetBatchSampler(lengths(), 2000, padded=True, seed=5) for _ in range(4)
    )
    for each in (first, stopped):
        each.set_epoch(2)
    batches = list(first)
    assert list(islice(stopped, position)) == batches[:position]
    resumed.load_state_dict(stopped.state_dict())
    resumed.set_epoch(2)  # as a loop does
    skipped.set_epoch(2, skip=position)
    for each in (resumed, skipped):
        assert list(each) == batches[position:]
        assert each.state_dict() == first.state_dict()
        assert list(each) == batches, "the next time it is whole"
    with pytest.raises(ValueError, match="seed"):
        BudgetBatchSampler(lengths(), 2000, padded=True).load_state_dict(first.state_dict())


def test_epochs_differ_and_pad_little():
    costs = lengths(5000)
    one, other = epochs_of(BudgetBatchSampler(costs, 4000, padded=True), 2)
    assert one != other
    total = sum(cost_of(costs, batch, True) for batch in one)
    assert sum(costs) <= total < 1.1 * sum(costs)
    shuffled = torch.randperm(5000).split(20)
    assert sum(cost_of(costs, batch, True) for batch in shuffled) > 2 * sum(costs), "the control"


def test_ranks_have_alike_batches_in_a_step():
    costs = lengths(3000)
    shares = [list(BudgetBatchSampler(costs, 900, num_replicas=2, rank=rank)) for rank in (0, 1)]
    means = [[costs[batch].double().mean() for batch in share] for share in shares]
    apart = [abs(one / other - 1) for one, other in zip(*means, strict=True)]
    assert sorted(apart)[len(apart) * 9 // 10] < 0.2
