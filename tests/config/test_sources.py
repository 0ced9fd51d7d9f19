"""Files, folders and defaults lists: what a Hydra user types, with Hydra's own composition beside it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra import compose, initialize, initialize_config_dir, version
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from linnaeus.commands.analyze.options import read as analyze
from linnaeus.commands.sweep.grid import read_grid
from linnaeus.config.load import load_config
from linnaeus.config.schema import Config
from linnaeus.errors import ConfigError

Make = Callable[..., None]
VIT = "vit_tiny_patch16_224"  # of the preset vit_tiny


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Writes files by their path below the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(**files: str) -> None:
        for name, text in files.items():
            path = Path(f"{name.replace('__', '/')}.yaml")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


def load(*argv: str) -> Config:
    return load_config(argv).config


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return caught.value.problems


# Defaults lists in a file


def test_a_defaults_list_chooses_groups_and_files_beside_it(make: Make) -> None:
    make(
        my="""
defaults:
  - base
  - model: resnet50
  - optional data: nothing
  - optimizer: null
  - override /schedule: cosine
TRAIN: {EPOCHS: 3}
""",
        base="defaults: [{schedule: linear}]\nTRAIN: {EPOCHS: 7, LOG_EVERY: 9}",
    )
    config = load("--cfg", "my.yaml")
    assert (config.MODEL.NAME, config.SCHEDULE.NAME) == ("resnet50", "cosine")
    assert (config.TRAIN.EPOCHS, config.TRAIN.LOG_EVERY) == (3, 9)
    assert config.OPTIMIZER == load().OPTIMIZER
    assert load("--cfg", "base.yaml").SCHEDULE.NAME == "linear"  # which the override has replaced


@pytest.mark.parametrize(("entries", "epochs"), [
    ("[base]", 3), ("[base, _self_]", 3), ("[_self_, base]", 7), ("[]", 3),
])  # fmt: skip
def test_self_says_what_wins(make: Make, entries: str, epochs: int) -> None:
    make(my=f"defaults: {entries}\nTRAIN: {{EPOCHS: 3}}", base="TRAIN: {EPOCHS: 7}")
    assert epochs == load("--cfg", "my.yaml").TRAIN.EPOCHS


def test_files_are_found_beside_the_file_that_names_them(make: Make) -> None:
    make(
        a__my="defaults: [base]", a__base="TRAIN: {EPOCHS: 3}",
        b__my="defaults: [base]", b__base="TRAIN: {LOG_EVERY: 4}",
    )  # fmt: skip
    config = load("--cfg", "a/my.yaml", "--cfg", "b/my.yaml")
    assert (config.TRAIN.EPOCHS, config.TRAIN.LOG_EVERY) == (3, 4)


def test_files_are_found_in_the_folder_of_the_cfg_file_that_leads_to_them(make: Make) -> None:
    for folder, epochs in (("a", 3), ("b", 4)):
        make(**{
            f"{folder}__my": "defaults: [sub/base, {model: mine}, {extra: [one]}]",
            f"{folder}__sub__base": f"defaults: [next]\nTRAIN: {{EPOCHS: {epochs}}}",
            f"{folder}__sub__next": f"EXPERIMENT: {{NAME: {folder}}}",
            f"{folder}__model__mine": f"defaults: [below]\nNAME: {folder}",
            f"{folder}__model__below": f"KWARGS: {{{folder}: 1}}",
            f"{folder}__extra__one": f"OPTIMIZER: {{LR: 0.{epochs}}}",
        })  # fmt: skip
    make(a__twice="defaults: [override /model: mine]", b__plain="", conf__model__mine="NAME: conf")

    def found(*argv: str) -> tuple[Any, ...]:
        config = load(*argv)
        return (
            config.TRAIN.EPOCHS, config.EXPERIMENT.NAME, config.MODEL.NAME, config.MODEL.KWARGS,
            config.OPTIMIZER.LR,
        )  # fmt: skip

    of_a, of_b = (3, "a", "a", {"a": 1}, 0.3), (4, "b", "b", {"b": 1}, 0.4)
    assert found("--cfg", "a/my.yaml") == of_a
    assert found("--cfg", "b/my.yaml") == found("--cfg", "a/my.yaml", "--cfg", "b/my.yaml") == of_b
    assert found("--cfg", "b/my.yaml", "--cfg", "a/my.yaml") == of_a
    assert found("--cfg", "b/plain.yaml", "--cfg", "a/my.yaml") == of_a
    assert load("--cfg", "b/my.yaml", "--cfg", "a/twice.yaml").MODEL.NAME == "a"
    assert load("--config-dir=conf", "--cfg", "b/my.yaml").MODEL.NAME == "conf"
    assert load("--cfg", "b/my.yaml", "model=resnet18").MODEL.NAME == "resnet18"


def test_a_file_may_be_reached_twice(make: Make) -> None:
    make(
        my="defaults: [{model: resnet50}]\nTRAIN: {EPOCHS: 1}", other="defaults: [my]\nTRAIN: {EPOCHS: 2}",
        third="defaults: [my]\nTRAIN: {LOG_EVERY: 3}", first="MODEL: {NAME: first}\nTRAIN: {EPOCHS: 9}",
        conf__shared="defaults: [{model: vit_tiny}]", c="defaults: [shared]", d="defaults: [shared]",
    )  # fmt: skip
    Path("link.yaml").symlink_to("my.yaml")
    for names, epochs in (
        ("my my", 1), ("other my", 1), ("my other", 2), ("other third", 1), ("my link", 1),
        ("first other my", 1), ("my first my", 1),
    ):  # fmt: skip
        config = load(*(f"--cfg={name}.yaml" for name in names.split()))
        assert ("resnet50", epochs) == (config.MODEL.NAME, config.TRAIN.EPOCHS), names
    assert load("--config-dir=conf", "--cfg=c.yaml", "--cfg=d.yaml").MODEL.NAME == VIT
    assert load("--config-dir=conf", "--config-name=shared", "--config-name=shared").MODEL.NAME == VIT
    make(e="defaults: [{model: resnet18}, {model: resnet50}]")
    (problem,) = problems("--cfg=my.yaml", "--cfg=e.yaml")  # within one file it stays a mistake
    assert problem.startswith("model: is chosen twice")


def test_an_override_of_nothing_is_a_choice(make: Make) -> None:
    make(
        my="defaults: [override /model: resnet50]",
        conf__experiment__birds="defaults: [override /model: vit_tiny]",
    )
    assert load("--cfg", "my.yaml").MODEL.NAME == "resnet50"
    assert load("--config-dir=conf", "experiment=birds").MODEL.NAME == VIT


def test_interpolated_and_several_names(make: Make) -> None:
    make(
        my="defaults: [{model: vit_tiny}, {extra: [one, two]}, {by: '${model}'}]",
        extra__one="TRAIN: {EPOCHS: 1, LOG_EVERY: 1}", extra__two="TRAIN: {EPOCHS: 2}",
        by__vit_tiny="OPTIMIZER: {LR: 0.5}", by__resnet18="OPTIMIZER: {LR: 0.25}",
    )  # fmt: skip
    config = load("--cfg", "my.yaml")
    assert (config.TRAIN.EPOCHS, config.TRAIN.LOG_EVERY, config.OPTIMIZER.LR) == (2, 1, 0.5)
    assert load("--cfg", "my.yaml", "model=resnet18").OPTIMIZER.LR == 0.25


# Several files


def test_later_files_win(make: Make) -> None:
    make(a="defaults: [{model: resnet18}]\nTRAIN: {EPOCHS: 3, LOG_EVERY: 9}", b="TRAIN: {EPOCHS: 4}",
         c="defaults: [{model: vit_tiny}]")  # fmt: skip
    config = load("--cfg", "a.yaml", "--cfg", "b.yaml", "--cfg=c.yaml")
    assert (config.TRAIN.EPOCHS, config.TRAIN.LOG_EVERY, config.MODEL.NAME) == (4, 9, VIT)
    config = load("--cfg=c.yaml", "--cfg", "b.yaml", "--cfg", "a.yaml", "TRAIN.LOG_EVERY=1")
    assert (config.TRAIN.EPOCHS, config.TRAIN.LOG_EVERY, config.MODEL.NAME) == (3, 1, "resnet18")


# Groups and folders of one's own


FOLDER = {
    "conf__model__mine": "NAME: resnet34\nDROP_RATE: 0.1",
    "conf__model__wide": "defaults: [mine]\nDROP_RATE: 0.2",
    "conf__model__resnet18": "NAME: my_resnet18",
    "conf__data__augment__strong": "HFLIP: 0.5",
    "conf__data__birds": "defaults: [/data/imagefolder, augment: strong]\nDATASET: {ROOT: /birds}",
    "conf__experiment__birds": "defaults: [override /model: mine, override /data: birds]\nTRAIN: {EPOCHS: 5}",
    "conf__experiment__named": "# A comment\n# @package EXPERIMENT\nNAME: named",
    "conf__base": "defaults: [{model: resnet50}]\nTRAIN: {EPOCHS: 2, LOG_EVERY: 2}\nMODEL: {DROP_RATE: 0.3}",
}


def test_a_group_of_ones_own(make: Make) -> None:
    make(**FOLDER)
    model = load("--config-dir", "conf", "model=mine").MODEL
    assert (model.NAME, model.DROP_RATE) == ("resnet34", 0.1)
    model = load("--config-dir", "conf", "model=wide").MODEL
    assert (model.NAME, model.DROP_RATE) == ("resnet34", 0.2)
    assert load("--config-dir", "conf", "data/augment=strong").DATA.AUGMENT.HFLIP == 0.5
    assert load("--config-dir", "conf", "optimizer=sgd", "model=vit_tiny").MODEL.NAME == VIT
    assert problems("model=mine")[0].startswith("model: no preset 'mine' (command line); there are ")


def test_other_commands_take_folders_and_names_too(make: Make) -> None:
    make(**FOLDER)
    _, config = analyze(["--config-dir", "conf", "-cn", "base", "model=mine", "--modes", "train"])
    assert (config.MODEL.NAME, config.TRAIN.EPOCHS) == ("resnet34", 2)
    grid = read_grid(["--config-dir", "conf", "--config-name=base", "model=mine,wide", "~optimizer"])
    models = [load(*combination.argv).MODEL for combination in grid.combinations]
    # The key of `base` wins over both, so the files are told apart without it.
    assert [(model.NAME, model.DROP_RATE) for model in models] == [("resnet34", 0.3), ("resnet34", 0.3)]
    assert [combination.title for combination in grid.combinations] == ["model=mine", "model=wide"]
    grid = read_grid(["--config-dir", "conf", "model=mine,wide"])
    assert [load(*combination.argv).MODEL.DROP_RATE for combination in grid.combinations] == [0.1, 0.2]
    make(my="defaults: [{optimizer: adamw}]\nTRAIN: {EPOCHS: 3}")
    grid = read_grid(["--cfg=my.yaml", "TRAIN.LOG_EVERY=1,2", "~optimizer"])
    assert [load(*run.argv).OPTIMIZER for run in grid.combinations] == [load().OPTIMIZER] * 2
    assert load("--cfg=my.yaml").OPTIMIZER != load().OPTIMIZER


def test_the_first_folder_that_has_a_file_counts(make: Make) -> None:
    make(**FOLDER, other__model__mine="NAME: other", model__beside="NAME: beside", my="TRAIN: {EPOCHS: 1}")
    assert load("--config-dir", "conf", "model=resnet18").MODEL.NAME == "my_resnet18"
    assert load("--config-dir", "other", "--config-dir", "conf", "model=mine").MODEL.NAME == "other"
    assert load("--cfg", "my.yaml", "model=beside").MODEL.NAME == "beside"
    assert load("--cfg", "my.yaml", "model=resnet18").MODEL.NAME == "resnet18"


def test_experiments(make: Make) -> None:
    make(**FOLDER)
    expected = load("--config-dir=conf", "+experiment=birds")
    assert (expected.MODEL.NAME, expected.TRAIN.EPOCHS) == ("resnet34", 5)
    assert (expected.DATA.DATASET.NAME, expected.DATA.DATASET.ROOT) == ("imagefolder", "/birds")
    assert expected.DATA.AUGMENT.HFLIP == 0.5
    assert load("--config-dir=conf", "experiment=birds") == expected
    assert load("--config-dir=conf", "experiment=named").EXPERIMENT.NAME == "named"


def test_the_order_of_files_groups_and_experiments(make: Make) -> None:
    make(**FOLDER)
    base = ("--config-dir", "conf", "--config-name", "base")
    assert (load(*base).MODEL.NAME, load(*base).MODEL.DROP_RATE) == ("resnet50", 0.3)
    replaced = load(*base, "model=mine")
    assert (replaced.MODEL.NAME, replaced.MODEL.DROP_RATE) == ("resnet34", 0.3)  # the file's own key wins
    config = load(*base, "+experiment=birds")
    assert (config.MODEL.NAME, config.TRAIN.EPOCHS, config.TRAIN.LOG_EVERY) == ("resnet34", 5, 2)
    config = load(*base, "+experiment=birds", "model=vit_tiny", "TRAIN.EPOCHS=9")
    assert (config.MODEL.NAME, config.TRAIN.EPOCHS) == (VIT, 9)
    assert load(*base, "~model").MODEL.NAME == load().MODEL.NAME
    assert load("~model", "~optimizer=sgd") == load()


def test_a_group_that_goes_with_the_choice_it_belonged_to_still_counts(make: Make) -> None:
    make(my="defaults: [{model: mine}]", model__mine="# @package _global_\ndefaults: [{/optimizer: adamw}]")
    config = load("--cfg", "my.yaml", "model=resnet18", "optimizer=sgd")
    assert (config.MODEL.NAME, config.OPTIMIZER.NAME) == ("resnet18", "sgd")


def test_packages(make: Make) -> None:
    make(
        conf__encoder__small="width: 3",
        conf__encoder__large="defaults: [small]\ndepth: 9",
        conf__model__target="_target_: my.Model",
        my="defaults: [{model: target}, {encoder@MODEL.encoder: large}, extra@TRAIN, whole@_global_]",
        extra="EPOCHS: 4", whole="TRAIN: {LOG_EVERY: 3}",
    )  # fmt: skip
    config = load("--config-dir", "conf", "--cfg", "my.yaml")
    assert config.MODEL == {"_target_": "my.Model", "encoder": {"width": 3, "depth": 9}}
    assert (config.TRAIN.EPOCHS, config.TRAIN.LOG_EVERY) == (4, 3)
    argv = ("--config-dir=conf", "model=target", "+encoder@MODEL.decoder=small")
    assert load(*argv).MODEL == {"_target_": "my.Model", "decoder": {"width": 3}}
    assert load("--config-dir=conf", "model@MODEL=target").MODEL == {"_target_": "my.Model"}


def test_a_package_line_may_name_the_group(make: Make) -> None:
    make(
        conf__model__same="# @package _group_\nNAME: same",
        conf__model__below="# @package _group_.KWARGS\nx: 1",
        conf__extra__wide="# @package _group_\nTRAIN: {EPOCHS: 3}",
        my="defaults: [{model: same}, {extra: wide}]",
    )
    assert load("--config-dir=conf", "model=same").MODEL.NAME == "same"
    assert load("--config-dir=conf", "model=below").MODEL.KWARGS == {"x": 1}
    config = load("--config-dir=conf", "--cfg=my.yaml")
    assert (config.MODEL.NAME, config.TRAIN.EPOCHS) == ("same", 3)


def test_a_preset_takes_no_package(make: Make) -> None:
    make(my="defaults: [{model@MODEL.encoder: resnet18}]", conf__model__resnet18="NAME: mine")
    argv = ("MODEL._target_=my.Model",)
    for named in ("model@MODEL.encoder=resnet18", "--cfg=my.yaml"):
        (problem,) = problems(named, *argv)
        assert problem.startswith(
            "model@MODEL.encoder: the preset 'resnet18' sets MODEL and takes no package"
        )
        own = load("--config-dir=conf", named, *argv).MODEL
        assert own == {"_target_": "my.Model", "encoder": {"NAME": "mine"}}
    assert load("model@MODEL=resnet18").MODEL.NAME == "resnet18"


def test_files_may_end_in_yml(make: Make) -> None:
    make(my="defaults: [base, {model: mine}]", both="TRAIN: {EPOCHS: 1}")
    Path("conf/model").mkdir(parents=True)
    Path("base.yml").write_text("TRAIN: {LOG_EVERY: 3}")
    Path("conf/model/mine.yml").write_text("NAME: mine")
    Path("both.yml").write_text("TRAIN: {EPOCHS: 2}")
    config = load("--config-dir=conf", "--cfg=my.yaml")
    assert (config.TRAIN.LOG_EVERY, config.MODEL.NAME) == (3, "mine")
    assert load("--config-dir=conf", "model=mine").MODEL.NAME == "mine"
    assert load("--config-dir=.", "--config-name=both").TRAIN.EPOCHS == 1
    assert load("--config-dir=.", "--config-name=both.yml").TRAIN.EPOCHS == 2
    (problem,) = problems("--config-dir=conf", "modl=mine")
    assert "did you mean model?" in problem


def test_a_defaults_list_that_names_nothing_changes_nothing(make: Make) -> None:
    make(**FOLDER, a="TRAIN: {EPOCHS: 1}\nMODEL: {DROP_RATE: 0.6}", b="# @package TRAIN\nEPOCHS: 2")
    argv = (
        "--config-dir=conf",
        "--cfg=a.yaml",
        "--cfg=b.yaml",
        "model=mine",
        "+experiment=named",
        "optimizer=sgd",
    )
    expected = load(*argv)
    assert (expected.TRAIN.EPOCHS, expected.MODEL.DROP_RATE) == (2, 0.6)
    Path("b.yaml").write_text("# @package TRAIN\ndefaults: [_self_]\nEPOCHS: 2")
    assert load(*argv) == expected


def test_a_group_that_is_left_out_must_be_there(make: Make) -> None:
    make(my="defaults: [{model: resnet50}, {optimizer: adamw}]", extra__one="TRAIN: {EPOCHS: 1}")
    plain = load("--cfg", "my.yaml")
    assert load("--cfg", "my.yaml", "~model").MODEL == load("--cfg", "my.yaml", "model=null").MODEL
    assert load("--cfg", "my.yaml", "~optimizer=adamw").OPTIMIZER == load().OPTIMIZER != plain.OPTIMIZER
    assert load("--cfg", "my.yaml", "~extra") == plain
    for argv in (["~modl"], ["--cfg", "my.yaml", "~modl"], ["~nothing/at/all"]):
        (problem,) = problems(*argv)
        assert problem.startswith(f"{argv[-1][1:]}: no such key or preset group (command line)")
    assert problems("~optimizer=slg")[0].startswith("optimizer: no preset 'slg' (command line)")
    assert problems("optimizer=sgd", "~optimizer=adamw") == [
        "~optimizer: is not 'adamw' but 'sgd', nothing left out (command line)"
    ]
    assert problems("--cfg", "my.yaml", "~optimizer=sgd") == [
        "~optimizer: is not 'sgd' but 'adamw' (my.yaml, line 1), nothing left out (command line)"
    ]
    assert load("optimizer=sgd", "~optimizer=sgd") == load()


@pytest.mark.parametrize("defaults", ["", "defaults: [_self_]\n"])
def test_several_names_on_the_command_line(make: Make, defaults: str) -> None:
    make(my=f"{defaults}TRAIN: {{EPOCHS: 7}}", conf__extra__one="TRAIN: {EPOCHS: 1, LOG_EVERY: 1}",
         conf__extra__two="TRAIN: {EPOCHS: 2}")  # fmt: skip
    argv = ("--cfg=my.yaml", "--config-dir=conf")
    for value in ("[one,two]", "['one', \"two\"]"):
        config = load(*argv, f"+extra={value}")
        assert (config.TRAIN.EPOCHS, config.TRAIN.LOG_EVERY) == (2, 1)
    assert load(*argv, "+extra=[two,one]").TRAIN.EPOCHS == 1
    assert load(*argv, "+extra=[]") == load(*argv)
    assert problems(*argv, "nothing=[]")[0].startswith("nothing: no such key or preset group")
    make(both="defaults: [{extra: [one, two]}]")
    argv = ("--cfg=both.yaml", "--config-dir=conf")
    assert load(*argv).TRAIN.EPOCHS == 2
    assert load(*argv, "extra=[one]").TRAIN.EPOCHS == 1
    for token in ("~extra", "extra=null", "extra=[]", "~extra=[one,two]"):
        assert load(*argv, token) == load()
    assert problems(*argv, "~extra=[one]") == [
        "~extra: is not 'one' but 'one', 'two' (both.yaml, line 1), nothing left out (command line)"
    ]
    argv = ("--cfg=my.yaml", "--config-dir=conf")
    (problem,) = problems(*argv, "+extra=[one,tow]")
    assert problem.startswith("extra: no preset 'tow' (command line); there are one, two")


def test_plus_adds_a_group_once(make: Make) -> None:
    make(conf__experiment__night="TRAIN: {EPOCHS: 3}", conf__experiment__day="TRAIN: {LOG_EVERY: 4}")
    (problem,) = problems("--config-dir=conf", "+experiment=night", "+experiment=day")
    assert problem == ("+experiment: is given twice (command line); write +experiment=[night,day] for both")
    config = load("--config-dir=conf", "+experiment=[night,day]")
    assert (config.TRAIN.EPOCHS, config.TRAIN.LOG_EVERY) == (3, 4)
    assert load("--config-dir=conf", "+experiment=night", "experiment=day").TRAIN.LOG_EVERY == 4  # the last


def test_what_an_override_alone_chooses_can_be_left_out(make: Make) -> None:
    make(my="defaults: [override /model: resnet50]", list="defaults: [override /extra: [one]]",
         extra__one="TRAIN: {EPOCHS: 3}")  # fmt: skip
    assert load("--cfg=my.yaml").MODEL.NAME == "resnet50"
    for token in ("~model", "~model=resnet50", "model=null"):
        assert load("--cfg=my.yaml", token) == load()
    assert problems("--cfg=my.yaml", "~model=resnet18") == [
        "~model: is not 'resnet18' but 'resnet50' (my.yaml, line 1), nothing left out (command line)"
    ]
    assert load("--cfg=list.yaml").TRAIN.EPOCHS == 3
    assert load("--cfg=list.yaml", "~extra") == load()


def test_one_file_chosen_at_two_places_counts_at_both(make: Make) -> None:
    make(
        my="defaults: [/ga/sub: [x, y]]", ga__sub__x="TRAIN: {EPOCHS: 3}",
        ga__sub__y="defaults: [/ga/sub: null]\nTRAIN: {LOG_EVERY: 4}",
        two="defaults: [a, b]", a="defaults: [{gb: [one]}]", b="defaults: [{gb: [two]}]",
        gb__one="TRAIN: {EPOCHS: 5}", gb__two="TRAIN: {LOG_EVERY: 6}",
        same="defaults: [c, d]", c="defaults: [{model: resnet50}]", d="defaults: [{model: resnet50}]",
    )  # fmt: skip
    trains = [load(f"--cfg={name}.yaml").TRAIN for name in ("my", "two")]
    assert [(train.EPOCHS, train.LOG_EVERY) for train in trains] == [(3, 4), (5, 6)]
    assert load("--cfg=two.yaml", "~gb") == load()
    assert load("--cfg=same.yaml").MODEL.NAME == "resnet50"
    make(d="defaults: [{model: resnet18}]")
    assert problems("--cfg=same.yaml")[0].startswith(
        "model: is chosen twice (c.yaml, line 1 and d.yaml, line 1)"
    )


def test_the_command_line_reaches_choices_in_files_of_other_nodes(make: Make) -> None:
    make(
        data__birds="defaults: [augment: strong, /model: resnet50]\nBATCH_SIZE: 3",
        data__augment__strong="HFLIP: 0.25", data__augment__weak="HFLIP: 0.75",
    )  # fmt: skip
    plain = load("--config-dir=.", "data=birds")
    assert (plain.MODEL.NAME, plain.DATA.AUGMENT.HFLIP) == ("resnet50", 0.25)
    for argv in (["data=birds", "data/augment=weak"], ["data/augment=weak", "data=birds"]):
        config = load("--config-dir=.", "model=vit_tiny", *argv)
        assert (config.MODEL.NAME, config.DATA.AUGMENT.HFLIP, config.DATA.BATCH_SIZE) == (VIT, 0.75, 3)
    assert load("--config-dir=.", "data=birds", "~model").MODEL == load().MODEL


def test_a_file_of_a_group_may_begin_with_another_of_it(make: Make) -> None:
    make(model__z="defaults: [/model: y]\nDROP_RATE: 0.5", model__y="NAME: y\nDROP_RATE: 0.25")
    model = load("--config-dir=.", "model=z").MODEL
    assert (model.NAME, model.DROP_RATE) == ("y", 0.5)


def test_an_override_that_comes_too_late_says_for_which_choice(make: Make) -> None:
    make(early="defaults: [model: resnet18, exp: a]", late="defaults: [exp: a, model: resnet18]",
         exp__a="defaults: [override /model: vit_tiny]")  # fmt: skip
    assert load("--cfg=early.yaml").MODEL.NAME == VIT
    (problem,) = problems("--cfg=late.yaml")
    assert problem.startswith(
        "model: override (exp/a.yaml, line 1) comes too late for the choice in late.yaml, line"
    )
    assert load("--cfg=late.yaml", "model=resnet50").MODEL.NAME == "resnet50"


def test_the_remedies_for_an_override_in_a_file_of_a_node_work(make: Make) -> None:
    make(
        my="defaults: [schedule: cosine, exp: one, data: birds]", exp__one="TRAIN: {EPOCHS: 3}", exp__two="",
        data__birds="defaults: [override /schedule: linear, override /exp: two]",
    )  # fmt: skip
    found = problems("--cfg=my.yaml")
    remedies = [problem.split("write `")[1].split(": NAME`")[0] for problem in found]
    assert remedies == ["override /exp@_global_.exp", "override /schedule@_global_"]
    make(data__birds=f"defaults: [{remedies[1]}: linear, {remedies[0]}: two]")
    config = load("--cfg=my.yaml")
    assert (config.SCHEDULE.NAME, config.TRAIN.EPOCHS) == ("linear", load().TRAIN.EPOCHS)


# As Hydra composes them


TREES = {
    "files": {"config": "defaults: [base, _self_]\nx: 1", "base": "x: 0\ny: 2"},
    "groups": {
        "config": "defaults: [{a: one}, {b: one}, _self_, {override /a: two}]\nb: {z: 9}",
        "a/one": "x: 1", "a/two": "defaults: [one, {c: deep}]\ny: 2", "a/c/deep": "w: 5", "b/one": "z: 3",
    },
    "experiment": {
        "config": "defaults: [{a: one}, _self_, {experiment: e}]\na: {x: 4}",
        "a/one": "x: 1", "a/two": "x: 2\ny: 2",
        "experiment/e": "# @package _global_\ndefaults: [{override /a: two}]\na: {y: 7}",
    },
    "packages": {
        "config": "defaults: [{a@b: one}, {a@_global_: two}, f@c]",
        "a/one": "x: 1", "a/two": "y: 2", "f": "z: 3",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_the_composition_is_that_of_hydra(tmp_path: Path, name: str) -> None:
    """Our reader with Hydra's order gives what `hydra.compose` gives, below a node that takes any key."""
    for path, text in TREES[name].items():
        file = tmp_path / f"{path}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        # A package line stands for what Linnaeus' own default, the node of the group's name, would change.
        group = path.rpartition("/")[0].replace("/", ".")
        header = (
            "" if not group or "@" in TREES[name]["config"] or "@package" in text else f"# @package {group}\n"
        )
        file.write_text(header + text)
    expected = composed(tmp_path)
    found = order_of(tmp_path)
    assert found == expected
    assert found != {}


def composed(folder: Path, *overrides: str) -> Any:
    """What Hydra makes of `config.yaml` in a folder."""
    before = version.getbase()
    try:
        with initialize_config_dir(str(folder), version_base="1.3"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Hydra recommends `_self_` in each list
            return OmegaConf.to_container(compose("config", overrides=list(overrides)))
    finally:
        version.VersionBase.instance().version_base = before


def order_of(folder: Path, *overrides: str) -> dict[str, Any]:
    """The tree that our order of files gives."""
    from linnaeus.config.overrides import parse_command_line
    from linnaeus.config.sources import read_sources

    tree: Any = OmegaConf.create({})
    argv = ["--config-dir", str(folder), "--config-name", "config", *overrides]
    sources = read_sources(parse_command_line(argv))
    assert sources.problems == []
    for setting in sources.settings:
        text = getattr(setting.value, "text", setting.value)
        OmegaConf.update(tree, ".".join(setting.path), yaml.safe_load(text))
    return dict(OmegaConf.to_container(tree))


GROUPS = {"d": ("x",), "a": ("x", "y", "z"), "a/c": ("x", "y"), "b": ("x", "y", "z")}
"""The groups of random trees. A file chooses in the groups after its own; the first is left to `+d=x`."""


@st.composite
def defaults_lists(draw: st.DrawFn, group: str, name: str) -> list[Any]:
    """The defaults list of one file, `group` being empty for those at the top."""
    entries: list[Any] = []
    order = list(GROUPS)
    targets = order[order.index(group) + 1 :] if group else order[1:]
    packages = st.sampled_from(["", "", "", "", "@p", "@_global_", "@_here_", "@_global_.q"])
    for _ in range(draw(st.integers(0, 3))):
        if not targets:
            break
        target = draw(st.sampled_from(targets))
        names = st.sampled_from(GROUPS[target])
        value = draw(
            names
            | names
            | st.lists(names, max_size=2, unique=True)
            | st.sampled_from([None, "missing", "${b}"])
        )
        sign = "optional " if value == "missing" else draw(st.sampled_from(["", "", "optional "]))
        path = target.removeprefix(f"{group}/") if target.startswith(f"{group}/") else f"/{target}"
        entries.append({f"{sign}{path}{draw(packages)}": value})
    beside = [other for other in (GROUPS[group] if group else ("base",)) if other > name and name != "base"]
    if beside and draw(st.booleans()):
        entries.append(draw(st.sampled_from(beside)))
    entries = draw(st.permutations(entries))
    if entries and draw(st.booleans()):
        entries.insert(draw(st.integers(0, len(entries))), "_self_")
    for _ in range(draw(st.sampled_from([0, 0, 0, 0, 1, 2] if name == "config" else [0] * 7 + [1]))):
        target = draw(st.sampled_from(order))
        names = st.sampled_from(GROUPS[target])
        package = draw(st.sampled_from(["", "", "@p"]))
        entries.append(
            {f"override /{target}{package}": draw(names | st.lists(names, max_size=2) | st.none())}
        )
    return entries


@st.composite
def trees(draw: st.DrawFn) -> dict[str, str]:
    """Texts of files by their path. Each file sets a key of its own, and one that all set."""
    texts = {}
    files = [("", "config"), ("", "base"), *((group, name) for group in GROUPS for name in GROUPS[group])]
    for number, (group, name) in enumerate(files):
        path = f"{group}/{name}".lstrip("/")
        # The line stands for what Linnaeus' own default, the node of the group's name, would change.
        packages = st.sampled_from([group.replace("/", ".")] * 3 + ["_global_", "p"])
        header = f"# @package {draw(packages)}\n" if group else ""
        keys = {f"own_{path.replace('/', '_')}": number, "shared": number}
        texts[path] = header + yaml.safe_dump({"defaults": draw(defaults_lists(group, name)), **keys})
    return texts


selections = st.sampled_from([
    (), (), (), (), (), ("a=y",), ("b=z",), ("+d=x",), ("+d=x", "a=z"), ("~a",), ("~b=x",), ("a/c=y",),
    ("a=[x,y]",), ("a@p=x", "b=y"),
])  # fmt: skip


def write_tree(folder: Path, texts: dict[str, str]) -> None:
    for path, text in texts.items():
        file = folder / f"{path}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def agrees(folder: Path, texts: dict[str, str], overrides: tuple[str, ...]) -> bool:
    """Whether Hydra composes the files; if so, ours must give the same."""
    write_tree(folder, texts)
    try:
        expected = composed(folder, *overrides)
    except (HydraException, OmegaConfBaseException, RecursionError, AssertionError):
        return False
    assert order_of(folder, *overrides) == expected
    return True


@given(texts=trees(), overrides=selections)
def test_random_trees_are_composed_as_by_hydra(
    texts: dict[str, str], overrides: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    agrees(tmp_path_factory.getbasetemp() / "trees", texts, overrides)


@pytest.mark.slow
def test_hundreds_of_random_trees_are_composed_as_by_hydra(tmp_path: Path) -> None:
    """Hydra composes many of them, else nothing would have been compared."""
    seen = {True: 0, False: 0}

    @settings(max_examples=300)
    @given(texts=trees(), overrides=selections)
    def compare(texts: dict[str, str], overrides: tuple[str, ...]) -> None:
        seen[agrees(tmp_path, texts, overrides)] += 1

    compare()
    assert seen[True] >= 60, seen


def test_hydra_is_the_version_that_the_rules_were_taken_from() -> None:
    assert hydra.__version__.startswith("1.3.")


# Problems


def test_all_problems_of_defaults_lists_at_once(make: Make) -> None:
    make(my="""
defaults:
  - model: resnet51
  - modl: resnet50
  - bse
  - model
  - optimizer: ???
  - data: [digits, digitz]
  - override hydra/job_logging: disabled
  - 7: [x]
  - {a: b, c: d}
  - optional
TRAIN: {EPOCH: 3}
""")  # fmt: skip
    found = problems("--cfg", "my.yaml", "schedule=cosin", "TRAIN.AMP=x")
    starts = [problem.split(";")[0] for problem in found]
    for expected in (
        "schedule: no preset 'cosin' (command line)",
        "hydra/job_logging: has no effect here (my.yaml, line 9)",
        "model: no preset 'resnet51' (my.yaml, line 3)",
        "modl: no such key or preset group (my.yaml, line 4)",
        "defaults: no file 'bse' (my.yaml, line 5)",
        "defaults: no file 'model' (my.yaml, line 6)",
        "optimizer: needs a choice (my.yaml, line 7): optimizer=NAME",
        "data: no preset 'digitz' (my.yaml, line 8)",
        "TRAIN.EPOCH: no such key (my.yaml, line 13)",
        "TRAIN.AMP: 'x' is not one of off, bf16, fp16 (command line)",
    ):
        assert expected in starts
    assert any("did you mean resnet50?" in problem for problem in found)
    assert any("write `- model: NAME`" in problem for problem in found)
    assert [problem for problem in found if "my.yaml, line 11" in problem]


@pytest.mark.parametrize(("text", "expected"), [
    ("defaults: base", "must be a list"),
    ("defaults: {model: resnet50}", "must be a list"),
    ("defaults: [3.5: [x, [y]]]", "an entry is a file"),
    ("defaults: [{model: {a: 1}}]", "an entry is a file"),
    ("defaults: [[base]]", "an entry is a file"),
    ("defaults: [_self_, _self_]", "_self_ stands twice"),
    ("defaults: ['_self_@x']", "an entry is a file"),
    ("defaults: [model: resnet50, model: resnet18]", "model: is chosen twice (my.yaml, line 1)"),
    ("defaults: [my]", "the files lead back to themselves (my.yaml, line 1)"),
    ("defaults: [{model: '${nothing}'}]", "Error resolving interpolation '${nothing}' (my.yaml, line 1)"),
    ("defaults: [{model: '${'}]", "no viable alternative at input '${' (my.yaml, line 1)"),
])  # fmt: skip
def test_one_fault_in_a_defaults_list(make: Make, text: str, expected: str) -> None:
    make(my=text)
    (problem,) = problems("--cfg", "my.yaml")
    assert expected in problem
    assert "my.yaml" in problem


def test_a_circle_of_several_files_is_told(make: Make) -> None:
    make(my="defaults: [a]", a="defaults:\n  - b", b="TRAIN: {}\ndefaults:\n  - a")
    (problem,) = problems("--cfg", "my.yaml")
    assert problem.endswith("(b.yaml, line 3 -> a.yaml, line 2)") or problem.endswith(
        "(a.yaml, line 2 -> b.yaml, line 3)"
    )


def test_a_defaults_list_does_not_hide_or_invent_other_problems(make: Make) -> None:
    make(
        my="defaults: [my]\nTRAIN: {EPOCH: 1}\nMODEL: {width: 3}",
        other="defaults: [nothing]\nMODEL: {width: 3}",
    )
    assert [problem.partition(":")[0] for problem in problems("--cfg", "my.yaml")] == [
        "defaults",
        "TRAIN.EPOCH",
    ]
    (problem,) = problems("--cfg", "other.yaml")  # `nothing` may set MODEL._target_
    assert problem.startswith("defaults: no file 'nothing'")


def test_problems_of_folders_and_names(make: Make) -> None:
    make(**FOLDER, a_file="")
    assert problems("--config-dir", "nowhere") == ["nowhere: no such folder (--config-dir)"]
    assert problems("--config-dir=a_file.yaml") == ["a_file.yaml: is a file, not a folder (--config-dir)"]
    assert problems("--config-dir=conf", "--config-name=bas") == [
        "bas: no such file (--config-name); there are base; did you mean base?"
    ]
    assert problems("--config-name=base") == [
        "base: no such file (--config-name); --config-dir DIR says where it is"
    ]
    (problem,) = problems("--config-dir=conf", "experiments=birds")
    assert (
        "groups are data, data/augment, experiment, model, optimizer, schedule; did you mean experiment?"
        in problem
    )


def test_a_file_of_ones_own_is_named_with_its_line(make: Make) -> None:
    make(conf__model__mine="NAME: x\nDROP: 0.1")
    (problem,) = problems("--config-dir", "conf", "model=mine")
    assert problem.startswith("MODEL.DROP: no such key (conf/model/mine.yaml, line 2)")
    (problem,) = problems("optimizer=sgd", "OPTIMIZER.LR=${OPTIMIZER.LRR}")
    assert "did you mean" in problem


def test_the_schema_is_a_structured_config_of_a_hydra_program(tmp_path: Path) -> None:
    """What docs/configuration.md says of a Hydra program of one's own."""
    ConfigStore.instance().store("linnaeus", Config)
    try:
        with initialize(config_path=None, version_base="1.3"):
            composed = compose("linnaeus", overrides=["DATA.BATCH_SIZE=8", "+MODEL.KWARGS.x=1"])
            with pytest.raises(HydraException, match=r"DATA\.BATCH_SIZ"):
                compose("linnaeus", overrides=["DATA.BATCH_SIZ=8"])
            with pytest.raises(HydraException, match=r"TRAIN\.EPOCHS"):
                compose("linnaeus", overrides=["TRAIN.EPOCHS=many"])
    finally:
        del ConfigStore.instance().repo["linnaeus.yaml"]
    file = tmp_path / "composed.yaml"
    OmegaConf.save(composed, file)
    assert load("--cfg", str(file)) == load("DATA.BATCH_SIZE=8", "MODEL.KWARGS.x=1")


def test_a_program_around_that_uses_hydra_keeps_its_version_base(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(my="defaults: [{model: resnet50}]")
    mark = version.Version("1.2")
    monkeypatch.setattr(version.VersionBase.instance(), "version_base", mark)
    assert load("--cfg", "my.yaml").MODEL.NAME == "resnet50"
    assert version.getbase() is mark


@pytest.mark.parametrize("argv", [["model=z"], ["data=birds", "schedule=cosine"]])
def test_an_override_in_a_file_of_a_node_names_the_file_and_the_remedy(make: Make, argv: list[str]) -> None:
    """It would choose below that node, and the file that it chooses below that one, without an end."""
    make(**{
        "model/z": "defaults: [override /model: z]\nNAME: resnet18",
        "data/birds": "defaults: [override /schedule: linear]\nBATCH_SIZE: 8",
    })  # fmt: skip
    with pytest.raises(ConfigError, match=r"\.yaml, line 1\) would come below .*@_global_: NAME"):
        load("--config-dir", ".", *argv)


def test_a_circle_through_a_list_of_names_is_a_circle(make: Make) -> None:
    make(**{"root": "defaults: [model: [a, b]]", "model/a": "defaults: [b]", "model/b": "defaults: [a]"})
    with pytest.raises(ConfigError, match="lead back to themselves"):
        load("--cfg", "root.yaml")
    (problem,) = problems("--cfg", "root.yaml")
    assert "(model/a.yaml, line 1 -> model/b.yaml, line 1)" in problem


def test_a_link_that_leads_nowhere_is_no_choice(make: Make, tmp_path: Path) -> None:
    make(**{"model/a": "NAME: resnet18"})
    (tmp_path / "model" / "dead.yaml").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="model: no preset 'dead'"):
        load("--config-dir", ".", "model=dead")
