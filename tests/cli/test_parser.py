"""The command lines of all commands: what each takes, and the mistakes that all read alike."""

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from linnaeus.cli.main import COMMANDS, WITH_TORCHRUN, part_of
from linnaeus.runtime.errors import ConfigError

EXPERIMENT = "DATA: {DATASET: {NAME: synthetic}}\n"


def read(command, *argv):
    return part_of(command, "read")(argv)


def problems(command, *argv):
    with pytest.raises(ConfigError) as caught:
        read(command, *argv)
    return caught.value.problems


@pytest.mark.parametrize(
    ("command", "argv", "option", "ending"),
    [
        ("compare", ["runs"], "--plot", "png"),
        ("train", [], "--preview", "png"),
    ],
)
@pytest.mark.usefixtures("desk")
def test_files_are_looked_at_before_the_work(command, argv, option, ending):
    """A file that cannot be written is listed with the other mistakes."""
    Path(f"mine.{ending}").write_text("mine")
    before = sorted(Path().rglob("*"))
    found = problems(command, *argv, option, f"missing/a.{ending}", "--foo")
    assert sorted(each.partition(" ")[0] for each in found) == ["--foo:", f"{option}:"]
    assert read(command, *argv, option, f"mine.{ending}")
    assert sorted(Path().rglob("*")) == before
    assert Path(f"mine.{ending}").read_text() == "mine"


def test_a_value_may_be_negative_or_follow_an_equals_sign():
    options, config = read("analyze", "MODEL.KWARGS.x", "-1e-3", "--output=-x.json")
    assert (options.output, config.MODEL.KWARGS) == (Path("-x.json"), {"x": -1e-3})
    assert read("analyze", "--output", "-x.json")[0].output == Path("-x.json")
    found = read("train", "OPTIMIZER.KWARGS.x", "-inf", "OPTIMIZER.KWARGS.y", "-.5")[1]
    assert {"x": -math.inf, "y": -0.5} == found.OPTIMIZER.KWARGS
    assert problems("train", "EXPERIMENT.NAME", "-x")
    assert problems("analyze", "--output", "--plot", "-x.png")[0].startswith("--output: ")


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """The files that the examples of the help name, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for run in ("one", "other", "lr1", "birds", "birds_2"):
        checkpoints = Path("runs", run, "checkpoints")
        checkpoints.mkdir(parents=True)
        for name in ("best.pt", "last.pt"):
            (checkpoints / name).touch()
        Path("runs", run, "config.yaml").write_text(EXPERIMENT)
    for folder in ("runs/my_exp", "photos", "birds/train", "my birds"):
        Path(folder).mkdir(parents=True)
    for image in ("photos/0.jpg", "a.jpg", "b.jpg"):
        Path(image).touch()
    Path("my_exp.yaml").write_text(EXPERIMENT)
    Path("runs/my_exp/sweep.json").write_text('{"argv": [], "runs": []}')


def words_of(example):
    """What stands behind the program in an example."""
    words = shlex.split(example.rpartition("|")[2])
    start = next(number for number, word in enumerate(words) if word.startswith("linnaeus"))
    return words[start + 1 :]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("desk")
def test_the_help_names_every_option_and_its_examples_work(command, run, monkeypatch):
    outcome = run(command, "--help", "--cfg", "nowhere.yaml").ok()
    assert all(name in outcome.out for name in part_of(command, "PARSER")._option_string_actions)
    found = re.search(r"^examples:\n((?:  .+\n)+)", outcome.out, re.MULTILINE)
    lines = found[1].splitlines()
    assert len(lines) >= 3
    # The folder of `my_exp` is another sweep's.
    own = ["EXPERIMENT.NAME=new"] if command == "sweep" else []
    for line in lines:
        first, *rest = words_of(line)
        rest += own if "--status" not in rest else []
        rest += ["--print-config"] if command == "train" else []  # /data/birds is not there
        assert first == command
        assert read(command, *rest), line
    if command not in WITH_TORCHRUN:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        words = [*words_of(lines[0]), *own]
        outcome = run(*words)
        assert outcome.code == 2
        assert f"linnaeus {shlex.join(words)}" in outcome.err, "the command without torchrun"


ALL = ["runs/birds", "runs/lr1", "runs/one", "runs/other"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("predict birds a.jpg", ["runs/birds"]),  # the folder of images
        ("evaluate runs/brids", ["runs/birds"]),
        ("export runs --format=onnx", ALL),
        ("evaluate runs/xyz", ALL),
    ],
)
@pytest.mark.usefixtures("desk")
def test_what_is_no_run_names_the_runs_there_are(line, expected):
    command, name, *rest = line.split()
    [problem] = problems(command, name, *rest)
    assert sorted(set(re.findall(r"runs/[a-z]+\d?", problem)) - {name}) == expected


@pytest.mark.parametrize(
    "word", ["my birds", "runs/birds", "birds_2", "runs/birds/checkpoints/last.pt"]
)
@pytest.mark.parametrize("command", ["analyze", "train"])
@pytest.mark.usefixtures("desk")
def test_a_folder_or_a_run_as_a_word_gives_the_command_to_type(command, word):
    [problem] = problems(command, word)
    first, *rest = words_of(problem.rpartition(": ")[2])
    config = read(first, *rest)[1]
    data, is_run = config.DATA.DATASET, word != "my birds"
    assert (("synthetic", None) if is_run else ("imagefolder", word)) == (data.NAME, data.ROOT)
    assert (first, config.TRAIN.AUTO_RESUME) == (command, is_run and command == "train")


LIGHT = (
    "linnaeus.config.load",
    "linnaeus.batch_plan.plan",
    "linnaeus.batch_plan.summary",
    "linnaeus.main",
    "linnaeus.autobatch.search",
)
WITHOUT_TORCH = """
import importlib, json, sys
from linnaeus.cli.main import cli, part_of

def loaded(*argvs):
    codes = [cli(argv) for argv in argvs]
    return codes, sorted(sys.modules)

commands = json.loads(sys.argv[1])
for name in commands:
    assert part_of(name, "PARSER").format_help()
completing = sorted(sys.modules)
reading = loaded(*([name, "--help"] for name in commands), *([name, "--foo"] for name in commands))
comparing = loaded(["compare", "one"])
importing = [
    name for name in json.loads(sys.argv[2]) if importlib.import_module(name) and "torch" in sys.modules
]
print(json.dumps([completing, reading, comparing, importing]))
"""


def test_completion_help_and_comparisons_load_no_heavy_module(tmp_path):
    (tmp_path / "one/checkpoints").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps([*COMMANDS]), json.dumps(LIGHT)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    completing, reading, comparing, importing = json.loads(done.stdout.splitlines()[-1])
    heavy = {"torch", "matplotlib", "timm", "sklearn"}
    assert not {*completing} & {*heavy, "hydra", "omegaconf", "numpy", "yaml", "pandas", "wandb"}
    assert reading[0] == [0] * len(COMMANDS) + [2] * len(COMMANDS)
    assert comparing[0] == [0]
    assert not {*comparing[1]} & heavy
    assert "argparse" in comparing[1], "the control"
    assert importing == [], "these load torch"


def test_ctrl_c_before_the_work_says_a_word(run, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("linnaeus.cli.compare.find_runs", interrupt)
    outcome = run("compare", "runs")
    assert (outcome.code, bool(outcome.err.strip())) == (130, True)


INTERRUPTING = """
import sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "linnaeus.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
import linnaeus.main
"""
SWALLOWING = """
import os, signal, sys

class Swallowing:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                pass

sys.meta_path.insert(0, Swallowing())
from linnaeus.main import cli
raise SystemExit(cli(sys.argv[1:]))
"""
"""Sends Ctrl-C within the import of torch, as code that clears the exception."""


@pytest.mark.parametrize(
    ("program", "argv"),
    [
        (INTERRUPTING, ""),
        pytest.param(SWALLOWING, "predict runs/birds photos", marks=pytest.mark.e2e),
        pytest.param(SWALLOWING, "train", marks=pytest.mark.e2e),
    ],
)
@pytest.mark.usefixtures("desk")
def test_ctrl_c_in_an_import_ends_the_command(program, argv):
    command = [sys.executable, "-c", program, *argv.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (130, 1)
