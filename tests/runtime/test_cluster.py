"""Ranks that differ, fail, are stopped and start again, as real processes under torchrun."""

import json
import re
import signal
import socket
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import psutil
import pytest
import torch

from linnaeus.config.schema import DistConfig
from linnaeus.runtime.distributed import World, join
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.signals import StopRequest
from linnaeus.training import stop
from tests.helpers import children
from tests.helpers.children import Outcome
from tests.helpers.odd_ranks import JOB, KINDS, PLACES
from tests.helpers.runs import assert_same_bits, free_ports, wait_until, weights
from tests.helpers.small_runs import lines_of

e2e, slow = pytest.mark.e2e, pytest.mark.slow


class Ranks:
    """A torchrun whose ranks may be odd; see `tests.helpers.odd_ranks`. Nothing of it outlives the test."""

    def __init__(self, folder, *argv, options=("--standalone", "--nproc_per_node=2"), **env):
        self.folder = folder
        self.log = folder / f"torchrun{len(list(folder.glob('torchrun*')))}.txt"
        command = ["-m", "torch.distributed.run", *options, "-m", "tests.helpers.odd_ranks", *argv]
        with self.log.open("w") as log:
            env = {"QUICK_BEATS": "1", **env}
            self.process = children.start(command, cwd=folder, env=env, stdout=log, stderr=log)

    def children(self):
        with suppress(psutil.Error):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def wait_for(self, path):
        """Until this file of the folder exists."""
        wait_until((self.folder / path).exists, self.process, self.log)

    def end(self):
        """Wait for the end; a job that hangs, or leaves a process behind, fails the test."""
        seen = set()

        def has_ended():
            seen.update(self.children())
            return self.process.poll() is not None

        try:
            wait_until(has_ended, log=self.log, limit_s=200)
            _, alive = psutil.wait_procs(seen, timeout=children.limit_s)
            assert not alive, f"{alive} are left: {self.log.read_text()}"
        finally:
            self.process.kill()
            for child in seen:
                with suppress(psutil.Error):
                    child.kill()
        return Outcome(self.process.returncode, self.log.read_text(), "")


def run_job(folder, *argv, **env):
    return Ranks(folder, *JOB, *argv, **env).end()


@e2e
@pytest.mark.parametrize(
    ("odd", "difference"),
    [
        ({"SHORTER": "1:40"}, "'train': 96"),
        ({"OTHER": "1:TRAIN.AUTO_RESUME=False"}, "TRAIN.AUTO_RESUME: True and False"),
    ],
)
def test_ranks_with_different_data_or_options_are_refused(tmp_path, odd, difference):
    ended = run_job(tmp_path, **odd)
    assert ended.code != 0
    assert difference in ended.out
    assert "linnaeus/run.py" not in ended.out, "a traceback of ours"


@pytest.mark.parametrize(
    ("in_job", "in_step", "is_refused"),
    [
        ("2", "2", True),  # srun
        ("2", "", False),  # sbatch
        ("2", "1", False),  # salloc
        ("1", "2", False),  # sbatch by a task of another step
    ],
)
def test_only_parallel_slurm_tasks_without_torchrun_are_refused(
    monkeypatch, in_job, in_step, is_refused
):
    """The variables are those of SLURM 22.05."""
    monkeypatch.setenv("SLURM_NTASKS", in_job)
    if in_step:
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", in_step)
    with (
        pytest.raises(ConfigError, match="torchrun") if is_refused else nullcontext(),
        join("cpu", DistConfig()) as world,
    ):
        assert world.world_size == 1


@pytest.mark.parametrize(("step_s", "num_steps"), [(5.0, 1), (0.1, 5)])
def test_ranks_with_slow_steps_look_for_a_signal_after_each(monkeypatch, step_s, num_steps):
    """A launcher ends ranks that have not saved their checkpoint within seconds."""
    seconds, exchanged = 0.0, []

    class Two(World):
        def reduce(self, values, how=""):
            exchanged.append(round(seconds / step_s))
            return values

    monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda: seconds))
    agreement = stop.StopAgreement(Two(torch.device("cpu"), world_size=2), StopRequest())
    for _ in range(40):
        seconds += step_s
        agreement.after_step()
    assert exchanged[:3] == [1, 1 + num_steps, 1 + 2 * num_steps]


@pytest.mark.parametrize(
    "name", [pytest.param("SIGINT", marks=slow), pytest.param("SIGTERM", marks=e2e)]
)
def test_a_signal_to_torchrun_ends_the_run_with_a_checkpoint(tmp_path, name):
    options = ("TRAIN.EPOCHS=12", "DATA.NUM_WORKERS=1")
    job = Ranks(tmp_path, *JOB, *options)
    job.wait_for("runs/small/checkpoints/last.pt")
    job.process.send_signal(signal.Signals[name])
    ended = job.end()
    assert ended.code != 0
    assert name in ended.out
    assert "rank 1" not in ended.out
    assert (tmp_path / "runs/small/logs/rank1.log").is_file()
    assert not re.search(r"linnaeus/(training|run\.py)", ended.out), "a traceback of ours"
    for run in ("small", "undisturbed"):
        run_job(tmp_path, *options, f"EXPERIMENT.NAME={run}").ok()
    runs = tmp_path / "runs"
    assert_same_bits(weights(runs / "small"), weights(runs / "undisturbed"))


@e2e
def test_ranks_of_a_killed_torchrun_save_a_checkpoint_and_end(tmp_path):
    job = Ranks(tmp_path, *JOB, "TRAIN.EPOCHS=400")
    job.wait_for("runs/small/checkpoints/last.pt")
    ranks = job.children()
    job.process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=children.limit_s)
    assert not alive, job.log.read_text()
    assert "SIGTERM" in job.log.read_text()


@slow
def test_two_agents_recover_at_the_first_attempt(tmp_path):
    nodes = "--nnodes=2 --nproc_per_node=1 --max-restarts=1 --rdzv_id=a --rdzv_backend=c10d"
    options = (*nodes.split(), f"--rdzv_endpoint=localhost:{free_ports(1)[0]}")
    env = {"FAULT": "SIGKILL:1:training in epoch 2"}
    agents = [Ranks(tmp_path, *JOB, "TRAIN.EPOCHS=4", options=options, **env) for _ in range(2)]
    ended = [agent.end() for agent in agents]
    assert [end.code for end in ended] == [0, 0], ended
    assert len(lines_of(tmp_path / "runs/small", "val")) == 4


@slow
def test_a_hanging_collective_reports_what_each_rank_is_doing(tmp_path):
    ended = run_job(tmp_path, "DIST.TIMEOUT_MINUTES=0.1", FAULT="hang:1:training in epoch 2")
    assert ended.code != 0
    assert re.search(r"\[rank 1\] rank 0: .*DIST.TIMEOUT_MINUTES", ended.out), ended.out
    assert re.search(r"rank (0, )?1: training in epoch 2, step 7", ended.out), "what it did"
    assert re.search(r"odd_ranks.py\W+line \d+ in watch", ended.out), "where it hangs"


@pytest.mark.parametrize(
    "is_asked_to_stop", [pytest.param(False, marks=slow), pytest.param(True, marks=e2e)]
)
def test_a_silent_store_is_waited_for_no_longer_than_allowed(tmp_path, is_asked_to_stop):
    """Such as that of a torchrun that is stopped, or another program's port."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        (tmp_path / "log.txt").open("w") as log,
    ):
        listener.settimeout(children.limit_s)
        minutes = 30 if is_asked_to_stop else 0.001
        env = {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            "TORCHELASTIC_ERROR_FILE": f"{tmp_path}/error",
        }
        command = ["-m", "linnaeus.main", *JOB, f"DIST.START_MINUTES={minutes}"]
        rank = children.start(command, cwd=tmp_path, env=env, stdout=log, stderr=log)
        with listener.accept()[0]:
            if is_asked_to_stop:
                rank.send_signal(signal.SIGTERM)
            code = rank.wait(children.limit_s)
    told = json.loads((tmp_path / "error").read_text())["message"]["message"]
    assert told in (tmp_path / "log.txt").read_text()
    assert code == (143 if is_asked_to_stop else 1)
    assert ("SIGTERM" if is_asked_to_stop else "DIST.START_MINUTES") in told


QUICKER = ("SIGKILL in training", "error while it joins", "deaf in training")


@pytest.mark.parametrize(
    ("kind", "rank", "place"),
    [
        pytest.param(
            kind, (first + number) % 2, place, marks=e2e if f"{kind} {place}" in QUICKER else slow
        )
        for first, kind in enumerate(KINDS)
        for number, place in enumerate(PLACES)
    ],
)
def test_a_fault_ends_all_with_its_cause_and_a_restart_resumes(tmp_path, kind, rank, place):
    ended = run_job(tmp_path, FAULT=f"{kind}:{rank}:{PLACES[place]}")
    assert (tmp_path / "fault_happened").exists(), ended.out
    trains = place in ("in training", "in validation", "while a checkpoint is written")
    if kind == "deaf":
        assert ended.code == 0, ended.out
        logs = (path.read_text() for path in tmp_path.glob("runs/small/logs/*.log"))
        assert re.search(rf"rank {rank} \(.*no heartbeat", "".join([ended.out, *logs])), (
            "it is named"
        )
    elif kind in ("SIGTERM", "SIGUSR1") and trains:
        assert kind in ended.out
    else:
        assert ended.code != 0
        cause = {"error": "ValueError", "SIGKILL": "process died", "SIGSTOP": "is stopped"}.get(
            kind, kind
        )
        assert re.search(rf"\[rank {1 - rank}\] rank {rank}: .*{cause}", ended.out), ended.out
    run_job(tmp_path).ok()
    assert len(lines_of(tmp_path / "runs/small", "val")) == 2
