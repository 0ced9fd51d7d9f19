import io
import json
import math
import os
import re
import shutil
import signal

import numpy as np
import pandas as pd
import pytest
import torch

from linnaeus.cli import predict
from linnaeus.inference.trained import load_run
from tests.helpers import children
from tests.helpers.runs import wait_until
from tests.helpers.trained import save_run, spec_of, write_images


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


@pytest.fixture
def predict_birds(desk, run):
    """Predicts with the run; gives the outcome."""

    def predict_birds(*words, code=0):
        outcome = run("predict", "runs/birds", *words, *CPU)
        assert outcome.code == code, outcome.err
        return outcome

    return predict_birds


def test_a_table_of_all_and_what_is_left_out(desk, predict_birds):
    outcome = predict_birds("photos", "--output", "out.csv", "--top", "3", "--path")
    assert outcome.out == ""
    table = pd.read_csv(desk / "out.csv")
    classes = ("order_1", "order_2", "species_1", "species_2", "species_3")
    consistent = ("order", "species", "probability", "differs")
    assert [*table] == [
        "path",
        *(f"{name}{ending}" for name in classes for ending in ("", "_probability")),
        *(f"consistent_{name}" for name in consistent),
    ]
    assert [*table["path"]] == PHOTOS
    expected = load_run("runs/birds", device="cpu").predict(PHOTOS, top=3, path=True)
    assert re.search('\n|"', "".join(table["species_1"])), "names that need quotes"
    for row, prediction in zip(table.to_dict("records"), expected, strict=True):
        for rank, (name, probability) in enumerate(prediction.levels["species"], start=1):
            assert row[f"species_{rank}"] == name
            assert row[f"species_{rank}_probability"] == pytest.approx(probability, rel=1e-4)
        for level, name in prediction.path.classes.items():
            assert row[f"consistent_{level}"] == name
        assert row["consistent_differs"] == prediction.path.differs
    for text in (outcome.err, (desk / "out.csv.skipped.csv").read_text()):
        assert "photos/002.png" in text


def test_text_and_json(desk, predict_birds):
    outcome = predict_birds(*PHOTOS, "--top", "1", "--path")
    block = r"photos/\d+.png\n  order +.+ %\n  species +.+ %\n  path +.+ > .+ %.*\n"
    assert re.fullmatch(f"({block}\n?){{4}}", outcome.out)
    found = load_run("runs/birds", device="cpu").predict(PHOTOS, path=True)
    expected = [item.as_dict() for item in found]
    for ending in ("json", "jsonl"):
        predict_birds(*PHOTOS, "--path", "--output", f"out.{ending}")
    assert json.loads((desk / "out.json").read_text()) == expected
    lines = (desk / "out.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == expected


def type_in(monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))


def test_what_a_list_names(desk, monkeypatch, predict_birds):
    type_in(monkeypatch, b"photos/003.png\nmissing.jpg\nphotos/000.png\n")
    outcome = predict_birds("-", "--output", "out.jsonl", "--batch-size", "1")
    paths = [json.loads(line)["path"] for line in (desk / "out.jsonl").read_text().splitlines()]
    assert paths == ["photos/003.png", "photos/000.png"]
    assert "missing.jpg" in outcome.err


def test_without_a_prediction_no_file_is_written_or_replaced(desk, monkeypatch, predict_birds):
    file, output = desk / "out.json", ("--output", "out.json")
    predict_birds("photos/002.png", *output, code=1)
    assert not file.exists()
    file.write_text("of an earlier call")
    type_in(monkeypatch, b"")
    for images in ("photos/002.png", "-"):
        predict_birds(images, *output, code=1)
        assert file.read_text() == "of an earlier call"
    assert not (desk / "out.json.partial").exists()


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_what_is_done(desk, number):
    """The list of images is a pipe that stays open, so the command waits for more."""
    words = "predict runs/birds - --output out.json --batch-size 2 --device cpu"
    argv = ["-m", "linnaeus.main", *words.split()]

    def has_begun():
        return any(path.stat().st_size > 1000 for path in desk.glob("out.json.partial"))

    reader, writer = os.pipe()
    with (desk / "log").open("w") as log, os.fdopen(reader) as images:
        process = children.start(argv, cwd=desk, stdin=images, stdout=log, stderr=log)
        with os.fdopen(writer, "w") as lines:
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
    outcome = children.python("-c", command, cwd=desk)
    assert outcome.code == predict.PIPE_CLOSED
    assert "Broken" not in outcome.err


@pytest.mark.usefixtures("desk")
def test_an_error_names_the_option(run):
    """In Python they name the arguments."""
    outcome = run("export", "runs/birds", "--format=safetensors", "--opset=18")
    assert (outcome.code, "  - --opset" in outcome.err) == (2, True)


def cut(path):
    """Leave the last bytes of a file out."""
    path.write_bytes(path.read_bytes()[:-99])


def test_a_damaged_checkpoint_names_an_intact_one(desk, predict_birds):
    folder = desk / "runs/birds/checkpoints"
    cut(folder / "best.pt")
    outcome = predict_birds("photos", code=1)
    assert "last.pt" in outcome.err
    assert "--checkpoint last" in outcome.err
    shutil.copy(folder / "last.pt", folder / "previous.pt")
    cut(folder / "last.pt")
    outcome = predict_birds("photos", code=1)
    assert re.findall("--checkpoint ([a-z.]+)", outcome.err) == ["previous.pt"]
    predict_birds("photos", "--checkpoint", "previous.pt")
    (folder / "previous.pt").write_bytes(b"")
    outcome = predict_birds("photos", code=1)
    assert "best.pt" in outcome.err
    assert not re.search("--checkpoint|last|previous", outcome.err)


def test_a_run_becomes_a_file_for_other_programs(desk, run):
    argv = "--format safetensors runs/birds --output birds.safetensors --checkpoint last"
    outcome = run("export", *argv.split())
    assert (outcome.code, "last.pt" in outcome.err) == (0, True)
    outcome = run("predict", "birds.safetensors", "photos", *CPU)
    assert (outcome.code, outcome.out.count("species")) == (0, 4)


def test_a_threshold_backs_off_to_the_finest_certain_level(predict_birds):
    plain = load_run("runs/birds", device="cpu").predict(PHOTOS)
    tops = [{name: classes[0] for name, classes in each.levels.items()} for each in plain]
    values = sorted(probability for top in tops for _, probability in top.values())
    for threshold in (values[0] - 1e-7, values[-1] - 1e-7, 1.0):
        argv = ("--threshold", f"{threshold:.9f}", "--output", "a.csv")
        predict_birds(*PHOTOS, *argv)
        for row, top in zip(pd.read_csv("a.csv").to_dict("records"), tops, strict=True):
            sure = [(name, best) for name, (best, value) in top.items() if value >= threshold]
            expected = sure[-1] if sure else (math.nan, math.nan)
            assert str((row["certain_level"], row["certain_class"])) == str(expected)


def test_runs_and_mirror_images_give_their_mean_probability(desk, predict_birds):
    save_run(desk / "runs" / "other", spec_of(size=(48, 48)), seed=7)
    runs = ("runs/birds", "runs/other/checkpoints/best.pt")
    predict_birds(runs[1], *PHOTOS, "--top", "5", "--tta", "flip", "--output", "both.json")
    opened = [load_run(name, device="cpu") for name in runs]
    for name, item in zip(PHOTOS, json.loads((desk / "both.json").read_text()), strict=True):
        outputs = []
        for one in opened:
            image = one.transform(name)[None]
            with torch.no_grad():
                outputs += [one.model(view)[1].softmax(1)[0] for view in (image, image.flip(-1))]
        assert all((each - outputs[0]).abs().max() > 1e-3 for each in outputs[1:])
        mean = torch.stack(outputs).mean(0).tolist()
        expected = dict(zip(opened[0].classes["species"], mean, strict=True))
        found = {each["class"]: each["probability"] for each in item["levels"]["species"]}
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("ending", "held"), [("npy", 2), ("parquet", 3)])
def test_features_are_what_the_head_gets(desk, predict_birds, monkeypatch, ending, held):
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    monkeypatch.setattr(predict.FeatureWriter, "NUM_HELD", held)
    file = f"birds.{ending}"
    predict_birds("photos", "--features", file, "--output", "a.csv")
    if ending == "npy":
        rows, paths = np.load(file), [*pd.read_csv("birds.npy.paths.csv")["path"]]
    else:
        table = pd.read_parquet(file)
        rows, paths = np.stack(table["features"].tolist()), [*table["path"]]
    assert paths == PHOTOS
    opened = load_run("runs/birds", device="cpu")
    with torch.no_grad():
        expected = opened.model.backbone(torch.stack([opened.transform(path) for path in PHOTOS]))
    assert rows.dtype == np.float32
    assert np.allclose(rows, expected.numpy(), rtol=1e-4, atol=1e-5)
    assert not list(desk.glob("*.partial"))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--split val --output nowhere/a.csv --features nowhere/a.npy", "--features"),
        ("--split val --tta crop", "--tta"),
        ("runs/birds photos --features a.npy", "--features"),  # of several runs
        ("photos runs/birds", "runs/birds"),  # a run among the images
    ],
)
def test_options_are_checked_before_the_images(desk, predict_birds, words, named):
    (desk / "runs/birds/split.csv").write_text("path,split\nphotos/000.png,val\n")
    before = sorted(desk.rglob("*"))
    assert named in predict_birds(*words.split(), code=2).err
    assert sorted(desk.rglob("*")) == before
