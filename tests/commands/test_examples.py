"""The examples in the help of every command are command lines that it takes."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from linnaeus.launchers.options import split_launch_options
from linnaeus.main import COMMANDS, cli

EXPERIMENT = "DATA: {DATASET: {NAME: synthetic}}\n"


def examples(command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert cli([command, "--help"]) == 0
    found = re.search(r"^examples:\n((?:  .+\n)+)", capsys.readouterr().out, re.MULTILINE)
    return [] if found is None else found[1].splitlines()


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder with the files that the examples name."""
    (tmp_path / "my_exp.yaml").write_text(EXPERIMENT)
    (tmp_path / "runs/my_exp").mkdir(parents=True)
    (tmp_path / "runs/my_exp/sweep.json").touch()
    for run in ("runs/one", "runs/other", "runs/lr1", "runs/birds"):
        (tmp_path / run / "checkpoints").mkdir(parents=True)
        (tmp_path / run / "checkpoints/best.pt").touch()
        (tmp_path / run / "checkpoints/last.pt").touch()
        (tmp_path / run / "config.yaml").write_text(EXPERIMENT)
    (tmp_path / "photos").mkdir()
    for image in ("photos/0.jpg", "a.jpg", "b.jpg"):
        (tmp_path / image).touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("desk")
@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_of_the_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = examples(command, capsys)
    assert len(lines) >= 3
    for line in lines:
        words = shlex.split(line.rpartition("|")[2])
        start = next(number for number, word in enumerate(words) if word.startswith("linnaeus"))
        argv = words[start + 1 :]
        if words[start] != "linnaeus.train":
            assert argv.pop(0) == command
        if command == "sweep":
            rest = argv
        else:
            _, rest, problems = split_launch_options(argv)
            assert problems == [], line
        assert import_module(f"linnaeus.commands.{command}.options").read(rest), line
