"""What a resumed run may change, and what is said about it."""

import dataclasses

import pytest
import torch

from linnaeus.autobatch.state.rng import rng_state
from linnaeus.config.schema import Config, LossConfig, ModelConfig, OptimizerConfig, ScheduleConfig
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.rng import seed_all
from linnaeus.training.checkpoint import CheckpointFolder, TrainingProgress
from linnaeus.training.resume import (
    changes_of,
    check_changes,
    find_checkpoint,
    is_finished,
    restore_generators,
    resumed_nodes,
    resumed_progress,
)
from tests.helpers.contents import whole

CPU = torch.device("cpu")
ALONE = World(CPU)


def nodes_of(**options):
    """Nodes with some keys set, such as `OPTIMIZER_LR`."""
    nodes = {
        "MODEL": ModelConfig,
        "LOSS": LossConfig,
        "OPTIMIZER": OptimizerConfig,
        "SCHEDULE": ScheduleConfig,
    }
    values = {name: {} for name in nodes}
    for option, value in options.items():
        name, _, key = option.partition("_")
        values[name][key] = value
    return {name: dataclasses.asdict(kind(**values[name])) for name, kind in nodes.items()}


def refusal(resume_with, now, before=None):
    """The message for a run that may not be resumed."""
    with pytest.raises(ConfigError) as caught:
        check_changes(changes_of(before or nodes_of(), now), resume_with)
    return str(caught.value)


def test_nodes_are_plain_values_that_a_checkpoint_can_hold(tmp_path):
    nodes = resumed_nodes(Config(MODEL={"_target_": "a.B", "width": 3}))
    assert nodes["MODEL"]["width"] == 3
    torch.save(nodes, tmp_path / "nodes.pt")
    assert torch.load(tmp_path / "nodes.pt", weights_only=True) == nodes


@pytest.mark.parametrize(("value", "is_refused"), [(None, False), (0.5, True)])
def test_a_key_that_the_checkpoint_does_not_know_has_its_default(tmp_path, value, is_refused):
    before, now = nodes_of(), nodes_of(OPTIMIZER_LAYER_DECAY=value)
    del before["OPTIMIZER"]["LAYER_DECAY"], before["MODEL"]["FREEZE"]
    folder = CheckpointFolder(tmp_path)
    folder.save(whole(config=before))
    if is_refused:
        with pytest.raises(ConfigError, match=r"OPTIMIZER.LAYER_DECAY"):
            find_checkpoint(folder, now, None, ALONE)
        return
    checkpoint = find_checkpoint(folder, now, None, ALONE)
    assert checkpoint is not None
    assert checkpoint.changes == []


RATES = {
    "OPTIMIZER_LR": (0.01, ("0.002", "0.01")),
    "OPTIMIZER_LR_SCALING": ("linear", ("none", "linear")),
    "SCHEDULE_WARMUP_STEPS": (3, ("None", "3")),
}
OTHERS = {
    "OPTIMIZER_NAME": ("sgd", ("adamw", "sgd")),
    "OPTIMIZER_KWARGS": ({"betas": [0.8]}, ("not set", "0.8")),
}


@pytest.mark.parametrize("option", RATES | OTHERS)
def test_another_rate_is_refused_unless_it_is_asked_for_and_another_optimizer_always(
    option, caplog
):
    value, texts = (RATES | OTHERS)[option]
    now = nodes_of(**{option: value})
    message = refusal(None, now)
    assert option.replace("_", ".", 1) in message
    assert all(text in message for text in texts)
    assert ("TRAIN.RESUME_WITH" in message) == (option in RATES)  # a remedy
    if option in OTHERS:
        assert "OPTIMIZER.LR (" not in refusal("lr", nodes_of(**{option: value}, OPTIMIZER_LR=0.5))
        return
    with caplog.at_level("INFO"):
        check_changes(changes_of(nodes_of(), now), "lr")
    assert option.replace("_", ".", 1) in caplog.text


def test_an_optimizer_of_the_users_own_may_change_its_rate():
    before, now = ({"OPTIMIZER": {"_target_": "torch.optim.SGD", "lr": lr}} for lr in (0.1, 0.2))
    assert "OPTIMIZER.lr" in refusal(None, now, before)
    check_changes(changes_of(before, now), "lr")
    assert "OPTIMIZER._target_" in refusal("lr", nodes_of(), before)


def test_model_and_loss_may_change_where_the_state_fits(tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(whole(config=nodes_of(), state={}))
    now = nodes_of(MODEL_DROP_RATE=0.5, LOSS_LABEL_SMOOTHING=0.1)
    checkpoint = find_checkpoint(checkpoints, now, None, ALONE)
    assert checkpoint is not None
    assert [change.split()[0] for change in checkpoint.changes] == [
        "MODEL.DROP_RATE",
        "LOSS.LABEL_SMOOTHING",
    ]


@pytest.mark.parametrize(
    ("epochs_done", "num_epochs", "has_result", "finished"),
    [(3, 3, True, True), (3, 2, True, True), (2, 3, True, False), (3, 3, False, False)],
)
def test_a_run_is_finished_when_its_epochs_and_its_result_are_there(
    tmp_path, epochs_done, num_epochs, has_result, finished
):
    if has_result:
        (tmp_path / "result.json").write_text("{}")
    progress, train = (
        TrainingProgress(epochs_done),
        dataclasses.replace(Config().TRAIN, EPOCHS=num_epochs),
    )
    assert is_finished(progress, train, tmp_path / "result.json", ALONE) is finished


def test_generators_are_restored_on_as_many_ranks_and_seeded_on_others():
    seed_all(5)
    states = [rng_state(CPU)]
    expected = torch.rand(3)
    content = {"rng": states, "progress": {"step": 7}}
    restore_generators(content, ALONE, 1)
    assert torch.equal(torch.rand(3), expected)
    drawn = []
    for rank, step, seed in [(0, 7, 1), (1, 7, 1), (0, 8, 1), (0, 7, 2), (0, 7, 1)]:
        restore_generators(content | {"progress": {"step": step}}, World(CPU, rank, 2), seed)
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[4]
    assert len({tuple(values) for values in [expected.tolist(), *drawn]}) == 5


@pytest.mark.parametrize(("now", "is_kept"), [("top1/a", True), ("top1/b", False)])
def test_the_best_of_another_metric_is_forgotten(now, is_kept):
    stopping = Config().TRAIN.EARLY_STOPPING
    best = {"best": [(0.5, -1.0, 1)], "best_epoch": 1, "watched_best": 0.5, "num_stale": 2}
    config = {"TRAIN": {"EARLY_STOPPING": dataclasses.asdict(stopping)}}
    saved = whole(headline="top1/a", config=config)
    saved["progress"] |= best
    found = vars(resumed_progress(saved, now, stopping))
    new = vars(TrainingProgress(1))
    assert {name: found[name] for name in best} == (
        best if is_kept else {name: new[name] for name in best}
    )
