"""The learning rate at every step: golden values and what must always hold."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linnaeus.batch_plan.scaling import configured_warmup
from linnaeus.config.schema import SCHEDULES, ScheduleConfig
from linnaeus.training.schedule import Schedule, lr_factor

NAMES = tuple(SCHEDULES)

runs = st.fixed_dictionaries(
    {
        "total_steps": st.integers(3, 300),
        "warmup_steps": st.integers(0, 300),
        "min_fraction": st.floats(0, 1),
    }
).map(lambda run: run | {"warmup_steps": min(run["warmup_steps"], run["total_steps"])})


def factor_of(name, *, total_steps, warmup_steps, min_fraction):
    """The factor in a run of three epochs."""
    per_epoch = [total_steps // 3, total_steps // 3, total_steps - 2 * (total_steps // 3)]
    config = ScheduleConfig(name, MIN_LR_FRACTION=min_fraction)
    return lr_factor(config, steps_per_epoch=per_epoch, warmup_steps=warmup_steps)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cosine", [0.5, 1, 1, 0.868198, 0.55, 0.231802, 0.1, 0.1]),
        ("linear", [0.5, 1, 1, 0.775, 0.55, 0.325, 0.1, 0.1]),
        ("step", [0.5, 1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01]),  # a third of three epochs is one
        ("multistep", [0.5, 1, 1, 1, 0.1, 0.1, 0.1, 0.1]),
        ("wsd", [0.5, 1, 1, 1, 1, 1, 0.1, 0.1]),
    ],
)
def test_golden_values(name, expected):
    factor = factor_of(name, total_steps=6, warmup_steps=2, min_fraction=0.1)
    assert [factor(step) for step in range(8)] == pytest.approx(expected, abs=1e-6)


@given(name=st.sampled_from(NAMES), run=runs)
def test_rises_to_the_peak_then_never_rises_or_reaches_zero(name, run):
    factor, warmup, total = factor_of(name, **run), run["warmup_steps"], run["total_steps"]
    values = [factor(step) for step in range(total + 1)]
    assert all(a < b for a, b in pairwise(values[:warmup]))
    assert values[max(warmup - 1, 0)] == pytest.approx(1)
    assert all(a >= b - 1e-12 for a, b in pairwise(values[warmup:]))
    least = run["min_fraction"]
    lowest = {"step": 0.01, "multistep": 0.1, "onecycle": min(least, 0.04)}.get(name, least)
    ends = total - (name == "onecycle")
    for step, share in enumerate([*values, factor(2 * total)]):
        assert min(lowest, 1 / max(warmup, 1)) - 1e-12 <= share <= 1 + 1e-12
        assert share > 0 or step >= ends


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ScheduleConfig(WARMUP_EPOCHS=0.5), 5),
        (ScheduleConfig(WARMUP_EPOCHS=2, WARMUP_STEPS=7), 7),
        (ScheduleConfig(WARMUP_STEPS=31), 30),
        (ScheduleConfig(WARMUP_FRACTION=0.1, WARMUP_EPOCHS=2), 3),
        (ScheduleConfig("onecycle"), 9),
    ],
)
def test_length_of_the_warm_up(config, expected):
    assert configured_warmup(config, [10, 10, 10]) == expected


# The position decides.


def make(config, *, lr=0.3, **plan):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    return optimizer, Schedule(config, optimizer, **plan)


TORCH, LOW = "torch.optim.lr_scheduler", {"MIN_LR_FRACTION": 0.02}
LIBRARY = {
    "multistep": (
        {"MILESTONES": [1, 4, 9], "GAMMA": 0.3},
        f"{TORCH}.MultiStepLR",
        {"milestones": [7, 28], "gamma": 0.3},
    ),
    "onecycle": (
        {"START_LR_FRACTION": 0.05, **LOW},
        f"{TORCH}.OneCycleLR",
        {
            "max_lr": 0.3,
            "total_steps": 42,
            "pct_start": 10 / 42,
            "div_factor": 20,
            "final_div_factor": 2.5,
            "cycle_momentum": False,
        },
    ),
    "wsd": (
        {"DECAY_EPOCHS": 2, **LOW},
        "timm.scheduler.wsd_lr.WSDLRScheduler",
        {"t_initial": 32, "decay_t": 14, "lr_min": 0.006, "warmup_t": 10, "t_in_epochs": False},
    ),
}


@pytest.mark.parametrize("name", LIBRARY)
def test_every_step_has_the_rate_that_torch_or_timm_gives_it(name):
    keys, kind, arguments = LIBRARY[name]
    module = pytest.importorskip(kind.rpartition(".")[0])  # an older timm has no WSD
    warmup = 10 if "MIN_LR_FRACTION" in keys else 0
    plan = {"steps_per_epoch": [7] * 6, "warmup_steps": warmup}
    optimizer, schedule = make(ScheduleConfig(name, **keys), **plan)
    reference = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = getattr(module, kind.rpartition(".")[2])(reference, **arguments)
    for step in range(42):
        schedule.apply(step)
        if name != "wsd" or step >= warmup:  # timm's warm-up begins at 0
            rates = [each.param_groups[0]["lr"] for each in (optimizer, reference)]
            assert rates[0] == pytest.approx(rates[1], rel=1e-9)
        reference.step()
        theirs.step_update(step + 1) if name == "wsd" else theirs.step()


@pytest.mark.parametrize("metric", ["loss", "top1/species"])
def test_plateau_is_torchs_own_and_goes_on_from_its_state(metric):
    config = ScheduleConfig("plateau", PATIENCE=1, GAMMA=0.5, MIN_LR_FRACTION=0.3)
    plan = {"steps_per_epoch": [1] * 9, "warmup_steps": 2, "metric": metric}
    schedule = make(config, **plan)[1]
    reference = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        reference, "min" if metric == "loss" else "max", patience=1, factor=0.5, min_lr=0.3 * 0.3
    )
    used = set()
    for epoch, value in enumerate((1.0, 1.2, 0.9, 0.9, 1.3, 1.2, 1.2, 1.2, 1.2)):
        state = schedule.state_dict()
        optimizer, schedule = make(config, **plan)  # each validation in a run that is resumed
        schedule.load_state_dict(state)
        schedule.validated(value)
        schedule.apply(epoch + 1)
        theirs.step(value)
        used.add(optimizer.param_groups[0]["lr"])
        assert optimizer.param_groups[0]["lr"] == pytest.approx(reference.param_groups[0]["lr"])
    assert len(used) == 3  # the third is the lowest


def test_of_another_metric_plateau_keeps_the_rate_alone():
    plan = {"steps_per_epoch": [1] * 9, "warmup_steps": 0}
    config = ScheduleConfig("plateau", PATIENCE=0, GAMMA=0.5, MIN_LR_FRACTION=0.0)
    schedule, (optimizer, resumed) = make(config, **plan)[1], make(config, **plan)
    for value in (-5.0, -5.0):  # the second one lowers the rate
        schedule.validated(value)
    resumed.load_state_dict(schedule.state_dict(), same_metric=False)
    resumed.validated(1.0)  # no better than before, but the first of another metric
    resumed.apply(3)
    assert optimizer.param_groups[0]["lr"] == 0.3 * 0.5
