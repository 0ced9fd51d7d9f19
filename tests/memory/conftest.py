"""Cgroup files, and what the tests of memory share."""

import sys

import psutil
import pytest
import torch

import linnaeus.autobatch.memory.host
from linnaeus.autobatch.memory.host import CpuMemory, available_host_bytes
from linnaeus.autobatch.trial import existing_objects_frozen

MIB = 1024**2
CPU = torch.device("cpu")
MACHINE = psutil.virtual_memory().total

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="host memory is measured on Linux")


def raised_from(error, *causes):
    """The error as `raise ... from` leaves it, with the causes innermost last."""
    inner = error
    for cause in causes:
        inner.__cause__ = cause
        inner = cause
    return error


@pytest.fixture(autouse=True, scope="module")
def _freeze_existing_objects():
    """`clean` collects garbage; frozen objects are skipped, among them all of torch."""
    with existing_objects_frozen():
        yield


class Cgroups:
    """A cgroup file system and the file that says where this process is in it."""

    def __init__(self, folder):
        self.root, self.membership = folder / "cgroup", folder / "membership"
        self.root.mkdir()

    def join(self, *lines):
        self.membership.write_text("".join(f"{line}\n" for line in lines))

    def v2(self, path, limit, used=0, inactive=0):
        folder = self._folder(self.root / path.strip("/"))
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 4096\nfile 8192\ninactive_file {inactive}\n")
        return folder

    def v1(self, path, limit, used=0, inactive=0):
        folder = self._folder(self.root / "memory" / path.strip("/"))
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive}\n")
        return folder

    def _folder(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def memory(self):
        return CpuMemory(CPU)

    def available(self):
        return available_host_bytes()


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    files = Cgroups(tmp_path)
    monkeypatch.setattr(linnaeus.autobatch.memory.host, "CGROUPS", files.root)
    monkeypatch.setattr(linnaeus.autobatch.memory.host, "MEMBERSHIP", files.membership)
    return files
