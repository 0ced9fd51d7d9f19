"""Names of other frameworks: each leads to a key of the schema, with a value that it takes."""

import pytest

from linnaeus.config.aliases import alias, aliases
from linnaeus.config.keys import KEYS
from tests.helpers.configs import load, problems


def test_every_setting_is_one_that_the_configuration_accepts():
    assert load(*sorted({meaning for meaning in aliases().values() if " " not in meaning}))


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
        ("--min-lr=0.1", aliases()["min_lr"]),  # a sentence
    ],
)
def test_a_name_is_found_as_it_is_typed(word, setting):
    assert setting in alias(word)


@pytest.mark.parametrize(
    ("typed", "now"),
    [
        ("TRAIN.AMP=fp32", "TRAIN.AMP=off"),
        ("DATA.AUTOBATCH.PREDICT=False", aliases()["data.autobatch.predict"]),
        ("DATA.DATASET.RANKS=[order,species]", "DATA.DATASET.LEVELS"),
        ("TRAIN.BATCH_SCHEDULE.LAST=24", "TRAIN.EFFECTIVE_BATCH_SIZE"),
    ],
)
def test_a_renamed_key_or_value_names_the_new_one(typed, now):
    (problem,) = problems(typed)
    assert now in problem.partition(";")[2]
