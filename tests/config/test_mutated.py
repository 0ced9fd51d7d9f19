"""Mutated files and command lines: whatever is wrong with them is a `ConfigError` that names it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from linnaeus.config.keys import KEYS, NODES, dotted
from linnaeus.config.load import load_config
from linnaeus.errors import ConfigError

FILES = ["my", "base", "model/mine", "model/resnet18", "data/augment/strong", "experiment/birds"]
GROUPS = ["model", "data", "data/augment", "optimizer", "experiment", "extra", "extra/deep", "nothing"]
NAMES = ["mine", "resnet18", "strong", "birds", "sgd", "my", "null", "[one,two]", "[]", "???", "../my", "~"]
PACKAGES = ["_global_", "_here_", "_group_", "MODEL", "MODEL.encoder", "model", "a.b", "_global_.TRAIN"]
INTERPOLATIONS = [
    "${TRAIN.EPOCHS}", "${DATA}", "${.x}", "${..y}", "${", "${}", "$", "???", "${model}", "\\${x}", "${now:}",
    "${${TRAIN.AMP}}", "${oc.env:HOME}", "${oc.env:NO_SUCH,3}", "${oc.select:TRAIN}", "${now:%Y}",
    "${hydra:runtime.choices.model}", "${TRAIN.EPOCHS} * 2", "${oc.create:{a: 1}}",
]  # fmt: skip
OPTIONS = ["--cfg", "--config-dir", "--config-name", "--origin", "-m", "--cfg=job", "-cd", "hydra.run.dir=x"]
PIECES = ["", "\n", " ", ":", "- ", "@", "[", "}", "&a ", "*a", "${", "'", "\t", "\0", "é"]
OTHERS = ["true", "off", "null", "[1,2]", "{a: 1}", "a,b", "8/2", "my.Model", "'x'", "[", "{", "0x", "~"]

keys = st.sampled_from(
    [*map(dotted, KEYS), *map(dotted, NODES), "MODEL._target_", "MODEL.x", "LOSS._target_"]
)
numbers = st.integers(-3, 600).map(str) | st.floats().map(repr)
scalars = st.sampled_from(INTERPOLATIONS) | numbers | st.text(max_size=8) | st.sampled_from(OTHERS)
values = st.recursive(
    scalars | st.none() | st.booleans() | st.integers() | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(keys | st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=5,
)
choices = st.sampled_from(NAMES) | st.sampled_from(INTERPOLATIONS)
words = st.sampled_from(["", "", "", "override ", "optional ", "override /", "/", "optional override ", "x "])
packages = st.sampled_from(["", "", "", *(f"@{name}" for name in PACKAGES)])
groups = st.builds("{}{}{}".format, words, st.sampled_from(GROUPS), packages)
entries = (
    st.dictionaries(
        groups, choices | st.lists(choices, max_size=2) | st.none() | values, min_size=1, max_size=2
    )
    | st.builds("{}{}{}".format, words, st.sampled_from([*FILES, "_self_"]), packages)
    | values
)


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """A tree from dotted keys; of keys above each other one stays."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *above, last = key.split(".")
        node = tree
        for part in above:
            below = node.setdefault(part, {})
            node = below if isinstance(below, dict) else {}
        node[last] = value
    return tree


@st.composite
def mutations(draw: st.DrawFn, text: str) -> str:
    """The text with some pieces replaced, doubled or left out."""
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 6)))
        piece = draw(st.sampled_from(PIECES))
        text = text[:start] + piece + text[start if draw(st.booleans()) else end :]
    return text


@st.composite
def files(draw: st.DrawFn) -> dict[str, str]:
    """Texts of some files, by their names."""
    found = {}
    for name in draw(st.lists(st.sampled_from(FILES), unique=True, max_size=5)):
        tree = nested(draw(st.dictionaries(keys, values, max_size=4)))
        if draw(st.booleans()):
            tree = {"defaults": draw(st.lists(entries, max_size=4) | values), **tree}
        header = draw(st.sampled_from(["", "", "# @package ", "#@package "]))
        text = f"{header}{draw(st.sampled_from(PACKAGES))}\n" if header else ""
        found[name] = draw(mutations(text + yaml.dump(tree, allow_unicode=True, sort_keys=False)))
    return found


selections = st.sampled_from(GROUPS)
tokens = (
    st.builds("{}{}={}".format, st.sampled_from(["", "", "+", "++", "~"]), keys, scalars)
    | st.builds("{}{}{}={}".format, st.sampled_from(["", "+", "~"]), selections, packages, choices)
    | st.builds("~{}".format, selections | keys)
    | st.sampled_from(OPTIONS)
    | keys
    | scalars
)
right = st.sampled_from([
    "model=resnet50", "+data=digits", "~optimizer", "optimizer=sgd", "DATA.BATCH_SIZE=8", "~TRAIN",
    "TRAIN.EPOCHS=${DATA.BATCH_SIZE} * 2", "MODEL.KWARGS.x={a: [1, ${TRAIN.EPOCHS}]}",
    "LOSS._target_=my.Loss", "LOSS.x=1",
])  # fmt: skip
command_lines = st.lists(right, max_size=4) | st.lists(right | tokens.flatmap(mutations), max_size=5)


def outcome(texts: dict[str, str], argv: list[str]) -> list[str]:
    """Load what is there; gives the problems."""
    folder = Path("mutated")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, text in texts.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
    sources = [f"--cfg={folder / 'my.yaml'}"] if "my" in texts else []
    try:
        return [] if load_config([*sources, f"--config-dir={folder}", *argv]).text() else ["no text"]
    except ConfigError as error:
        return error.problems or ["no problem"]


@given(texts=files(), argv=command_lines)
def test_whatever_is_wrong_is_a_config_error(texts: dict[str, str], argv: list[str]) -> None:
    outcome(texts, argv)


def test_the_control_loads_or_is_refused() -> None:
    texts = {"my": "defaults: [base, {model: mine}]\nTRAIN: {EPOCHS: 3}", "base": "TRAIN: {LOG_EVERY: 7}",
             "model/mine": "NAME: resnet34"}  # fmt: skip
    assert outcome(texts, ["DATA.BATCH_SIZE=${TRAIN.EPOCHS} * 2"]) == []
    assert len(outcome(texts, ["DATA.BATCH_SIZE=${TRAIN.EPOCH} * 2"])) == 1
