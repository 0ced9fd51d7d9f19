"""`_target_` nodes: what a user's callable gets, and what a mistake says."""

import copy
import sys

import pytest

from linnaeus.config.instantiate import call_target
from linnaeus.runtime.errors import ConfigError


class Thing:
    def __init__(self, *args, size=None, facts=None, inner=None):
        self.args, self.size, self.facts, self.inner = args, size, facts, inner


THING = f"{__name__}.Thing"


LEAF = {"_target_": THING, "size": 1}


def test_values_are_plain_copies_and_nested_nodes_are_built():
    node = {"_target_": THING, "size": [1, [2], [LEAF]], "inner": {"a": [3], "b": {"c": LEAF}}}
    before = copy.deepcopy(node)
    thing = call_target(node, "MODEL", offer={"size": 1})
    assert (thing.size[:2], thing.inner["a"]) == ([1, [2]], [3])
    assert {type(thing.size), type(thing.size[1]), type(thing.inner["a"])} == {list}
    assert type(thing.inner) is dict
    assert (thing.size[2][0].size, thing.inner["b"]["c"].size) == (1, 1)
    assert node == before


def test_what_the_framework_gives_comes_untouched():
    """Of what is offered, what the signature names and the node does not set."""
    facts, values = object(), [1, 2]
    thing = call_target(
        {"_target_": THING, "size": 7},
        "MODEL",
        facts,
        values,
        offer={"size": 1, "facts": facts, "x": 3},
    )
    assert thing.args[0] is thing.facts is facts
    assert thing.args[1] is values
    assert thing.size == 7
    node = {"_target_": "builtins.dict", "a": 1}
    assert call_target(node, "MODEL", offer={"a": 2, "b": 3}) == {"a": 1}


def test_positional_arguments_follow_those_of_the_framework():
    node = {"_target_": THING, "_args_": [1, {"_target_": "math.sqrt", "_args_": [9]}]}
    assert call_target(node, "MODEL", 0).args == (0, 1, 3.0)


def test_text_that_looks_like_an_interpolation_arrives_as_it_is():
    node = {"a": "${x}", "b": [r"\${y}"]}
    assert call_target({"_target_": "builtins.dict", **node}, "MODEL") == node


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder of modules, as the current folder is under `python -m`. Their imports are undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("own"):
            del sys.modules[name]


FAILING = """\
import json


class Model:
    def __init__(self, text):
        self.value = read(text)


def read(text):
    try:
        return json.loads(text)
    except ValueError as error:
        raise KeyError("no such text") from error


def unguarded(text):
    return json.loads(text)
"""


@pytest.mark.parametrize(
    ("name", "error", "line"), [("Model", KeyError, "13"), ("unguarded", ValueError, "17")]
)
def test_an_error_shows_the_last_line_of_the_users_code(package, name, error, line):
    (package / "own_model.py").write_text(FAILING)
    with pytest.raises(ConfigError) as caught:
        call_target({"_target_": f"own_model.{name}", "text": "{"}, "MODEL")
    (problem,) = caught.value.problems
    assert f"own_model.py, line {line}," in problem
    assert isinstance(caught.value.__cause__, error)
    with pytest.raises(ConfigError) as caught:
        call_target({"_target_": f"own_model.{name}", "colour": 1}, "MODEL")
    assert ".py" not in str(caught.value)  # the call never gets there


@pytest.mark.parametrize("text", ["x = 1\nimport no_such\n", "x = 1\ny = = 2\n"])
def test_a_module_that_cannot_be_imported_shows_its_line(package, text):
    (package / "own_broken.py").write_text(text)
    with pytest.raises(ConfigError, match=r"own_broken\.py, line 2"):
        call_target({"_target_": "own_broken.Model"}, "MODEL")
