import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers.forks import ROOT

_OF_MAKE = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHON", "VENV"}
"""Variables with which one make tells another how it was called: these tests run under `make test`."""
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def folder(tmp_path):
    """A checkout without environments."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    return tmp_path


def commands(folder, *words):
    """What make would do."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    env = {name: value for name, value in os.environ.items() if name not in _OF_MAKE}
    done = subprocess.run(
        ["make", "-n", *words], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("version", "asked", "environment"),
    [
        (None, [f"PYTHON={sys.executable}"], ".venv"),
        (VERSION, [f"PYTHON={sys.executable}"], ".venv"),
        ("2.7", [f"PYTHON={sys.executable}"], f".venv-{VERSION}"),
        ("2.7", [], ".venv"),
    ],
)
def test_another_python_gets_an_environment_of_its_own(folder, version, asked, environment):
    if version is not None:
        (folder / f".venv/lib/python{version}").mkdir(parents=True)
    assert f"{environment}/bin/python -m pytest" in commands(folder, "test", *asked)


def test_the_floor_installs_with_the_lower_bounds(folder):
    shown = commands(folder, "test-floor")
    file = ".venv-floor/lower_bounds.txt"
    assert f"tools/lower_bounds.py > {file}" in shown
    assert shown.count(f"--constraint {file}") == 2
    assert "--constraint" not in commands(folder, "test")
