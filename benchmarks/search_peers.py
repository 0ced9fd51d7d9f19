"""Search for the largest batch size with AutoBatch and with the finders of Lightning and accelerate; compare.

    python benchmarks/search_peers.py [--device cuda] [--model NAME] [--memory-limit-gb N]

All finders get the same timm model, the same synthetic batches and the same cap on memory. Each search runs
in a fresh process with the same imports, after the same warm-up step; the finders take turns, round after
round. The cap is AutoBatch's budget: `set_per_process_memory_fraction` on CUDA, and `RLIMIT_DATA` on the
CPU, where allocations above it fail with the error that Lightning expects. AutoBatch gets the limit as an
argument. Lightning has no such argument and runs inside the cap. In the end, the largest size of each finder
is trained for some steps in a plain loop, in a fresh process under the same cap.

Nothing is set to Lightning's disadvantage. It searches with the same malloc setting (see `CpuMemory`). Its
loader returns ready batches and has a length, since without one Lightning would prefetch a second batch.
Logging and progress bars are off. On the CPU, oneDNN is off for every finder: after a real out-of-memory
error its code generator may fail to build kernels, with an error that Lightning does not recognise and that
ends its search. `power` and `binsearch` run with Lightning's defaults (3 steps a trial, 5 % taken off what
binsearch finds), `binsearch, exact` with AutoBatch's 2 steps and nothing taken off. accelerate's
`find_executable_batch_size`, which transformers' `auto_find_batch_size` calls too, starts from its default or
from a size that is too large, and shrinks it by a tenth after each error; 2 steps a trial.

With `--ranks 2`, two processes with a process group (gloo) search at once, the second under its own cap
(`--second-limit-gb`): the sizes that each finder returns on each rank, and whether they agree.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import logging
import math
import multiprocessing
import platform
import resource
import shlex
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as torch_dist
from torch.nn.functional import cross_entropy

from linnaeus.autobatch.memory.device import GIB, device_memory
from linnaeus.autobatch.memory.oom import is_out_of_memory
from linnaeus.utils.autobatch import auto_find_batch_size

NUM_CLASSES = 10
EPOCH_STEPS = 10_000  # more than any trial takes
STEPS_PER_TRIAL = 2  # AutoBatch's default
Batch = tuple[torch.Tensor, torch.Tensor]
Round = dict[str, "Found"]

HEADER = f"{'':<27}  size  survives  trials  steps  seconds  |  size  trials  seconds"
LEGEND = """
Medians over the rounds; right of the bar, medians of the ratios to ours in the same round.
survives: training steps that the finder's largest size ran under the same cap
trials, steps: trials, and training steps begun, AutoBatch's warm-up included
seconds: wall time of the search
The goal: no other size that survives is above 1.00, and binsearch's seconds are at least 3.00."""


@dataclass(frozen=True)
class Setting:
    """What every process of a comparison shares."""

    device: str
    model: str
    img_size: int
    memory_limit_gb: float
    max_batch_size: int
    num_threads: int


@dataclass(frozen=True)
class Found:
    """One search: the size found, the numbers of trials and of steps begun, and the time."""

    size: int
    num_trials: int
    num_steps: int
    seconds: float


class Task:
    """A model with its optimizer and training step, after a warm-up; records the size of every batch made."""

    def __init__(self, setting: Setting) -> None:
        torch.set_num_threads(setting.num_threads)
        if setting.device == "cpu":
            torch.backends.mkldnn.enabled = False
        torch.manual_seed(0)
        self.device = torch.device(setting.device)
        self.image_shape = (3, setting.img_size, setting.img_size)
        self.model = build_model(setting).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.memory = device_memory(self.device)
        self.limit_bytes = int(setting.memory_limit_gb * GIB)
        self.sizes: list[int] = []
        self.step(self.make_batch(2))
        self.optimizer.zero_grad()
        self.memory.clean()
        self.sizes.clear()

    def make_batch(self, size: int) -> Batch:
        self.sizes.append(size)
        images = torch.randn(size, *self.image_shape, device=self.device)
        return images, torch.randint(NUM_CLASSES, (size,), device=self.device)

    def loss(self, batch: Batch) -> torch.Tensor:
        images, targets = batch
        return cross_entropy(self.model(images), targets)

    def step(self, batch: Batch) -> None:
        loss = self.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @contextlib.contextmanager
    def cap(self) -> Iterator[None]:
        """Inside, an allocation that would take the process above the limit fails."""
        budget_bytes = self.memory.budget(1.0, self.limit_bytes)
        if self.device.type == "cuda":
            with self.memory.cap(budget_bytes):
                yield
            return
        before = resource.getrlimit(resource.RLIMIT_DATA)
        room_bytes = budget_bytes - status_bytes("VmRSS")
        resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + room_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)


def status_bytes(name: str) -> int:
    """A size in bytes from /proc/self/status, such as VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def build_model(setting: Setting) -> torch.nn.Module:
    create = functools.partial(timm.create_model, setting.model, num_classes=NUM_CLASSES)
    try:
        return create(img_size=setting.img_size)
    except TypeError:  # a convolutional network takes no img_size
        return create()


def search_ours(task: Task, setting: Setting) -> int:
    with task.cap():
        result = auto_find_batch_size(
            task.step,
            task.make_batch,
            state=(task.model, task.optimizer),
            target_memory_fraction=1.0,
            max_batch_size=setting.max_batch_size,
        )
    return result.batch_size


def search_lightning(task: Task, setting: Setting, **options: Any) -> int:
    from lightning.pytorch import Trainer
    from lightning.pytorch.tuner import Tuner

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder, task.cap():
        trainer = Trainer(
            accelerator="gpu" if setting.device == "cuda" else "cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        module = lightning_module(task)
        size = Tuner(trainer).scale_batch_size(module, max_val=setting.max_batch_size, **options)
    assert size is not None
    return size


def search_accelerate(task: Task, setting: Setting, *, start: int) -> int:
    from accelerate.utils.memory import find_executable_batch_size

    def train(batch_size: int) -> int:
        for _ in range(STEPS_PER_TRIAL):
            task.step(task.make_batch(batch_size))
        return batch_size

    with task.cap():
        size: int = find_executable_batch_size(train, starting_batch_size=start)()
    return size


def lightning_module(task: Task) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model
            self.batch_size = 2  # the finder sets it

        def train_dataloader(self) -> Batches:
            return Batches(task, self.batch_size)

        def training_step(self, batch: Batch, _: int) -> torch.Tensor:
            return task.loss(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.optimizer

    return Module()


class Batches:
    """A loader for Lightning that yields the task's batches."""

    def __init__(self, task: Task, size: int) -> None:
        self.task, self.size = task, size

    def __len__(self) -> int:
        return EPOCH_STEPS

    def __iter__(self) -> Iterator[Batch]:
        return (self.task.make_batch(self.size) for _ in range(EPOCH_STEPS))


FINDERS: dict[str, Callable[[Task, Setting], int]] = {
    "linnaeus": search_ours,
    "lightning power": functools.partial(search_lightning, mode="power"),
    "lightning binsearch": functools.partial(search_lightning, mode="binsearch"),
    "lightning binsearch, exact": functools.partial(
        search_lightning, mode="binsearch", steps_per_trial=STEPS_PER_TRIAL, margin=0.0
    ),
    "accelerate, from 128": functools.partial(search_accelerate, start=128),
    "accelerate, from 1024": functools.partial(search_accelerate, start=1024),
}
OURS = next(iter(FINDERS))


def import_finders() -> None:
    """For everyone: they count towards the memory in use."""
    for name in ("lightning.pytorch", "accelerate"):
        importlib.import_module(name)


def search(name: str, setting: Setting) -> Found:
    """Run one finder. Consecutive batches of one size count as a trial, AutoBatch's warm-up included."""
    import_finders()
    task = Task(setting)
    started = time.perf_counter()
    size = FINDERS[name](task, setting)
    seconds = time.perf_counter() - started
    return Found(size, len(list(itertools.groupby(task.sizes))), len(task.sizes), seconds)


def survived_steps(size: int, num_steps: int, setting: Setting) -> int:
    """Train at one size under the cap; return how many of the steps ran."""
    import_finders()
    task = Task(setting)
    with task.cap():
        for done in range(num_steps):
            try:
                task.step(task.make_batch(size))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                return done
    return num_steps


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def attempt(name: str, setting: Setting) -> Found:
    """Search in a fresh process. An error is printed on stderr and gives size 0."""
    try:
        found: Found = in_fresh_process(search, name, setting)
    except Exception as error:
        print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr)
        return Found(0, 0, 0, math.nan)
    print(f"{name}: {found.size} in {found.seconds:.1f} s", file=sys.stderr)
    return found


def search_as_rank(rank: int, name: str, settings: Sequence[Setting], folder: str) -> int:
    """Search as one of several ranks, each under its own cap."""
    import_finders()
    store = torch_dist.FileStore(f"{folder}/store", len(settings))
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=len(settings))
    try:
        return FINDERS[name](Task(settings[rank]), settings[rank])
    finally:
        torch_dist.destroy_process_group()


def compare_ranks(settings: Sequence[Setting]) -> Iterator[str]:
    """For each finder the size on each rank; an error is printed on stderr."""
    yield f"{'':<27}{'sizes':>16}  the same on all ranks"
    for name in FINDERS:
        with (
            tempfile.TemporaryDirectory() as folder,
            ProcessPoolExecutor(len(settings), multiprocessing.get_context("spawn")) as pool,
        ):
            ranks = [
                pool.submit(search_as_rank, rank, name, settings, folder)
                for rank in range(len(settings))
            ]
            sizes = []
            for rank in ranks:
                try:
                    sizes.append(str(rank.result()))
                except Exception as error:
                    print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr)
                    sizes.append("failed")
        is_same = len(set(sizes)) == 1 and "failed" not in sizes
        yield f"{name:<27}{', '.join(sizes):>16}  {'yes' if is_same else 'no'}"


def survival(rounds: Sequence[Round], num_steps: int, setting: Setting) -> dict[str, int]:
    """For each finder, the number of steps that its largest size ran."""
    largest = {name: max(round_[name].size for round_ in rounds) for name in FINDERS}
    survived = {0: 0}
    for size in sorted(set(largest.values()) - {0}):
        survived[size] = in_fresh_process(survived_steps, size, num_steps, setting)
    return {name: survived[size] for name, size in largest.items()}


def table(rounds: Sequence[Round], survived: dict[str, int], num_steps: int) -> str:
    lines = [HEADER]
    for name in FINDERS:
        runs = [round_[name] for round_ in rounds]
        size, trials, steps, seconds = (
            statistics.median(getattr(run, field) for run in runs)
            for field in ("size", "num_trials", "num_steps", "seconds")
        )
        ratios = [ratio_to_ours(rounds, name, field) for field in ("size", "num_trials", "seconds")]
        survives = f"{survived[name]}/{num_steps}"
        lines.append(
            f"{name:<27}{size:6.0f}{survives:>10}{trials:8.0f}{steps:7.0f}{seconds:9.1f}  |"
            f"{ratios[0]:6.2f}{ratios[1]:8.2f}{ratios[2]:9.2f}"
        )
    return "\n".join(lines)


def ratio_to_ours(rounds: Sequence[Round], name: str, field: str) -> float:
    """Median over the rounds of this finder's value divided by ours."""
    return statistics.median(
        getattr(round_[name], field) / (getattr(round_[OURS], field) or math.nan)
        for round_ in rounds
    )


def heading(setting: Setting, num_rounds: int, argv: Sequence[str]) -> str:
    device = torch.cuda.get_device_name() if setting.device == "cuda" else cpu_name()
    return (
        f"$ {shlex.join(['python', 'benchmarks/search_peers.py', *argv])}\n"
        f"{device}; torch {torch.__version__}, timm {timm.__version__}, "
        f"lightning {importlib.metadata.version('lightning')}, "
        f"accelerate {importlib.metadata.version('accelerate')}\n"
        f"{setting.model} at {setting.img_size} px, AdamW, cap {setting.memory_limit_gb} GiB, "
        f"rounds: {num_rounds}, threads: {setting.num_threads}\n"
    )


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="test_vit", help="a timm model")
    parser.add_argument("--img-size", type=int, default=128)
    parser.add_argument(
        "--memory-limit-gb", type=float, default=1.2, help="cap on the memory of the process"
    )
    parser.add_argument("--max-batch-size", type=int, default=8192)
    parser.add_argument(
        "--num-threads", type=int, default=1, help="few are less disturbed by other programs"
    )
    parser.add_argument(
        "--steps", type=int, default=50, help="training steps to run at the size found"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--ranks", type=int, choices=(1, 2), default=1, help="2 compares two ranks instead"
    )
    parser.add_argument(
        "--second-limit-gb", type=float, default=1.1, help="cap on the second rank's memory"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if any(importlib.util.find_spec(name) is None for name in ("lightning", "accelerate")):
        print("Lightning or accelerate is missing: pip install 'linnaeus[bench]'", file=sys.stderr)
        return 2
    setting = Setting(
        device=args.device,
        model=args.model,
        img_size=args.img_size,
        memory_limit_gb=args.memory_limit_gb,
        max_batch_size=args.max_batch_size,
        num_threads=args.num_threads,
    )
    if args.ranks > 1:
        print(heading(setting, 1, argv))
        second = dataclasses.replace(setting, memory_limit_gb=args.second_limit_gb)
        for line in compare_ranks([setting, second]):
            print(line, flush=True)
        return 0
    rounds = [{name: attempt(name, setting) for name in FINDERS} for _ in range(args.rounds)]
    survived = survival(rounds, args.steps, setting)
    print(heading(setting, args.rounds, argv))
    print(table(rounds, survived, args.steps))
    print(LEGEND)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
