"""Limits and usage of the cgroups of a process, read from files."""

import psutil
import pytest

from linnaeus.autobatch.memory.device import GIB
from tests.memory.conftest import MACHINE, MIB, on_linux

pytestmark = on_linux
V1_LINES = ("12:pids:/job", "11:cpu,memory:/job/step", "1:name=systemd:/init.scope")


def test_no_limit_is_the_machine(cgroups):
    assert cgroups.memory().total_bytes == MACHINE  # no membership file
    cgroups.join("4:memory:/job", "0::/job")
    assert cgroups.memory().total_bytes == MACHINE  # no such groups
    cgroups.v2("/job", "max", used=MACHINE)
    cgroups.v1("/job", 9223372036854771712, used=MACHINE)
    assert cgroups.memory().total_bytes == MACHINE
    assert cgroups.available() == pytest.approx(psutil.virtual_memory().available, abs=GIB)


MEMBERSHIPS = {"v1": V1_LINES, "v2": ("", "nonsense", "0:", "::", "0::/job/step")}
"""Lines of the file, among them broken ones."""


@pytest.mark.parametrize(("outer", "inner"), [(900 * MIB, 300 * MIB), (300 * MIB, 900 * MIB)])
@pytest.mark.parametrize("version", MEMBERSHIPS)
def test_the_tightest_of_nested_limits_holds(cgroups, version, outer, inner):
    cgroups.join(*MEMBERSHIPS[version])
    write = getattr(cgroups, version)
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


@pytest.mark.parametrize("path", ["/docker/0a1b2c", "/../sibling", "//"])
@pytest.mark.parametrize("version", MEMBERSHIPS)
def test_a_path_of_the_host_ends_at_the_root(cgroups, version, path):
    """A container sees its own group there."""
    cgroups.join(f"{'4:memory' if version == 'v1' else '0:'}:{path}")
    getattr(cgroups, version)("/", 400 * MIB)
    assert cgroups.memory().total_bytes == 400 * MIB


@pytest.mark.parametrize("version", MEMBERSHIPS)
def test_what_the_kernel_can_reclaim_is_available(cgroups, version):
    cgroups.join(*MEMBERSHIPS[version])
    write = getattr(cgroups, version)
    write("/job", 300 * MIB, used=250 * MIB, inactive=100 * MIB)
    assert cgroups.available() == 150 * MIB
    write("/job", 300 * MIB, used=400 * MIB, inactive=10 * MIB)
    assert cgroups.available() == 0
