"""The command line of the plan: what it takes, and what it says about mistakes."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from linnaeus.commands.plan import options
from linnaeus.commands.plan.options import Options, read
from tests.helpers.runs import SMALL, Run

ROOT = Path(__file__).parents[3]


def test_the_example_in_the_docstring() -> None:
    assert doctest.testmod(options).failed == 0


def test_everything_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    request = read(
        [
            "--fraction=0.5", "--sizes", "8,4,8", "--dataset-length", "1000", "--epochs", "7",
            "--noise-scale", "1e3", "--world-size=4", "--time-budget", "90s", "--output", "a.csv",
            "--plot=a.SVG", "--min-bs=2", "--max-bs", "99", "--memory-limit-gb", "1.5", "TRAIN.AMP", "bf16",
        ]
    )  # fmt: skip
    assert not isinstance(request, str)
    found, config = request
    assert found == Options(
        sizes=[4, 8], dataset_length=1000, noise_scale=1000, world_size=4, time_budget=90,
        output=Path("a.csv"), plot=Path("a.SVG"),
    )  # fmt: skip
    autobatch = config.DATA.AUTOBATCH
    assert (autobatch.TARGET_MEMORY_FRACTION, autobatch.MEMORY_LIMIT_GB) == (0.5, 1.5)
    assert (autobatch.MIN_BATCH_SIZE, autobatch.MAX_BATCH_SIZE) == (2, 99)
    assert (config.TRAIN.EPOCHS, config.TRAIN.AMP) == (7, "bf16")


BAD = [
    (["--fraction", "1.5"], ["--fraction", "1.5", "(0, 1]"]),
    (["--sizes", "8,0"], ["--sizes", "'0'", "at least 1"]),
    (["--sizes", "8,,9"], ["--sizes", "''"]),
    (["--dataset-length", "many"], ["--dataset-length", "many"]),
    (["--epochs", "0"], ["--epochs", "'0'"]),
    (["--noise-scale", "-1"], ["--noise-scale", "-1", "positive number of samples"]),
    (["--noise-scale", "nan"], ["--noise-scale", "nan"]),
    (["--world-size", "1.5"], ["--world-size", "1.5"]),
    (["--time-budget", "2"], ["--time-budget", "'2'", "90s, 30m, 2h or 1d"]),
    (["--time-budget"], ["--time-budget", "needs a value"]),
    (["--output", "plan.xlsx"], ["--output", ".json, .jsonl, .csv"]),
    (["--plot", "plan"], ["--plot", "no ending", ".png, .svg, .html"]),
    (["--output", "missing/plan.json"], ["--output", "missing/plan.json", "cannot be written"]),
    (["--fractions", "0.5"], ["--fractions", "did you mean --fraction?"]),
    (["--min-bs", "9", "--max-bs", "8"], ["MIN_BATCH_SIZE", "9", "8"]),
    (["--cfg", "nowhere.yaml"], ["nowhere.yaml"]),
    (["DATA.BATCHSIZE", "3"], ["DATA.BATCHSIZE", "DATA.BATCH_SIZE"]),
    (["TRAIN.EFFECTIVE_BATCH_SIZE=500"], ["TRAIN.EFFECTIVE_BATCH_SIZE", "500", "96"]),
]


@pytest.mark.parametrize(("argv", "texts"), BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_mistakes(run: Run, tmp_path: Path, argv: list[str], texts: list[str]) -> None:
    outcome = run("plan", *SMALL, *argv)
    assert outcome.code == 2
    for text in texts:
        assert text in outcome.err
    assert "Traceback" not in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_all_mistakes_are_listed_at_once(run: Run) -> None:
    outcome = run("plan", "--sizes", "x", "--time-budget", "x", "--output", "a.b", "DATA.BATCHSIZE=3")
    assert outcome.err.startswith("4 problems")


def test_help_names_every_option(run: Run) -> None:
    outcome = run("plan", "--help", "--sizes", "x")
    assert outcome.code == 0
    for name in ["examples:", *options.PARSER.names()]:
        assert name in outcome.out


def test_print_config(run: Run) -> None:
    outcome = run("plan", *SMALL, "--epochs", "8", "--print-config")
    assert outcome.code == 0
    assert yaml.safe_load(outcome.out)["TRAIN"]["EPOCHS"] == 8


def test_a_process_of_torchrun_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    outcome = run("plan", "--sizes", "8")
    assert outcome.code == 2
    assert "run it without torchrun: python -m linnaeus.main plan --sizes 8" in outcome.err


WITHOUT_TORCH = """
import sys
from linnaeus.main import cli
codes = [cli(["plan", *argv]) for argv in (["--help"], ["--sizes", "x"], ["DATA.BATCHSIZE", "3"])]
print(codes, {"torch", "matplotlib"} & set(sys.modules))
"""


def test_help_and_mistakes_do_not_wait_for_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[0, 2, 2] set()"
