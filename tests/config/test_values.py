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

# What the tests refer to; the schema may choose other defaults.
BASE = (
    "TRAIN.EPOCHS=20",
    "TRAIN.LOG_EVERY=20",
    "OPTIMIZER.LR=0.002",
    "DATA.AUGMENT.CROP_SCALE=0.8,1",
)


def value_of(config, name):
    value = config
    for part in name.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def rows(keys, cases):
    """Cases for several keys that are loaded together: a load takes longer than a value."""
    return [
        dict(zip(keys, cases[start : start + len(keys)], strict=False))
        for start in range(0, len(cases), len(keys))
    ]


TEXTS = [
    "",
    "(x)",
    "a=b",
    "it's",
    "~/x",
    "1e-3",
    "007",
    "true",
    "2024-01-01",
    "*x",
    "!x",
    "a: b",
    "日本",
    "a\nb",
    "/data/birds (2021), 'best'/x=1",
    "-",
]
QUOTED = [
    ("' a '", " a "),
    (" a ", "a"),
    ("'a,b'", "a,b"),
    (r"a\,b", "a,b"),
    (r"'a\\'", "a\\"),
    ("'[a]'", "[a]"),
    ("'null'", "null"),
    ("str(10)", "10"),
]
WHOLE = [
    (" 8 ", 8),
    ("1e3", 1000),
    ("8.0", 8),
    ("1_000", 1000),
    ("007", 7),
    ("6/2", 3),
    ("2 * (3 + 4)", 14),
    ("-2 + 3", 1),
    ("7 // 2", 3),
    ("--3", 3),
    ("'8'", 8),
    ("${TRAIN.EPOCHS} * 2 + 1", 41),
    ("(${TRAIN.EPOCHS} + ${TRAIN.LOG_EVERY}) / 8", 5),
    ('"${TRAIN.EPOCHS} // 3"', 6),
    (str(10**30), 10**30),
]
SWITCHES = [
    *((text, True) for text in ("true", "1", "yes", "on", "'true'")),
    *((text, False) for text in ("False", "0", "off")),
]
OPTIONAL = [
    ("null", None),
    ("NULL", None),
    ("None", None),
    ("none", "none"),
    (r"'it\'s'", "it's"),
]
UNTYPED = [
    ("1e-3", 0.001),
    ("true", True),
    ("null", None),
    ("None", "None"),
    ("{x: None}", {"x": "None"}),
    (r"a\,b", "a,b"),
    ("[1,a]", [1, "a"]),
    ("{a:1,b:{c:x}}", {"a": 1, "b": {"c": "x"}}),
    ("int(10.0)", 10),
    ("str(10)", "10"),
    ("sort([2,1])", [1, 2]),
    ("~/é", "~/é"),
    ("'1'", "1"),
    ("", ""),
    ("${OPTIMIZER.LR}", 0.002),
    ("[${TRAIN.EPOCHS}]", [20]),
]
ROWS = [
    *rows(
        ["EXPERIMENT.OUTPUT_DIR", "EXPERIMENT.WANDB.PROJECT", "DATA.DATASET.IMAGE_COLUMN"],
        [*((text, text) for text in TEXTS), *QUOTED],
    ),
    *rows(
        ["DATA.BATCH_SIZE", "DATA.BATCH_SIZE_VAL", "DATA.PREFETCH_FACTOR", "TRAIN.VALIDATE_EVERY"],
        WHOLE,
    ),
    *rows(
        ["TRAIN.COMPILE", "DATA.PIN_MEMORY", "TRAIN.CHANNELS_LAST", "TRAIN.DETERMINISTIC"], SWITCHES
    ),
    *rows(["DATA.DATASET.ROOT", "DATA.DATASET.TRAIN", "EXPERIMENT.WANDB.GROUP"], OPTIONAL),
    {f"MODEL.KWARGS.x{number}": case for number, case in enumerate(UNTYPED)},
    {
        "DATA.AUGMENT.MEAN": ("${DATA.AUGMENT.CROP_SCALE}", [0.8, 1.0]),
        "DATA.DATASET.NUM_CLASSES": ("2,4", [2, 4]),
        "DATA.IMG_SIZE": ("[28,32]", [28, 32]),
        "EXPERIMENT.WANDB.TAGS": ("a b,\"c, d\",'[e]',x7", ["a b", "c, d", "[e]", "x7"]),
        "EXPERIMENT.NAME": ("e${TRAIN.EPOCHS}-lr${OPTIMIZER.LR}", "e20-lr0.002"),
        "DATA.DATASET.ROOT": ("${oc.env:LINNAEUS_ROOT}/x", "/data, (1)/x"),
        "OPTIMIZER.KWARGS": ("{a:${TRAIN.EPOCHS}}", {"a": 20}),
    },
    {
        "DATA.AUGMENT.CROP_SCALE": ("[1/4, ${OPTIMIZER.HEAD_LR_SCALE}]", [0.25, 1.0]),
        "DATA.AUGMENT.MEAN": ("null", None),
        "DATA.DATASET.NUM_CLASSES": ("7", [7]),
        "DATA.DATASET.LEVELS": (r"a\,b", ["a,b"]),
        "DATA.IMG_SIZE": ("224", 224),
        "EXPERIMENT.WANDB.TAGS": (
            "['001', a b, 'x, y', \"it's\", 'true', 1]",
            ["001", "a b", "x, y", "it's", "true", "1"],
        ),
        "EXPERIMENT.NAME": (r"\${x}", "${x}"),
    },
    {
        "EXPERIMENT.WANDB.TAGS": ("[]", []),
        "DATA.AUGMENT.MEAN": ("sort([0.3,0.1,0.2])", [0.1, 0.2, 0.3]),
        "DATA.IMG_SIZE": ("None", None),
        "DATA.BATCH_SIZE": ("${TRAIN.EPOCHS} / 2", 10),
        "DATA.BATCH_SIZE_VAL": ("${DATA.BATCH_SIZE} * 2", 20),
        "EXPERIMENT.NAME": ("bs${DATA.BATCH_SIZE}", "bs10"),
        "SCHEDULE.WARMUP_STEPS": ("${DATA.AUTOBATCH.MEMORY_LIMIT_GB}", None),
        "OPTIMIZER.LAYER_DECAY": ("${TRAIN.EPOCHS}/40", 0.5),
    },
]
"""By key: what is typed, and the value. A key stands below those that it follows."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row)[:40])
def test_what_is_typed_and_its_value(row, monkeypatch):
    monkeypatch.setenv("LINNAEUS_ROOT", "/data, (1)")
    config = load(*BASE, *(f"{key}={text}" for key, (text, _) in row.items()))
    expected = {key: value for key, (_, value) in row.items()}
    found = {key: value_of(config, key) for key in row}
    assert found == expected
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


WRONG = [
    "",
    "True",
    "-inf",
    "1e400",
    "1//0",
    "2 % 3",
    "abs(3)",
    "(" * 300,
    "9" * 5000,
    "[8",
    "'8",
    "int(",
    "[8]",
    "${TRAIN.EPOCHS} ** 2",
    "${TRAIN.EPOCHS}' + '1",
    "${DATA.AUGMENT}",
    "-1",
]


def test_not_a_positive_whole_number():
    keys = [
        "DATA.BATCH_SIZE",
        "DATA.BATCH_SIZE_VAL",
        "DATA.PREFETCH_FACTOR",
        "TRAIN.VALIDATE_EVERY",
    ]
    for row in rows(keys, [(text, None) for text in WRONG]):
        found = problems(*BASE, *(f"{key}={text}" for key, (text, _) in row.items()))
        assert sorted(problem.partition(":")[0] for problem in found) == sorted(row)


def test_mappings_merge_and_can_be_emptied():
    argv = ["MODEL.KWARGS={a: 1, b: {c: 2}}", "MODEL.KWARGS.b.d=3", "MODEL.KWARGS={}"]
    assert load(*argv).MODEL.KWARGS == {"a": 1, "b": {"c": 2, "d": 3}}
    argv += ["OPTIMIZER.KWARGS=${MODEL.KWARGS.b}", "~MODEL.KWARGS.b.c", "MODEL.KWARGS.a=null"]
    config = load(*argv)
    assert (config.MODEL.KWARGS, config.OPTIMIZER.KWARGS) == ({"a": None, "b": {"d": 3}}, {"d": 3})
    assert load(*argv, "~MODEL.KWARGS", "~OPTIMIZER.KWARGS") == load()
    assert load(
        "MODEL.KWARGS={a: 1}", "MODEL.KWARGS.a={b: 2}", "MODEL.KWARGS.a=1"
    ).MODEL.KWARGS == {"a": 1}


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


def test_the_token_after_a_bare_key_is_its_value():
    values = ["-1", "-1e-3", "--strange", "a=b", "==", "", "x.yaml", "FOO=1"]
    for row in rows(
        ["EXPERIMENT.OUTPUT_DIR", "DATA.DATASET.IMAGE_COLUMN"], [(text, text) for text in values]
    ):
        config = load(*(token for key, (text, _) in row.items() for token in (key, text)))
        assert [value_of(config, key) for key in row] == [value for _, value in row.values()]


@given(st.text(alphabet="0123456789+-*/%()eE._ jxab'\"[]{}:,<>=!&|^~@"))
def test_arithmetic_refuses_everything_else(text):
    try:
        number(text, float)
    except ValueError:
        return
    assert not set(text) & set("%j'\"[]{}:,<>=!&|^~@")
    assert "**" not in text


@pytest.mark.parametrize("text", ["", "---\n", "DATA:\n  AUTOBATCH:\nMODEL:\n  KWARGS:\n"])
def test_files_that_set_nothing(text):
    write({"my": text})
    assert load("--cfg=my.yaml") == load("EXPERIMENT.NAME=my")


def test_values_of_a_file():
    """Scalars without quotes keep their text where the key takes text, else they get the key's type."""
    write(
        {
            "my": """
    EXPERIMENT: {NAME: 2024, OUTPUT_DIR: '007', WANDB: {GROUP: '=', TAGS: [1.0, 2024-01-01]}}
    OPTIMIZER: {LR: 1e-3, WEIGHT_DECAY: 0, KWARGS: {<<: &shared {a: 1, b: 2}, b: 3}}
    TRAIN: {AMP: off, COMPILE: yes, CLIP_GRAD_NORM: None, EPOCHS: "3"}
    DATA: {DATASET: {ROOT: null, TRAIN: None}, BATCH_SIZE: "${TRAIN.EPOCHS} * 2"}
    MODEL: {KWARGS: {<<: *shared, c: 1e-3, d: 2024-01-01, e: None, g: [on, {h: 0x10}], i: 1.5e3, j: .5}}
    """
        }
    )
    config = load("--cfg=my.yaml")
    experiment, dataset = config.EXPERIMENT, config.DATA.DATASET
    assert (experiment.NAME, experiment.OUTPUT_DIR) == ("2024", "007")
    assert (experiment.WANDB.GROUP, experiment.WANDB.TAGS) == ("=", ["1.0", "2024-01-01"])
    assert (config.OPTIMIZER.LR, config.OPTIMIZER.WEIGHT_DECAY) == (0.001, 0.0)
    assert (config.TRAIN.AMP, config.TRAIN.COMPILE, config.TRAIN.CLIP_GRAD_NORM) == (
        "off",
        True,
        None,
    )
    assert (dataset.ROOT, dataset.TRAIN, config.DATA.BATCH_SIZE) == (None, None, 6)
    assert config.OPTIMIZER.KWARGS == {"a": 1, "b": 3}
    assert config.MODEL.KWARGS == {
        "a": 1,
        "b": 2,
        "c": 0.001,
        "d": "2024-01-01",
        "e": "None",
        "g": [True, {"h": 16}],
        "i": 1500.0,
        "j": 0.5,
    }


def test_a_byte_order_mark_and_windows_lines():
    Path("my.yaml").write_bytes("\ufeff# @package TRAIN\r\nEPOCHS: 3\r\n".encode())
    assert load("--cfg=my.yaml").TRAIN.EPOCHS == 3


@pytest.mark.parametrize(
    ("key", "expected"),
    [("SCHEDULE.MILESTONES", [30, 60]), ("DATA.DATASET.LEVELS", ["30", "60"])],
)
def test_a_list_from_the_environment_is_a_list(key, expected, monkeypatch):
    monkeypatch.setenv("LIST", "[30, 60]")
    node, _, name = key.rpartition(".")
    tree = "{" + f"{name}: '${{oc.decode:${{oc.env:LIST}}}}'" + "}"
    for part in reversed(node.split(".")):
        tree = "{" + f"{part}: {tree}" + "}"
    Path("my.yaml").write_text(tree)
    for argv in (f"{key}=${{oc.decode:${{oc.env:LIST}}}}", "--cfg=my.yaml"):
        assert value_of(load(argv), key) == expected


@pytest.mark.parametrize("text", ["1,2", "range(1,3)", "'abc", "{a"])
@pytest.mark.parametrize("key", ["MODEL.KWARGS.x", "EXPERIMENT.NAME"])
def test_several_and_broken_values_are_refused_as_by_hydra(key, text):
    (problem,) = problems(f"{key}={text}")
    assert problem.partition(":")[0] == key
    assert ("linnaeus sweep" in problem) == (text[0] in "1r")
    assert load(f'MODEL.KWARGS.x="{text.strip(chr(39))}"')
