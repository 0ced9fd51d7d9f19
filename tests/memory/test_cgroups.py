"""Limits and usage of the cgroups of a process, read from files."""

import psutil
import pytest

from linnaeus.autobatch.memory.device import GIB
from tests.memory.conftest import MACHINE, MIB, on_linux

pytestmark = on_linux
V1_LINES = ("12:pids:/job", "11:cpu,memory:/job/step", "1:name=systemd:/init.scope")


@pytest.mark.parametrize(("outer", "inner"), [(900 * MIB, 300 * MIB), (300 * MIB, 900 * MIB)])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_tightest_of_nested_limits_holds(cgroups, version, outer, inner):
    cgroups.join(*(V1_LINES if version == "v1" else ["0::/job/step"]))
    write = cgroups.v1 if version == "v1" else cgroups.v2
    write("/job", outer)
    write("/job/step", inner)
    write("/job/step/below", 1 * MIB)
    write("/other", 1 * MIB)
    assert cgroups.memory().total_bytes == 300 * MIB
    assert cgroups.available() == min(300 * MIB, psutil.virtual_memory().available)


def test_both_versions_may_be_mounted(cgroups):
    cgroups.join(*V1_LINES, "0::/unified")
    cgroups.v1("/job/step", 700 * MIB)
    assert cgroups.memory().total_bytes == 700 * MIB
    cgroups.v2("/unified", 600 * MIB)
    assert cgroups.memory().total_bytes == 600 * MIB


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_container_sees_its_own_group_at_the_root(cgroups, version):
    """The path is the host's, and does not exist inside."""
    cgroups.join("4:memory:/docker/0a1b2c" if version == "v1" else "0::/docker/0a1b2c")
    (cgroups.v1 if version == "v1" else cgroups.v2)("/", 400 * MIB)
    assert cgroups.memory().total_bytes == 400 * MIB


@pytest.mark.parametrize("path", ["/../..", "/../sibling", "//", "/a:b", "/with space"])
def test_odd_paths_end_at_the_root(cgroups, path):
    cgroups.join(f"0::{path}")
    cgroups.v2("/", 400 * MIB)
    assert cgroups.memory().total_bytes == 400 * MIB


def test_no_limit_is_the_machine(cgroups):
    assert cgroups.memory().total_bytes == MACHINE  # no membership file
    cgroups.join("4:memory:/job", "0::/job")
    assert cgroups.memory().total_bytes == MACHINE  # no such groups
    cgroups.v2("/job", "max", used=MACHINE)
    cgroups.v1("/job", 9223372036854771712, used=MACHINE)
    assert cgroups.memory().total_bytes == MACHINE
    cgroups.v2("/job", MACHINE, used=MACHINE)
    assert cgroups.memory().total_bytes == MACHINE  # nor a group that may use all of it
    assert cgroups.available() == pytest.approx(psutil.virtual_memory().available, abs=GIB)


@pytest.mark.parametrize("line", ["", "nonsense", "0:", "::"])
def test_broken_lines_of_the_membership_do_not_hide_the_others(cgroups, line):
    cgroups.join(line, "0::/job", line)
    cgroups.v2("/job", 300 * MIB)
    assert cgroups.memory().total_bytes == 300 * MIB


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_what_the_kernel_can_reclaim_is_available(cgroups, version):
    cgroups.join("4:memory:/job" if version == "v1" else "0::/job")
    write = cgroups.v1 if version == "v1" else cgroups.v2
    write("/job", 300 * MIB, used=250 * MIB, inactive=100 * MIB)
    assert cgroups.available() == 150 * MIB
    write("/job", 300 * MIB, used=400 * MIB, inactive=10 * MIB)
    assert cgroups.available() == 0


def test_the_ranks_of_a_host_share_its_memory(cgroups, monkeypatch):
    cgroups.join("0::/job")
    cgroups.v2("/job", 300 * MIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert cgroups.memory().total_bytes == 100 * MIB
