"""What a search promises holds in training: the peak of its trial is the peak of the run, on the CPU.

Searches and training share a process here, as in a run of the command line. Figures are those that the
kernel keeps of this process, read without the package's own code.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from linnaeus.autobatch.find import AutoBatchResult
from linnaeus.autobatch.sizes import SizeSearch, find_sizes
from linnaeus.batching.facts import Facts
from linnaeus.batching.plan import plan_batches
from linnaeus.config.load import load_config
from linnaeus.config.schema import Config
from linnaeus.data.datasets import build_data
from linnaeus.data.loader import build_loaders
from linnaeus.dist import World
from linnaeus.log import MetricsFile, ProgressBar
from linnaeus.memory.device import GIB, device_memory
from linnaeus.rng import seed_all
from linnaeus.tracking import Tracker
from linnaeus.training.build import Assembly, assemble
from linnaeus.training.checkpoint import CheckpointFolder
from linnaeus.training.schedule import build_schedule
from linnaeus.training.trainer import Trainer
from tests.conftest import Run

CPU = torch.device("cpu")
MIB = 1024**2
NUM_STEPS = 20
TOLERANCE = 1.02
"""Training may reach 2 % more than promised."""

MODELS = {
    "resnet": ("MODEL.NAME=test_resnet", "DATA.IMG_SIZE=128"),
    "vit": ("MODEL.NAME=test_vit", "DATA.IMG_SIZE=160"),
    "swin": (
        "MODEL.NAME=swin_tiny_patch4_window7_224",
        "MODEL.KWARGS={embed_dim: 24, depths: [1,1,1,1], num_heads: [1,2,4,8], window_size: 4}",
        "DATA.IMG_SIZE=128",
    ),
    "mobilenet": ("MODEL.NAME=mobilenetv3_small_050", "DATA.IMG_SIZE=128"),
    "convnext": ("MODEL.NAME=test_convnext", "DATA.IMG_SIZE=128"),
    "efficientnet": ("MODEL.NAME=test_efficientnet", "DATA.IMG_SIZE=128"),
    "mambaout": ("MODEL.NAME=test_mambaout", "DATA.IMG_SIZE=96"),
    "maxvit": ("MODEL.NAME=test_maxvit", "DATA.IMG_SIZE=64"),
    "byobnet": ("MODEL.NAME=test_byobnet", "DATA.IMG_SIZE=64"),  # samples below the C library's threshold
    "nfnet": ("MODEL.NAME=test_nfnet", "DATA.IMG_SIZE=64"),
}
OPTIMIZERS = ("sgd", "adamw", "adafactor")
QUICK = {
    ("resnet", "sgd", False, 1),
    ("vit", "adamw", True, 1),
    ("swin", "adafactor", False, 1),
    ("convnext", "sgd", True, 2),
    ("byobnet", "adamw", False, 1),
}
"""Every kind of model once, every optimizer, both switches both ways."""

CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in itertools.product(MODELS, OPTIMIZERS, (False, True), (1, 2))
]
BASE = (
    "DATA.DATASET.NAME=synthetic",
    "DATA.DATASET.NUM_SAMPLES=100000",
    "DATA.DATASET.NUM_SAMPLES_VAL=100000",
    "DATA.AUTOBATCH.ENABLED=True",
    "DATA.AUTOBATCH.TARGET_MEMORY_FRACTION=1.0",
    "EXPERIMENT.DEVICE=cpu",
)


def of_this_process(name: str) -> int:
    """A figure of `/proc/self/status`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def start_a_new_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Searched(NamedTuple):
    """A configuration with room for `extra_mib` above what the process held, and what was found in it."""

    config: Config
    assembly: Assembly
    found: dict[str, AutoBatchResult]


def search(*argv: str, extra_mib: int = 150, seed: int = 0) -> Searched:
    config = load_config([*BASE, *argv]).config
    seed_all(seed)
    data = build_data(config.DATA, seed=seed)
    assembly = assemble(config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, data, World(CPU))
    device_memory(CPU).clean()
    limit_gb = (of_this_process("VmRSS") + extra_mib * MIB) / GIB
    autobatch = dataclasses.replace(config.DATA.AUTOBATCH, MEMORY_LIMIT_GB=limit_gb)
    config = dataclasses.replace(config, DATA=dataclasses.replace(config.DATA, AUTOBATCH=autobatch))
    return Searched(config, assembly, find(config, assembly, seed))


def find(config: Config, assembly: Assembly, seed: int = 0) -> dict[str, AutoBatchResult]:
    data = build_data(config.DATA, seed=seed)
    return find_sizes(SizeSearch(config.DATA, config.TRAIN, data, assembly, World(CPU), seed))


def train(searched: Searched, folder: Path) -> tuple[int, int]:
    """Peaks of `NUM_STEPS` real training steps, and of as many validation batches where a size was found."""
    config, assembly, found = searched
    size, accumulation = found["train"].batch_size, config.TRAIN.ACCUMULATION_STEPS
    size_val = found["val"].batch_size if "val" in found else 8
    config.DATA.DATASET.NUM_SAMPLES = NUM_STEPS * accumulation * size
    config.DATA.DATASET.NUM_SAMPLES_VAL = NUM_STEPS * size_val if "val" in found else 8
    facts = Facts(size, 1, config.DATA.DATASET.NUM_SAMPLES, config.OPTIMIZER.LR)
    plan = plan_batches(config.TRAIN, config.OPTIMIZER, config.SCHEDULE, facts)
    schedule = build_schedule(
        config.SCHEDULE, assembly.optimizer, total_steps=plan.total_steps, warmup_steps=plan.warmup_steps
    )
    with build_loaders(
        build_data(config.DATA, seed=0), sizes=plan.micro_batches, batch_size_val=size_val,
        data_config=config.DATA, seed=0, rank=0, world_size=1, device=CPU,
    ) as loaders:  # fmt: skip
        trainer = Trainer(
            config=config.TRAIN,
            plan=plan,
            world=World(CPU),
            assembly=assembly,
            loaders=loaders,
            train_step=assembly.train_step,
            schedule=schedule,
            checkpoints=CheckpointFolder(folder),
            metrics_file=MetricsFile(folder / "metrics.jsonl", enabled=False),
            tracker=Tracker(),
            progress_bar=ProgressBar(None),
        )
        start_a_new_peak()
        trainer.train_epoch()
        peak_bytes = of_this_process("VmHWM")
        assert trainer.progress.step == NUM_STEPS
        assembly.validation_step.model.eval()
        start_a_new_peak()
        for batch in loaders.val:
            assembly.validation_step(batch)
        return peak_bytes, of_this_process("VmHWM")


@pytest.mark.parametrize(("model", "optimizer", "ema", "accumulation"), CASES)
def test_training_reaches_no_more_than_the_search_promised(
    model: str,
    optimizer: str,
    ema: bool,
    accumulation: int,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    searched = search(
        *MODELS[model],
        f"OPTIMIZER.NAME={optimizer}",
        f"TRAIN.EMA.ENABLED={ema}",
        f"TRAIN.ACCUMULATION_STEPS={accumulation}",
        "DATA.AUTOBATCH.ENABLED_VAL=False",
        extra_mib=100,
    )
    found = searched.found["train"]
    assert found.limited_by == "memory"
    assert found.certified
    peak_bytes, _ = train(searched, tmp_path)
    record_property("excess", f"{peak_bytes / found.peak_bytes - 1:+.4f}")
    assert peak_bytes <= TOLERANCE * found.peak_bytes, f"{peak_bytes / found.peak_bytes - 1:+.2%} at {found}"
    assert found.peak_bytes <= found.budget_bytes


@pytest.mark.parametrize("model", [pytest.param("resnet", marks=pytest.mark.slow), "vit"])
def test_validation_with_trained_state_reaches_no_more_than_promised(model: str, tmp_path: Path) -> None:
    searched = search(*MODELS[model], "TRAIN.EMA.ENABLED=True", "OPTIMIZER.NAME=adamw", extra_mib=60)
    found = searched.found["val"]
    assert found.limited_by == "memory"
    assert found.batch_size > searched.found["train"].batch_size
    _, peak_bytes = train(searched, tmp_path)
    assert peak_bytes <= TOLERANCE * found.peak_bytes, f"{peak_bytes / found.peak_bytes - 1:+.2%} at {found}"


@pytest.mark.slow
def test_a_whole_run_reaches_no_more_than_the_larger_of_its_two_promises(run: Run, tmp_path: Path) -> None:
    """Checkpoints and everything else that a run does beside its steps included."""
    device_memory(CPU).clean()
    outcome = run(
        *BASE, *MODELS["resnet"], "DATA.DATASET.NUM_SAMPLES=240", "DATA.DATASET.NUM_SAMPLES_VAL=600",
        f"DATA.AUTOBATCH.MEMORY_LIMIT_GB={(of_this_process('VmRSS') + 120 * MIB) / GIB}",
        "TRAIN.EPOCHS=4", "TRAIN.VALIDATE_EVERY=2", "TRAIN.EMA.ENABLED=True", "EXPERIMENT.NAME=whole",
    )  # fmt: skip
    peak_bytes = of_this_process("VmHWM")  # the last search ends with a new peak
    assert outcome.code == 0, outcome.err
    found = json.loads((tmp_path / "runs/whole/autobatch.json").read_text())
    promised = {mode: AutoBatchResult.from_dict(mode, found[mode]).peak_bytes for mode in ("train", "val")}
    assert found["train"]["limited_by"] == found["val"]["limited_by"] == "memory"
    records = [json.loads(line) for line in (tmp_path / "runs/whole/metrics.jsonl").read_text().splitlines()]
    assert max(record["step"] for record in records) >= NUM_STEPS
    assert peak_bytes <= TOLERANCE * max(promised.values())


@pytest.mark.parametrize(
    "model", ["resnet", *(pytest.param(model, marks=pytest.mark.slow) for model in ("vit", "convnext"))]
)
def test_two_searches_in_a_row_agree_on_size_and_peak(model: str) -> None:
    first = search(*MODELS[model], "DATA.AUTOBATCH.ENABLED_VAL=False", extra_mib=150)
    second = find(first.config, first.assembly)["train"]
    before = first.found["train"]
    assert second.budget_bytes == before.budget_bytes
    assert second.batch_size == pytest.approx(before.batch_size, rel=0.02, abs=1)
    assert second.peak_bytes == pytest.approx(before.peak_bytes, rel=0.02)
