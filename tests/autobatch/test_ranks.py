"""AutoBatch under torchrun, with real processes and real faults."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from tests.helpers import forks
from tests.helpers.forks import ROOT
from tests.helpers.runs import SMALL, TORCHRUN, assert_same_bits, wait_until, weights

pytestmark = pytest.mark.distributed

TINY = (
    *(option for option in SMALL if not option.startswith("MODEL.")),
    "MODEL._target_=tests.autobatch.faulty.Model",
    "OPTIMIZER._target_=tests.autobatch.faulty.Optimizer",
    "DATA.IMG_SIZE=8",
    "DATA.AUTOBATCH.ENABLED=True",
    "DATA.AUTOBATCH.MAX_BATCH_SIZE=24",
    "TRAIN.EPOCHS=1",
)


class Job:
    """One torchrun, its output in a file; nothing of it outlives the test."""

    def __init__(
        self, folder: Path, *argv: str, nproc: int = 2, options: Sequence[str] = ("--standalone",), **env: str
    ) -> None:
        self.text = folder / f"torchrun{len(list(folder.glob('torchrun*')))}.txt"
        self.nproc = nproc
        launcher = ("-m", "torch.distributed.run", *options, f"--nproc_per_node={nproc}")
        with self.text.open("w") as file:
            self.process = forks.start(
                [*launcher, "-m", "linnaeus.main", *argv], cwd=folder, env={"PYTHONPATH": str(ROOT), **env},
                stdout=file, stderr=file,
            )  # fmt: skip

    def finish(self, timeout_s: float = 150) -> tuple[int, str]:
        """The exit code and everything printed; a job that hangs fails the test."""
        ranks = []
        try:
            with suppress(psutil.Error):
                ranks = psutil.Process(self.process.pid).children(recursive=True)
            code = self.process.wait(timeout_s)
        finally:
            self.process.kill()
            for rank in ranks:
                with suppress(psutil.Error):
                    rank.kill()
        return code, self.text.read_text()

    def rank(self, number: int) -> psutil.Process:
        """A rank's process, as soon as all are there: torchrun starts them in their order."""
        ranks: list[psutil.Process] = []

        def started() -> bool:
            with suppress(psutil.Error):
                ranks[:] = psutil.Process(self.process.pid).children()
            return len(ranks) == self.nproc

        wait_until(started, self.process, self.text)
        return sorted(ranks, key=lambda process: (process.create_time(), process.pid))[number]


def job(folder: Path, *argv: str, **env: str) -> tuple[int, str]:
    return Job(folder, *argv, **env).finish()


def sizes(folder: Path) -> tuple[int, int]:
    found = json.loads((folder / "runs/small/autobatch.json").read_text())
    return found["train"]["batch_size"], found["val"]["batch_size"]


def test_training_is_that_with_the_size_set_by_hand(tmp_path: Path) -> None:
    code, text = job(tmp_path, *TINY, "TRAIN.EPOCHS=2")
    assert code == 0, text
    train, val = sizes(tmp_path)
    assert (train, val) == (24, 16)
    code, text = job(
        tmp_path, *TINY, "TRAIN.EPOCHS=2", "DATA.AUTOBATCH.ENABLED=False", f"DATA.BATCH_SIZE={train}",
        f"DATA.BATCH_SIZE_VAL={val}", "EXPERIMENT.NAME=by_hand",
    )  # fmt: skip
    assert code == 0, text
    assert_same_bits(weights(tmp_path / "runs/small"), weights(tmp_path / "runs/by_hand"))


@pytest.mark.slow
def test_a_search_longer_than_the_timeout_of_collectives_costs_the_others_no_cpu(tmp_path: Path) -> None:
    """The search sleeps a second a step, so that the measurement ends well before rank 1 has work again."""
    steps = ("DATA.AUTOBATCH.STEPS_PER_TRIAL=5", "DATA.AUTOBATCH.STEPS_PER_TRIAL_VAL=1")
    process = Job(tmp_path, *TINY, *steps, "DIST.TIMEOUT_MINUTES=0.1", FAULT="slow:0")
    log = tmp_path / "runs/small/logs/rank1.log"
    waiting = process.rank(1)
    wait_until(lambda: log.exists() and "waiting for rank 0" in log.read_text())
    time.sleep(3)

    def others(text: str) -> list[str]:
        return [line for line in text.splitlines() if " s for rank 0: train: " not in line]

    log_before, before, started = log.read_text(), sum(waiting.cpu_times()[:2]), time.monotonic()
    time.sleep(6)
    share = (sum(waiting.cpu_times()[:2]) - before) / (time.monotonic() - started)
    log_after = log.read_text()
    code, text = process.finish()
    assert others(log_after) == others(log_before), "it waited for rank 0 all the time"
    assert re.search(
        r"waiting \d+ s for rank 0: train: (trying|confirming) batch size \d+, trial ", log_after
    )
    assert code == 0, text
    assert sizes(tmp_path) == (24, 16)
    assert share < 0.02, f"{share:.2%} of a core"


@pytest.mark.parametrize(
    "place",
    [
        "forward",
        pytest.param("backward", marks=pytest.mark.slow),
        pytest.param("optimizer", marks=pytest.mark.slow),
    ],
)
def test_one_rank_out_of_memory_lowers_the_size_for_all(tmp_path: Path, place: str) -> None:
    code, text = job(tmp_path, *TINY, FAULT=f"oom:1:{place}")
    assert code == 0, text
    train, val = sizes(tmp_path)
    assert train == 8
    assert val == (8 if place == "forward" else 16)
    found = json.loads((tmp_path / "runs/small/autobatch.json").read_text())
    assert found["train"]["limited_by"] == "memory"
    assert re.search(
        r"rank 1 fits no more than 8 \(train\): batch size \d+ ran out of memory, "
        r"the budget is \d+\.\d+ GiB, and \d+\.\d+ GiB are held before the first sample", text,
    )  # fmt: skip
    assert any(trial["batch_size"] == 8 and trial["status"] == "fits" for trial in found["train"]["trials"])


@pytest.mark.slow
def test_ranks_with_unequal_memory_take_the_smallest_size(tmp_path: Path) -> None:
    model = ("MODEL.NAME=test_resnet", "DATA.IMG_SIZE=64", "DATA.DATASET.NUM_SAMPLES=1024")
    limits = "DATA.AUTOBATCH.MAX_BATCH_SIZE=256"
    enabled = "DATA.AUTOBATCH.ENABLED=True"
    program = "import linnaeus.run, psutil; print(psutil.Process().memory_info().rss / 2**30)"
    base = float(forks.python("-c", program, cwd=tmp_path).out)  # what a process holds, roughly
    code, text = job(
        tmp_path, *SMALL, *model, enabled, limits, "TRAIN.EPOCHS=1",
        LINNAEUS_MEMORY_LIMIT_GB=f"{base + 9:.2f},{(base + 0.2) / 0.8:.2f}",
    )  # fmt: skip
    assert code == 0, text
    found = json.loads((tmp_path / "runs/small/autobatch.json").read_text())["train"]
    assert (found["batch_size"] < 256, found["limited_by"]) == (True, "memory")
    assert re.search(r"rank 1 fits no more than \d+", text)


def micro_batch(folder: Path) -> int:
    """The micro-batch size that a run has trained with."""
    return int(yaml.safe_load((folder / "config.yaml").read_text())["PLAN"]["MICRO_BATCH"])


@pytest.mark.slow
def test_a_planned_size_that_only_rank_0_has_run_is_run_on_every_rank(tmp_path: Path) -> None:
    """Rank 0 tries 18 on its way to 24. 36 samples per rank would be 2 x 18, but rank 1 cannot run 18."""
    options = (
        *TINY, "DATA.AUTOBATCH.STRATEGY=binary", "TRAIN.EFFECTIVE_BATCH_SIZE=72", "TRAIN.AUTO_RESUME=True",
        "DATA.AUTOBATCH.ENABLED_VAL=False", "DATA.AUTOBATCH.LOG_LEVEL=DEBUG",
    )  # fmt: skip
    code, text = job(tmp_path, *options, FAULT="not:1:18")
    assert code == 0, text
    run = tmp_path / "runs/small"
    found = json.loads((run / "autobatch.json").read_text())["train"]
    fits = [trial["batch_size"] for trial in found["trials"] if trial["status"] == "fits"]
    assert {24, 18, 12} <= set(fits), "rank 0 has run all of them"
    assert found["ran_on_every_rank"] == [24, 12]
    assert micro_batch(run) == 12
    log = run / "logs/rank1.log"
    tried = log.read_text().count("trying batch size")
    assert "batch size 18 oom" in log.read_text()
    code, text = job(tmp_path, *options, "TRAIN.EPOCHS=2", FAULT="not:1:18")
    assert code == 0, text
    assert micro_batch(run) == 12
    assert log.read_text().count("trying batch size") == tried, "the checkpoint says what every rank has run"


@pytest.mark.slow
def test_the_planned_size_of_ranks_with_unequal_memory_has_run_on_all(tmp_path: Path) -> None:
    """Rank 0 tries every power of two, and 128 samples per rank are split into one of them."""
    program = "import linnaeus.run, psutil; print(psutil.Process().memory_info().rss / 2**30)"
    base = float(forks.python("-c", program, cwd=tmp_path).out)
    code, text = job(
        tmp_path, *SMALL, "MODEL.NAME=test_resnet", "DATA.IMG_SIZE=64", "DATA.DATASET.NUM_SAMPLES=256",
        "DATA.AUTOBATCH.ENABLED=True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=128", "DATA.AUTOBATCH.STRATEGY=power",
        "DATA.AUTOBATCH.ENABLED_VAL=False", "TRAIN.EFFECTIVE_BATCH_SIZE=256", "TRAIN.EPOCHS=1",
        LINNAEUS_MEMORY_LIMIT_GB=f"{base + 9:.2f},{(base + 0.15) / 0.8:.2f}",
    )  # fmt: skip
    assert code == 0, text
    assert re.search(r"rank 1 fits no more than \d+", text)
    found = json.loads((tmp_path / "runs/small/autobatch.json").read_text())["train"]
    planned = micro_batch(tmp_path / "runs/small")
    assert planned in [trial["batch_size"] for trial in found["trials"]]
    assert planned in found["ran_on_every_rank"]


@pytest.mark.slow
def test_a_model_with_an_unused_branch_is_tried_as_it_is_trained(tmp_path: Path) -> None:
    model = "MODEL._target_=tests.autobatch.faulty.ModelWithUnusedBranch"
    code, text = job(tmp_path, *TINY, model, "DIST.FIND_UNUSED_PARAMETERS=True")
    assert code == 0, text
    assert sizes(tmp_path) == (24, 16)
    code, text = job(tmp_path, *TINY, model)
    assert code != 0, "the model has no unused branch"
    assert "Expected to have finished reduction in the prior iteration" in text


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_error_in_the_forward_pass_ends_all_with_its_message(tmp_path: Path, rank: int) -> None:
    code, text = job(tmp_path, *TINY, FAULT=f"error:{rank}")
    assert code != 0
    assert "ValueError: this forward is broken" in text
    assert f"[rank {1 - rank}] rank {rank}: ValueError: this forward is broken" in text


def test_nothing_fits(tmp_path: Path) -> None:
    code, text = job(tmp_path, *TINY, "DATA.AUTOBATCH.MEMORY_LIMIT_GB=0.05")
    assert code != 0
    for rank in (0, 1):
        assert re.search(rf"\[rank {rank}\] .*no batch size fits", text)
    assert "linnaeus/autobatch" not in text, "a traceback of ours"


@pytest.mark.slow
def test_time_is_up_before_anything_fits(tmp_path: Path) -> None:
    code, text = job(tmp_path, *TINY, "DATA.AUTOBATCH.TIMEOUT_MINUTES=0.01", FAULT="slow:0")
    assert code != 0
    assert re.search(r"\[rank 1\] .*TIMEOUT_MINUTES", text)


@pytest.mark.slow
def test_time_is_up_when_something_fits(tmp_path: Path) -> None:
    options = ("DATA.AUTOBATCH.TIMEOUT_MINUTES=0.15", "DATA.AUTOBATCH.MAX_BATCH_SIZE=4096")
    code, text = job(tmp_path, *TINY, *options, "DATA.DATASET.NUM_SAMPLES=9000", FAULT="slow:0")
    assert code == 0, text
    found = json.loads((tmp_path / "runs/small/autobatch.json").read_text())["train"]
    assert (found["limited_by"], found["certified"]) == ("timeout", False)
    assert any(
        trial["batch_size"] == found["batch_size"] and trial["status"] == "fits" for trial in found["trials"]
    )


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_job_and_the_others_say_so(tmp_path: Path, rank: int) -> None:
    code, text = job(tmp_path, *TINY, FAULT=f"kill:{rank}")
    assert code != 0
    died = rf"\[rank {1 - rank}\] rank {rank}: its process died \(train: warming up with batch size \d+\)"
    assert re.search(died, text)


@pytest.mark.slow
def test_a_waiting_rank_that_dies_ends_the_job(tmp_path: Path) -> None:
    searching = tmp_path / "searching"
    process = Job(tmp_path, *TINY, FAULT="slow:0", FAULT_LOG=str(searching))
    waiting = process.rank(1)
    wait_until(searching.exists)
    time.sleep(1)
    waiting.send_signal(signal.SIGKILL)
    code, text = process.finish()
    assert code != 0
    assert "[rank 0] rank 1: its process died (waiting)" in text


@pytest.mark.slow
def test_after_the_search_all_ranks_hold_the_same_parameters_and_sizes(tmp_path: Path) -> None:
    """Hashes of everything that a step may change, with one rank that ran out of memory on the way."""
    command = (*TORCHRUN, "--nproc_per_node=3", "-m", "tests.autobatch.digests", *TINY)
    env = {"PYTHONPATH": str(ROOT), "FAULT": "oom:1:backward"}
    outcome = forks.python(*command, "TRAIN.EMA.ENABLED=True", cwd=tmp_path, env=env)
    assert outcome.code == 0, outcome.err
    lines = sorted(map(json.loads, outcome.out.splitlines()), key=lambda line: line["rank"])
    assert [line["rank"] for line in lines] == [0, 1, 2]
    assert {(line["train"], line["val"]) for line in lines} == {(8, 11)}
    assert len({line["before"] for line in lines} | {line["after"] for line in lines}) == 1


@pytest.mark.slow
def test_a_hung_rank_ends_the_job_with_its_name(tmp_path: Path) -> None:
    code, text = job(tmp_path, *TINY, FAULT="stop:0")
    assert code != 0
    assert "[rank 1] rank 0: no sign of life for 30 s" in text


@pytest.mark.slow
def test_a_restarted_attempt_does_not_read_the_keys_of_the_last(tmp_path: Path) -> None:
    """The first attempt ends with an error in the store; the second must search anew."""
    marker = tmp_path / "second_attempt"
    wrapper = tmp_path / "restarting.py"
    wrapper.write_text(
        "import os, sys\n"
        "from linnaeus.main import cli\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] != '0':\n"
        "    os.environ['FAULT'] = ''\n"
        f"    open({str(marker)!r}, 'w').close()\n"
        "raise SystemExit(cli(sys.argv[1:]))\n"
    )
    command = (*TORCHRUN, "--nproc_per_node=2", "--max-restarts=1", wrapper, *TINY)
    outcome = forks.python(*command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "FAULT": "error:0"})
    assert outcome.code == 0, outcome.err
    assert marker.exists()
    assert sizes(tmp_path) == (24, 16)


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_two_nodes(tmp_path: Path, rendezvous: str) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = {
        "static": [f"--master_addr=localhost --master_port={port} --node_rank={node}" for node in (0, 1)],
        "c10d": [f"--rdzv_id=a --rdzv_backend=c10d --rdzv_endpoint=localhost:{port}"] * 2,
    }[rendezvous]
    nodes = [Job(tmp_path, *TINY, nproc=1, options=["--nnodes=2", *line.split()]) for line in options]
    outcomes = [node.finish() for node in nodes]
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    assert sizes(tmp_path) == (24, 16)


@pytest.mark.slow
def test_one_process_under_torchrun(tmp_path: Path) -> None:
    code, text = Job(tmp_path, *TINY, nproc=1).finish()
    assert code == 0, text
    assert sizes(tmp_path) == (24, 31)
