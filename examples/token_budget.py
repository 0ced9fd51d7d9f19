"""A small GPT on texts of 10 to 1,000 tokens, in batches of as many tokens as fit in memory.

    python examples/token_budget.py
    torchrun --nproc_per_node=2 examples/token_budget.py

The loss is the mean over all tokens of an optimizer step, over micro-batches and ranks.
"""

import os
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from linnaeus import BudgetBatchSampler, find_budget

VOCABULARY, LONGEST, PAD = 128, 1000, 0


class GPT(nn.Module):
    """Tokens (batch, length) -> the sum of the losses of all tokens but pads."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, dim), nn.Embedding(LONGEST, dim)
        self.block = nn.TransformerEncoderLayer(dim, 2, 4 * dim, 0.0, batch_first=True)
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Attend to earlier tokens alone: pads come last, and change nothing."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        hidden = self.token(inputs) + self.position(torch.arange(inputs.shape[1]))
        logits = self.head(self.block(hidden, mask, is_causal=True)).flatten(0, 1)
        loss = nn.functional.cross_entropy
        return loss(logits, targets.flatten(), ignore_index=PAD, reduction="sum")


def collate(texts: list[Tensor]) -> Tensor:
    """Texts -> (batch, length), padded."""
    return pad_sequence(texts, batch_first=True, padding_value=PAD)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> float:
    """Take one optimizer step; return the sum of this rank's losses divided by the tokens of all ranks."""
    num_tokens = torch.stack([(batch[:, 1:] != PAD).sum() for batch in batches]).sum()
    group = getattr(model, "process_group", None)  # of one rank in a search
    num_ranks = 1 if group is None else dist.get_world_size(group)
    if num_ranks > 1:
        dist.all_reduce(num_tokens, group=group)
    total = 0.0
    for batch in batches:
        loss = model(batch) / num_tokens
        (loss * num_ranks).backward()  # DDP divides by the number of ranks
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def run(num_steps: int, limit_gb: float = 1.0) -> list[float]:
    """Find the budget, train with two micro-batches a step, and return the losses."""
    torch.manual_seed(0)
    lengths = (torch.randn(4000) * 0.8 + 4.5).exp().clamp(10, LONGEST).long().tolist()
    texts = [1 + torch.arange(length) * 3 % (VOCABULARY - 1) for length in lengths]
    model = DistributedDataParallel(GPT()) if dist.is_initialized() else GPT()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), list[float]()
    step, state = partial(train_step, model, optimizer), (model, optimizer)
    options = {"padded": True, "unit": "tokens", "memory_limit_gb": limit_gb}
    found = find_budget(lambda each: step([each, each]), texts, collate, state=state, **options)
    sampler = BudgetBatchSampler(found.costs, found.budget, padded=True)
    batches = iter(DataLoader(texts, batch_sampler=sampler, collate_fn=collate))  # type: ignore[arg-type]
    while len(losses) < num_steps and (several := list(islice(batches, 2))):
        losses.append(step(several))
        shapes = [tuple(batch.shape) for batch in several]
        print(f"{found.budget} tokens: step {len(losses)} {shapes} loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    if "RANK" in os.environ:  # of torchrun
        dist.init_process_group("gloo")
    run(10)
