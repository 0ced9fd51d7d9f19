"""What the start of a run says about plain settings; `test_messages` has the others."""

from __future__ import annotations

import pytest

from linnaeus.config.load import load_config
from linnaeus.training.notes import settings_sentence, settings_without_effect


@pytest.mark.parametrize("argv", [[], ["MODEL._target_=a.B", "LOSS._target_=a.C", "OPTIMIZER._target_=a.D"]])
def test_a_plain_training_has_no_line(argv: list[str]) -> None:
    config = load_config(argv).config
    assert settings_sentence(config) is None
    assert settings_without_effect(config) == []
