"""Files, folders, groups and defaults lists: which value wins, with Hydra's own composition beside it."""

from pathlib import Path

from tests.helpers.configs import load, problems, write

GLOBAL, MODEL = "# @package _global_\n", "# @package MODEL\n"
VIT = "vit_tiny_patch16_224"  # of the preset vit_tiny


def figures(*argv):
    """Three values that the files of these tests set."""
    config = load(*argv)
    return config.MODEL.NAME, config.TRAIN.EPOCHS, config.TRAIN.LOG_EVERY


def test_a_defaults_list_chooses_groups_and_files_beside_it():
    write(
        {
            "my": "defaults:\n- base\n- model: resnet50\n- optional data: nothing\n- optimizer: null\n"
            "- override /schedule: cosine\nTRAIN: {EPOCHS: 3}",
            "base": "defaults: [{schedule: linear}]\nTRAIN: {EPOCHS: 7, LOG_EVERY: 9}",
        }
    )
    config = load("--cfg=my.yaml")
    assert (config.MODEL.NAME, config.SCHEDULE.NAME) == ("resnet50", "cosine")
    assert (config.TRAIN.EPOCHS, config.TRAIN.LOG_EVERY) == (3, 9)
    assert config.OPTIMIZER == load().OPTIMIZER
    assert load("--cfg=base.yaml").SCHEDULE.NAME == "linear"  # which the override has replaced


def test_overrides_are_choices_that_can_be_left_out():
    write(
        {
            "my": "defaults: [model: resnet50]",
            "early": "defaults: [model: resnet18, exp: a]",
            "exp/a": f"{GLOBAL}defaults: [override /model: vit_tiny]",
        }
    )
    assert load("--cfg=my.yaml").MODEL.NAME == "resnet50"
    for token in ("~model", "model=null"):
        assert load("--cfg=my.yaml", token) == load("EXPERIMENT.NAME=my")
    assert load("--cfg=early.yaml").MODEL.NAME == VIT


def test_a_choice_that_a_list_leaves_to_the_command_line():
    write({"my": "defaults:\n- model: ???\nTRAIN: {EPOCHS: 3}"})
    assert figures("--cfg=my.yaml", "model=vit_tiny")[:2] == (VIT, 3)


def test_later_files_win():
    write(
        {
            "a": "defaults: [{model: resnet18}]\nTRAIN: {EPOCHS: 3, LOG_EVERY: 9}",
            "b": "TRAIN: {EPOCHS: 4}",
            "c": "defaults: [{override /model: vit_tiny}]",
            "d": "defaults: [{model: vit_tiny}]",
        }
    )
    assert figures("--cfg=a.yaml", "--cfg", "b.yaml", "--cfg=c.yaml") == (VIT, 4, 9)
    assert figures("--cfg=b.yaml", "--cfg=a.yaml", "TRAIN.LOG_EVERY=1") == ("resnet18", 3, 1)
    assert "override model" in problems("--cfg=a.yaml", "--cfg=d.yaml")[0]  # as in Hydra


def test_files_are_looked_up_beside_the_cfg_file_that_leads_to_them():
    for folder, epochs in (("a", 3), ("b", 4)):
        write(
            {
                f"{folder}/my": "defaults: [sub/base, {model: mine}]",
                f"{folder}/sub/base": f"{GLOBAL}defaults: [next]\nTRAIN: {{EPOCHS: {epochs}}}",
                f"{folder}/sub/next": f"{GLOBAL}TRAIN: {{LOG_EVERY: {epochs}}}",
                f"{folder}/model/mine": f"{MODEL}defaults: [below]\nNAME: {folder}",
                f"{folder}/model/below": f"{MODEL}KWARGS: {{{folder}: 1}}",
            }
        )
    write({"conf/model/mine": f"{MODEL}NAME: conf"})
    of_a, of_b = ("a", 3, 3), ("b", 4, 4)
    assert figures("--cfg=a/my.yaml") == of_a
    assert figures("--cfg=b/my.yaml") == of_b
    assert figures("--config-dir=conf", "--cfg=b/my.yaml") == ("conf", 4, 4)
    assert load("--cfg=b/my.yaml", "model=resnet18").MODEL.NAME == "resnet18"


def test_the_first_folder_that_has_a_file_counts():
    write(
        {
            "conf/model/mine": f"{MODEL}NAME: mine",
            "conf/model/resnet18": f"{MODEL}NAME: my_resnet18",
            "other/model/mine": f"{MODEL}NAME: other",
            "model/beside": f"{MODEL}NAME: beside",
            "my": "TRAIN: {EPOCHS: 1}",
        }
    )
    assert load("--config-dir", "conf", "model=resnet18").MODEL.NAME == "my_resnet18"
    assert load("--config-dir=other", "--config-dir=conf", "model=mine").MODEL.NAME == "other"
    assert load("--cfg=my.yaml", "model=beside").MODEL.NAME == "beside"
    assert load("--cfg=my.yaml", "model=resnet18").MODEL.NAME == "resnet18"
    Path("conf/model/dead.yaml").symlink_to("nowhere")
    assert problems("--config-dir=conf", "model=dead")[0].startswith("model: ")
    Path("conf/model/short.yml").write_text("NAME: short")
    assert problems("--config-dir=conf", "model=short")[0].startswith("model: no preset 'short'")
    assert load(f"--cfg={Path('my.yaml').rename('my.yml')}").TRAIN.EPOCHS == 1


FOLDER = {
    "conf/model/mine": f"{MODEL}NAME: resnet34\nDROP_RATE: 0.1",
    "conf/model/wide": f"{MODEL}defaults: [mine]\nDROP_RATE: 0.2",
    "conf/data/augment/strong": "# @package DATA.AUGMENT\nHFLIP: 0.5",
    "conf/data/augment/weak": "# @package DATA.AUGMENT\nHFLIP: 0.75",
    "conf/data/birds": "# @package DATA\ndefaults: [imagefolder]\nDATASET: {ROOT: /birds}",
    "conf/experiment/birds": f"{GLOBAL}TRAIN: {{EPOCHS: 5}}\n"
    "defaults: [override /model: mine, override /data: birds]",
    "conf/experiment/named": "# @package EXPERIMENT\nNAME: named",
    "conf/experiment/often": f"{GLOBAL}TRAIN: {{LOG_EVERY: 7}}",
    "conf/base": "defaults: [{model: resnet50}]\nTRAIN: {EPOCHS: 2, LOG_EVERY: 2}\nMODEL: {DROP_RATE: 0.3}",
}


def test_groups_of_ones_own():
    write(FOLDER)
    model = load("--config-dir=conf", "model=wide").MODEL
    assert (model.NAME, model.DROP_RATE) == ("resnet34", 0.2)
    assert load("--config-dir=conf", "data/augment=strong").DATA.AUGMENT.HFLIP == 0.5
    for argv in (["data=birds", "data/augment=weak"], ["data/augment=weak", "data=birds"]):
        data = load("--config-dir=conf", *argv).DATA
        assert (data.AUGMENT.HFLIP, data.DATASET.ROOT) == (0.75, "/birds")
    assert load("~model", "~optimizer") == load()
    assert load("optimizer=sgd", "~optimizer") == load()


def test_experiments():
    write(FOLDER)
    expected = load("--config-dir=conf", "+experiment=birds")
    assert (expected.MODEL.NAME, expected.TRAIN.EPOCHS) == ("resnet34", 5)
    assert (expected.DATA.DATASET.NAME, expected.DATA.DATASET.ROOT) == ("imagefolder", "/birds")
    assert load("--config-dir=conf", "experiment=birds") == expected
    assert load("--config-dir=conf", "experiment=named").EXPERIMENT.NAME == "named"
    assert figures("--config-dir=conf", "+experiment=[birds,often]") == ("resnet34", 5, 7)


def test_the_order_of_files_groups_and_experiments():
    write(FOLDER)
    base = ("--config-dir", "conf", "--config-name", "base")
    assert figures(*base) == ("resnet50", 2, 2)
    replaced = load(*base, "model=mine").MODEL
    assert (replaced.NAME, replaced.DROP_RATE) == ("resnet34", 0.3)  # the file's own key wins
    assert figures(*base, "+experiment=birds") == ("resnet34", 5, 2)
    assert figures(*base, "+experiment=birds", "model=vit_tiny", "TRAIN.EPOCHS=9") == (VIT, 9, 2)
    assert load(*base, "~model").MODEL.NAME == load().MODEL.NAME


def test_packages():
    write(
        {
            "conf/encoder/small": "width: 3",
            "conf/encoder/large": "defaults: [small]\ndepth: 9",
            "conf/model/target": f"{MODEL}_target_: my.Model",
            "conf/model/same": "# @package MODEL\nNAME: same",
            "conf/model/below": "# @package MODEL.KWARGS\nx: 1",
            "conf/extra/wide": "# @package _global_\nTRAIN: {EPOCHS: 8}",
            "my": "defaults: [{model: target}, {encoder@MODEL.encoder: large}, extra@TRAIN, whole@_global_]",
            "extra": "EPOCHS: 4",
            "whole": "TRAIN: {LOG_EVERY: 3}",
        }
    )
    config = load("--config-dir=conf", "--cfg=my.yaml")
    assert config.MODEL == {"_target_": "my.Model", "encoder": {"width": 3, "depth": 9}}
    assert (config.TRAIN.EPOCHS, config.TRAIN.LOG_EVERY) == (4, 3)
    argv = ("--config-dir=conf", "model@MODEL=target", "+encoder@MODEL.decoder=small")
    assert load(*argv).MODEL == {"_target_": "my.Model", "decoder": {"width": 3}}
    assert load("--config-dir=conf", "model=same").MODEL.NAME == "same"
    assert load("--config-dir=conf", "model=below").MODEL.KWARGS == {"x": 1}
    assert load("--config-dir=conf", "extra=wide").TRAIN.EPOCHS == 8
