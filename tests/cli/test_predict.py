import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch

from linnaeus.cli import predict
from linnaeus.inference.trained import load_run
from linnaeus.runtime.errors import ConfigError
from tests.helpers import forks
from tests.helpers.forks import ROOT
from tests.helpers.runs import wait_until
from tests.helpers.trained import PLAIN, Flat, save_run, spec_of, write_images


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A run and five photos, one of them damaged."""
    save_run(tmp_path / "runs" / "birds", spec_of())
    write_images(tmp_path / "photos", 5)
    (tmp_path / "photos" / "002.png").write_text("no image")
    monkeypatch.chdir(tmp_path)
    return tmp_path


PHOTOS = [f"photos/00{number}.png" for number in (0, 1, 3, 4)]
CPU = ("--device", "cpu")


def test_a_table_of_all_and_what_is_left_out(desk, run):
    outcome = run(
        "predict", "runs/birds", "photos", "--output", "out.csv", "--top", "3", "--path", *CPU
    )
    assert (outcome.code, outcome.out) == (0, "")
    rows = list(csv.reader(io.StringIO((desk / "out.csv").read_text(), newline="")))
    classes = ("order_1", "order_2", "species_1", "species_2", "species_3")
    consistent = ("order", "species", "probability", "differs")
    assert rows[0] == [
        "path",
        *(f"{name}{ending}" for name in classes for ending in ("", "_probability")),
        *(f"consistent_{name}" for name in consistent),
    ]
    assert [row[0] for row in rows[1:]] == PHOTOS
    expected = load_run("runs/birds", device="cpu").predict(PHOTOS, top=3, path=True)
    named = {name for row in rows[1:] for name in (row[5], row[7], row[9])}
    assert named > {"Jynx\ntorquilla"} or named > {'Picus "v" [/sp]'}, "names that need quotes"
    for row, prediction in zip(rows[1:], expected, strict=True):
        assert [row[5], row[7], row[9]] == [name for name, _ in prediction.levels["species"]]
        assert [float(value) for value in row[6:11:2]] == pytest.approx(
            [p for _, p in prediction.levels["species"]], rel=1e-4
        )
        assert row[11:13] == list(prediction.path.classes.values())
        assert row[14] == str(prediction.path.differs).lower()
    assert "photos/002.png" in outcome.err
    assert "photos/002.png" in (desk / "out.csv.skipped.csv").read_text()


def test_text_and_json(desk, run):
    outcome = run("predict", "runs/birds", *PHOTOS, "--top", "1", "--path", *CPU)
    assert outcome.code == 0
    blocks = re.findall(
        r"^photos/\d+.png\n  order +.+ %\n  species +.+ %\n  path +.+ > .+ %.*\n", outcome.out, re.M
    )
    assert len(blocks) == 4
    assert "\n".join(blocks).count("\n\n") == 3, "nothing else is printed"
    expected = [
        item.as_dict() for item in load_run("runs/birds", device="cpu").predict(PHOTOS, path=True)
    ]
    for ending in ("json", "jsonl"):
        assert (
            run("predict", "runs/birds", *PHOTOS, "--path", "--output", f"out.{ending}", *CPU).code
            == 0
        )
        text = (desk / f"out.{ending}").read_text()
        found = (
            json.loads(text)
            if ending == "json"
            else [json.loads(line) for line in text.splitlines()]
        )
        assert found == expected


def test_what_a_list_names(desk, monkeypatch, run):
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(b"photos/003.png\nmissing.jpg\nphotos/000.png\n"))
    )
    outcome = run("predict", "runs/birds", "-", "--output", "out.jsonl", "--batch-size", "1", *CPU)
    paths = [json.loads(line)["path"] for line in (desk / "out.jsonl").read_text().splitlines()]
    assert (outcome.code, paths) == (0, ["photos/003.png", "photos/000.png"])
    assert "missing.jpg" in outcome.err


def test_without_a_prediction_no_file_is_written_or_replaced(desk, monkeypatch, run):
    outcome = run("predict", "runs/birds", "photos/002.png", "--output", "out.json", *CPU)
    assert (outcome.code, (desk / "out.json").exists()) == (1, False)
    (desk / "out.json").write_text("of an earlier call")
    outcome = run("predict", "runs/birds", "photos/002.png", "--output", "out.json", *CPU)
    assert outcome.code == 1
    assert (desk / "out.json").read_text() == "of an earlier call"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert run("predict", "runs/birds", "-", "--output", "out.json", *CPU).code == 1
    assert (desk / "out.json").read_text() == "of an earlier call"
    assert not (desk / "out.json.partial").exists()


def test_many_unreadable_images_do_not_fill_the_terminal(desk, run):
    (desk / "bad").mkdir()
    for number in range(predict.NUM_NAMED + 30):
        (desk / "bad" / f"{number}.jpg").touch()
    outcome = run("predict", "runs/birds", "bad", "photos/000.png", "--output", "out.csv", *CPU)
    assert outcome.code == 0
    assert outcome.err.count(" bad/") == predict.NUM_NAMED
    assert len((desk / "out.csv.skipped.csv").read_text().splitlines()) == predict.NUM_NAMED + 31


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_what_is_done(desk, number):
    """The list of images is a pipe that stays open, so the command waits for more."""
    pipe = desk / "list"
    os.mkfifo(pipe)
    argv = ["predict", "runs/birds", "-", "--output", "out.json", "--batch-size", "2", *CPU]
    code = (
        f"import sys; from linnaeus.main import cli; sys.stdin = open({str(pipe)!r}); "
        f"sys.exit(cli({argv!r}))"
    )

    def has_begun():
        return any(path.stat().st_size > 1000 for path in desk.glob("out.json.partial"))

    with (desk / "log").open("w") as log:
        process = forks.start(
            ["-c", code], cwd=desk, env={"PYTHONPATH": str(ROOT)}, stdout=log, stderr=log
        )
        with pipe.open("w") as lines:
            lines.write("photos/000.png\nphotos/001.png\n" * 100)
            lines.flush()
            wait_until(has_begun, process, desk / "log")
            process.send_signal(number)
            assert process.wait(60) == 128 + number
    assert not (desk / "out.json").exists()
    found = json.loads((desk / "out.json.partial").read_text())
    assert {item["path"] for item in found} == {"photos/000.png", "photos/001.png"}
    assert "out.json.partial" in (desk / "log").read_text()


@pytest.mark.e2e
def test_a_reader_that_has_gone_is_no_traceback(desk):
    command = (
        "import os; from linnaeus.main import cli; r, w = os.pipe(); os.close(r); os.dup2(w, 1); "
        "raise SystemExit(cli(['predict', 'runs/birds', 'photos', '--device', 'cpu']))"
    )
    outcome = forks.python("-c", command, cwd=desk, env={"PYTHONPATH": str(ROOT)})
    assert outcome.code == predict.PIPE_CLOSED
    assert "Broken" not in outcome.err


IMPORTS = """
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


@pytest.mark.e2e
@pytest.mark.parametrize(
    "argv", ["predict {} photos", "evaluate {}", "train", "export {} --format=onnx"]
)
def test_ctrl_c_in_an_import_ends_the_command(desk, argv):
    (desk / "runs/birds/config.yaml").write_text("EXPERIMENT: {DEVICE: cpu}")
    words = [sys.executable, "-c", IMPORTS, *argv.format("runs/birds").split()]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    outcome = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert (outcome.returncode, len(outcome.stderr.splitlines())) == (130, 1)


@pytest.mark.parametrize(
    "options", ["--opset=18", "--outputs=logits --preprocessing", "--device=x"]
)
def test_errors_name_options_here_and_arguments_in_python(desk, run, options):
    outcome = run("export", "runs/birds", "--format=safetensors", *options.split())
    name = options.split()[-1].partition("=")[0]
    assert (outcome.code, f"  - {name}" in outcome.err, "on the command line" in outcome.err) == (
        2,
        True,
        True,
    )
    given = {"--opset": {"opset": 18}, "--preprocessing": {"preprocessing": True}}.get(name)
    with pytest.raises(ConfigError) as caught:
        load_run("runs/birds", device="x" if given is None else "cpu").export(
            "safetensors", **given
        )
    assert caught.value.problems[0].startswith(f"{name.removeprefix('--')}=")


def test_a_damaged_checkpoint_names_the_others(desk, run):
    folder = desk / "runs/birds/checkpoints"
    (folder / "best.pt").write_bytes((folder / "best.pt").read_bytes()[:-99])
    outcome = run("predict", "runs/birds", "photos", *CPU)
    assert (outcome.code, "last.pt" in outcome.err, "--checkpoint last" in outcome.err) == (
        1,
        True,
        True,
    )
    assert run("predict", "runs/birds", "photos", "--checkpoint", "last", *CPU).code == 0
    shutil.copy(folder / "last.pt", folder / "previous.pt")
    (folder / "last.pt").write_bytes((folder / "last.pt").read_bytes()[:-99])
    outcome = run("predict", "runs/birds", "photos", *CPU)
    assert (outcome.code, "last" in outcome.err) == (1, False)
    checkpoint = re.findall("--checkpoint ([a-z.]+)", outcome.err)
    assert checkpoint == ["previous.pt"], "only an intact one is named"
    assert run("predict", "runs/birds", "photos", "--checkpoint", *checkpoint, *CPU).code == 0
    (folder / "previous.pt").write_bytes(b"")
    for command in (
        ("predict", "runs/birds", "photos", *CPU),
        ("export", "runs/birds", "--format=onnx"),
    ):
        outcome = run(*command)
        assert (outcome.code, "best.pt" in outcome.err) == (1, True)
        assert not re.search("--checkpoint|last|previous", outcome.err)


def test_a_run_becomes_a_file_for_other_programs(desk, run):
    argv = "--format safetensors runs/birds --output birds.safetensors --checkpoint last"
    outcome = run("export", *argv.split())
    assert outcome.code == 0, outcome.err
    assert "last.pt" in outcome.err
    outcome = run("predict", "birds.safetensors", "photos", "--device", "cpu")
    assert (outcome.code, outcome.out.count("species")) == (0, 4)


def test_a_threshold_backs_off_to_the_finest_certain_level(desk, run):
    plain = load_run("runs/birds", device="cpu").predict(PHOTOS)
    least = [min(each.levels[name][0][1] for each in plain) for name in ("order", "species")]
    most = max(p for each in plain for _, p in (each.levels[name][0] for name in each.levels))
    for threshold in (min(least), most, 1.0):
        argv = ("--threshold", f"{threshold - 1e-7:.9f}" if threshold < 1 else "1")
        assert run("predict", "runs/birds", *PHOTOS, *argv, "--output", "a.csv", *CPU).code == 0
        rows = list(csv.DictReader((desk / "a.csv").read_text().splitlines(keepends=True)))
        for row, each in zip(rows, plain, strict=True):
            best = {name: classes[0] for name, classes in each.levels.items()}
            sure = [name for name in best if best[name][1] >= float(argv[1])]
            expected = [sure[-1], best[sure[-1]][0]] if sure else ["", ""]
            assert [row["certain_level"], row["certain_class"]] == expected


def probabilities(items):
    """Of each image: the probability of each species."""
    return [
        {each["class"]: each["probability"] for each in item["levels"]["species"]} for item in items
    ]


@pytest.mark.parametrize("flip", [(), ("--tta", "flip")])
def test_several_runs_give_their_mean_probability(desk, run, flip):
    save_run(desk / "runs" / "other", spec_of(size=(48, 48)), seed=7)
    runs = ("runs/birds", "runs/other/checkpoints/best.pt")
    argv = ("--top", "5", *flip, "--output", "both.json", *CPU)
    outcome = run("predict", *runs, *PHOTOS, *argv)
    assert outcome.code == 0, outcome.err
    found = probabilities(json.loads((desk / "both.json").read_text()))
    opened = [load_run(name, device="cpu") for name in runs]
    for name, each in zip(PHOTOS, found, strict=True):
        outputs = []
        for one in opened:
            image = one.transform(name)[None]
            with torch.no_grad():
                views = [image, image.flip(-1)] if flip else [image]
                outputs += [one.model(view)[1].softmax(1)[0] for view in views]
        mean = dict(
            zip(opened[0].classes["species"], torch.stack(outputs).mean(0).tolist(), strict=True)
        )
        assert each == pytest.approx(mean, rel=1e-4)
        assert max(float((each - outputs[0]).abs().max()) for each in outputs[1:]) > 1e-3


def test_runs_of_other_classes_are_no_ensemble(desk, run):
    save_run(desk / "runs" / "plain", spec_of(taxonomy=PLAIN))
    outcome = run("predict", "runs/birds", "runs/plain", "photos", *CPU)
    assert (outcome.code, outcome.out) == (2, "")
    assert [name for name in ("runs/birds", "runs/plain") if name not in outcome.err] == []
    outcome = run("predict", "runs/birds", "photos", "runs/plain", *CPU)
    assert (outcome.code, "runs/plain" in outcome.err) == (2, True)


@pytest.mark.parametrize(("ending", "held"), [("npy", 1000), ("npy", 2), ("parquet", 3)])
def test_features_are_what_the_head_gets(desk, run, monkeypatch, ending, held):
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    monkeypatch.setattr(predict.FeatureWriter, "NUM_HELD", held)
    file = desk / f"birds.{ending}"
    outcome = run(
        "predict", "runs/birds", "photos", "--features", str(file), "--output", "a.csv", *CPU
    )
    assert outcome.code == 0, outcome.err
    if ending == "npy":
        rows = np.load(file)
        paths = [*csv.reader((desk / "birds.npy.paths.csv").read_text().splitlines())][1:]
    else:
        table = pd.read_parquet(file)
        rows, paths = np.stack(table["features"].tolist()), [[path] for path in table["path"]]
    assert paths == [[path] for path in PHOTOS]
    opened = load_run("runs/birds", device="cpu")
    model = opened.model
    with torch.no_grad():
        expected = model.backbone(torch.stack([opened.transform(path) for path in PHOTOS]))
    assert rows.dtype == np.float32
    assert np.allclose(rows, expected.numpy(), rtol=1e-4, atol=1e-5)
    assert not list(desk.glob("*.partial"))


def test_a_model_of_ones_own_has_no_features(desk, run):
    node = {"_target_": f"{Flat.__module__}.Flat"}
    save_run(desk / "runs" / "own", spec_of(node=node, size=(4, 4)))
    argv = ("photos", "--features", "a.npy", "--trust-code", *CPU)
    outcome = run("predict", "runs/own", *argv)
    assert (outcome.code, "--features" in outcome.err) == (2, True)
    outcome = run("predict", "runs/birds", "runs/birds", *argv)
    assert (outcome.code, "--features" in outcome.err) == (2, True)
    assert not list(desk.glob("a.npy*"))


@pytest.mark.parametrize(
    "option",
    ["--output=nowhere/a.csv", "--features=nowhere/a.npy", "--features=a.csv", "--tta=crop"],
)
def test_options_are_checked_before_the_images_of_a_split(desk, run, option):
    (desk / "runs/birds/split.csv").write_text("path,split\nphotos/000.png,val\n")
    outcome = run("predict", "runs/birds", "--split", "val", option, *CPU)
    name, _, value = option.partition("=")
    assert (outcome.code, name in outcome.err, value in outcome.err) == (2, True, True)
