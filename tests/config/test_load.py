"""The whole way: all problems at once, presets, `_target_` nodes, and back to YAML."""

import copy
import dataclasses
from pathlib import Path

import pytest
import timm
import yaml
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hypothesis import given
from hypothesis import strategies as st

from linnaeus.cli.train import read as train
from linnaeus.config.dump import save_config, to_yaml
from linnaeus.config.instantiate import call_target
from linnaeus.config.keys import PRESETS, available
from linnaeus.config.load import load_config, read_run_config
from linnaeus.config.schema import Config, DatasetConfig, ModelConfig
from linnaeus.runtime.errors import ConfigError
from tests.helpers.configs import load, write


def subjects(line):
    with pytest.raises(ConfigError) as caught:
        train(line.split())
    return [problem.partition(":")[0] for problem in caught.value.problems]


def test_defaults_are_typed_and_resolved_and_shared_by_nobody():
    config = load()
    assert isinstance(config.DATA.DATASET, DatasetConfig)
    assert config.DATA.BATCH_SIZE_VAL == config.DATA.BATCH_SIZE
    assert "${" not in to_yaml(config)
    expected = load()
    config.DATA.DATASET.NUM_CLASSES.append(99)
    config.MODEL.KWARGS["x"] = 1
    assert load() == expected != config


def test_the_last_override_wins_in_any_spelling():
    assert load("DATA.BATCH_SIZE", "8", "--opts", "DATA.BATCH_SIZE=9").DATA.BATCH_SIZE == 9
    line = "DATA.BATCH_SIZE=9 +DATA.BATCH_SIZE=7 ++DATA.BATCH_SIZE 8 model=resnet18 model=resnet50"
    config = load(*line.split(), "DATA.AUTOBATCH={ENABLED: true, MAX_BATCH_SIZE: 8}")
    assert (config.DATA.BATCH_SIZE, config.DATA.AUTOBATCH.MAX_BATCH_SIZE_VAL) == (8, 16)
    assert config.MODEL.NAME == "resnet50"


def test_tilde_goes_back_to_the_default():
    write({"my": "DATA: {BATCH_SIZE: 8, FOO: 1}\nMODEL: {NAME: x, DROP_RATE: 0.1}"})
    found = load("--cfg=my.yaml", "~DATA.BATCH_SIZE", "~MODEL", "~DATA.FOO")
    assert found == load("EXPERIMENT.NAME=my")
    kept = "DATA.BATCH_SIZE_VAL=9"
    assert load("DATA.BATCH_SIZE=8", "~DATA", kept) == load(kept)


def test_followers_follow_unless_set():
    node = "DATA.AUTOBATCH"
    argv = (f"{node}.ENABLED=True", f"{node}.MIN_BATCH_SIZE=4", f"{node}.MAX_BATCH_SIZE=null")
    auto = load(*argv).DATA.AUTOBATCH
    assert (auto.ENABLED_VAL, auto.MIN_BATCH_SIZE_VAL) == (True, 4)
    assert auto.MAX_BATCH_SIZE_VAL is None, "twice nothing is nothing"
    assert load(*argv, f"{node}.ENABLED_VAL=False").DATA.AUTOBATCH.ENABLED_VAL is False


def test_all_problems_at_once():
    write({"my": "DATA:\n  BATCHSIZE: 8\n  NUM_WORKERS: few\n"})
    found = subjects(
        "--cfg=my.yaml --print_config stray modl=resnet50 model=resnet51 TRAIN.AMP bf61 +DATA.FOO=1 "
        "DATA.AUTOBATCH.TARGET_MEMORY_FRACTION 1.5 TRAIN.EPOCHS"
    )
    expected = (
        "--print_config 'stray' TRAIN.EPOCHS modl model DATA.BATCHSIZE DATA.FOO DATA.NUM_WORKERS "
        "DATA.AUTOBATCH.TARGET_MEMORY_FRACTION TRAIN.AMP"
    )
    assert found == expected.split()


def test_all_problems_of_defaults_lists_at_once():
    """Hydra names one problem of the lists; it neither hides others nor makes some up."""
    write(
        {
            "my": "defaults:\n- model: resnet51\n- modl: resnet50\n- bse\n- optimizer: ???\n"
            "- data: [digits, digitz]\n- 7: [x]\n- optional\nTRAIN: {EPOCH: 3}",
            "broken": "MODEL: {NAME: x, ]",
        }
    )
    found = subjects("--cfg=my.yaml schedule=cosin TRAIN.AMP=x")
    assert sorted(found) == ["TRAIN.AMP", "TRAIN.EPOCH", "defaults", "schedule"]
    broken, other = subjects("--cfg=broken.yaml DATA.BATCHSIZE=3")
    assert (broken.partition(",")[0], other) == ("broken.yaml", "DATA.BATCHSIZE")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # not the keys that follow these
        ("DATA.AUTOBATCH.STEPS_PER_TRIAL=0", ["DATA.AUTOBATCH.STEPS_PER_TRIAL"]),
        # each key of a cycle
        (
            "OPTIMIZER.LR=${OPTIMIZER.WEIGHT_DECAY} OPTIMIZER.WEIGHT_DECAY=${OPTIMIZER.LR}",
            ["OPTIMIZER.LR", "OPTIMIZER.WEIGHT_DECAY"],
        ),
        # not the arguments beside it
        ("LOSS._target_=builtins.dict LOSS.a=${x LOSS.b=1 LOSS.c=${LOSS.b}", ["LOSS.a"]),
    ],
)
def test_one_mistake_is_one_problem(line, expected):
    assert subjects(line) == expected


def test_a_target_takes_any_keys_of_every_source():
    """In place of the built-in keys."""
    write({"my": "MODEL: {_target_: my.Model, depth: 3, inner: {a: 1, b: [1]}}\nLOSS: {weight: 2}"})
    line = (
        "--cfg=my.yaml MODEL.width 8 MODEL.inner.b=[${TRAIN.EPOCHS}] LOSS._target_=my.Loss "
        "optimizer=sgd OPTIMIZER._target_=my.Sgd TRAIN.EPOCHS=20 ~MODEL.depth MODEL.twice=${MODEL.width}"
    )
    config = load(*line.split(), "DATA.DATASET={_target_: my.Data, n: -1e-3}")
    inner = {"a": 1, "b": [20]}
    assert {"_target_": "my.Model", "inner": inner, "width": 8, "twice": 8} == config.MODEL
    assert config.LOSS == {"_target_": "my.Loss", "weight": 2}
    assert config.DATA.DATASET == {"_target_": "my.Data", "n": -0.001}
    assert (config.OPTIMIZER["_target_"], config.OPTIMIZER["NAME"]) == ("my.Sgd", "sgd")
    again = load("--cfg=my.yaml", "~MODEL", "~LOSS", "MODEL.NAME=resnet18")
    assert ModelConfig(NAME="resnet18") == again.MODEL
    assert "MODEL.depth" in subjects("--cfg=my.yaml ~MODEL._target_")


def test_a_file_of_a_run_loads_as_it_was():
    config = load("DATA.DATASET={_target_: my.Data, x: '\\${y}'}", "EXPERIMENT.NAME=\\${x}")
    save_config(config, "config.yaml")
    assert load_config([], read_run_config(Path("config.yaml"))).config == config


def test_a_key_that_an_own_class_does_not_take_is_left_out():
    write({"my": "MODEL:\n  NAME: test_resnet"})
    argv = ("--cfg=my.yaml", "MODEL._target_=fractions.Fraction", "MODEL.numerator=3")
    with pytest.raises(ConfigError, match=r"~MODEL\.NAME"):
        call_target(load(*argv).MODEL, "MODEL")
    assert call_target(load(*argv, "~MODEL.NAME").MODEL, "MODEL") == 3


@pytest.mark.parametrize("group", available())
def test_every_preset_loads(group):
    default = load("EXPERIMENT.NAME=x")
    for name in available()[group]:
        text = (PRESETS / group / f"{name}.yaml").read_text(encoding="utf-8")
        assert text.startswith("# @package _global_\n# ")
        config = load(f"+{group}='{name}'", "EXPERIMENT.NAME=x")
        fields = [field.name for field in dataclasses.fields(config)]
        changed = {name for name in fields if getattr(config, name) != getattr(default, name)}
        assert changed <= yaml.safe_load(text).keys()
        assert group != "model" or timm.is_model(config.MODEL.NAME)


def test_presets_load_inside_another_hydra_program():
    with initialize(config_path=None, version_base="1.2"):
        theirs = GlobalHydra.instance().hydra
        assert load("model=resnet50").MODEL.NAME == "resnet50"
        assert GlobalHydra.instance().hydra is theirs
    assert load("model=resnet50").MODEL.NAME == "resnet50"
    assert not GlobalHydra.instance().is_initialized()


def test_the_schema_is_a_structured_config_of_a_hydra_program():
    ConfigStore.instance().store("linnaeus", Config)
    with initialize(config_path=None, version_base="1.3"):
        composed = compose("linnaeus", overrides=["DATA.BATCH_SIZE=8", "+MODEL.KWARGS.x=1"])
        with pytest.raises(HydraException, match=r"TRAIN\.EPOCHS"):
            compose("linnaeus", overrides=["TRAIN.EPOCHS=many"])
    assert (composed.DATA.BATCH_SIZE, composed.MODEL.KWARGS) == (8, {"x": 1})


HARD_TEXTS = ["", " ", "None", "null", "~", "1e3", "0x1", "true", "=", "<<", "???x", "2024-01-01"]
HARD_TEXTS += [
    "${x}",
    r"\${x}",
    r"\\${x}",
    "a${",
    "'x'",
    '"x"',
    "- a",
    "a: b",
    "a #b",
    "\x85\u2028\n",
]
hard_texts = (
    st.text() | st.sampled_from(HARD_TEXTS) | st.text(alphabet="\\${}a' \"#:\n\x85\u2028\t-")
)
trees = st.recursive(
    hard_texts | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def odd():
    return load("MODEL._target_=my.Model", "MODEL.a={b:[1,{c:null}],d:{}}", "TRAIN.AMP=off")


@given(text=hard_texts, optional=hard_texts.filter("None".__ne__) | st.none(), tree=trees)
def test_any_values_survive_the_file(odd, text, optional, tree):
    """The text `None` is null for a key that may be null."""
    config = copy.deepcopy(odd)
    config.EXPERIMENT.OUTPUT_DIR = text
    config.DATA.DATASET.ROOT = optional
    config.EXPERIMENT.WANDB.TAGS = [*HARD_TEXTS, "\udcff", text]
    config.OPTIMIZER.KWARGS.update(x=tree, y={"a": HARD_TEXTS})
    Path("again.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load("--cfg=again.yaml") == config


def test_an_unwritable_configuration_names_the_key_of_its_folder(tmp_path):
    target = tmp_path / "runs" / "x" / "config.yaml"
    save_config(load(), target)
    assert load("--cfg", str(target)) == load()
    with pytest.raises(ConfigError, match=r"OUTPUT_DIR"):
        save_config(load(), target / "below" / "config.yaml")
