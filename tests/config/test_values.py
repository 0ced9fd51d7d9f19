"""What a user types, on the command line or in a file, arrives as typed, in the key's type."""

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hypothesis import given
from hypothesis import strategies as st

from linnaeus.config.values import number
from linnaeus.runtime.errors import ConfigError
from tests.helpers.configs import load, problems, write

BASE = ("TRAIN.EPOCHS=20", "OPTIMIZER.LR=0.002", "DATA.AUGMENT.CROP_SCALE=0.8,1")
"""What the tests refer to; the schema may choose other defaults."""


def value_of(config, name):
    value = config
    for part in name.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


BIRDS = "/data/birds (2021), 'best'/x=1"
CASES = {
    "EXPERIMENT.OUTPUT_DIR": [
        *((text, text) for text in ["", "it's", "1e-3", "007", "true", "2024-01-01", BIRDS]),
        ("' a '", " a "),
        (" a ", "a"),
        (r"a\,b", "a,b"),
        ("'null'", "null"),
        ("${oc.env:LINNAEUS_ROOT}/x", "/data, (1)/x"),
    ],
    "EXPERIMENT.NAME": [
        ("e${TRAIN.EPOCHS}-lr${OPTIMIZER.LR}", "e20-lr0.002"),
        (r"\${x}", "${x}"),
    ],
    "DATA.BATCH_SIZE": [
        (" 8 ", 8),
        ("1e3", 1000),
        ("8.0", 8),
        ("007", 7),
        ("2 * (3 + 4)", 14),
        ("6/2", 3),
        ("7 // 2", 3),
        ("'8'", 8),
        ("${TRAIN.EPOCHS} * 2 + 1", 41),
    ],
    "OPTIMIZER.LAYER_DECAY": [("${TRAIN.EPOCHS}/40", 0.5)],
    "TRAIN.COMPILE": [
        ("yes", True),
        ("1", True),
        ("off", False),
    ],
    "DATA.DATASET.ROOT": [("null", None), ("None", None), ("none", "none")],
    "MODEL.KWARGS.x": [
        ("1e-3", 0.001),
        ("true", True),
        ("None", "None"),
        ("[1,a]", [1, "a"]),
        ("{a:1,b:{c:x}}", {"a": 1, "b": {"c": "x"}}),
        ("'1'", "1"),
        ("[${TRAIN.EPOCHS}]", [20]),
    ],
    "DATA.AUGMENT.MEAN": [("${DATA.AUGMENT.CROP_SCALE}", [0.8, 1.0]), ("[1/4, 1]", [0.25, 1.0])],
    "DATA.DATASET.NUM_CLASSES": [("2,4", [2, 4]), ("7", [7])],
    "DATA.DATASET.LEVELS": [(r"a\,b", ["a,b"])],
    "DATA.IMG_SIZE": [("[28,32]", [28, 32]), ("224", 224), ("None", None)],
    "EXPERIMENT.WANDB.TAGS": [("[]", []), ("a b,\"c, d\",'[e]',x7", ["a b", "c, d", "[e]", "x7"])],
}
"""By key: what is typed, and the value."""


@pytest.mark.parametrize("key", CASES)
def test_what_is_typed_and_its_value(key, monkeypatch):
    monkeypatch.setenv("LINNAEUS_ROOT", "/data, (1)")
    for text, expected in CASES[key]:
        found = value_of(load(*BASE, f"{key}={text}"), key)
        assert (found, type(found)) == (expected, type(expected)), text


@pytest.mark.parametrize(
    "text",
    ["1e400", "(" * 300, "9" * 5000, "[8", "${TRAIN.EPOCHS} ** 2", "${TRAIN.EPOCHS}' + '1"],
)
def test_not_a_whole_number(text):
    (problem,) = problems(*BASE, f"DATA.BATCH_SIZE={text}")
    assert problem.startswith("DATA.BATCH_SIZE:")


def test_mappings_merge_and_can_be_emptied():
    argv = ["MODEL.KWARGS={a: 1, b: {c: 2}}", "MODEL.KWARGS.b.d=3", "MODEL.KWARGS={}"]
    assert load(*argv).MODEL.KWARGS == {"a": 1, "b": {"c": 2, "d": 3}}
    argv += ["OPTIMIZER.KWARGS=${MODEL.KWARGS.b}", "~MODEL.KWARGS.b.c", "MODEL.KWARGS.a=null"]
    config = load(*argv)
    assert (config.MODEL.KWARGS, config.OPTIMIZER.KWARGS) == ({"a": None, "b": {"d": 3}}, {"d": 3})
    assert load(*argv, "~MODEL.KWARGS", "~OPTIMIZER.KWARGS") == load()


texts = st.text() | st.text(alphabet="a '\"\\,()[]{}=#$~:*?<>|é\n-")
plain_texts = texts.filter(lambda text: "${" not in text and text != "???")


@given(text=plain_texts)
def test_text_arrives_as_typed_or_is_refused(text):
    """Where Hydra's grammar takes the text, the value is Hydra's."""
    try:
        found = load(f"EXPERIMENT.OUTPUT_DIR={text}").EXPERIMENT.OUTPUT_DIR
    except ConfigError as error:
        found = error.problems
    try:
        override = OverridesParser.create().parse_override(f"x={text}")
        value = None if override.is_sweep_override() else override.value()
    except HydraException:
        value = text
    is_refused = isinstance(found, list) and len(found) == 1
    assert is_refused or found == (value if isinstance(value, str) else text.strip())


@pytest.mark.parametrize("text", ["-1e-3", "--strange", "a=b", "", "x.yaml", "FOO=1"])
def test_the_token_after_a_bare_key_is_its_value(text):
    found = load("EXPERIMENT.OUTPUT_DIR", text).EXPERIMENT.OUTPUT_DIR
    assert found == text


@given(st.text(alphabet="0123456789+-*/%()eE._ jxab'\"[]{}:,<>=!&|^~@"))
def test_arithmetic_refuses_everything_else(text):
    try:
        number(text, float)
    except ValueError:
        return
    assert not set(text) & set("%j'\"[]{}:,<>=!&|^~@")
    assert "**" not in text


@pytest.mark.parametrize("text", ["", "DATA:\n  AUTOBATCH:\nMODEL:\n  KWARGS:\n"])
def test_files_that_set_nothing(text):
    write({"my": text})
    assert load("--cfg=my.yaml") == load("EXPERIMENT.NAME=my")


FILE = """
EXPERIMENT: {NAME: 2024, OUTPUT_DIR: '007', WANDB: {TAGS: [1.0, 2024-01-01]}}
OPTIMIZER: {LR: 1e-3, WEIGHT_DECAY: 0, KWARGS: {<<: &shared {a: 1, b: 2}, b: 3}}
TRAIN: {AMP: off, COMPILE: yes, CLIP_GRAD_NORM: None, EPOCHS: "3"}
DATA: {DATASET: {ROOT: null}, BATCH_SIZE: "${TRAIN.EPOCHS} * 2"}
MODEL: {KWARGS: {<<: *shared, c: 1e-3, d: 2024-01-01, e: None, g: [on, {h: 0x10}]}}
"""


def test_values_of_a_file():
    """Scalars without quotes keep their text where the key takes text, else they get the key's type."""
    write({"my": FILE})
    config = load("--cfg=my.yaml")
    expected = {
        "EXPERIMENT.NAME": "2024",
        "EXPERIMENT.OUTPUT_DIR": "007",
        "EXPERIMENT.WANDB.TAGS": ["1.0", "2024-01-01"],
        "OPTIMIZER.LR": 0.001,
        "OPTIMIZER.WEIGHT_DECAY": 0.0,
        "OPTIMIZER.KWARGS": {"a": 1, "b": 3},
        "TRAIN.AMP": "off",
        "TRAIN.COMPILE": True,
        "TRAIN.CLIP_GRAD_NORM": None,
        "DATA.DATASET.ROOT": None,
        "DATA.BATCH_SIZE": 6,
    }
    assert {name: value_of(config, name) for name in expected} == expected
    free = {"a": 1, "b": 2, "c": 0.001, "d": "2024-01-01", "e": "None", "g": [True, {"h": 16}]}
    assert free == config.MODEL.KWARGS


def test_a_byte_order_mark_and_windows_lines():
    Path("my.yaml").write_bytes("\ufeff# @package TRAIN\r\nEPOCHS: 3\r\n".encode())
    assert load("--cfg=my.yaml").TRAIN.EPOCHS == 3


def test_a_list_from_the_environment_is_a_list(monkeypatch):
    monkeypatch.setenv("LIST", "[30, 60]")
    text = "${oc.decode:${oc.env:LIST}}"
    write({"my": f"SCHEDULE: {{MILESTONES: '{text}'}}\nDATA: {{DATASET: {{LEVELS: '{text}'}}}}"})
    typed = (f"SCHEDULE.MILESTONES={text}", f"DATA.DATASET.LEVELS={text}")
    for config in (load(*typed), load("--cfg=my.yaml")):
        assert config.SCHEDULE.MILESTONES == [30, 60]
        assert config.DATA.DATASET.LEVELS == ["30", "60"]
