"""`auto_find_batch_size` as a library, on plain PyTorch loops."""

import contextlib
import gc
import json
import os
import random
import resource
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from linnaeus.autobatch import AutoBatchResult, auto_find_batch_size
from linnaeus.autobatch.finder import BatchSizeFinder
from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.memory.host import CpuMemory
from linnaeus.autobatch.settings import SearchSettings
from linnaeus.runtime.errors import AutoBatchError
from linnaeus.training.ema import Ema
from tests.helpers.bits import bits
from tests.helpers.ledger import limit_with_room_for, room

CPU = torch.device("cpu")
MIB = 1024**2
WIDTH = MIB // 4  # float32 values in one MiB


def make_batch(size):
    """One MiB a sample. Nobody writes to it: an allocation counts, and pages take time."""
    return torch.empty(size, WIDTH)


def plain_step(batch):
    """Twice the batch at its peak."""
    torch.empty_like(batch)


find_on_cpu = partial(auto_find_batch_size, device="cpu")


def record_of(result, size):
    """The newest trial of a size: a size that ran before the confirmation may not fit in it."""
    return next(trial for trial in reversed(result.trials) if trial.size == size)


# --- the size found ---


@pytest.mark.parametrize("max_trials", [1, 25])
@pytest.mark.parametrize("drawn", ["make_batch", "step"])
def test_a_size_is_no_certificate_where_memory_varies(drawn, max_trials):
    """Batches or steps take one to three MiB a sample."""
    draw = partial(random.Random(0).choice, [WIDTH, 2 * WIDTH, 3 * WIDTH])
    drawing = {
        "make_batch": lambda size: torch.empty(size, draw()),
        "step": lambda batch: torch.empty(len(batch), draw()),
    }
    parts = {"step": plain_step, "make_batch": make_batch, drawn: drawing[drawn]}
    result = find_on_cpu(**parts, **room(240), max_batch_size=300, max_trials=max_trials)
    assert not result.certified
    assert len(result.trials) <= max_trials
    most = 40 if drawn == "make_batch" else 60  # six or four MiB a sample
    assert result.batch_size == 16 if max_trials == 1 else 0.9 * most <= result.batch_size <= most


@pytest.mark.parametrize("device", ["cuda:9", "meta", "gpu"])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(ValueError, match=f"device '{device}'.* cpu"):
        auto_find_batch_size(plain_step, make_batch, device=device)


def test_steps_that_accumulate_gradients_are_certified():
    model = nn.Linear(1, MIB)
    optimizer = torch.optim.AdamW(model.parameters())
    calls = []

    def step(batch):
        calls.append(len(batch))
        model(batch[:1, :1]).sum().backward()
        if len(calls) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    arguments = {"state": (model, optimizer), "tolerance": 0.0, **room(150)}
    result = find_on_cpu(step, make_batch, max_batch_size=300, **arguments)
    assert (result.certified, result.limited_by) == (True, "memory")
    sizes = [trial.size for trial in result.trials]
    assert len(set(sizes)) == len(sizes), "no size ran again"


def test_keeping_the_last_batch_and_losses_is_no_leak(caplog):
    kept, losses = {}, []

    def step(batch):
        kept["last"] = batch
        losses.append(batch.sum())

    find_on_cpu(step, make_batch, **room(100))
    assert not any(record.levelname == "WARNING" for record in caplog.records)


@pytest.mark.parametrize(
    ("strategy", "multiple_of"), [("guided", 1), ("binary", 8), ("binsearch", 1)]
)
def test_the_size_ran_within_the_budget_and_the_next_one_did_not(strategy, multiple_of):
    seen = []

    def step(batch):
        seen.append(len(batch))
        plain_step(batch)

    result = find_on_cpu(
        step,
        make_batch,
        strategy=strategy,
        multiple_of=multiple_of,
        max_batch_size=300,
        bounds={"dataset": 200},
        steps_per_trial=3,
        **room(150),
    )
    assert (result.certified, result.limited_by) == (True, "memory")
    assert result.batch_size % multiple_of == 0
    fits, next_one = (
        record_of(result, size) for size in (result.batch_size, result.batch_size + multiple_of)
    )
    assert fits.status == "fits"
    assert 0 < fits.peak_bytes <= result.budget_bytes
    assert next_one.status in ("over", "oom")
    assert seen.count(result.batch_size) >= 3
    assert 50 <= result.batch_size <= 80, "two MiB a sample in 150 MiB"


@pytest.mark.parametrize(("confirm", "least", "most"), [(True, 45, 56), (False, 64, 64)])
def test_the_size_fits_what_the_process_holds_after_the_search(confirm, least, most):
    """Only a confirmation can notice what the last trial has left behind, as a library's buffers."""
    held = []

    def make_batch_and_keep(size):
        if size == 128:
            held.append(make_batch(40))
        return make_batch(size)

    settings = SearchSettings(**room(150), max_batch_size=300, strategy="power", tolerance=0.0)
    with BatchSizeFinder(plain_step, make_batch_and_keep, settings, device="cpu") as finder:
        result = finder.find(confirm=confirm)
    assert result.limited_by == "memory"
    assert least <= result.batch_size <= most, "of 110 MiB"


@pytest.mark.parametrize("max_trials", [2, 4, 6])
def test_confirmations_count_among_the_trials(max_trials):
    """Each of the first trials leaves more behind, so that sizes are confirmed."""
    held = []

    def make_batch_and_keep(size):
        if size > 16 and len(held) < 4:
            held.append(make_batch(8))
        return make_batch(size)

    arguments = room(150, max_batch_size=300, max_trials=max_trials)
    result = find_on_cpu(plain_step, make_batch_and_keep, **arguments)
    assert len(result.trials) <= max_trials
    assert record_of(result, result.batch_size).peak_bytes <= result.budget_bytes
    assert result.certified or result.limited_by == "max_trials"


def test_what_others_take_during_a_search_lowers_its_budget(monkeypatch):
    taken, read = [0], CpuMemory.budget
    monkeypatch.setattr(CpuMemory, "budget", lambda memory, *asked: read(memory, *asked) - taken[0])

    def step(batch):
        plain_step(batch)
        taken[0] = 60 * MIB if len(batch) > 16 else taken[0]

    limit_gb = limit_with_room_for(160)
    found = find_on_cpu(step, make_batch, target_memory_fraction=1.0, memory_limit_gb=limit_gb)
    assert found.budget_bytes == int(limit_gb * GIB) - 60 * MIB
    assert record_of(found, found.batch_size).peak_bytes <= found.budget_bytes


@pytest.mark.parametrize("extra_mib", [20, 400])
@pytest.mark.parametrize("kept", [lambda batch: batch * 3, lambda batch: batch[:1] * 3])
def test_a_step_that_keeps_every_output_has_no_size(kept, extra_mib):
    outputs = []
    with pytest.raises(AutoBatchError, match=r"[\d.]+ MiB"):
        find_on_cpu(lambda batch: outputs.append(kept(batch)), make_batch, **room(extra_mib))
    outputs.clear()  # the traceback holds them, and later tests measure what is held


# --- what limits it ---


@pytest.mark.parametrize(
    ("arguments", "limited_by", "size"),
    [
        ({"max_batch_size": 24, "multiple_of": 7}, "max_batch_size", 21),
        ({"bounds": {"dataset": 17, "host_memory": 13}}, "host_memory", 13),
    ],
)
def test_the_lowest_bound_is_reached_and_named(arguments, limited_by, size):
    sizes = set()
    result = find_on_cpu(lambda batch: sizes.add(len(batch)), make_batch, **room(300), **arguments)
    assert (result.limited_by, result.batch_size, result.certified) == (limited_by, size, True)
    assert min(sizes) == 1
    assert max(sizes) == size


@pytest.mark.parametrize(("setting", "value"), [("timeout_minutes", 1.0), ("max_trials", 2)])
def test_a_limit_ends_the_search_with_the_best_size_so_far(setting, value, monkeypatch, caplog):
    sizes, limited_by = [], setting.removesuffix("_minutes")

    def step(batch):
        sizes.extend({len(batch)} - {*sizes})
        plain_step(batch)

    def clock():  # beyond the deadline once one size has warmed up and two have run
        return 7200.0 if len(sizes) == 3 and limited_by == "timeout" else 0.0

    monkeypatch.setattr("linnaeus.autobatch.finder.time", SimpleNamespace(monotonic=clock))
    result = find_on_cpu(step, make_batch, **room(150, max_batch_size=300, **{setting: value}))
    assert (result.limited_by, result.certified, len(result.trials)) == (limited_by, False, 2)
    assert sizes == [1, *(trial.size for trial in result.trials)]
    assert record_of(result, result.batch_size).status == "fits"
    (warning,) = (text for text in caplog.messages if "certified" in text)
    assert setting in warning


# --- kinds of loops ---


def test_batchnorm_never_trains_on_a_single_sample():
    model, sizes = nn.BatchNorm1d(4), []

    def step(batch):
        sizes.append(len(batch))
        model(batch)

    for mode, smallest in (("train", 2), ("val", 1)):
        sizes.clear()
        arguments = {"state": [model], "mode": mode, "max_batch_size": 8, **room(300)}
        found = auto_find_batch_size(step, lambda n: torch.randn(n, 4), **arguments)
        assert (found.batch_size, min(sizes)) == (8, smallest)


# --- batches and kernels ---


ROWS = torch.zeros(500, 64)
SHORT_BATCHES = {
    "slice": lambda n: ROWS[:n],
    "labels": lambda n: (torch.zeros(7, 3), {"x": ROWS[:n], "y": torch.zeros(min(n, 500))}),
    "padded": lambda n: [torch.zeros(min(n, 500), n % 40), torch.zeros(min(n, 500))],
}


@pytest.mark.parametrize("make", SHORT_BATCHES.values(), ids=SHORT_BATCHES)
def test_the_samples_that_make_batch_has_are_an_upper_bound(make):
    result = find_on_cpu(lambda batch: None, make, max_batch_size=None, tolerance=0.0)
    assert (result.batch_size, result.limited_by, result.certified) == (500, "dataset", True)
    assert max(trial.size for trial in result.trials) == 500
    assert len(result.trials) <= 9


OTHER_BATCHES = {
    "tokens": lambda n: torch.zeros(max(n // 32, 1), 32),
    "time first": lambda n: (torch.zeros(16, n, 4), torch.zeros(16, n)),
    "a tensor each": lambda n: [torch.zeros(3, 8, 8)] * n,
}


@pytest.mark.parametrize("make", OTHER_BATCHES.values(), ids=OTHER_BATCHES)
def test_batches_that_count_otherwise_have_no_upper_bound(make):
    result = find_on_cpu(lambda batch: None, make, max_batch_size=200)
    assert (result.batch_size, result.limited_by) == (200, "max_batch_size")


def test_the_limit_of_a_kernel_is_named():
    def step(batch):
        if len(batch) > 300:
            raise RuntimeError("CUDA error: invalid argument")

    result = find_on_cpu(step, lambda n: torch.empty(n, 1), max_batch_size=100_000)
    assert result.limited_by == "kernel"
    assert 297 <= result.batch_size <= 300
    assert {trial.status for trial in result.trials} == {"fits", "kernel"}


def test_an_error_of_the_first_size_names_its_arguments():
    def step(batch):
        if len(batch) == 5:
            raise ValueError("expected an even batch")

    for min_batch_size, is_noted in ((5, True), (2, False)):
        with pytest.raises(ValueError, match="even") as caught:
            find_on_cpu(step, torch.zeros, min_batch_size=min_batch_size, max_batch_size=5)
        notes = getattr(caught.value, "__notes__", [])
        assert ["min_batch_size or multiple_of" in note for note in notes] == [True] * is_noted


# --- the result ---


def test_a_result_survives_its_file():
    asked = {"tolerance": 0.0, "multiple_of": 4, "min_batch_size": 4, "max_batch_size": 64}
    result = find_on_cpu(plain_step, make_batch, mode="val", **asked, **room(80))
    written = json.loads(json.dumps(result.as_dict()))
    assert {name: written[name] for name in asked} == asked
    again = AutoBatchResult.from_dict("val", written)
    assert again.as_dict() == written
    assert (again.mode, again.peak_bytes) == ("val", result.peak_bytes)


# --- neutrality ---


class Everything:
    """A loop whose step changes all that a step can change."""

    def __init__(self):
        torch.manual_seed(3)
        self.model = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(8 * 14 * 14, 5),
        )
        self.model[3].eval()  # one part of a model that trains
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=2)
        self.ema = Ema(self.model, 0.9)
        self.fails = lambda size: None
        for _ in range(2):
            self.update(self.make_batch(4))
        self.model(self.make_batch(4)).sum().backward()  # left by an unfinished step
        self.model[0].bias.grad = None

    @property
    def state(self):
        return self.model, self.optimizer, self.scaler, self.ema

    def make_batch(self, size):
        return torch.randn(size, 3, 16, 16)

    def step(self, batch):
        self.model.calls = getattr(self.model, "calls", 0) + 1
        random.random()
        np.random.rand()
        os.environ["LEFT_BY_A_STEP"] = "1"
        os.environ.pop("SET_BEFORE_THE_SEARCH", None)
        if self.model.training:
            self.update(batch)
        else:
            self.model[1].running_mean.add_(1)
        error = self.fails(len(batch))
        if error is not None:
            raise error

    def update(self, batch):
        self.scaler.scale(self.model(batch).square().mean()).backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.ema.on_update()
        self.optimizer.param_groups[0]["lr"] *= 0.5
        self.optimizer.param_groups[0]["added"] = True
        self.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})

    def picture(self):
        """All that the process could tell a search by, bit for bit."""
        generator = np.random.get_state()
        return {
            **{type(part).__name__: bits(part.state_dict()) for part in self.state},
            "gradients": bits([parameter.grad for parameter in self.model.parameters()]),
            "calls": getattr(self.model, "calls", 0),
            "modes": [
                module.training for module in (*self.model.modules(), *self.ema.module.modules())
            ],
            "python": random.getstate(),
            "numpy": (generator[1].tolist(), generator[2:]),
            "torch": bits(torch.get_rng_state()),
            "limit": resource.getrlimit(resource.RLIMIT_DATA),
            "environment": dict(os.environ),
            "collects": gc.isenabled(),
            "threads": set(threading.enumerate()),
            "num_threads": torch.get_num_threads(),
        }


OUTCOMES = {
    "found": (lambda size: None, None),
    "an interrupt": (lambda size: KeyboardInterrupt() if size > 3 else None, KeyboardInterrupt),
    "out of memory": (lambda size: MemoryError() if size > 3 else None, None),
    "nothing fits": (lambda size: MemoryError(), AutoBatchError),
}


@pytest.mark.parametrize(
    ("mode", "outcome"),
    [*(("train", outcome) for outcome in OUTCOMES), ("val", "found")],
)
def test_a_search_leaves_no_trace(mode, outcome, monkeypatch):
    monkeypatch.setenv("SET_BEFORE_THE_SEARCH", "1")
    loop = Everything()
    loop.fails, error = OUTCOMES[outcome]
    before = loop.picture()
    with pytest.raises(error) if error else contextlib.nullcontext():
        result = auto_find_batch_size(
            loop.step,
            loop.make_batch,
            state=loop.state,
            mode=mode,
            max_batch_size=6,
            **room(300),
        )
    assert loop.picture() == before
    if error is None:
        assert result.batch_size == (3 if outcome == "out of memory" else 6)


def test_the_picture_sees_a_step():
    """Else the tests above could not fail."""
    loop = Everything()
    before = loop.picture()
    loop.step(loop.make_batch(2))
    os.environ.pop("LEFT_BY_A_STEP")
    after = loop.picture()
    same = {name for name in before if before[name] == after[name]}
    assert same <= {"modes", "limit", "collects", "threads", "num_threads", "environment"}
