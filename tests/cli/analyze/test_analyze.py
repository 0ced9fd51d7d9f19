"""Whole analyses through the command line, where memory really limits the size."""

import json

import pytest

from tests.helpers.ledger import limit_with_room_for
from tests.helpers.predictions import MEASURED, NARROW, content_of
from tests.helpers.runs import SMALL


@pytest.mark.usefixtures("few_timed_steps")
@pytest.mark.slow
def test_many_fractions_cost_little_more_than_one(run):
    """The fractions leave half, three quarters and all of the room, however much this process holds."""
    room_gb, limit_gb = 320 / 1024, limit_with_room_for(420)  # libraries still load something
    fractions = [round(1 - unused * room_gb / limit_gb, 4) for unused in (0.5, 0.25, 0)]
    outcome = run(
        "analyze",
        *MEASURED,
        "MODEL.width=524288",
        "DATA.AUTOBATCH.TOLERANCE=0",
        "DATA.AUTOBATCH.STEPS_PER_TRIAL=1",
        f"DATA.AUTOBATCH.MEMORY_LIMIT_GB={limit_gb}",
        "--fractions",
        ",".join(map(str, fractions)),
    )
    results = content_of(outcome)["results"]
    for mode in ("train", "val"):
        rows = [row for row in results if row["mode"] == mode]
        assert [row["memory_fraction"] for row in rows] == fractions
        *others, first = [len(row["trials"]) for row in rows]
        assert max(others) < 4 <= first, "the first search is a real one"
        sizes = [row["batch_size"] for row in rows]
        assert sizes == sorted(sizes)
        assert 8 <= sizes[0] < sizes[-1]
        for row in rows:
            assert row["limited_by"] == "memory"
            assert row["peak_bytes"] <= row["budget_bytes"]


@pytest.mark.usefixtures("few_timed_steps")
def test_a_whole_analysis(run, tmp_path):
    """Rows for each mode, variant and fraction; two variants cannot run. One mode has no size to try."""
    outcome = run(
        "analyze",
        *NARROW,
        "--fractions=0.8,0.9",
        "DATA.AUTOBATCH.MAX_BATCH_SIZE=2",
        "--variants=bf16,checkpointing,channels_last",
        "TRAIN.AMP=bf16",
        "DATA.AUTOBATCH.MIN_BATCH_SIZE_VAL=6000",
        "DATA.AUTOBATCH.MAX_BATCH_SIZE_VAL=7000",
        "--plot=a.svg",
        # whatever else is in use on the machine
        f"DATA.AUTOBATCH.MEMORY_LIMIT_GB={limit_with_room_for(2100)}",
    )
    found = content_of(outcome)
    rows = [row for row in found["results"] if row["variant"] == "as configured"]
    assert [(row["mode"], row["memory_fraction"], row["batch_size"]) for row in rows] == [
        ("train", 0.8, 2),
        ("train", 0.9, 2),
        ("val", 0.8, None),
        ("val", 0.9, None),
    ]
    for row in rows[:2]:
        assert (row["limited_by"], row["relative_speed"]) == ("max_batch_size", 1)
        assert 0 < row["peak_bytes"] <= row["budget_bytes"]
    assert all("MIN_BATCH_SIZE_VAL" in row["reason"] for row in rows[2:])
    others = {row["variant"]: row for row in found["results"] if row["mode"] == "train"}
    assert [*others] == ["as configured", "bf16", "channels_last", "checkpointing"]
    for name in ("bf16", "checkpointing"):  # it is on already; the model has none
        assert (others[name]["batch_size"], others[name]["limited_by"]) == (None, "failed")
        assert others[name]["reason"]
    changed = others["channels_last"]
    assert (changed["batch_size"], changed["reason"]) == (2, None)
    assert changed["relative_speed"] == changed["samples_per_s"] / rows[1]["samples_per_s"]
    expected = {
        "device": "cpu",
        "model": "tests.cli.tiny.Growing",
        "precision": "bf16 autocast over float32",
        "parameters": 64 + 12,
        "ema": True,
    }
    assert expected.items() <= found["environment"].items()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.svg", "batch_sizes.json"]


def test_ctrl_c_keeps_what_has_been_measured(run, tmp_path):
    """The model sends the signal in the second trial: two steps each, after seven that warm up."""
    words = ("--fractions=0.5,0.9", "DATA.AUTOBATCH.MAX_BATCH_SIZE=500", "--plot=a.svg")
    assert run("analyze", *NARROW, "MODEL.interrupt_at=11", *words).code == 130
    found = json.loads((tmp_path / "batch_sizes.json").read_text())
    (row,) = found["results"]
    assert (found["interrupted"], row["limited_by"]) == (True, "interrupted")
    assert (row["memory_fraction"], row["certified"], row["batch_size"]) == (0.9, False, None)
    assert [trial["batch_size"] for trial in row["trials"]] == [16]
    assert (tmp_path / "a.svg").exists()


@pytest.mark.e2e
@pytest.mark.usefixtures("few_timed_steps")
def test_the_largest_side_of_a_batch(run):
    """The model takes eight images of 32 pixels: a fourth of them have twice the side."""
    pixels = ("~MODEL", "MODEL._target_=tests.training.test_img_size_schedule.Pixels")
    axis = ("--axis=img_size", "--batch-size=2", "--modes=train", "--fractions=0.9")
    outcome = run("analyze", *SMALL, *pixels, *axis)
    (row,) = content_of(outcome)["results"]
    assert (row["batch_size"], row["img_size"], row["limited_by"]) == (2, 64, "memory")
    assert row["samples_per_s"] > 0
