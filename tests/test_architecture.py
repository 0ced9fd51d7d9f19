"""Who may import whom, and what importing may not do."""

import ast
import functools
import json
import re
import sys
import tomllib
from importlib.util import find_spec

from tests.helpers import forks
from tests.helpers.forks import ROOT

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


def own_parts(path):
    """The parts of the package that a file imports, its own left out."""
    found = {part_of(name) for name in imports(path) if name.split(".")[0] == "linnaeus"}
    return found - {part_of(name_of(path)), ""}


def outside(path):
    return {name.split(".")[0] for name in imports(path)} - {"linnaeus"}


def test_imports_point_one_way():
    parts = {path: part_of(name_of(path)) for path in MODULES}
    assert {*parts.values()} - {""} == {*ORDER, "utils"}
    wrong = {}
    for path, part in parts.items():
        documented = part in ("utils", "")  # import paths for users
        for_users = ("version", "autobatch", "integrations", "inference")
        allowed = for_users if documented else ORDER[: ORDER.index(part)]
        if not own_parts(path) <= set(allowed):
            wrong[name_of(path)] = own_parts(path) - set(allowed)
    assert wrong == {}


PURE = (
    "autobatch/search.py",
    "autobatch/throughput.py",
    "data/taxonomy.py",
    "runtime/errors.py",
    "autobatch/split.py",
    "batch_plan/stages.py",
    "batch_plan/effective_batch.py",
    "batch_plan/advice.py",
    "batch_plan/plan.py",
    "batch_plan/scaling.py",
    "batch_plan/summary.py",
)


def test_what_computes_alone_imports_little():
    assert [name for name in PURE if not outside(PACKAGE / name) <= sys.stdlib_module_names] == []
    assert [
        name for name in imports(PACKAGE / "autobatch/search.py") if name.startswith("linnaeus")
    ] == []
    heavy = {"torch", "torchvision", "timm", "torchmetrics"}
    assert [path for path in (PACKAGE / "config").glob("*.py") if outside(path) & heavy] == []


SEARCH_ALONE = """
import json, sys
from importlib.machinery import PathFinder

absent = json.loads(sys.argv[1])

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in absent else super().find_spec(name, path, target)

for name in list(sys.modules):  # a fork has them already
    if name.split(".")[0] in (*absent, "linnaeus"):
        del sys.modules[name]
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
    done = forks.python("-c", SEARCH_ALONE, json.dumps(absent), cwd=tmp_path)
    assert done.code == 1
    assert "linnaeus[train]" in done.err, done.err
    assert "Traceback" not in done.err


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
print(json.dumps([a == b for a, b in zip(before, after)] + [not torch.cuda.is_initialized()]))
"""


def test_every_module_imports_and_changes_nothing_around_it(tmp_path):
    """Other packages, where installed, are imported first: what they do is not ours."""
    modules = [
        path for path in MODULES if "integrations" not in path.parts
    ]  # `make test` does without
    own = sorted(name_of(path) for path in modules)
    others = sorted({name for path in modules for name in outside(path)} - {"__future__"})
    others = [name for name in others if find_spec(name) is not None]
    done = forks.python("-c", IMPORT_ALL, json.dumps([others, own]), cwd=tmp_path)
    assert done.code == 0, done.err
    things = ("environment", "signals", "excepthook", "path", "folder", "CUDA")
    assert [name for name, same in zip(things, json.loads(done.out), strict=True) if not same] == []


def test_the_page_shows_the_order():
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert " -> ".join(ORDER) in page.replace("\n", " ")
