"""Who may import whom, and what importing may not do."""

import ast
import functools
import re
import tomllib
from importlib.util import find_spec

import pytest

from tests.helpers import children
from tests.helpers.children import ROOT

PACKAGE = ROOT / "linnaeus"

ORDER = (
    "version",
    "autobatch",
    "integrations",
    "metrics",
    "runtime",
    "config",
    "batch_plan",
    "data",
    "models",
    "training",
    "size_search",
    "inference",
    "sweep",
    "run",
    "cli",
    "main",
    "train",
)
"""A module imports from its own part and from those before it."""

MODULES = sorted(PACKAGE.rglob("*.py"))


def part_of(module):
    """`data` for `linnaeus.data.loader`; empty for the package itself."""
    part = f"{module}.".split(".")[1]
    return "" if part.startswith("__") else part


@functools.cache
def imports(path):
    """Every module that a file imports, inside functions too; `from a import b` counts as `a.b`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_imports_point_one_way():
    wrong, seen = {}, set()
    for path in MODULES:
        part = part_of(name_of(path))
        documented = part in ("utils", "")  # import paths for users
        for_users = ("version", "autobatch", "integrations", "inference")
        allowed = for_users if documented else ORDER[: ORDER.index(part)]
        own = {part_of(name) for name in imports(path) if name.split(".")[0] == "linnaeus"}
        seen.add(part)
        if found := own - {part, "", *allowed}:
            wrong[name_of(path)] = found
    assert wrong == {}
    assert seen - {""} == {*ORDER, "utils"}
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert " -> ".join(ORDER) in page.replace("\n", " "), "the page shows the order"


SEARCH_ALONE = """
import sys
from importlib.machinery import PathFinder

absent = sys.argv[1].split()
for name in list(sys.modules):  # a fork has them already
    if name.split(".")[0] in (*absent, "linnaeus"):
        del sys.modules[name]

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in absent else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
import torch
from linnaeus import AutoBatchResult, auto_find_batch_size, longest, predict_memory
from linnaeus.utils.autobatch import auto_find_batch_size as same
assert same is auto_find_batch_size
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
def step(batch):
    model(batch).sum().backward()
    optimizer.step()
result = auto_find_batch_size(
    step, lambda n: torch.stack(longest(torch.zeros(3, 8), n)), state=(model, optimizer), max_batch_size=4
)
assert result.batch_size == 4
import linnaeus.main  # the control
"""


def test_the_library_needs_torch_and_psutil_alone(tmp_path):
    """A search runs where nothing else of what the framework needs is installed, NumPy neither."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[^\w-]", text)[0] for text in project["optional-dependencies"]["train"]}
    assert [re.split(r"[^\w-]", text)[0] for text in project["dependencies"]] == ["torch", "psutil"]
    modules = {"hydra-core": "hydra", "scikit-learn": "sklearn", "pillow": "PIL"}
    absent = sorted(
        {*(modules.get(name, name) for name in needed), "scipy", "pandas", "accelerate"}
    )
    assert {"rich", "omegaconf", "numpy", "timm", "torchvision"} < set(absent)
    done = children.python("-c", SEARCH_ALONE, " ".join(absent), cwd=tmp_path)
    assert done.code == 1
    assert "linnaeus[train]" in done.err, done.err
    assert "Traceback" not in done.err


IMPORT_ALL = """
import importlib, os, signal, sys

others, own = map(str.split, sys.argv[1:])
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
assert surroundings() == before
import torch
assert not torch.cuda.is_initialized()
"""


@pytest.mark.e2e
def test_every_module_imports_and_changes_nothing_around_it(tmp_path):
    """Other packages, where installed, are imported first: what they do is not ours."""
    modules = [
        path for path in MODULES if "integrations" not in path.parts
    ]  # `make test` does without
    own = " ".join(map(name_of, modules))
    roots = {name.split(".")[0] for path in modules for name in imports(path)} - {"linnaeus"}
    others = " ".join(name for name in sorted(roots) if find_spec(name) is not None)
    children.python("-c", IMPORT_ALL, others, own, cwd=tmp_path).ok()
