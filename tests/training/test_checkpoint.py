"""Checkpoints: exact, safe to load, and there whatever happens to the process or the disk."""

import gc
import os
import signal
import sys
import threading
import weakref
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from linnaeus.autobatch.state.rng import rng_state, set_rng_state
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import CheckpointError, ConfigError
from linnaeus.runtime.rng import seed_all
from linnaeus.runtime.signals import Interrupted, StopRequest
from linnaeus.training.checkpoint import (
    CheckpointFolder,
    TrainingState,
    load_checkpoint,
)
from linnaeus.training.ema import Ema
from tests.helpers import forks
from tests.helpers.bits import bits
from tests.helpers.contents import whole
from tests.helpers.run_files import names
from tests.helpers.runs import wait_until
from tests.runtime.test_files import full_disk

CPU = torch.device("cpu")


def make_state():
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    return TrainingState(
        model, nn.BCELoss(weight=torch.rand(3)), optimizer, scaler, Ema(model, 0.9)
    )


def train(state, num_steps):
    """Steps that draw from the generators: data, and dropout."""
    for _ in range(num_steps):
        loss = state.model.train()(torch.randn(6, 4)).square().mean()
        state.scaler.scale(loss).backward()
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad()
        assert state.ema is not None
        state.ema.on_update()


def content(epoch, **more):
    return whole(epoch, weights=torch.full((1000,), float(epoch)), **more)


def epoch_of(checkpoint):
    return None if checkpoint is None else checkpoint["progress"]["epoch"]


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path):
    """Of the weights."""
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((9,), 2.0).numpy().tobytes())] ^= 1
    path.write_bytes(data)


def of_a_newer_version(path):
    found = torch.load(path, weights_only=True)
    torch.save(found | {"progress": found["progress"] | {"of_a_newer_version": 1}}, path)


UNREADABLE = {
    "another version": of_a_newer_version,
    "an entry is missing": lambda path: torch.save({"progress": whole()["progress"]}, path),
    "cut off": truncate,
    "code": lambda path: torch.save({"progress": nn.Linear(1, 1)}, path),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.fixture
def checkpoints(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints")


# --- what goes in comes out ---


def test_training_goes_on_bit_for_bit(checkpoints):
    seed_all(0)
    state = make_state()
    train(state, 3)
    checkpoints.save(whole(state=state.state_dict(), rng=[rng_state(CPU)]))
    train(state, 4)

    seed_all(99)
    resumed = make_state()
    checkpoint = checkpoints.read_latest()
    assert checkpoint is not None
    resumed.load_state_dict(checkpoint["state"])
    set_rng_state(checkpoint["rng"][0], CPU)
    train(resumed, 4)

    assert bits(resumed.state_dict()) == bits(state.state_dict())
    assert state.state_dict().keys() >= {"model", "criterion", "optimizer", "scaler", "ema"}


class Malicious:
    """Runs code when it is unpickled by somebody careless."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_code_in_a_file_is_not_run(tmp_path):
    torch.save({"progress": Malicious(tmp_path / "owned")}, tmp_path / "last.pt")
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path / "last.pt")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("part", ["model", "optimizer", "scaler", "ema"])
@pytest.mark.parametrize("content", [{"scale": 1.0}, {"param_groups": [5], "state": 3}])
def test_a_state_that_does_not_fit_is_a_checkpoint_error(part, content):
    with pytest.raises(ConfigError, match=rf"\b{part}\b"):
        make_state().load_state_dict(make_state().state_dict() | {part: content})


def test_an_average_that_is_new_starts_from_the_weights():
    saved, state = make_state().state_dict(), make_state()
    del saved["ema"]
    state.load_state_dict(saved)
    assert state.ema is not None
    assert bits(state.ema.state_dict()) == bits({"module": saved["model"], "num_updates": 0})


# --- which file is read ---


def test_the_latest_is_read_and_the_one_before_it_kept(checkpoints):
    assert checkpoints.read_latest() is None
    for epoch in (1, 2, 3):
        checkpoints.save(content(epoch), is_best=epoch == 1)
        assert epoch_of(checkpoints.read_latest()) == epoch
    assert epoch_of(load_checkpoint(checkpoints.previous)) == 2
    assert epoch_of(load_checkpoint(checkpoints.best)) == 1
    assert names(checkpoints.folder) == {"last.pt", "previous.pt", "best.pt"}


@pytest.mark.parametrize("damage", [*UNREADABLE.values(), flip_a_bit])
def test_a_damaged_last_is_reported_and_the_one_before_it_read(checkpoints, caplog, damage):
    for epoch in (1, 2):
        checkpoints.save(content(epoch))
    assert epoch_of(checkpoints.read_latest()) == 2
    damage(checkpoints.last)
    assert epoch_of(checkpoints.read_latest()) == 1
    [(level, message)] = {(record.levelname, record.getMessage()) for record in caplog.records}
    assert level == "WARNING"
    assert str(checkpoints.last) in message


@pytest.mark.parametrize("kind", UNREADABLE)
def test_shards_stay_while_a_checkpoint_cannot_be_read(checkpoints, caplog, kind):
    shards = checkpoints.folder / "shards_00000001"
    entry = {"shards": {"folder": shards.name, "checksum": 0}}
    shards.mkdir(parents=True)
    for path in (checkpoints.best, checkpoints.previous):
        torch.save(whole(state={}), path)
    torch.save(whole(state={}, **entry), checkpoints.best)
    UNREADABLE[kind](checkpoints.best)
    checkpoint = checkpoints.load_latest(World(CPU))
    for epoch in (2, 3):
        checkpoints.save(content(epoch))
    assert epoch_of(None if checkpoint is None else checkpoint.entries) == 1
    assert shards.is_dir()
    assert len([line for line in caplog.messages if str(checkpoints.best) in line]) == 1

    (checkpoints.best.rmdir if kind == "a folder" else checkpoints.best.unlink)()
    checkpoints.save(content(4))  # the negative control
    assert not shards.exists()


def test_a_damaged_last_does_not_replace_the_one_resumed_from(
    checkpoints,
):
    for epoch in (1, 2):
        checkpoints.save(content(epoch))
    truncate(checkpoints.last)
    assert epoch_of(checkpoints.read_latest()) == 1
    for epoch, previous in ((2, 1), (3, 2)):
        checkpoints.save(content(epoch))
        assert epoch_of(load_checkpoint(checkpoints.previous)) == previous
        assert epoch_of(load_checkpoint(checkpoints.last)) == epoch


# --- disks that take nothing ---


def test_a_full_disk_keeps_the_checkpoints_there_are(checkpoints):
    for epoch in (1, 2):
        checkpoints.save(content(epoch), is_best=True)
    with full_disk(8192), pytest.raises(CheckpointError, match=r"last.pt"):
        checkpoints.save(content(3, more=torch.zeros(10_000)), is_best=True)
    found = [
        load_checkpoint(checkpoints.folder / name) for name in ("previous.pt", "last.pt", "best.pt")
    ]
    assert [epoch_of(checkpoint) for checkpoint in found] == [1, 2, 2]
    assert names(checkpoints.folder) == {"last.pt", "previous.pt", "best.pt"}


# --- what a resumed run keeps of it ---


def test_the_state_is_read_once_and_let_go_of(checkpoints, monkeypatch):
    state, other = make_state(), make_state()
    train(state, 2)
    checkpoints.save(whole(state=state.state_dict()))
    tensors = []
    load = torch.load

    def spy(*arguments, **options):
        read = load(*arguments, **options)
        tensors.extend(weakref.ref(tensor) for tensor in read["state"]["model"].values())
        return read

    monkeypatch.setattr(torch, "load", spy)
    checkpoint = checkpoints.load_latest(World(CPU))
    assert checkpoint is not None
    assert any(tensor() is not None for tensor in tensors)
    checkpoint.restore(other, World(CPU))
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * 9, "those of one reading"
    assert bits(other.state_dict()["model"]) == bits(state.state_dict()["model"])


# --- numbered checkpoints, and those written in the background ---


def save_steps(checkpoints, *steps):
    """Save at these steps, under a clock that goes backwards."""
    for number, step in enumerate(steps):
        checkpoints.save(whole(0, step))
        os.utime(checkpoints.last, ns=(-number, -number))


def test_the_newest_numbered_checkpoints_are_kept(tmp_path):
    theirs = {"step_my_favourite.pt", "step_5.pt", "step_00000010_good.pt", "step_00000010.pt.bak"}
    for name in theirs:  # of the user
        (tmp_path / name).write_text("mine")
    checkpoints = CheckpointFolder(tmp_path, keep=2)
    for steps, kept in (
        ((10, 20, 30), ("00000020", "00000030")),
        ((25,), ("00000020", "00000025")),  # the user has gone back to step 20
        ((123_456_789,), ("00000025", "123456789")),
    ):
        save_steps(checkpoints, *steps)
        own = {"last.pt", "previous.pt", *(f"step_{step}.pt" for step in kept)}
        assert names(tmp_path) == own | theirs


def test_a_file_copied_over_the_last_one_changes_no_other(tmp_path):
    checkpoints = CheckpointFolder(tmp_path, keep=2)
    checkpoints.save(whole(0, 10))
    checkpoints.save(whole(0, 20), is_best=True)
    checkpoints.last.write_bytes((tmp_path / "step_00000010.pt").read_bytes())  # as `cp` does
    steps = {
        name: load_checkpoint(tmp_path / name)["progress"]["step"]
        for name in ("last.pt", "best.pt", "step_00000020.pt")
    }
    assert steps == {"last.pt": 10, "best.pt": 20, "step_00000020.pt": 20}


def test_the_newest_checkpoint_that_is_left_is_read(tmp_path):
    """A numbered one, the previous one, the best one."""
    checkpoints = CheckpointFolder(tmp_path, keep=1)
    checkpoints.save(whole(0, 10), is_best=True)
    save_steps(checkpoints, 20, 30)
    found = []
    for path in (checkpoints.last, tmp_path / "step_00000030.pt", checkpoints.previous, None):
        found.append(checkpoints.read_latest()["progress"]["step"])
        if path is not None:
            truncate(path)
            found.append(checkpoints.read_latest()["progress"]["step"])
            path.unlink()
    assert found == [30, 30, 30, 20, 20, 10, 10]


def test_what_a_rank_without_memory_has_saved_is_the_newest(tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    save_steps(checkpoints, 10, 20)
    checkpoints.save_for_next_attempt(whole(0, 25))
    for resumed in (25, 30):
        checkpoint = CheckpointFolder(tmp_path).load_latest(World(CPU))
        assert checkpoint is not None
        assert checkpoint.entries["progress"]["step"] == resumed
        save_steps(checkpoints, 30)
    assert names(tmp_path) == {"last.pt", "previous.pt"}


class Gate:
    """Pickled only once somebody opens it."""

    def __init__(self):
        self.open = threading.Event()

    def __reduce__(self):
        assert self.open.wait(forks.limit_s)
        return OrderedDict, ()


def test_training_goes_on_while_a_thread_writes_what_was_there(tmp_path):
    gate, weights = Gate(), torch.ones(5)
    with CheckpointFolder(tmp_path, background=True) as checkpoints:
        checkpoints.save(whole(1, weights=weights, gate=gate), is_best=True)
        assert not checkpoints.last.exists()
        weights += 1  # the next step, before a byte is written
        gate.open.set()
        checkpoints.save(whole(2, weights=weights))
    first, second = (
        load_checkpoint(path)["weights"] for path in (checkpoints.best, checkpoints.last)
    )
    assert (first.tolist(), second.tolist()) == ([1.0] * 5, [2.0] * 5)


def test_the_next_call_and_the_end_of_the_run_raise_an_error_in_the_background(
    tmp_path,
):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "checkpoints"
    checkpoints = CheckpointFolder(folder, background=True)
    checkpoints.save(content(1))
    with pytest.raises(CheckpointError, match=r"last.pt"):
        checkpoints.save(content(2))
    with (
        pytest.raises(CheckpointError, match=r"last.pt"),
        CheckpointFolder(folder, background=True) as checkpoints,
    ):
        checkpoints.save(content(1))


# --- interrupts ---


class Interrupting:
    """Presses Ctrl-C while it is written and the main thread waits, and waits until that has been handled."""

    def __init__(self):
        self.handled = threading.Event()

    def __reduce__(self):
        main = threading.main_thread().ident or 0
        wait_until(lambda: sys._current_frames()[main].f_code is threading.Condition.wait.__code__)
        signal.pthread_kill(main, signal.SIGINT)
        assert self.handled.wait(forks.limit_s)
        return OrderedDict, ()


@pytest.mark.parametrize("background", [False, True])
def test_ctrl_c_while_a_checkpoint_is_written_is_that_and_no_damage(tmp_path, background):
    """It ends the run at once, and torch would make an error of the file of it."""
    pressed = Interrupting()

    def save():
        with (
            StopRequest().listening(),
            CheckpointFolder(tmp_path, background=background) as checkpoints,
        ):
            checkpoints.save(whole(1))
            try:
                checkpoints.save(
                    whole(2, before=torch.zeros(500), pressed=pressed, after=torch.zeros(500))
                )
                checkpoints.wait()
            finally:
                pressed.handled.set()

    with pytest.raises(Interrupted):
        save()
    assert names(tmp_path) == {"last.pt", "previous.pt"}
    assert epoch_of(CheckpointFolder(tmp_path).read_latest()) == 2


# --- on the disk, whatever happens ---


def test_a_checkpoint_is_synced_before_it_gets_its_name(checkpoints, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def sync_noted(file):
        events.append(("sync", os.fstat(file).st_ino))
        fsync(file)

    def replace_noted(source, target):
        events.append((Path(target).name, Path(source).stat().st_ino))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", sync_noted)
    monkeypatch.setattr(os, "replace", replace_noted)
    checkpoints.save(content(1), is_best=True)
    file = checkpoints.last.stat().st_ino
    assert events[0] == ("sync", file)
    assert {name for name, number in events if number == file} == {"sync", "pending.pt", "last.pt"}
    best = checkpoints.best.stat().st_ino
    assert [name for name, number in events if number == best] == ["sync", "best.pt"]


KILLED_SAVES = """
import os, shutil, signal, sys
from pathlib import Path
import torch
from linnaeus.training.checkpoint import CheckpointFolder
from tests.helpers.contents import whole

torch.set_num_threads(1)
countdown = 10**9

def kill(event, arguments):
    global countdown
    if event.startswith(("os.", "open", "shutil.")):
        countdown -= 1
        if countdown == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
number, status = 0, None
while status != 0:
    number += 1
    shutil.copytree("before", f"killed/{number}")
    child = os.fork()
    if child == 0:
        countdown = number
        content = whole(3, weights=torch.full((1000,), 3.0))
        CheckpointFolder(Path(f"killed/{number}")).save(content, is_best=True)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
"""
"""Saves epoch 3 over and over, killed at its first operation on a file, at its second, and so on."""


def test_a_kill_between_any_two_file_operations_leaves_a_loadable_checkpoint(
    tmp_path,
):
    checkpoints = CheckpointFolder(tmp_path / "before")
    for epoch in (1, 2):
        checkpoints.save(content(epoch), is_best=True)
    done = forks.python("-c", KILLED_SAVES, cwd=tmp_path)
    assert done.code == 0, done.err
    folders = sorted((tmp_path / "killed").iterdir(), key=lambda folder: int(folder.name))
    assert len(folders) > 6
    found = []
    for killed in map(CheckpointFolder, folders):
        found.append((epoch_of(killed.read_latest()), epoch_of(load_checkpoint(killed.best))))
        if (killed.folder / "pending.pt").exists():  # whole, and newer than `last.pt`
            assert found[-1] == (3, 3)
        # The run goes on: it reaches epoch 3 again, and the folder is as if nothing had happened.
        killed.load_latest(World(CPU))
        if found[-1][0] != 3:
            killed.save(content(3), is_best=True)
        assert epoch_of(load_checkpoint(killed.best)) == 3
        killed.save(content(4))
        assert names(killed.folder) == {"last.pt", "previous.pt", "best.pt"}
    assert found[0] == (2, 2)
    assert found[-1] == (3, 3)
    assert {last for last, _ in found} == {2, 3}
