"""The whole way: precedence, all errors at once, presets, `_target_` nodes, and back to YAML."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import linnaeus
from linnaeus.config.help import help_text
from linnaeus.config.instantiate import call_target
from linnaeus.config.keys import KEYS, NODES, dotted
from linnaeus.config.load import load_config, save_config, to_yaml, with_batch_sizes
from linnaeus.config.presets import FOLDER, available
from linnaeus.config.schema import Config, DatasetConfig, ModelConfig, OptimizerConfig
from linnaeus.errors import ConfigError

PRESETS = [(group, name) for group, names in available().items() for name in names]
EXPERIMENTS = sorted((Path(linnaeus.__file__).parent.parent / "configs").glob("*.yaml"))


def load(*argv: str) -> Config:
    return load_config(argv).config


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    assert caught.value.exit_code == 2
    return caught.value.problems


def write(folder: Path, text: str) -> str:
    file = folder / "my_exp.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


# Defaults and flags


def test_defaults_are_typed_and_resolved() -> None:
    config = load()
    assert isinstance(config, Config)
    assert isinstance(config.MODEL, ModelConfig)
    assert isinstance(config.DATA.DATASET, DatasetConfig)
    assert config.DATA.BATCH_SIZE_VAL == config.DATA.BATCH_SIZE
    assert config.DATA.AUTOBATCH.MAX_BATCH_SIZE_VAL == 1024
    assert type(config.DATA.AUTOBATCH.MAX_BATCH_SIZE_VAL) is int
    assert config.DATA.AUTOBATCH.ENABLED_VAL is False
    assert "${" not in to_yaml(config)


def test_two_loads_share_nothing() -> None:
    first, expected = load(), load()
    first.DATA.DATASET.NUM_CLASSES.append(99)
    first.MODEL.KWARGS["x"] = 1
    assert load() == expected


def test_flags() -> None:
    loaded = load_config(["--print-config", "TRAIN.EPOCHS", "3"])
    assert (loaded.print_config, loaded.show_help, loaded.config.TRAIN.EPOCHS) == (True, False, 3)
    loaded = load_config(["--help", "NO.SUCH=1", "--cfg"])  # who asks for help gets it
    assert loaded.show_help
    assert loaded.config == load()


def test_help_names_nodes_presets_and_exit_codes() -> None:
    text = help_text()
    for word in [path[0] for path in NODES if len(path) == 1] + [name for _, name in PRESETS]:
        assert word in text
    for word in (
        "--cfg",
        "--print-config",
        "KEY VALUE",
        "KEY=VALUE",
        "group=preset",
        "exit codes",
        "AUTOBATCH",
    ):
        assert word in text
    assert max(map(len, text.splitlines())) <= 120


# Precedence


def test_each_source_wins_over_the_one_below(tmp_path: Path) -> None:
    file = write(tmp_path, "OPTIMIZER: {LR: 0.3}\nMODEL: {NAME: from_file}")
    assert load().OPTIMIZER.LR == OptimizerConfig().LR
    assert load("optimizer=sgd").OPTIMIZER.LR == 0.1
    assert load("--cfg", file, "optimizer=sgd").OPTIMIZER.LR == 0.3
    config = load("OPTIMIZER.LR=0.4", "--cfg", file, "optimizer=sgd", "model=resnet50")
    assert (config.OPTIMIZER.LR, config.OPTIMIZER.NAME, config.MODEL.NAME) == (0.4, "sgd", "from_file")


def test_the_last_override_wins() -> None:
    assert load("DATA.BATCH_SIZE", "8", "--opts", "DATA.BATCH_SIZE=9").DATA.BATCH_SIZE == 9
    assert load("DATA.BATCH_SIZE=9", "+DATA.BATCH_SIZE=7", "++DATA.BATCH_SIZE", "8").DATA.BATCH_SIZE == 8
    assert load("DATA.AUTOBATCH={ENABLED: true, MAX_BATCH_SIZE: 8}").DATA.AUTOBATCH.MAX_BATCH_SIZE_VAL == 16


def test_tilde_goes_back_to_the_default(tmp_path: Path) -> None:
    file = write(
        tmp_path, "DATA: {BATCH_SIZE: 8, FOO: 1}\nMODEL: {NAME: x, DROP_RATE: 0.1}\nTRAIN: {AMP: bf16}"
    )
    config = load("--cfg", file, "~DATA.BATCH_SIZE", "~MODEL", "~DATA.FOO", "~TRAIN.AMP=bf16")
    assert config == load()
    assert load("DATA.BATCH_SIZE=8", "~DATA", "DATA.BATCH_SIZE_VAL=9") == load("DATA.BATCH_SIZE_VAL=9")
    assert problems("~DATA.FOO") == ["~DATA.FOO: no such key (command line)"]
    assert "is not 'fp16', nothing deleted" in problems("TRAIN.AMP=bf16", "~TRAIN.AMP=fp16")[0]


def test_followers_follow_unless_set() -> None:
    argv = [
        "DATA.AUTOBATCH.ENABLED=True",
        "DATA.AUTOBATCH.MIN_BATCH_SIZE=4",
        "DATA.AUTOBATCH.LOG_LEVEL=DEBUG",
    ]
    auto = load(*argv).DATA.AUTOBATCH
    assert (auto.ENABLED_VAL, auto.MIN_BATCH_SIZE_VAL, auto.LOG_LEVEL_VAL) == (True, 4, "DEBUG")
    assert load(*argv, "DATA.AUTOBATCH.ENABLED_VAL=False").DATA.AUTOBATCH.ENABLED_VAL is False


# Errors


def test_all_problems_at_once(tmp_path: Path) -> None:
    file = write(tmp_path, "DATA:\n  BATCHSIZE: 8\n  NUM_WORKERS: few\n")
    found = problems(
        "--cfg", file, "--print_config", "stray", "modl=resnet50", "model=resnet51", "TRAIN.AMP", "bf61",
        "DATA.AUTOBATCH.ENABLE=True", "DATA.AUTOBATCH.TARGET_MEMORY_FRACTION", "1.5", "+DATA.FOO=1",
        "TRAIN.EPOCHS",
    )  # fmt: skip
    assert [problem.partition(":")[0] for problem in found] == [
        "--print_config", "'stray'", "TRAIN.EPOCHS", "modl", "model", "DATA.BATCHSIZE", "DATA.NUM_WORKERS",
        "DATA.AUTOBATCH.ENABLE", "DATA.FOO", "DATA.AUTOBATCH.TARGET_MEMORY_FRACTION", "TRAIN.AMP",
    ]  # fmt: skip
    assert found[5] == f"DATA.BATCHSIZE: no such key ({file}, line 2); did you mean DATA.BATCH_SIZE?"
    assert found[-1] == "TRAIN.AMP: 'bf61' is not one of off, bf16, fp16 (command line); did you mean bf16?"


def test_the_message_has_one_line_for_each_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        load("DATA.FOO=1", "TRAIN.AMP=" + "\nx" * 400)
    header, *lines = str(caught.value).splitlines()
    assert header == "2 problems in the configuration:"
    assert [line[:6] for line in lines] == ["  - DA", "  - TR"]
    assert all(len(line) < 200 for line in lines)


@pytest.mark.parametrize(("argv", "expected"), [
    (["+DATA.FOO=1"], "DATA.FOO: no such key (command line)"),
    (["++FOO.BAR=1"], "FOO.BAR: no such key (command line)"),
    (["data.batch_size=8"], "data.batch_size: no such key (command line); did you mean DATA.BATCH_SIZE?"),
    (["DATA.BATCH_SIZE.x=8"], "DATA.BATCH_SIZE takes a value and has no keys below it"),
    (["DATA=8"], "DATA: is a group of keys"),
    (["MODEL=null"], "MODEL: is a group of keys"),
    (["DATA.AUTOBATCH={ENABLE: true}"], "did you mean DATA.AUTOBATCH.ENABLED?"),
    (["DATA._target_=x.Y"], "DATA._target_: no such key"),
    (["_target_=x.Y"], "_target_: no such key"),
    (["DATA.AUTOBATCH.TARGET_MEMORY_FRACTION=0"], "0.0 is not allowed: it must be > 0 and <= 1"),
    (["DATA.AUTOBATCH.TARGET_MEMORY_FRACTION_VAL=1.5"], "TARGET_MEMORY_FRACTION_VAL: 1.5 is not allowed"),
    (["DATA.AUTOBATCH.STRATEGY=Guided"], "did you mean guided?"),
    (["DATA.AUTOBATCH.MIN_BATCH_SIZE=600"],
     "DATA.AUTOBATCH.MIN_BATCH_SIZE: 600 is above DATA.AUTOBATCH.MAX_BATCH_SIZE 512 (command line)"),
    (["DATA.AUTOBATCH.MAX_BATCH_SIZE_VAL=4", "DATA.AUTOBATCH.MIN_BATCH_SIZE_VAL=5"],
     "DATA.AUTOBATCH.MIN_BATCH_SIZE_VAL: 5 is above DATA.AUTOBATCH.MAX_BATCH_SIZE_VAL 4 (command line)"),
    (["EXPERIMENT.NAME="], "'' is not allowed: must be the name of a folder"),
    (["EXPERIMENT.NAME=../x"], "must be the name of a folder inside EXPERIMENT.OUTPUT_DIR"),
    (["EXPERIMENT.NAME=/x"], "must be the name of a folder"),
    (["model=resnet51"], "model: no preset 'resnet51' (command line); there are "),
    (["modl=resnet50"], "modl: no such key or preset group (command line); groups are data, model"),
    (["model="], "model: no preset ''"),
    (["model=../data/digits"], "model: no preset '../data/digits'"),
    (["DATA.DATASET.ROOT=???"], "DATA.DATASET.ROOT: has no value yet, and needs one"),
])  # fmt: skip
def test_one_problem(argv: list[str], expected: str) -> None:
    (problem,) = problems(*argv)
    assert expected in problem


def test_a_key_that_follows_a_wrong_one_is_not_listed() -> None:
    names = ("TARGET_MEMORY_FRACTION", "STEPS_PER_TRIAL", "LOG_LEVEL", "MIN_BATCH_SIZE")
    found = problems(
        *[f"DATA.AUTOBATCH.{name}={bad}" for name, bad in zip(names, ["2", "0", "X", "x"], strict=True)]
    )
    assert sorted(problem.partition(":")[0] for problem in found) == sorted(
        f"DATA.AUTOBATCH.{n}" for n in names
    )


def test_every_key_of_a_cycle_is_named() -> None:
    found = problems("OPTIMIZER.LR=${OPTIMIZER.WEIGHT_DECAY}", "OPTIMIZER.WEIGHT_DECAY=${OPTIMIZER.LR} * 1")
    assert [problem.partition(":")[0] for problem in found] == ["OPTIMIZER.LR", "OPTIMIZER.WEIGHT_DECAY"]
    assert all("it refers to itself" in problem for problem in found)


def test_a_missing_value_may_come_from_a_higher_source(tmp_path: Path) -> None:
    file = write(tmp_path, "DATA:\n  DATASET:\n    ROOT: ???")
    assert load("--cfg", file, "DATA.DATASET.ROOT=/x").DATA.DATASET.ROOT == "/x"
    assert problems("--cfg", file) == [f"DATA.DATASET.ROOT: has no value yet, and needs one ({file}, line 3)"]


@given(st.lists(st.text(max_size=20) | st.sampled_from([dotted(path) for path in KEYS]), max_size=6))
def test_no_command_line_raises_anything_else(argv: list[str]) -> None:
    try:
        loaded = load_config([token for token in argv if not token.startswith("--cfg")])
    except ConfigError:
        return
    assert isinstance(loaded.config, Config)


@pytest.mark.parametrize(
    "text", ["MODEL.KWARGS" + ".a" * 1500 + "=1", "MODEL.KWARGS.x=" + "[" * 300 + "]" * 300]
)
def test_bottomless_values_are_config_errors(text: str) -> None:
    assert problems(text) == ["values are nested too deeply to be read"]


# `_target_` nodes


def test_target_replaces_a_node_from_every_source(tmp_path: Path) -> None:
    file = write(tmp_path, "MODEL: {_target_: my.Model, depth: 3, inner: {a: 1, b: [1]}}\nLOSS: {weight: 2}")
    config = load(
        "--cfg", file, "MODEL.width", "8", "MODEL.inner.b=[2]", "LOSS._target_=my.Loss", "~MODEL.depth"
    )
    assert config.MODEL == {"_target_": "my.Model", "inner": {"a": 1, "b": [2]}, "width": 8}
    assert config.LOSS == {"_target_": "my.Loss", "weight": 2}
    assert isinstance(config.OPTIMIZER, OptimizerConfig)


def test_target_for_every_pluggable_node() -> None:
    for name in ("MODEL", "DATA.DATASET", "LOSS", "OPTIMIZER"):
        config = load(
            f"{name}={{_target_: my.Thing, n: ${{TRAIN.EPOCHS}}}}", f"{name}.lr", "-1e-3", "TRAIN.EPOCHS=20"
        )
        node: Any = config.DATA.DATASET if name == "DATA.DATASET" else getattr(config, name)
        assert node == {"_target_": "my.Thing", "n": 20, "lr": -0.001}


def test_a_preset_for_the_built_in_node_does_not_leak() -> None:
    assert load("optimizer=sgd", "OPTIMIZER._target_=torch.optim.SGD").OPTIMIZER == {
        "_target_": "torch.optim.SGD"
    }


def test_target_can_be_deleted_again(tmp_path: Path) -> None:
    file = write(tmp_path, "MODEL: {_target_: my.Model, depth: 3}")
    assert ModelConfig(NAME="resnet18") == load("--cfg", file, "~MODEL", "MODEL.NAME=resnet18").MODEL
    assert "MODEL.depth: no such key" in problems("--cfg", file, "~MODEL._target_")[0]


@pytest.mark.parametrize("target", ["null", "3", "a b", "'a..b'", "''", "[a]", "???"])
def test_target_must_be_a_dotted_path(target: str) -> None:
    assert problems(f"MODEL._target_={target}")[0].startswith("MODEL._target_: ")


def test_nested_targets_and_interpolations_between_arguments() -> None:
    argv = [
        "MODEL._target_=my.Model",
        "MODEL.encoder._target_=my.Encoder",
        "MODEL.encoder.width=${MODEL.width}",
    ]
    assert load(*argv, "MODEL.width=4").MODEL["encoder"] == {"_target_": "my.Encoder", "width": 4}
    (problem,) = problems(*argv)
    assert "there is no key MODEL.width" in problem


def test_no_target_no_free_keys() -> None:
    (problem,) = problems("MODEL.width=8")
    assert problem == (
        "MODEL.width: no such key (command line); MODEL takes other keys when MODEL._target_ is set"
    )


# Presets


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_every_preset_loads(group: str, name: str) -> None:
    text = (FOLDER / group / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# @package _global_\n# ")
    config = load(f"{group}={name}")
    assert load(f"+{group}='{name}'") == config
    top = {key for key in yaml.safe_load(text) if key != "defaults"}
    assert top <= {"MODEL", "DATA", "OPTIMIZER", "SCHEDULE"}
    changed = {
        f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(load(), f.name)
    }
    assert changed <= top


def test_models_of_presets_are_timm_models() -> None:
    timm = pytest.importorskip("timm")
    assert {name for _, name in PRESETS} >= {"resnet50", "convnext_tiny", "vit_small", "mobilenetv3"}
    for name in available()["model"]:
        assert timm.is_model(load(f"model={name}").MODEL.NAME)


def test_presets_combine() -> None:
    config = load("model=resnet50", "data=inat2021", "optimizer=sgd", "DATA.IMG_SIZE", "128")
    assert (config.MODEL.NAME, config.DATA.DATASET.FOLDER_NAMES) == ("resnet50", "inat2021")
    assert (config.DATA.IMG_SIZE, config.DATA.AUGMENT.CROP_FRACTION) == (128, 0.875)
    assert config.OPTIMIZER.KWARGS == {"momentum": 0.9}
    assert config.DATA.AUGMENT.CROP_SCALE == [0.08, 1.0]


def test_presets_leave_hydra_as_it_was() -> None:
    assert not GlobalHydra.instance().is_initialized()
    assert load("model=resnet50") == load("model=resnet50")
    assert not GlobalHydra.instance().is_initialized()


def test_presets_load_inside_another_hydra_program() -> None:
    with initialize(config_path=None, version_base="1.2"):
        theirs = GlobalHydra.instance().hydra
        assert load("model=resnet50").MODEL.NAME == "resnet50"
        assert GlobalHydra.instance().hydra is theirs
        assert compose(overrides=["+x=1"]) == {"x": 1}


def test_loading_survives_cleared_resolvers() -> None:
    OmegaConf.clear_resolvers()
    assert load().DATA.AUTOBATCH.MAX_BATCH_SIZE_VAL == 1024


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_every_shipped_experiment_loads(file: Path) -> None:
    assert load("--cfg", str(file)) != load()


def test_digits_experiment_searches_for_both_sizes() -> None:
    (file,) = [file for file in EXPERIMENTS if file.stem == "digits"]
    config = load("--cfg", str(file))
    assert config.DATA.AUTOBATCH.ENABLED
    assert config.DATA.AUTOBATCH.ENABLED_VAL
    assert config.DATA.AUTOBATCH.MAX_BATCH_SIZE_VAL == 2 * config.DATA.AUTOBATCH.MAX_BATCH_SIZE


# Back to YAML


def reloaded(config: Config, folder: Path) -> Config:
    return load("--cfg", write(folder, to_yaml(config)))


def test_yaml_reads_back_to_an_equal_configuration(tmp_path: Path) -> None:
    config = load(
        "data=imagefolder", "DATA.AUTOBATCH.ENABLED=1", "MODEL._target_=my.Model",
        "MODEL.a={b:[1,{c:null}],d:{}}",
        "EXPERIMENT.WANDB.TAGS=[1,null,'a, b']", "EXPERIMENT.WANDB.GROUP='None'", "OPTIMIZER.LR=1e-5",
        "TRAIN.AMP=off",
    )  # fmt: skip
    assert reloaded(config, tmp_path) == config
    assert reloaded(load(), tmp_path) == load()


def test_yaml_has_every_key_in_the_order_of_the_schema() -> None:
    tree = yaml.safe_load(to_yaml(load()))
    assert list(tree) == [path[0] for path in NODES if len(path) == 1]
    for path in KEYS:
        node = tree
        for part in path:
            node = node[part]


HARD_TEXTS = [
    "", " ", "None", "none", "null", "~", "1e3", "-1E-3", "1.5e3", "1", "0x1", "true", "off", "=", "<<",
    "???x", "2024-01-01",
    "${x}", r"\${x}", r"\\${x}", "a${", "'x'", '"x"', "- a", "a: b", "a #b", "\x85\u2028\n", "\udcff",
]  # fmt: skip


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_text_survives_the_file(tmp_path: Path, text: str) -> None:
    config = load()
    config.EXPERIMENT.OUTPUT_DIR = config.DATA.DATASET.ROOT = text
    config.EXPERIMENT.WANDB.TAGS = [text]
    config.MODEL.KWARGS.update(x=text, y=[text], z={"a": text})
    assert reloaded(config, tmp_path) == config


hard_texts = st.text() | st.sampled_from(HARD_TEXTS[:-1])
hard_texts |= st.text(alphabet="\\${}a' \"#:\n\x85\u2028\t-")
leaves = hard_texts | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(text=hard_texts, optional=hard_texts | st.none(), tags=st.lists(hard_texts), tree=trees)
def test_any_values_survive_the_file(
    tmp_path_factory: pytest.TempPathFactory, text: str, optional: str | None, tags: list[str], tree: Any
) -> None:
    config = load()
    config.EXPERIMENT.OUTPUT_DIR = text
    config.DATA.DATASET.ROOT = optional
    config.EXPERIMENT.WANDB.TAGS = tags
    config.MODEL.KWARGS["x"] = tree
    assert reloaded(config, tmp_path_factory.getbasetemp()) == config


def test_with_batch_sizes_makes_a_new_configuration(tmp_path: Path) -> None:
    before = load()
    after = with_batch_sizes(before, train=48, val=96)
    assert (after.DATA.BATCH_SIZE, after.DATA.BATCH_SIZE_VAL) == (48, 96)
    assert before == load()
    assert with_batch_sizes(after) == after
    assert with_batch_sizes(before, val=96).DATA.BATCH_SIZE == before.DATA.BATCH_SIZE
    assert reloaded(after, tmp_path) == after


def test_save_is_atomic_and_leaves_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "runs" / "x" / "config.yaml"
    save_config(load(), target)
    assert load("--cfg", str(target)) == load()
    before = target.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError, match=r"config\.yaml: cannot be written: No space left"):
        save_config(load("DATA.BATCH_SIZE=1"), target)
    assert target.read_bytes() == before
    assert list(target.parent.iterdir()) == [target]


def test_save_below_a_file_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be written"):
        save_config(load(), tmp_path / "runs" / "config.yaml")


# Files against groups of the command line, and mistakes with their remedy


def test_a_file_that_beats_a_choice_of_the_command_line_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "TRAIN: {EPOCHS: 3, LOG_EVERY: 1}\nMODEL:\n  NAME: test_resnet")
    for _ in range(2):
        assert load("--cfg", file, "model=resnet18").MODEL.NAME == "test_resnet"
    assert capsys.readouterr().err == (
        f"warning: MODEL.NAME of {file}, line 3 wins over model=resnet18: files win over groups of the "
        "command line; keys there win over both\n"
    )
    load("--cfg", file, "model=resnet18", "MODEL.NAME=resnet34")
    load("--cfg", write(tmp_path, "MODEL: {NAME: resnet18}"), "model=resnet18")
    assert capsys.readouterr().err == ""


def test_a_key_that_a_class_of_ones_own_does_not_take_can_be_left_out(tmp_path: Path) -> None:
    file = write(tmp_path, "MODEL:\n  NAME: test_resnet")
    argv = ("--cfg", file, "MODEL._target_=fractions.Fraction", "MODEL.numerator=3")
    with pytest.raises(ConfigError, match=r"; ~MODEL\.NAME leaves out what it does not take; --print-config"):
        call_target(load(*argv).MODEL, "MODEL")
    assert call_target(load(*argv, "~MODEL.NAME").MODEL, "MODEL") == 3


@pytest.mark.parametrize(("token", "expected"), [
    ("model.hidden=64", "did you mean MODEL.hidden?"),
    ("model.drop_rate=0.5", "did you mean MODEL.DROP_RATE?"),
    ("MODEL=mlp", "did you mean model=mlp?"),
    ("DATA.AUGMENT=strong", "did you mean data/augment=strong?"),
    ("~MODEL.KWARGS.foo", "~MODEL.KWARGS.foo: is not set (command line)"),
    ("EXPERIMENT.NAME=null", "EXPERIMENT.NAME: 'null' is not allowed: a run has a name, not null"),
    ("EXPERIMENT.NAME=a\0b", "EXPERIMENT.NAME: 'a\\x00b' is not allowed: the name of a folder has no NUL"),
    ("EXPERIMENT.NAME=a\udc80", "it has a character that is not in Unicode"),
])  # fmt: skip
def test_what_to_type_instead(token: str, expected: str) -> None:
    (problem,) = problems(token)
    assert expected in problem


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("\ufeff# @package TRAIN\nEPOCHS: 3", encoding="utf-8")
    assert load("--cfg", str(file)).TRAIN.EPOCHS == 3


def test_a_variable_of_ones_own_is_met_with_what_to_use_instead(tmp_path: Path) -> None:
    found = problems("--cfg", write(tmp_path, "lr: 0.1\nOPTIMIZER: {LR: '${lr}'}"))
    assert [problem.partition(":")[0] for problem in found] == ["lr", "OPTIMIZER.LR"]
    assert "refer to the key that holds the value (${OPTIMIZER.LR}), or to the environment" in found[0]
    assert "variables" not in problems("--cfg", write(tmp_path, "TRAINS: {EPOCHS: 1}"))[0]
