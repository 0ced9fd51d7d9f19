"""Who may import whom, and what importing may not do."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import forks
from tests.helpers.forks import ROOT

PACKAGE = ROOT / "linnaeus"

ORDER = (
    "words", "errors", "files", "rng", "nest", "signals", "control", "config", "batching", "memory", "dist",
    "console", "log", "tracking", "data", "models", "training", "autobatch", "inference", "integrations",
    "run", "launchers", "commands", "main", "train",
)  # fmt: skip
"""A module imports from its own part and from those before it."""

MODULES = sorted(PACKAGE.rglob("*.py"))

TOOL = runpy.run_path(str(ROOT / "tools" / "draw_architecture.py"))
part_of: Callable[[str], str] = TOOL["part_of"]
imports: Callable[[Path], Iterator[str]] = TOOL["imports"]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def own_parts(path: Path) -> set[str]:
    """The parts of the package that a file imports, its own left out."""
    found = {part_of(name) for name in imports(path) if name.split(".")[0] == "linnaeus"}
    return found - {part_of(name_of(path)), ""}


def outside(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)} - {"linnaeus"}


def test_every_part_has_its_place() -> None:
    assert {part_of(name_of(path)) for path in MODULES} - {""} == {*ORDER, "utils"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(name_of(path))
    if part in ("utils", ""):  # documented import paths
        allowed: tuple[str, ...] = ("autobatch", "inference")
    else:
        allowed = ORDER[: ORDER.index(part)]
    assert own_parts(path) <= set(allowed)


def test_only_commands_import_the_command() -> None:
    others = [path for folder in ("tools", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    importers = {
        name_of(path) if path.is_relative_to(PACKAGE) else path.relative_to(ROOT).parts[0]
        for path in [*MODULES, *others]
        if own_parts(path) & {"run", "main"}
    }
    assert importers <= {"linnaeus.commands.train.session", "linnaeus.train", "tools"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "config").glob("*.py")), ids=name_of)
def test_reading_a_configuration_needs_no_torch(path: Path) -> None:
    assert not outside(path) & {"torch", "torchvision", "timm", "torchmetrics"}


@pytest.mark.parametrize(
    "name",
    [
        "autobatch/search.py", "autobatch/throughput.py", "data/taxonomy.py", "errors.py",
        "batching/facts.py", "batching/scaling.py", "batching/stages.py", "batching/sizes.py",
        "batching/advice.py", "batching/plan.py", "batching/summary.py", "commands/plan/arithmetic.py",
        "commands/duration.py",
    ],
)  # fmt: skip
def test_pure_modules_import_the_standard_library_alone(name: str) -> None:
    assert outside(PACKAGE / name) <= sys.stdlib_module_names


def test_the_search_knows_nothing_of_the_rest() -> None:
    path = PACKAGE / "autobatch" / "search.py"
    assert not any(name.startswith("linnaeus") for name in imports(path))


WATCHED = {"torch", "hydra", "omegaconf", "timm", "torchvision", "wandb", "rich", "matplotlib"}
UNWANTED = {
    "linnaeus.config.load": {"torch"},
    "linnaeus.batching.plan": {"torch"},
    "linnaeus.batching.summary": {"torch"},
    "linnaeus.main": {"torch"},  # a misspelled key does not wait for it
    "linnaeus.autobatch.search": {"torch"},
    "linnaeus.utils.autobatch": WATCHED - {"torch"},
}
"""Modules, and what importing one of them alone may not load."""


LOADED_BY = """
import importlib, json, os, sys

names, watched = json.loads(sys.argv[1])
for name in names:
    reader, writer = os.pipe()
    if os.fork() == 0:
        importlib.import_module(name)
        os.write(writer, json.dumps([other for other in watched if other in sys.modules]).encode())
        os._exit(0)
    os.close(writer)
    print(os.read(reader, 10000).decode())
    os.wait()
"""
"""Each module in a fork of a fresh process, in which nothing but the standard library is loaded."""


def output_of(program: str, *argv: str) -> str:
    """What a program prints that runs in a new interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program, *argv],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def loaded_by() -> dict[str, set[str]]:
    """The watched packages that importing each module alone loads."""
    lines = output_of(LOADED_BY, json.dumps([[*UNWANTED], sorted(WATCHED)])).splitlines()
    return {name: set(json.loads(line)) for name, line in zip(UNWANTED, lines, strict=True)}


@pytest.mark.parametrize("name", UNWANTED)
def test_importing_one_module_does_not_load(loaded_by: dict[str, set[str]], name: str) -> None:
    assert not loaded_by[name] & UNWANTED[name]


SEARCH_ALONE = """
import json, sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in absent else super().find_spec(name, path, target)

absent = set(json.loads(sys.argv[1]))
sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
import torch
before = set(sys.modules)
from linnaeus import AutoBatchResult, auto_find_batch_size, longest, predict_memory
from linnaeus.utils.autobatch import auto_find_batch_size as same
assert same is auto_find_batch_size
imported = set(sys.modules)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
def step(batch):
    model(batch).sum().backward()
    optimizer.step()
result = auto_find_batch_size(
    step, lambda n: torch.stack(longest(torch.zeros(3, 8), n)), state=(model, optimizer), max_batch_size=4
)
assert result.batch_size == 4
loaded = {name.split(".")[0] for name in imported - before} - sys.stdlib_module_names - {"linnaeus"}
print(json.dumps(sorted(loaded)))
"""


def test_the_library_needs_torch_and_psutil_alone() -> None:
    """A search runs where nothing else of what the framework needs is installed, NumPy neither."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[^\w-]", text)[0] for text in project["dependencies"]} - {"torch", "psutil"}
    modules = {"hydra-core": "hydra", "scikit-learn": "sklearn", "pillow": "PIL"}
    absent = sorted({*(modules.get(name, name) for name in needed), "scipy", "pandas", "accelerate"})
    assert {"rich", "omegaconf", "numpy", "timm", "torchvision"} < set(absent)
    assert json.loads(output_of(SEARCH_ALONE, json.dumps(absent))) == ["psutil"]


IMPORT_ALL = """
import importlib, json, os, signal, sys

others, own = json.loads(sys.argv[1])
for name in others:
    importlib.import_module(name)

def surroundings():
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return dict(os.environ), handlers, sys.excepthook, sys.path[:], os.getcwd()

for name in own:  # a fork has them already
    sys.modules.pop(name, None)
before = surroundings()
for name in own:
    importlib.import_module(name)
after = surroundings()
import torch
print(json.dumps([a == b for a, b in zip(before, after)] + [torch.cuda.is_initialized()]))
"""


OPTIONAL = ("lightning", "transformers", "accelerate")
"""What the integrations import; `make test` does without."""


def test_every_module_imports_and_changes_nothing_around_it(tmp_path: Path) -> None:
    """Other packages are imported first: what they do is not ours."""
    missing = {name for name in OPTIONAL if importlib.util.find_spec(name) is None}
    modules = [path for path in MODULES if not (missing and "integrations" in path.parts)]
    own = sorted(name_of(path) for path in modules)
    others = sorted({name for path in modules for name in outside(path)} - {"__future__"})
    done = forks.python("-c", IMPORT_ALL, json.dumps([others, own]), cwd=tmp_path)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    unchanged = dict(zip(("environment", "signals", "excepthook", "path", "folder"), result, strict=False))
    assert all(unchanged.values()), unchanged
    assert result[-1] is False, "importing must not touch CUDA"
