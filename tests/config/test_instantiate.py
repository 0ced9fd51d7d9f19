"""`_target_` nodes: what a user's callable gets, and what a mistake says."""

from __future__ import annotations

from dataclasses import dataclass
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
