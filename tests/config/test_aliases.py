"""Names of other frameworks: each leads to a key of the schema, with a value that it takes."""

import pytest

from linnaeus.config.aliases import alias, aliases
from linnaeus.config.keys import KEYS
from tests.helpers.configs import load, problems

SETTINGS = sorted({meaning for meaning in aliases().values() if " " not in meaning})


def test_every_setting_is_one_that_the_configuration_accepts():
    assert load(*SETTINGS)
    assert problems("OPTIMIZER.MOMENTUM=0.9")


def test_a_name_that_a_key_has_too_means_that_key():
    for name, meaning in aliases().items():
        keys = [".".join(path) for path in KEYS if path[-1].lower() == name]
        assert not keys or meaning.partition("=")[0] in keys or " " in meaning


@pytest.mark.parametrize(
    ("word", "setting"),
    [
        ("--lr", "OPTIMIZER.LR="),
        ("-b", "DATA.BATCH_SIZE="),
        ("--batch-size=8", "DATA.BATCH_SIZE="),
        ("OPTIMIZER.MOMENTUM", "OPTIMIZER.KWARGS.momentum="),
        ("+AUGMENT.RANDAUGMENT=1", "DATA.AUGMENT.POLICY=randaugment"),
    ],
)
def test_a_name_is_found_as_it_is_typed(word, setting):
    assert setting in (alias(word) or "")


def test_a_value_of_another_framework_leads_to_the_value_of_its_key():
    (problem,) = problems("TRAIN.AMP=fp32")
    assert "TRAIN.AMP=off" in problem
    (problem,) = problems("TRAIN.AMP=bf61")
    assert "TRAIN.AMP=off" not in problem


def test_what_has_no_key_is_said_in_a_sentence_and_an_unknown_word_has_no_hint():
    assert alias("MODEL.NUM_CLASSES") == aliases()["num_classes"]
    assert alias("--min-lr=0.1") == aliases()["min_lr"]
    assert alias("--no-such-thing") is alias("MODEL.NAMES") is alias("") is None


def test_a_key_that_is_gone_says_so():
    (problem,) = problems("DATA.AUTOBATCH.PREDICT=False")
    assert aliases()["data.autobatch.predict"] in problem
    assert alias("--predict") is None, "it is an option of `linnaeus analyze`"


@pytest.mark.parametrize(
    ("typed", "now"),
    [
        ("DATA.DATASET.RANKS=[order,species]", "DATA.DATASET.LEVELS"),
        ("LOSS.RANK_WEIGHTS=[1,2]", "LOSS.LEVEL_WEIGHTS"),
        ("TRAIN.BATCH_SCHEDULE.LAST=24", "TRAIN.EFFECTIVE_BATCH_SIZE"),
    ],
)
def test_a_renamed_key_names_the_new_one(typed, now):
    (problem,) = problems(typed)
    assert now in problem.partition(";")[2]
    assert load(f"{now}={typed.partition('=')[2]}")
