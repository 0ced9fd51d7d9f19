"""A job on two machines: network namespaces with a cable between them and host names of their own."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.helpers.runs import SMALL, assert_same_bits, wait_until, weights
from tests.helpers.small_runs import lines_of

NAMES = ("first", "second")
ADDRESSES = ("10.200.0.1", "10.200.0.2")

pytestmark = [pytest.mark.slow]


def run(line):
    subprocess.run(line.split(), check=True, capture_output=True)


LATE = "-o negative_timeout=600,entry_timeout=600,attr_timeout=600"
"""Options of bindfs: what a host has found missing, or has read, stays so for it."""


class Machines:
    """Two hosts that share a file system, as those of a cluster do."""

    scripts = tuple(f'hostname {name} && exec "$@"' for name in NAMES)

    def __init__(self, folder):
        self.folder = folder
        self.spaces = [f"linnaeus-{os.getpid()}-{name}" for name in NAMES]
        self.hosts = [Path("/etc/netns", space) for space in self.spaces]
        self.logs = [folder / f"{name}.txt" for name in NAMES]
        self.processes = []

    def connect(self):
        for space, folder in zip(self.spaces, self.hosts, strict=True):
            run(f"ip netns add {space}")
            folder.mkdir(parents=True)
            known = zip(("127.0.0.1", *ADDRESSES), ("localhost", *NAMES), strict=True)
            (folder / "hosts").write_text("".join(f"{ip} {name}\n" for ip, name in known))
        first, second = (f"name eth0 netns {space}" for space in self.spaces)
        run(f"ip link add {first} type veth peer {second}")
        for space, address in zip(self.spaces, ADDRESSES, strict=True):
            run(f"ip -netns {space} address add {address}/24 dev eth0")
            run(f"ip -netns {space} link set eth0 up")
            run(f"ip -netns {space} link set lo up")

    def cut(self):
        run(f"ip -netns {self.spaces[1]} link set eth0 down")

    def train(self, *options):
        """Start the same command on both."""
        for rank, script in enumerate(self.scripts):
            nodes = f"--nnodes=2 --node_rank={rank} --nproc_per_node=1"
            address = f"--master_addr={NAMES[0]} --master_port=29511"
            torchrun = f"-m torch.distributed.run {nodes} {address} -m linnaeus.main"
            words = (sys.executable, *torchrun.split(), *SMALL, *options)
            with self.logs[rank].open("w") as log:
                process = psutil.Popen(
                    self.on(rank, script, *words),
                    cwd=self.folder,
                    stdout=log,
                    stderr=log,
                )
            self.processes.append(process)

    def on(self, rank, script, *arguments):
        """The command that runs a shell script there."""
        inside = f"ip netns exec {self.spaces[rank]} unshare --uts sh -c"
        return [*inside.split(), script, "sh", *arguments]

    def delay(self):
        """From now on a host sees late, in `runs`, what the other changes in `disk`."""
        for name in ("disk", "runs"):
            (self.folder / name).mkdir()
        command = f'bindfs {LATE} disk runs && "$@"; code=$?; umount runs; exit $code'
        self.scripts = tuple(f"hostname {name} && {command}" for name in NAMES)

    def text(self):
        return "\n".join(log.read_text() for log in self.logs)

    def end(self):
        """The exit codes. A process that is left after its torchrun fails the test."""
        started = {child for each in self.processes for child in each.children(recursive=True)}
        codes = [process.wait(200) for process in self.processes]
        self.processes.clear()
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive, self.text()
        return codes

    def remove(self):
        for space, folder in zip(self.spaces, self.hosts, strict=True):
            inside = subprocess.run(["ip", "netns", "pids", space], capture_output=True)
            for pid in map(int, inside.stdout.split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def machines(tmp_path):
    pair = Machines(tmp_path)
    try:
        try:
            pair.connect()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield pair
    finally:
        pair.remove()


def test_two_machines_train_as_one_with_two_ranks_does(machines, torchrun, tmp_path):
    search = ("DATA.AUTOBATCH.ENABLED=True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=8")
    machines.train(*search)
    assert machines.end() == [0, 0], machines.text()
    torchrun(2, *SMALL, *search, "EXPERIMENT.NAME=one").ok()
    runs = tmp_path / "runs"
    assert_same_bits(weights(runs / "small"), weights(runs / "one"))
    assert len(lines_of(runs / "small", "val")) == 2


def test_a_cut_cable_ends_both_machines_naming_the_silent_rank(machines, tmp_path):
    machines.train("TRAIN.EPOCHS=100000", "DIST.TIMEOUT_MINUTES=0.5")
    lines = tmp_path / "runs/small/metrics.jsonl"
    wait_until(lambda: lines.exists() and lines.stat().st_size > 0)
    machines.cut()
    codes = machines.end()
    assert all(code not in (0, 2) for code in codes), machines.text()
    assert any(f"rank {rank}" in machines.text() for rank in (0, 1)), machines.text()


@pytest.mark.skipif(shutil.which("bindfs") is None, reason="needs bindfs")
def test_ranks_that_see_files_late_save_shards_and_resume(machines, tmp_path):
    """As on a network file system, whose clients remember what they have seen."""
    machines.delay()
    changes = "ls runs/new; touch disk/new; ls runs/new"
    late = subprocess.run(
        machines.on(1, machines.scripts[1], "sh", "-c", changes), cwd=tmp_path, capture_output=True
    )
    assert (late.returncode, late.stdout) == (2, b""), "it is there, and not seen yet"
    sharded = ("DIST.SHARDING=full", "TRAIN.AUTO_RESUME=True")
    for epochs in (1, 2):
        machines.train(*sharded, f"TRAIN.EPOCHS={epochs}", "SCHEDULE.NAME=constant")
        assert machines.end() == [0, 0], machines.text()
    assert len(lines_of(tmp_path / "disk/small", "val")) == 2
