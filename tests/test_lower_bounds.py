import runpy

from tests.helpers.children import ROOT

lower_bounds = runpy.run_path(str(ROOT / "tools" / "lower_bounds.py"))["lower_bounds"]

PROJECT = """
[project]
name = "own"
dependencies = ["torch>=2.11"]
[project.optional-dependencies]
a = ["hydra-core>=1.3,<1.4", "jsonargparse[signatures]>=4.43"]
b = ["own[a]", "timm>=1.0.24"]
"""


def test_each_package_has_one_lower_bound_from_all_extras():
    expected = {"torch": "2.11", "hydra-core": "1.3", "jsonargparse": "4.43", "timm": "1.0.24"}
    assert lower_bounds(PROJECT) == expected
