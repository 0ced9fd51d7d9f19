"""Runs on few samples keep their optimizer steps, and give one piece of advice at most."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from linnaeus.main import cli
from tests.helpers.configs import FACTS, plan_of
from tests.helpers.small_runs import PLAIN

ON = "DATA.AUTOBATCH.ENABLED=True"
DEFAULT = ("DATA.AUTOBATCH.MIN_STEPS_PER_EPOCH=10", "TRAIN.EPOCHS=1")
RUNS = {
    "few samples": (50, (ON,), 5, "steps_per_epoch"),
    "accumulation": (100, (ON, "TRAIN.ACCUMULATION_STEPS=3"), 3, "steps_per_epoch"),
    "an effective batch": (50, (ON, "TRAIN.EFFECTIVE_BATCH_SIZE=40"), 40, "effective_batch"),
    "a large size by hand": (50, ("DATA.BATCH_SIZE=50",), 50, None),
}


@pytest.mark.parametrize("title", RUNS)
def test_runs_on_few_samples(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    length, options, size, limited_by = RUNS[title]
    data = (f"DATA.DATASET.length={length}", "MODEL.norm=BatchNorm1d")
    assert cli([*PLAIN, *DEFAULT, *data, *options]) == 0
    folder = Path("runs/plain")
    assert json.loads((folder / "result.json").read_text())["batch_size"] == size
    if limited_by is not None:
        found = json.loads((folder / "autobatch.json").read_text())["train"]
        assert (found["batch_size"], found["limited_by"]) == (size, limited_by)
    log = (folder / "logs/rank0.log").read_text().splitlines()
    words = r"\b(lower|smaller|reduce|raise|larger|increase)\b"
    assert sum(re.search(words, line) is not None for line in log) <= 1, log


def test_a_larger_micro_batch_is_advised_if_enough_steps_remain():
    few = replace(FACTS, max_micro_batch_size=8, batchnorm="local", batch_size_key="THE.KEY")
    for facts, expected in (
        (replace(few, num_samples=160), True),
        (replace(few, num_samples=159), False),
        (replace(few, num_samples=159, min_steps_per_epoch=9), True),
        (replace(few, can_grow=False), False),
    ):
        (advice,) = plan_of(facts).warnings
        assert ("THE.KEY" in advice) == expected


@pytest.mark.parametrize("world_size", [1, 3])
def test_few_steps_are_told_where_a_smaller_batch_gives_them(world_size):
    few = replace(FACTS, world_size=world_size, batch_size_key="THE.KEY")
    for samples, size, is_told in ((20, 20, True), (20, 3, True), (20, 2, False), (19, 19, False)):
        facts = replace(few, num_samples=samples * world_size, max_micro_batch_size=size)
        assert any("THE.KEY" in advice for advice in plan_of(facts).warnings) == is_told
