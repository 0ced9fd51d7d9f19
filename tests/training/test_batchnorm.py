"""BatchNorm's running statistics on two ranks: what is validated is what the checkpoint holds."""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from linnaeus.config.load import load_config
from linnaeus.data.batch import Batch
from linnaeus.data.datasets import build_data
from linnaeus.data.loader import build_loaders
from linnaeus.dist import World, wrap
from linnaeus.rng import seed_all
from linnaeus.run import run
from linnaeus.training.batchnorm import distribute_batchnorm
from linnaeus.training.build import assemble
from linnaeus.training.checkpoint import load_checkpoint
from linnaeus.training.ema import Ema
from linnaeus.training.step import Precision, TrainStep
from tests.helpers.processes import Results, compute, group_of
from tests.helpers.runs import SMALL, free_ports
from tests.training.test_ranks import num_collectives

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")
WAYS = ("reduce", "broadcast", "none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batchnorm")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Results]:
    """What each process has computed, by rank; the runs are in `folder`."""
    (folder / "ports").write_text(json.dumps(free_ports(len(RUNS))))
    return compute(__name__, 3, folder)


def work(rank: int, folder: str) -> Results:
    """All that one process computes; the third one takes part in the first computation only."""
    results: Results = {}
    with group_of(3, rank, folder) as world:
        results["three"] = distributed(world, "reduce")
    if rank == 2:
        return results
    with group_of(2, rank, folder) as world:
        for how in WAYS:
            results[how] = distributed(world, how)
        for stops in (False, True):
            results["stops", stops] = trained(world, stops=stops)
    for port, name in zip(json.loads(Path(folder, "ports").read_text()), RUNS, strict=True):
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
        }  # fmt: skip
        run(load_config([*RUNS[name], f"EXPERIMENT.OUTPUT_DIR={folder}"]).config)
    return results


# --- the function ---


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4), nn.BatchNorm1d(4))


def make_batch(rank: int, number: int) -> Batch:
    generator = torch.Generator().manual_seed(10 * number + rank)
    targets = torch.randint(0, 4, (8,), generator=generator)
    return Batch(torch.randn(8, 3, generator=generator) + rank, targets)


def statistics(module: nn.Module) -> Tensor:
    """All running statistics, in one vector."""
    found = [buffer for name, buffer in module.named_buffers() if "running" in name]
    return torch.cat([buffer.flatten() for buffer in found]).clone()


def distributed(world: World, how: str) -> Results:
    """The statistics of a model and of another in the place of its average: before, after, after it again."""
    model, average = make_model(), make_model()
    for module, number in ((model, 0), (average, 1)):
        module(make_batch(world.rank, number).inputs)
    before = [statistics(module) for module in (model, average)]
    collectives = num_collectives(lambda: distribute_batchnorm(model, average, world, how))
    after = [statistics(module) for module in (model, average)]
    distribute_batchnorm(model, average, world, how)
    again = [statistics(module) for module in (model, average)]
    tracked = [int(buffer) for name, buffer in model.named_buffers() if "tracked" in name]
    return {"before": before, "after": after, "again": again, "count": collectives, "tracked": tracked}


@pytest.mark.parametrize("how", WAYS)
def test_the_statistics_of_all_ranks(ranks: list[Results], how: str) -> None:
    zero, one = (results[how] for results in ranks[:2])
    before = torch.stack([zero["before"][0], one["before"][0]])
    assert (before[0] - before[1]).abs().max() > 0.01
    expected = {"reduce": before.mean(0).expand(2, -1), "broadcast": before[:1].expand(2, -1), "none": before}
    after = torch.stack([zero["after"][0], one["after"][0]])
    torch.testing.assert_close(after, expected[how])
    assert torch.equal(after[0], after[1]) is (how != "none")
    assert zero["tracked"] == one["tracked"] == [1, 1]


@pytest.mark.parametrize("how", WAYS)
def test_the_average_has_the_statistics_of_rank_0(ranks: list[Results], how: str) -> None:
    zero, one = (results[how] for results in ranks[:2])
    assert torch.equal(zero["after"][1], zero["before"][1])
    assert torch.equal(one["after"][1], one["before"][1] if how == "none" else zero["before"][1])
    assert not torch.equal(zero["before"][1], one["before"][1])


@pytest.mark.parametrize("how", WAYS)
def test_each_model_costs_one_collective(ranks: list[Results], how: str) -> None:
    assert [results[how]["count"] for results in ranks[:2]] == [0 if how == "none" else 2] * 2


def test_doing_it_again_changes_no_bit(ranks: list[Results]) -> None:
    """In float32, a third of a + a + a is not always a."""
    for results in ranks:
        for after, again in zip(results["three"]["after"], results["three"]["again"], strict=True):
            assert torch.equal(after, again)
    after = ranks[0]["three"]["after"][0]
    assert not torch.equal((after + after + after) / 3, after), "these statistics would not tell"


def test_one_process_and_a_model_without_batchnorm_are_left_alone() -> None:
    model = make_model()
    before = statistics(model)
    distribute_batchnorm(model, model, World(CPU), "reduce")
    assert torch.equal(statistics(model), before)
    distribute_batchnorm(nn.Linear(2, 2), None, World(CPU, 0, 2), "reduce")  # without a process group


# --- a stop within an epoch ---


def trained(world: World, *, stops: bool) -> dict[str, Tensor]:
    """The state after four steps and a validation; if it stops, rank 0's is loaded in the middle."""
    model = make_model()
    ema = Ema(model, 0.9)
    step = TrainStep(
        wrap(model, world), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1),
        torch.amp.GradScaler("cpu", enabled=False), Precision(CPU), after_step=ema.update,
    )  # fmt: skip
    for number in range(4):
        if stops and number == 2:
            for part in (model, ema):
                part.load_state_dict(world.broadcast(part.state_dict()))
        step([make_batch(world.rank, 2 * number + micro) for micro in (0, 1)], 2)
    results = {"live": statistics(model)}
    distribute_batchnorm(model, ema.module, world, "reduce")
    return results | {
        f"{kind} {k}": v for kind, m in (("", model), ("ema", ema.module)) for k, v in m.state_dict().items()
    }


def test_a_stop_within_an_epoch_changes_no_bit(ranks: list[Results]) -> None:
    for results in ranks[:2]:
        on, stopped = results["stops", False], results["stops", True]
        assert all(torch.equal(tensor, stopped[name]) for name, tensor in on.items())
    live = [results["stops", False]["live"] for results in ranks[:2]]
    assert not torch.equal(*live), "the ranks have seen the same samples"


# --- the logged validation, and that of the checkpoint ---

RUNS = {
    f"{how}{'_ema' if ema else ''}": (
        *SMALL, "TRAIN.EPOCHS=1", "DATA.BATCH_SIZE_VAL=31", f"EXPERIMENT.NAME={how}{'_ema' if ema else ''}",
        f"TRAIN.DISTRIBUTE_BN={how}", f"TRAIN.EMA.ENABLED={ema}", "OPTIMIZER.LR=0.01",
    )
    for how, ema in product(WAYS, (False, True))
}  # fmt: skip


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
        data, sizes=lambda epoch, skip: iter(()), batch_size_val=31, data_config=config.DATA, seed=0, rank=0,
        world_size=1, device=CPU,
    ) as loaders:  # fmt: skip
        for batch in loaders.val:
            parts.validation_step(batch)
    values = parts.metrics.compute(World(CPU))
    assert values is not None
    return values


@pytest.mark.parametrize("name", RUNS)
def test_the_logged_validation_is_that_of_the_checkpoint(
    ranks: list[Results], folder: Path, name: str
) -> None:
    found, expected = logged(folder / name), validated(folder, *RUNS[name])
    assert found.keys() == expected.keys()
    if name.startswith("none"):
        assert abs(found["loss"] - expected["loss"]) > 1e-4, "the ranks have equal statistics by themselves"
    else:
        assert found == pytest.approx(expected, rel=1e-6)
