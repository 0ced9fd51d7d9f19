"""`${now:...}`, as Hydra's users know it."""

import os
from datetime import datetime

import psutil
import pytest

from linnaeus.config import values
from tests.helpers.configs import load

FORMAT = "%Y-%m-%d_%H-%M-%S-%f"


@pytest.fixture(autouse=True)
def _new_moment():
    values.moment.cache_clear()
    yield
    values.moment.cache_clear()


def test_now_is_one_moment_of_the_process():
    argv = (f"EXPERIMENT.NAME=${{now:{FORMAT}}}", "MODEL.KWARGS.at=[${now:%f}]")
    config = load(*argv)
    moment = datetime.strptime(config.EXPERIMENT.NAME, FORMAT)
    assert {"at": [f"{moment:%f}"]} == config.MODEL.KWARGS
    assert load(*argv) == config


def test_the_moment_of_ranks_is_that_of_their_torchrun(monkeypatch):
    for name, value in (
        ("WORLD_SIZE", "2"),
        ("TORCHELASTIC_RUN_ID", "x"),
        ("GROUP_WORLD_SIZE", "1"),
    ):
        monkeypatch.setenv(name, value)
    started = datetime.fromtimestamp(psutil.Process(os.getppid()).create_time())
    found = load(f"EXPERIMENT.NAME=${{now:{FORMAT}}}").EXPERIMENT.NAME
    assert f"{started:{FORMAT}}" == found  # that of the parent, and not of this process
