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
from linnaeus.models.weights import read_weights
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import CheckpointError, DataError
from linnaeus.training.checkpoint import CheckpointFolder, TrainingState, load_checkpoint
from linnaeus.training.ddp import distribute_batchnorm
from linnaeus.training.ema import Ema
from linnaeus.training.sharding import shard
from tests.helpers import forks
from tests.helpers.bits import bits
from tests.helpers.contents import whole
from tests.helpers.forks import ROOT
from tests.helpers.processes import compute, group_of
from tests.helpers.runs import SMALL
from tests.helpers.small_runs import NAME, PLAIN, Clusters, lines_of, validations_of

pytestmark = [pytest.mark.distributed, pytest.mark.e2e]

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
    results = {}
    places = {name: Path(folder) / name for name in ("exact", "chain", "plain", "twice", "full")}
    alone = World(CPU)
    if rank == 0:
        state = make_state(alone, nn.LayerNorm)
        results["plain losses"] = train(state, alone, range(3))
        save(CheckpointFolder(places["plain"]), state, alone, 3)
        results["plain"] = full(state)
        results["plain losses"] += train(state, alone, range(3, 9))
    with group_of(2, rank, folder) as world:
        results |= uninterrupted_and_resumed(places["exact"], world)
        resumed = restore(places["plain"], world, nn.LayerNorm)
        results["from plain"] = full(resumed)
        results["losses from plain"] = train(resumed, world, range(3, 9))
        state = make_state(world, nn.LayerNorm)
        results["chain losses"] = train(state, world, range(3))
        save(CheckpointFolder(places["chain"]), state, world, 3)
        results |= saved_often(places["twice"], world)
        results |= refused_by_the_disk(places["full"], world)
        os.chdir(folder if rank == 0 else "/")  # the same name is another place
        try:
            save(CheckpointFolder(Path("unseen")), state, world, 3)
        except CheckpointError as error:
            results["unseen"] = str(error)
        os.chdir(ROOT)
        if rank == 0:
            state = restore(places["chain"], alone, nn.LayerNorm)
            results["chain losses"] += train(state, alone, range(3, 6))
            save(CheckpointFolder(places["chain"]), state, alone, 6)
        world.broadcast(None)
        state = restore(places["chain"], world, nn.LayerNorm)
        results["chain losses"] += train(state, world, range(6, 9))
    return results


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
    """The files after saving in the same step, and after more steps; the root's parameter after a pass."""
    state, checkpoints = make_state(world), CheckpointFolder(folder, keep=1)
    files = []
    for step, is_best in ((1, True), (1, False), (2, False), (3, False), (4, True), (5, False)):
        save(checkpoints, state, world, step, is_best=is_best)
        files.append(sorted(path.name for path in folder.iterdir()))
    return {"files": files}


def refused_by_the_disk(folder, world):
    """The error where rank 1 cannot write its shards, and the step of the checkpoint that there is then."""
    state, checkpoints = make_state(world), CheckpointFolder(folder)
    save(checkpoints, state, world, 1)
    is_full = world.rank == 1

    def refuse(event, arguments):
        if is_full and event == "open" and str(arguments[0]).endswith("__1_0.distcp"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sys.addaudithook(refuse)
    try:
        save(checkpoints, state, world, 2)
    except CheckpointError as error:
        is_full = False
        latest = world.on_main(checkpoints.read_latest)
        return {"refused": str(error), "after": latest["progress"]["step"]}
    return {}


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
    moments = ranks[0]["on"]["optimizer"]["state"][0]
    assert moments.keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_a_file_that_points_to_shards_reads_as_one_of_an_unsharded_run(ranks, saved):
    state = load_checkpoint(saved / "last.pt")["state"]
    assert bits(state) == bits(ranks[0]["saved"])
    unsharded = make_state(World(CPU))
    train(unsharded, World(CPU), range(1))
    assert nest.structure(state) == nest.structure(unsharded.state_dict())
    unsharded.load_state_dict(state)
    assert load_checkpoint(saved / "best.pt")["progress"]["step"] == 3
    (saved.parent / "elsewhere.pt").symlink_to(saved / "best.pt")
    assert bits(load_checkpoint(saved.parent / "elsewhere.pt")["state"]) == bits(state)


def test_an_unsharded_file_is_read_by_a_sharded_run(ranks):
    for results in ranks:
        assert bits(results["from plain"]) == bits(ranks[0]["plain"])
        assert results["losses from plain"] == pytest.approx(ranks[0]["plain losses"][3:], rel=1e-5)


def test_two_processes_then_one_then_two_train_as_one(ranks):
    expected = ranks[0]["plain losses"]
    assert ranks[0]["chain losses"] == pytest.approx(expected, rel=1e-5)
    assert all(abs(one - other) > 1e-4 * one for one, other in pairwise(expected))


def test_shards_stay_as_long_as_a_checkpoint_names_them(ranks):
    shards = [[name for name in names if name.startswith("shards")] for names in ranks[0]["files"]]
    one, two = "shards_00000001", "shards_00000002"
    assert shards[:3] == [[one], [one, f"{one}_"], [one, f"{one}_", two]]
    assert shards[3:] == [
        [one, two, "shards_00000003"],
        ["shards_00000003", "shards_00000004"],
        ["shards_00000004", "shards_00000005"],
    ]


def test_a_rank_that_does_not_see_the_folder_ends_all(ranks):
    assert "rank 1" in ranks[0]["unseen"]
    assert ranks[0]["unseen"] == ranks[1]["unseen"]


def test_a_disk_that_refuses_one_rank_ends_all_and_leaves_the_checkpoint_before(
    ranks,
):
    for results in ranks:
        assert "the disk is full" in results["refused"]
        assert results["after"] == 1


# --- damage ---


def newest_shards(folder):
    return folder / "shards_00000003"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


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


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


DAMAGES = {
    "a bit of a value": flip_a_value,
    "a bit of the list": lambda folder: flip(newest_shards(folder) / METADATA),
    "a shard is short": lambda folder: truncate(newest_shards(folder) / "__1_0.distcp"),
    "a shard is missing": lambda folder: (newest_shards(folder) / "__1_0.distcp").unlink(),
    "all is missing": lambda folder: shutil.rmtree(newest_shards(folder)),
    "code": plant,
    "an absolute folder": lambda folder: rewrite_entry(folder, folder=str(move_out(folder))),
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

OWN = (
    *PLAIN,
    f"DATA.DATASET._target_={__name__}.Troubled",
    "DIST.SHARDING=full",
    "DATA.BATCH_SIZE=8",
    "TRAIN.AUTO_RESUME=True",
    "TRAIN.EMA.ENABLED=True",
)


class Troubled(Clusters):
    """Reading so many samples of a split raises an error, or presses Ctrl-C in one of the processes."""

    def __init__(self, split, crash_in="", ctrl_c_in="", after=0):
        super().__init__(split)
        self.crashes, self.until = split == crash_in, after if split in (crash_in, ctrl_c_in) else 0

    def __getitem__(self, index):
        self.until -= 1
        if self.until == 0 and self.crashes:
            raise DataError("crashed")
        if self.until == 0 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGINT)
        return super().__getitem__(index)


def test_a_run_that_crashed_goes_on_from_its_last_checkpoint_bit_for_bit(torchrun, tmp_path):
    """With BatchNorm, whose statistics differ between ranks until a checkpoint is written."""
    options = (*OWN, "MODEL.norm=BatchNorm1d", "TRAIN.CHECKPOINT_EVERY_STEPS=2", "MODEL.drop=0.3")
    for words in (
        (f"{NAME}whole",),
        (f"{NAME}parts", "DATA.DATASET.crash_in=train", "DATA.DATASET.after=98"),
        (f"{NAME}parts",),
    ):
        outcome = torchrun(2, *options, *words)
        assert (outcome.code != 0) is (len(words) > 1), outcome.err
    assert "resumed after 10 optimizer steps" in outcome.out
    states = [
        load_checkpoint(tmp_path / "runs" / name / "checkpoints/last.pt")
        for name in ("whole", "parts")
    ]
    assert states[0]["progress"]["step"] == states[1]["progress"]["step"] == 18
    assert bits(states[0]["state"]) == bits(states[1]["state"])


def test_commands_read_a_sharded_run_and_give_what_its_log_says(run, torchrun, tmp_path):
    """Ranks have different numbers of validation batches."""
    outcome = torchrun(
        2, *SMALL, "DIST.SHARDING=full", "DATA.BATCH_SIZE_VAL=5", "TRAIN.EMA.ENABLED=True"
    )
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "runs/small"
    progress = load_checkpoint(folder / "checkpoints/best.pt")["progress"]
    logged = next(line for line in lines_of(folder, "val") if line["epoch"] == progress["epoch"])
    assert run("evaluate", str(folder)).code == 0
    metrics = json.loads((folder / "evaluations/best.json").read_text())["metrics"]
    assert {name: logged[name] for name in metrics} == pytest.approx(metrics, rel=1e-5)
    trained = load_run(folder, device="cpu")
    assert trained.export("safetensors", tmp_path / "small.safetensors").difference == 0
    weights = dict(trained.model.state_dict())
    names = [name.removeprefix("backbone.") for name in weights if name.startswith("backbone.")]
    saved = read_weights(str(folder), names)
    own = {f"backbone.{name}": tensor for name, tensor in saved.backbone.items()}
    assert own.keys() <= weights.keys()
    assert bits(own) == bits({name: weights[name] for name in own})


def test_all_ranks_break_a_validation_off_that_one_was_asked_to(torchrun, tmp_path):
    options = (*OWN, "DATA.BATCH_SIZE_VAL=2")
    outcome = torchrun(2, *options, "DATA.DATASET.ctrl_c_in=val", "DATA.DATASET.after=20")
    assert outcome.code != 0
    folder = tmp_path / "runs/plain"
    progress = load_checkpoint(folder / "checkpoints/last.pt")["progress"]
    assert (progress["epoch"], progress["step"], validations_of(folder)) == (0, 6, [])
    outcome = torchrun(2, *options)
    assert outcome.code == 0, outcome.err
    assert validations_of(folder) == [6, 12, 18]


# --- processes that are killed while they save ---

NUM_SAVES = 2


def train_until_killed(rank, folder, store, victim, moment):
    """Resume, then save after each step; all are killed at the `moment`-th file operation of one of them."""
    torch.set_num_threads(1)
    place = Path(folder)
    (place / f"{store}.{rank}").write_text(str(os.getpid()))
    (place / store).mkdir(exist_ok=True)
    with group_of(2, rank, str(place / store)) as world:
        checkpoints = CheckpointFolder(place / "checkpoints", keep=1)
        has_begun = world.on_main(lambda: any(checkpoints.folder.glob("*.pt")))
        state = restore(checkpoints.folder, world) if has_begun else make_state(world)
        step = int(state.optimizer.state_dict()["state"].get(0, {"step": 0})["step"])
        if not has_begun:
            save(checkpoints, state, world, 0)  # before anything can be killed
        pids = [int((place / f"{store}.{other}").read_text()) for other in range(2)]
        left = moment

        def kill_at_the_moment(event, arguments):
            nonlocal left
            if event in OPERATIONS and any(
                "checkpoints/" in str(argument) for argument in arguments
            ):
                left -= 1
                if left == 0:
                    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
                        os.kill(pid, signal.SIGKILL)

        if rank == victim:
            sys.addaudithook(kill_at_the_moment)
        for number in range(step, step + NUM_SAVES):
            train(state, world, range(number, number + 1))
            save(checkpoints, state, world, number + 1, is_best=number % 2 == 0)
    (place / f"{store}.done").touch()


OPERATIONS = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.link",
    "shutil.rmtree",
    "os.listdir",
}


def states_by_step(rank, folder, num_steps):
    with group_of(2, rank, folder) as world:
        state = make_state(world)
        for step in range(num_steps):
            train(state, world, range(step, step + 1))
            distribute_batchnorm(state.model, state.ema.module, world)
            state_of_step = full(state)
            if world.is_main:
                torch.save(state_of_step, Path(folder) / f"step{step + 1}.pt")


def start_two(call, log):
    """Exit codes of two processes that call a function of this module; `{rank}` is theirs."""
    with log.open("w") as output:
        processes = [
            forks.start(
                ["-c", f"from {__name__} import *; {call.format(rank=rank)}"],
                cwd=ROOT,
                stdout=output,
                stderr=output,
            )
            for rank in range(2)
        ]
        return [process.wait(forks.limit_s) for process in processes]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_at_any_moment_of_saving_a_run_resumes_from_a_whole_checkpoint(tmp_path, victim):
    reference, log, folder = tmp_path / "reference", tmp_path / "log.txt", tmp_path / "checkpoints"
    reference.mkdir()
    assert start_two(f"states_by_step({{rank}}, {str(reference)!r}, 200)", log) == [0, 0], (
        log.read_text()
    )
    moment, kills, step = 0, 0, 0
    while not (tmp_path / f"store{moment}.done").exists():
        moment += 1
        call = (
            f"train_until_killed({{rank}}, {str(tmp_path)!r}, 'store{moment}', {victim}, {moment})"
        )
        codes = start_two(call, log)
        assert codes in ([0, 0], [-9, -9]), log.read_text()
        kills += codes == [-9, -9]
        found = CheckpointFolder(folder).read_latest()
        before, step = step, found["progress"]["step"]
        assert before <= step <= before + NUM_SAVES
        if step:
            assert bits(found["state"]) == bits(torch.load(reference / f"step{step}.pt"))
        for path in folder.glob("*.pt"):  # each that has its name is whole
            load_checkpoint(path)
    assert kills >= (20 if victim == 0 else 4), kills  # rank 1 writes its shards alone
    assert step == before + NUM_SAVES
