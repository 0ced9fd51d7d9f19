"""What counts as a difference between the configurations of runs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import yaml

from linnaeus.cli.compare.differences import differing_keys, flattened, settings_of, shown
from linnaeus.config.load import FastLoader, load_config, to_yaml


def settings(*argv: str, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The settings of a run with these arguments; a version without some keys has written them."""
    return settings_of({key: value for key, value in _flat(*argv).items() if key not in without})


@functools.cache
def _flat(*argv: str) -> dict[str, Any]:
    return flattened(yaml.load(to_yaml(load_config(argv).config), Loader=FastLoader))


def differing(*runs: tuple[str, ...]) -> list[str]:
    return differing_keys([settings(*argv) for argv in runs])


def test_equal_runs_do_not_differ_whatever_they_are_called() -> None:
    assert differing(("EXPERIMENT.NAME=a",), ("EXPERIMENT.NAME=b", "TRAIN.AUTO_RESUME=True")) == []
    assert differing(("TRAIN.EPOCHS=3",), ()) == ["TRAIN.EPOCHS"]


def test_keys_are_in_the_order_of_the_configuration() -> None:
    found = differing(("TRAIN.EPOCHS=3", "EXPERIMENT.SEED=4"), ("OPTIMIZER.LR=1",))
    assert found == ["EXPERIMENT.SEED", "OPTIMIZER.LR", "TRAIN.EPOCHS"]


def test_a_key_that_follows_another_one_is_left_out_only_where_it_does() -> None:
    assert differing(("DATA.BATCH_SIZE=8",), ("DATA.BATCH_SIZE=9",)) == ["DATA.BATCH_SIZE"]
    both = differing(("DATA.BATCH_SIZE=8",), ("DATA.BATCH_SIZE=9", "DATA.BATCH_SIZE_VAL=7"))
    assert both == ["DATA.BATCH_SIZE", "DATA.BATCH_SIZE_VAL"]
    node = "DATA.AUTOBATCH"
    assert differing((f"{node}.MAX_BATCH_SIZE=8",), ()) == [f"{node}.MAX_BATCH_SIZE"]
    both = differing((f"{node}.MAX_BATCH_SIZE=8",), (f"{node}.MAX_BATCH_SIZE_VAL=7",))
    assert both == [f"{node}.MAX_BATCH_SIZE", f"{node}.MAX_BATCH_SIZE_VAL"]


@pytest.mark.parametrize("is_on", ["True", "False"])
def test_a_size_that_autobatch_has_found_is_no_setting(is_on: str) -> None:
    runs = [(f"DATA.AUTOBATCH.ENABLED={is_on}", f"DATA.BATCH_SIZE={size}") for size in (8, 9)]
    assert differing(*runs) == ([] if is_on == "True" else ["DATA.BATCH_SIZE"])
    mixed = differing(runs[0], ("DATA.BATCH_SIZE=9",))
    assert mixed == (["DATA.AUTOBATCH.ENABLED"] if is_on == "True" else ["DATA.BATCH_SIZE"])


@pytest.mark.parametrize(("value", "expected"), [("raise", []), ("split", ["TRAIN.ON_OUT_OF_MEMORY"])])
def test_a_key_that_an_older_version_did_not_have_counts_as_its_default(
    value: str, expected: list[str]
) -> None:
    older = settings(without=("TRAIN.ON_OUT_OF_MEMORY", "DATA.AUTOBATCH.LOG_LEVEL_VAL"))
    newer = settings(f"TRAIN.ON_OUT_OF_MEMORY={value}")
    assert differing_keys([older, newer]) == expected


def test_free_keys_and_classes_of_ones_own_differ_by_what_they_have() -> None:
    assert differing(("MODEL.KWARGS={a: 1}",), ("MODEL.KWARGS={a: 1.0}",)) == []
    assert differing(("MODEL.KWARGS={a: 1}",), ()) == ["MODEL.KWARGS.a"]
    assert "MODEL._target_" in differing(("MODEL._target_=my.Model", "MODEL.width=4"), ())


def test_values_are_shown_as_they_are_typed() -> None:
    run = settings("TRAIN.CLIP_GRAD_NORM=null", "DATA.IMG_SIZE=[8,9]", "TRAIN.COMPILE=True")
    keys = ("TRAIN.CLIP_GRAD_NORM", "DATA.IMG_SIZE", "TRAIN.COMPILE", "TRAIN.AMP", "TRAIN.NO_SUCH_KEY")
    assert [shown(run, key) for key in keys] == ["null", "[8, 9]", "true", "off", ""]
