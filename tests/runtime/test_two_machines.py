"""A job on two machines: network namespaces with a cable between them and host names of their own."""

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.helpers.runs import SMALL, wait_until

NAMES = ("first", "second")
ADDRESSES = ("10.200.0.1", "10.200.0.2")

pytestmark = [pytest.mark.slow]


def run(line):
    subprocess.run(line.split(), check=True, capture_output=True)


class Machines:
    """Two hosts that share a file system, as those of a cluster do."""

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
        for rank, (name, space) in enumerate(zip(NAMES, self.spaces, strict=True)):
            inside = f"ip netns exec {space} unshare --uts sh -c"
            named = f'hostname {name} && exec "$@"'
            torchrun = f"-m torch.distributed.run --nnodes=2 --node_rank={rank} --nproc_per_node=1"
            main = f"--master_addr={NAMES[0]} --master_port=29511 -m linnaeus.main"
            words = [sys.executable, *torchrun.split(), *main.split(), *SMALL, *options]
            with self.logs[rank].open("w") as log:
                process = psutil.Popen(
                    [*inside.split(), named, "sh", *words],
                    cwd=self.folder,
                    stdout=log,
                    stderr=log,
                )
            self.processes.append(process)

    def text(self):
        return "\n".join(log.read_text() for log in self.logs)

    def end(self):
        """The exit codes. A process that is left after its torchrun fails the test."""
        started = {child for each in self.processes for child in each.children(recursive=True)}
        codes = [process.wait(200) for process in self.processes]
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive, self.text()
        return codes

    def remove(self):
        for process in self.processes:
            with suppress(psutil.Error):
                for child in (*process.children(recursive=True), process):
                    child.kill()
        for space, folder in zip(self.spaces, self.hosts, strict=True):
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


def test_a_cut_cable_ends_both_machines_naming_the_silent_rank(machines, tmp_path):
    machines.train("TRAIN.EPOCHS=100000", "DIST.TIMEOUT_MINUTES=0.5")
    lines = tmp_path / "runs/small/metrics.jsonl"
    wait_until(lambda: lines.exists() and lines.stat().st_size > 0)
    machines.cut()
    codes = machines.end()
    assert all(code not in (0, 2) for code in codes), machines.text()
    assert any(f"rank {rank}" in machines.text() for rank in (0, 1)), machines.text()
