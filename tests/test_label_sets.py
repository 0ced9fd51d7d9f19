"""Several labels for each image, from the manifest to predictions and exported files."""

import json

import pytest
import torch

from linnaeus.config.schema import AugmentConfig, LossConfig
from linnaeus.data.image_files import encode
from linnaeus.data.mixing import Mixing
from linnaeus.data.taxonomy import LabelIndex, index_labels
from linnaeus.inference.trained import load_run
from linnaeus.main import cli
from linnaeus.runtime.errors import ConfigError
from linnaeus.training.losses import build_loss
from tests.helpers.label_sets import NAMES, cells_of, write_label_sets
from tests.helpers.small_runs import NAME, lines_of
from tests.helpers.trained import ONE_LEVEL

IMAGES = (
    "DATA.DATASET={NAME: manifest, ROOT: images, LABEL_SEPARATOR: ';', LEVELS: [animal]}",
    "DATA.IMG_SIZE=16",
    "MODEL._target_=tests.helpers.label_sets.Pixels",
    "DATA.AUGMENT.CROP_SCALE=[1,1]",
    "DATA.AUGMENT.HFLIP=0",
    "DATA.BATCH_SIZE=32",
    "EXPERIMENT.DEVICE=cpu",
    "EXPERIMENT.NAME=sets",
    "TRAIN.EPOCHS=4",
    "OPTIMIZER.LR=0.01",
    "LOSS.NAME=bce",
    "DATA.AUTOBATCH={ENABLED: True, MAX_BATCH_SIZE: 32}",
)
INDEX = index_labels(["tag"], [("b;a",), (None,), ("c; a",), (";",)], ";")
TARGETS = torch.tensor([[1.0, 0, 1], [-1, 1, 0], [-1, -1, -1], [0, 0, 0]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    write_label_sets(folder / "images")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli(IMAGES) == 0
        assert cli(["evaluate", "runs/sets", "--checkpoint=last", "--trust-code"]) == 0
    return folder


def test_the_run_is_evaluated_and_predicted_alike(folder, run, tmp_path):
    found = json.loads((folder / "runs/sets/evaluations/last.json").read_text())
    logged = lines_of(folder / "runs/sets", "val")[-1]
    animal, cow = found["levels"]["animal"], found["classes"][1]
    assert found["logged"] == found["metrics"]
    assert logged["map/animal"] == found["metrics"]["map/animal"] == animal["map"] > 0.9, (
        "0.33 by chance"
    )
    assert logged["f1/animal"] == animal["macro_f1"]
    assert json.loads((folder / "runs/sets/result.json").read_text())["headline"] == "map/animal"

    predict = [
        "predict",
        f"{folder}/runs/sets",
        "--checkpoint=last",
        "--trust-code",
        f"{folder}/images/val*",
        "--output=p.csv",
    ]
    truth = ["cow" in cell for cell in cells_of(folder / "images/val.csv")]
    for threshold, f1 in ((0.5, cow["f1"]), (cow["best_threshold"], cow["best_f1"])):
        run(*predict, f"--threshold={threshold}").ok()
        cells = ["cow" in cell for cell in cells_of(tmp_path / "p.csv")]
        correct = sum(a and b for a, b in zip(cells, truth, strict=True))
        assert 2 * correct / (sum(cells) + sum(truth)) == pytest.approx(f1)
    assert run(*predict, "--path").code == 2


@pytest.mark.e2e  # seconds to import what writes ONNX
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11
def test_exported_files_give_the_predictions(folder):
    image = f"{folder}/images/val000.png"
    trained = load_run(folder / "runs/sets", device="cpu", trust_code=True)
    (seen,) = trained.predict(image, threshold=1e-6)
    for kind in ("onnx", "torch-export"):
        assert (trained.export(kind).difference or 0) < 1e-6
    program = torch.export.load(folder / "runs/sets/export/model.pt2").module()
    values = program(trained.transform(image)[None])["animal"][0].tolist()
    assert dict(seen.levels["animal"]) == pytest.approx(
        dict(zip(NAMES, values, strict=True)), abs=1e-6
    )
    assert sum(values) != pytest.approx(1, abs=1e-3), "not a softmax"


@pytest.mark.parametrize(
    ("option", "key", "code"),
    [
        ("LOSS.NAME=focal", "LOSS.NAME", 2),
        ("MODEL={NAME: test_resnet, HEAD: marginal}", "MODEL.HEAD", 2),
        ("DATA.DATASET.LABEL_SEPARATOR=''", "DATA.DATASET.LABEL_SEPARATOR", 2),
        ("DATA.DATASET.LEVELS=[animal,number]", "DATA.DATASET.LEVELS", 1),
    ],
)
def test_what_needs_one_label_names_its_key(folder, run, monkeypatch, option, key, code):
    monkeypatch.chdir(folder)
    outcome = run(*IMAGES, f"{NAME}bad", option)
    assert (outcome.code, key in outcome.err) == (code, True)


def asymmetric(logits, targets):
    """The sum of equation 7 of the paper, for gamma 1 and 4 and margin 0.05."""
    p = logits.sigmoid()
    low = (p - 0.05).clamp_min(0)
    of_positive, of_negative = (1 - p) * p.log(), low**4 * (1 - low).log()
    return -torch.where(targets == 1, of_positive, of_negative).sum()


def test_the_asymmetric_loss_leaves_out_what_is_unknown():
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    node, known = LossConfig(NAME="asymmetric"), TARGETS >= 0
    loss = build_loss(node, INDEX.taxonomy)(logits, TARGETS)
    torch.testing.assert_close(loss, asymmetric(logits[known], TARGETS[known]) / 12)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.equal(gradient != 0, known)
    with pytest.raises(ConfigError, match="asymmetric"):
        build_loss(node, ONE_LEVEL)


def test_manifest_cells_and_mixing():
    targets, unknown = encode([("c;b",), (None,), (";",), ("b; ;x",)], INDEX)
    assert (targets.tolist(), unknown) == ([[0, 1, 1], [-1] * 3, [0] * 3, [-1] * 3], {3: "x"})
    assert LabelIndex.from_dict(json.loads(json.dumps(INDEX.as_dict()))) == INDEX
    mixing = Mixing([3], AugmentConfig(MIXUP=1.0), is_multilabel=True)
    _, mixed = mixing(torch.zeros(4, 1, 2, 2), TARGETS, {"lam": 0.3})
    assert torch.equal(mixed < 0, (TARGETS < 0) | (TARGETS.roll(1, 0) < 0))
    assert 0 < float(mixed[0, 0]) < 1
