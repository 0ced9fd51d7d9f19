"""Every key that a resumed run takes with another value is in force, or the run is refused."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from linnaeus.autobatch.state.rng import rng_state
from linnaeus.config.schema import Config
from linnaeus.data.datasets import build_data
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.rng import seed_all
from linnaeus.training.build import assemble
from linnaeus.training.checkpoint import CheckpointFolder, TrainingProgress
from linnaeus.training.resume import (
    check_classes,
    find_checkpoint,
    flat,
    restore_generators,
    resumed_nodes,
    resumed_progress,
)
from tests.helpers.bits import bits
from tests.helpers.configs import load
from tests.helpers.contents import whole

ALONE = World(torch.device("cpu"))
TINY = (
    "MODEL.NAME=test_resnet",
    "DATA.DATASET.NAME=synthetic",
    "DATA.DATASET.NUM_SAMPLES=24",
    "DATA.DATASET.NUM_SAMPLES_VAL=8",
    "DATA.DATASET.NUM_CLASSES=[2,6]",
    "DATA.IMG_SIZE=32",
)
FROZEN = "MODEL.FREEZE=backbone"
ONE_LEVEL = "DATA.DATASET.NUM_CLASSES=[3]"
TORCHS = (ONE_LEVEL, "LOSS._target_=torch.nn.CrossEntropyLoss")


class Centres(nn.Module):
    """A loss of one's own with a state."""

    def __init__(self, scale=1.0, momentum=0.5):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("centre", torch.tensor(scale))

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs[-1], targets[:, -1])


OWN = f"LOSS._target_={__name__}.Centres"

SGD = ("~OPTIMIZER", "OPTIMIZER._target_=torch.optim.SGD", "OPTIMIZER.lr=0.1")

IN_FORCE = {
    "LOSS.NAME": ((), "focal"),
    "LOSS.LABEL_SMOOTHING": ((), "0.2"),
    "LOSS.FOCAL_GAMMA": (("LOSS.NAME=focal",), "3"),
    "LOSS.CLASS_WEIGHTS to a file": (("LOSS.CLASS_WEIGHTS=balanced",), "weights.yaml"),
    "LOSS.CLASS_WEIGHTS to none": (("LOSS.CLASS_WEIGHTS=balanced",), "null"),
    "LOSS.EFFECTIVE_BETA": (
        ("LOSS.CLASS_WEIGHTS=effective", "DATA.DATASET.UNKNOWN_FRACTION=0.6"),
        "0.5",
    ),
    "LOSS.LOGIT_ADJUSTMENT": ((), "1"),
    "LOSS.POS_WEIGHT": (("LOSS.NAME=bce",), "balanced"),
    "LOSS.LEVEL_WEIGHTS": ((), "[1,0]"),
    "LOSS.weight": ((*TORCHS, "LOSS.weight=[1,1,1]"), "[1,2,3]"),
    "OPTIMIZER.LR": (("TRAIN.RESUME_WITH=lr",), "0.5"),
    "OPTIMIZER.WEIGHT_DECAY": (("TRAIN.RESUME_WITH=lr",), "0.5"),
    "OPTIMIZER.lr": ((*SGD, "TRAIN.RESUME_WITH=lr"), "0.2"),
    "TRAIN.AMP": ((), "fp16"),
    "TRAIN.AMP to none": (("TRAIN.AMP=fp16",), "off"),
    "TRAIN.CLIP_GRAD_NORM": ((), "2"),
    "TRAIN.EMA.ENABLED": ((), "True"),
    "TRAIN.EMA.ENABLED to none": (("TRAIN.EMA.ENABLED=True",), "False"),
    "TRAIN.EMA.DECAY": (("TRAIN.EMA.ENABLED=True",), "0.5"),
    "TRAIN.EMA.SWA_EPOCHS": (("TRAIN.EMA.ENABLED=True",), "5"),
    "TRAIN.UNFREEZE_EPOCH": ((FROZEN, "TRAIN.UNFREEZE_EPOCH=5"), "7"),
    "MODEL.FREEZE": ((FROZEN, "TRAIN.UNFREEZE_EPOCH=5"), "backbone.bn1.*"),
    "MODEL.DROP_RATE": ((), "0.5"),
    "MODEL.DROP_PATH_RATE": ((), "0.5"),
    "MODEL.KWARGS": ((), "{act_layer: gelu}"),
}
"""Keys with what was set before, and the new value."""
REFUSED = {
    "OPTIMIZER.NAME with another rate": (("TRAIN.RESUME_WITH=lr",), "sgd"),
    "OPTIMIZER.WEIGHT_DECAY of none": (("TRAIN.RESUME_WITH=lr",), "0"),
    "OPTIMIZER.lr": (SGD, "0.2"),
    "MODEL.NAME": ((), "test_vit"),
    "MODEL.KWARGS with other shapes": ((), "{channels: [32, 48, 48, 64]}"),
    "MODEL.HEAD": ((), "marginal"),
    "MODEL.FREEZE": ((), "backbone"),
    "MODEL.FREEZE of equal shapes": (("MODEL.FREEZE=*.bn1.weight",), "*.bn1.bias"),
    "TRAIN.UNFREEZE_EPOCH": ((FROZEN,), "5"),
    "LOSS.momentum": ((OWN,), "0.25"),
}
READ_WHERE_USED = {
    "TRAIN.SYNC_BATCHNORM",
    "TRAIN.OVERFIT_BATCHES",
    "TRAIN.EMA.VALIDATE_RAW",
    "MODEL.TEACHER",
    "LOSS.DISTILL_WEIGHT",
    "LOSS.DISTILL_TEMPERATURE",
    "TRAIN.EARLY_STOPPING.PATIENCE",
    "TRAIN.EARLY_STOPPING.METRIC",
    "TRAIN.EARLY_STOPPING.MIN_DELTA",
}
"""No object with a state takes these."""


def built(config):
    seed_all(0)
    data = build_data(config.DATA, seed=0)
    return assemble(
        config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, data, ALONE, load_weights=False
    )


def in_force(assembly):
    """The values of an assembly that no training changes."""
    loss = assembly.criterion
    parts = (
        [sorted((group | {"params": None}).items()) for group in assembly.optimizer.param_groups],
        (loss, vars(loss).keys(), [*loss.named_buffers()]),
        [getattr(loss, name, 0) for name in ("level_weights", "label_smoothing", "gamma")],
        assembly.scaler.is_enabled(),
        assembly.ema and (assembly.ema._average.decay, assembly.ema._equal_from),
        (assembly.train_step.precision, assembly.train_step.clip_grad_norm),
        assembly.model,
        vars(assembly.freezing) | {"_model": None},
        assembly.headline,
    )
    return [repr(part) for part in parts]


def save(folder, config):
    """Save a checkpoint of a run, as the trainer does."""
    assembly, nodes = built(config), resumed_nodes(config)
    content = whole(state=assembly.state_dict(), config=nodes, optimized=assembly.optimized)
    folder.save(content)
    return assembly


def resume(folder, config):
    resume_with = config.TRAIN.RESUME_WITH
    checkpoint = find_checkpoint(folder, resumed_nodes(config), resume_with, ALONE)
    assembly = built(config)
    checkpoint.restore(assembly, ALONE)
    return assembly


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("weights.yaml").write_text("level2: {level2-0: 5}\n")
    return CheckpointFolder(tmp_path / "checkpoints")


@pytest.mark.parametrize("title", IN_FORCE)
def test_the_new_value_is_in_force(folder, title):
    before, value = IN_FORCE[title]
    now = (*before, f"{title.split()[0]}={value}")
    earlier = in_force(save(folder, load(*TINY, *before)))
    resumed, fresh = resume(folder, load(*TINY, *now)), built(load(*TINY, *now))
    assert in_force(resumed) == in_force(fresh)
    assert in_force(fresh) != earlier, "the test would not see another value"


@pytest.mark.parametrize("title", REFUSED)
def test_or_the_run_is_refused_by_the_key(folder, title):
    before, value = REFUSED[title]
    key = title.split()[0]
    save(folder, load(*TINY, *before))
    with pytest.raises(ConfigError) as caught:
        resume(folder, load(*TINY, *before, f"{key}={value}"))
    assert caught.value.exit_code == 2
    assert key in str(caught.value)


@pytest.mark.parametrize("argv", [("LOSS.CLASS_WEIGHTS=balanced",), (OWN, "LOSS.scale=3")])
def test_nothing_changed_is_resumed(folder, argv):
    config = load(*TINY, *argv)
    saved = built(config)
    with torch.no_grad():
        for buffer in saved.criterion.buffers():
            buffer.mul_(2)
    folder.save(whole(state=saved.state_dict(), config=resumed_nodes(config)))
    resumed, expected = resume(folder, config), saved if OWN in argv else built(config)
    assert bits(resumed.model.state_dict()) == bits(saved.model.state_dict())
    assert bits(resumed.criterion.state_dict()) == bits(expected.criterion.state_dict())


FIXED_NODES = (
    "EXPERIMENT",
    "OPTIMIZER",
    "SCHEDULE",
    "MODEL.LORA",
    "MODEL.WEIGHTS",
    "MODEL.PRETRAINED",
)
KEYS = {key for key in flat(resumed_nodes(Config())) if not key.startswith("DATA.")}
REFUSED_BY_DEFAULT = {key for key in KEYS if key.startswith(FIXED_NODES)}
assert {"EXPERIMENT.SEED", "SCHEDULE.NAME", "MODEL.LORA.RANK"} <= REFUSED_BY_DEFAULT


RATES = {
    "OPTIMIZER.LR",
    "OPTIMIZER.WEIGHT_DECAY",
    "OPTIMIZER.LR_SCALING",
    "OPTIMIZER.WEIGHT_DECAY_SCALING",
    "OPTIMIZER.BASE_BATCH_SIZE",
    "SCHEDULE.NAME",
    "SCHEDULE.WARMUP_STEPS",
}


def with_another(key):
    """The nodes of a configuration with another value of a key."""
    changed = OmegaConf.create(resumed_nodes(Config()))
    OmegaConf.update(changed, key, "another")
    return OmegaConf.to_container(changed)


@pytest.mark.parametrize("key", sorted(REFUSED_BY_DEFAULT))
def test_another_value_of_a_fixed_key_is_refused_by_its_key(folder, key):
    folder.save(whole(config=resumed_nodes(Config())))
    with pytest.raises(ConfigError, match=re.escape(key)) as caught:
        find_checkpoint(folder, with_another(key), None, ALONE)
    is_rate = key.startswith("SCHEDULE.") or key in RATES
    assert ("TRAIN.RESUME_WITH" in str(caught.value)) == is_rate, "the remedy"


@pytest.mark.parametrize("key", sorted(RATES))
def test_another_rate_is_taken_where_it_is_asked_for(folder, key, caplog):
    folder.save(whole(config=resumed_nodes(Config())))
    with caplog.at_level("INFO"):
        find_checkpoint(folder, with_another(key), "lr", ALONE)
    assert key in caplog.text
    with pytest.raises(ConfigError, match=r"OPTIMIZER\.NAME"):
        find_checkpoint(folder, with_another("OPTIMIZER.NAME"), "lr", ALONE)


def test_every_key_of_a_checkpoint_is_tried():
    tried = {title.split()[0] for title in (*IN_FORCE, *REFUSED)}
    assert KEYS - tried - REFUSED_BY_DEFAULT - READ_WHERE_USED == set()


def test_a_key_that_a_checkpoint_lacks_has_its_default(folder):
    before, now = resumed_nodes(Config()), resumed_nodes(Config())
    del before["OPTIMIZER"]["LAYER_DECAY"], before["MODEL"]["FREEZE"]
    folder.save(whole(config=before))
    assert find_checkpoint(folder, now, None, ALONE).changes == []
    now["OPTIMIZER"]["LAYER_DECAY"] = 0.5
    with pytest.raises(ConfigError, match=r"OPTIMIZER.LAYER_DECAY"):
        find_checkpoint(folder, now, None, ALONE)


def test_classes_in_another_order_are_refused():
    before, now = (Taxonomy((Level("piece", (*names,)),)) for names in ("abc", "bac"))
    spec = {"taxonomy": dataclasses.asdict(before)}
    check_classes(spec, before, Path("runs/a"))
    with pytest.raises(ConfigError):
        check_classes(spec, now, Path("runs/a"))


# --- what else is taken from a checkpoint ---


def test_generators_are_restored_or_seeded_if_rank_count_differs():
    seed_all(5)
    states, expected = [rng_state(ALONE.device)], torch.rand(1).item()

    def drawn(seed, step, world):
        restore_generators({"rng": states, "progress": {"step": step}}, world, seed)
        return torch.rand(1).item()

    assert drawn(1, 7, ALONE) == expected
    first, second = (World(ALONE.device, rank, 2) for rank in range(2))
    cases = ((1, 7, first), (1, 7, second), (1, 8, first), (2, 7, first))
    numbers = [drawn(*case) for case in cases]
    assert len({*numbers, expected}) == 5
    assert [drawn(*case) for case in cases] == numbers


def test_the_best_of_another_metric_is_forgotten():
    stopping = Config().TRAIN.EARLY_STOPPING
    config = {"TRAIN": {"EARLY_STOPPING": dataclasses.asdict(stopping)}}
    saved = whole(headline="top1/a", config=config)
    best = {"best": [(0.5, -1.0, 1)], "best_epoch": 1, "watched_best": 0.5, "num_stale": 2}
    saved["progress"] |= best
    assert vars(resumed_progress(saved, "top1/a", stopping)) == saved["progress"]
    assert vars(resumed_progress(saved, "top1/b", stopping)) == vars(TrainingProgress(1))
