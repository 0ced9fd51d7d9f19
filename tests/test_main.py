import re
import tomllib
from types import SimpleNamespace

import pytest
import yaml

from linnaeus import main as program
from linnaeus.cli import main
from tests.helpers import children
from tests.helpers.children import ROOT


def test_version(run):
    outcome = run("--version")
    assert (outcome.code, outcome.err) == (0, "")
    assert re.fullmatch(r"linnaeus \d+\.\d+\.\d+\n", outcome.out)


def test_the_script_alone_prints_the_help(run, monkeypatch, capfd, tmp_path):
    expected = run("--help").out
    assert all(f"\n  {name} " in expected for name in ("--version", *main.COMMANDS))
    monkeypatch.setattr("sys.argv", ["linnaeus"])
    assert main.console() == 0
    assert capfd.readouterr().out == expected
    monkeypatch.setattr("sys.argv", ["linnaeus", "TRAIN.EPOCHS=3", "--print-config"])
    assert main.console() == 0
    assert "EPOCHS: 3" in capfd.readouterr().out
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"linnaeus": f"{program.__name__}:{program.console.__name__}"}


@pytest.mark.e2e
def test_a_script_imports_from_the_current_folder(tmp_path):
    (tmp_path / "mine.py").write_text("raise ImportError('of mine')")
    words = ("MODEL._target_=mine.Missing", "EXPERIMENT.DEVICE=cpu")
    done = children.python(ROOT / "tools/analyze_batch_sizes.py", *words, cwd=tmp_path)
    assert (done.code, "of mine" in done.err) == (2, True), done.err


def test_a_value_may_have_the_name_of_a_command(run):
    outcome = run("MODEL.NAME", "analyze", "model=resnet18", "--print-config")
    assert (outcome.code, outcome.err) == (0, "")
    assert yaml.safe_load(outcome.out)["MODEL"]["NAME"] == "analyze"


def test_multirun_is_a_sweep(run):
    grid = ["DATA.BATCH_SIZE=8,16", "--print-config"]
    expected = run("sweep", *grid)
    assert (expected.code, expected.out.count("# DATA.BATCH_SIZE=")) == (0, 2)
    short, long = main.MULTIRUN
    for argv in ([short, *grid], ["train", *grid, long]):
        assert run(*argv) == expected
    assert run(*grid) != expected


def test_of_several_ranks_the_first_one_speaks(run, monkeypatch):
    """The others stay until it has spoken: torchrun ends all ranks with the first one that leaves."""
    waited = []
    monkeypatch.setattr(main, "time", SimpleNamespace(sleep=waited.append))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        outcome = run("DATA.BATCHSIZE=1,2")
        assert outcome.code == 2
        assert ("DATA.BATCH_SIZE" in outcome.err) == bool(outcome.err) == (rank == "0")
        assert bool(run("--help").out) == (rank == "0")
    assert waited == [main.LEAVE_AFTER_S]
