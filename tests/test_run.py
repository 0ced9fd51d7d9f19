import json

import pytest
import yaml

from linnaeus.main import cli
from tests.helpers.datasets import write_image
from tests.helpers.run_files import names
from tests.helpers.runs import SMALL, assert_same_bits, weights
from tests.helpers.small_runs import lines_of
from tests.helpers.trained import write_images

AUTOBATCH = ("DATA.AUTOBATCH.ENABLED", "True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=24")
OWN = "tests.cli.tiny"
e2e, slow = pytest.mark.e2e, pytest.mark.slow


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """The folder of a run whose sizes AutoBatch has found; the tests that use it only read."""
    folder = tmp_path_factory.mktemp("searched")
    own = ("TRAIN.EMA.ENABLED=True", "MODEL.DROP_RATE=0.1", "DATA.AUGMENT.ROTATION=10")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "linnaeus.autobatch.trial.MIN_TIMED_S", 0.0
        )  # how fast a size is does not matter
        assert cli([*SMALL, *AUTOBATCH, *own, f"EXPERIMENT.OUTPUT_DIR={folder}"]) == 0
    return folder / "small"


def test_files_of_a_run(searched):
    assert names(searched) == {
        "config.yaml",
        "model.json",
        "autobatch.json",
        "metrics.jsonl",
        "result.json",
        "run.json",
        "checkpoints",
        "logs",
    }
    assert names(searched / "checkpoints") == {"last.pt", "previous.pt", "best.pt"}
    found = json.loads((searched / "autobatch.json").read_text())
    assert found.keys() == {"train", "val", "environment"}
    train = found["train"]
    assert (train["batch_size"], train["limited_by"]) == (24, "max_batch_size")
    assert (found["val"]["batch_size"], found["val"]["limited_by"]) == (31, "dataset")
    config = yaml.safe_load((searched / "config.yaml").read_text())
    assert (config["DATA"]["BATCH_SIZE"], config["DATA"]["BATCH_SIZE_VAL"]) == (24, 31)
    assert [record["step"] for record in lines_of(searched)] == [4, 8]
    result = json.loads((searched / "result.json").read_text())
    *_, last = lines_of(searched, "val")
    assert last["epoch"] == 2
    assert last.items() >= result["metrics"].items()
    assert (result["headline"], result["effective_batch"]) == ("top1/level2", 24)
    assert result["training_s"] * result["images_per_s"] == pytest.approx(2 * 96, rel=0.05)


def test_the_saved_configuration_trains_the_same_bits(searched, run, tmp_path):
    """The search has left no trace in the training that followed."""
    saved = ("--cfg", str(searched / "config.yaml"), f"EXPERIMENT.OUTPUT_DIR={tmp_path}")
    run(*saved, "DATA.AUTOBATCH.ENABLED=False", "EXPERIMENT.NAME=again").ok()
    again = tmp_path / "again"
    for name in ("last.pt", "best.pt"):
        assert_same_bits(weights(searched, name), weights(again, name))


def test_grey_photographs_with_the_preset(run, tmp_path):
    """A flat folder of grey images, of which one is damaged, needs little but its path."""
    for number in range(20):
        write_image(tmp_path / "grey" / ("cat", "dog")[number % 2] / f"{number}.png", number, "L")
    (tmp_path / "grey/cat/broken.png").write_text("no image")
    outcome = run(
        "data=imagefolder",
        "DATA.ON_BAD_IMAGE=skip",
        "DATA.DATASET.ROOT=grey",
        "DATA.DATASET.CHANNELS",
        "1",
        "DATA.IMG_SIZE=32",
        "MODEL.NAME=test_resnet",
        "DATA.BATCH_SIZE=4",
        "TRAIN.EPOCHS=1",
        "EXPERIMENT.DEVICE=cpu",
        "LOSS._target_=torch.nn.CrossEntropyLoss",
        "LOSS.weight=[1,3]",
    ).ok()
    assert "workers" not in outcome.out + outcome.err
    assert "broken.png" in outcome.out


SWITCHES = {
    "TRAIN.AMP=bf16 TRAIN.CHANNELS_LAST=True": e2e,
    "TRAIN.GRADIENT_CHECKPOINTING=True TRAIN.ACCUMULATION_STEPS=4": e2e,
    "DATA.DATASET.CHANNELS=1 DATA.IMG_SIZE=[32,48] DATA.NUM_WORKERS=1": e2e,
    "TRAIN.CLIP_GRAD_NORM=None OPTIMIZER.NAME=lamb SCHEDULE.NAME=constant TRAIN.DETERMINISTIC=True": slow,
    "MODEL.NAME=test_vit MODEL.DROP_PATH_RATE=0.1 LOSS.LABEL_SMOOTHING=0.1 LOSS.LEVEL_WEIGHTS=[1,2]": slow,
    "DATA.DATASET.NUM_CLASSES=[3] LOSS._target_=torch.nn.CrossEntropyLoss LOSS.weight=[1.0,2,0.5]": slow,
}


@pytest.mark.parametrize(
    "options", [pytest.param(text, marks=mark) for text, mark in SWITCHES.items()]
)
def test_switches(run, options):
    run(*SMALL, "TRAIN.EPOCHS=1", *options.split(), *AUTOBATCH).ok()


IMAGES = "DATA.DATASET.NAME=imagefolder DATA.DATASET.ROOT="
BAD = [
    (IMAGES + "nowhere MODEL.NAME resnet5O", 2, "resnet50"),  # names are checked before the data
    (IMAGES + "images", 1, "images/b/000.png"),
    ("OPTIMIZER.LR=1e9 OPTIMIZER.NAME=sgd TRAIN.CLIP_GRAD_NORM=None", 1, "OPTIMIZER.LR"),
    (
        "DATA.AUTOBATCH.ENABLED=True DATA.AUTOBATCH.MEMORY_LIMIT_GB=0.05",
        3,
        "DATA.AUTOBATCH.MEMORY_LIMIT_GB",
    ),
]


@pytest.mark.parametrize(("options", "code", "text"), BAD)
def test_a_mistake_has_its_exit_code_and_names_its_key(run, tmp_path, options, code, text):
    write_images(tmp_path / "images/a", 4)
    write_images(tmp_path / "images/b", 4)[0].write_text("damaged")
    outcome = run(*SMALL, *options.split())
    assert outcome.code == code
    assert text in outcome.err
    assert "Traceback" not in outcome.err + outcome.out
    assert (tmp_path / "runs").exists() == ("LR=1e9" in options), (
        "only a step that is done leaves a folder"
    )


def test_a_model_with_too_few_outputs_is_refused(run):
    outcome = run(
        f"DATA.DATASET._target_={OWN}.Points",
        "MODEL._target_=torch.nn.Linear",
        "MODEL.in_features=2",
        "MODEL.out_features=3",
        "EXPERIMENT.DEVICE=cpu",
    )
    assert outcome.code == 2
    assert "[batch, 4]" in outcome.err
