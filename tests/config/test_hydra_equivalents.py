"""What a Hydra user types that means nothing here: one sentence with what to type instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from linnaeus.config.hydra_equivalents import HYDRA_OPTIONS, SHORT, TAKE_VALUES
from linnaeus.config.load import load_config
from linnaeus.config.overrides import LONG_NAMES, OPTIONS, parse_command_line
from linnaeus.errors import ConfigError


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return caught.value.problems


@pytest.mark.parametrize(("argv", "expected"), [
    (["--multirun", "DATA.NUM_WORKERS=2"], "linnaeus sweep"),
    (["-m"], "linnaeus sweep"),
    (["--cfg", "job"], "--print-config"),
    (["--cfg=hydra"], "--cfg takes a file"),
    (["-c", "job"], "--print-config"),
    (["--info", "searchpath=1"], "--print-config --origin"),
    (["--resolve"], "leave it out"),
    (["--package", "DATA"], "--print-config"),
    (["--package=DATA"], "--print-config"),
    (["--run"], "leave it out"),
    (["--hydra-help"], "--help"),
    (["--config-path", "conf", "TRAIN.EPOCHS=1"], "--config-dir DIR"),
    (["-cp=conf"], "--config-dir DIR"),
    (["hydra.run.dir=/x"], "EXPERIMENT.OUTPUT_DIR/EXPERIMENT.NAME"),
    (["hydra.run.dir", "/x"], "EXPERIMENT.OUTPUT_DIR/EXPERIMENT.NAME"),
    (["++hydra.job.name=x"], "set EXPERIMENT.NAME"),
    (["~hydra.job_logging"], "logs/"),
    (["hydra/launcher=joblib"], "linnaeus sweep"),
    (["hydra/job_logging@hydra.x=disabled"], "logs/"),
    (["hydra.nothing.known=1"], "no counterpart"),
    (["hydra.searchpath=[conf]"], "--config-dir DIR"),
    (["DATA.BATCH_SIZE=8,16"], "linnaeus sweep DATA.BATCH_SIZE=8,16"),
    (["TRAIN.AMP", "off,bf16"], "linnaeus sweep TRAIN.AMP=off,bf16"),
    (["MODEL.NAME=resnet18,resnet50"], "linnaeus sweep MODEL.NAME=resnet18,resnet50"),
    (["model=resnet18,resnet50"], "linnaeus sweep model=resnet18,resnet50"),
])  # fmt: skip
def test_one_sentence_says_what_to_type(argv: list[str], expected: str) -> None:
    found = [problem for problem in problems(*argv) if "searchpath: no such key" not in problem]
    assert len(found) == 1
    assert expected in found[0]


def test_every_option_has_a_sentence_and_none_is_ours() -> None:
    for name in [*HYDRA_OPTIONS, *SHORT]:
        line = parse_command_line([name])
        assert len(line.problems) == 1
        assert "is an option of Hydra's; " in line.problems[0]
    assert not {*HYDRA_OPTIONS, *SHORT} & {*OPTIONS, *LONG_NAMES}
    assert set(SHORT.values()) <= set(HYDRA_OPTIONS)
    assert set(HYDRA_OPTIONS) | set(SHORT) >= TAKE_VALUES


@pytest.mark.parametrize("typed", [
    "DATA.BATCH_SIZE=[8,16]", "MODEL.NAME=[a,b]", "+extra=[one,two]", "TRAIN.EPOCHS=max(1,2)",
    "TRAIN.EPOCHS=${oc.env:NO_SUCH,x}", "TRAIN.AMP='off,bf16'", "TRAIN.EPOCHS=1,${",
])  # fmt: skip
def test_a_sweep_is_named_only_where_it_has_several_values(typed: str) -> None:
    assert not [problem for problem in problems(typed) if "sweep" in problem]


def test_a_range_is_for_a_sweep() -> None:
    (problem,) = problems("TRAIN.EPOCHS=range(1,4)")
    assert problem.endswith("linnaeus sweep TRAIN.EPOCHS=range(1,4)")


def test_lists_and_text_may_have_commas() -> None:
    config = load_config(["DATA.DATASET.NUM_CLASSES=2,4", "EXPERIMENT.OUTPUT_DIR=a,b"]).config
    assert (config.DATA.DATASET.NUM_CLASSES, config.EXPERIMENT.OUTPUT_DIR) == ([2, 4], "a,b")
    (problem,) = problems("DATA.DATASET.NUM_CLASSES=2,x")
    assert "sweep" not in problem
    (problem,) = problems("DATA.AUGMENT.MEAN=0.5,x")
    assert "sweep" not in problem
    (problem,) = problems("DATA.BATCH_SIZE=x")
    assert "sweep" not in problem


def test_hydras_own_settings_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(
        "defaults:\n  - override hydra/job_logging: disabled\nhydra:\n  run:\n    dir: /x\n  mode: MULTIRUN\n"
    )
    found = problems("--cfg", "my.yaml")
    assert [problem.partition(";")[0] for problem in found] == [
        "hydra/job_logging: has no effect here (my.yaml, line 2)",
        "hydra.run.dir: has no effect here (my.yaml, line 5)",
        "hydra.mode: has no effect here (my.yaml, line 6)",
    ]


def test_a_file_called_job_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job").write_text("TRAIN: {EPOCHS: 3}")
    assert load_config(["--cfg", "job"]).config.TRAIN.EPOCHS == 3


def test_a_key_of_another_node_does_not_hide_the_keys_of_ones_own_class() -> None:
    (problem,) = problems("LOSS.WEIGHT=3")
    assert "; LOSS takes other keys when LOSS._target_ is set; did you mean MODEL.WEIGHTS?" in problem
    (problem,) = problems("LOSS.LABEL_SMOTHING=0.1")
    assert problem.endswith("(command line); did you mean LOSS.LABEL_SMOOTHING?")
