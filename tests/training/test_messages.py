"""What is said about training: errors, warnings with a remedy, and what is switched on."""

import re
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from linnaeus.config.load import load_config
from linnaeus.config.schema import LossConfig, OptimizerConfig
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.models.hierarchical import HierarchicalClassifier
from linnaeus.size_search.planned_sizes import size_origin
from linnaeus.training.build import check_loss_takes_outputs
from linnaeus.training.checkpoint import CheckpointFolder, load_checkpoint
from linnaeus.training.class_weights import class_weights
from linnaeus.training.losses import build_loss, logits_per_level
from linnaeus.training.optim import build_optimizer
from linnaeus.training.report import settings_without_effect
from tests.helpers.contents import whole
from tests.helpers.greedy import SPLIT, greedy, trainer_of
from tests.helpers.messages import error_of
from tests.helpers.searches import result

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
    "gradient checkpointing": (("MODEL._target_=tests.helpers.greedy.Switchable", *greedy(8)), 16),
    "one sample": ((SPLIT, "MODEL.largest=-1"), 1),
    "BatchNorm": ((SPLIT, *greedy(1), "MODEL.norm=BatchNorm1d"), 3),
    "in an update": ((SPLIT, "MODEL.where=update", "MODEL.largest=8"), 16),
    "in the first validation": (IN_VALIDATION, 16),
}


def out_of_memory(folder, argv, size):
    """The error with which a training ends; what held the memory differs from machine to machine."""
    with trainer_of(folder, *argv, size=size) as trainer:
        text = error_of(trainer.fit)
    text = re.sub(r": \[?[^\n]*you tried to allocate[^\n]*", ": <torch's error>.", text)
    return re.sub(r"This process held [^\n]*", "<what held the memory>.", text)


def size_of_val():
    """Where a size comes from that AutoBatch has found."""
    found = replace(result(8), budget_bytes=1 << 30, total_bytes=2 << 30)
    origin = size_origin("val", load_config([]).config.DATA, found)
    return "\n".join([origin.sentence, *origin.alternatives])


def checkpoints(folder):
    """Checkpoints that cannot be read or written."""
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
    return found


WEIGHTS = {
    "class": "family:\n  dgos: 3\n",
    "value": "family:\n  dogs: many\n",
    "sign": "family:\n  dogs: -1\n",
    "all 0": "family:\n  dogs: 0\n  cats: 0\n",
    "YAML": "family: [\n",
}
"""Files with weights of classes."""
LOSSES = {
    "weights of levels": (LossConfig(LEVEL_WEIGHTS=[1.0]), TWO_LEVELS),
    "no level": (LossConfig(LEVEL_WEIGHTS=[0.0, 0.0]), TWO_LEVELS),
    "no labels": (LossConfig(), None),
    "no module": ({"_target_": OWN}, None),
    "two levels": ({"_target_": "torch.nn.CrossEntropyLoss"}, TWO_LEVELS),
    "argument": ({"_target_": "torch.nn.CrossEntropyLoss", "WEIGHT": [1.0]}, ONE_LEVEL),
    "adjustment": (LossConfig(NAME="bce", LOGIT_ADJUSTMENT=1.0), ONE_LEVEL),
    "presence": (LossConfig(POS_WEIGHT="balanced"), ONE_LEVEL),
}
OUTPUTS = {"number": torch.zeros(4, 3), "names": {"family": 0, "genus": 0}, "kind": None}
OPTIMIZERS = {
    "name": OptimizerConfig(NAME="adamww"),
    "argument": OptimizerConfig(KWARGS={"moment": 1}),
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


def errors_of_parts(folder):
    """What is said when losses, their weights of classes and optimizers are built."""
    path, targets, found = folder / "weights.yaml", torch.tensor([[0, 0], [1, 1], [1, 2]]), {}
    weigh = partial(error_of, class_weights, str(path), TWO_LEVELS, targets)
    found["class weights: no file"] = weigh()
    for title, text in WEIGHTS.items():
        path.write_text(text)
        found[f"class weights: {title}"] = weigh()
    for title, case in LOSSES.items():
        found[f"loss: {title}"] = error_of(build_loss, *case)
    for title, output in OUTPUTS.items():
        found[f"outputs: {title}"] = error_of(logits_per_level, output, TWO_LEVELS.names)
    for kind in ("NLLLoss", "MSELoss"):
        check = build_loss({"_target_": f"torch.nn.{kind}"}, ONE_LEVEL).check_takes_targets
        device, mixes = torch.device("cpu"), kind == "NLLLoss"
        found[f"loss: targets of {kind}"] = error_of(check, 3, device, mixes=mixes)
    marginal = HierarchicalClassifier(nn.Flatten(), 4, [2, 3], parents=((0, 0, 1),))
    for title, node in (
        ("sigmoid", LossConfig(NAME="bce")),
        ("offsets", LossConfig(LOGIT_ADJUSTMENT=1.0)),
    ):
        found[f"loss: {title}"] = error_of(check_loss_takes_outputs, node, marginal)
    model = nn.Sequential(nn.Linear(2, 2))
    for title, node in OPTIMIZERS.items():
        found[f"optimizer: {title}"] = error_of(build_optimizer, node, model)
    frozen = model.requires_grad_(False)
    found["optimizer: nothing trains"] = error_of(build_optimizer, OptimizerConfig(), frozen)
    return found


def test_messages(golden, tmp_path):
    messages = {"size of val": size_of_val()} | errors_of_parts(tmp_path)
    for title, case in OUT_OF_MEMORY.items():
        messages[f"out of memory: {title}"] = out_of_memory(tmp_path / title, *case)
    with trainer_of(tmp_path / "one", "MODEL.norm=BatchNorm1d", size=1) as trainer:
        messages["one sample for BatchNorm"] = error_of(trainer.train_epoch)
    for title, text in checkpoints(tmp_path / "files").items():
        messages[f"checkpoint: {title}"] = text
    for title, (argv, remedy) in NOTES.items():
        notes = settings_without_effect(load_config(argv).config)
        messages[f"no effect: {title}"] = "\n".join(notes)
        assert list(settings_without_effect(load_config([*argv, remedy]).config)) == []
    golden("training", messages, folder=tmp_path, here=__name__)
