"""What a search finds and promises, against training in a fresh process and against brute force.

    python -m benchmarks.gpu_truth [--rows 30] [--seed 0] [--gib 24,80] [--tolerance 0.01] [--ranks]

Each row is a timm model with a number format, an optimizer and a feature, drawn by the seed. Without a card,
it runs on phantom ones (`python -m tests.phantom python -m benchmarks.gpu_truth`): the allocator is torch's
own, but neither cuDNN's choices nor speeds are real.

    found       size that the search finds within 0.8 of the card
    trials, s   of that search
    promise     GiB that the allocator had reserved in the trial of that size
    training    peak of 50 real steps in a fresh process, relative to the promise
    brute       largest size whose 20 steps in a fresh process, capped at the budget, neither run out of
                memory nor flush the allocator's cache; and what `found` is of it
    predicted   reserved bytes predicted before the search, relative to training
    control     whether 20 steps of a size 2 % above `brute` break the budget

`--ranks` has two ranks (NCCL, DistributedDataParallel) on unequal cards: they search together, and train at
the size found in fresh processes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean, median
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

from linnaeus import auto_find_batch_size, predict_memory
from tests.phantom import is_on

GIB = 1 << 30
FRACTION = 0.8
NUM_STEPS = 50
NUM_BRUTE_STEPS = 20
MODELS = (
    "resnet18", "resnet50", "resnet101", "resnext50_32x4d", "wide_resnet50_2", "seresnet50", "densenet121",
    "vgg16", "mobilenetv3_large_100", "mobilenetv2_100", "efficientnet_b0", "efficientnet_b3",
    "efficientnetv2_rw_t", "regnetx_032", "regnety_032", "convnext_tiny", "convnext_base", "nfnet_l0",
    "vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224", "vit_base_patch32_224",
    "deit3_base_patch16_224", "swin_tiny_patch4_window7_224", "swin_base_patch4_window7_224", "mixer_b16_224",
    "beit_base_patch16_224", "poolformer_s24", "maxvit_tiny_rw_224", "coatnet_0_rw_224", "inception_v3",
    "xception41", "hrnet_w18", "dla60", "cspresnet50", "ghostnet_100", "mobilevit_s", "res2net50_26w_4s",
)  # fmt: skip
FORMATS = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "fused AdamW": partial(torch.optim.AdamW, fused=True),
}
FEATURES = ("plain", "checkpointing", "channels-last", "accumulation")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    model: str
    format: str
    optimizer: str
    feature: str
    gib: float


class Training:
    """The training of a case on a device: `step(batch)` is what is searched and what is trained."""

    def __init__(self, case: Case, device: str = "cuda") -> None:
        torch.manual_seed(0)
        self._case, self.device = case, device
        model = timm.create_model(case.model, num_classes=1000)
        if case.feature == "checkpointing":
            model.set_grad_checkpointing(True)
        self._size = model.default_cfg["input_size"]
        self.model = model.to(device).train()
        if case.feature == "channels-last":
            self.model = self.model.to(memory_format=torch.channels_last)
        self.optimizer = OPTIMIZERS[case.optimizer](self.model.parameters(), lr=1e-3)
        self._dtype = FORMATS[case.format]
        self.scaler = torch.amp.GradScaler("cuda", enabled=self._dtype == torch.float16)

    @property
    def state(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.scaler

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        images = torch.empty(size, *self._size, device=self.device)
        if self._case.feature == "channels-last":
            images = images.to(memory_format=torch.channels_last)
        return images, torch.zeros(size, dtype=torch.long, device=self.device)

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        for _ in range(2 if self._case.feature == "accumulation" else 1):
            with torch.autocast("cuda", self._dtype, enabled=self._dtype is not None):
                loss = functional.cross_entropy(self.model(batch[0]), batch[1])
            self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def cases(seed: int, num_rows: int, gib: list[float]) -> Iterator[Case]:
    """Rows in random order, of which each model comes once."""
    draw = random.Random(seed)
    for model in draw.sample(MODELS, min(num_rows, len(MODELS))):
        feature = draw.choice(FEATURES)
        if feature == "checkpointing" and not can_checkpoint(model):
            feature = "plain"
        yield Case(model, draw.choice([*FORMATS]), draw.choice([*OPTIMIZERS]), feature, draw.choice(gib))


def can_checkpoint(name: str) -> bool:
    with torch.device("meta"), contextlib.suppress(Exception):
        timm.create_model(name).set_grad_checkpointing(True)
        return True
    return False


def in_fork(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a function returns in a process of its own, in which nothing has used the device before."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            answer = work()
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answered:
        text = answered.read()
    os.waitpid(pid, 0)
    return json.loads(text or '{"error": "the process died"}')


def searched(case: Case, tolerance: float) -> dict[str, Any]:
    """The result of a search, and what was predicted of the size found."""
    training = Training(case)
    found = auto_find_batch_size(
        training.step, training.batch, state=training.state, target_memory_fraction=FRACTION,
        max_batch_size=100_000, tolerance=tolerance,
    )  # fmt: skip
    return {
        "size": found.batch_size, "trials": len(found.trials), "seconds": found.seconds,
        "promise": found.peak_bytes, "budget": found.budget_bytes, "certified": found.certified,
    }  # fmt: skip


def predicted(case: Case, size: int) -> dict[str, Any]:
    training = Training(case, "cpu")
    return {"bytes": predict_memory(training.step, training.batch, state=training.state).reserved_bytes(size)}


def trained(case: Case, size: int, num_steps: int, cap_bytes: int | None = None) -> dict[str, Any]:
    """The peak of reserved bytes of real steps, and whether they flushed the cache or ran out of memory."""
    if cap_bytes is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(cap_bytes / total, 1.0))
    try:
        training = Training(case)
        for _ in range(num_steps):
            training.step(training.batch(size))
    except torch.OutOfMemoryError:
        return {"fits": False}
    stats = torch.cuda.memory_stats()
    return {"fits": stats["num_alloc_retries"] == 0, "peak": torch.cuda.max_memory_reserved()}


def largest(fits: Callable[[int], bool], near: int) -> int:
    """The largest size that fits, by steps of doubling length away from a size near it, then bisection."""
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
    """All figures of a case."""
    found = in_fork(lambda: searched(case, tolerance))
    if "error" in found:
        return found
    size, budget = found["size"], found["budget"]
    before = in_fork(lambda: predicted(case, size))
    real = in_fork(lambda: trained(case, size, NUM_STEPS))
    if "peak" not in real:
        return {"error": f"training at {size} ran out of memory"}

    def fits(n: int) -> bool:
        return bool(in_fork(lambda: trained(case, n, NUM_BRUTE_STEPS, budget))["fits"])

    brute = largest(fits, size)
    above = brute + max(round(0.02 * brute), 1)
    return {
        **found, "brute": brute, "peak": real["peak"], "predicted": before.get("bytes"),
        "untraceable": before.get("error"), "control": not fits(above),
    }  # fmt: skip


HEADS = (
    f"{'model':30} {'format':8} {'optimizer':12} {'feature':14} {'GiB':>4}", f"{'found':>6} {'trials':>6}",
    f"{'s':>5} {'promise':>8} {'training':>9}", f"{'brute':>6} {'found/':>7} {'predicted':>9} control",
)  # fmt: skip


def print_table(options: argparse.Namespace) -> None:
    """Print a row for each case, and the summary."""
    print("on a phantom card" if is_on() else f"on {torch.cuda.get_device_name()}")
    print(*HEADS)
    rows = []
    for case in cases(options.seed, options.rows, options.gib):
        os.environ["PHANTOM_TOTAL_GIB"] = f"{case.gib:g}"
        got = row(case, options.tolerance)
        name = f"{case.model:30} {case.format:8} {case.optimizer:12} {case.feature:14} {case.gib:4g}"
        if "error" in got:
            print(f"{name} {got['error']}", flush=True)
            continue
        got["training"] = got["peak"] / got["promise"] - 1
        got["share"] = got["size"] / got["brute"]
        got["error_of_prediction"] = got["predicted"] / got["peak"] - 1 if got["predicted"] else None
        rows.append(got)
        prediction = f"{got['error_of_prediction']:+9.2%}" if got["predicted"] else "-".rjust(9)
        print(
            f"{name} {got['size']:6} {got['trials']:6} {got['seconds']:5.1f} {got['promise'] / GIB:8.2f} "
            f"{got['training']:+9.2%} {got['brute']:6} {got['share']:7.1%} {prediction} "
            f"{'breaks' if got['control'] else 'holds'}", flush=True,
        )  # fmt: skip
    kept, shares = ([got[name] for got in rows] for name in ("training", "share"))
    errors = sorted(abs(got["error_of_prediction"]) for got in rows if got["predicted"])
    print(f"{len(rows)} rows")
    print("training within the budget        ", sum(got["peak"] <= got["budget"] for got in rows))
    print(f"training against its promise       {min(kept):+.2%} to {max(kept):+.2%}")
    print(f"size found, of brute force         {min(shares):.1%} at least, median {median(shares):.1%}")
    print(f"trials                             {fmean(got['trials'] for got in rows):.1f} on average")
    ninth = errors[int(0.9 * (len(errors) - 1))]
    print(f"error of the prediction            median {median(errors):.2%}, 90 % below {ninth:.2%}")
    print("sizes 2 % above break the budget  ", sum(got["control"] for got in rows))


def on_two_ranks(case: Case, size: int | None) -> None:
    """One of two ranks: search together, or train at a size; prints what this rank has reserved."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    training = Training(case, f"cuda:{rank}")
    training.model = nn.parallel.DistributedDataParallel(training.model, device_ids=[rank])
    if size is None:
        found = auto_find_batch_size(
            training.step, training.batch, state=training.state, target_memory_fraction=FRACTION,
            max_batch_size=100_000,
        )  # fmt: skip
        predicted_bytes = found.prediction and found.prediction.peak_bytes
        answer = {"size": found.batch_size, "promise": found.peak_bytes, "predicted": predicted_bytes}
    else:
        for _ in range(NUM_STEPS):
            training.step(training.batch(size))
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        peak = torch.cuda.max_memory_reserved()
        answer = {"peak": peak, "in_use": (total - free - reserved + peak) / total}
    print(json.dumps({"rank": rank, **answer}), flush=True)
    torch.distributed.destroy_process_group()


def print_ranks(options: argparse.Namespace) -> None:
    """Print what two ranks find, and what each then reserves."""
    gib = options.gib if len(options.gib) == 2 else [40.0, 24.0]
    environment = {
        **os.environ,
        "PHANTOM_GPUS": "2",
        "PHANTOM_TOTAL_GIB": ",".join(f"{one:g}" for one in gib),
    }
    for case in cases(options.seed, options.rows, gib):
        size: list[str] = []
        for _ in range(2):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
            command += ["-m", "benchmarks.gpu_truth", "--case", json.dumps(dataclasses.asdict(case)), *size]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            answers = sorted(line for line in done.stdout.splitlines() if line.startswith('{"rank"'))
            if len(answers) != 2:
                print(case.model, done.stderr[-2000:])
                break
            print(case.model, case.format, case.optimizer, case.feature, *answers, flush=True)
            size = ["--size", str(json.loads(answers[0]).get("size"))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--gib", type=lambda text: [float(one) for one in text.split(",")], default=[24.0, 80.0]
    )
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--case", type=lambda text: Case(**json.loads(text)), help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.case is not None:
        on_two_ranks(options.case, options.size)
    elif options.ranks:
        print_ranks(options)
    else:
        print_table(options)


if __name__ == "__main__":
    main()
