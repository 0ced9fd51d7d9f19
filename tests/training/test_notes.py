"""What the start of a run says about its settings."""

from __future__ import annotations

import pytest

from linnaeus.config.load import load_config
from linnaeus.training.notes import settings_sentence, settings_without_effect

MIXED = ["DATA.AUGMENT.MIXUP=0.2", "DATA.AUGMENT.CUTMIX=1", "DATA.AUGMENT.MIX_OFF_EPOCHS=2"]
FROZEN = "MODEL.FREEZE=backbone"


def test_all_that_is_switched_on_stands_in_one_line() -> None:
    config = load_config([
        *MIXED, "DATA.SAMPLER=balanced", "LOSS.NAME=focal", "LOSS.CLASS_WEIGHTS=balanced",
        "MODEL.HEAD=marginal", "OPTIMIZER.LAYER_DECAY=0.75", "OPTIMIZER.HEAD_LR_SCALE=10",
    ]).config  # fmt: skip
    assert settings_sentence(config) == (
        "training: Mixup 0.2 or CutMix 1 (off in the last 2 epochs), balanced sampler, focal loss with gamma "
        "2, class weights balanced, marginal head, layer decay 0.75, heads at 10 times the learning rate"
    )
    assert settings_without_effect(config) == []


@pytest.mark.parametrize("argv", [[], ["MODEL._target_=a.B", "LOSS._target_=a.C", "OPTIMIZER._target_=a.D"]])
def test_a_plain_training_has_no_line(argv: list[str]) -> None:
    config = load_config(argv).config
    assert settings_sentence(config) is None
    assert settings_without_effect(config) == []


@pytest.mark.parametrize(
    ("argv", "remedy", "sentence"),
    [
        (["LOSS.FOCAL_GAMMA=3"], "LOSS.NAME=focal",
         "LOSS.FOCAL_GAMMA: 3 has no effect with LOSS.NAME cross_entropy"),
        (["DATA.AUGMENT.MIX_OFF_EPOCHS=2"], "DATA.AUGMENT.MIXUP=0.5",
         "DATA.AUGMENT.MIX_OFF_EPOCHS: 2 has no effect, since DATA.AUGMENT.MIXUP and CUTMIX are 0"),
        (["TRAIN.UNFREEZE_EPOCH=2"], FROZEN,
         "TRAIN.UNFREEZE_EPOCH: 2 has no effect, since nothing is frozen (MODEL.FREEZE none)"),
        (["TRAIN.UNFREEZE_EPOCH=1", FROZEN], "TRAIN.UNFREEZE_EPOCH=2",
         "TRAIN.UNFREEZE_EPOCH: 1 unfreezes before the first epoch, so that MODEL.FREEZE has no effect"),
        (["TRAIN.UNFREEZE_EPOCH=5", "TRAIN.EPOCHS=4", FROZEN], "TRAIN.EPOCHS=5",
         "TRAIN.UNFREEZE_EPOCH: 5 comes after the last epoch (TRAIN.EPOCHS 4): nothing is unfrozen in this "
         "run"),
    ],
)  # fmt: skip
def test_keys_without_effect_are_named_until_they_have_one(
    argv: list[str], remedy: str, sentence: str
) -> None:
    assert settings_without_effect(load_config(argv).config) == [sentence]
    assert settings_without_effect(load_config([*argv, remedy]).config) == []
