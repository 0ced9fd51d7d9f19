"""YAML files: what they may hold, and every way in which they can be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from linnaeus.config.load import load_config
from linnaeus.errors import ConfigError

DESIGN = """
DATA:
  AUTOBATCH:
    ENABLED: True
    ENABLED_VAL: ${DATA.AUTOBATCH.ENABLED}
    TARGET_MEMORY_FRACTION_VAL: ${DATA.AUTOBATCH.TARGET_MEMORY_FRACTION}
    MAX_BATCH_SIZE_VAL: ${DATA.AUTOBATCH.MAX_BATCH_SIZE} * 2
    MIN_BATCH_SIZE_VAL: ${DATA.AUTOBATCH.MIN_BATCH_SIZE}
"""

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(text: str) -> str:
        file = tmp_path / "my_exp.yaml"
        file.write_text(text, encoding="utf-8")
        return str(file)

    return _write


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return caught.value.problems


def test_documented_yaml_loads_as_it_stands(write: Write) -> None:
    argv = ["--cfg", write(DESIGN)]
    auto = load_config(argv).config.DATA.AUTOBATCH
    assert (auto.ENABLED, auto.ENABLED_VAL) == (True, True)
    assert (auto.MAX_BATCH_SIZE_VAL, auto.MIN_BATCH_SIZE_VAL) == (1024, 1)
    argv += ["DATA.AUTOBATCH.MAX_BATCH_SIZE", "48", "DATA.AUTOBATCH.TARGET_MEMORY_FRACTION", "0.6"]
    auto = load_config(argv).config.DATA.AUTOBATCH
    assert (auto.MAX_BATCH_SIZE_VAL, auto.TARGET_MEMORY_FRACTION_VAL) == (96, 0.6)


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "---\n", "{}", "DATA:\n", "DATA:\n  AUTOBATCH:\nMODEL:\n  KWARGS:\n"]
)
def test_files_that_set_nothing(write: Write, text: str) -> None:
    assert load_config(["--cfg", write(text)]).config == load_config([]).config


def test_plain_scalars_keep_their_text(write: Write) -> None:
    file = write(
        "EXPERIMENT: {NAME: 1e3, OUTPUT_DIR: 007, WANDB: {PROJECT: on, TAGS: [1.0, yes, 2024-01-01]}}"
    )
    experiment = load_config(["--cfg", file]).config.EXPERIMENT
    assert (experiment.NAME, experiment.OUTPUT_DIR, experiment.WANDB.PROJECT) == ("1e3", "007", "on")
    assert experiment.WANDB.TAGS == ["1.0", "yes", "2024-01-01"]


def test_numbers_bools_and_null(write: Write) -> None:
    text = """
    OPTIMIZER: {LR: 1e-3, WEIGHT_DECAY: 0}
    TRAIN: {AMP: off, COMPILE: yes, CLIP_GRAD_NORM: None, EPOCHS: "3"}
    DATA: {DATASET: {ROOT: none, TRAIN: "none"}, BATCH_SIZE: "${TRAIN.EPOCHS} * 2"}
    """
    config = load_config(["--cfg", write(text)]).config
    assert (config.OPTIMIZER.LR, config.OPTIMIZER.WEIGHT_DECAY) == (0.001, 0.0)
    assert (config.TRAIN.AMP, config.TRAIN.COMPILE, config.TRAIN.CLIP_GRAD_NORM) == ("off", True, None)
    assert (config.DATA.DATASET.ROOT, config.DATA.DATASET.TRAIN) == (None, "none")
    assert config.DATA.BATCH_SIZE == 6


def test_values_without_a_type(write: Write) -> None:
    text = (
        "MODEL: {KWARGS: {a: 1e-3, b: 2024-01-01, c: None, d: 'None', e: [on, {f: 0x10}], g: 1.5e3, h: .5}}"
    )
    kwargs = load_config(["--cfg", write(text)]).config.MODEL.KWARGS
    assert kwargs == {
        "a": 0.001, "b": "2024-01-01", "c": None, "d": "None", "e": [True, {"f": 16}], "g": 1500.0, "h": 0.5,
    }  # fmt: skip


def test_anchors_and_merge_keys(write: Write) -> None:
    text = """
    MODEL: {KWARGS: &shared {a: 1, b: 2}}
    OPTIMIZER: {KWARGS: {<<: *shared, b: 3}}
    """
    assert load_config(["--cfg", write(text)]).config.OPTIMIZER.KWARGS == {"a": 1, "b": 3}
    text = "MODEL: {KWARGS: {x: &x {a: 1, b: 1}, y: &y {<<: *x, b: 2}, z: *y, <<: *y}}\nEXPERIMENT: {NAME: =}"
    config = load_config(["--cfg", write(text)]).config
    merged = {"a": 1, "b": 2}
    assert {"x": {"a": 1, "b": 1}, "y": merged, "z": merged, **merged} == config.MODEL.KWARGS
    assert config.EXPERIMENT.NAME == "="


def test_byte_order_mark_and_windows_lines(write: Write) -> None:
    assert load_config(["--cfg", write("\ufeffTRAIN:\r\n  EPOCHS: 3\r\n")]).config.TRAIN.EPOCHS == 3


@pytest.mark.parametrize(("text", "line", "expected"), [
    ("DATA:\n  BATCHSIZE: 8", 2, "DATA.BATCHSIZE: no such key (FILE, line 2); did you mean DATA.BATCH_SIZE?"),
    ("BATCH_SIZE: 8", 1, "did you mean DATA.BATCH_SIZE?"),
    ("data:\n  batch_size: 8", 2, "did you mean DATA.BATCH_SIZE?"),
    ("DATA.BATCH_SIZE: 8", 1, "keys in a file are nested"),
    ("DATA:\n  BATCH_SIZE: many", 2, "DATA.BATCH_SIZE: 'many' is not a whole number (FILE, line 2)"),
    ("DATA:\n  BATCH_SIZE:", 2, "must have a value, not null"),
    ("DATA:\n  BATCH_SIZE: true", 2, "is not a whole number"),
    ("DATA:\n  BATCH_SIZE: 8.5", 2, "is not a whole number"),
    ("DATA:\n  BATCH_SIZE: [8]", 2, "is not a whole number"),
    ("DATA:\n  BATCH_SIZE: {x: 8}", 2, "takes a value and has no keys below it"),
    ("DATA:\n  BATCH_SIZE: .nan", 2, "is not"),
    ("EXPERIMENT:\n  NAME: [a]", 2, "['a'] is not text"),
    ("EXPERIMENT:\n  NAME:", 2, "must have a value, not null"),
    ("DATA: 3", 1, "is a group of keys"),
    ("DATA: [3]", 1, "is a group of keys"),
    ("MODEL: resnet50", 1, "MODEL.NAME"),
    ("MODEL:\n  width: 3", 2, "MODEL takes other keys when MODEL._target_ is set"),
    ("MODEL:\n  KWARGS: 3", 2, "is not a mapping"),
    ("TRAIN:\n  _target_: my.Trainer", 2, "TRAIN._target_: no such key"),
    ("MODEL:\n  KWARGS: {_target_: my.Thing}", 2, "MODEL.KWARGS._target_: no such key"),
    ("1: 2", 1, "1: no such key"),
    ("DATA:\n  BATCH_SIZE: 8\n  BATCH_SIZE: 9", 3, "DATA.BATCH_SIZE: stands twice (FILE, line 3)"),
    ("DATA: {}\nTRAIN: {}\nDATA: {}", 3, "DATA: stands twice"),
    ("MODEL:\n  KWARGS: {a: 1, a: 2}", 2, "MODEL.KWARGS.a: stands twice"),
    ("DATA:\n  BATCH_SIZE: 8\n - x: [", 3, "broken YAML"),
    ("DATA:\n\tBATCH_SIZE: 8", 2, "broken YAML"),
    ("DATA: {BATCH_SIZE: 8", 1, "broken YAML"),
    ("a: &x\n  b: *x", 1, "an alias holds itself"),
    ("? [a]\n: 3", 1, "a key must be text"),
    ("MODEL:\n  KWARGS: {x: !!python/name:os.system a}", 2, "broken YAML"),
    ("MODEL:\n  KWARGS: {x: !!binary aaaa}", 2, "broken YAML"),
    ("DATA: {}\n---\nDATA: {}", 2, "expected a single document"),
    ("- a", None, "must hold keys with values (KEY: value), not a list"),
    ("just text", None, "not a single value"),
    ("x: \"\\0\"\n\0", None, "broken YAML"),
    ("[" * 3000, None, "is not a text file in YAML"),
])  # fmt: skip
def test_one_fault(write: Write, text: str, line: int | None, expected: str) -> None:
    file = write(text)
    (problem,) = problems("--cfg", file)
    assert expected.replace("FILE", file) in problem
    assert file in problem
    assert line is None or f"{file}, line {line}" in problem


def test_missing_file_folder_and_binary(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.yaml")
    assert problems("--cfg", missing) == [f"{missing}: no such file (--cfg)"]
    assert problems("--cfg", str(tmp_path)) == [f"{tmp_path}: is a folder, not a file (--cfg)"]
    binary = tmp_path / "x.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "is not a text file" in problems("--cfg", str(binary))[0]
    assert len(problems("--cfg", "a\0b")) == 1
    assert len(problems("--cfg", str(binary / "below.yaml"))) == 1


def test_a_broken_file_does_not_hide_or_invent_other_problems(write: Write) -> None:
    file = write("MODEL: {_target_: my.Model, ]")
    found = problems("--cfg", file, "MODEL.width=3", "~MODEL.depth", "DATA.BATCHSIZE=3")
    assert len(found) == 2
    assert "broken YAML" in found[0]
    assert "DATA.BATCHSIZE" in found[1]
