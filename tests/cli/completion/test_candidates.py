"""What is offered at the cursor of a command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from linnaeus import main
from linnaeus.cli.completion.candidates import FILES, command_names, complete
from linnaeus.cli.completion.options import split
from linnaeus.config.keys import KEYS, dotted
from linnaeus.config.presets import available
from tests.helpers.runs import Run


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("an", ["analyze"]),
        ("mod", ["model="]),
        ("DATA.AUTOBATCH.STRA", ["DATA.AUTOBATCH.STRATEGY="]),
        ("train TRAIN.AMP=", ["TRAIN.AMP=off", "TRAIN.AMP=bf16", "TRAIN.AMP=fp16"]),
        ("TRAIN.AMP b", ["bf16"]),
        ("EXPERIMENT.WANDB.ENABLED=", [f"EXPERIMENT.WANDB.ENABLED={value}" for value in (True, False)]),
        ("DATA.BATCH_SIZE=", []),
        ("DATA.DATASET.ROOT=", FILES),
        ("MODEL._", ["MODEL._target_="]),
        ("~DATA.BATCH_SIZE_", ["~DATA.BATCH_SIZE_VAL"]),
        ("++DATA.BATCH_SIZE_", ["++DATA.BATCH_SIZE_VAL="]),
        ("--cf", ["--cfg"]),
        ("--cfg ", FILES),
        ("analyze --frac", ["--fractions"]),
        ("train --launcher s", ["slurm"]),
        ("sweep TRAIN.AMP=off,", ["TRAIN.AMP=off,off", "TRAIN.AMP=off,bf16", "TRAIN.AMP=off,fp16"]),
        ("evaluate ", FILES),
        ("evaluate runs/a TRAIN.AM", ["TRAIN.AMP="]),
        ("-m TRAIN.AMP=off,f", ["TRAIN.AMP=off,fp16"]),
        ("--install-completion ", ["bash", "zsh", "fish"]),
        ("-cd ", FILES),
    ],
)  # fmt: skip
def test_what_may_follow(line: str, expected: list[str]) -> None:
    assert list(complete(split(f"linnaeus {line}"))) == list(expected)


def test_an_empty_word_may_be_anything_but_an_option() -> None:
    found = complete([""])
    assert {*main.COMMANDS, "model=", "DATA.", "LOSS."} <= set(found)
    assert not [name for name in found if name.startswith("-")]
    assert not set(main.COMMANDS) & set(complete(["plan", ""]))
    assert set(command_names()) == set(main.COMMANDS)
    assert all(command_names().values())


def test_keys_go_from_dot_to_dot() -> None:
    assert {"DATA.DATASET.", "DATA.BATCH_SIZE=", "DATA.AUTOBATCH."} <= set(complete(["DATA."]))
    below = complete(["DATA.AUTOB"])  # one group only: its keys come at once
    expected = {f"{dotted(path)}=" for path in KEYS if path[:2] == ("DATA", "AUTOBATCH")}
    assert set(below) == expected
    assert all(below.values()), "each has a text"
    assert all(f"{dotted(path)}=" in complete([dotted(path)]) for path in KEYS)


def test_presets_and_files_are_those_of_the_package_and_of_own_folders(tmp_path: Path) -> None:
    for group, names in available().items():
        assert list(complete([f"{group}="])) == [f"{group}={name}" for name in names]
    files = {"model/mine.yml": "# Mine.", "experiment/birds.yaml": "# @package _global_\n# Birds."}
    for file, text in {**files, "data/augment/strong.yaml": "# Mine.", "base.yaml": "# Mine."}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f"{text}\nTRAIN: {{EPOCHS: 3}}\n")
    for option in ([f"--config-dir={tmp_path}"], ["--config-dir", str(tmp_path)], [f"-cd={tmp_path}"]):
        assert complete([*option, "model=mi"]) == {"model=mine": "Mine."}
        assert complete([*option, "model@MODEL.encoder=mi"]) == {"model@MODEL.encoder=mine": "Mine."}
        assert complete([*option, "+experiment="]) == {"+experiment=birds": "Birds."}
        assert complete([*option, "data/augment="]) == {"data/augment=strong": "Mine."}
        assert list(complete([*option, "data/"])) == ["data/augment="]
        for name in ("--config-name", "-cn"):
            assert complete([*option, name, "b"]) == {"base": "Mine."}
            assert complete([*option, name, "DA"]) == {}
        assert complete([*option, "--config-name=b"]) == {"--config-name=base": "Mine."}
    assert complete(["model=mi"]) == {}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("linnaeus", [""]),
        ("linnaeus an ", ["an", ""]),
        ("/usr/bin/linnaeus 'a b' c", ["a b", "c"]),
        ("linnaeus 'a b", ["a b"]),
        ("CUDA_VISIBLE_DEVICES=0 B= linnaeus A=1 ", ["A=1", ""]),
    ],
)
def test_the_words_of_a_line(line: str, words: list[str]) -> None:
    assert split(line) == words


def test_candidates_are_no_problem_of_the_command_line(run: Run) -> None:
    """Words that mean something to the command line are words to be completed here."""
    for word in ("--version", "--help", "-m", "sweep"):
        outcome = run("--complete", "zsh", word, "TRAIN.AMP=b")
        assert (outcome.code, outcome.out) == (0, "TRAIN.AMP=bf16\n")
