"""A small GPT in plain PyTorch that learns its own source, at the maximum batch size.

    python examples/gpt.py
    python examples/gpt.py --device cuda --steps 200

Only `find_batch_size` uses AutoBatch. It passes the training step, a function that makes a batch of n
samples, and the objects that a step changes. The search restores model, optimizer and random numbers, so
training is bit-identical to a run with `--batch-size` set to the size found.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from linnaeus.utils.autobatch import auto_find_batch_size

VOCABULARY = 128  # ASCII
CONTEXT = 64  # tokens
CPU_LIMIT_GB = 1.1  # keeps the search on a CPU short
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Causal self-attention and an MLP, each with a norm before it and a residual connection."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def attention(self, x: Tensor) -> Tensor:
        """(batch, tokens, dim) -> (batch, tokens, dim); no token attends to a later one."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, dim) -> (batch, tokens, dim)."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Predicts for each token the one after it: (batch, tokens) -> logits (batch, tokens, vocabulary)."""

    def __init__(self, dim: int = 64, num_heads: int = 4, num_blocks: int = 2) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, dim), nn.Embedding(CONTEXT, dim)
        self.blocks = nn.Sequential(*(Block(dim, num_heads) for _ in range(num_blocks)))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens -> logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.token(tokens) + self.position(positions)))


def make_batch(text: Tensor, size: int) -> Batch:
    """`size` random windows of the text as inputs, and the same windows shifted by one token as targets."""
    starts = torch.randint(len(text) - CONTEXT, (size, 1))
    windows = text[(starts + torch.arange(CONTEXT + 1)).to(text.device)]
    return windows[:, :-1], windows[:, 1:]


def train_step(model: GPT, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Run one training step; return the loss before the update."""
    tokens, targets = batch
    loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def find_batch_size(
    model: GPT, optimizer: torch.optim.Optimizer, text: Tensor, memory_limit_gb: float | None
) -> int:
    """The largest batch size that fits."""
    result = auto_find_batch_size(
        step=lambda batch: train_step(model, optimizer, batch),
        make_batch=lambda size: make_batch(text, size),
        state=(model, optimizer),
        multiple_of=8,
        memory_limit_gb=memory_limit_gb,
    )
    peak_mib, budget_mib = result.peak_bytes / 2**20, result.budget_bytes / 2**20
    print(
        f"found batch size {result.batch_size} (limited by {result.limited_by}): {len(result.trials)} trials "
        f"in {result.seconds:.1f} s, peak {peak_mib:.0f} of {budget_mib:.0f} MiB"
    )
    return result.batch_size


class Run(NamedTuple):
    """The outcome of a training run."""

    model: GPT
    batch_size: int
    losses: list[float]


def run(device: str, steps: int, batch_size: int | None, memory_limit_gb: float | None) -> Run:
    """Train for some steps, at `batch_size` or, if that is None, at the largest size that fits."""
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()), device=device)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch_size = batch_size or find_batch_size(model, optimizer, text, memory_limit_gb)
    losses = []
    for i in range(steps):
        losses.append(train_step(model, optimizer, make_batch(text, batch_size)))
        print(f"step {i + 1:3d}  batch size {batch_size}  loss {losses[-1]:.3f}")
    return Run(model, batch_size, losses)


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT at the largest batch size that fits."
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch-size", type=int, help="train at this size and do not search")
    parser.add_argument(
        "--memory-limit-gb",
        type=float,
        help=f"GiB, 80 %% for the process; default: {CPU_LIMIT_GB} on the CPU, else no limit",
    )
    args = parser.parse_args(argv)
    default_limit_gb = CPU_LIMIT_GB if args.device == "cpu" else None
    run(args.device, args.steps, args.batch_size, args.memory_limit_gb or default_limit_gb)


if __name__ == "__main__":
    main()
