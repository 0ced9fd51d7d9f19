"""`_target_` nodes: what a user's callable gets, and what a mistake says."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from linnaeus.config.instantiate import call_target, find_target, is_target
from linnaeus.errors import ConfigError


@dataclass(frozen=True)
class Facts:
    """Something that the framework knows."""

    sizes: tuple[int, ...] = (1, 2)


class Thing:
    """A user's class."""

    def __init__(self, *args: Any, size: Any = None, facts: Any = None, inner: Any = None) -> None:
        self.args, self.size, self.facts, self.inner = args, size, facts, inner


class Strict:
    """A user's class that rejects a value with an error of its own."""

    def __init__(self, size: int) -> None:
        try:
            {}[size]
        except KeyError as error:
            raise ValueError(f"size {size} is not supported") from error


CONSTANT = 3
THING = f"{__name__}.Thing"


@pytest.mark.parametrize(
    ("node", "expected"),
    [({"_target_": "a.b"}, True), ({}, False), ({"target": "a.b"}, False), (None, False), (Facts(), False)],
)
def test_what_is_a_target(node: Any, expected: bool) -> None:
    assert is_target(node) is expected


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.Model", "MODEL._target_: 'no_such_package.Model' cannot be imported: .*no_such"),
        (f"{__name__}.Thingy", "MODEL._target_: .*Thingy' cannot be imported: .*Thingy"),
        (f"{__name__}.CONSTANT", "MODEL._target_: .*CONSTANT' is neither a class nor a function"),
        ("", "MODEL._target_: '' cannot be imported"),
    ],
)  # fmt: skip
def test_a_target_that_is_not_there_is_named(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_target({"_target_": path}, "MODEL")


def test_functions_and_classes_are_found() -> None:
    assert find_target({"_target_": THING}, "MODEL") is Thing
    assert find_target({"_target_": "math.sqrt"}, "MODEL")(9) == 3


def test_lists_and_mappings_arrive_as_plain_ones() -> None:
    thing = call_target({"_target_": THING, "size": [1, [2]], "inner": {"a": [3]}}, "MODEL")
    assert (thing.size, thing.inner) == ([1, [2]], {"a": [3]})
    assert {type(thing.size), type(thing.size[1]), type(thing.inner["a"])} == {list}
    assert type(thing.inner) is dict


def test_nested_targets_are_built_too() -> None:
    thing = call_target({"_target_": THING, "inner": {"_target_": THING, "size": 4}}, "MODEL")
    assert isinstance(thing.inner, Thing)
    assert thing.inner.size == 4


def test_positional_values_come_untouched() -> None:
    facts, values = Facts(), [1, 2]
    thing = call_target({"_target_": THING}, "MODEL", facts, values)
    assert thing.args[0] is facts
    assert thing.args[1] is values


def test_what_is_offered_comes_untouched() -> None:
    facts, sizes = Facts(), {"family": 2, "species": 3}
    thing = call_target({"_target_": THING}, "MODEL", offer={"facts": facts, "size": sizes})
    assert thing.facts is facts
    assert thing.size is sizes


def test_only_what_the_signature_names_is_offered_and_the_node_wins() -> None:
    thing = call_target({"_target_": THING, "size": 7}, "MODEL", offer={"size": 1, "facts": 2, "colour": 3})
    assert (thing.size, thing.facts) == (7, 2)


def test_the_node_is_left_as_it_was() -> None:
    node = {"_target_": THING, "inner": {"_target_": THING}}
    call_target(node, "MODEL", offer={"size": 1})
    assert node == {"_target_": THING, "inner": {"_target_": THING}}


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": THING, "colour": 1}, "MODEL: .*Thing failed with TypeError: .*colour"),
        ({"_target_": f"{__name__}.Strict", "size": 5}, "MODEL: .*Strict failed with ValueError: size 5 is"),
        (
            {"_target_": THING, "inner": {"_target_": f"{__name__}.Strict", "size": 5}},
            "MODEL: .*Thing failed with ValueError: size 5 is not supported",
        ),
        ({"_target_": THING, "inner": {"_target_": "no.such"}}, "MODEL: .*Thing failed with .*no"),
    ],
)  # fmt: skip
def test_a_call_that_fails_names_its_cause(node: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call_target(node, "MODEL")


def test_a_callable_without_a_signature_accepts_nothing_offered() -> None:
    assert call_target({"_target_": "builtins.dict", "a": 1}, "MODEL", offer={"a": 2, "b": 3}) == {"a": 1}


# --- Hydra's special keys ---


def test_positional_arguments_follow_those_of_the_framework() -> None:
    thing = call_target(
        {"_target_": THING, "_args_": [1, {"_target_": "math.sqrt", "_args_": [9]}]}, "MODEL", 0
    )
    assert thing.args == (0, 1, 3.0)


def test_a_partial_waits_for_its_call() -> None:
    inner = {"_target_": THING, "_partial_": True, "size": 4}
    thing = call_target({"_target_": THING, "inner": inner}, "MODEL")
    assert isinstance(thing.inner, functools.partial)
    assert (thing.inner(size=5).size, thing.inner().size) == (5, 4)
    assert isinstance(call_target({**inner, "_partial_": False}, "MODEL"), Thing)


def test_nodes_in_lists_and_mappings_are_built() -> None:
    leaf = {"_target_": THING, "size": 1}
    thing = call_target({"_target_": THING, "size": [[leaf]], "inner": {"a": {"b": leaf}}}, "MODEL")
    assert isinstance(thing.size[0][0], Thing)
    assert isinstance(thing.inner["a"]["b"], Thing)


@pytest.mark.parametrize("recursive", [True, False])
def test_without_recursion_nested_nodes_arrive_as_they_are(recursive: bool) -> None:
    leaf = {"_target_": THING, "size": 1}
    thing = call_target({"_target_": THING, "_recursive_": recursive, "inner": leaf, "size": [leaf]}, "MODEL")
    for found in (thing.inner, thing.size[0]):
        assert isinstance(found, Thing) == recursive
        assert (found == leaf) == (not recursive)


@pytest.mark.parametrize("how", ["none", "partial", "object", "all", "ALL"])
def test_arguments_are_plain_whatever_the_conversion(how: str) -> None:
    thing = call_target({"_target_": THING, "_convert_": how, "inner": {"a": [1]}}, "MODEL")
    assert type(thing.inner) is dict
    assert type(thing.inner["a"]) is list


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_partial_": "perhaps"}, r"MODEL\._partial_: 'perhaps' is not true or false"),
        ({"_recursive_": 2}, r"MODEL\._recursive_: 2 is not true or false"),
        ({"_args_": "ab"}, r"MODEL\._args_: 'ab' is not a list"),
        ({"_convert_": "some"}, r"MODEL\._convert_: 'some' is not one of none, partial, object, all"),
        (
            {"inner": {"_target_": THING, "_args_": 1}},
            r"MODEL: .*Thing failed with an argument: MODEL\.inner\._args_: 1 is not a list",
        ),
        (
            {"inner": [{"_target_": "math.nothing"}]},
            r"failed with an argument: MODEL\.inner\.0\._target_: 'math.nothing' cannot be imported",
        ),
    ],
)  # fmt: skip
def test_special_keys_with_other_values_are_named(node: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call_target({"_target_": THING, **node}, "MODEL")


def test_values_are_converted_where_the_signature_names_them_nested_ones_too() -> None:
    seen: list[tuple[str, Any]] = []

    def convert(parameter: inspect.Parameter, value: Any) -> Any:
        seen.append((parameter.name, value))
        return (value,) if parameter.name == "size" else value

    node = {"_target_": THING, "inner": {"_target_": THING, "size": 1}, "size": 2}
    thing = call_target(node, "MODEL", offer={"facts": 3}, convert=convert)
    assert (thing.size, thing.inner.size, thing.facts) == ((2,), (1,), 3)
    assert [name for name, _ in seen] == ["size", "inner", "size"]


# --- the user's own lines ---


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
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


def test_an_error_shows_the_line_that_raised_it(package: Path) -> None:
    (package / "own_model.py").write_text(FAILING)
    with pytest.raises(ConfigError) as caught:
        call_target({"_target_": "own_model.Model", "text": "{"}, "MODEL")
    message = "MODEL: own_model.Model failed with KeyError: 'no such text' (own_model.py, line 13, in read)"
    assert caught.value.problems == [message]
    assert isinstance(caught.value.__cause__, KeyError)
    assert isinstance(caught.value.__cause__.__cause__, json.JSONDecodeError)


def test_an_error_below_the_users_code_shows_the_users_line(package: Path) -> None:
    (package / "own_model.py").write_text(FAILING)
    with pytest.raises(ConfigError, match=r"JSONDecodeError: .* \(own_model\.py, line 17, in unguarded\)$"):
        call_target({"_target_": "own_model.unguarded", "text": "{"}, "MODEL")


def test_a_call_that_never_gets_there_shows_no_line() -> None:
    with pytest.raises(ConfigError) as caught:
        call_target({"_target_": THING, "colour": 1}, "MODEL")
    assert "line" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nimport no_such\n", r"No module named 'no_such' \(own_broken\.py, line 2, in <module>\)$"),
        ("x = 1\ny = = 2\n", r"cannot be imported: invalid syntax \(own_broken\.py, line 2\)$"),
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_imported_shows_its_line(package: Path, text: str, message: str) -> None:
    (package / "own_broken.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        find_target({"_target_": "own_broken.Model"}, "MODEL")


def test_only_what_is_named_is_imported(package: Path) -> None:
    (package / "own").mkdir()
    for name in ("__init__", "named", "beside"):
        (package / "own" / f"{name}.py").write_text("class Model:\n    pass\n")
    call_target({"_target_": "own.named.Model"}, "MODEL")
    assert {name for name in sys.modules if name.startswith("own.")} == {"own.named"}


@pytest.mark.parametrize(
    ("node", "hint"),
    [
        ({"SIZE": 1}, r"; did you mean LOSS\.size\?$"),
        ({"fatcs": 1}, r"; did you mean LOSS\.facts\?$"),
        ({"colour": 1}, r"argument 'colour'$"),
    ],
)
def test_a_misspelled_argument_is_met_with_the_closest(node: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        call_target({"_target_": THING, **node}, "LOSS")
