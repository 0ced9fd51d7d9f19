"""A budget of tokens beside the fixed batch size that is safe for the longest text, at equal memory.

    python -m benchmarks.token_budget

Lengths are log-normal from 10 to 1,000 tokens, as of texts. Both batch sizes are found within the same limit.
`speed` is in texts per second; `padding` is the share of pads among the tokens. Then the batches of 50
epochs run by themselves, apart from those that another covers. Their largest peak is compared with the limit.
"""

import runpy
import time
from collections.abc import Iterable

import torch
from torch import Tensor

from linnaeus import BudgetBatchSampler, auto_find_batch_size, find_budget, longest
from tests.helpers.ledger import Ledger, room

EXAMPLE = runpy.run_path("examples/token_budget.py")
NUM_TEXTS, NUM_EPOCHS, ROOM_MIB, NUM_FIXED = 3000, 50, 60, 30


def texts() -> list[Tensor]:
    lengths = (torch.randn(NUM_TEXTS) * 0.8 + 4.5).exp().clamp(10, 1000).long().tolist()
    return [1 + torch.arange(length) * 3 % 127 for length in lengths]


def main() -> None:
    torch.manual_seed(0)
    data, collate, model = texts(), EXAMPLE["collate"], EXAMPLE["GPT"]()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Tensor) -> None:
        EXAMPLE["train_step"](model, optimizer, [batch])

    step(collate(data[:4]))
    options = {"state": (model, optimizer), "target_memory_fraction": 0.97}
    worst = longest(data, 512)
    fixed = auto_find_batch_size(
        step,
        lambda size: collate(worst[:size]),
        **options,
        memory_limit_gb=room(ROOM_MIB)["memory_limit_gb"],
    )
    found = find_budget(
        step,
        data,
        collate,
        padded=True,
        **options,
        memory_limit_gb=room(ROOM_MIB)["memory_limit_gb"],
    )
    sampler = BudgetBatchSampler(found.costs, found.budget, padded=True)
    print(
        f"{NUM_TEXTS} texts of {found.costs.min()} to {found.costs.max()} tokens, on one thread of the CPU"
    )
    print(
        f"fixed: {fixed.batch_size} texts; budget: {found.budget} tokens, {len(sampler)} batches an epoch\n"
    )
    print(f"{'':8}{'speed':>8}{'padding':>9}")
    speeds = []
    for name, batches in {
        "fixed": (
            each.tolist() for each in torch.randperm(NUM_TEXTS).split(fixed.batch_size)[:NUM_FIXED]
        ),
        "budget": iter(sampler),
    }.items():
        speed, padding = measured(step, collate, data, batches)
        speeds.append(speed)
        print(f"{name:8}{speed:>8.1f}{padding:>9.0%}", flush=True)
    print(f"{'ratio':8}{speeds[1] / speeds[0]:>8.2f}\n")
    costs, allowed = found.costs, found.search.budget_bytes - found.search.held_bytes
    seen = dict[tuple[int, int], int]()
    num_batches = 0
    for epoch in range(NUM_EPOCHS):
        sampler.set_epoch(epoch)
        for batch in sampler:
            num_batches += 1
            shape = len(batch), int(costs[batch].max())
            assert shape[0] * shape[1] <= found.budget
            if shape not in seen and not any(n >= shape[0] and c >= shape[1] for n, c in seen):
                with Ledger() as ledger:
                    step(collate([data[index] for index in batch]))
                seen[shape] = ledger.peak_bytes
    print(f"{num_batches} batches of {NUM_EPOCHS} epochs are within it; {len(seen)} ran:")
    print(f"their peak is {max(seen.values()) / allowed:.1%} of the limit")


def measured(
    step: object, collate: object, data: list[Tensor], batches: Iterable[list[int]]
) -> tuple[float, float]:
    """Texts per second, and the share of pads."""
    num_texts = num_tokens = num_values = 0
    started = time.monotonic()
    for indices in batches:
        batch = collate([data[index] for index in indices])  # type: ignore[operator]
        step(batch)  # type: ignore[operator]
        num_texts += len(indices)
        num_tokens += int((batch != 0).sum())
        num_values += batch.numel()
    return num_texts / (time.monotonic() - started), 1 - num_tokens / num_values


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
