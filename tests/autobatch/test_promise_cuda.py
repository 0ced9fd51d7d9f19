"""What a search promises holds in a whole run on a CUDA device: training, validation, and after resuming."""

import pytest
import torch

from linnaeus.runtime.errors import OutOfMemoryError
from tests.autobatch.promises import CASES, CONTROLS, Run
from tests.phantom import is_on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Grad strides do not match"),  # dimensions of one
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def check(run):
    if is_on() and run.case.model == "marginal":
        pytest.skip("its loss is the logarithm of sums that a phantom leaves at zero")
    phases = run.phases()
    assert [phase.mode for phase in phases] == ["train", "val"] * 3
    for found in run.found.values():
        assert found.limited_by == "memory"
        assert found.certified
    assert all(phase.is_kept for phase in phases), [
        f"{phase.mode} {phase.excess:+.1%}" for phase in phases
    ]
    return phases


@pytest.mark.parametrize(
    "case", [CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[1:])], ids=str
)
def test_a_run_reserves_no_more_than_was_promised(case, tmp_path):
    """And no more than the fraction of the device leaves it."""
    check(Run(case, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("case", CONTROLS, ids=str)
def test_sizes_that_are_too_large_break_the_promise(case, tmp_path):
    """The negative control: in training and in validation, or memory runs out."""
    run = Run(case, tmp_path)
    check(run)
    for excess in (0.05, 0.10):
        try:
            phases = run.phases(excess=excess)
        except (torch.OutOfMemoryError, OutOfMemoryError):
            continue
        broken = {phase.mode for phase in phases if not phase.is_kept}
        assert broken == {"train", "val"}, excess
