"""`--print-config --origin`: where each value comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from linnaeus.commands.train.options import read
from linnaeus.config.keys import KEYS
from linnaeus.config.load import load_config, to_yaml


def origins(*argv: str) -> dict[str, str]:
    """The comment of each line, by the line without it."""
    text = read(["--print-config", "--origin", *argv])
    assert isinstance(text, str)
    lines = [line.strip().partition("  # ") for line in text.splitlines()]
    return {line: origin for line, _, origin in lines}


def test_every_kind_of_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(
        "defaults: [{model: resnet50}]\nTRAIN:\n  EPOCHS: 3\nMODEL: {KWARGS: {a: [1, {b: 2}]}}\n"
        "OPTIMIZER: {KWARGS: {x: '${TRAIN.EPOCHS}', y: {}}}\n"
    )
    found = origins("--cfg", "my.yaml", "TRAIN.LOG_EVERY=${TRAIN.EPOCHS} * 2", "EXPERIMENT.NAME=\\${x}")
    assert found["EPOCHS: 3"] == "my.yaml, line 3"
    assert found["NAME: resnet50"] == "preset model=resnet50"
    assert found["LOG_EVERY: 6"] == "command line, follows ${TRAIN.EPOCHS} * 2"
    assert found["SEED: 0"] == "default"
    assert found["BATCH_SIZE_VAL: 64"] == "default, follows ${DATA.BATCH_SIZE}"
    assert found[r"NAME: \${x}"] == "command line"
    assert found["a:"] == "my.yaml, line 4"
    assert found["x: 3"] == "my.yaml, line 5, follows ${TRAIN.EPOCHS}"
    assert found["y: {}"] == "my.yaml, line 5"
    assert found["TRAIN:"] == ""


def test_the_comments_change_nothing_and_stand_beside_every_key(tmp_path: Path) -> None:
    argv = ["LOSS._target_=x.Y", "LOSS.w=[1,2]", "EXPERIMENT.OUTPUT_DIR=a # b\n\x85", "data=inat2021"]
    text = read(["--origin", *argv])
    config = load_config(argv).config
    assert isinstance(text, str)
    assert yaml.safe_load(text) == yaml.safe_load(to_yaml(config))
    assert text != to_yaml(config)
    file = tmp_path / "again.yaml"
    file.write_text(text)
    assert load_config(["--cfg", str(file)]).config == config
    loss = [path for path in KEYS if path[0] == "LOSS"]
    assert sum("  # " in line for line in text.splitlines()) == len(KEYS) - len(loss) + 2


def test_without_the_option_there_are_no_comments() -> None:
    assert read(["--print-config"]) == to_yaml(load_config([]).config)
