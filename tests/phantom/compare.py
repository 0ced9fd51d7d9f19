"""What torch reserves for a training step on a phantom GPU, and what is predicted.

    PHANTOM_TOTAL_GIB=80 python -m tests.phantom python -m tests.phantom.compare resnet50 24 97 [--amp bf16]
        [--optimizer SGD] [--channels-last] [--checkpointing] [--accumulation] [--no-grad]
        [--shards N]

MODEL is one of timm, or `gpt`. A prediction is of the first steps on: optimizer state comes in the first one.
`--no-grad` is a forward pass only, `--shards` one rank of a model sharded over N.
"""

import argparse
import contextlib
import gc
import warnings

import torch

from linnaeus.autobatch.predict.allocator import MIB
from linnaeus.autobatch.predict.prediction import predict
from linnaeus.autobatch.state.sharded import fake_job
from tests.phantom.training import FEATURES, FORMATS, OPTIMIZERS, Case, Training


def measured(case, n):
    """Most bytes that torch reserves in four steps, from an empty allocator on."""
    clean()
    training = Training(case)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        training.step(training.batch(n))
    return torch.cuda.max_memory_reserved()


def clean():
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("sizes", type=int, nargs="+")
    parser.add_argument("--amp", choices=FORMATS, default="float32")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="AdamW")
    for name in FEATURES:
        parser.add_argument(
            f"--{name}", action="append_const", const=name, dest="features", default=[]
        )
    parser.add_argument("--shards", type=int, default=0)
    options = parser.parse_args()
    case = Case(
        options.model, options.amp, options.optimizer, tuple(options.features), options.shards
    )
    with fake_job(case.shards) if case.shards else contextlib.nullcontext():
        compare(case, options.sizes)


def compare(case, sizes):
    real = {n: measured(case, n) for n in sizes}
    training = Training(case)
    found = predict(
        training.step, lambda n: training.batch(n, "meta"), state=training.state, base_bytes=0
    )
    for n, num_bytes in real.items():
        predicted = found.reserved_bytes(n)
        print(
            f"{case.model} n={n}: torch {num_bytes / MIB:.0f} MiB, predicted {predicted / MIB:.0f} "
            f"({predicted / num_bytes - 1:+.2%})"
        )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
