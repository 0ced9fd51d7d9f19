"""The searches of a run: its own data, bounds and switches, and what it says about them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import Dataset

from linnaeus.autobatch.observer import SearchObserver
from linnaeus.autobatch.planning import find_planned_sizes
from linnaeus.autobatch.protocol import RankStatus
from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.sizes import SizeSearch, find_sizes, keys, run_on_every_rank
from linnaeus.batching.facts import Facts
from linnaeus.batching.plan import BatchPlan, plan_batches
from linnaeus.config.load import load_config
from linnaeus.config.schema import OptimizerConfig, ScheduleConfig
from linnaeus.data.batch import BatchSpec
from linnaeus.data.bundle import collate_pairs
from linnaeus.data.datasets import build_data
from linnaeus.dist import World
from linnaeus.memory.device import device_memory
from linnaeus.rng import seed_all
from linnaeus.training.build import Assembly, assemble
from linnaeus.training.state_bytes import StateBytes, state_bytes
from tests.helpers import forks
from tests.helpers.bits import bits
from tests.helpers.runs import SMALL, Run, weights

CPU = torch.device("cpu")
ON = "DATA.AUTOBATCH.ENABLED=True"
SEEN: dict[str, list[Any]] = {"shapes": [], "dtypes": []}
"""What `Model` was given, and what its layer gave."""


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    for values in SEEN.values():
        values.clear()


class Growing(Dataset[tuple[Tensor, int]]):
    """Images of sides 8, 9, 10, ... with zeros around the smaller ones of a batch."""

    classes = ("a", "b")

    def __init__(self, split: str, length: int = 12) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3, 8 + index, 8 + index), 0.5), index % 2

    @staticmethod
    def collate_fn(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        side = max(image.shape[-1] for image, _ in samples)
        images = torch.zeros(len(samples), 3, side, side)
        for number, (image, _) in enumerate(samples):
            images[number, :, : image.shape[-2], : image.shape[-1]] = image
        return images, torch.tensor([label for _, label in samples])


class Model(nn.Module):
    """Averages, then a layer of a width that can be large."""

    def __init__(self, num_classes: Any, width: int = 16, fails_at: int = 10**9) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.first = nn.Linear(3, width)
        self.second = nn.Linear(width, width)
        counts = list(num_classes.values()) if isinstance(num_classes, dict) else [num_classes]
        self.heads = nn.ModuleList(nn.Linear(width, count) for count in counts)

    def forward(self, images: Tensor) -> Any:
        SEEN["shapes"].append(tuple(images.shape))
        if len(images) >= self.fails_at:
            raise ZeroDivisionError("the user's model is wrong")
        hidden = self.second(self.first(images.mean((2, 3))).relu())
        SEEN["dtypes"].append(hidden.dtype)
        outputs = [head(hidden) for head in self.heads]
        return outputs if len(outputs) > 1 else outputs[0]


OWN_MODEL = f"MODEL._target_={__name__}.Model"
BARE = [option for option in SMALL if not option.startswith("MODEL.")]
OWN_DATA = f"DATA.DATASET._target_={__name__}.Growing"


def prepared(*argv: str) -> tuple[SizeSearch, Assembly]:
    """A search as a run prepares it."""
    config = load_config([ON, "EXPERIMENT.DEVICE=cpu", *argv]).config
    seed_all(0)
    data = build_data(config.DATA, seed=0)
    assembly = assemble(config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, data, World(CPU))
    seed = config.EXPERIMENT.SEED
    return SizeSearch(config.DATA, config.TRAIN, data, assembly, World(CPU), seed), assembly


def found_in(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "runs/small/autobatch.json").read_text())
    return content


def one_line(text: str) -> str:
    return " ".join(text.split())


# --- planned sizes ---


@pytest.mark.parametrize(
    ("statuses", "tried"),
    [([], True), (["fits"], False), (["fits", "over"], True), (["over", "fits"], False)],
)
def test_the_newest_trial_of_a_planned_size_decides_whether_it_is_tried_again(
    statuses: list[str], tried: bool
) -> None:
    search, _ = prepared(OWN_MODEL, OWN_DATA, "TRAIN.EFFECTIVE_BATCH_SIZE=12")
    runs = [(8, "fits"), *((6, status) for status in statuses)]
    trials = [{"batch_size": n, "status": status, "peak_bytes": 1, "seconds": 0.1} for n, status in runs]
    entry = {
        "batch_size": 8, "certified": True, "limited_by": "memory", "target_memory_fraction": 0.8,
        "budget_bytes": 1, "total_bytes": 1, "strategy": "guided", "seconds": 1.0, "trials": trials,
    }  # fmt: skip

    def plan_for(size: int) -> BatchPlan:
        facts = Facts(max_micro_batch_size=size, world_size=1, num_samples=12, learning_rate=0.1)
        return plan_batches(search.train, OptimizerConfig(), ScheduleConfig(), facts)

    checkpoint = {"searched_for": "key", "autobatch": {"train": entry}}
    planned = find_planned_sizes(search, plan_for, 8, key="key", checkpoint=checkpoint)
    assert planned.plan.micro_batch_size == 6
    ran = [(trial.size, trial.status) for trial in planned.found["train"].trials]
    assert ran[: len(runs)] == runs
    assert (len(ran) > len(runs)) == tried
    assert ran[-1] == (6, "fits")


@pytest.mark.parametrize("peak_bytes", [1, 1 << 60])
def test_under_a_limit_the_validation_size_is_kept_only_if_it_still_fits(peak_bytes: int) -> None:
    """Training's size is not run again: smaller micro-batches are trained."""
    search, _ = prepared(
        OWN_MODEL, OWN_DATA, "TRAIN.EFFECTIVE_BATCH_SIZE=12", "DATA.AUTOBATCH.MAX_BATCH_SIZE_VAL=5"
    )
    entry = {
        "certified": True, "limited_by": "memory", "target_memory_fraction": 0.8, "budget_bytes": 1,
        "total_bytes": 1, "strategy": "guided", "seconds": 1.0,
    }  # fmt: skip

    def found(size: int, peak_bytes: int) -> dict[str, Any]:
        trial = {"batch_size": size, "status": "fits", "peak_bytes": peak_bytes, "seconds": 0.1}
        return {**entry, "batch_size": size, "trials": [trial]}

    def plan_for(size: int) -> BatchPlan:
        facts = Facts(max_micro_batch_size=size, world_size=1, num_samples=12, learning_rate=0.1)
        return plan_batches(search.train, OptimizerConfig(), ScheduleConfig(), facts)

    sizes = {"train": found(12, 1 << 60), "val": found(7, peak_bytes)}
    checkpoint = {"searched_for": "key", "autobatch": sizes, "micro_batch_limit": 6}
    SEEN["shapes"].clear()
    planned = find_planned_sizes(search, plan_for, 8, key="key", checkpoint=checkpoint)
    assert (planned.plan.micro_batch_size, planned.micro_batch_limit) == (6, 6)
    assert planned.batch_sizes == {"train": 12, "val": 7 if peak_bytes == 1 else 5}
    shapes = {shape[0] for shape in SEEN["shapes"]}
    assert max(shapes, default=0) == (0 if peak_bytes == 1 else 6)  # the training step before validation


# --- what is frozen ---

FREEZE = ("MODEL.FREEZE=backbone", "TRAIN.EPOCHS=2")
LATER = {
    "trains": ("TRAIN.EPOCHS=2",),
    "frozen": FREEZE,
    "unfrozen in the run": (*FREEZE, "TRAIN.UNFREEZE_EPOCH=2"),
}


def memory_of(*options: str) -> dict[str, Any]:
    """Bytes at one size: as predicted, as measured, and those of the tensors that training keeps."""
    search, assembly = prepared(
        *SMALL, "DATA.IMG_SIZE=64", "DATA.DATASET.NUM_SAMPLES=96", "DATA.AUTOBATCH.MIN_BATCH_SIZE=64",
        "DATA.AUTOBATCH.MAX_BATCH_SIZE=64", "TRAIN.EMA.ENABLED=True", *options,
    )  # fmt: skip
    kept: list[StateBytes] = []
    assembly.optimizer.register_step_post_hook(lambda *_: kept.append(state_bytes(assembly, CPU)))
    before = {name: parameter.requires_grad for name, parameter in assembly.model.named_parameters()}
    predicted = search.predict("train").reserved_bytes(64)
    kept.clear()
    trial = search.run("train", RankStatus()).trials[0]
    now = {name: parameter.requires_grad for name, parameter in assembly.model.named_parameters()}
    assert now == before
    assert not assembly.optimizer.state
    return {"predicted": predicted, "kept": kept[-1], "measured": trial.peak_bytes}


@pytest.mark.slow
def test_what_is_frozen_needs_no_memory_unless_it_trains_by_the_last_epoch() -> None:
    found = {name: memory_of(*options) for name, options in LATER.items()}
    assert found["unfrozen in the run"]["predicted"] == found["trains"]["predicted"]
    assert found["unfrozen in the run"]["kept"] == found["trains"]["kept"]
    frozen = found["frozen"]
    assert frozen["predicted"] < 0.6 * found["trains"]["predicted"]
    assert frozen["measured"] + 20 * 2**20 < found["trains"]["measured"]
    heads_bytes = 4 * (2 + 6) * (96 + 1)
    assert frozen["kept"].gradients == heads_bytes
    assert frozen["kept"].optimizer_state == pytest.approx(2 * heads_bytes, abs=50)
    assert frozen["kept"].parameters == found["trains"]["kept"].parameters
    measured = found["unfrozen in the run"]["measured"]
    assert measured == pytest.approx(found["trains"]["measured"], abs=10 * 2**20)


# --- bounds ---


def test_the_length_of_the_dataset_bounds_both_sizes_and_is_named(run: Run, tmp_path: Path) -> None:
    outcome = run(*BARE, ON, OWN_MODEL, "TRAIN.EPOCHS=1")
    assert outcome.code == 0, outcome.err
    found = found_in(tmp_path)
    for mode, size in (("train", 96), ("val", 31)):
        assert (found[mode]["batch_size"], found[mode]["limited_by"]) == (size, "dataset")
        assert found[mode]["certified"]
        assert max(trial["batch_size"] for trial in found[mode]["trials"]) == size
    assert "batch size 96, limited by the samples of one process, certified" in one_line(outcome.out)


def test_each_of_several_processes_has_its_part_of_the_dataset() -> None:
    search, _ = prepared(
        OWN_MODEL, "DATA.DATASET.NAME=synthetic", "DATA.DATASET.NUM_SAMPLES=100", "DATA.IMG_SIZE=8"
    )
    spec = BatchSpec.from_dataset(search.data.train, search.data.collate, 4, 0)
    one_of_three = dataclasses.replace(search, world=World(CPU, rank=0, world_size=3, local_world_size=3))
    assert search._bounds("train", spec)["dataset"] == 100
    assert one_of_three._bounds("train", spec)["dataset"] == 33


def test_host_memory_that_the_loader_needs_bounds_the_size_and_is_named(run: Run, tmp_path: Path) -> None:
    bytes_per_sample = 3 * 32 * 32 * 4 + 2 * 8
    shared_memory = psutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 1 << 60
    available = min(psutil.virtual_memory().available, shared_memory, device_memory(CPU).total_bytes)
    prefetch = int(0.5 * available / bytes_per_sample / 8)  # room for batches of some 8
    outcome = run(
        *BARE, ON, OWN_MODEL, "TRAIN.EPOCHS=1", "DATA.NUM_WORKERS=1", f"DATA.PREFETCH_FACTOR={prefetch}"
    )
    assert outcome.code == 0, outcome.err
    found = found_in(tmp_path)
    for mode in ("train", "val"):
        size = found[mode]["batch_size"]
        assert found[mode]["limited_by"] == "host_memory"
        assert 1 <= size <= 9
        assert max(trial["batch_size"] for trial in found[mode]["trials"]) == size
    assert "limited by host memory for the loader" in one_line(outcome.out)


LIMITED = """
import sys, torch
from linnaeus.main import cli
from linnaeus.memory.device import device_memory

torch.set_num_threads(1)
mib, *argv = sys.argv[1:]
assert cli([*argv, "EXPERIMENT.NAME=warm_up", "DATA.AUTOBATCH.MAX_BATCH_SIZE=16"]) == 0
memory = device_memory(torch.device("cpu"))
memory.clean()
limit = (memory.in_use() + int(mib) * 2**20) / 2**30
raise SystemExit(cli([*argv, f"DATA.AUTOBATCH.MEMORY_LIMIT_GB={limit}"]))
"""
"""A run with so much memory beyond what the process holds, once it has loaded all that it needs."""


def test_memory_bounds_the_size_and_is_named(tmp_path: Path) -> None:
    outcome = forks.python(
        "-c", LIMITED, "40", *SMALL, ON, "MODEL.NAME=test_vit", "DATA.IMG_SIZE=96",
        "DATA.AUTOBATCH.TARGET_MEMORY_FRACTION=1.0", "TRAIN.EPOCHS=1", "DATA.AUTOBATCH.ENABLED_VAL=False",
        cwd=tmp_path,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    train = found_in(tmp_path)["train"]
    assert train["limited_by"] == "memory"
    assert train["batch_size"] < 96
    status = {trial["batch_size"]: trial["status"] for trial in train["trials"]}
    assert status[train["batch_size"]] == "fits"
    assert status[train["batch_size"] + 1] in ("over", "oom")
    assert "limited by the memory budget, certified" in one_line(outcome.out)


def test_a_round_of_the_ranks_adds_its_seconds_and_says_what_is_held_now() -> None:
    search, _ = prepared(OWN_MODEL, OWN_DATA, "DATA.AUTOBATCH.MAX_BATCH_SIZE=8")
    found = find_sizes(search)["train"]
    earlier = dataclasses.replace(found, seconds=1000.0, held_bytes=1, budget_bytes=1, trials=())
    result = run_on_every_rank(search, earlier, 4)
    (trial,) = result.trials
    assert (trial.size, result.ran_on_every_rank) == (4, (4,))
    assert 1000.0 + trial.seconds < result.seconds < 1100.0
    assert 1 < result.held_bytes <= trial.peak_bytes <= result.budget_bytes
    asked = ("tolerance", "multiple_of", "min_batch_size", "max_batch_size")
    assert [getattr(result, name) for name in asked] == [getattr(found, name) for name in asked]
    assert result.max_batch_size == 8, "not the size of the round"


def test_the_keys_that_messages_name_exist() -> None:
    config = load_config([]).config
    for mode in get_args(Mode):
        for name in dataclasses.asdict(keys(mode)).values():
            for key in re.findall(r"[A-Z]+(?:\.[A-Z_]+)+", name):
                node: Any = config
                for part in key.split("."):
                    node = node[part] if isinstance(node, dict) else getattr(node, part)


def test_when_nothing_fits_the_run_ends_with_code_3_and_no_traceback(run: Run, tmp_path: Path) -> None:
    outcome = run(*SMALL, ON, "DATA.AUTOBATCH.MEMORY_LIMIT_GB=0.01")
    assert outcome.code == 3
    assert "AutoBatch (train): no batch size fits" in outcome.err
    assert "DATA.AUTOBATCH.MEMORY_LIMIT_GB" in outcome.err
    assert "DATA.AUTOBATCH.MIN_BATCH_SIZE" not in outcome.err, "it is 1"
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "runs/small/autobatch.json").exists()


# --- which modes ---


@pytest.mark.parametrize(
    ("train", "val"), [(True, False), pytest.param(False, True, marks=pytest.mark.slow), (False, False)]
)
def test_only_the_modes_asked_for_are_searched(run: Run, tmp_path: Path, train: bool, val: bool) -> None:
    outcome = run(
        *SMALL, f"DATA.AUTOBATCH.ENABLED={train}", f"DATA.AUTOBATCH.ENABLED_VAL={val}", "TRAIN.EPOCHS=1",
        "DATA.BATCH_SIZE=7", "DATA.BATCH_SIZE_VAL=5", "DATA.AUTOBATCH.MAX_BATCH_SIZE=12",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    saved = yaml.safe_load((tmp_path / "runs/small/config.yaml").read_text())["DATA"]
    assert (saved["BATCH_SIZE"], saved["BATCH_SIZE_VAL"]) == (12 if train else 7, 24 if val else 5)
    if not train and not val:
        assert not (tmp_path / "runs/small/autobatch.json").exists()
        return
    found = found_in(tmp_path)
    assert (found["train"] is not None, found["val"] is not None) == (train, val)


# --- what a trial sees ---


def test_samples_of_differing_shape_are_measured_at_the_largest_of_those_looked_at() -> None:
    search, _ = prepared(OWN_MODEL, OWN_DATA)
    SEEN["shapes"].clear()
    found = find_sizes(search)
    assert {shape[2:] for shape in SEEN["shapes"]} == {(19, 19)}
    assert {shape[0] for shape in SEEN["shapes"]} >= {found["train"].batch_size}


def test_no_more_samples_are_looked_at_than_configured() -> None:
    sides = set()
    for seed in range(3):
        search, _ = prepared(
            OWN_MODEL, OWN_DATA, "DATA.AUTOBATCH.NUM_SPEC_SAMPLES=1", f"EXPERIMENT.SEED={seed}"
        )
        SEEN["shapes"].clear()
        find_sizes(search)
        assert len({shape[2:] for shape in SEEN["shapes"]}) == 1
        sides |= {shape[2] for shape in SEEN["shapes"]}
    assert len(sides) > 1


def test_bf16_is_on_in_trials_and_the_search_changes_nothing() -> None:
    search, assembly = prepared(OWN_MODEL, OWN_DATA, "TRAIN.AMP=bf16", "TRAIN.EMA.ENABLED=True")
    assert assembly.ema is not None
    before = {name: value.clone() for name, value in assembly.model.state_dict().items()}
    before_ema = {name: value.clone() for name, value in assembly.ema.module.state_dict().items()}
    SEEN["dtypes"].clear()
    find_sizes(search)
    assert set(SEEN["dtypes"]) == {torch.bfloat16}
    assert all(torch.equal(value, before[name]) for name, value in assembly.model.state_dict().items())
    assert all(torch.equal(v, before_ema[name]) for name, v in assembly.ema.module.state_dict().items())
    assert assembly.ema.num_updates == 0
    assert not assembly.optimizer.state
    assert all(parameter.grad is None for parameter in assembly.model.parameters())


@pytest.mark.parametrize(("steps", "num_micro_batches"), [(1, 1), (2, 2), (5, 2)])
def test_a_step_of_a_trial_has_two_micro_batches_when_gradients_accumulate(
    steps: int, num_micro_batches: int
) -> None:
    search, _ = prepared(
        OWN_MODEL, OWN_DATA, f"TRAIN.ACCUMULATION_STEPS={steps}", "DATA.AUTOBATCH.ENABLED_VAL=False"
    )
    SEEN["shapes"].clear()
    found = find_sizes(search)["train"]
    sizes = [shape[0] for shape in SEEN["shapes"]]
    assert found.batch_size == 12
    tried = [trial.size for trial in found.trials]
    assert tried.count(12) == 1
    assert sizes.count(12) == 2 * num_micro_batches, "two steps a trial"


@pytest.mark.parametrize("observer", [None, SearchObserver()])
def test_each_training_trial_makes_its_own_wrapper_whoever_watches(
    observer: SearchObserver | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buckets belong to the peak, and a wrapper is unusable after an error in the middle of a step."""
    wrappers = []
    monkeypatch.setattr(
        "linnaeus.autobatch.sizes.wrap", lambda model, *_, **__: wrappers.append(model) or model
    )
    search, _ = prepared(OWN_MODEL, OWN_DATA)
    with search.finder("train", RankStatus()) as finder:
        finder._observer = observer or finder._observer
        for number, size in enumerate((2, 4, 4), start=2):  # the first is preceded by the warm-up
            assert finder.measure(size).status == "fits"
            assert len(wrappers) == number


def test_a_batch_of_a_trial_holds_what_the_loader_would_collate() -> None:
    search, _ = prepared(
        OWN_MODEL, "DATA.DATASET.NAME=synthetic", "DATA.DATASET.NUM_SAMPLES=9", "DATA.IMG_SIZE=8"
    )
    samples = [search.data.train[index] for index in range(3)]
    spec = BatchSpec(samples, collate_pairs)
    loaded = spec.load(7)
    expected = collate_pairs([samples[index % 3] for index in range(7)])
    assert torch.equal(loaded.inputs, expected.inputs)
    assert torch.equal(loaded.targets, expected.targets)
    loaded.inputs.zero_()
    assert torch.equal(spec.load(7).inputs, expected.inputs)


# --- mixed batches ---

MIXED = ("DATA.AUGMENT.MIXUP=0.4", "DATA.AUGMENT.CUTMIX=1.0", "LOSS.LABEL_SMOOTHING=0.1")


def test_trials_train_on_mixed_batches_and_validate_on_labels() -> None:
    search, assembly = prepared(*BARE, *MIXED, OWN_MODEL, "DATA.AUTOBATCH.MAX_BATCH_SIZE=8")
    seen: dict[bool, set[tuple[torch.dtype, int]]] = {True: set(), False: set()}
    assembly.criterion.register_forward_hook(
        lambda module, arguments, _: seen[torch.is_grad_enabled()].add(
            (arguments[1].dtype, arguments[1].shape[1])
        )
    )
    find_sizes(search)
    assert seen == {True: {(torch.float32, 2 + 6)}, False: {(torch.int64, 2)}}
    # On devices, and where nothing is run, batches are made and not collated.
    for mode, form in (("train", (torch.float32, 8)), ("val", (torch.int64, 2))):
        targets = search.spec(mode).make(5, "meta").targets  # type: ignore[arg-type]
        assert (targets.dtype, targets.shape[1]) == form
    prediction = search.predict("train")
    assert prediction.reserved_bytes(2048) > prediction.reserved_bytes(8)


def test_training_on_mixed_batches_is_that_with_the_size_set_by_hand(run: Run, tmp_path: Path) -> None:
    options = (*BARE, *MIXED, OWN_MODEL, "TRAIN.EPOCHS=2", "DATA.AUGMENT.MIX_OFF_EPOCHS=1")
    runs = {
        "found": (*options, ON, "DATA.AUTOBATCH.MAX_BATCH_SIZE=16"),
        "by_hand": (*options, "DATA.BATCH_SIZE=16", "DATA.BATCH_SIZE_VAL=31"),
        "plain": (*options, "DATA.BATCH_SIZE=16", "DATA.AUGMENT.MIXUP=0", "DATA.AUGMENT.CUTMIX=0"),
    }
    trained = {}
    for name, argv in runs.items():
        outcome = run(*argv, f"EXPERIMENT.NAME={name}")
        assert outcome.code == 0, outcome.err
        trained[name] = bits(weights(tmp_path / "runs" / name))
    found = json.loads((tmp_path / "runs/found/autobatch.json").read_text())
    assert found["train"]["batch_size"] == 16
    assert trained["found"] == trained["by_hand"]
    assert trained["plain"] != trained["by_hand"]


# --- errors ---


@pytest.mark.parametrize("fails_at", [1, 5])
def test_an_error_of_the_users_model_ends_the_run_with_that_error(run: Run, fails_at: int) -> None:
    with pytest.raises(ZeroDivisionError, match="the user's model is wrong"):
        run(*BARE, ON, OWN_MODEL, f"MODEL.fails_at={fails_at}")
