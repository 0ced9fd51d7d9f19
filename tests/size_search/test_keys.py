"""Messages of the library name keys of the configuration in a run."""

import dataclasses
import logging
import re
from contextlib import suppress

import pytest

from linnaeus.autobatch.errors import TooSmallError
from linnaeus.autobatch.settings import SearchSettings
from linnaeus.config.keys import KEYS, dotted
from linnaeus.size_search.keys import in_keys, messages_in_keys

SCHEMA = set(map(dotted, KEYS))
LOGGER = logging.getLogger("linnaeus.autobatch")


@pytest.mark.parametrize("mode", ["train", "val"])
def test_each_argument_becomes_a_key_of_the_schema(mode):
    names = [field.name for field in dataclasses.fields(SearchSettings) if "_" in field.name]
    keys = in_keys(" ".join(names), mode).split()  # type: ignore[arg-type]
    assert len(keys) == len(names)
    assert set(keys) <= SCHEMA
    assert in_keys(" ".join(keys), mode).split() == keys  # type: ignore[arg-type]


def test_remedies_of_the_library_become_keys_of_the_schema():
    remedies = "the size of a sample; gradient checkpointing; bf16 autocast; choose a smaller model"
    for remedy in f"{remedies}; train with a smaller batch size".split("; "):
        keys = re.findall(r"[A-Z]+(?:\.[A-Z_]+)+", in_keys(remedy, "val"))
        assert keys
        assert set(keys) <= SCHEMA


def test_lines_errors_and_notes_are_rewritten_inside(caplog):
    error = TooSmallError("raise max_trials", 3)
    error.add_note("min_batch_size chooses others")
    with suppress(TooSmallError), messages_in_keys("val"):
        LOGGER.warning("%s is %g", "target_memory_fraction", 0.5)
        raise error
    LOGGER.warning("%s is %g", "target_memory_fraction", 0.5)
    assert caplog.messages == [
        "DATA.AUTOBATCH.TARGET_MEMORY_FRACTION_VAL is 0.5",
        "target_memory_fraction is 0.5",
    ]
    assert (str(error), error.largest) == ("raise DATA.AUTOBATCH.MAX_TRIALS", 3)
    assert error.__notes__ == ["DATA.AUTOBATCH.MIN_BATCH_SIZE_VAL chooses others"]
