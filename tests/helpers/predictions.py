"""Analyses of small models: what is predicted for devices that are not there, and what is measured."""

import functools
import json
from pathlib import Path

from linnaeus.autobatch.predict.gpus import GIB, Gpu
from linnaeus.autobatch.ranks.protocol import RankStatus
from linnaeus.cli.analyze.measure import Setup
from linnaeus.cli.analyze.options import read
from linnaeus.cli.analyze.predict import (
    build_on_meta,
    fill,
    job_of,
    predicted_step,
    world_of,
)
from linnaeus.cli.analyze.results import Row
from linnaeus.data.datasets import build_data
from tests.helpers.consoles import plain_console

MIB = 1024**2
BASE = 600 * MIB
POINTS = (
    "DATA.DATASET._target_=tests.cli.tiny.Points",
    "DATA.DATASET.length=500",
    "DATA.AUTOBATCH.MIN_STEPS_PER_EPOCH=1",
)
WIDE = ("MODEL._target_=tests.cli.tiny.Wide", *POINTS)
GROWING = (
    "MODEL._target_=tests.cli.tiny.Growing",
    *POINTS,
    "DATA.DATASET.length=5000",
    "DATA.AUTOBATCH.MAX_BATCH_SIZE=5000",
)
DEEP = (
    "MODEL._target_=tests.cli.tiny.Deep",
    *POINTS,
    "DATA.DATASET.length=400000",
    "--modes=train",
)
IMAGES = (
    "MODEL._target_=tests.cli.tiny.Blocks",
    "DATA.DATASET.NAME=synthetic",
    "DATA.DATASET.NUM_SAMPLES=9999",
    "DATA.DATASET.NUM_SAMPLES_VAL=9999",
    "DATA.DATASET.NUM_CLASSES=[6]",
    "DATA.IMG_SIZE=64",
    "DATA.AUTOBATCH.MAX_BATCH_SIZE_VAL=9999",
)
MEASURED = (
    "MODEL._target_=tests.cli.tiny.Growing",
    *POINTS,
    "DATA.DATASET.length=5000",
    "EXPERIMENT.DEVICE=cpu",
    "TRAIN.EMA.ENABLED=True",
)
NARROW = (*MEASURED, "MODEL.width=64")


def content_of(outcome, path=Path("batch_sizes.json")):
    assert outcome.code == 0, outcome.err
    return dict(json.loads(path.read_text()))


def parsed(*argv):
    request = read(["--predict", "--gpu", "t4", *argv])
    assert not isinstance(request, str)
    return request


def setup_of(options, config):
    data = build_data(config.DATA, seed=0)
    return Setup(config, data, world_of(options.world_size[0]), RankStatus(), plain_console()[0])


@functools.cache
def predicted(mode, *argv):
    """The step of a command line, traced once for all tests."""
    setup = setup_of(*parsed(*argv))
    with job_of(setup):
        search = build_on_meta(setup)
        assert all(parameter.is_meta for parameter in search.assembly.model.parameters())
        return predicted_step(search, mode)


def row_of(mode, *argv, gib=16, fraction=1, limit_gb=None):
    """What is predicted for a device of a memory."""
    gpu = Gpu(f"{gib:g} GiB", int(gib * GIB), (BASE / MIB,) * 3)
    row = Row(mode, fraction, device=gpu.name)
    fill(row, predicted(mode, *argv), gpu, limit_gb)
    return row
