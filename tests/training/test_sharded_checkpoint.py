"""Checkpoints of sharded runs: exact, for any number of processes, and whole whatever happens to these."""

import copy
import errno
import json
import os
import pickle
import shutil
import signal
import sys
import zlib
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from linnaeus.autobatch import nest
from linnaeus.config.schema import DistConfig
from linnaeus.inference.trained import load_run
from linnaeus.models.shards import METADATA
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import CheckpointError
from linnaeus.training.checkpoint import CheckpointFolder, TrainingState, load_checkpoint
from linnaeus.training.ddp import distribute_batchnorm
from linnaeus.training.ema import Ema
from linnaeus.training.sharding import shard
from tests.helpers.bits import bits
from tests.helpers.children import ROOT
from tests.helpers.contents import whole
from tests.helpers.messages import error_of
from tests.helpers.processes import compute, group_of
from tests.helpers.runs import SMALL
from tests.helpers.small_runs import PLAIN, Clusters, lines_of, validations_of
from tests.training.test_checkpoint import copied_before_each_operation, in_order

pytestmark = [pytest.mark.e2e]

CPU = torch.device("cpu")
GLOBAL_BATCH = 12


class Block(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), norm(width)

    def forward(self, x):
        return x + nn.functional.relu(self.norm(self.linear(x)))


def make_state(world, norm=nn.BatchNorm1d, seed=0):
    """Five rows of weights for two processes, and one, and a bias of one element."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), Block(5, norm), Block(5, norm), nn.Linear(5, 1))
    sharding = DistConfig(SHARDING="full")
    average = shard(model, sharding, world, with_average=True) if world.is_distributed else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    return TrainingState(
        model, nn.BCELoss(weight=torch.arange(3.0)), optimizer, scaler, Ema(model, 0.9, average)
    )


def train(state, world, steps):
    """The losses of these steps, each over the same samples for any number of processes."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(GLOBAL_BATCH, 4, generator=generator)[world.rank :: world.world_size]
        loss = (state.model.train()(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.ema.on_update()
        losses.append(float(world.mean(loss.detach())))
    return losses


def save(checkpoints, state, world, step, **options):
    """As the trainer does."""
    content = {"state": state.state_dict()}
    if world.is_distributed:
        distribute_batchnorm(state.model, state.ema.module, world)
        content = checkpoints.save_shards(state.state_dict(), step, world)
    if world.is_main:
        checkpoints.save(whole(step=step) | content, **options)


def restore(folder, world, norm=nn.BatchNorm1d):
    """A state of other weights, into which the latest checkpoint was loaded."""
    state = make_state(world, norm, seed=99)
    checkpoint = CheckpointFolder(folder, is_sharded=world.is_distributed).load_latest(world)
    checkpoint.restore(state, world)
    return state


def full(state):
    """The state with whole tensors. Every rank must call this."""
    gathered = nest.map_leaves(
        lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, state.state_dict()
    )
    return copy.deepcopy(gathered)


# --- what the processes do: two are started once, and form groups of two and one ---


def work(rank, folder):
    alone, place, results = World(CPU), Path(folder), {}
    if rank == 0:
        results["losses alone"] = train(make_state(alone, nn.LayerNorm), alone, range(9))
    with group_of(2, rank, folder) as world:
        results |= uninterrupted_and_resumed(place / "exact", world)
        results["files"] = saved_often(place / "often", world)
        results["by step"] = killed_at_any_moment(place / "killed", world)
        results |= refused_by_the_disk(place / "full", world)
        results["losses"] = on_two_ranks_then_one_then_two(place / "chain", world, alone)
        os.chdir(folder if rank == 0 else "/")  # the same name is another place
        unseen = CheckpointFolder(Path("unseen"))
        results["unseen"] = error_of(save, unseen, make_state(world), world, 3)
        os.chdir(ROOT)
    return results


def on_two_ranks_then_one_then_two(folder, world, alone):
    """The losses of a run whose sharded checkpoint one process reads, and its file two."""
    checkpoints, state = CheckpointFolder(folder), make_state(world, nn.LayerNorm)
    losses = train(state, world, range(3))
    save(checkpoints, state, world, 3)
    if world.is_main:
        state = restore(folder, alone, nn.LayerNorm)
        losses += train(state, alone, range(3, 6))
        save(checkpoints, state, alone, 6)
    world.broadcast(None)
    return losses + train(restore(folder, world, nn.LayerNorm), world, range(6, 9))


def uninterrupted_and_resumed(folder, world):
    state = make_state(world)
    train(state, world, range(2))
    checkpoints = CheckpointFolder(folder)
    save(checkpoints, state, world, 2)
    train(state, world, range(2, 3))
    save(checkpoints, state, world, 3, is_best=True)
    results = {"saved": full(state)}
    train(state, world, range(3, 6))
    resumed = restore(folder, world)
    train(resumed, world, range(3, 6))
    unrestored = make_state(world, seed=99)
    train(unrestored, world, range(3, 6))
    return results | {"on": full(state), "resumed": full(resumed), "unrestored": full(unrestored)}


def saved_often(folder, world):
    """The shards that are there after saving in the same step, and after more steps."""
    state, checkpoints = make_state(world), CheckpointFolder(folder, keep=1)
    files = []
    for step, is_best in ((1, True), (1, False), (2, False), (3, False), (4, True), (5, False)):
        save(checkpoints, state, world, step, is_best=is_best)
        shards = sorted(path.name for path in folder.glob("shards_*"))
        files.append([name.removeprefix("shards_0000000") for name in shards])
    return files


def killed_at_any_moment(folder, world):
    """The states that are saved, while rank 0 copies the files."""
    state, checkpoints = make_state(world), CheckpointFolder(folder / "run", keep=1)
    save(checkpoints, state, world, 1)
    states = {1: full(state)}
    copying = copied_before_each_operation(checkpoints.folder, folder / "copies")
    with copying if world.is_main else nullcontext():
        for step in (2, 3):
            train(state, world, range(step, step + 1))
            save(checkpoints, state, world, step, is_best=step == 2)
            states[step] = full(state)
    return states


def refused_by_the_disk(folder, world):
    """The error where rank 1 cannot write its shards, and the step of the checkpoint that there is then."""
    state, checkpoints = make_state(world), CheckpointFolder(folder)
    save(checkpoints, state, world, 1)
    is_full = world.rank == 1

    def refuse(event, arguments):
        if is_full and event == "open" and str(arguments[0]).endswith("__1_0.distcp"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sys.addaudithook(refuse)
    text = error_of(save, checkpoints, state, world, 2)
    is_full = False
    return {"refused": text, "after": world.on_main(checkpoints.read_latest)["progress"]["step"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder):
    """What each process has computed, by rank."""
    return compute(__name__, 2, folder)


@pytest.fixture
def saved(ranks, folder, tmp_path):
    """A copy of the checkpoints of steps 2 and 3."""
    return Path(shutil.copytree(folder / "exact", tmp_path / "exact"))


def test_training_goes_on_bit_for_bit(ranks):
    for results in ranks:
        assert bits(results["on"]) == bits(results["resumed"])
        assert bits(results["on"]["model"]) != bits(results["unrestored"]["model"])


def test_a_file_that_points_to_shards_reads_as_an_unsharded_one(ranks, saved):
    state = load_checkpoint(saved / "last.pt")["state"]
    assert bits(state) == bits(ranks[0]["saved"])
    (saved.parent / "elsewhere.pt").symlink_to(saved / "best.pt")
    assert bits(load_checkpoint(saved.parent / "elsewhere.pt")["state"]) == bits(state)


def test_two_processes_then_one_then_two_train_as_one(ranks):
    expected = ranks[0]["losses alone"]
    assert ranks[0]["losses"] == pytest.approx(expected, rel=1e-5)
    assert all(abs(one - other) > 1e-4 * one for one, other in pairwise(expected))


def test_shards_stay_as_long_as_a_checkpoint_names_them(ranks):
    assert ranks[0]["files"] == [
        ["1"],
        ["1", "1_"],
        ["1", "1_", "2"],
        ["1", "2", "3"],
        ["3", "4"],
        ["4", "5"],
    ]


def test_a_kill_at_any_moment_of_saving_leaves_whole_files(ranks, folder):
    found = []
    for copied in in_order(folder / "killed/copies"):
        latest = CheckpointFolder(copied).read_latest()
        found.append(latest["progress"]["step"])
        assert bits(latest["state"]) == bits(ranks[0]["by step"][found[-1]])
        for path in copied.glob("*.pt"):
            load_checkpoint(path)
    assert found == sorted(found)
    assert {*found} == {1, 2, 3}
    assert len(found) > 20


def test_a_rank_that_does_not_see_the_folder_ends_all(ranks):
    assert "rank 1" in ranks[0]["unseen"]
    assert ranks[0]["unseen"] == ranks[1]["unseen"]


def test_a_full_disk_on_one_rank_keeps_the_earlier_checkpoint(ranks):
    for results in ranks:
        assert "the disk is full" in results["refused"]
        assert results["after"] == 1


# --- damage ---


def newest_shards(folder):
    return folder / "shards_00000003"


def flip_a_value(folder):
    """Of the first moment of the largest parameter: no structure of the file is touched."""
    path = newest_shards(folder) / "__0_0.distcp"
    state = load_checkpoint(folder / "last.pt")["state"]["optimizer"]["state"]
    value = next(v["exp_avg"] for v in state.values() if v["exp_avg"].shape == (5, 5))[:3]
    data = bytearray(path.read_bytes())
    data[data.index(value.numpy().tobytes())] ^= 1
    path.write_bytes(data)


def plant(folder):
    """Code that runs when the list of tensors is unpickled by somebody careless, with a fitting checksum."""
    rewrite_metadata(folder, Malicious(folder / "owned"))


def rewrite_metadata(folder, content):
    """Write a list of tensors, with a fitting checksum in the checkpoint."""
    data = pickle.dumps(content)
    (newest_shards(folder) / METADATA).write_bytes(data)
    rewrite_entry(folder, checksum=zlib.crc32(data))


def rewrite_entry(saved, **changes):
    content = torch.load(saved / "last.pt", weights_only=True)
    content["shards"] |= changes
    torch.save(content, saved / "last.pt")


def move_out(folder):
    return newest_shards(folder).rename(folder.parent / "outside")


def move_a_shard_out(folder):
    """The list names intact shards outside the folder."""
    outside = (newest_shards(folder) / "__0_0.distcp").rename(folder.parent / "outside.distcp")
    metadata = pickle.loads((newest_shards(folder) / METADATA).read_bytes())
    for place in metadata.storage_data.values():
        if place.relative_path == "__0_0.distcp":
            place.relative_path = f"../../{outside.name}"
    rewrite_metadata(folder, metadata)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


DAMAGES = {
    "a bit of a value": flip_a_value,
    "a shard is missing": lambda folder: (newest_shards(folder) / "__1_0.distcp").unlink(),
    "code": plant,
    "a folder above": lambda folder: rewrite_entry(folder, folder=f"../{move_out(folder).name}"),
    "a link out": lambda folder: newest_shards(folder).symlink_to(move_out(folder)),
    "a shard elsewhere": move_a_shard_out,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_instead_of_damaged_shards_those_before_are_taken(saved, damage, is_sharded):
    checkpoints = CheckpointFolder(saved, is_sharded=is_sharded)
    before = checkpoints.read_latest()
    assert before["progress"]["step"] == 3
    damage(saved)
    with pytest.raises(CheckpointError):
        load_checkpoint(checkpoints.last)
    checkpoint = checkpoints.read_latest()
    assert checkpoint["progress"]["step"] == 2
    assert not (saved / "owned").exists()
    shutil.rmtree(saved / "shards_00000002")
    with pytest.raises(CheckpointError):
        checkpoints.read_latest()


# --- whole runs ---


class Stopped(Clusters):
    """Rank 1 is asked to stop while it reads its samples for a validation."""

    def __init__(self, split):
        super().__init__(split)
        self.until = 20 if split == "val" and os.environ["RANK"] == "1" else 0

    def __getitem__(self, index):
        self.until -= 1
        if self.until == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return super().__getitem__(index)


def test_all_ranks_break_a_validation_off_that_one_was_asked_to(torchrun, tmp_path):
    options = ("DIST.SHARDING=full", "DATA.BATCH_SIZE=8", "DATA.BATCH_SIZE_VAL=2")
    dataset = f"DATA.DATASET._target_={__name__}.Stopped"
    assert torchrun(2, *PLAIN, *options, dataset).code != 0
    folder = tmp_path / "runs/plain"
    progress = load_checkpoint(folder / "checkpoints/last.pt")["progress"]
    assert (progress["epoch"], progress["step"], validations_of(folder)) == (0, 6, [])


def test_commands_read_a_sharded_run_and_give_what_its_log_says(run, torchrun, tmp_path):
    """Ranks have different numbers of validation batches."""
    options = ("DIST.SHARDING=full", "DATA.BATCH_SIZE_VAL=5", "TRAIN.EMA.ENABLED=True")
    torchrun(2, *SMALL, *options).ok()
    folder = tmp_path / "runs/small"
    epoch = load_checkpoint(folder / "checkpoints/best.pt")["progress"]["epoch"]
    run("evaluate", str(folder)).ok()
    metrics = json.loads((folder / "evaluations/best.json").read_text())["metrics"]
    logged = lines_of(folder, "val")[epoch - 1]
    assert {name: logged[name] for name in metrics} == pytest.approx(metrics, rel=1e-5)
    exported = load_run(folder, device="cpu").export("safetensors", tmp_path / "small.safetensors")
    assert exported.difference == 0
