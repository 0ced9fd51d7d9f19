"""The command line of the analysis: what it takes, and what it says about mistakes."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from linnaeus.commands.analyze import options
from linnaeus.commands.analyze.options import Options, read
from linnaeus.config.schema import Config
from tests.helpers.runs import SMALL, Run

ROOT = Path(__file__).parents[3]


def test_the_example_in_the_docstring() -> None:
    assert doctest.testmod(options).failed == 0


def read_options(*argv: str) -> tuple[Options, Config]:
    request = read(argv)
    assert not isinstance(request, str)
    return request


def test_everything_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found, config = read_options(
        "--fractions=0.8,0.5,0.8", "--modes", "val,train", "--output", "a.csv", "--plot=a.HTML",
        "--steps", "3", "--min-bs=2", "--max-bs", "99", "--strategy", "binsearch",
        "--memory-limit-gb", "1.5", "--remedies", "--throughput", "TRAIN.AMP", "bf16", "TRAIN.EPOCHS=7",
    )  # fmt: skip
    assert found.fractions == [0.5, 0.8]
    assert found.modes == ["train", "val"]
    assert (found.output, found.plot) == (Path("a.csv"), Path("a.HTML"))
    assert found.remedies
    assert found.throughput
    autobatch = config.DATA.AUTOBATCH
    assert (autobatch.STEPS_PER_TRIAL, autobatch.STEPS_PER_TRIAL_VAL) == (3, 3)
    assert (autobatch.MIN_BATCH_SIZE, autobatch.MIN_BATCH_SIZE_VAL) == (2, 2)
    assert (autobatch.MAX_BATCH_SIZE, autobatch.MAX_BATCH_SIZE_VAL) == (99, 99)
    assert (autobatch.STRATEGY, autobatch.MEMORY_LIMIT_GB) == ("binsearch", 1.5)
    assert (config.TRAIN.AMP, config.TRAIN.EPOCHS) == ("bf16", 7)


def test_the_later_of_an_option_and_an_override_wins() -> None:
    def max_size(*argv: str) -> int:
        return read_options(*argv)[1].DATA.AUTOBATCH.MAX_BATCH_SIZE

    assert max_size("--max-bs", "8", "DATA.AUTOBATCH.MAX_BATCH_SIZE", "9") == 9
    assert max_size("DATA.AUTOBATCH.MAX_BATCH_SIZE=9", "--max-bs", "8") == 8


BAD = [
    (["--fractions", "0.5,1.5"], ["--fractions", "1.5", "(0, 1]"]),
    (["--fractions", "0"], ["--fractions", "0 is outside (0, 1]"]),
    (["--fractions", "nan"], ["--fractions", "nan", "(0, 1]"]),
    (["--fractions", "0.5,,0.6"], ["--fractions", "''"]),
    (["--fractions", "half"], ["--fractions", "half", "0.6,0.8"]),
    (["--fractions"], ["--fractions", "needs a value"]),
    (["--modes", "train,test"], ["--modes", "test", "train,val"]),
    (["--output", "sizes.xlsx"], ["--output", "sizes.xlsx", ".json, .jsonl, .csv"]),
    (["--output", "sizes"], ["--output", "no ending", ".json, .jsonl, .csv"]),
    (["--plot", "sizes.pdf"], ["--plot", "sizes.pdf", ".png, .svg, .html"]),
    (["--output", "missing/sizes.json"], ["--output", "missing/sizes.json", "cannot be written"]),
    (["--output", "/proc/sizes.json"], ["--output", "/proc/sizes.json", "cannot be written"]),
    (["--plot", "folder.png"], ["--plot", "folder.png", "it is a folder"]),
    (["--steps", "0"], ["--steps", "'0'", "at least 1"]),
    (["--min-bs", "-3"], ["--min-bs", "'-3'"]),
    (["--min-bs", "9", "--max-bs", "8"], ["MIN_BATCH_SIZE", "9", "8"]),
    (["--strategy", "guide"], ["--strategy", "did you mean guided?"]),
    (["--memory-limit-gb", "inf"], ["--memory-limit-gb", "inf"]),
    (["--throughput=1"], ["--throughput", "takes no value"]),
    (["--fraction", "0.5"], ["--fraction", "did you mean --fractions?"]),
    (["--cfg", "nowhere.yaml"], ["nowhere.yaml"]),
    (["DATA.BATCHSIZE", "3"], ["DATA.BATCHSIZE", "DATA.BATCH_SIZE"]),
    (["MODEL.NAME", "resnet5O"], ["resnet5O", "resnet50"]),
    (["EXPERIMENT.DEVICE", "cuda:99"], ["EXPERIMENT.DEVICE", "cuda:99"]),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "texts"), BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_mistakes(run: Run, tmp_path: Path, argv: list[str], texts: list[str]) -> None:
    (tmp_path / "folder.png").mkdir()
    before = sorted(tmp_path.rglob("*"))
    outcome = run("analyze", *SMALL, *argv)
    assert outcome.code == 2
    for text in texts:
        assert text in outcome.err
    assert "Traceback" not in outcome.err
    assert "of the memory" not in outcome.out, "the search must not have begun"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_write_protected_file_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sizes.csv").write_text("mine")
    (tmp_path / "sizes.csv").chmod(0o444)
    if os.access(tmp_path / "sizes.csv", os.W_OK):
        pytest.skip("this user may write everything")
    outcome = run("analyze", *SMALL, "--output", "sizes.csv")
    assert outcome.code == 2
    assert "write-protected" in outcome.err


def test_all_mistakes_are_listed_at_once(run: Run) -> None:
    outcome = run("analyze", "--fractions", "2", "--modes", "x", "--output", "a.b", "DATA.BATCHSIZE=3")
    assert outcome.err.startswith("4 problems")


def test_help_shows_examples(run: Run) -> None:
    outcome = run("analyze", "--help", "--fractions", "7")
    assert outcome.code == 0
    assert "examples:" in outcome.out
    for name in options.PARSER.names():
        assert name in outcome.out


@pytest.mark.parametrize("argv", [["--throughput", "-h"], ["--output", "-h"], ["--max-bs", "4", "-h"]])
def test_a_short_option_for_help_is_no_value(run: Run, argv: list[str]) -> None:
    outcome = run("analyze", *argv)
    assert outcome.code == 0
    assert "examples:" in outcome.out


def test_a_value_may_begin_with_a_dash(run: Run) -> None:
    assert run("analyze", "--output", "-x.json", "--print-config").code == 0
    assert "'-x' is not a whole number" in run("analyze", "--max-bs", "-x").err


def test_a_name_that_is_too_long_is_refused_before_the_search(run: Run) -> None:
    for name in (f"{'x' * 245}.json", f"{'x' * 300}.json"):
        outcome = run("analyze", *SMALL, "--output", name)
        assert outcome.code == 2
        assert "File name too long; choose another file" in outcome.err


def test_print_config(run: Run) -> None:
    outcome = run("analyze", *SMALL, "--max-bs", "8", "--print-config")
    assert outcome.code == 0
    assert yaml.safe_load(outcome.out)["DATA"]["AUTOBATCH"]["MAX_BATCH_SIZE"] == 8


WITHOUT_TORCH = """
import sys
from linnaeus.main import cli
codes = [cli(["analyze", *argv]) for argv in (["--help"], ["--fractions", "2"], ["DATA.BATCHSIZE", "3"])]
print(codes, {"torch", "matplotlib"} & set(sys.modules))
"""


def test_help_and_mistakes_do_not_wait_for_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == "[0, 2, 2] set()"


@pytest.mark.distributed
def test_torchrun_is_refused(torchrun: Run) -> None:
    outcome = torchrun(2, "analyze", "--fractions", "0.5", "DATA.BATCH_SIZE=3")
    assert outcome.code != 0
    wanted = "run it without torchrun: python -m linnaeus.main analyze --fractions 0.5 DATA.BATCH_SIZE=3"
    assert outcome.err.count(wanted) == 1, "by rank 0 alone"


def test_a_process_of_torchrun_gets_exit_code_2(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    outcome = run("analyze", *SMALL)
    assert outcome.code == 2
    assert "without torchrun" in outcome.err
