"""What torch reserves for a training step on a phantom GPU, and what is predicted.

    PHANTOM_TOTAL_GIB=80 python -m tests.phantom python -m tests.phantom.compare resnet50 24 97 [--amp bf16]
        [--optimizer SGD] [--channels-last] [--checkpointing] [--accumulation] [--no-grad]
        [--benchmark] [--trained] [--events]

MODEL is one of timm, or `gpt`. A prediction is of the first steps on: optimizer state comes in the first one,
but with `--trained` before it. `--no-grad` is a forward pass only. `--events` replays what torch's allocator
was asked for through `linnaeus.autobatch.predict.allocator`.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from typing import Any

import torch

from linnaeus.autobatch.predict.allocator import MIB, CachingAllocator
from linnaeus.autobatch.predict.prediction import predict
from tests.phantom.training import FEATURES, FORMATS, OPTIMIZERS, Case, Training


def measured(case: Case, options: argparse.Namespace, n: int) -> int:
    """Most bytes that torch reserves in four steps, from an empty allocator on."""
    clean()
    if options.events:
        torch.cuda.memory._record_memory_history(max_entries=10**7, stacks="python", context=None)
    training = Training(case)
    if options.trained:
        training.step(training.batch(2))
        clean()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        training.step(training.batch(n))
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("sizes", type=int, nargs="+")
    parser.add_argument("--amp", choices=FORMATS, default="float32")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="AdamW")
    for name in FEATURES:
        parser.add_argument(f"--{name}", action="append_const", const=name, dest="features", default=[])
    for name in ("benchmark", "trained", "events"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    case = Case(options.model, options.amp, options.optimizer, tuple(options.features))
    torch.backends.cudnn.benchmark = options.benchmark
    real = {n: measured(case, options, n) for n in options.sizes}
    training = Training(case)
    if options.trained:
        training.step(training.batch(2))
    found = predict(training.step, lambda n: training.batch(n, "meta"), state=training.state, base_bytes=0)
    for n, num_bytes in real.items():
        predicted = found.reserved_bytes(n)
        print(
            f"{case.model} n={n}: torch {num_bytes / MIB:.0f} MiB, predicted {predicted / MIB:.0f} "
            f"({predicted / num_bytes - 1:+.2%})"
        )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
