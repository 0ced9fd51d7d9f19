"""What is said about training: errors, warnings with a remedy, and what is switched on."""

import re

import pytest
import torch
from torch import nn

from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.batch_plan.effective_batch import Facts
from linnaeus.batch_plan.plan import plan_batches
from linnaeus.config.load import load_config
from linnaeus.config.schema import LossConfig, OptimizerConfig
from linnaeus.data.split_file import SPLIT_FILE, save_split
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.models.hierarchical import HierarchicalClassifier
from linnaeus.runtime.distributed import World
from linnaeus.size_search.planned_sizes import PlannedSizes
from linnaeus.training.accuracy import LossMeter
from linnaeus.training.build import check_loss_takes_outputs
from linnaeus.training.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    TrainingState,
    load_checkpoint,
)
from linnaeus.training.class_weights import class_weights
from linnaeus.training.losses import build_loss, logits_per_level
from linnaeus.training.optim import build_optimizer
from linnaeus.training.out_of_memory import memory_sentence
from linnaeus.training.report import settings_without_effect
from linnaeus.training.resume import (
    changed_samples,
    changes_of,
    check_changes,
    check_classes,
)
from tests.helpers.contents import whole
from tests.helpers.greedy import SPLIT, greedy, trainer_of
from tests.helpers.layouts import build, folders
from tests.helpers.messages import error_of

OWN = f"{__name__}.not_a_module"
TWO_LEVELS = Taxonomy(
    (Level("family", ("cats", "dogs")), Level("species", ("lion", "lynx", "wolf")))
)
ONE_LEVEL = Taxonomy(TWO_LEVELS.levels[1:])
FROZEN = "MODEL.FREEZE=backbone"
IN_VALIDATION = ("MODEL._target_=tests.helpers.greedy.GreedyInValidation", "MODEL.largest=8")


def not_a_module(params=None):
    return 3


OUT_OF_MEMORY = {
    "by default": (greedy(8), 16),
    "gradient checkpointing": (
        ("MODEL._target_=tests.helpers.greedy.Switchable", "MODEL.largest=8"),
        16,
    ),
    "one sample": ((SPLIT, "MODEL.largest=-1"), 1),
    "BatchNorm": ((SPLIT, *greedy(1), "MODEL.norm=BatchNorm1d"), 3),
    "in an update": ((SPLIT, "MODEL.where=update", "MODEL.largest=8"), 16),
    "in the first validation": (IN_VALIDATION, 16),
    "in a later validation": ((*IN_VALIDATION, "MODEL.from_sample=32"), 16),
}


def out_of_memory(folder, argv, size):
    """The error with which a training ends; what held the memory differs from machine to machine."""
    with trainer_of(folder, *argv, size=size) as trainer:
        text = error_of(trainer.fit)
    text = re.sub(r": \[?[^\n]*you tried to allocate[^\n]*", ": <torch's error>.", text)
    return re.sub(r"This process held [^\n]*", "<what held the memory>.", text)


def memory():
    """What held the memory, and where sizes come from."""
    state = {"parameters": 1 << 28, "buffers": 100}
    parts = {
        "held_bytes": 1 << 30,
        "outside_bytes": 3 << 30,
        "total_bytes": 9 << 30,
        "is_cpu": True,
    }
    result = AutoBatchResult(
        "val",
        8,
        certified=True,
        limited_by="memory",
        target_memory_fraction=0.7,
        budget_bytes=1 << 30,
        total_bytes=2 << 30,
        strategy="guided",
        seconds=1.0,
        trials=(),
    )
    config = load_config([]).config
    plan = plan_batches(config.TRAIN, config.OPTIMIZER, config.SCHEDULE, Facts(16, 1, 100, 0.1))
    origins = PlannedSizes({"val": result}, plan, "").origins(config.DATA)
    return {
        "memory": memory_sentence(state, **parts),
        **{
            f"size of {mode}": "\n".join([o.sentence, *o.alternatives])
            for mode, o in origins.items()
        },
    }


def state_of(width, **options):
    model = nn.Linear(width, 2)
    scaler = torch.amp.GradScaler("cpu", enabled=options.get("scaler", True))
    return TrainingState(model, nn.MSELoss(), torch.optim.SGD(model.parameters()), scaler, None)


def checkpoints(folder):
    """Checkpoints that cannot be read, written or used."""
    files = CheckpointFolder(folder)
    folder.mkdir()
    contents = {
        "is of something else": [1, 2],
        "holds code": {"progress": nn.Linear(1, 1)},
        "lacks an entry": {"progress": whole()["progress"]},
        "is of another version": whole(progress=whole()["progress"] | {"loss_scale": 1.0}),
    }
    found = {}
    for title, content in contents.items():
        torch.save(content, files.last)
        found[f"file {title}"] = error_of(load_checkpoint, files.last)
    found["the only file cannot be used"] = error_of(files.read_latest)
    torch.save(whole(weights=torch.ones(9)), files.last)
    files.last.write_bytes(
        files.last.read_bytes().replace(torch.ones(9).numpy().tobytes(), b"\1" * 36)
    )
    found["file has changed on the disk"] = error_of(load_checkpoint, files.last)
    for path in (files.last, files.previous):
        path.write_text("damaged")
    found["no file can be used"] = error_of(files.read_latest)
    (folder / "file").write_text("")
    found["not written"] = error_of(CheckpointFolder(folder / "file").save, whole())
    state = state_of(2).state_dict()
    found["another model"] = error_of(state_of(3).load_state_dict, state)
    changes = ["MODEL.WIDTH (2 in the checkpoint, 3 now)"]
    found["another model, by its keys"] = error_of(state_of(3).load_state_dict, state, changes)
    classes = {"taxonomy": {"levels": [{"name": "species", "classes": ["lion", "lynx", "puma"]}]}}
    found["other classes"] = error_of(check_classes, classes, ONE_LEVEL, folder)
    found["other levels"] = error_of(check_classes, classes, TWO_LEVELS, folder)
    for title, state, change in (
        ("own loss", {"criterion": {"centre": 1}}, "LOSS.scale (1 in the checkpoint, 2 now)"),
        ("other parameters", {}, "MODEL.FREEZE ('none' in the checkpoint, 'backbone' now)"),
    ):
        checkpoint = Checkpoint({"optimized": ["weight", "bias"][: 1 + bool(state)]}, state)
        checkpoint.changes = [change]
        found[title] = error_of(checkpoint.restore, state_of(2), World(torch.device("cpu")))
    for title, keys in (("rate", ["LR"]), ("optimizer", ["LR", "NAME"])):
        before, now = ({"OPTIMIZER": dict.fromkeys(keys, value)} for value in (1, 2))
        found[f"another {title}"] = error_of(check_changes, changes_of(before, now), None)
    return found


def other_samples(root):
    """What a resumed run says of images in another split, and of others."""
    data = build(folders(root, ["train/{}", "val/{}"], num=1))
    checkpoint, file = Checkpoint({"num_samples": 3}, {}), root / SPLIT_FILE
    save_split(data, file)
    assert changed_samples(checkpoint, data, root) == []
    text = file.read_text()
    file.write_text(text.replace(",val,", ",train,"))
    found = {"other splits": error_of(changed_samples, checkpoint, data, root)}
    file.write_text(text.replace("0.jpg", "1.jpg", 2))
    return found | {"other images": "\n".join(changed_samples(checkpoint, data, root))}


WEIGHTS = {
    "class": ("w.yaml", "family:\n  dgos: 3\n"),
    "level": ("w.yaml", "familie:\n  dogs: 3\n"),
    "value": ("w.yaml", "family:\n  dogs: many\n"),
    "sign": ("w.yaml", "family:\n  dogs: -1\n"),
    "all 0": ("w.yaml", "family:\n  dogs: 0\n  cats: 0\n"),
    "no levels": ("w.yaml", "family: 3\n"),
    "YAML": ("w.yaml", "family: [\n"),
    "JSON": ("w.json", '{"family": 1,}'),
    "no file": ("absent.yaml", ""),
}
LOSSES = {
    "weights of levels": (LossConfig(LEVEL_WEIGHTS=[1.0]), TWO_LEVELS),
    "no level": (LossConfig(LEVEL_WEIGHTS=[0.0, 0.0]), TWO_LEVELS),
    "no labels": (LossConfig(), None),
    "name": ({"_target_": "torch.nn.NoSuchLoss"}, None),
    "no module": ({"_target_": OWN}, None),
    "two levels": ({"_target_": "torch.nn.CrossEntropyLoss"}, TWO_LEVELS),
    "weights as text": ({"_target_": "torch.nn.CrossEntropyLoss", "weight": ["a"]}, ONE_LEVEL),
    "argument": ({"_target_": "torch.nn.CrossEntropyLoss", "WEIGHT": [1.0]}, ONE_LEVEL),
    "adjustment": (LossConfig(NAME="bce", LOGIT_ADJUSTMENT=1.0), ONE_LEVEL),
    "presence": (LossConfig(POS_WEIGHT="balanced"), ONE_LEVEL),
}
OPTIMIZERS = {
    "name": OptimizerConfig(NAME="adamww"),
    "name like none": OptimizerConfig(NAME="qqqqqq"),
    "argument": OptimizerConfig(KWARGS={"moment": 1}),
    "own": {"_target_": "torch.optim.SGDD"},
    "own argument": {"_target_": "torch.optim.SGD", "moment": 1},
    "own kind": {"_target_": OWN},
    "no layers": OptimizerConfig(LAYER_DECAY=0.5),
    "no heads": OptimizerConfig(HEAD_LR_SCALE=2.0),
}
NOTES = {
    "focal": (["LOSS.FOCAL_GAMMA=3"], "LOSS.NAME=focal"),
    "mixing": (["DATA.AUGMENT.MIX_OFF_EPOCHS=2"], "DATA.AUGMENT.MIXUP=0.5"),
    "schedule": (["SCHEDULE.STEP_EPOCHS=3", "SCHEDULE.GAMMA=0.2"], "SCHEDULE.NAME=step"),
    "early stopping": (["TRAIN.EARLY_STOPPING.METRIC=loss"], "TRAIN.EARLY_STOPPING.PATIENCE=3"),
    "unfreezing": (["TRAIN.UNFREEZE_EPOCH=2"], FROZEN),
    "unfreezing at once": (["TRAIN.UNFREEZE_EPOCH=1", FROZEN], "TRAIN.UNFREEZE_EPOCH=2"),
    "unfreezing late": (["TRAIN.UNFREEZE_EPOCH=5", "TRAIN.EPOCHS=4", FROZEN], "TRAIN.EPOCHS=5"),
}
"""Keys without effect, and what gives them one."""


def not_finite(*, scales):
    """The error with which a training ends whose loss is not finite, or whose gradient scaler collapses."""
    scaler = torch.amp.GradScaler("cpu", enabled=scales, init_scale=2.0**-5)
    meter = LossMeter(World(torch.device("cpu")), scaler)
    meter.add(torch.tensor(torch.nan))
    return error_of(meter.mean)


def test_messages(golden, tmp_path):
    messages = {
        f"loss not finite: {title}": not_finite(scales=scales)
        for title, scales in (("without a scaler", False), ("with a scaler", True))
    }
    messages |= {
        f"out of memory: {title}": out_of_memory(tmp_path / title, *case)
        for title, case in OUT_OF_MEMORY.items()
    }
    with trainer_of(tmp_path / "one", "MODEL.norm=BatchNorm1d", size=1) as trainer:
        messages["one sample for BatchNorm"] = error_of(trainer.train_epoch)
    messages |= memory()
    messages |= {
        f"checkpoint: {title}": text for title, text in checkpoints(tmp_path / "files").items()
    }
    messages |= {
        f"resumed with {title}": text for title, text in other_samples(tmp_path / "images").items()
    }
    targets = torch.tensor([[0, 0], [1, 1], [1, 2]])
    for title, (name, text) in WEIGHTS.items():
        if text:
            (tmp_path / name).write_text(text)
        messages[f"class weights: {title}"] = error_of(
            class_weights, str(tmp_path / name), TWO_LEVELS, targets
        )
    for title, (node, taxonomy) in LOSSES.items():
        messages[f"loss: {title}"] = error_of(build_loss, node, taxonomy)
    outputs = {"number": torch.zeros(4, 3), "names": {"family": 0, "genus": 0}, "kind": None}
    for title, output in outputs.items():
        messages[f"outputs: {title}"] = error_of(logits_per_level, output, ("family", "species"))
    for kind in ("NLLLoss", "MSELoss"):
        library = build_loss({"_target_": f"torch.nn.{kind}"}, ONE_LEVEL)
        messages[f"loss: targets of {kind}"] = error_of(
            library.check_takes_targets, 3, torch.device("cpu"), mixes=kind == "NLLLoss"
        )
    marginal = HierarchicalClassifier(nn.Flatten(), 4, [2, 3], parents=((0, 0, 1),))
    messages["loss: sigmoid"] = error_of(check_loss_takes_outputs, LossConfig(NAME="bce"), marginal)
    for title, node in OPTIMIZERS.items():
        messages[f"optimizer: {title}"] = error_of(
            build_optimizer, node, nn.Sequential(nn.Linear(2, 2))
        )
    frozen = nn.Linear(2, 2).requires_grad_(False)
    messages["optimizer: nothing trains"] = error_of(build_optimizer, OptimizerConfig(), frozen)
    for title, (argv, remedy) in NOTES.items():
        messages[f"no effect: {title}"] = "\n".join(
            settings_without_effect(load_config(argv).config)
        )
        assert list(settings_without_effect(load_config([*argv, remedy]).config)) == []
    golden("training", messages, folder=tmp_path, here=__name__)


@pytest.mark.parametrize(
    "argv", [[], ["MODEL._target_=a.B", "LOSS._target_=a.C", "OPTIMIZER._target_=a.D"]]
)
def test_a_plain_training_has_no_warning(argv):
    config = load_config(argv).config
    assert list(settings_without_effect(config)) == []
