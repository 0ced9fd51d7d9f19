"""Weights & Biases through its real client, offline, and what lies in the file that it records."""

import json
import os
import struct
from unittest import mock

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from tests.helpers import children
from tests.helpers.runs import wait_until

PROGRAM = """
import logging
from pathlib import Path
from linnaeus.config.schema import ExperimentConfig, WandbConfig
from linnaeus.training.tracking import start_tracking

logging.basicConfig(level=logging.INFO, format="%(message)s")
wandb = WandbConfig(ENABLED=True, PROJECT="insects", GROUP="first", TAGS=["small", "fast"])
tracker = start_tracking(
    ExperimentConfig(NAME="beetles", WANDB=wandb),
    run_id="abc123", folder=Path(), config={"DATA": {"BATCH_SIZE": 64}},
)
for mode in ("train", "val"):
    tracker.summarise({f"autobatch/{mode}_batch_size": 64})
tracker.log({"train/loss": 1.5}, step=1)
tracker.log({"val/loss": 1.25}, step=1)
tracker.log({"train/loss": 1.0}, step=2)
tracker.summarise({"top1/species": 0.75})
tracker.finish(0)
"""
"""What a run tells its tracker, with metrics from the first step on."""


def record(folder, **environment):
    """Run the program as on a machine that has never seen W&B: no key, no mode, an empty home."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    (folder / "home").mkdir()
    with mock.patch.dict(
        os.environ, {**clean, "HOME": f"{folder}/home", **environment}, clear=True
    ):
        return children.python("-c", PROGRAM, cwd=folder).ok()


def read(path):
    """The records by their kind. A small .wandb file has a header, and another before each record."""
    data, position, found = path.read_bytes(), 7, {}
    while position + 7 < len(data):
        _, length, kind = struct.unpack_from("<IHB", data, position)
        assert kind == 1, "a record in one piece"
        if position + 7 + length > len(data):  # still being written
            break
        entry = Record.FromString(data[position + 7 : position + 7 + length])
        kind = entry.WhichOneof("record_type")
        found.setdefault(kind, []).append(getattr(entry, kind))
        position += 7 + length
    return found


def items(entries):
    return {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in entries}


@pytest.mark.e2e
@pytest.mark.parametrize(
    "refused", [{}, {"WANDB_API_KEY": "short", "WANDB_BASE_URL": "http://127.0.0.1:9"}]
)
def test_a_run_without_a_valid_key_is_recorded_offline(tmp_path, refused):
    outcome = record(tmp_path, **refused)
    [file] = tmp_path.glob("logs/wandb/offline-run-*/*.wandb")
    assert f"wandb sync {file.parent.relative_to(tmp_path)}" in outcome.err
    assert outcome.out == ""
    assert not (tmp_path / "wandb").exists()
    wait_until(lambda: "exit" in read(file))  # the client may still be writing
    run = read(file)
    [identity] = run["run"]
    names = (identity.project, identity.display_name, identity.run_group, identity.run_id)
    assert names == ("insects", "beetles", "first", "abc123")
    assert list(identity.tags) == ["small", "fast"]
    assert items(identity.config.update)["DATA"] == {"BATCH_SIZE": 64}
    first, second = (items(row.item) for row in run["history"])
    assert first.items() >= {"_step": 1, "train/loss": 1.5, "val/loss": 1.25}.items()
    assert second.items() >= {"_step": 2, "train/loss": 1.0}.items()
    summary = {}
    for entry in run["summary"]:
        summary |= items(entry.update)
    expected = {"autobatch/train_batch_size": 64, "autobatch/val_batch_size": 64}
    expected |= {"top1/species": 0.75, "train/loss": 1.0, "val/loss": 1.25}
    assert summary.items() >= expected.items()
    assert [each.exit_code for each in run["exit"]] == [0]


@pytest.mark.e2e
def test_a_mode_from_the_environment_is_respected(tmp_path):
    record(tmp_path, WANDB_MODE="disabled")
    assert not [*tmp_path.glob("logs/wandb/offline-run-*")]
