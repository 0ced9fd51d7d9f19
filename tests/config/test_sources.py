"""Files, folders, groups and defaults lists: which value wins, with Hydra's own composition beside it."""

from pathlib import Path

from tests.helpers.configs import load, problems, write

GLOBAL, MODEL = "# @package _global_\n", "# @package MODEL\n"
VIT = "vit_tiny_patch16_224"  # of the preset vit_tiny


def figures(line):
    """Three values that the files of these tests set."""
    config = load(*line.split())
    return config.MODEL.NAME, config.TRAIN.EPOCHS, config.TRAIN.LOG_EVERY


def test_a_defaults_list_chooses_groups_and_files_beside_it():
    write(
        {
            "my": "defaults:\n- base\n- model: resnet50\n- optional data: nothing\n- optimizer: null\n"
            "- override /schedule: cosine\nTRAIN: {EPOCHS: 3}",
            "base": "defaults: [{schedule: linear}]\nTRAIN: {EPOCHS: 7, LOG_EVERY: 9}",
            "open": "defaults:\n- model: ???\n",
        }
    )
    assert figures("--cfg=my.yaml") == ("resnet50", 3, 9)
    config = load("--cfg=my.yaml")
    assert (config.SCHEDULE.NAME, config.OPTIMIZER) == ("cosine", load().OPTIMIZER)
    assert load("--cfg=base.yaml").SCHEDULE.NAME == "linear"  # which the override has replaced
    assert figures("--cfg=open.yaml model=vit_tiny")[0] == VIT


def test_choices_can_be_left_out_and_overridden_by_a_later_file():
    write(
        {
            "my": "defaults: [model: resnet50]",
            "early": "defaults: [model: resnet18, exp: a]",
            "exp/a": f"{GLOBAL}defaults: [override /model: vit_tiny]",
        }
    )
    for token in ("~model", "model=null"):
        assert load("--cfg=my.yaml", token) == load("EXPERIMENT.NAME=my")
    assert figures("--cfg=early.yaml")[0] == VIT


def test_later_files_win():
    write(
        {
            "a": "defaults: [{model: resnet18}]\nTRAIN: {EPOCHS: 3, LOG_EVERY: 9}",
            "b": "TRAIN: {EPOCHS: 4}",
            "c": "defaults: [{override /model: vit_tiny}]",
        }
    )
    assert figures("--cfg=a.yaml --cfg b.yaml --cfg=c.yaml") == (VIT, 4, 9)
    assert figures("--cfg=b.yaml --cfg=a.yaml TRAIN.LOG_EVERY=1") == ("resnet18", 3, 1)


def test_files_are_looked_up_beside_the_cfg_file():
    for folder, epochs in (("a", 3), ("b", 4)):
        write(
            {
                f"{folder}/my": "defaults: [sub/base, {model: mine}]",
                f"{folder}/sub/base": f"{GLOBAL}defaults: [next]\nTRAIN: {{EPOCHS: {epochs}}}",
                f"{folder}/sub/next": f"{GLOBAL}TRAIN: {{LOG_EVERY: {epochs}}}",
                f"{folder}/model/mine": f"{MODEL}NAME: {folder}",
            }
        )
    write({"conf/model/mine": f"{MODEL}NAME: conf"})
    assert figures("--cfg=a/my.yaml") == ("a", 3, 3)
    assert figures("--cfg=b/my.yaml") == ("b", 4, 4)
    assert figures("--config-dir=conf --cfg=b/my.yaml") == ("conf", 4, 4)
    assert figures("--cfg=b/my.yaml model=resnet18")[0] == "resnet18"


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
    assert figures("--config-dir conf model=resnet18")[0] == "my_resnet18"
    assert figures("--config-dir=other --config-dir=conf model=mine")[0] == "other"
    assert figures("--cfg=my.yaml model=beside")[0] == "beside"
    Path("conf/model/dead.yaml").symlink_to("nowhere")
    Path("conf/model/short.yml").write_text("NAME: short")
    for name in ("dead", "short"):
        assert problems("--config-dir=conf", f"model={name}")[0].startswith("model: ")


FOLDER = {
    "conf/model/mine": f"{MODEL}NAME: resnet34\nDROP_RATE: 0.1",
    "conf/model/wide": f"{MODEL}defaults: [mine]\nDROP_RATE: 0.2",
    "conf/data/augment/weak": "# @package DATA.AUGMENT\nHFLIP: 0.75",
    "conf/data/birds": "# @package DATA\ndefaults: [imagefolder]\nDATASET: {ROOT: /birds}",
    "conf/experiment/birds": f"{GLOBAL}TRAIN: {{EPOCHS: 5}}\n"
    "defaults: [override /model: mine, override /data: birds]",
    "conf/experiment/often": f"{GLOBAL}TRAIN: {{LOG_EVERY: 7}}",
    "conf/base": "defaults: [{model: resnet50}]\nTRAIN: {EPOCHS: 2, LOG_EVERY: 2}\nMODEL: {DROP_RATE: 0.3}",
}


def test_groups_of_ones_own():
    write(FOLDER)
    model = load("--config-dir=conf", "model=wide").MODEL
    assert (model.NAME, model.DROP_RATE) == ("resnet34", 0.2)
    for argv in (["data=birds", "data/augment=weak"], ["data/augment=weak", "data=birds"]):
        data = load("--config-dir=conf", *argv).DATA
        assert (data.AUGMENT.HFLIP, data.DATASET.ROOT) == (0.75, "/birds")
    assert load("optimizer=sgd", "~optimizer", "~model") == load()


def test_the_order_of_files_groups_and_experiments():
    write(FOLDER)
    assert figures("--config-dir=conf +experiment=[birds,often]") == ("resnet34", 5, 7)
    experiment = load("--config-dir=conf", "experiment=birds")
    assert experiment == load("--config-dir=conf", "+experiment=birds")
    assert experiment.DATA.DATASET.ROOT == "/birds"
    base = "--config-dir conf --config-name base"
    assert figures(base) == ("resnet50", 2, 2)
    replaced = load(*base.split(), "model=mine").MODEL
    assert (replaced.NAME, replaced.DROP_RATE) == ("resnet34", 0.3)  # the file's own key wins
    assert figures(f"{base} +experiment=birds") == ("resnet34", 5, 2)
    assert figures(f"{base} +experiment=birds model=vit_tiny TRAIN.EPOCHS=9") == (VIT, 9, 2)
