"""What the start of a run says about its settings."""

from __future__ import annotations

import pytest

from linnaeus.config.load import load_config
from linnaeus.training.notes import settings_sentence, settings_without_effect

FROZEN = "MODEL.FREEZE=backbone"


@pytest.mark.parametrize("argv", [[], ["MODEL._target_=a.B", "LOSS._target_=a.C", "OPTIMIZER._target_=a.D"]])
def test_a_plain_training_has_no_line(argv: list[str]) -> None:
    config = load_config(argv).config
    assert settings_sentence(config) is None
    assert settings_without_effect(config) == []


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (["LOSS.FOCAL_GAMMA=3"], "LOSS.NAME=focal"),
        (["DATA.AUGMENT.MIX_OFF_EPOCHS=2"], "DATA.AUGMENT.MIXUP=0.5"),
        (["TRAIN.UNFREEZE_EPOCH=2"], FROZEN),
        (["TRAIN.UNFREEZE_EPOCH=1", FROZEN], "TRAIN.UNFREEZE_EPOCH=2"),
        (["TRAIN.UNFREEZE_EPOCH=5", "TRAIN.EPOCHS=4", FROZEN], "TRAIN.EPOCHS=5"),
    ],
)
def test_keys_without_effect_are_named_until_they_have_one(argv: list[str], remedy: str) -> None:
    [sentence] = settings_without_effect(load_config(argv).config)
    assert sentence.startswith(argv[0].partition("=")[0])
    assert settings_without_effect(load_config([*argv, remedy]).config) == []
