"""Runs in processes of their own: killed and resumed, and with a mistake under torchrun."""

import random

import pytest

from tests.helpers import children
from tests.helpers.runs import SMALL
from tests.helpers.small_runs import assert_same_run

RESUMABLE = (
    *(option for option in SMALL if not option.startswith(("MODEL.", "DATA.DATASET."))),
    "DATA.DATASET._target_=tests.helpers.odd_ranks.Dataset",
    "DATA.IMG_SIZE=8",
    "DATA.NUM_WORKERS=0",
    "MODEL._target_=tests.helpers.greedy.Greedy",
    "MODEL.drop=0.2",
    "TRAIN.EMA.ENABLED=True",
    "TRAIN.AUTO_RESUME=True",
    "TRAIN.CHECKPOINT_EVERY_STEPS=4",
    "TRAIN.LOG_EVERY=1",
    "TRAIN.EPOCHS=4",
)
"""Four epochs of six steps."""
pytestmark = pytest.mark.timeout(300)  # whole runs


def train(folder, *options, **env):
    """A run that may be killed; see `tests.helpers.odd_ranks`."""
    module = "tests.helpers.odd_ranks"
    return children.python("-m", module, *RESUMABLE, *options, cwd=folder, env=env)


@pytest.mark.parametrize(
    ("options", "moments"),
    [
        pytest.param((), ((1, 90), (90, 130), (130, 230)), marks=pytest.mark.e2e),
        pytest.param(
            ("TRAIN.EPOCHS=80", "TRAIN.VALIDATE_EVERY=10"),
            ((1, 300),) * 25,
            marks=[pytest.mark.slow, pytest.mark.timeout(900)],
        ),
    ],
)
def test_killed_at_any_event_and_resumed(tmp_path, options, moments):
    """An epoch has 130 events: 96 + 32 samples and some files and phases."""
    random_moments, whole = random.Random(0), tmp_path / "whole"
    whole.mkdir()
    train(whole, *options).ok()
    for begin, end in moments:
        event = random_moments.randrange(begin, end)
        outcome = train(tmp_path, *options, KILL_AT=str(event))
        assert outcome.code == -9, f"killed at event {event}: {outcome.err}"
    train(tmp_path, *options).ok()
    assert_same_run(tmp_path / "runs/small", whole / "runs/small")


@pytest.mark.e2e
def test_a_mistake_ends_all_processes(torchrun):
    outcome = torchrun(2, *SMALL, "TRAIN.SYNC_BATCHNORM=True")
    assert outcome.code != 0
    assert "TRAIN.SYNC_BATCHNORM" in outcome.err
