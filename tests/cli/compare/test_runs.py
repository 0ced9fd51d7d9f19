"""What counts as a difference between runs, and what a run has measured."""

import functools

import pytest
import yaml

from linnaeus.cli.runs import Comparison, differing_keys, read_run
from linnaeus.config.dump import to_yaml
from linnaeus.config.load import load_config
from linnaeus.sweep.folder import flattened
from tests.helpers.run_files import write_run, write_validations


@functools.cache
def config(line):
    """The configuration of a run with these arguments."""
    return flattened(yaml.safe_load(to_yaml(load_config(line.split()).config)))


def differing(*lines):
    return differing_keys([config(line) for line in lines])


NODE = "DATA.AUTOBATCH"
FOUND = f"{NODE}.ENABLED=True DATA.BATCH_SIZE="


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("EXPERIMENT.NAME=a", "EXPERIMENT.NAME=b TRAIN.AUTO_RESUME=True", ""),
        # in the order of the configuration
        (
            "TRAIN.EPOCHS=3 EXPERIMENT.SEED=4",
            "OPTIMIZER.LR=1",
            "EXPERIMENT.SEED OPTIMIZER.LR TRAIN.EPOCHS",
        ),
        # keys that pretrained weights set come last
        (
            "DATA.AUGMENT.STD=[1,1,1] OPTIMIZER.LR=1",
            "DATA.AUGMENT.RESIZE=squash",
            "OPTIMIZER.LR DATA.AUGMENT.RESIZE DATA.AUGMENT.STD",
        ),
        # a key that follows another one is left out only where it does
        ("DATA.BATCH_SIZE=8", "DATA.BATCH_SIZE=9", "DATA.BATCH_SIZE"),
        (
            "DATA.BATCH_SIZE=8",
            "DATA.BATCH_SIZE=9 DATA.BATCH_SIZE_VAL=7",
            "DATA.BATCH_SIZE DATA.BATCH_SIZE_VAL",
        ),
        (f"{NODE}.MAX_BATCH_SIZE=8", "", f"{NODE}.MAX_BATCH_SIZE"),
        # a size that AutoBatch has found is no setting
        (f"{FOUND}8", f"{FOUND}9", ""),
        (f"{FOUND}8", "DATA.BATCH_SIZE=9", f"{NODE}.ENABLED"),
        # free keys differ by what they have
        ("MODEL.KWARGS={a:1}", "MODEL.KWARGS={a:1.0}", ""),
        ("MODEL.KWARGS={a:1}", "", "MODEL.KWARGS.a"),
    ],
)
def test_what_differs_between_two_runs(one, other, expected):
    assert differing(one, other) == expected.split()


@pytest.mark.parametrize(
    ("value", "expected"), [("raise", []), ("split", ["TRAIN.ON_OUT_OF_MEMORY"])]
)
def test_a_key_unknown_to_an_older_version_counts_as_its_default(value, expected):
    older = {**config("")}
    del older["TRAIN.ON_OUT_OF_MEMORY"], older["DATA.AUTOBATCH.LOG_LEVEL_VAL"]
    assert differing_keys([older, config(f"TRAIN.ON_OUT_OF_MEMORY={value}")]) == expected


def test_the_metric_that_is_compared(tmp_path):
    runs = [read_run(tmp_path / "none"), read_run(write_run(tmp_path / "run"))]
    for asked, metric in ((None, "top1/kind"), ("loss", "loss"), ("top5/kind", "top1/kind")):
        assert Comparison(runs, asked).metric == metric


def test_a_run_is_read_again_when_there_is_more(tmp_path):
    write_validations(tmp_path, [0.25, 0.75, None])
    running = read_run(tmp_path)
    assert running.metrics["top1/kind"] is None, "the last one is not finite"
    assert (running.best("top1/kind"), running.headline) == ((0.75, 2), "top1/kind")
    write_validations(tmp_path, [0.25, 0.75, None, 0.5])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"split": "val", "epo')
    assert read_run(tmp_path).metrics["top1/kind"] == 0.5


def test_a_foreign_file_of_metrics_is_read(tmp_path):
    lines = ('{"step": 10, "accuracy": 0.5}', '{"step": 20, "accuracy": 0.75}', '{"note": 1}')
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = read_run(tmp_path)
    assert (found.best("accuracy"), [*found.metrics]) == ((0.75, 20), ["accuracy"])
    assert found.state.status == "unknown"
    (tmp_path / "config.yaml").touch()
    assert read_run(tmp_path).state.status == "interrupted"


def test_the_lowest_loss_is_the_best(tmp_path):
    write_validations(tmp_path, [0.5, 0.25, 0.25], metric="loss")
    assert read_run(tmp_path).best("loss") == (0.25, 3)
