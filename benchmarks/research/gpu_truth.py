"""What a search finds and promises, against training in a fresh process and against brute force.

    python -m benchmarks.research.gpu_truth [--rows 30] [--seed 0] [--gib 24,80] [--fraction 0.8]
        [--tolerance 0.01] [--ranks]

Each row is a timm model with a number format, an optimizer and a feature, drawn by the seed. Without a
GPU, it runs on phantom ones (`python -m tests.phantom python -m benchmarks.research.gpu_truth`): the
allocator is torch's own, but neither cuDNN's choices nor speeds are real.

    found       size that the search finds within that fraction of the GPU
    trials, s   of that search
    promise     peak of the trial of that size in GiB, fragmentation allowance included
    training    peak of 50 real steps in a fresh process, relative to the promise
    in use      part of the GPU in use at that peak
    predicted   reserved bytes predicted without the GPU, relative to that peak
    brute       largest size whose 20 steps in a fresh process, capped at the budget, neither run out of
                memory nor flush the allocator's cache; and what `found` is of it. A size is presumed to fit
                if a larger one does, so sizes that fit above one that does not are missed.
    +2 %        whether 20 steps of a size 2 % above `brute` break the budget

`--ranks` has two ranks (NCCL, DistributedDataParallel) on GPUs of the sizes of `--gib`. They search together
and train at the size found in fresh processes. Figures that differ between ranks are there for each.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from statistics import fmean, median
from typing import Any

import timm
import torch
from torch import nn

from linnaeus import auto_find_batch_size
from linnaeus.autobatch.observer import SearchObserver
from linnaeus.autobatch.predict.prediction import predict
from linnaeus.autobatch.predict.swap import UntraceableError
from linnaeus.autobatch.predict.trace import Buckets
from linnaeus.autobatch.search import TrialRecord
from tests.phantom import is_on
from tests.phantom.training import FORMATS, OPTIMIZERS, Case, Training

GIB = 1 << 30
FRACTION = 0.8
NUM_STEPS = 50
NUM_BRUTE_STEPS = 20
SLACK = 0.005
"""Part of its promise that training may leave."""
MODELS = (
    "resnet18",
    "resnet50",
    "resnet101",
    "resnext50_32x4d",
    "wide_resnet50_2",
    "seresnet50",
    "densenet121",
    "vgg16",
    "mobilenetv3_large_100",
    "mobilenetv2_100",
    "efficientnet_b0",
    "efficientnet_b3",
    "efficientnetv2_rw_t",
    "regnetx_032",
    "regnety_032",
    "convnext_tiny",
    "convnext_base",
    "nfnet_l0",
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "vit_base_patch32_224",
    "deit3_base_patch16_224",
    "swin_tiny_patch4_window7_224",
    "swin_base_patch4_window7_224",
    "mixer_b16_224",
    "beit_base_patch16_224",
    "poolformer_s24",
    "maxvit_tiny_rw_224",
    "coatnet_0_rw_224",
    "inception_v3",
    "xception41",
    "hrnet_w18",
    "dla60",
    "cspresnet50",
    "ghostnet_100",
    "mobilevit_s",
    "res2net50_26w_4s",
)
FEATURES = ("plain", "checkpointing", "channels-last", "accumulation")


class RowError(Exception):
    """A row has no figures."""


def cases(seed: int, num_rows: int, gib: list[float]) -> Iterator[tuple[Case, float]]:
    """Rows in random order, each with the size of its GPU; each model comes once."""
    draw = random.Random(seed)
    for model in draw.sample(MODELS, len(MODELS))[:num_rows]:
        feature = draw.choice(FEATURES)
        if feature == "checkpointing" and not can_checkpoint(model):
            feature = "plain"
        yield (
            Case(model, draw.choice([*FORMATS]), draw.choice([*OPTIMIZERS]), (feature,)),
            draw.choice(gib),
        )


def can_checkpoint(name: str) -> bool:
    with torch.device("meta"), contextlib.suppress(Exception):
        timm.create_model(name).set_grad_checkpointing(True)
        return True
    return False


def in_fork(name: str, work: Callable[[], Any]) -> Any:
    """What a function returns in a process of its own, in which nothing has used the device before.

    Raises:
        RowError: the function raised an error, or its process was killed; `name` says what it did.
    """
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            answer = {"answer": work()}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answered:
        text = answered.read()
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise RowError(f"{name}: the process ended with {code}")
    answer = json.loads(text)
    if "error" in answer:
        raise RowError(f"{name}: {answer['error']}")
    return answer["answer"]


def searched(training: Training, tolerance: float) -> dict[str, Any]:
    """The result of a search; its promise is that of this rank."""
    peaks: dict[int, int | None] = {}

    class Peaks(SearchObserver):
        def trial_finished(self, trial: TrialRecord, budget_bytes: int) -> None:
            peaks[trial.size] = trial.peak_bytes

    found = auto_find_batch_size(
        training.step,
        training.batch,
        state=training.state,
        target_memory_fraction=FRACTION,
        max_batch_size=100_000,
        tolerance=tolerance,
        observer=Peaks(),
    )
    return {
        "size": found.batch_size,
        "trials": len(found.trials),
        "seconds": found.seconds,
        "promise": peaks[found.batch_size],
        "budget": found.budget_bytes,
    }


def predicted(case: Case, model: Any, size: int, buckets: Buckets | None = None) -> int | None:
    """Reserved bytes; None where the step cannot be traced."""
    training = Training(case, "cpu", model)
    try:
        prediction = predict(
            training.step,
            training.batch,
            state=training.state,
            mode="train",
            buckets=buckets,
            base_bytes=0,
        )
    except UntraceableError:
        return None
    return prediction.reserved_bytes(size)


def trained(
    start: Callable[[], Training], size: int, num_steps: int, cap_bytes: int = 0
) -> dict[str, Any]:
    """Whether real steps neither flushed the cache nor ran out of memory, and what they reserved."""
    if cap_bytes:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(cap_bytes / total, 1.0))
    try:
        training = start()
        for _ in range(num_steps):
            training.step(training.batch(size))
    except RuntimeError as error:
        if not (cap_bytes or isinstance(error, torch.OutOfMemoryError)):
            raise
        return {"fits": False}  # cuDNN too says in its own way that a workspace was refused
    free, total = torch.cuda.mem_get_info()
    peak, others = torch.cuda.max_memory_reserved(), total - free - torch.cuda.memory_reserved()
    is_flushed = torch.cuda.memory_stats()["num_alloc_retries"] > 0
    return {"fits": not is_flushed, "peak": peak, "in use": (others + peak) / total}


def largest(fits: Callable[[int], bool], near: int) -> int:
    """The largest size that fits, by steps of doubling length away from a size near it, then bisection.

    A size is presumed to fit if a larger one does: sizes that fit above one that does not are missed.
    """
    step = max(near // 256, 1)
    low, high = (near, 0) if fits(near) else (0, near)
    while low and not high:
        low, high, step = (low + step, 0, 2 * step) if fits(low + step) else (low, low + step, step)
    while high and not low and high > 1:
        smaller = max(high - step, 1)
        low, high, step = (smaller, high, step) if fits(smaller) else (0, smaller, 2 * step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def row(case: Case, tolerance: float) -> dict[str, Any]:
    """All figures of a case.

    Raises:
        RowError: the search or the training failed, or brute force fits nothing.
    """
    model = case.built()
    start = partial(Training, case, model=model)
    found = in_fork("search", lambda: searched(start(), tolerance))
    size = found["size"]
    num_bytes = in_fork("prediction", lambda: predicted(case, model, size))
    real = in_fork("training", lambda: trained(start, size, NUM_STEPS))
    if "peak" not in real:
        raise RowError(f"training ran out of memory at the size found, {size}")

    @cache
    def fits(n: int) -> bool:
        real = in_fork("brute force", lambda: trained(start, n, NUM_BRUTE_STEPS, found["budget"]))
        return bool(real["fits"])

    brute = largest(fits, size)
    if not brute:
        raise RowError(f"brute force fits no size, the search {size}")
    above = "holds" if fits(brute + max(round(0.02 * brute), 1)) else "breaks"
    return compared([found | real], num_bytes) | {
        "brute": [brute],
        "found/": [size / brute],
        "+2 %": [above],
    }


def row_of_ranks(case: Case, tolerance: float) -> dict[str, Any]:
    """Figures of a case on two ranks; errors as for `row`."""
    ranks: list[dict[str, Any]] = [{}, {}]
    for task in ("search", "training"):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
        ]
        command += [
            "-m",
            "benchmarks.research.gpu_truth",
            "--case",
            json.dumps(dataclasses.asdict(case)),
        ]
        command += [
            f"--fraction={FRACTION}",
            f"--tolerance={tolerance}",
            *(f"--size={rank['size']}" for rank in ranks[:1] if rank),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        answers = [
            json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rank"')
        ]
        if len(answers) != 2:
            reason = re.search(r".*Error: .*", done.stderr)
            raise RowError(f"{task}: {reason[0] if reason else done.stderr[-500:]}")
        for answer in answers:
            ranks[answer["rank"]] |= answer
    size = ranks[0]["size"]
    return compared(
        ranks, in_fork("prediction", lambda: predicted(case, case.built(), size, Buckets()))
    )


def on_one_rank(case: Case, tolerance: float, size: int | None) -> None:
    """Search together with the other rank, or train at a size; print the figures of this rank."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    training = Training(case, f"cuda:{rank}")
    training.model = nn.parallel.DistributedDataParallel(training.model, device_ids=[rank])
    if size is None:
        answer = searched(training, tolerance)
    else:
        answer = trained(lambda: training, size, NUM_STEPS)
        if "peak" not in answer:
            raise RowError(f"rank {rank} ran out of memory at the size found, {size}")
    os.write(
        1, f"{json.dumps({'rank': rank, **answer})}\n".encode()
    )  # one write: the ranks share a pipe
    torch.distributed.destroy_process_group()


def compared(ranks: list[dict[str, Any]], predicted_bytes: int | None) -> dict[str, Any]:
    """The row of one rank or more; a list has a value for each."""
    return {
        "found": [ranks[0]["size"]],
        "trials": [ranks[0]["trials"]],
        "s": [ranks[0]["seconds"]],
        "promise": [rank["promise"] / GIB for rank in ranks],
        "training": [rank["peak"] / rank["promise"] - 1 for rank in ranks],
        "in use": [rank["in use"] for rank in ranks],
        "predicted": [predicted_bytes / rank["peak"] - 1 for rank in ranks if predicted_bytes],
    }


OF_EACH = {
    "found": "d",
    "trials": "d",
    "s": ".1f",
    "promise": ".2f",
    "training": "+.2%",
    "in use": ".2%",
    "predicted": "+.2%",
}
OF_ONE_RANK = {"brute": "d", "found/": ".1%", "+2 %": ""}


def print_table(options: argparse.Namespace) -> None:
    """Print a row for each case, and the summary."""
    settings = [
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith(("PHANTOM_", "PYTORCH_"))
        and name not in ("PHANTOM_MACHINE", "PHANTOM_DIR")
    ]
    python = "python -m tests.phantom python" if is_on() else "python"
    print("$", *settings, python, "-m benchmarks.research.gpu_truth", shlex.join(sys.argv[1:]))
    card, gib = "phantom card", options.gib
    if not is_on():
        card = in_fork("card", torch.cuda.get_device_name)
        gib = [in_fork("card", torch.cuda.mem_get_info)[1] / GIB]
    print(f"{card}; torch {torch.__version__}, timm {timm.__version__}; seed {options.seed}\n")
    columns, width = (OF_EACH, 13) if options.ranks else (OF_EACH | OF_ONE_RANK, 8)
    line = "{:30} {:8} {:12} {:14} {:>5}".format
    print(
        line("model", "format", "optimizer", "feature", "GiB"), *(f"{n:>{width}}" for n in columns)
    )
    rows, chosen = [], [*cases(options.seed, options.rows, gib)]
    for case, own_gib in chosen:
        cards = ",".join(f"{one:g}" for one in (gib if options.ranks else [own_gib]))
        os.environ.update(PHANTOM_TOTAL_GIB=cards, PHANTOM_GPUS=str(1 + options.ranks))
        print(line(case.model, case.format, case.optimizer, case.features[0], cards), end=" ")
        try:
            rows.append((row_of_ranks if options.ranks else row)(case, options.tolerance))
            texts = {
                n: "/".join(format(v, form) for v in rows[-1][n]) for n, form in columns.items()
            }
            print(*(f"{text or '-':>{width}}" for text in texts.values()), flush=True)
        except RowError as error:
            print(error, flush=True)
    print_summary(rows, len(chosen), not options.ranks)


def print_summary(rows: list[dict[str, Any]], num_rows: int, is_of_one_rank: bool) -> None:
    """How many rows miss each goal, and the spread of the figures; a failed row misses every goal."""
    goals: dict[str, Callable[[dict[str, Any]], bool]] = {
        "every process ran to its end": lambda got: True,
        f"at most {FRACTION:.0%} of a card in use": lambda got: max(got["in use"]) <= FRACTION,
        f"training at most its promise, and at most {SLACK:.1%} below": lambda got: all(
            -SLACK <= part <= 0 for part in got["training"]
        ),
    }
    if is_of_one_rank:
        goals["found at least 99 % of brute force"] = lambda got: got["found/"][0] >= 0.99
        goals["2 % above brute force breaks the budget"] = lambda got: got["+2 %"] == ["breaks"]
    print("\nrows that miss a goal; a failed row misses every one")
    for goal, is_met in goals.items():
        print(f"{goal:60} {num_rows - sum(map(is_met, rows))} of {num_rows}")
    every = {
        name: [value for got in rows for value in got.get(name, [])]
        for name in OF_EACH | OF_ONE_RANK
    }
    if kept := every["training"]:
        print(f"\ntraining against its promise   {min(kept):+.2%} to {max(kept):+.2%}")
        print(f"trials                         {fmean(every['trials']):.1f} on average")
    if shares := every["found/"]:
        print(
            f"found, of brute force          {min(shares):.1%} at least, median {median(shares):.1%}"
        )
    if errors := sorted(map(abs, every["predicted"])):
        ninth = errors[(9 * len(errors) + 9) // 10 - 1]
        print(
            f"error of the prediction        median {median(errors):.2%}, 90th percentile {ninth:.2%}, "
            f"largest {errors[-1]:.2%}"
        )


def main() -> None:
    global FRACTION
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--gib", type=lambda text: [float(one) for one in text.split(",")], default=[24.0, 80.0]
    )
    parser.add_argument("--fraction", type=float, default=FRACTION)
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument(
        "--case", type=lambda text: Case(**json.loads(text)), help=argparse.SUPPRESS
    )
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    FRACTION = options.fraction
    if options.case is not None:
        on_one_rank(options.case, options.tolerance, options.size)
    else:
        torch.set_num_threads(1)  # a fork has none of the threads that build a model
        print_table(options)


if __name__ == "__main__":
    main()
