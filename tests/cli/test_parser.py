"""The command lines of all commands: what each takes, and the mistakes that all read alike."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from linnaeus.cli.main import COMMANDS, WITH_TORCHRUN, cli, part_of
from linnaeus.cli.parser import unwritable
from linnaeus.runtime.errors import ConfigError
from tests.helpers.forks import ROOT

EXPERIMENT = "DATA: {DATASET: {NAME: synthetic}}\n"
MEASURING = ("analyze",)
OTHERS = ("compare", "evaluate", "export", "predict", "sweep")


def read(command, *argv):
    return part_of(command, "read")(argv)


def problems(command, *argv):
    with pytest.raises(ConfigError) as caught:
        read(command, *argv)
    return [
        each for each in caught.value.problems if each.startswith("-") and "missing" not in each
    ]


@pytest.mark.parametrize("command", [*MEASURING, *OTHERS])
def test_an_option_without_a_value_or_unknown_is_a_problem(command):
    options = {"analyze": "--plot", "compare": "--plot", "sweep": "--metric"}
    option = options.get(command, "--output")
    [problem] = problems(command, option)
    assert problem.startswith(f"{option}: ")
    [problem] = problems(command, f"{option}x")
    assert option in problem.partition(":")[2], "the closest is named"


@pytest.mark.parametrize("command", [*MEASURING, "sweep"])
def test_mistakes_of_options_and_of_keys_are_listed_at_once(command):
    argv = [
        "--metric" if command == "sweep" else "--plot",
        "a.b",
        "--foo",
        "DATA.BATCHSIZE=3",
        "TRAIN.EPOCHS=0",
        "EXPERIMENT.SEED=1,2",
    ]
    with pytest.raises(ConfigError) as caught:
        read(command, *(argv if command == "sweep" else argv[:-1]))
    named = [problem.partition(":")[0] for problem in caught.value.problems]
    assert sorted(named) == sorted(["--foo", argv[0], "DATA.BATCHSIZE", "TRAIN.EPOCHS"])


@pytest.mark.parametrize(
    ("command", "argv", "option", "ending"),
    [
        ("analyze", [], "--plot", "png"),
        ("compare", ["runs"], "--plot", "png"),
        ("predict", ["runs/one", "photos"], "--output", "csv"),
        ("train", [], "--preview", "png"),
    ],
)
def test_files_are_looked_at_before_the_work(command, argv, option, ending, tmp_path, monkeypatch):
    """A file that cannot be written is listed with the other mistakes."""
    desk(tmp_path, monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        read(command, *argv, option, f"missing/a.{ending}", "--foo")
    named = [problem.partition(" ")[0] for problem in caught.value.problems]
    assert sorted(named) == ["--foo:", f"{option}:"]
    assert sorted(tmp_path.rglob("*")) == before
    assert read(command, *argv, option, f"a.{ending}")


def test_files_that_cannot_be_written(tmp_path):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "mine.csv").write_text("mine")
    for path in (tmp_path / "folder.png", Path("/proc/a.json"), tmp_path / f"{'x' * 245}.json"):
        [problem] = unwritable({"--output": path, "--plot": None})
        assert problem.startswith(f"--output: {path} ")
    assert not unwritable({"--output": tmp_path / "mine.csv"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.png", "mine.csv"]


def test_a_value_may_be_a_negative_number_or_follow_an_equals_sign():
    options, config = read("analyze", "MODEL.KWARGS.x", "-1e-3", "--output=-x.json")
    assert (options.output, config.MODEL.KWARGS) == (Path("-x.json"), {"x": -1e-3})
    assert read("analyze", "--output", "-x.json")[0].output == Path("-x.json")
    found = read("train", "OPTIMIZER.KWARGS.x", "-inf", "OPTIMIZER.KWARGS.y", "-.5")[1]
    assert {"x": -math.inf, "y": -0.5} == found.OPTIMIZER.KWARGS
    with pytest.raises(ConfigError):
        read("train", "EXPERIMENT.NAME", "-x")
    [problem] = problems("analyze", "--output", "--plot", "-x.png")
    assert problem.startswith("--output: ")


def desk(tmp_path, monkeypatch):
    """Make the folder with the files that the examples of the help name, and go there."""
    (tmp_path / "my_exp.yaml").write_text(EXPERIMENT)
    (tmp_path / "runs/my_exp").mkdir(parents=True)
    (tmp_path / "runs/my_exp/sweep.json").write_text('{"argv": [], "runs": []}')
    for run in ("runs/one", "runs/other", "runs/lr1", "runs/birds", "runs/birds_2"):
        (tmp_path / run / "checkpoints").mkdir(parents=True)
        (tmp_path / run / "checkpoints/best.pt").touch()
        (tmp_path / run / "checkpoints/last.pt").touch()
        (tmp_path / run / "config.yaml").write_text(EXPERIMENT)
    (tmp_path / "photos").mkdir()
    for image in ("photos/0.jpg", "a.jpg", "b.jpg"):
        (tmp_path / image).touch()
    monkeypatch.chdir(tmp_path)


def words_of(example):
    """What stands behind the program in an example."""
    words = shlex.split(example.rpartition("|")[2])
    start = next(number for number, word in enumerate(words) if word.startswith("linnaeus"))
    return words[start + 1 :]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_names_every_option_and_its_examples_are_command_lines(
    command, run, tmp_path, monkeypatch
):
    desk(tmp_path, monkeypatch)
    outcome = run(command, "--help", "--cfg", "nowhere.yaml")
    assert outcome.code == 0
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


@pytest.mark.parametrize(
    ("command", "name", "expected"),
    [
        ("predict", "birds", ["runs/birds"]),  # the folder of images
        ("evaluate", "runs/brids", ["runs/birds"]),
        ("export", "runs", ["runs/birds", "runs/lr1", "runs/one", "runs/other"]),
        ("evaluate", "runs/xyz", ["runs/birds", "runs/lr1", "runs/one", "runs/other"]),
        ("evaluate", "photos", ["runs/birds", "runs/lr1", "runs/one", "runs/other"]),
        ("predict", "runs/other", []),
    ],
)
def test_what_is_no_run_names_the_runs_there_are(command, name, expected, tmp_path, monkeypatch):
    desk(tmp_path, monkeypatch)
    (tmp_path / "birds/train").mkdir(parents=True)
    rest = {"predict": ["a.jpg"], "export": ["--format=onnx"]}.get(command, [])
    if not expected:
        assert read(command, name, *rest)
        return
    with pytest.raises(ConfigError) as caught:
        read(command, name, *rest)
    [problem] = caught.value.problems
    assert sorted(set(re.findall(r"runs/[a-z]+\d?", problem)) - {name}) == expected


@pytest.mark.parametrize("command", ["check-data", "train"])
def test_a_folder_as_a_word_gives_the_command_to_type(command, tmp_path, monkeypatch):
    desk(tmp_path, monkeypatch)
    (tmp_path / "my birds").mkdir()
    with pytest.raises(ConfigError) as caught:
        read(command, "my birds")
    [problem] = caught.value.problems
    first, *rest = words_of(problem.rpartition(": ")[2])
    assert (first, read(first, *rest)[1].DATA.DATASET.ROOT) == (command, "my birds")


@pytest.mark.parametrize("word", ["runs/birds", "birds", "runs/birds/checkpoints/last.pt"])
@pytest.mark.parametrize("command", ["analyze", "train"])
def test_a_run_as_a_word_gives_the_command_to_type(command, word, tmp_path, monkeypatch):
    desk(tmp_path, monkeypatch)
    with pytest.raises(ConfigError) as caught:
        read(command, word)
    [problem] = caught.value.problems
    first, *rest = words_of(problem.rpartition(": ")[2])
    config = read(first, *rest)[1]
    assert (first, config.DATA.DATASET.NAME) == (command, "synthetic")
    assert (command == "train") == config.TRAIN.AUTO_RESUME


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


def test_completion_help_mistakes_and_comparisons_wait_for_no_heavy_module(tmp_path):
    (tmp_path / "one/checkpoints").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps([*COMMANDS]), json.dumps(LIGHT)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
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


@pytest.mark.parametrize("command", [*MEASURING, "sweep", "evaluate"])
def test_print_config(
    command,
    tmp_path,
    monkeypatch,
    capsys,
):
    desk(tmp_path, monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    argv = {"evaluate": ["runs/one"], "sweep": ["EXPERIMENT.SEED=1,2"]}.get(command, [])
    assert cli([command, *argv, "DATA.BATCH_SIZE_VAL=7", "--print-config"]) == 0
    out = capsys.readouterr().out
    assert out.count("BATCH_SIZE_VAL: 7\n") == (2 if command == "sweep" else 1)
    assert sorted(tmp_path.rglob("*")) == before


def test_ctrl_c_before_the_work_says_a_word(run, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("linnaeus.cli.compare.find_runs", interrupt)
    outcome = run("compare", "runs")
    assert (outcome.code, bool(outcome.err.strip())) == (130, True)


def test_a_command_that_is_gone_names_the_new_one(run):
    outcome = run("plan", "--cfg", "my_exp.yaml")
    assert (outcome.code, "linnaeus analyze" in outcome.err) == (2, True)


INTERRUPTED = """
import sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "linnaeus.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
import linnaeus.main
"""


def test_ctrl_c_while_the_program_is_imported_says_a_word():
    command, env = [sys.executable, "-c", INTERRUPTED], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (130, 1)
