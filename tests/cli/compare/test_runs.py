"""What counts as a difference between runs, and what a run has measured."""

import functools

import pytest
import yaml

from linnaeus.cli.runs import Comparison, compared, differing_keys, read_run
from linnaeus.config.dump import to_yaml
from linnaeus.config.load import load_config
from linnaeus.sweep.folder import flattened
from tests.helpers.run_files import write_run, write_validations


def config(*argv, without=()):
    """The configuration of a run with these arguments; a version without some keys has written it."""
    return {key: value for key, value in _flat(*argv).items() if key not in without}


@functools.cache
def _flat(*argv):
    return flattened(yaml.safe_load(to_yaml(load_config(argv).config)))


def differing(*runs):
    return differing_keys([config(*argv) for argv in runs])


def test_equal_runs_do_not_differ_whatever_they_are_called():
    assert differing(("EXPERIMENT.NAME=a",), ("EXPERIMENT.NAME=b", "TRAIN.AUTO_RESUME=True")) == []
    found = differing(("TRAIN.EPOCHS=3", "EXPERIMENT.SEED=4"), ("OPTIMIZER.LR=1",))
    assert found == ["EXPERIMENT.SEED", "OPTIMIZER.LR", "TRAIN.EPOCHS"], (
        "in the order of the configuration"
    )
    found = differing(
        ("DATA.AUGMENT.STD=[1,1,1]", "OPTIMIZER.LR=1"), ("DATA.AUGMENT.RESIZE=squash",)
    )
    assert found == ["OPTIMIZER.LR", "DATA.AUGMENT.RESIZE", "DATA.AUGMENT.STD"], "weights set two"


def test_a_key_that_follows_another_one_is_left_out_only_where_it_does():
    assert differing(("DATA.BATCH_SIZE=8",), ("DATA.BATCH_SIZE=9",)) == ["DATA.BATCH_SIZE"]
    both = differing(("DATA.BATCH_SIZE=8",), ("DATA.BATCH_SIZE=9", "DATA.BATCH_SIZE_VAL=7"))
    assert both == ["DATA.BATCH_SIZE", "DATA.BATCH_SIZE_VAL"]
    node = "DATA.AUTOBATCH"
    assert differing((f"{node}.MAX_BATCH_SIZE=8",), ()) == [f"{node}.MAX_BATCH_SIZE"]
    both = differing((f"{node}.MAX_BATCH_SIZE=8",), (f"{node}.MAX_BATCH_SIZE_VAL=7",))
    assert both == [f"{node}.MAX_BATCH_SIZE", f"{node}.MAX_BATCH_SIZE_VAL"]


@pytest.mark.parametrize("is_on", ["True", "False"])
def test_a_size_that_autobatch_has_found_is_no_setting(is_on):
    runs = [(f"DATA.AUTOBATCH.ENABLED={is_on}", f"DATA.BATCH_SIZE={size}") for size in (8, 9)]
    assert differing(*runs) == ([] if is_on == "True" else ["DATA.BATCH_SIZE"])
    mixed = differing(runs[0], ("DATA.BATCH_SIZE=9",))
    assert mixed == (["DATA.AUTOBATCH.ENABLED"] if is_on == "True" else ["DATA.BATCH_SIZE"])


def test_a_size_found_is_shown_beside_sizes_that_were_set(tmp_path):
    for size in (64, 48):
        write_run(tmp_path / str(size), f"DATA.BATCH_SIZE={size}")
    write_run(tmp_path / "found", "DATA.AUTOBATCH.ENABLED=True", "DATA.BATCH_SIZE=96")
    names = ["64", "48", "found"]
    found = compared([read_run(tmp_path / name) for name in names], names)
    assert [row.values["DATA.BATCH_SIZE"] for row in found.rows] == ["64", "48", "96"]


@pytest.mark.parametrize(
    ("value", "expected"), [("raise", []), ("split", ["TRAIN.ON_OUT_OF_MEMORY"])]
)
def test_a_key_that_an_older_version_did_not_have_counts_as_its_default(value, expected):
    older = config(without=("TRAIN.ON_OUT_OF_MEMORY", "DATA.AUTOBATCH.LOG_LEVEL_VAL"))
    newer = config(f"TRAIN.ON_OUT_OF_MEMORY={value}")
    assert differing_keys([older, newer]) == expected


def test_free_keys_and_classes_of_ones_own_differ_by_what_they_have():
    assert differing(("MODEL.KWARGS={a: 1}",), ("MODEL.KWARGS={a: 1.0}",)) == []
    assert differing(("MODEL.KWARGS={a: 1}",), ()) == ["MODEL.KWARGS.a"]
    assert "MODEL._target_" in differing(("MODEL._target_=my.Model", "MODEL.width=4"), ())


def test_the_metric_that_is_compared(tmp_path):
    failed, run = read_run(tmp_path / "none"), read_run(write_run(tmp_path / "run"))
    assert Comparison([failed, run]).metric == "top1/kind"
    assert Comparison([failed, run], "loss").metric == "loss"
    assert Comparison([failed, run], "top5/kind").metric == "top1/kind"
    assert Comparison([failed]).metric == "loss"
    assert Comparison([failed, run], "top1/kind").unknown_metric is None


def test_a_run_is_read_again_when_there_is_more_and_only_then(tmp_path):
    write_validations(tmp_path, [0.25, 0.75, None])
    running = read_run(tmp_path)
    assert running.metrics["top1/kind"] is None, "the last one is not finite"
    assert running.best("top1/kind") == (0.75, 2)
    assert (running.figures([])["epoch"], running.headline) == (3, "top1/kind")
    assert read_run(tmp_path).history is running.history
    write_validations(tmp_path, [0.25, 0.75, None, 0.5])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"split": "val", "epo')
    running = read_run(tmp_path)
    assert (running.metrics["top1/kind"], running.figures([])["epoch"]) == (0.5, 4)


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
