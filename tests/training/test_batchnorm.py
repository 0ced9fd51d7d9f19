"""BatchNorm's running statistics in runs of two ranks: what is validated is what the checkpoint holds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from linnaeus.config.load import load_config
from linnaeus.data.datasets import build_data
from linnaeus.data.loader import build_loaders
from linnaeus.dist import World
from linnaeus.rng import seed_all
from linnaeus.run import run
from linnaeus.training.build import assemble
from linnaeus.training.checkpoint import load_checkpoint
from tests.helpers.processes import Results, compute
from tests.helpers.runs import SMALL

pytestmark = [pytest.mark.distributed, pytest.mark.e2e]

CPU = torch.device("cpu")
RUNS = {
    f"{how}{'_ema' if ema else ''}": (
        *SMALL, "TRAIN.EPOCHS=1", "DATA.BATCH_SIZE_VAL=31", f"EXPERIMENT.NAME={how}{'_ema' if ema else ''}",
        f"TRAIN.DISTRIBUTE_BN={how}", f"TRAIN.EMA.ENABLED={ema}", "OPTIMIZER.LR=0.01",
    )
    for how, ema in (("reduce", True), ("none", False))
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have left their runs."""
    folder = tmp_path_factory.mktemp("batchnorm")
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    (folder / "port").write_text(str(store.port))
    compute(__name__, 2, folder)
    return folder


def work(rank: int, folder: str) -> Results:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost", "MASTER_PORT": Path(folder, "port").read_text(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the test serves it
    }  # fmt: skip
    for argv in RUNS.values():
        run(load_config([*argv, f"EXPERIMENT.OUTPUT_DIR={folder}"]).config)
    return {}


def logged(folder: Path) -> dict[str, float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    [record] = [record for record in records if record.pop("split") == "val"]
    return {name: value for name, value in record.items() if name not in ("step", "epoch", "time")}


def validated(folder: Path, *argv: str) -> dict[str, float]:
    """What one process gets that builds all anew and loads the checkpoint."""
    config = load_config([*argv, f"EXPERIMENT.OUTPUT_DIR={folder}"]).config
    seed_all(0)
    data = build_data(config.DATA, seed=0)
    parts = assemble(config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, data, World(CPU))
    state = load_checkpoint(folder / config.EXPERIMENT.NAME / "checkpoints/last.pt")["state"]
    parts.model.load_state_dict(state["model"])
    if parts.ema is not None:
        parts.ema.load_state_dict(state["ema"])
    parts.validation_step.model.eval()
    with build_loaders(
        data, config.DATA, World(CPU), sizes=lambda epoch, skip: iter(()), batch_size_val=31, seed=0
    ) as loaders:
        for batch in loaders.val:
            parts.validation_step(batch)
    values = parts.metrics.compute(World(CPU))
    assert values is not None
    return values


@pytest.mark.parametrize("name", RUNS)
def test_the_logged_validation_is_that_of_the_checkpoint(folder: Path, name: str) -> None:
    found, expected = logged(folder / name), validated(folder, *RUNS[name])
    assert found.keys() == expected.keys()
    if name == "none":
        assert abs(found["loss"] - expected["loss"]) > 1e-4, "the ranks have equal statistics by themselves"
    else:
        assert found == pytest.approx(expected, rel=1e-6)
