"""`${now:...}`, as Hydra's users know it."""

import os
from datetime import datetime

import psutil
import pytest

from linnaeus.config import values
from tests.helpers.configs import load


@pytest.fixture(autouse=True)
def _new_moment():
    values.moment.cache_clear()
    yield
    values.moment.cache_clear()


def test_now_is_one_moment_of_the_process():
    config = load(
        "EXPERIMENT.NAME=${now:%Y-%m-%d_%H-%M-%S-%f}",
        "MODEL.KWARGS.at=[${now:%f}]",
    )
    moment = datetime.strptime(config.EXPERIMENT.NAME, "%Y-%m-%d_%H-%M-%S-%f")
    assert {"at": [moment.strftime("%f")]} == config.MODEL.KWARGS
    assert f"{moment:%f}" == load("EXPERIMENT.NAME=${now:%f}").EXPERIMENT.NAME
    assert load(r"EXPERIMENT.NAME=\${now:%f}").EXPERIMENT.NAME == "${now:%f}"


def test_the_moment_of_ranks_is_that_of_their_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    started = datetime.fromtimestamp(psutil.Process(os.getppid()).create_time())
    found = load("EXPERIMENT.NAME=${now:%Y-%m-%d_%H-%M-%S-%f}").EXPERIMENT.NAME
    assert f"{started:%Y-%m-%d_%H-%M-%S-%f}" == found  # that of the parent, and not of this process
