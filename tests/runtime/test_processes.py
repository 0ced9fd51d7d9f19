"""Runs in processes of their own: killed, resumed, and several at once under torchrun."""

import json
import random

import pytest

from tests.helpers import children
from tests.helpers.runs import SMALL
from tests.helpers.small_runs import assert_same_run, lines_of

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


def train(folder, *argv, **env):
    """A run that may be killed; see `tests.helpers.odd_ranks`."""
    return children.python("-m", "tests.helpers.odd_ranks", *RESUMABLE, *argv, cwd=folder, env=env)


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("never_killed")
    train(folder).ok()
    return folder / "runs/small"


def kill_again_and_again(folder, events, *argv):
    """Start a run once for each number, to be killed at that event of the start; then let it end."""
    for event in events:
        outcome = train(folder, *argv, KILL_AT=str(event))
        assert outcome.code == -9, f"killed at event {event}: {outcome.err}"
    train(folder, *argv).ok()


@pytest.mark.e2e
def test_killed_at_any_event_and_resumed(never_killed, tmp_path):
    """An epoch has 130 events: 96 + 32 samples and some files and phases."""
    moments = random.Random(0)
    kill_again_and_again(tmp_path, [moments.randrange(90, 130), moments.randrange(130, 230)])
    assert_same_run(tmp_path / "runs/small", never_killed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_again_and_again_and_resumed(tmp_path):
    """While it starts, trains, validates and writes checkpoints."""
    moments, options = random.Random(0), ("TRAIN.EPOCHS=80", "TRAIN.VALIDATE_EVERY=10")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    train(whole, *options).ok()
    kill_again_and_again(killed, [moments.randrange(1, 300) for _ in range(25)], *options)
    assert_same_run(killed / "runs/small", whole / "runs/small")


@pytest.mark.e2e
def test_two_processes(torchrun, tmp_path):
    options = ("DATA.AUTOBATCH.ENABLED=True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=8", "TRAIN.EPOCHS=1")
    outcome = torchrun(2, *SMALL, *options).ok()
    run = tmp_path / "runs/small"
    found = json.loads((run / "autobatch.json").read_text())
    assert (found["train"]["batch_size"], found["val"]["batch_size"]) == (8, 16)
    assert found["val"]["limited_by"] in ("dataset", "max_batch_size")
    assert (run / "logs/rank1.log").is_file()
    assert "rank 1" not in outcome.out
    assert lines_of(run, "val")[-1]["step"] == 96 // 2 // 8


@pytest.mark.e2e
def test_a_mistake_ends_all_processes(torchrun):
    outcome = torchrun(2, *SMALL, "TRAIN.SYNC_BATCHNORM=True")
    assert outcome.code != 0
    assert "TRAIN.SYNC_BATCHNORM" in outcome.err
