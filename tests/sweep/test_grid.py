"""Lists on the command line, and the combinations that they make."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linnaeus.config.load import load_config
from linnaeus.sweep.space import Combination, read_space
from linnaeus.sweep.values import sweep_values
from tests.helpers.run_files import planned_sweep, write_run


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("32,64,128", ["32", "64", "128"]),
        ("choice(none,linear)", ["none", "linear"]),
        ("range(0,0.4,0.1)", ["0", "0.1", "0.2", "0.3"]),
        ("sort(3,1,2)", ["1", "2", "3"]),
        ("tag(sizes, choice(1,2))", ["1", "2"]),
        ("null,0.5", ["null", "0.5"]),
        ("[2,6],[3,9]", ["[2,6]", "[3,9]"]),
        ("${DATA.BATCH_SIZE},7", ["${DATA.BATCH_SIZE}", "7"]),
        ("8,8,9", ["8", "9"]),
        # one value
        ("32", ["32"]),
        ("'a,b'", ["'a,b'"]),
        ("{a: 1, b: 2}", ["{a: 1, b: 2}"]),
        ("runs (old)/x", ["runs (old)/x"]),
    ],
)
def test_values_of_a_text(text, expected):
    assert sweep_values(text) == expected


def test_lists_that_cannot_be_run_through():
    for text in ("32,64,", "glob(*)", "interval(1,2)", "range(1,2,0)", "range(2,1)", ",,", "a,b)"):
        with pytest.raises(ValueError, match=re.escape(repr(text))):
            sweep_values(text)
    assert sorted(sweep_values("shuffle(1,2,3)")) == ["1", "2", "3"]


def test_every_spelling_makes_the_same_grid():
    def configs(*argv):
        found = read_space(argv)
        assert found.problems == []
        loaded = [load_config(one.argv).config for one in found.grid()]
        return [(config.DATA.BATCH_SIZE, config.OPTIMIZER.LR) for config in loaded]

    expected = [(32, 0.1), (32, 0.2), (64, 0.1), (64, 0.2)]
    assert configs("DATA.BATCH_SIZE=32,64", "OPTIMIZER.LR=0.1,0.2") == expected
    assert (
        configs("DATA.BATCH_SIZE", "32,64", "--opts", "+OPTIMIZER.LR=choice(0.1,0.2)") == expected
    )


def test_values_reach_the_configuration_as_typed():
    group = r"EXPERIMENT.WANDB.GROUP=a\,b,c d,'e,f',null"
    points = read_space(["DATA.DATASET.NUM_CLASSES=[2,6],[3,9]", group]).grid()
    seen = [load_config(one.argv).config for one in points]
    groups = ["a,b", "c d", "e,f", None]
    assert [one.EXPERIMENT.WANDB.GROUP for one in seen] == groups * 2
    assert [one.DATA.DATASET.NUM_CLASSES for one in seen] == [[2, 6]] * 4 + [[3, 9]] * 4


def test_a_key_set_again_is_not_swept():
    found = read_space(["DATA.BATCH_SIZE=32,64", "TRAIN.EPOCHS=1,2", "DATA.BATCH_SIZE=8"])
    assert [one.title for one in found.grid()] == ["TRAIN.EPOCHS=1", "TRAIN.EPOCHS=2"]
    assert {load_config(one.argv).config.DATA.BATCH_SIZE for one in found.grid()} == {8}


def test_names_are_readable():
    found = read_space(["DATA.BATCH_SIZE=32,64", "MODEL.KWARGS.norm=/a/b,c"])
    names = [one.name for one in found.grid()]
    assert names[1] == "DATA.BATCH_SIZE=32,MODEL.KWARGS.norm=c"
    assert re.fullmatch(r"DATA.BATCH_SIZE=32,MODEL.KWARGS.norm=-a-b-[0-9a-f]{8}", names[0])


TEXTS = st.text(max_size=200)


@given(st.tuples(TEXTS, TEXTS), st.tuples(TEXTS, TEXTS))
def test_names_are_safe_and_tell_combinations_apart(a, b):
    names = [Combination({"A.X": one[0], "A.Y": one[1]}, ()).name for one in (a, b)]
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9_.,=+\[\]-]{1,120}", name)
        assert name not in (".", "..")
    joined = [f"A.X={one[0]},A.Y={one[1]}" for one in (a, b)]
    assert (names[0] == names[1]) == (joined[0] == joined[1])


def test_one_job_is_the_default(run, monkeypatch):
    """It has all GPUs; each of two jobs has half of them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    sweep = ("sweep", "EXPERIMENT.SEED=1,2", "--dry-run")
    default, one, two = (run(*sweep, *more) for more in ((), ("--jobs", "1"), ("--jobs", "2")))
    assert (default.code, default) == (0, one)
    assert ("--nproc 2" in default.out, "--nproc 2" in two.out) == (True, False)


@pytest.mark.parametrize(
    ("metric", "code"),
    [("accuracy", 2), ("top1/", 2), ("top1/species", 0), ("macro/species", 0), ("loss", 0)],
)
def test_a_metric_of_no_validation_is_a_mistake(run, metric, code):
    outcome = run("sweep", "EXPERIMENT.SEED=1,2", "--metric", metric, "--dry-run")
    assert (outcome.code, outcome.err.count(repr(metric))) == (code, int(code == 2))


def test_the_status_with_a_metric_that_no_run_has_is_a_mistake(run, tmp_path):
    planned_sweep("EXPERIMENT.NAME=s", "EXPERIMENT.SEED=1,2")
    status = ("sweep", "--status", "runs/s", "--metric")
    assert run(*status, "top1/knid").code == 0, "no run has begun"
    write_run(tmp_path / "runs/s/EXPERIMENT.SEED=1")
    assert [run(*status, name).code for name in ("top1/knid", "top1/kind")] == [2, 0]


@pytest.mark.parametrize(
    "wrong", ["MODEL.NAME=test_resnet,resnetxx", "DATA.DATASET.ROOT=/nowhere/a,/nowhere/b"]
)
def test_what_is_not_there_is_known_before_the_first_run(run, tmp_path, wrong):
    outcome = run("sweep", wrong, "DATA.DATASET.NAME=imagefolder", "EXPERIMENT.NAME=s")
    assert outcome.code == 2
    assert wrong.rpartition(",")[2] in outcome.err
    assert not (tmp_path / "runs").exists()
