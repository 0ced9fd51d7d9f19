"""What a user types arrives as typed, in the key's type."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linnaeus.config.load import load_config
from linnaeus.config.overrides import LONG_NAMES, OPTIONS
from linnaeus.config.schema import Config
from linnaeus.config.values import evaluate, split_list
from linnaeus.errors import ConfigError

# What the tests refer to; the schema may choose other defaults.
BASE = ["TRAIN.EPOCHS=20", "TRAIN.LOG_EVERY=20", "OPTIMIZER.LR=0.002", "DATA.AUGMENT.CROP_SCALE=0.8,1"]


def load(*argv: str) -> Config:
    return load_config([*BASE, *argv]).config


def value_of(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def loaded(name: str, text: str) -> Any:
    """The value of a key in both spellings, which must agree."""
    values = [value_of(load(*argv), name) for argv in ([f"{name}={text}"], [name, text])]
    assert values[0] == values[1] or values[0] != values[0]
    assert type(values[0]) is type(values[1])
    return values[0]


def problem(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    (text,) = caught.value.problems
    return text


def is_quoted(text: str) -> bool:
    return len(text) > 1 and text[0] == text[-1] and text[0] in "'\""


texts = st.text() | st.text(alphabet="a '\"\\,()[]{}=#$~:*?<>|é\n-")
plain_texts = texts.filter(lambda text: "${" not in text and text != "???" and not is_quoted(text))

HARD_TEXTS = [
    "", " ", " a ", "a b", "a,b", "(x)", "[a]", "{a: 1}", "a=b", "a#b", "# x", "$HOME", "a$b", "$(x)",
    "it's", 'say "x"',
    "'a' and 'b'", "C:\\data\\x", "C:\\", "~/x", "1e-3", "1e3", "007", "0x10", "true", "on", "null",
    "None", "nan",
    "1_000", "2024-01-01", "1:30", "*x", "&x", "!x", "%x", "@x", "`x`", "a: b", "- a", "ünïcödé", "日本",
    "a\tb",
    "a\nb", "choice(a,b)", "range(1,3)", "/data/birds (2021), 'best'/x=1", "--x", "-", "{x}",
]  # fmt: skip


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_text_arrives_as_typed(text: str) -> None:
    assert loaded("EXPERIMENT.OUTPUT_DIR", text) == text


@given(plain_texts)
def test_any_text_arrives_as_typed(text: str) -> None:
    if text not in ("--help", "-h"):
        assert value_of(load(f"EXPERIMENT.OUTPUT_DIR={text}"), "EXPERIMENT.OUTPUT_DIR") == text
    if text.partition("=")[0] not in (*OPTIONS, *LONG_NAMES, "--help", "-h", "--opts"):
        config = load("EXPERIMENT.OUTPUT_DIR", text)
        assert text == config.EXPERIMENT.OUTPUT_DIR


@given(plain_texts, st.sampled_from("'\""))
def test_wholly_quoted_text_loses_only_its_quotes(text: str, quote: str) -> None:
    inner = text.replace(quote, "").replace("\\", "/")
    assert loaded("EXPERIMENT.OUTPUT_DIR", f"{quote}{inner}{quote}") == inner


@given(plain_texts)
def test_text_without_a_type_is_never_lost(text: str) -> None:
    """Below KWARGS, Hydra's grammar gives the value; where it is text, it is the text typed."""
    value = load(f"MODEL.KWARGS.x={text}").MODEL.KWARGS
    if isinstance(value["x"], str):
        assert value["x"] == text


def test_quotes_and_null_for_optional_text() -> None:
    assert [loaded("DATA.DATASET.ROOT", text) for text in ("null", "None", "none")] == [None] * 3
    assert loaded("DATA.DATASET.ROOT", "'None'") == "None"
    assert loaded("DATA.DATASET.ROOT", '"null"') == "null"
    assert loaded("DATA.DATASET.ROOT", r"'it\'s'") == "it's"
    assert loaded("EXPERIMENT.OUTPUT_DIR", "None") == "None"  # not optional, so it is a name


@given(st.integers(min_value=1, max_value=10**30))
def test_whole_numbers(number: int) -> None:
    assert loaded("DATA.BATCH_SIZE", str(number)) == number


@given(st.floats(min_value=1e-300, allow_infinity=False))
def test_numbers(number: float) -> None:
    assert loaded("OPTIMIZER.LR", repr(number)) == number


@pytest.mark.parametrize(("text", "number"), [
    ("8", 8), (" 8 ", 8), ("1e3", 1000), ("8.0", 8), ("1_000", 1000), ("0x10", 16), ("6/2", 3),
    ("2 * (3 + 4)", 14),
    ("-2 + 3", 1), ("7 // 2", 3), ("--3", 3), ("'8'", 8), ("${TRAIN.EPOCHS}", 20),
    ("${TRAIN.EPOCHS} * 2 + 1", 41),
    ("(${TRAIN.EPOCHS} + ${TRAIN.LOG_EVERY}) / 8", 5), ("\"${TRAIN.EPOCHS} // 3\"", 6),
])  # fmt: skip
def test_whole_number_spellings(text: str, number: int) -> None:
    value = loaded("DATA.BATCH_SIZE", text)
    assert (value, type(value)) == (number, int)


@pytest.mark.parametrize("text", [
    "", "many", "8.5", "5/2", "True", "null", "[8]", "8,16", "nan", "inf", "-inf", "1e400", "1/0", "1//0",
    "2**3", "2 % 3",
    "__import__('os')", "abs(3)", "3 if 1 else 2", "1j", "(((", "'x'*3", "(" * 300, "-" * 150, "9" * 5000,
    "${TRAIN.AMP}",
    "${TRAIN.EPOCHS} ** 2", "${TRAIN.EPOCHS} / 3", "${TRAIN.EPOCHS} % 3", "${TRAIN.EPOCHS}' + '1",
    "${TRAIN.EPOCHS",
    "${DATA.AUGMENT.CROP_SCALE}", "${DATA.AUGMENT}", "${nope:1}", "${MODEL.WEIGHTS}", "lambda: 3", "0", "-1",
])  # fmt: skip
def test_not_a_positive_whole_number(text: str) -> None:
    assert problem(f"DATA.BATCH_SIZE={text}").startswith("DATA.BATCH_SIZE: ")


@pytest.mark.parametrize(("text", "expected"), [
    ("many", "'many' is not a whole number (command line)"),
    ("8.5", "'8.5' is not a whole number (command line)"),
    ("5/2", "'5/2' = 2.5 is not a whole number (command line)"),
    ("2**3", "arithmetic takes only + - * / //, numbers and parentheses"),
    ("1/0", "'1/0' divides by zero"),
    ("nan", "'nan' is not a finite number"),
    ("null", "'null' is not a whole number"),
    ("${TRAIN.EPOCHS} ** 2", "'${TRAIN.EPOCHS} ** 2' cannot be resolved: '20 ** 2' is not a whole number"),
    ("${TRAIN.EPOCHS} / 0", "divides by zero"),
    ("${TRAIN.EPOCH}", "there is no key TRAIN.EPOCH; did you mean TRAIN.EPOCHS?"),
    ("${DATA.BATCH_SIZE}", "it refers to itself"),
    ("${DATA.BATCH_SIZE_VAL}", "it refers to itself"),
    ("${x", "is not a valid interpolation"),
    ("0", "0 is not allowed: it must be >= 1"),
    ("???", "has no value yet, and needs one"),
])  # fmt: skip
def test_message_for_a_whole_number(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"DATA.BATCH_SIZE={text}")
    (message,) = [text for text in caught.value.problems if text.startswith("DATA.BATCH_SIZE: ")]
    assert expected in message


def test_a_bool_is_not_a_number() -> None:
    assert "True is not a whole number" in problem("DATA={BATCH_SIZE: true}")
    assert "True is not a number" in problem("DATA.AUGMENT={HFLIP: true}")


def test_huge_products_are_refused() -> None:
    assert "finite" in problem("OPTIMIZER.LR=1e308*1e308")


@pytest.mark.parametrize("text", ["true", "True", "1", "yes", "on", "ON", "'true'"])
def test_true(text: str) -> None:
    assert loaded("TRAIN.COMPILE", text) is True


@pytest.mark.parametrize("text", ["false", "False", "0", "no", "off"])
def test_false(text: str) -> None:
    assert loaded("DATA.PIN_MEMORY", text) is False


@pytest.mark.parametrize("text", ["", "2", "maybe", "null", "[true]"])
def test_neither_true_nor_false(text: str) -> None:
    assert "is not true or false" in problem(f"TRAIN.COMPILE={text}")


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("DATA.AUGMENT.CROP_SCALE", "[0.5,1.0]", [0.5, 1.0]),
    ("DATA.AUGMENT.CROP_SCALE", "0.5, 1", [0.5, 1.0]),
    ("DATA.AUGMENT.CROP_SCALE", "[1/4, ${DATA.AUGMENT.CROP_FRACTION}]", [0.25, 1.0]),
    ("DATA.AUGMENT.MEAN", "${DATA.AUGMENT.CROP_SCALE}", [0.8, 1.0]),
    ("DATA.AUGMENT.MEAN", "null", None),
    ("DATA.DATASET.NUM_CLASSES", "7", [7]),
    ("EXPERIMENT.WANDB.TAGS", "[]", []),
    ("EXPERIMENT.WANDB.TAGS", "", []),
    ("EXPERIMENT.WANDB.TAGS", "a(b,c),[d,e],f)g,h", ["a(b,c)", "[d,e]", "f)g", "h"]),
    ("EXPERIMENT.WANDB.TAGS", "[001, a b, 'x, y', \"it's\", true]", ["001", "a b", "x, y", "it's", "true"]),
])  # fmt: skip
def test_lists(name: str, text: str, expected: Any) -> None:
    value = loaded(name, text)
    assert value == expected
    assert [type(item) for item in value or []] == [type(item) for item in expected or []]


@given(
    st.lists(st.text(alphabet="ab ,'[](){}é=:", min_size=1).filter(lambda text: '"' not in text), max_size=5)
)
def test_quoted_elements_arrive_as_typed(tags: list[str]) -> None:
    text = "[" + ",".join(f'"{tag}"' for tag in tags) + "]"
    assert loaded("EXPERIMENT.WANDB.TAGS", text) == tags


def test_list_faults() -> None:
    assert "'x' is not a number" in problem("DATA.AUGMENT.MEAN=[0.5,x]")
    assert "each must be > 0 and <= 1" in problem("DATA.AUGMENT.CROP_SCALE=0,1")
    assert "low <= high" in problem("DATA.AUGMENT.CROP_SCALE=1,0.5")
    assert "at least one element" in problem("DATA.DATASET.NUM_CLASSES=[]")


@pytest.mark.parametrize(("text", "expected"), [
    ("224", 224), ("[28,32]", [28, 32]), ("null", None), ("None", None), ("${TRAIN.EPOCHS}", 20),
])  # fmt: skip
def test_image_size(text: str, expected: Any) -> None:
    assert loaded("DATA.IMG_SIZE", text) == expected


@pytest.mark.parametrize("text", ["0", "many", "[1,2,3]", "true", "2.5", "a=b"])
def test_not_an_image_size(text: str) -> None:
    assert "must be a positive whole number or [height, width]" in problem(f"DATA.IMG_SIZE={text}")


@pytest.mark.parametrize(("text", "expected"), [
    ("1", 1), ("1e-3", 0.001), ("true", True), ("null", None), ("None", None), ("'None'", "None"),
    ("a b", "a b"),
    (" a b ", " a b "), (r"a\,b", r"a\,b"), ("[1,a]", [1, "a"]),
    ("{a:1,b:{c:x}}", {"a": 1, "b": {"c": "x"}}), ("a,b", "a,b"),
    ("choice(a,b)", "choice(a,b)"),
    ("(x)", "(x)"), ("'1'", "1"), ("", ""), ("${OPTIMIZER.LR}", 0.002), ("[${TRAIN.EPOCHS}]", [20]),
    ("[" * 2000, "[" * 2000),
])  # fmt: skip
def test_values_without_a_type(text: str, expected: Any) -> None:
    assert {"x": expected} == load(f"MODEL.KWARGS.x={text}").MODEL.KWARGS


def test_mappings_merge_and_can_be_emptied() -> None:
    argv = ["MODEL.KWARGS={a: 1, b: {c: 2}}", "MODEL.KWARGS.b.d=3", "MODEL.KWARGS={}"]
    assert load(*argv).MODEL.KWARGS == {"a": 1, "b": {"c": 2, "d": 3}}
    assert load(*argv, "~MODEL.KWARGS.b.c", "MODEL.KWARGS.a=null").MODEL.KWARGS == {
        "a": None,
        "b": {"d": 3},
    }
    assert load(*argv, "~MODEL.KWARGS").MODEL.KWARGS == {}
    assert load(*argv, "MODEL.KWARGS.b=1").MODEL.KWARGS == {"a": 1, "b": 1}
    assert load(*argv, "OPTIMIZER.KWARGS=${MODEL.KWARGS.b}").OPTIMIZER.KWARGS == {
        "c": 2,
        "d": 3,
    }


def test_mapping_faults() -> None:
    assert "is not a mapping" in problem("MODEL.KWARGS=3")
    assert "is not a mapping" in problem("MODEL.KWARGS=${TRAIN.EPOCHS}")
    assert "names of arguments must be text" in problem("MODEL.KWARGS={1: 2}")
    assert "is a list" in problem("MODEL.KWARGS.x=[1,2]", "MODEL.KWARGS.x.0=5")


def test_interpolation_in_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINNAEUS_TEST_ROOT", "/data, (1)")
    assert loaded("DATA.DATASET.ROOT", "${oc.env:LINNAEUS_TEST_ROOT}/x") == "/data, (1)/x"
    assert loaded("EXPERIMENT.NAME", "e${TRAIN.EPOCHS}-lr${OPTIMIZER.LR}") == "e20-lr0.002"
    assert loaded("EXPERIMENT.NAME", r"\${x}") == "${x}"
    monkeypatch.setenv("LINNAEUS_TEST_SIZE", "32")
    assert loaded("DATA.BATCH_SIZE", '${oc.env:"LINNAEUS_TEST_SIZE"} * 2') == 64
    assert "not found" in problem("DATA.DATASET.ROOT=${oc.env:LINNAEUS_TEST_NONE}")


def test_a_key_that_follows_arithmetic_sees_its_value() -> None:
    config = load("DATA.BATCH_SIZE=${TRAIN.EPOCHS} + 1", "DATA.BATCH_SIZE_VAL=${DATA.BATCH_SIZE} * 2")
    assert config.DATA.BATCH_SIZE_VAL == 42
    config = load("DATA.BATCH_SIZE=${TRAIN.EPOCHS} / 2", "EXPERIMENT.NAME=bs${DATA.BATCH_SIZE}")
    assert config.EXPERIMENT.NAME == "bs10"
    config = load("DATA.AUTOBATCH.MEMORY_LIMIT_GB=${DATA.AUTOBATCH.TIMEOUT_MINUTES}")
    assert config.DATA.AUTOBATCH.MEMORY_LIMIT_GB == 60.0
    assert load("SCHEDULE.WARMUP_STEPS=${DATA.AUTOBATCH.MEMORY_LIMIT_GB}").SCHEDULE.WARMUP_STEPS is None


numbers = st.integers(0, 999).map(str) | st.floats(0.001, 1e6).map(repr)
expressions = st.recursive(
    numbers,
    lambda inner: (
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//"]), inner).map(" ".join)
        | inner.map("({})".format)
        | inner.map("-{}".format)
    ),
    max_leaves=6,
).filter(lambda text: len(text) <= 200)


@given(expressions)
def test_arithmetic_agrees_with_python(text: str) -> None:
    try:
        expected = eval(text)
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            evaluate(text)
        return
    except OverflowError:
        return
    assert evaluate(text) == expected or (math.isnan(expected) and math.isnan(evaluate(text)))


@given(st.text(alphabet="0123456789+-*/%()eE._ jxab'\"[]{}:,<>=!&|^~@"))
def test_arithmetic_refuses_everything_else(text: str) -> None:
    try:
        value = evaluate(text)
    except (ValueError, SyntaxError, ZeroDivisionError, OverflowError):
        return
    assert type(value) in (int, float)
    assert "**" not in text
    assert not set(text) & set("%jxab'\"[]{}:,<>=!&|^~@")


@given(st.text())
def test_split_list_never_fails(text: str) -> None:
    assert all(part == part.strip() for part in split_list(text))


@given(text=plain_texts)
def test_text_in_a_file_arrives_as_typed(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder: Path = tmp_path_factory.getbasetemp()
    file = folder / "one.yaml"
    quoted = "".join(f"\\U{ord(character):08x}" for character in text)
    file.write_text(f'EXPERIMENT: {{OUTPUT_DIR: "{quoted}"}}', encoding="utf-8")
    assert text == load("--cfg", str(file)).EXPERIMENT.OUTPUT_DIR
