"""A tiny GPT-2 that learns to count with the `Trainer` of transformers, at the maximum batch size.

    python examples/transformers_tiny.py
    torchrun --nproc-per-node 2 examples/transformers_tiny.py

The model is built from a configuration and the text is generated, so nothing is downloaded. Only the line
with `autobatch` uses AutoBatch. Training is bit-identical to a run with `--batch-size` set to the size found.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from linnaeus.integrations.transformers import autobatch

VOCABULARY = 64  # the numbers, and 0 for padding
LONGEST = 128  # tokens
CPU_LIMIT_GB = 1.3  # keeps the search on a CPU short


class Counting(Dataset[dict[str, list[int]]]):
    """Numbers that go up by a step of their own, in sequences of very different lengths."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if index >= self.num_samples:
            raise IndexError(index)
        draw = random.Random(index)
        length, start, step = (
            int(16 + (LONGEST - 16) * draw.random() ** 3),
            draw.randrange(64),
            draw.randint(1, 3),
        )
        return {
            "input_ids": [1 + (start + step * place) % (VOCABULARY - 1) for place in range(length)]
        }


def collate(samples: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    """Tokens, labels and mask of shape (batch, tokens), padded to the longest sequence of the batch."""
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = (tokens > 0).long()
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }


def build(steps: int, batch_size: int, use_cpu: bool) -> Trainer:
    """A trainer that knows nothing of AutoBatch."""
    set_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LONGEST,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    args = TrainingArguments(
        output_dir="runs/transformers_tiny",
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=use_cpu,
    )
    return Trainer(
        GPT2LMHeadModel(config), args, train_dataset=Counting(2000), data_collator=collate
    )


def main(argv: Sequence[str] | None = None) -> Trainer:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(
        description="Train a tiny GPT-2 at the largest batch size that fits."
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, help="train at this size and do not search")
    parser.add_argument(
        "--memory-limit-gb",
        type=float,
        help=f"GiB, 80 %% for the process; default: {CPU_LIMIT_GB} on the CPU, else no limit",
    )
    options = parser.parse_args(argv)
    on_cpu = not torch.accelerator.is_available()
    trainer = build(options.steps, options.batch_size or 8, use_cpu=on_cpu)
    if options.batch_size is None:
        limit_gb = options.memory_limit_gb or (CPU_LIMIT_GB if on_cpu else None)
        autobatch(trainer, target_memory_fraction=0.8, memory_limit_gb=limit_gb)
    trainer.train()
    for mode, result in getattr(trainer, "autobatch_results", {}).items():
        found = f"batch size {result.batch_size} (limited by {result.limited_by})"
        print(f"{mode}: {found}, {len(result.trials)} trials")
    return trainer


if __name__ == "__main__":
    main()
