"""What a search promises holds in a whole run on a CUDA device: training, validation, and after resuming."""

import gc
import math
from collections import namedtuple
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
import torch.distributed as torch_dist

from linnaeus.autobatch.memory.device import CudaMemory
from linnaeus.autobatch.predict.allocator import MIB
from linnaeus.config.load import load_config
from linnaeus.data.datasets import build_data
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import OutOfMemoryError
from linnaeus.runtime.rng import seed_all
from linnaeus.size_search.searches import SizeSearch, find_sizes
from linnaeus.training.build import assemble
from linnaeus.training.checkpoint import CheckpointFolder
from linnaeus.training.trainer import Trainer
from tests.helpers.trainers import building
from tests.phantom import is_on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Grad strides do not match"),  # dimensions of one
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
on_a_phantom = pytest.mark.skipif(
    torch.cuda.is_available() and not is_on(),
    reason="workspaces of a real GPU vary by more than 2 % of this room: see gpu_truth.py",
)

STEPS_PER_EPOCH = 2.3
"""Optimizer steps of an epoch; the last one is smaller."""
NUM_VAL_BATCHES = 2.4
"""Batches of a validation: while the first one is predicted, a full one waits; the last one is smaller."""
TOLERANCE = 0.02
"""A phase may reserve this fraction more than promised."""
MODELS = {
    "resnet": ("MODEL.NAME=test_resnet", "DATA.IMG_SIZE=96"),
    "vit": ("MODEL.NAME=test_vit", "DATA.IMG_SIZE=128"),
    "convnext": ("MODEL.NAME=test_convnext", "DATA.IMG_SIZE=96"),
    "efficientnet": ("MODEL.NAME=test_efficientnet", "DATA.IMG_SIZE=96"),
    "vit2": ("MODEL.NAME=test_vit2", "DATA.IMG_SIZE=96"),
    "marginal": (
        "MODEL.NAME=test_resnet",
        "DATA.IMG_SIZE=64",
        "DATA.DATASET.NUM_CLASSES=[10,200,3000]",
        "MODEL.HEAD=marginal",
    ),
    "frozen": ("MODEL.NAME=test_convnext", "DATA.IMG_SIZE=96", "MODEL.FREEZE=backbone"),
    "unfrozen": (
        "MODEL.NAME=test_resnet",
        "DATA.IMG_SIZE=96",
        "MODEL.FREEZE=backbone",
        "TRAIN.UNFREEZE_EPOCH=2",
        "OPTIMIZER.LAYER_DECAY=0.7",
    ),
    "mixed": (
        "MODEL.NAME=test_vit",
        "DATA.IMG_SIZE=128",
        "DATA.AUGMENT.MIXUP=0.2",
        "DATA.AUGMENT.CUTMIX=1",
        "LOSS.NAME=bce",
        "DATA.DATASET.NUM_CLASSES=[10,200,3000]",
    ),
}
ROOM_BYTES = 1024 * MIB
"""Memory of the device without what the context and other processes hold: the models are small."""
DEVICE = torch.device("cuda", 0)


class Case(NamedTuple):
    """A run.

    Attributes:
        fraction: TARGET_MEMORY_FRACTION.
        buckets: whether gradients are in the buckets of DistributedDataParallel.
        checkpointing: whether activations are computed again in the backward pass.
    """

    model: str
    fraction: float
    optimizer: str = "sgd"
    amp: str = "off"
    ema: bool = False
    accumulation: int = 1
    buckets: bool = False
    checkpointing: bool = False

    @property
    def argv(self):
        """Its configuration."""
        return [
            *MODELS[self.model],
            "DATA.DATASET.NAME=synthetic",
            "DATA.DATASET.NUM_SAMPLES=100000",
            "DATA.DATASET.NUM_SAMPLES_VAL=100000",
            "DATA.AUTOBATCH.ENABLED=True",
            "DATA.AUTOBATCH.MIN_STEPS_PER_EPOCH=1",
            "DATA.AUTOBATCH.MAX_BATCH_SIZE=null",
            "DATA.AUTOBATCH.TOLERANCE=0",
            "DATA.AUTOBATCH.NUM_SPEC_SAMPLES=2",
            f"OPTIMIZER.NAME={self.optimizer}",
            "OPTIMIZER.LR=1e-4",
            f"TRAIN.AMP={self.amp}",
            f"TRAIN.GRADIENT_CHECKPOINTING={self.checkpointing}",
            f"TRAIN.EMA.ENABLED={self.ema}",
            f"TRAIN.ACCUMULATION_STEPS={self.accumulation}",
        ]


CASES = (
    *(
        Case(model, fraction, *switches)
        for model in ("resnet", "vit", "convnext", "efficientnet")
        for fraction, *rows in (
            (0.80, ("sgd", "off"), ("adamw", "bf16", True, 2, True)),
            (0.90, ("adamw", "off", True), ("sgd", "bf16", False, 2)),
            (0.97, ("adamw", "bf16"), ("sgd", "off", True, 2, True)),
        )
        for switches in rows
    ),
    Case("convnext", 0.97, "adamw", "bf16", ema=True, buckets=True),
    Case("vit2", 0.93, "adamw", checkpointing=True),
    Case("resnet", 0.90, "adamw", "fp16"),
    Case("marginal", 0.60, "adamw", ema=True),
    Case("frozen", 0.80, "adamw", ema=True),
    Case("unfrozen", 0.80, "adamw"),
    Case("mixed", 0.80, "adamw", "bf16"),
)
"""Each optimizer, number format and switch with each of four models, and at two fractions or more; then some
that once broke their promise; then what is frozen, mixed or summed over the taxonomy."""
CONTROLS = tuple(
    case
    for case in CASES
    if case[1:4] == (0.80, "sgd", "off") or case[:4] == ("vit", 0.97, "adamw", "bf16")
)
"""Cases that are run with sizes 10 % too large as well: segments of 20 MiB hide 5 % in this room."""


def named(case):
    return " ".join(map(str, case))


class Phase(namedtuple("Phase", "mode peak_bytes num_retries promise")):
    """A phase of a run: an epoch's training, or a validation.

    Attributes:
        peak_bytes: most bytes that the allocator reserved.
        num_retries: how often the allocator flushed its cache.
        promise: what the search found for its mode.
    """

    @property
    def is_kept(self):
        """Whether it kept to the promise and to the budget, and had no need to flush the cache."""
        most = min((1 + TOLERANCE) * self.promise.peak_bytes, self.promise.budget_bytes)
        return self.peak_bytes <= most and not self.num_retries


class SingleRank(World):
    """One rank whose model is wrapped all the same: the group of all ranks is that of this rank alone."""

    @property
    def is_distributed(self):
        """True."""
        return True


@contextmanager
def world_of(case, folder):
    """The processes of a run; for gradient buckets, in a process group of one."""
    if not case.buckets:
        yield World(DEVICE)
        return
    store = torch_dist.FileStore(str(folder / "store"), 1)
    torch_dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        host, single = (torch_dist.new_group([0], backend=name) for name in ("gloo", "nccl"))
        yield SingleRank(DEVICE, host_group=host, single_rank_group=single)
    finally:
        torch_dist.destroy_process_group()


class MeasuredTrainer(Trainer):
    """Measures each phase at the allocator.

    Attributes:
        phases: the mode, the peak in bytes and the flushes of the cache of each phase so far.
    """

    def __post_init__(self):
        super().__post_init__()
        self.phases = []

    def train_epoch(self):
        with self._measured("train"):
            super().train_epoch()

    def _validation_metrics(self, batches):
        with self._measured("val"):
            return super()._validation_metrics(batches)

    @contextmanager
    def _measured(self, mode):
        before = torch.cuda.memory_stats()["num_alloc_retries"]
        torch.cuda.reset_peak_memory_stats()
        yield
        num_retries = torch.cuda.memory_stats()["num_alloc_retries"] - before
        self.phases.append((mode, torch.cuda.max_memory_reserved(), num_retries))


class Run:
    """One run, in several processes one after the other.

    Args:
        case: what is run.
        folder: takes the checkpoint.

    Attributes:
        found: what the first process has found, by mode.
    """

    def __init__(self, case, folder):
        self.case, self.folder = case, folder
        self.found = {}
        seed_all(0)

    def phases(self, *, excess=0.0):
        """Search if nothing is found yet, train, write a checkpoint, resume from it and train on.

        Args:
            excess: fraction by which the sizes are raised above those found.

        Raises:
            torch.OutOfMemoryError: memory ran out after the search.
        """
        with world_of(self.case, self.folder) as world:
            first = self._process(world, 2, excess, resumes=False)
            return first + self._process(world, 3, excess, resumes=True)

    def _process(self, world, num_epochs, excess, *, resumes):
        """The phases of a process, which ends after so many epochs; a validation follows each."""
        memory = CudaMemory(DEVICE)
        fraction = (memory.outside() + self.case.fraction * ROOM_BYTES) / memory.total_bytes
        options = f"DATA.AUTOBATCH.TARGET_MEMORY_FRACTION={fraction}", f"TRAIN.EPOCHS={num_epochs}"
        config = load_config([*self.case.argv, *options]).config
        data = build_data(config.DATA, seed=0)
        assembly = assemble(config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, data, world)
        checkpoints = CheckpointFolder(self.folder / "checkpoints", background=True)
        gc.collect()
        torch.cuda.empty_cache()
        with checkpoints:
            checkpoint = checkpoints.load_latest(world) if resumes else None
            if checkpoint is not None:
                checkpoint.restore(assembly, world)
            search = SizeSearch(config.DATA, config.TRAIN, data, assembly, world, seed=0)
            earlier = {mode: result.batch_size for mode, result in self.found.items()}
            found = find_sizes(search, earlier)
            self.found = self.found or found
            sizes = {mode: result.batch_size for mode, result in found.items()}
            assert earlier in ({}, sizes), "sizes found earlier are kept"
            sizes = {mode: math.ceil(size * (1 + excess)) for mode, size in sizes.items()}
            samples_per_step = sizes["train"] * self.case.accumulation
            config.DATA.DATASET.NUM_SAMPLES = int(STEPS_PER_EPOCH * samples_per_step)
            config.DATA.DATASET.NUM_SAMPLES_VAL = int(NUM_VAL_BATCHES * sizes["val"])
            data = build_data(config.DATA, seed=0)
            with building(
                MeasuredTrainer, config, data, assembly, world, sizes, checkpoints
            ) as trainer:
                if checkpoint is not None:
                    trainer.resume(checkpoint.entries, 0)
                trainer.fit()
        return [Phase(*phase, self.found[phase[0]]) for phase in trainer.phases]


def check(run):
    if is_on() and run.case.model == "marginal":
        pytest.skip("its loss is the logarithm of sums that a phantom leaves at zero")
    phases = run.phases()
    assert [phase.mode for phase in phases] == ["train", "val"] * 3
    for found in run.found.values():
        assert found.limited_by == "memory"
        assert found.certified
    assert all(phase.is_kept for phase in phases), phases


@pytest.mark.parametrize(
    "case",
    [CASES[0], *(pytest.param(case, marks=[pytest.mark.slow, on_a_phantom]) for case in CASES[1:])],
    ids=named,
)
def test_a_run_reserves_no_more_than_was_promised(case, tmp_path):
    """And no more than the fraction of the device leaves it."""
    check(Run(case, tmp_path))


@pytest.mark.slow
@on_a_phantom
@pytest.mark.parametrize("case", CONTROLS, ids=named)
def test_sizes_that_are_too_large_break_the_promise(case, tmp_path):
    """In training and in validation, or memory runs out."""
    run = Run(case, tmp_path)
    check(run)
    try:
        phases = run.phases(excess=0.10)
    except (torch.OutOfMemoryError, OutOfMemoryError):
        return
    assert {phase.mode for phase in phases if not phase.is_kept} == {"train", "val"}, phases
