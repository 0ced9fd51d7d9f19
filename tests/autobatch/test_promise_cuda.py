"""What a search promises holds in a whole run on a CUDA device: training, validation, and after resuming.

The device is the stand-in, where every figure is exact. The same runs are there for a card.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.autobatch.promises import CASES, TOLERANCE, Card, Case, Phase, Run, StandIn

pytestmark = pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")

QUICK = (
    Case("vit", 0.97, "adamw", buckets=True),
    Case("efficientnet", 0.90, "sgd", "bf16", ema=True),
)


def check(run: Run) -> list[Phase]:
    phases = run.phases()
    assert [phase.mode for phase in phases] == ["train", "val"] * 3
    for found in run.found.values():
        assert found.limited_by == "memory"
        assert found.certified
    assert all(phase.is_kept for phase in phases), [f"{phase.mode} {phase.excess:+.1%}" for phase in phases]
    return phases


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in CASES)], ids=str
)
def test_a_run_reserves_no_more_than_was_promised(case: Case, tmp_path: Path) -> None:
    """And no more than the fraction of the device leaves it."""
    check(Run(case, StandIn(), tmp_path))


def test_sizes_that_are_too_large_break_the_promise(tmp_path: Path) -> None:
    """The negative control."""
    run = Run(Case("vit", 0.80), StandIn(), tmp_path)
    assert max(phase.excess for phase in check(run)) <= TOLERANCE
    for excess in (0.05, 0.10):
        kept = {mode: [] for mode in run.found}
        for phase in run.phases(excess=excess):
            kept[phase.mode].append(phase.is_kept)
        assert not any(kept["train"]), excess
        assert not any(kept["val"]), excess


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in CASES)], ids=str
)
def test_a_run_on_a_card_reserves_no_more_than_was_promised(case: Case, tmp_path: Path) -> None:
    check(Run(case, Card(), tmp_path))
