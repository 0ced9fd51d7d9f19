"""Mutated files and command lines: whatever is wrong with them is a `ConfigError` that names it."""

import shutil
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from linnaeus.config.dump import to_yaml
from linnaeus.config.keys import KEYS, NODES, dotted
from linnaeus.config.load import load_config
from linnaeus.runtime.errors import ConfigError
from tests.helpers.configs import write

TEXTS = {
    "my": "defaults: [base, {model: mine}, {optional /data/augment@MODEL.x: strong}]\n"
    "TRAIN: {EPOCHS: 3, LOG_EVERY: '${TRAIN.EPOCHS} * 2'}\nMODEL: {_target_: my.Model, a: [1, {b: x}]}",
    "base": "# @package _global_\nTRAIN: {LOG_EVERY: 7}\nDATA:\n  DATASET:\n    ROOT: ${oc.env:HOME}",
    "model/mine": "# @package MODEL\nNAME: resnet34\nKWARGS: &k {x: 1e-3}",
    "data/augment/strong": "HFLIP: 0.5",
    "experiment/birds": "defaults: [override /model: mine, _self_]\nTRAIN: {EPOCHS: 5}",
}
PIECES = ["", "- ", "&a ", "${", "???", "../", "null", "_global_", *"\n :@['\t\0~"]
TOKENS = [
    "model=resnet50",
    "+data=digits",
    "~optimizer",
    "data/augment=strong",
    "+experiment=[birds,my]",
    "--origin",
    "TRAIN.EPOCHS=${DATA.BATCH_SIZE} * 2",
    "MODEL.KWARGS.x={a: [1, ${TRAIN.EPOCHS}]}",
    "LOSS._target_=my.Loss",
    "--cfg",
    "${now:%Y}",
    "${hydra:runtime.choices.model}",
]


@st.composite
def mutations(draw, text):
    """The text with some pieces replaced, doubled or left out."""
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 6)))
        piece = draw(st.sampled_from(PIECES))
        text = text[:start] + piece + text[start if draw(st.booleans()) else end :]
    return text


keys = st.sampled_from([*map(dotted, KEYS), *map(dotted, NODES)])
settings = st.builds("{}={}".format, keys, st.sampled_from(PIECES) | st.floats().map(repr))
files = st.fixed_dictionaries({}, optional={name: mutations(text) for name, text in TEXTS.items()})
command_lines = st.lists(st.sampled_from(TOKENS).flatmap(mutations) | settings, max_size=5)


def outcome(texts, argv):
    """Load what is there; gives the problems."""
    folder = Path("mutated")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write({f"{folder}/{name}": text for name, text in texts.items()})
    sources = [f"--cfg={folder / 'my.yaml'}"] if "my" in texts else []
    try:
        loaded = load_config([*sources, f"--config-dir={folder}", *argv])
        return [] if to_yaml(loaded.config) else ["no text"]
    except ConfigError as error:
        return error.problems or ["no problem"]


@given(texts=files, argv=command_lines)
def test_whatever_is_wrong_is_a_config_error(texts, argv):
    assert not {"no text", "no problem"} & {*outcome(texts, argv)}


def test_the_control_loads_or_is_refused():
    assert outcome(TEXTS, ["DATA.BATCH_SIZE=${TRAIN.EPOCHS} * 2"]) == []
    assert len(outcome(TEXTS, ["DATA.BATCH_SIZE=${TRAIN.EPOCH} * 2"])) == 1
