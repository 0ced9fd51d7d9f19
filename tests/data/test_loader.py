import os
import random
import re
import signal
import threading
from dataclasses import replace
from functools import partial
from itertools import combinations, repeat

import numpy as np
import pytest
import torch

from linnaeus.config.schema import DataConfig
from linnaeus.data.batch import Batch
from linnaeus.data.bundle import DataBundle, collate_pairs
from linnaeus.data.datasets import build_data
from linnaeus.data.loader import build_loaders, with_num_workers
from linnaeus.data.sampler import EpochSampler
from linnaeus.data.user_dataset import UserDataset
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import DataError
from linnaeus.runtime.rng import derive_seed, seed_generators
from tests.helpers import children
from tests.helpers.layouts import build
from tests.helpers.runs import wait_until
from tests.helpers.small_runs import PLAIN

CPU = torch.device("cpu")
WORKERS = [0, 2]


class Calls:
    """Each sample is what a function gives for its index, and the index."""

    def __init__(self, length, function):
        self.length = length
        self.function = function

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.function(index), index


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def drawn(index):
    """What the three global generators give, and the index."""
    return torch.tensor([*draw(), index])


draws = partial(Calls, function=drawn)


def noisy_collate(samples):
    batch = collate_pairs(samples)
    return Batch(batch.inputs + torch.rand(()) + random.random(), batch.targets)


def bundle_of(dataset, val=None, collate=collate_pairs):
    return DataBundle(dataset, val or dataset, None, None, None, collate)


def whole_batches(size, samples_per_rank):
    """Batches of one size, without an incomplete one at the end."""
    return lambda epoch, skip: repeat(size, (samples_per_rank - skip) // size)


def loaders(bundle, workers=0, size=4, rank=0, world=1, seed=0):
    return build_loaders(
        bundle,
        DataConfig(NUM_WORKERS=workers),
        World(CPU, rank, world),
        sizes=whole_batches(size, len(bundle.train) // world),
        batch_size_val=size + 1,
        seed=seed,
    )


@pytest.mark.parametrize(
    ("asked", "cores", "processes", "expected"),
    [(None, 64, 1, 8), (None, 8, 3, 2), (16, 2, 1, 16)],
)
def test_without_a_number_there_is_a_worker_for_each_core(
    nested, monkeypatch, asked, cores, processes, expected
):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    config, world = DataConfig(NUM_WORKERS=asked), World(CPU, 0, 1, processes)
    own = bundle_of(UserDataset(draws(16), "my.Draws", None, raw=False))
    for data in (build(nested), own):
        assert with_num_workers(config, data, world) == replace(config, NUM_WORKERS=expected)
    in_memory = with_num_workers(config, bundle_of(draws(1 << 20)), world)
    assert (asked or 0) == in_memory.NUM_WORKERS


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dataset_that_processes_cannot_share_loads_alone(rank, monkeypatch, caplog):
    caplog.set_level("INFO", logger="linnaeus.data")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    locked = Calls(16, threading.Lock())  # it holds what a fork would copy in a state of its own
    data = bundle_of(UserDataset(locked, "my.Data", None, raw=False))
    found = with_num_workers(DataConfig(NUM_WORKERS=None), data, World(CPU, rank, 2))
    assert found.NUM_WORKERS == 0
    assert ("my.Data" in caplog.text) == (rank == 0)


@pytest.mark.parametrize(("workers", "rank", "lines"), [(3, 0, 1), (3, 1, 0), (2, 0, 0)])
def test_more_workers_than_cores_are_told_once(monkeypatch, caplog, workers, rank, lines):
    """torch's own warnings would be errors here."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    with loaders(bundle_of(draws(8)), workers, rank=rank, world=2):
        assert sum("DATA.NUM_WORKERS" in line for line in caplog.messages) == lines


def epochs(made, numbers=(0, 1)):
    """All training batches of some epochs, each followed by validation."""
    batches = []
    for epoch in numbers:
        made.train.set_epoch(epoch)
        batches += [batch.inputs for batch in made.train]
        batches += [batch.inputs for batch in made.val]
    return batches


def assert_same(a, b):
    assert len(a) == len(b)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("workers", WORKERS)
def test_batches_depend_neither_on_workers_nor_on_a_resume(workers):
    bundle = bundle_of(draws(23), draws(11), noisy_collate)
    expected = epochs(loaders(bundle))
    assert len(expected) == 2 * (23 // 4 + 3)
    with loaders(bundle, workers) as made:
        made.train.set_epoch(7)
        for _ in made.train:
            break
        assert_same(epochs(made), expected)
        made.train.set_epoch(1, skip=2 * 4)
        assert len(made.train) == 3
        assert_same([batch.inputs for batch in made.train], expected[8 + 2 : 8 + 5])


def one_of_torch():
    return float(torch.rand(()))


def one_undrawn():
    return 0.5


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("number", [random.random, np.random.rand, one_of_torch, one_undrawn])
def test_one_sample_that_draws_gets_its_own_numbers(number, workers):
    """The batches before it do without seeds. Its batch alone is read again, and none if nothing is drawn."""
    rare, reads = list(EpochSampler(24, seed=0))[9][1], []  # in the third batch of an epoch

    def read(index):
        reads.append(index)
        return torch.tensor(number() if index == rare else 0.0)

    for starts in ([(0, 0), (1, 0)], [(0, 8)]):  # the second one is a resumed run
        reads.clear()
        seen = []
        seed_generators(1)
        with loaders(bundle_of(Calls(24, read)), workers) as made:
            for epoch, skip in starts:
                made.train.set_epoch(epoch, skip)
                seen.append(torch.cat([torch.stack(batch[:2], 1) for batch in made.train]).tolist())
        untouched = draw()
        seed_generators(1)
        assert draw() == untouched
        assert workers or len(reads) == sum(map(len, seen)) + 4 * (number is not one_undrawn)
        for (epoch, _), rows in zip(starts, seen, strict=True):
            seed_generators(derive_seed(0, epoch, rare))
            expected = torch.tensor(number()).item()
            assert [value for value, index in rows if index == rare] == [expected]
            assert {value for value, index in rows if index != rare} == {0.0}


def test_epochs_and_seeds_differ_and_validation_does_not():
    bundle = bundle_of(draws(12), draws(6))
    whole = [epochs(loaders(bundle), (0,)), epochs(loaders(bundle), (1,))]
    assert_same(whole[0][3:], whole[1][3:])
    whole.append(epochs(loaders(bundle, seed=1), (0,)))
    for a, b in combinations([torch.cat(batches[:3]) for batches in whole], 2):
        assert sorted(a[:, 3].tolist()) == sorted(b[:, 3].tolist()) == [*range(12)]
        assert not torch.equal(a[:, 3], b[:, 3])
        assert not set(a[:, 0].tolist()) & set(b[:, 0].tolist())


def test_a_sample_has_one_seed_in_any_batch_on_any_rank():
    bundle = bundle_of(draws(24))
    by_index = {}
    for size, world in [(4, 1), (6, 1), (3, 2)]:
        for rank in range(world):
            for inputs in epochs(loaders(bundle, size=size, rank=rank, world=world), (5,))[
                : 24 // size // world
            ]:
                for *values, index in inputs.tolist():
                    assert by_index.setdefault(index, tuple(values)) == tuple(values)
    assert len(by_index) == 24


@pytest.mark.parametrize("workers", WORKERS)
def test_an_error_in_users_code_tells_its_place(workers):
    bundle = build_data(DataConfig(DATASET={"_target_": f"{__name__}.failing_at_33"}), seed=0)
    with loaders(bundle, workers) as made, pytest.raises(DataError) as caught:
        epochs(made)
    message = str(caught.value)
    words = (f"{__name__}.failing_at_33", "sample 33", "ZeroDivisionError", "test_loader.py")
    assert [word for word in words if word not in message] == []
    assert "divide" in "".join(caught.value.__notes__)  # the traceback
    with loaders(bundle_of(Calls(40, divide)), workers) as made, pytest.raises(ZeroDivisionError):
        epochs(made)  # a built-in dataset has no such error: it stays what it is


def divide(index):
    return torch.ones(3) * (1 / (index - 33))


def failing_at_33(split):
    return Calls(40, divide)


def test_a_dead_worker_is_a_clear_error():
    with (
        loaders(bundle_of(Calls(8, die)), 1) as made,
        pytest.raises(DataError, match=r"DATA\.NUM_WORKERS"),
    ):
        epochs(made)


def die(index):
    os.kill(os.getpid(), signal.SIGKILL)


def describe_worker(index):
    ignores = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return torch.tensor([torch.get_num_threads(), ignores, os.getpid()])


def test_workers_stay_between_epochs_and_end_when_closed():
    """They use one thread, and leave Ctrl-C to the main process."""
    with loaders(bundle_of(Calls(16, describe_worker)), 2) as made:
        seen = [
            {tuple(row) for inputs in epochs(made, (epoch,))[:4] for row in inputs.tolist()}
            for epoch in (0, 1)
        ]
        pids = {pid for *_, pid in seen[0]}
        assert seen[0] == seen[1] == {(1, 1, pid) for pid in pids}
        assert len(pids) == 2
        assert all(is_alive(pid) for pid in pids)
    assert not any(is_alive(pid) for pid in pids)
    made.train.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(iter(made.train))


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.e2e
def test_interrupted_processes_end_quietly(tmp_path):
    """What a user sees on the terminal."""
    log = tmp_path / "log.txt"
    argv = ["-W", "error", "-m", "linnaeus.main", *PLAIN]
    argv += ["DATA.NUM_WORKERS=2", "TRAIN.EPOCHS=100000"]
    with log.open("w") as file:
        process = children.start(
            argv,
            cwd=tmp_path,
            stdout=file,
            stderr=file,
            finalize=True,
            new_session=True,  # Ctrl-C reaches all processes of the terminal's group, workers too
        )
    wait_until((tmp_path / "runs/plain/metrics.jsonl").exists, process, log)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(children.limit_s) == 130
    assert not re.search("Traceback|Exception|Error|Warning", log.read_text())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pin", [True, False])
def test_batches_are_on_the_gpu_one_ahead(pin):
    config = DataConfig(NUM_WORKERS=2, PIN_MEMORY=pin)
    with build_loaders(
        bundle_of(draws(8)),
        config,
        World(torch.device("cuda")),
        sizes=whole_batches(4, 8),
        batch_size_val=4,
        seed=0,
    ) as made:
        batches = [batch.inputs for batch in made.train]
        assert [batch.device.type for batch in batches] == ["cuda"] * 2
        assert sorted(torch.cat(batches)[:, 3].tolist()) == [*range(8)]
