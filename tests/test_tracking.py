"""Weights & Biases through its real client, offline, and what lies in the file that it records."""

import json
import os
import struct
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers import forks
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

Record = Any


def record(folder, program=PROGRAM, **environment):
    """Run the program as on a machine that has never seen W&B: no key, no mode, an empty home."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    for name in ("HOME", "USERPROFILE"):
        clean[name] = str(folder / "home")
    clean["PYTHONPATH"] = str(Path(__file__).parents[1])
    (folder / "home").mkdir(exist_ok=True)
    with mock.patch.dict(os.environ, clean | environment, clear=True):
        outcome = forks.python("-c", program, cwd=folder)
    assert outcome.code == 0, outcome.err
    return outcome


def read(path):
    """The records of a .wandb file, which is a LevelDB log: blocks of 32 KiB with records in pieces."""
    from wandb.proto.wandb_internal_pb2 import Record as Message

    data, position, pieces = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if position + 7 + length > len(data):  # still being written
            return
        pieces += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield Message.FromString(pieces)
            pieces = b""


def recorded(folder):
    """The records of a run; the client may still be writing the last ones."""
    run = []

    def is_complete():
        [path] = folder.glob("logs/wandb/offline-run-*/*.wandb")
        run[:] = read(path)
        return bool(of_kind(run, "exit"))

    wait_until(is_complete)
    return run


def items(entries):
    return {
        entry.key or "/".join(entry.nested_key): json.loads(entry.value_json) for entry in entries
    }


def of_kind(run, kind):
    return [getattr(entry, kind) for entry in run if entry.HasField(kind)]


@pytest.mark.e2e
def test_a_run_without_a_key_is_recorded_offline(tmp_path):
    folder, outcome = tmp_path, record(tmp_path)
    [run_folder] = (folder / "logs/wandb").glob("offline-run-*")
    assert outcome.err.splitlines()[1].endswith(f"wandb sync {run_folder.relative_to(folder)}")
    assert outcome.out == ""
    assert not (folder / "wandb").exists()
    run = recorded(folder)
    [identity] = of_kind(run, "run")
    assert (identity.project, identity.display_name, identity.run_group) == (
        "insects",
        "beetles",
        "first",
    )
    assert identity.run_id == "abc123"
    assert list(identity.tags) == ["small", "fast"]
    assert items(identity.config.update)["DATA"] == {"BATCH_SIZE": 64}
    history = [items(row.item) for row in of_kind(run, "history")]
    metrics = {
        row["_step"]: {name: row[name] for name in ("train/loss", "val/loss") if name in row}
        for row in history
    }
    assert metrics == {1: {"train/loss": 1.5, "val/loss": 1.25}, 2: {"train/loss": 1.0}}
    summary = {}
    for entry in of_kind(run, "summary"):
        summary |= items(entry.update)
    assert summary["autobatch/train_batch_size"] == summary["autobatch/val_batch_size"] == 64
    assert summary["top1/species"] == 0.75
    assert (summary["train/loss"], summary["val/loss"]) == (1.0, 1.25)
    assert [entry.exit_code for entry in of_kind(run, "exit")] == [0]


@pytest.mark.e2e
def test_a_key_that_the_server_refuses_means_offline(tmp_path):
    outcome = record(tmp_path, WANDB_API_KEY="short", WANDB_BASE_URL="http://127.0.0.1:9")
    run = recorded(tmp_path)
    assert items(of_kind(run, "history")[-1].item)["train/loss"] == 1.0
    assert "wandb sync" in outcome.err


def test_a_mode_from_the_environment_is_respected(tmp_path):
    record(tmp_path, WANDB_MODE="disabled")
    assert not [*tmp_path.glob("logs/wandb/offline-run-*")]
