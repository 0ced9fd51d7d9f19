"""What a resumed run may change, and what is said about it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from linnaeus.config.schema import LossConfig, ModelConfig, OptimizerConfig, ScheduleConfig
from linnaeus.dist import World
from linnaeus.errors import CheckpointError
from linnaeus.rng import rng_state, seed_all
from linnaeus.training.checkpoint import CheckpointFolder
from linnaeus.training.resume import (
    changes_of,
    check_changes,
    find_checkpoint,
    is_finished,
    plain_nodes,
    restore_generators,
)
from tests.helpers.contents import whole

CPU = torch.device("cpu")
ALONE = World(CPU)


def nodes_of(**options: Any) -> dict[str, Any]:
    """Nodes with some keys set, such as `OPTIMIZER_LR`."""
    nodes = {
        "MODEL": ModelConfig,
        "LOSS": LossConfig,
        "OPTIMIZER": OptimizerConfig,
        "SCHEDULE": ScheduleConfig,
    }
    values: dict[str, dict[str, Any]] = {name: {} for name in nodes}
    for option, value in options.items():
        name, _, key = option.partition("_")
        values[name][key] = value
    return plain_nodes(**{name: kind(**values[name]) for name, kind in nodes.items()})


def refusal(resume_with: str | None, now: dict[str, Any], before: dict[str, Any] | None = None) -> str:
    """The message for a run that may not be resumed."""
    with pytest.raises(CheckpointError) as caught:
        check_changes(changes_of(before or nodes_of(), now), resume_with)
    return str(caught.value)


def test_nodes_are_plain_values_that_a_checkpoint_can_hold(tmp_path: Path) -> None:
    nodes = nodes_of(OPTIMIZER_KWARGS={"betas": [0.9, 0.99]}) | plain_nodes(
        MODEL={"_target_": "a.B", "width": 3}
    )
    torch.save(nodes, tmp_path / "nodes.pt")
    assert torch.load(tmp_path / "nodes.pt", weights_only=True) == nodes


def test_the_same_configuration_has_no_changes() -> None:
    assert changes_of(nodes_of(), nodes_of()) == []
    check_changes([], None)


@pytest.mark.parametrize(("value", "is_refused"), [(None, False), (0.5, True)])
def test_a_key_that_the_checkpoint_does_not_know_has_its_default(
    tmp_path: Path, value: float | None, is_refused: bool
) -> None:
    before, now = nodes_of(), nodes_of(OPTIMIZER_LAYER_DECAY=value)
    del before["OPTIMIZER"]["LAYER_DECAY"], before["MODEL"]["FREEZE"]
    folder = CheckpointFolder(tmp_path)
    folder.save(whole(config=before))
    if is_refused:
        with pytest.raises(CheckpointError, match=r"OPTIMIZER.LAYER_DECAY \(not set in the checkpoint, 0.5"):
            find_checkpoint(folder, now, None, "small", ALONE)
        return
    checkpoint = find_checkpoint(folder, now, None, "small", ALONE)
    assert checkpoint is not None
    assert checkpoint.changes == []


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("OPTIMIZER_LR", 0.01, "OPTIMIZER.LR (0.002 in the checkpoint, 0.01 now)"),
        ("OPTIMIZER_WEIGHT_DECAY", 0.0, "OPTIMIZER.WEIGHT_DECAY (0.05 in the checkpoint, 0.0 now)"),
        ("OPTIMIZER_LR_SCALING", "linear", "OPTIMIZER.LR_SCALING ('none' in the checkpoint, 'linear' now)"),
        ("SCHEDULE_NAME", "linear", "SCHEDULE.NAME ('cosine' in the checkpoint, 'linear' now)"),
        ("SCHEDULE_WARMUP_STEPS", 3, "SCHEDULE.WARMUP_STEPS (None in the checkpoint, 3 now)"),
    ],
)
def test_another_rate_is_refused_in_one_line_unless_it_is_asked_for(
    option: str, value: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("linnaeus").propagate = True
    message = refusal(None, nodes_of(**{option: value}))
    assert text in message
    assert "\n" not in message
    for remedy in ("Set it back", "TRAIN.RESUME_WITH lr", "EXPERIMENT.NAME", "TRAIN.AUTO_RESUME False"):
        assert remedy in message
    with caplog.at_level("INFO"):
        check_changes(changes_of(nodes_of(), nodes_of(**{option: value})), "lr")
    assert f"TRAIN.RESUME_WITH lr: {text}" in caplog.text


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("OPTIMIZER_NAME", "sgd", "OPTIMIZER.NAME ('adamw' in the checkpoint, 'sgd' now)"),
        (
            "OPTIMIZER_KWARGS",
            {"betas": [0.8, 0.9]},
            "OPTIMIZER.KWARGS.betas (not set in the checkpoint, [0.8, 0.9]",
        ),
    ],
)
@pytest.mark.parametrize("resume_with", [None, "lr"])
def test_another_optimizer_is_refused_all_the_same(
    option: str, value: Any, text: str, resume_with: str | None
) -> None:
    message = refusal(resume_with, nodes_of(**{option: value}))
    assert text in message
    assert "RESUME_WITH" not in message  # no remedy here
    message = refusal(resume_with, nodes_of(**{option: value}, OPTIMIZER_LR=0.5))
    assert ("OPTIMIZER.LR (" in message) == (resume_with is None)


def test_an_optimizer_of_the_users_own_may_change_its_rate() -> None:
    before, now = ({"OPTIMIZER": {"_target_": "torch.optim.SGD", "lr": lr}} for lr in (0.1, 0.2))
    assert "OPTIMIZER.lr (0.1 in the checkpoint, 0.2 now)" in refusal(None, now, before)
    check_changes(changes_of(before, now), "lr")
    assert "OPTIMIZER._target_" in refusal(
        "lr", {"OPTIMIZER": {"_target_": "torch.optim.Adam", "lr": 0.1}}, before
    )
    assert "OPTIMIZER._target_" in refusal("lr", nodes_of(), before)


def test_model_and_loss_may_change_where_the_state_fits(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(whole(config=nodes_of(), state={}))
    now = nodes_of(MODEL_DROP_RATE=0.5, LOSS_LABEL_SMOOTHING=0.1)
    checkpoint = find_checkpoint(checkpoints, now, None, "run", ALONE)
    assert checkpoint is not None
    assert checkpoint.changes == [
        "MODEL.DROP_RATE (0.0 in the checkpoint, 0.5 now)",
        "LOSS.LABEL_SMOOTHING (0.0 in the checkpoint, 0.1 now)",
    ]


def test_a_checkpoint_without_its_configuration_is_not_compared(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(whole(state={}))
    checkpoint = find_checkpoint(checkpoints, nodes_of(OPTIMIZER_LR=7.0), None, "run", ALONE)
    assert checkpoint is not None
    assert checkpoint.changes == []


def test_starting_fresh_names_the_runs_beside_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("linnaeus").propagate = True
    for name, epoch in (("r1.1", 3), ("r1.2", 5), ("r1.best", 9), ("r2.1", 9)):
        CheckpointFolder(tmp_path / "group" / name / "checkpoints").save(whole(epoch))
    (tmp_path / "group/r1.2/checkpoints/last.pt").write_text("damaged")
    (tmp_path / "group/r1.3").mkdir()
    with caplog.at_level("INFO"):
        checkpoints = CheckpointFolder(tmp_path / "group/r1/checkpoints")
        assert find_checkpoint(checkpoints, nodes_of(), None, "group/r1", ALONE) is None
    [message] = [record.getMessage() for record in caplog.records]
    assert message == (
        f"no checkpoint in {tmp_path / 'group/r1'}: starting fresh; group/r1.1 has a checkpoint of epoch 3: "
        "EXPERIMENT.NAME group/r1.1 goes on with it"
    )


def test_nothing_beside_a_run_ends_its_fresh_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files of somebody else may have any name and any content."""
    logging.getLogger("linnaeus").propagate = True
    stored = [5, None, {"progress": 5}, {"progress": None}, {"progress": {}}, whole(-1), whole() | {"rng": 3}]
    for number, content in enumerate(stored):
        folder = tmp_path / f"r1.{number}" / "checkpoints"
        folder.mkdir(parents=True)
        torch.save(content, folder / "last.pt")
    (tmp_path / "r1.90").write_text("no folder")
    (tmp_path / "r1.91/checkpoints/last.pt").mkdir(parents=True)
    (tmp_path / "r1.92").symlink_to("r1.92")
    CheckpointFolder(tmp_path / "r1.93/checkpoints").save(whole(4))
    with caplog.at_level("INFO"):
        assert find_checkpoint(CheckpointFolder(tmp_path / "r1/checkpoints"), {}, None, "r1", ALONE) is None
    [message] = [record.getMessage() for record in caplog.records]
    assert message.count("has a checkpoint") == 1
    assert "r1.93 has a checkpoint of epoch 4" in message


@pytest.mark.parametrize(
    ("epochs_done", "num_epochs", "has_result", "finished"),
    [(3, 3, True, True), (3, 2, True, True), (2, 3, True, False), (3, 3, False, False)],
)
def test_a_run_is_finished_when_its_epochs_and_its_result_are_there(
    tmp_path: Path, epochs_done: int, num_epochs: int, has_result: bool, finished: bool
) -> None:
    if has_result:
        (tmp_path / "result.json").write_text("{}")
    content = {"progress": {"epoch": epochs_done}}
    assert is_finished(content, num_epochs, tmp_path / "result.json", ALONE) is finished


def test_generators_are_restored_on_as_many_ranks_and_seeded_on_others() -> None:
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
