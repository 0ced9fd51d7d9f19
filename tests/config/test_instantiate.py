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
    assert {type(each) for each in (thing.size, thing.size[1], thing.inner["a"])} == {list}
    assert type(thing.inner) is dict
    assert (thing.size[2][0].size, thing.inner["b"]["c"].size) == (1, 1)
    assert node == before


def test_what_the_framework_gives_comes_untouched():
    """Of what is offered, what the signature names and the node does not set."""
    facts, values = object(), [1, 2]
    node = {"_target_": THING, "size": 7}
    thing = call_target(node, "MODEL", facts, values, offer={"size": 1, "facts": facts, "x": 3})
    assert thing.args[0] is thing.facts is facts
    assert thing.args[1] is values
    assert thing.size == 7
    node = {"_target_": "builtins.dict", "a": 1}
    assert call_target(node, "MODEL", offer={"a": 2, "b": 3}) == {"a": 1}


def test_positional_arguments_follow_those_of_the_framework():
    node = {"_target_": THING, "_args_": [1, {"_target_": "math.sqrt", "_args_": [9]}]}
    assert call_target(node, "MODEL", 0).args == (0, 1, 3.0)


SOURCE = """\
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
    ("source", "name", "line"),
    [
        (SOURCE, "Model", 13),
        (SOURCE, "unguarded", 17),
        ("x = 1\nimport no_such\n", "Model", 2),
        ("x = 1\ny = = 2\n", "Model", 2),
    ],
)
def test_an_error_shows_the_last_line_of_the_users_code(tmp_path, monkeypatch, source, name, line):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_model.py").write_text(source)
    with pytest.raises(ConfigError, match=rf"own_model\.py, line {line}\b"):
        call_target({"_target_": f"own_model.{name}", "text": "{"}, "MODEL")
    sys.modules.pop("own_model", None)
