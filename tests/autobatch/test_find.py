"""`auto_find_batch_size` as a library, on plain PyTorch loops."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import random
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from linnaeus.autobatch import AutoBatchResult, auto_find_batch_size
from linnaeus.autobatch.find import BatchSizeFinder, _warn_once
from linnaeus.autobatch.result import PredictedStart, Timing
from linnaeus.autobatch.search import TrialRecord
from linnaeus.autobatch.sizes import keys
from linnaeus.errors import AutoBatchError
from linnaeus.memory.device import GIB, device_memory
from linnaeus.training.ema import Ema
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.forks import ROOT
from tests.helpers.ledger import Ledger, limit_with_room_for, resident_bytes

CPU = torch.device("cpu")
MIB = 1024**2
WIDTH = MIB // 4  # float32 values in one MiB


def room(extra_mib: float) -> dict[str, float]:
    """Arguments that leave so much above what the process holds."""
    return {"target_memory_fraction": 1.0, "memory_limit_gb": limit_with_room_for(extra_mib)}


def make_batch(size: int) -> Tensor:
    """One MiB a sample."""
    return torch.ones(size, WIDTH)


def plain_step(batch: Tensor) -> None:
    """Twice the batch at its peak."""
    (batch * 2).sum()


find_on_cpu = partial(auto_find_batch_size, device="cpu")


class Loop:
    """A plain training loop's step, with everything that one may keep."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        torch.manual_seed(0)
        layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.width = width

    def make_batch(self, size: int) -> Tensor:
        return torch.randn(size * 128, self.width)

    def step(self, batch: Tensor) -> None:
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def find(self, extra_mib: float = 60, **arguments: Any) -> AutoBatchResult:
        state = arguments.pop("state", (self.model, self.optimizer))
        step = arguments.pop("step", self.step)
        return auto_find_batch_size(
            step, self.make_batch, state=state, **{**room(extra_mib), "max_batch_size": 512, **arguments}
        )


def record_of(result: AutoBatchResult, size: int) -> Any:
    """The newest trial of a size: a size that ran before the confirmation may not fit in it."""
    return next(trial for trial in reversed(result.trials) if trial.size == size)


# --- the size found ---


@pytest.mark.parametrize("strategy", ["guided", "binary", "binsearch"])
@pytest.mark.parametrize("multiple_of", [1, 8])
def test_the_size_ran_within_the_budget_and_the_next_one_did_not(strategy: str, multiple_of: int) -> None:
    seen: list[int] = []

    def step(batch: Tensor) -> None:
        seen.append(len(batch))
        plain_step(batch)

    result = find_on_cpu(
        step, make_batch, strategy=strategy, multiple_of=multiple_of, max_batch_size=300, **room(150)
    )
    assert result.certified
    assert result.limited_by == "memory"
    assert result.batch_size % multiple_of == 0
    fits, next_one = (
        record_of(result, size) for size in (result.batch_size, result.batch_size + multiple_of)
    )
    assert fits.status == "fits"
    assert 0 < fits.peak_bytes <= result.budget_bytes
    assert next_one.status in ("over", "oom")
    assert next_one.peak_bytes is None or next_one.peak_bytes > result.budget_bytes
    batches_that_fit = {
        trial.size for trial in result.trials if trial.status != "oom"
    }  # others may not be made
    assert batches_that_fit <= set(seen)
    assert seen.count(result.batch_size) >= 2
    assert 50 <= result.batch_size <= 80, "two MiB a sample in 150 MiB"


def test_power_gives_the_largest_power_of_two_that_fits() -> None:
    result = find_on_cpu(plain_step, make_batch, strategy="power", max_batch_size=512, **room(150))
    assert result.batch_size == 64
    assert record_of(result, 64).status == "fits"
    assert record_of(result, 128).status in ("over", "oom")


def test_the_size_found_holds_outside_the_search_and_a_larger_one_does_not() -> None:
    loop = Loop()
    result = loop.find(strategy="guided")
    assert result.limited_by == "memory"
    growth = {}
    for size in (result.batch_size, round(result.batch_size * 1.05) + 1):
        fresh = Loop()
        with Ledger() as ledger:
            for _ in range(4):
                fresh.step(fresh.make_batch(size))
        growth[size] = ledger.peak_bytes
    fits, too_large = growth.values()
    assert fits == pytest.approx(result.peak_bytes - result.held_bytes, rel=0.005)
    assert too_large > result.budget_bytes - result.held_bytes


@pytest.mark.parametrize("confirm", [True, False])
def test_the_size_found_fits_what_the_process_holds_after_the_search(confirm: bool) -> None:
    """The last trial leaves 40 MiB behind, as a library's buffers would; only a confirmation can notice."""
    held: list[Tensor] = []
    calls: list[int] = []

    def make(size: int) -> Tensor:
        calls.append(size)
        if size == 128 and not held:
            held.append(torch.ones(40 * WIDTH))
        return make_batch(size)

    limit_gb = room(150)["memory_limit_gb"]
    with BatchSizeFinder(
        plain_step, make, device="cpu", max_batch_size=300, memory_limit_gb=limit_gb
    ) as finder:
        result = finder.find(1.0, strategy="power", confirm=confirm)
        again = finder.measure(result.batch_size)
    assert held
    assert result.limited_by == "memory"
    if not confirm:
        assert result.batch_size == 64
        assert again.status != "fits"
        return
    assert again.status == "fits"
    assert result.certified
    assert 45 <= result.batch_size <= 56, "two MiB a sample in 110 MiB"


class Late:
    """A search by doubling in 150 MiB whose last trial leaves memory behind, so that 64 no longer fits.

    Args:
        held_mib: what the trial of 128 leaves behind.
        num_after: trials after that of 128 until the clock jumps beyond every deadline; None never.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held_mib: int, num_after: int | None) -> None:
        self.sizes: list[int] = []
        self._held: list[Tensor] = []
        self._held_mib, self._num_after = held_mib, num_after
        monkeypatch.setattr("linnaeus.autobatch.find.time", SimpleNamespace(monotonic=self.clock))

    @property
    def sizes_after(self) -> list[int]:
        """The sizes that ran after 128, two steps each."""
        first = self.sizes.index(128) if 128 in self.sizes else len(self.sizes)
        return list(dict.fromkeys(self.sizes[first + 1 :]))

    def clock(self) -> float:
        is_late = 128 in self.sizes and self._num_after is not None
        return time.monotonic() + (7200 if is_late and len(self.sizes_after) >= self._num_after else 0)

    def make_batch(self, size: int) -> Tensor:
        self.sizes.append(size)
        if size == 128:
            self._held.append(torch.ones(self._held_mib * WIDTH))
        return make_batch(size)

    def find(self, **arguments: Any) -> AutoBatchResult:
        return find_on_cpu(
            plain_step, self.make_batch, strategy="power", tolerance=0.0, max_batch_size=300, **room(150),
            **arguments,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("num_after", "sizes_after", "size", "within"),
    [
        (0, [], 32, 31 / 32),  # the trial of 32 leaves room for the 40 MiB, that of 64 does not
        (1, [64], 32, 31 / 32),
        (2, [64, 63], 32, 30 / 32),
        (5, [64, 63, 61, 57, 49], 49, 7 / 49),
    ],
)
def test_a_confirmation_ends_at_its_deadline_with_a_size_that_has_run(
    num_after: int, sizes_after: list[int], size: int, within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Late(monkeypatch, 40, num_after)
    result = late.find()
    assert late.sizes_after == sizes_after
    assert (result.batch_size, result.certified, result.limited_by) == (size, False, "timeout")
    assert record_of(result, size).peak_bytes <= result.budget_bytes
    assert result.within == pytest.approx(within)


def test_a_confirmation_with_time_goes_on_to_the_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, the tests above could not fail."""
    result = Late(monkeypatch, 40, None).find()
    assert (result.certified, result.limited_by) == (True, "memory")
    assert result.batch_size > 49


@pytest.mark.parametrize("num_after", [0, 1])
def test_when_the_time_runs_out_and_no_size_fits_any_more_the_error_says_so(
    num_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AutoBatchError, match=r"the time ran out \(timeout_minutes\)"):
        Late(monkeypatch, 140, num_after).find(min_batch_size=8)


@pytest.mark.slow
@pytest.mark.usefixtures("few_timed_steps")
def test_speeds_are_compared_under_the_budget_of_the_result() -> None:
    """A later search within a smaller fraction of the memory must not decide which sizes fit the first."""

    def step(batch: Tensor) -> None:
        time.sleep(0.05)  # so that the largest size is by far the fastest
        plain_step(batch)

    limit_gb = room(80)["memory_limit_gb"]
    with BatchSizeFinder(
        step, make_batch, device="cpu", max_batch_size=300, memory_limit_gb=limit_gb
    ) as finder:
        large = finder.find(1.0)
        small = finder.find((limit_gb - 50 / 1024) / limit_gb)
        assert small.batch_size < large.batch_size / 2
        fast = finder.prefer_throughput(large)
    assert fast.batch_size > small.batch_size
    assert all(trial.status == "fits" for trial in fast.trials[len(large.trials) :])


def test_a_tighter_memory_limit_gives_a_smaller_size() -> None:
    large, small = (
        find_on_cpu(plain_step, make_batch, max_batch_size=300, **room(extra)) for extra in (160, 80)
    )
    assert large.batch_size > 1.5 * small.batch_size
    assert small.limited_by == large.limited_by == "memory"


def test_the_budget_is_the_fraction_of_the_limit() -> None:
    limit_gb = (resident_bytes() + 400 * MIB) / GIB
    result = find_on_cpu(
        plain_step, make_batch, max_batch_size=2, target_memory_fraction=0.9, memory_limit_gb=limit_gb
    )
    assert result.budget_bytes == pytest.approx(0.9 * limit_gb * GIB, rel=1e-6)
    assert result.target_memory_fraction == 0.9
    assert result.total_bytes >= result.budget_bytes


# --- what limits it ---


@pytest.mark.parametrize(
    ("arguments", "limited_by", "size"),
    [
        ({"max_batch_size": 24}, "max_batch_size", 24),
        ({"max_batch_size": 24, "multiple_of": 7}, "max_batch_size", 21),
        ({"max_batch_size": 24, "bounds": {"dataset": 17}}, "dataset", 17),
        ({"bounds": {"dataset": 17, "host_memory": 13}}, "host_memory", 13),
        ({"max_batch_size": 11, "bounds": {"dataset": 17, "host_memory": 13}}, "max_batch_size", 11),
    ],
)
def test_the_lowest_bound_is_reached_and_named(arguments: dict[str, Any], limited_by: str, size: int) -> None:
    result = find_on_cpu(plain_step, make_batch, **room(300), **arguments)
    assert (result.limited_by, result.batch_size) == (limited_by, size)
    assert result.certified
    assert max(trial.size for trial in result.trials) == size


def test_a_bound_that_memory_undercuts_is_not_named() -> None:
    result = find_on_cpu(plain_step, make_batch, bounds={"dataset": 200}, **room(100))
    assert result.limited_by == "memory"
    assert result.batch_size < 200


def test_no_more_trials_run_than_allowed() -> None:
    result = find_on_cpu(plain_step, make_batch, max_trials=2, max_batch_size=300, **room(150))
    assert result.limited_by == "max_trials"
    assert len(result.trials) == 2
    assert not result.certified
    assert record_of(result, result.batch_size).status == "fits"


def test_the_deadline_ends_the_search_with_the_best_size_so_far() -> None:
    deadline_s = 2.0
    sizes: list[int] = []

    def step(batch: Tensor) -> None:
        if len(batch) not in sizes:
            sizes.append(len(batch))
            if len(sizes) == 3:  # one that warms up, one trial, and this one
                time.sleep(deadline_s)
        plain_step(batch)

    result = find_on_cpu(step, make_batch, timeout_minutes=deadline_s / 60, max_batch_size=300, **room(150))
    assert result.limited_by == "timeout"
    assert not result.certified
    assert sizes == [1, *(trial.size for trial in result.trials)]
    assert len(result.trials) == 2
    assert record_of(result, result.batch_size).status == "fits"


def test_sizes_below_the_smallest_are_not_tried() -> None:
    sizes: set[int] = set()

    def step(batch: Tensor) -> None:
        sizes.add(len(batch))
        plain_step(batch)

    find_on_cpu(step, make_batch, min_batch_size=10, max_batch_size=40, **room(200))
    assert min(sizes) >= 10
    assert max(sizes) == 40


# --- errors ---


@pytest.mark.parametrize(("mode", "suffix"), [("train", ""), ("val", "_VAL")])
def test_when_nothing_fits_the_error_names_sizes_peaks_budget_and_keys(mode: Any, suffix: str) -> None:
    with BatchSizeFinder(
        plain_step, make_batch, device="cpu", min_batch_size=90, mode=mode, names=keys(mode),
        memory_limit_gb=limit_with_room_for(60),
    ) as finder, pytest.raises(AutoBatchError) as caught:  # fmt: skip
        finder.find(0.98)
    text = str(caught.value)
    assert caught.value.exit_code == 3
    assert f"({mode})" in text
    assert "90 (" in text
    assert "Budget" in text
    assert "GiB" in text
    for key in (f"MIN_BATCH_SIZE{suffix} ", f"TARGET_MEMORY_FRACTION{suffix} ", "MEMORY_LIMIT_GB."):
        assert f"DATA.AUTOBATCH.{key}" in text
    for key in ("DATA.IMG_SIZE", "MODEL.NAME", "TRAIN.AMP"):
        assert key in text
    assert ("TRAIN.GRADIENT_CHECKPOINTING" in text) == (mode == "train")


@pytest.mark.parametrize("mode", ["train", "val"])
def test_the_library_names_its_arguments_and_no_keys(mode: Any) -> None:
    arguments = {**room(60), "target_memory_fraction": 0.98}
    with pytest.raises(AutoBatchError) as caught:
        find_on_cpu(plain_step, make_batch, min_batch_size=90, mode=mode, **arguments)
    text = str(caught.value)
    for name in ("min_batch_size", "target_memory_fraction", "memory_limit_gb", "a smaller model", "bf16"):
        assert name in text
    assert ("gradient checkpointing" in text) == (mode == "train")
    assert not re.search(r"DATA|TRAIN\.|MODEL|_VAL", text)


def test_when_the_process_alone_fills_the_limit_only_a_larger_limit_is_named_with_its_value() -> None:
    """A tenth of what it holds: no fraction of it and no model are enough."""
    model, held_gb = nn.Linear(10, 10), limit_with_room_for(0)
    limit_gb = held_gb / 10
    remedies = remedies_in(state=(model,), target_memory_fraction=0.8, memory_limit_gb=limit_gb)
    found = re.fullmatch(r"raise memory_limit_gb above (\d+\.\d\d)\.", remedies)
    assert found, remedies
    assert float(found[1]) == pytest.approx(held_gb / 0.8, abs=0.05)
    result = find_on_cpu(
        plain_step, make_batch, state=(model,), target_memory_fraction=0.8, max_batch_size=2,
        memory_limit_gb=float(found[1]) + 0.1,
    )  # fmt: skip
    assert result.batch_size == 2, "the value named is enough"


def test_a_fraction_that_leaves_room_for_what_is_held_is_named_with_its_value() -> None:
    held_gb = limit_with_room_for(0)
    remedies = remedies_in(target_memory_fraction=0.5, memory_limit_gb=held_gb / 0.75)
    found = re.search(r"raise target_memory_fraction above (0\.7\d) or memory_limit_gb above", remedies)
    assert found, remedies


def test_a_smaller_model_is_named_where_the_model_is_what_fills_the_budget() -> None:
    state = (nn.Linear(16, 4 * MIB, bias=False),)  # 256 MiB
    remedies = remedies_in(state=state, target_memory_fraction=0.5, memory_limit_gb=limit_with_room_for(0))
    assert "choose a smaller model" not in remedies_in(
        state=(), target_memory_fraction=0.5, memory_limit_gb=0.01
    )
    assert "choose a smaller model" in remedies


@pytest.mark.parametrize("own_fraction", [1.0, 0.01])
def test_a_cap_is_named_where_there_is_one_and_not_because_others_free_memory(own_fraction: float) -> None:
    """They do so between any two readings of the device."""
    cuda = FakeCuda(GIB, tenants_bytes=700 * MIB, fraction=own_fraction)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        cuda.tenants_bytes -= MIB
        return cuda.free_bytes, GIB

    cuda.mem_get_info = mem_get_info  # type: ignore[method-assign]
    with cuda.installed(), pytest.raises(AutoBatchError) as caught:
        auto_find_batch_size(plain_step, make_batch, device="cuda", min_batch_size=200)
    assert ("allocator's own cap" in str(caught.value)) == (own_fraction < 1)
    assert ("free memory on cuda:0" in str(caught.value)) == (own_fraction == 1)


def remedies_in(**arguments: Any) -> str:
    with pytest.raises(AutoBatchError) as caught:
        find_on_cpu(plain_step, make_batch, max_batch_size=90, **arguments)
    return str(caught.value).partition("What helps: ")[2]


def test_when_nothing_fits_only_keys_with_an_effect_are_named() -> None:
    """Each is absent where the case before shows that it may be there."""
    limited = {"min_batch_size": 90, **room(60)}
    assert "target_memory_fraction" in remedies_in(**{**limited, "target_memory_fraction": 0.98})
    assert "target_memory_fraction" not in remedies_in(**limited)
    assert "memory_limit_gb" in remedies_in(**limited)
    tiny = {"target_memory_fraction": 1e-4, "min_batch_size": 90}
    assert "memory_limit_gb" not in remedies_in(**tiny)
    assert "the size of a sample" in remedies_in(**limited)
    assert "the size of a sample" not in remedies_in(**tiny), "the process itself is above the budget"
    assert "min_batch_size" in remedies_in(**limited)
    assert "min_batch_size" not in remedies_in(**{**limited, "min_batch_size": 1, "memory_limit_gb": 0.01})
    assert "max_trials" not in remedies_in(**limited)


def test_when_the_trials_run_out_their_key_is_named() -> None:
    with pytest.raises(AutoBatchError, match=r"What helps: raise max_trials; "):
        find_on_cpu(plain_step, make_batch, max_batch_size=400, strategy="binary", max_trials=1, **room(60))


@pytest.mark.parametrize("is_limited", [False, True])
def test_the_total_is_the_limit_where_one_is_set(is_limited: bool) -> None:
    device_bytes = device_memory(CPU).total_bytes
    limit_gb = device_bytes / GIB / 2 if is_limited else 2 * device_bytes / GIB
    result = find_on_cpu(
        plain_step, make_batch, max_batch_size=2, target_memory_fraction=0.9, memory_limit_gb=limit_gb
    )
    assert result.total_bytes == (int(limit_gb * GIB) if is_limited else device_bytes)
    assert result.total_is_limit == is_limited
    assert AutoBatchResult.from_dict("train", result.as_dict()).total_is_limit == is_limited


def test_a_process_that_already_holds_more_than_the_budget_finds_nothing() -> None:
    with pytest.raises(AutoBatchError, match="no batch size fits"):
        find_on_cpu(plain_step, make_batch, target_memory_fraction=1.0, memory_limit_gb=0.01)


def test_a_bound_below_the_smallest_size_is_an_error_that_names_it() -> None:
    with pytest.raises(AutoBatchError, match=r"min_batch_size is 20, but dataset allows no more than 7"):
        find_on_cpu(plain_step, make_batch, min_batch_size=20, bounds={"dataset": 7})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target_memory_fraction", 0.0),
        ("target_memory_fraction", 1.01),
        ("target_memory_fraction", -0.5),
        ("mode", "test"),
        ("strategy", "magic"),
        ("multiple_of", 0),
        ("max_trials", 0),
        ("min_batch_size", 0),
        ("max_batch_size", 0),
        ("steps_per_trial", 0),
        ("timeout_minutes", 0),
        ("timeout_minutes", float("nan")),
        ("memory_limit_gb", 0.0),
        ("memory_limit_gb", float("inf")),
        ("memory_limit_gb", float("nan")),
        ("start", 0),
        ("tolerance", -0.01),
        ("tolerance", 1.0),
        ("objective", "speed"),
    ],
)
def test_an_argument_out_of_its_range_is_named(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"max_batch_size": 4, name: value}
    with pytest.raises(ValueError, match=name.replace("_batch_", "_(batch_)?")):
        find_on_cpu(plain_step, make_batch, **arguments)


def test_bounds_in_the_wrong_order_are_both_named() -> None:
    with pytest.raises(ValueError, match="max_batch_size is 7; it must be at least min_batch_size, 20"):
        find_on_cpu(plain_step, make_batch, min_batch_size=20, max_batch_size=7)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", None), ("step", 3), ("make_batch", torch.ones(2)), ("observer", print),
        ("max_trials", 2.5), ("max_batch_size", 64.0), ("min_batch_size", None), ("multiple_of", "8"),
        ("steps_per_trial", 1.5), ("max_batch_size", True), ("start", 2.5), ("start", True),
        ("target_memory_fraction", "0.8"), ("target_memory_fraction", None), ("tolerance", "a"),
        ("tolerance", False), ("timeout_minutes", "1"), ("memory_limit_gb", "4"), ("bounds", [3]),
        ("state", 3),
    ],
)  # fmt: skip
def test_an_argument_of_the_wrong_type_is_named(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"step": plain_step, "make_batch": make_batch, name: value}
    with pytest.raises(TypeError, match=f"^{name} is "):
        find_on_cpu(**arguments)


@pytest.mark.parametrize("bound", [3.5, None, "7", True])
def test_a_bound_that_is_no_integer_is_named(bound: Any) -> None:
    with pytest.raises(TypeError, match=rf"bounds\['dataset'\] is {bound!r}; it must be an integer"):
        find_on_cpu(plain_step, make_batch, bounds={"dataset": bound})
    with pytest.raises(TypeError, match="bounds has the key 3; its keys must be text"):
        find_on_cpu(plain_step, make_batch, bounds={3: 4})  # type: ignore[dict-item]


def test_what_is_allowed_is_told() -> None:
    for arguments, allowed in (
        ({"target_memory_fraction": "0.8"}, r"a number in \(0, 1\]"),
        ({"tolerance": 2}, r"a number in \[0, 1\)"),
        ({"memory_limit_gb": float("inf")}, "a number of GiB, above 0 and finite"),
        ({"strategy": "magic"}, "one of 'guided', 'binary'"),
        ({"objective": "speed"}, "one of 'memory', 'throughput'"),
        ({"step": None}, "step is None; it must be a function"),
        ({"step": 3}, "step is an int; it must be a function"),
    ):
        with pytest.raises((TypeError, ValueError), match=allowed):
            find_on_cpu(**{"step": plain_step, "make_batch": make_batch, **arguments})  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    result = find_on_cpu(
        plain_step, make_batch, max_batch_size=np.int64(3), target_memory_fraction=np.float32(0.8),
        bounds={"dataset": np.int32(2)},
    )  # fmt: skip
    assert (result.batch_size, result.limited_by) == (2, "dataset")


def test_state_without_a_state_dict_is_refused() -> None:
    with pytest.raises(TypeError, match="state_dict"):
        find_on_cpu(plain_step, make_batch, state=(object(),))


# --- a step that keeps tensors ---


@pytest.mark.parametrize("mode", ["train", "val"])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_step_that_keeps_tensors_is_warned_of_with_their_bytes(
    mode: Any, keeps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loop, kept = Loop(), list[Tensor]()

    def step(batch: Tensor) -> None:
        if loop.model.training:
            loop.step(batch)
        if keeps:
            kept.append(torch.ones(8, WIDTH))

    loop.find(step=step, mode=mode, max_batch_size=16, extra_mib=100)
    warnings = [record.getMessage() for record in caplog.records if "than when the search" in record.message]
    assert len(warnings) == keeps
    if keeps:
        num_kept = len(kept) - 2  # the warm-up has kept two before the search began
        assert f"holds {8 * num_kept} MiB more than when the search began" in warnings[0]


# --- kinds of loops ---


def test_batchnorm_trains_on_no_single_sample_and_validates_on_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes: list[int] = []

    def step(batch: Tensor) -> None:
        sizes.append(len(batch))
        loss = model(batch).sum()
        if model.training:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    arguments: dict[str, Any] = {"state": (model, optimizer), "max_batch_size": 8, **room(300)}
    assert auto_find_batch_size(step, lambda n: torch.randn(n, 4), **arguments).batch_size == 8
    assert min(sizes) == 2
    sizes.clear()
    found = auto_find_batch_size(step, lambda n: torch.randn(n, 4), mode="val", **arguments)
    assert found.batch_size == 8
    assert min(sizes) == 1


def test_samples_of_differing_shapes() -> None:
    def make_lists(size: int) -> list[Tensor]:
        return [torch.ones(WIDTH if number % 2 else WIDTH // 4) for number in range(size)]

    def step(batch: list[Tensor]) -> None:
        torch.cat(batch).sum()

    result = find_on_cpu(step, make_lists, max_batch_size=400, **room(100))
    assert result.limited_by == "memory"
    assert result.certified
    assert 60 <= result.batch_size <= 90, "1.25 MiB a sample in 100 MiB"


def test_without_state_and_device_the_search_looks_at_the_device_that_torch_would_use() -> None:
    available = torch.accelerator.current_accelerator(check_available=True)
    device = available or CPU
    result = auto_find_batch_size(
        lambda batch: batch.sum(), lambda n: torch.ones(n, 8, device=device), max_batch_size=2
    )
    assert result.total_bytes == device_memory(device).total_bytes


def test_without_state_the_step_may_keep_what_it_likes() -> None:
    calls: list[int] = []

    def step(batch: Tensor) -> None:
        calls.append(len(batch))

    result = find_on_cpu(step, make_batch, max_batch_size=6, steps_per_trial=3, **room(200))
    assert result.batch_size == 6
    assert all(calls.count(trial.size) >= 3 for trial in result.trials)


@pytest.mark.parametrize(("mode", "training"), [("train", True), ("val", False)])
def test_modules_are_in_the_mode_of_the_search(mode: Any, training: bool) -> None:
    loop = Loop()
    modes: set[bool] = set()

    def step(batch: Tensor) -> None:
        modes.update(module.training for module in loop.model.modules())

    loop.model.train(not training)
    loop.find(step=step, mode=mode, max_batch_size=4)
    assert modes == {training}
    assert loop.model.training is not training


def test_validation_is_measured_with_the_optimizer_state_of_training_resident() -> None:
    loop = Loop(width=512, depth=4)

    @torch.no_grad()
    def step(batch: Tensor) -> None:
        loop.model(batch)

    with BatchSizeFinder(
        step, loop.make_batch, state=(loop.model, loop.optimizer), mode="val", max_batch_size=2
    ) as finder:
        peak_bytes = finder.measure(2).peak_bytes
        held_bytes = finder.held_bytes
        states = [value for state in loop.optimizer.state.values() for value in state.values()]
        state_bytes = sum(value.nbytes for value in states)
        del states
        assert state_bytes >= 2 * sum(parameter.nbytes for parameter in loop.model.parameters())
        assert peak_bytes is not None
        assert 0 < peak_bytes - held_bytes <= 3 * loop.make_batch(2).nbytes  # a layer's input and output
    assert not loop.optimizer.state
    assert finder.memory.in_use() == held_bytes - state_bytes


@pytest.mark.parametrize("fits", [True, False])
def test_training_that_does_not_fit_before_a_validation_is_named_as_the_cause(fits: bool) -> None:
    """No validation size is to blame, and none is tried."""
    sizes: list[int] = []

    def train_once() -> None:
        torch.empty(1 << (10 if fits else 50), dtype=torch.uint8)

    with BatchSizeFinder(
        lambda batch: sizes.append(len(batch)), make_batch, device="cpu", mode="val", train_once=train_once,
        max_batch_size=4, names=keys("val"),
    ) as finder:  # fmt: skip
        if fits:
            assert finder.find().batch_size == 4
            return
        with pytest.raises(
            AutoBatchError, match="the training before validation does not fit on cpu"
        ) as caught:
            finder.find()
    assert "DATA.BATCH_SIZE" in str(caught.value)
    assert "IMG_SIZE" not in str(caught.value)
    assert not sizes


@pytest.mark.slow
def test_gradient_checkpointing_allows_larger_batches() -> None:
    loop = Loop(depth=8)

    def step(batch: Tensor) -> None:
        hidden = batch.requires_grad_()
        for block in blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        hidden.square().mean().backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    blocks = [loop.model[start : start + 4] for start in range(0, len(loop.model), 4)]
    plain = loop.find()
    saving = loop.find(step=step)
    assert plain.limited_by == saving.limited_by == "memory"
    assert saving.batch_size > 1.5 * plain.batch_size


@pytest.mark.slow
def test_bf16_autocast_allows_larger_batches_and_leaves_the_weights_as_they_are() -> None:
    loop = Loop(depth=8)
    before = [parameter.clone() for parameter in loop.model.parameters()]
    seen: set[torch.dtype] = set()

    def step(batch: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            output = loop.model(batch)
        seen.add(output.dtype)
        output.square().mean().backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    plain = loop.find()
    half = loop.find(step=step)
    assert seen == {torch.bfloat16}
    assert plain.limited_by == half.limited_by == "memory"
    assert half.batch_size > 1.2 * plain.batch_size
    assert all(torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))


def test_a_step_under_the_callers_autocast_and_no_grad_sees_them() -> None:
    seen: set[tuple[bool, bool]] = set()

    def step(batch: Tensor) -> None:
        seen.add((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))

    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        find_on_cpu(step, make_batch, max_batch_size=2, **room(200))
    assert seen == {(True, False)}


def test_a_search_after_a_step_that_really_ran_out_of_memory_goes_on_and_training_too() -> None:
    """The allocator itself refuses: a batch far above the cap, made in one piece."""
    loop = Loop(width=64)
    grown: list[int] = []

    def step(batch: Tensor) -> None:
        if len(batch) >= 128 * 32:
            torch.empty(1 << 50)  # no machine has it
        grown.append(len(batch) // 128)
        loop.step(batch)

    result = loop.find(step=step, max_batch_size=100, extra_mib=600)
    assert result.batch_size == 31
    assert result.certified
    assert record_of(result, 32).status == "oom"
    assert 32 not in grown
    loop.step(loop.make_batch(200))
    assert torch.ones(300 * WIDTH).sum() == 300 * WIDTH


def test_a_batch_far_above_the_budget_is_refused_and_not_built() -> None:
    """The machine's other processes must not miss what a trial takes."""
    arguments = room(100)
    held, highest = resident_bytes(), 0

    def make_pieces(size: int) -> list[Tensor]:
        nonlocal highest
        pieces = []
        for _ in range(size):
            pieces.append(torch.zeros(10 * WIDTH))
            highest = max(highest, resident_bytes())
        return pieces

    result = find_on_cpu(torch.cat, make_pieces, strategy="binary", max_batch_size=200, **arguments)
    assert record_of(result, 100).status == "oom"
    assert record_of(result, result.batch_size).status == "fits"
    assert highest < held + 200 * MIB


# --- the result ---


def test_a_result_survives_its_file() -> None:
    result = find_on_cpu(plain_step, make_batch, max_batch_size=300, mode="val", **room(80))
    written = json.loads(json.dumps(result.as_dict()))
    again = AutoBatchResult.from_dict("val", written)
    assert again.as_dict() == written
    trials = tuple(dataclasses.replace(trial, seconds=0.0) for trial in result.trials)
    assert tuple(dataclasses.replace(trial, seconds=0.0) for trial in again.trials) == trials
    assert (again.batch_size, again.mode, again.peak_bytes) == (result.batch_size, "val", result.peak_bytes)
    assert {trial["status"] for trial in written["trials"]} <= {"fits", "over", "oom"}


def test_the_result_says_what_was_asked_for_and_files_without_that_can_be_read() -> None:
    result = find_on_cpu(
        plain_step, make_batch, max_batch_size=64, min_batch_size=4, multiple_of=4, tolerance=0.0,
        bounds={"dataset": 20}, **room(200),
    )  # fmt: skip
    written = json.loads(json.dumps(result.as_dict()))
    asked = {"tolerance": 0.0, "multiple_of": 4, "min_batch_size": 4, "max_batch_size": 64}
    assert {name: written[name] for name in asked} == asked
    assert (result.batch_size, result.limited_by) == (20, "dataset")
    old = {name: value for name, value in written.items() if name not in asked}
    again = AutoBatchResult.from_dict("train", old)
    assert (again.tolerance, again.max_batch_size, again.batch_size) == (None, None, 20)
    assert again.as_dict() == old


def test_every_field_of_the_file_is_in_the_table_of_the_docs() -> None:
    page = (ROOT / "docs/autobatch.md").read_text().partition("## The file `autobatch.json`")[2]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| ", page.partition("\n## ")[0], re.MULTILINE)
    units = {name: unit for names, unit in rows for name in re.findall(r"`(.+?)`", names)}
    own = {field.name for field in dataclasses.fields(AutoBatchResult)} - {"mode"}
    entries = {
        "trials": TrialRecord(1, "fits", 1, 0.0).as_dict(),
        "timings": dataclasses.asdict(Timing(1, 1.0, 1.0)),
        "prediction": dataclasses.asdict(PredictedStart(1, 1.0, 1, 0.0)),
    }
    nested = {f"{name}.{key}" for name, entry in entries.items() for key in entry}
    assert units.keys() == own | nested | {"environment", "found_by"}  # these stand beside the results
    for name, unit in units.items():
        assert (unit == "bytes") == name.endswith("_bytes")
        assert (unit == "s") == ("seconds" in name)


@pytest.mark.parametrize("is_ignored", [True, False])
def test_a_batch_maker_that_ignores_its_size_is_warned_about(
    is_ignored: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_once.cache_clear()
    find_on_cpu(
        plain_step, lambda size: make_batch(4 if is_ignored else size), max_batch_size=64, memory_limit_gb=8
    )
    assert ("needs no more memory than 16. Check that make_batch(n) returns" in caplog.text) == is_ignored


# --- neutrality ---


class Everything:
    """A loop whose step changes all that a step can change."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.LazyLinear(5)
        )
        self.model(torch.randn(2, 3, 16, 16))
        self.model[3].eval()  # one part of a model that trains
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=2)
        self.ema = Ema(self.model, 0.9)
        self.fails: Callable[[int], BaseException | None] = lambda size: None
        for _ in range(2):
            self.update(self.make_batch(4))
        self.model(self.make_batch(4)).sum().backward()  # left by an unfinished step
        self.model[0].bias.grad = None

    @property
    def state(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.scaler, self.ema

    def make_batch(self, size: int) -> Tensor:
        return torch.randn(size, 3, 16, 16)

    def step(self, batch: Tensor) -> None:
        random.random()
        np.random.rand()
        os.environ["LEFT_BY_A_STEP"] = "1"
        os.environ.pop("SET_BEFORE_THE_SEARCH", None)
        torch.set_default_dtype(torch.float32)
        if self.model.training:
            self.update(batch)
        else:
            self.model[1].running_mean.add_(1)
        error = self.fails(len(batch))
        if error is not None:
            raise error

    def update(self, batch: Tensor) -> None:
        self.scaler.scale(self.model(batch).square().mean()).backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.ema.update()
        self.optimizer.param_groups[0]["lr"] *= 0.5

    def picture(self) -> dict[str, Any]:
        """All that the process could tell a search by."""
        parameters = dict(self.model.named_parameters())
        return {
            "parameters": {name: parameter.detach().clone() for name, parameter in parameters.items()},
            "identities": [id(parameter) for parameter in parameters.values()],
            "gradients": {
                name: None if parameter.grad is None else parameter.grad.clone()
                for name, parameter in parameters.items()
            },
            "buffers": {name: buffer.clone() for name, buffer in self.model.named_buffers()},
            "modes": [module.training for module in self.model.modules()],
            "ema modes": [module.training for module in self.ema.module.modules()],
            "optimizer": copied(self.optimizer.state_dict()),
            "scaler": copied(self.scaler.state_dict()),
            "ema": copied(self.ema.state_dict()),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "limit": resource.getrlimit(resource.RLIMIT_DATA),
            "environment": dict(os.environ),
            "frozen": gc.get_freeze_count(),
            "collects": gc.isenabled(),
            "switches": (
                torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu"),
                torch.are_deterministic_algorithms_enabled(), torch.is_inference_mode_enabled(),
                torch.get_num_threads(),
            ),
        }  # fmt: skip


def copied(nest: Any) -> Any:
    if isinstance(nest, Tensor):
        return nest.clone()
    if isinstance(nest, Mapping):
        return {key: copied(value) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        return [copied(value) for value in nest]
    return nest


def differences(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Where two nests are not the same, bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.numpy().tobytes() != b.numpy().tobytes():
            yield path
    elif isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.tobytes() != b.tobytes():
            yield path
    elif isinstance(a, Mapping):
        for key in {*a, *b}:
            if key not in a or key not in b:
                yield f"{path}.{key} is on one side only"
            else:
                yield from differences(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        if len(a) != len(b):
            yield f"{path}: {len(a)} and {len(b)} items"
        for index, pair in enumerate(zip(a, b, strict=False)):
            yield from differences(*pair, f"{path}[{index}]")
    elif a != b:
        yield f"{path}: {a!r} and {b!r}"


OUTCOMES = {
    "found": (lambda size: None, {}, None),
    "an error in the middle": (
        lambda size: ValueError("the model is wrong") if size > 3 else None, {}, ValueError,
    ),
    "an error in the first step": (lambda size: ValueError("the model is wrong"), {}, ValueError),
    "an interrupt": (lambda size: KeyboardInterrupt() if size > 3 else None, {}, KeyboardInterrupt),
    "out of memory": (lambda size: MemoryError("no memory") if size > 3 else None, {}, None),
    "nothing fits": (lambda size: MemoryError("no memory"), {}, AutoBatchError),
    "no room at all": (lambda size: None, {"memory_limit_gb": 0.01}, AutoBatchError),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["train", "val"])
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_search_leaves_no_trace(mode: Any, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BEFORE_THE_SEARCH", "1")
    loop = Everything()
    loop.fails, arguments, error = OUTCOMES[outcome]
    before = loop.picture()
    with pytest.raises(error) if error else contextlib.nullcontext() as caught:
        result = auto_find_batch_size(
            loop.step, loop.make_batch, state=loop.state, mode=mode, max_batch_size=6,
            **{**room(300), **arguments},
        )  # fmt: skip
    assert list(differences(before, loop.picture())) == []
    if error is None:
        assert result.batch_size == (3 if outcome == "out of memory" else 6)
    elif error is ValueError:
        assert "the model is wrong" in str(caught.value)


def test_training_after_a_search_goes_as_without_one() -> None:
    pictures = []
    for searches in (True, False):
        loop = Everything()
        torch.manual_seed(11)
        if searches:
            auto_find_batch_size(loop.step, loop.make_batch, state=loop.state, max_batch_size=5, **room(300))
        for _ in range(3):
            loop.update(loop.make_batch(5))
        picture = loop.picture()
        del picture["identities"], picture["python"], picture["numpy"]
        pictures.append(picture)
    assert list(differences(*pictures)) == []


class CountsCalls(nn.Module):
    """A model that goes by how often it was called, and adds a hook with each call."""

    def __init__(self, counts: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.counts = counts
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.layer.register_forward_hook(lambda module, inputs, outputs: outputs * 0.9)
        count = self.calls
        if self.counts is not None:
            self.counts.number += 1
            count = self.counts.number
        return self.layer(x) / count  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_model_that_counts_its_calls_trains_as_by_hand(is_inside: bool) -> None:
    """What an object of another class counts is not restored: the outcome then differs."""
    outcomes = []
    for searches in (True, False):
        torch.manual_seed(0)
        model = CountsCalls(None if is_inside else SimpleNamespace(number=0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        if searches:
            find_on_cpu(step, lambda n: torch.randn(n, 8), state=(model, optimizer), max_batch_size=5)
        for _ in range(3):
            step(torch.randn(5, 8))
        outcomes.append([parameter.detach().numpy().tobytes() for parameter in model.parameters()])
        assert model.calls == 3
        assert len(model.layer._forward_hooks) == 3
    assert (outcomes[0] == outcomes[1]) is is_inside


def test_the_picture_sees_a_step() -> None:
    """Else the tests above could not fail."""
    loop = Everything()
    before = loop.picture()
    loop.step(loop.make_batch(2))
    changed = " ".join(differences(before, loop.picture()))
    for name in ("parameters", "gradients", "buffers", "optimizer", "scaler", "ema", "python", "numpy"):
        assert f".{name}" in changed
    os.environ.pop("LEFT_BY_A_STEP")


def test_objects_that_the_caller_froze_stay_frozen() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        find_on_cpu(plain_step, make_batch, max_batch_size=2, **room(200))
        assert gc.get_freeze_count() >= 0.99 * before > 0
    finally:
        gc.unfreeze()


@pytest.mark.slow
def test_no_thread_is_left_and_nothing_of_a_trial_is_alive() -> None:
    threads = set(threading.enumerate())
    loop = Loop(depth=2)
    held = []
    for _ in range(3):
        loop.find(extra_mib=100)
        device_memory(CPU).clean()
        held.append(resident_bytes())
    assert set(threading.enumerate()) <= threads
    assert held[-1] - held[0] < 30 * MIB, "a step at the budget takes 100"
