"""Several labels for each image, from the manifest to predictions and exported files."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch
from timm.loss import AsymmetricLossMultiLabel
from torch.nn.functional import binary_cross_entropy_with_logits

from linnaeus.config.schema import LossConfig
from linnaeus.data.batch import Batch
from linnaeus.data.image_files import encode, hold_out
from linnaeus.data.manifest import Listing
from linnaeus.data.mixing import Mixing
from linnaeus.data.taxonomy import LabelIndex, index_labels
from linnaeus.errors import ConfigError
from linnaeus.inference.trained import load_run
from linnaeus.main import cli
from linnaeus.training.losses import build_loss
from tests.helpers import label_sets
from tests.helpers.label_sets import write_label_sets
from tests.helpers.runs import Run, assert_same_bits, weights
from tests.helpers.small_runs import NAME, PLAIN, lines_of
from tests.helpers.trained import ONE_RANK

IMAGES = (
    "DATA.DATASET.NAME=manifest", "DATA.DATASET.LABEL_SEPARATOR=;", "DATA.IMG_SIZE=16", "LOSS.NAME=bce",
    f"MODEL._target_={label_sets.__name__}.Pixels", "DATA.AUGMENT.CROP_SCALE=[1,1]", "EXPERIMENT.DEVICE=cpu",
    "EXPERIMENT.NAME=sets", "DATA.BATCH_SIZE=32", "TRAIN.EPOCHS=4", "OPTIMIZER.LR=0.01",
    "DATA.DATASET.ROOT=images", "DATA.DATASET.RANKS=[animal]",
)  # fmt: skip
POINTS = (*PLAIN, f"DATA.DATASET._target_={label_sets.__name__}.Sets", "TRAIN.AUTO_RESUME=True")
INDEX = index_labels(["tag"], [("b;a",), (None,), ("c; a",), (";",)], ";")
TARGETS = torch.tensor([[1.0, 0, 1], [-1, 1, 0], [-1, -1, -1], [0, 0, 0]])


def cells_of(path: Path) -> list[list[str]]:
    """The labels of each row."""
    with path.open(newline="") as file:
        return [row["animal"].split(";") for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    write_label_sets(folder / "images")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli(IMAGES) == 0
        assert cli(["evaluate", "runs/sets", "--checkpoint", "last"]) == 0
    return folder


def test_the_run_is_evaluated_predicted_and_exported_alike(
    trained: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    losses = lines_of(trained / "runs/sets", "val")
    found = json.loads((trained / "runs/sets/evaluations/last.json").read_text())
    assert found["logged"]["same"]
    assert losses[-1]["map/animal"] == found["metrics"]["map/animal"] > 0.9, "by chance it is 0.34"
    assert found["levels"]["animal"]["map"] == pytest.approx(found["metrics"]["map/animal"], abs=1e-6)
    assert found["levels"]["animal"]["macro_f1"] == pytest.approx(found["metrics"]["f1/animal"], abs=1e-6)
    assert json.loads((trained / "runs/sets/result.json").read_text())["headline"] == "map/animal"

    words = ["predict", "runs/sets", "--checkpoint", "last", "images/val*.png", "--output", "found.csv"]
    cow = found["classes"][1]
    truth = cells_of(trained / "images/val.csv")
    for threshold, f1 in ((0.5, cow["f1"]), (cow["best_threshold"], cow["best_f1"])):
        assert run(*words, f"--threshold={threshold}").code == 0
        cells = cells_of(trained / "found.csv")
        correct = sum("cow" in each and "cow" in other for each, other in zip(cells, truth, strict=True))
        assert 2 * correct / sum("cow" in each for each in [*cells, *truth]) == pytest.approx(f1)
    assert run(*words, "--path").code == 2


@pytest.mark.e2e  # seconds to import what writes ONNX
def test_exported_files_give_the_predictions(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)
    again = load_run("runs/sets", checkpoint="last", device="cpu")
    (seen,) = again.predict("images/val000.png", threshold=1e-6)
    for kind in ("onnx", "torch-export", "safetensors"):
        assert (again.export(kind, images=["images/val000.png"]).difference or 0) < 1e-6
    program = torch.export.load("runs/sets/export/model.pt2").module()
    probabilities = program(again.transform("images/val000.png")[None])["animal"][0]
    assert dict(seen.levels["animal"]) == pytest.approx(
        dict(zip(label_sets.NAMES, probabilities.tolist(), strict=True)), abs=1e-6
    )
    assert float(probabilities.sum().detach()) != pytest.approx(1, abs=1e-3), "not a softmax"
    (few,) = load_run("runs/sets/export/model.safetensors").predict(
        "images/val000.png", top=1, threshold=0.01
    )
    assert few.levels["animal"] == seen.levels["animal"][:1]


@pytest.mark.parametrize("loss", ["bce", "asymmetric"])
def test_autobatch_and_an_interruption_change_no_bit(run: Run, tmp_path: Path, loss: str) -> None:
    options = (*POINTS, f"LOSS.NAME={loss}", "DATA.BATCH_SIZE=16")
    assert run(*options, f"{NAME}whole").code == 0
    assert run(*options, f"{NAME}parts", "DATA.DATASET.interrupt_after=150").code == 130
    assert run(*options, f"{NAME}parts").code == 0
    assert (
        run(*options, f"{NAME}found", "DATA.AUTOBATCH.ENABLED=True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=16").code
        == 0
    )
    whole, *others = (tmp_path / "runs" / name for name in ("whole", "parts", "found"))
    for other in others:
        assert_same_bits(weights(whole), weights(other))
    assert [row["map/class"] for row in lines_of(whole, "val")] == [
        row["map/class"] for row in lines_of(others[0], "val")
    ]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("LOSS.NAME=cross_entropy", "LOSS.NAME"), ("LOSS.NAME=focal", "LOSS.NAME"),
        ("LOSS.CLASS_WEIGHTS=balanced", "LOSS.CLASS_WEIGHTS"), ("DATA.SAMPLER=balanced", "DATA.SAMPLER"),
        ("MODEL={NAME: test_resnet, HEAD: marginal}", "MODEL.HEAD"),
        ("DATA.DATASET.NAME=digits", "LABEL_SEPARATOR"), ("DATA.DATASET.LABEL_SEPARATOR=''", "SEPARATOR"),
        ("DATA.DATASET.RANKS=[animal,number]", "RANKS"),
    ],
)  # fmt: skip
def test_what_needs_one_label_says_so(
    trained: Path, run: Run, monkeypatch: pytest.MonkeyPatch, options: str, text: str
) -> None:
    monkeypatch.chdir(trained)
    outcome = run(*IMAGES, f"{NAME}bad", *re.split(r"(?<!:) (?!HEAD)", options))
    assert (outcome.code in (1, 2), text in outcome.err, "Traceback" in outcome.err) == (True, True, False)


@pytest.mark.parametrize("name", ["bce", "asymmetric"])
def test_losses_leave_out_what_is_unknown(name: str) -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = build_loss(LossConfig(NAME=name), INDEX.taxonomy)
    with pytest.raises(ConfigError, match="asymmetric"):
        build_loss(LossConfig(NAME="asymmetric"), ONE_RANK)
    parts = [loss(logits[:1], TARGETS[:1]), 3 * loss(logits[1:], TARGETS[1:])]
    torch.testing.assert_close(loss(logits, TARGETS), sum(parts) / 4)
    known = TARGETS >= 0
    one = {"bce": binary_cross_entropy_with_logits, "asymmetric": AsymmetricLossMultiLabel(reduction="sum")}[
        name
    ]
    total = one(logits[known], TARGETS[known]) * (known.sum() if name == "bce" else 1)
    torch.testing.assert_close(loss(logits, TARGETS), total / 12)
    (gradient,) = torch.autograd.grad(loss(logits, TARGETS), logits)
    assert torch.equal(gradient != 0, known)


def test_manifest_cells_and_mixing() -> None:
    targets, unknown = encode([("c;b",), (None,), (";",), ("b; ;x",)], INDEX)
    assert targets.tolist() == [[0, 1, 1], [-1] * 3, [0] * 3, [-1] * 3]
    assert unknown == {"x": [3]}
    assert LabelIndex.from_dict(json.loads(json.dumps(INDEX.as_dict()))) == INDEX
    cells = ["a", "a;b", "a;c", "b;a", "a;c", ";"] * 5
    listing = Listing("", Path(), [str(i) for i in range(30)], [(cell,) for cell in cells])
    _, val = hold_out(listing, 0.2, [], INDEX.taxonomy)
    assert len(val.paths) == 6
    assert {*";".join(cell or "" for (cell,) in val.lineages)} >= {*"abc"}
    mixed = Mixing([3], 1.0, 0, is_multilabel=True)(Batch(torch.zeros(4, 1, 2, 2), TARGETS)).targets
    assert torch.equal(mixed < 0, (TARGETS < 0) | (TARGETS.roll(1, 0) < 0))
    assert 0 < float(mixed[0, 0]) < 1
