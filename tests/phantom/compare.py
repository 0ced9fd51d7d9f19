"""What torch reserves for a training step on a phantom GPU, and what `linnaeus.memory.predict` says.

    PHANTOM_TOTAL_GIB=80 python -m tests.phantom python -m tests.phantom.compare resnet50 24 97 [--amp bf16]
        [--channels-last] [--checkpoint] [--benchmark] [--fused] [--trained] [--compute-only] [--events]

MODEL is one of timm, or `gpt`. A prediction is of the first steps on: optimizer state comes in the first one,
but with `--trained` before it. `--compute-only` is a forward pass without gradients. `--events` replays what
torch's allocator was asked for through `linnaeus.memory.allocator`.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

from linnaeus.memory.allocator import MIB, CachingAllocator
from linnaeus.memory.predict import predict

AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Gpt(nn.Module):
    """A decoder of sequences of 512 tokens."""

    def __init__(self, width: int = 384, depth: int = 6, heads: int = 6, words: int = 8192) -> None:
        super().__init__()
        self.heads = heads
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "norm1": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width),
                "out": nn.Linear(width, width), "norm2": nn.LayerNorm(width),
                "up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width),
            }) for _ in range(depth)
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.words(x)
        for b in self.blocks:
            q, k, v = b["qkv"](b["norm1"](z)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            z = z + b["out"](y.transpose(1, 2).flatten(2))
            z = z + b["down"](functional.gelu(b["up"](b["norm2"](z))))
        logits: Tensor = self.head(self.norm(z))
        return logits


class Training:
    """A model, its optimizer, and a step."""

    def __init__(self, options: argparse.Namespace) -> None:
        model: Any = Gpt() if options.model == "gpt" else timm.create_model(options.model)
        if options.checkpoint:
            model.set_grad_checkpointing(True)
        self.model = model.cuda().train()
        if options.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        kind = partial(torch.optim.SGD, momentum=0.9) if options.sgd else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=1e-3, fused=options.fused or None)
        self.scaler = torch.amp.GradScaler("cuda", enabled=options.amp == "fp16")
        self.options = options

    def make_batch(self, n: int, device: str) -> tuple[Tensor, Tensor]:
        if self.options.model == "gpt":
            x = torch.zeros(n, 512, dtype=torch.long, device=device)
            return x, torch.zeros_like(x)
        images = torch.zeros(n, *self.model.default_cfg["input_size"], device=device)
        if self.options.channels_last:
            images = images.to(memory_format=torch.channels_last)
        return images, torch.zeros(n, dtype=torch.long, device=device)

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        amp = AMP.get(self.options.amp)
        with torch.autocast("cuda", amp or torch.bfloat16, enabled=amp is not None):
            if self.options.compute_only:
                with torch.no_grad():
                    self.model(batch[0])
                return
            loss = functional.cross_entropy(self.model(batch[0]).flatten(0, -2), batch[1].flatten())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def measured(options: argparse.Namespace, n: int) -> int:
    """Most bytes that torch reserves in four steps, from an empty allocator on."""
    clean()
    if options.events:
        torch.cuda.memory._record_memory_history(max_entries=10**7, stacks="python", context=None)
    training = Training(options)
    if options.trained:
        training.step(training.make_batch(2, "cuda"))
        clean()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        training.step(training.make_batch(n, "cuda"))
    reserved_bytes = torch.cuda.max_memory_reserved()
    if options.events:
        events = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
        print(f"n={n}: torch {reserved_bytes / MIB:.0f} MiB, the model {replayed(events) / MIB:.0f}")
    return reserved_bytes


def clean() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def replayed(events: list[dict[str, Any]]) -> int:
    """Most bytes that the model of the allocator reserves for the same requests."""
    allocator, blocks, is_flushed = CachingAllocator(), {}, False
    for event in events:
        if event["action"] == "alloc":
            blocks[event["addr"]] = allocator.allocate(event["size"])
            is_flushed = False
        elif event["action"] == "free_completed" and event["addr"] in blocks:
            allocator.free(blocks.pop(event["addr"]))
        elif event["action"] == "segment_free" and not is_flushed:
            allocator.empty_cache()
            is_flushed = True
    return allocator.peak_reserved_bytes


def compared(options: argparse.Namespace, show: Callable[[str], object] = print) -> dict[int, float]:
    """The error of the prediction at each size, as a fraction."""
    torch.backends.cudnn.benchmark = options.benchmark
    real = {n: measured(options, n) for n in options.sizes}
    training = Training(options)
    state = training.model, training.optimizer, training.scaler
    if options.trained:
        training.step(training.make_batch(2, "cuda"))
    found = predict(training.step, lambda n: training.make_batch(n, "meta"), state=state, base_bytes=0)
    errors = {n: found.reserved_bytes(n) / num_bytes - 1 for n, num_bytes in real.items()}
    for n, error in errors.items():
        show(
            f"{options.model} n={n}: torch {real[n] / MIB:.0f} MiB, predicted "
            f"{found.reserved_bytes(n) / MIB:.0f} ({error:+.2%})"
        )
    return errors


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("sizes", type=int, nargs="+")
    parser.add_argument("--amp", choices=AMP)
    names = "channels-last", "checkpoint", "benchmark", "fused", "sgd", "trained", "compute-only", "events"
    for name in names:
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    compared(parsed())
