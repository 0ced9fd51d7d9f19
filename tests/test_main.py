import os
import re
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest
import yaml

from linnaeus import main as program
from linnaeus.cli import main
from tests.helpers import forks
from tests.helpers.forks import ROOT


@pytest.mark.parametrize("argv", [["--version"], ["train", "TRAIN.EPOCHS=2", "--version"]])
def test_version(run, argv):
    outcome = run(*argv)
    assert (outcome.code, outcome.err) == (0, "")
    assert re.fullmatch(r"linnaeus \d+\.\d+\.\d+\n", outcome.out)


def test_the_help_names_the_version_and_every_command(run):
    text = run("--help").out
    for name in ("--version", *main.COMMANDS):
        assert f"\n  {name} " in text


def test_the_script_alone_prints_the_help(run, monkeypatch, capfd, tmp_path):
    expected = run("--help").out
    monkeypatch.setattr("sys.argv", ["linnaeus"])
    assert main.console() == 0
    assert capfd.readouterr().out == expected
    monkeypatch.setattr("sys.argv", ["linnaeus", "TRAIN.EPOCHS=3", "--print-config"])
    assert main.console() == 0
    assert "EPOCHS: 3" in capfd.readouterr().out
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"linnaeus": f"{program.__name__}:{program.console.__name__}"}


@pytest.mark.e2e
@pytest.mark.parametrize("script", ["linnaeus", "analyze_batch_sizes"])
def test_scripts_import_from_the_current_folder(script, tmp_path):
    """The module leaves a file when it is imported."""
    (tmp_path / "bin").mkdir()
    linnaeus = tmp_path / "bin" / "linnaeus"
    linnaeus.write_text("import linnaeus.main\nraise SystemExit(linnaeus.main.console())")
    file = linnaeus if script == "linnaeus" else ROOT / "tools" / f"{script}.py"
    (tmp_path / "mine.py").write_text(
        "open('imported', 'w').close()\nraise ImportError('mine')  # not of Missing"
    )
    done = subprocess.run(
        [sys.executable, file, "MODEL._target_=mine.Missing", "EXPERIMENT.DEVICE=cpu"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=forks.limit_s,
    )
    assert (done.returncode, "mine" in done.stderr) == (2, True), done.stderr
    assert (tmp_path / "imported").exists()


@pytest.mark.parametrize("first", [[], ["train"]])
def test_training_is_a_command_beside_the_others(run, first):
    outcome = run(*first, "TRAIN.EPOCHS", "7", "model=resnet18", "--print-config")
    assert (outcome.code, outcome.err) == (0, "")
    assert "EPOCHS: 7\n" in outcome.out


def test_a_command_behind_other_words_is_named(run):
    outcome = run("train", "sweep", "TRAIN.EPOCHS=1,2")
    assert (outcome.code, "linnaeus sweep " in outcome.err) == (2, True)
    outcome = run("MODEL.NAME", "analyze", "--print-config")  # here it is a value
    assert (outcome.code, yaml.safe_load(outcome.out)["MODEL"]["NAME"]) == (0, "analyze")


def test_multirun_is_a_sweep(run):
    grid = ["DATA.BATCH_SIZE=8,16", "--print-config"]
    expected = run("sweep", *grid)
    assert (expected.code, expected.out.count("# DATA.BATCH_SIZE=")) == (0, 2)
    short, long = main.MULTIRUN
    for argv in ([short, *grid], ["train", *grid, long]):
        assert run(*argv) == expected
    assert run(*grid) != expected


@pytest.mark.parametrize("command", [[], ["sweep"]])
def test_of_several_ranks_the_first_one_speaks(run, monkeypatch, command):
    """The others stay until it has spoken: torchrun ends all ranks with the first one that leaves."""
    waited = []
    monkeypatch.setattr(main, "time", SimpleNamespace(sleep=waited.append))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        outcome = run(*command, "DATA.BATCHSIZE=1,2")
        assert outcome.code == 2
        assert ("DATA.BATCH_SIZE" in outcome.err) == bool(outcome.err) == (rank == "0")
        assert bool(run(*command, "--help").out) == (rank == "0")
    assert waited == [main.LEAVE_AFTER_S]


@pytest.mark.e2e
@pytest.mark.distributed
def test_training_under_torchrun_shows_a_mistake_once(torchrun):
    outcome = torchrun(2, "DATA.BATCHSIZE=3")
    assert outcome.code != 0
    assert outcome.err.count("DATA.BATCH_SIZE?") == 1
