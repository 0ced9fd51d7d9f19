"""Cgroup files, and what the tests of memory share."""

import sys

import psutil
import pytest
import torch

from linnaeus.autobatch.memory import host

MIB = 1024**2
CPU = torch.device("cpu")
MACHINE = psutil.virtual_memory().total

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="host memory is measured on Linux")


class Cgroups:
    """A cgroup file system and the file that says where this process is in it."""

    def __init__(self, folder):
        self.root, self.membership = folder / "cgroup", folder / "membership"
        self.root.mkdir()

    def join(self, *lines):
        self.membership.write_text("".join(f"{line}\n" for line in lines))

    def v2(self, path, limit, used=0, inactive=0):
        files = {
            "memory.max": limit,
            "memory.current": used,
            "memory.stat": f"anon 4096\nfile 8192\ninactive_file {inactive}",
        }
        self._write(self.root / path.strip("/"), files)

    def v1(self, path, limit, used=0, inactive=0):
        files = {
            "memory.limit_in_bytes": limit,
            "memory.usage_in_bytes": used,
            "memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}",
        }
        self._write(self.root / "memory" / path.strip("/"), files)

    def _write(self, folder, files):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(f"{content}\n")

    def memory(self):
        return host.CpuMemory(CPU)

    def available(self):
        return host.available_host_bytes()


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    files = Cgroups(tmp_path)
    monkeypatch.setattr(host, "CGROUPS", files.root)
    monkeypatch.setattr(host, "MEMBERSHIP", files.membership)
    return files
