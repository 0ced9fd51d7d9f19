"""Checkpoints: exact, safe to load, and there whatever happens to the process or the disk."""

import gc
import itertools
import os
import shutil
import signal
import sys
import threading
import weakref
from collections import OrderedDict
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import CheckpointError
from linnaeus.runtime.signals import Interrupted, StopRequest
from linnaeus.training.checkpoint import (
    CheckpointFolder,
    TrainingState,
    load_checkpoint,
)
from linnaeus.training.ema import Ema
from tests.helpers import children
from tests.helpers.bits import bits
from tests.helpers.contents import whole
from tests.helpers.run_files import names
from tests.helpers.runs import wait_until
from tests.runtime.test_files import full_disk

CPU = torch.device("cpu")


def make_state():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss = nn.BCELoss(weight=torch.rand(3))
    return TrainingState(model, loss, optimizer, torch.amp.GradScaler("cpu"), Ema(model, 0.9))


def content(epoch, **more):
    return whole(epoch, weights=torch.full((1000,), float(epoch)), **more)


def epoch_of(checkpoint):
    return checkpoint["progress"]["epoch"]


def epochs(checkpoints):
    """The epochs of all files."""
    return {path.name: epoch_of(load_checkpoint(path)) for path in checkpoints.folder.iterdir()}


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


# --- which file is read ---


def test_the_latest_is_read_and_a_copy_over_it_changes_no_other(checkpoints):
    assert checkpoints.read_latest() is None
    for epoch in (1, 2, 3):
        checkpoints.save(content(epoch), is_best=epoch == 3)
        assert epoch_of(checkpoints.read_latest()) == epoch
    assert epochs(checkpoints) == {"previous.pt": 2, "last.pt": 3, "best.pt": 3}
    checkpoints.last.write_bytes(checkpoints.previous.read_bytes())  # as `cp` does
    assert epochs(checkpoints) == {"previous.pt": 2, "last.pt": 2, "best.pt": 3}


@pytest.mark.parametrize("damage", [*UNREADABLE.values(), flip_a_bit])
def test_a_damaged_last_warns_and_the_previous_is_read_and_kept(checkpoints, caplog, damage):
    for epoch in (1, 2):
        checkpoints.save(content(epoch))
    damage(checkpoints.last)
    assert epoch_of(checkpoints.read_latest()) == 1
    [(level, message)] = {(record.levelname, record.getMessage()) for record in caplog.records}
    assert level == "WARNING"
    assert str(checkpoints.last) in message
    if checkpoints.last.is_file():
        for epoch, previous in ((2, 1), (3, 2)):
            checkpoints.save(content(epoch))
            assert epochs(checkpoints) == {"previous.pt": previous, "last.pt": epoch}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_shards_stay_while_a_checkpoint_cannot_be_read(checkpoints, caplog, kind):
    shards, best = checkpoints.folder / "shards_00000001", checkpoints.best
    shards.mkdir(parents=True)
    torch.save(whole(state={}), checkpoints.previous)
    torch.save(whole(state={}, shards={"folder": shards.name, "checksum": 0}), best)
    UNREADABLE[kind](best)
    assert checkpoints.load_latest(World(CPU)).entries["progress"]["epoch"] == 1
    for epoch in (2, 3):
        checkpoints.save(content(epoch))
    assert shards.is_dir()
    assert sum(str(best) in line for line in caplog.messages) == 1

    (best.rmdir if kind == "a folder" else best.unlink)()
    checkpoints.save(content(4))  # the negative control
    assert not shards.exists()


# --- disks that take nothing ---


def test_a_full_disk_keeps_the_checkpoints_there_are(checkpoints):
    for epoch in (1, 2):
        checkpoints.save(content(epoch), is_best=True)
    with full_disk(8192), pytest.raises(CheckpointError, match=r"last.pt"):
        checkpoints.save(content(3, more=torch.zeros(10_000)), is_best=True)
    assert epochs(checkpoints) == {"previous.pt": 1, "last.pt": 2, "best.pt": 2}


# --- what a resumed run keeps of it ---


def test_the_state_is_let_go_of_and_a_new_average_starts_from_it(checkpoints):
    saved, state = make_state().state_dict(), make_state()
    del saved["ema"]
    checkpoints.save(whole(state=saved))
    checkpoint = checkpoints.load_latest(World(CPU))
    tensors = [weakref.ref(tensor) for tensor in checkpoint._state["model"].values()]
    checkpoint.restore(state, World(CPU))
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * 9
    assert bits(state.state_dict()["model"]) == bits(saved["model"])
    assert bits(state.ema.state_dict()) == bits({"module": saved["model"], "num_updates": 0})


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


class Gate:
    """Pickled only once somebody opens it."""

    def __init__(self):
        self.open = threading.Event()

    def __reduce__(self):
        assert self.open.wait(children.limit_s)
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


def test_a_background_error_is_raised_by_the_next_call_or_exit(tmp_path):
    (tmp_path / "file").write_text("")
    next_call, end = (
        CheckpointFolder(tmp_path / "file/checkpoints", background=True) for _ in range(2)
    )
    next_call.save(content(1))
    with pytest.raises(CheckpointError, match=r"last.pt"):
        next_call.save(content(2))
    with pytest.raises(CheckpointError, match=r"last.pt"), end:
        end.save(content(1))


# --- interrupts ---


class Interrupting:
    """Presses Ctrl-C while it is written and the main thread waits, and waits until that has been handled."""

    def __init__(self):
        self.handled = threading.Event()

    def __reduce__(self):
        main = threading.main_thread().ident or 0
        wait_until(lambda: sys._current_frames()[main].f_code is threading.Condition.wait.__code__)
        signal.pthread_kill(main, signal.SIGINT)
        assert self.handled.wait(children.limit_s)
        return OrderedDict, ()


@pytest.mark.parametrize("background", [False, True])
def test_ctrl_c_during_a_write_interrupts_and_damages_nothing(tmp_path, background):
    """It ends the run at once; torch would turn it into an error about the file."""
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
    synced, named, replace = set(), [], os.replace

    def replace_noted(source, target):
        named.append((Path(target).name, Path(source).stat().st_ino in synced))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.fstat(file).st_ino))
    monkeypatch.setattr(os, "replace", replace_noted)
    checkpoints.save(content(1), is_best=True)
    assert named == [("best.pt", True), ("pending.pt", True), ("last.pt", True)]


OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link"}


@contextmanager
def copied_before_each_operation(folder, copies):
    """Copy the folder before each operation on a file in it, as a kill at that moment would leave it."""
    numbers, is_on = itertools.count(), True

    def copy(event, arguments):
        nonlocal is_on
        if is_on and event in OPERATIONS and str(folder) in str(arguments):
            is_on = False
            shutil.copytree(folder, copies / str(next(numbers)))
            is_on = True

    sys.addaudithook(copy)
    yield
    is_on = False


def in_order(copies):
    return sorted(copies.iterdir(), key=lambda folder: int(folder.name))


def test_a_kill_between_any_file_operations_leaves_a_checkpoint(checkpoints, tmp_path):
    for epoch in (1, 2):
        checkpoints.save(content(epoch), is_best=True)
    with copied_before_each_operation(checkpoints.folder, tmp_path / "killed"):
        checkpoints.save(content(3), is_best=True)
    found = []
    for killed in map(CheckpointFolder, in_order(tmp_path / "killed")):
        found.append((epoch_of(killed.read_latest()), epoch_of(load_checkpoint(killed.best))))
        if killed.pending.exists():  # whole, and newer than `last.pt`
            assert found[-1] == (3, 3)
        # The run goes on: it reaches epoch 3 again, and the folder is as if nothing had happened.
        killed.load_latest(World(CPU))
        if found[-1][0] != 3:
            killed.save(content(3), is_best=True)
        killed.save(content(4))
        assert epochs(killed) | {"previous.pt": 3} == {"previous.pt": 3, "last.pt": 4, "best.pt": 3}
    assert len(found) > 6
    assert (found[0], found[-1]) == ((2, 2), (3, 3))
    assert {last for last, _ in found} == {2, 3}
