"""Messages of the library in a run: keys of the configuration in place of arguments."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from linnaeus.autobatch.errors import LinnaeusError
from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.settings import SearchSettings
from linnaeus.config.schema import AutoBatchConfig

_REMEDIES = {
    "the size of a sample": "DATA.IMG_SIZE",
    "gradient checkpointing": "TRAIN.GRADIENT_CHECKPOINTING True",
    "bf16 autocast": "TRAIN.AMP bf16",
    "choose a smaller model": "choose a smaller MODEL.NAME",
    "train with a smaller batch size": (
        "lower DATA.BATCH_SIZE, or DATA.AUTOBATCH.MAX_BATCH_SIZE where AutoBatch chose the training size"
    ),
    "make_batch(n)": "the collate function",
}


def in_keys(text: str, mode: Mode) -> str:
    """Return a message about the search of a mode with keys in place of arguments.

    >>> in_keys("raise max_trials or lower min_batch_size", "val")
    'raise DATA.AUTOBATCH.MAX_TRIALS or lower DATA.AUTOBATCH.MIN_BATCH_SIZE_VAL'
    """
    keys = {field.name for field in fields(AutoBatchConfig)}
    for name in (field.name for field in fields(SearchSettings) if "_" in field.name):
        key = f"{name.upper()}_VAL"
        key = key if mode == "val" and key in keys else name.upper()
        text = re.sub(rf"\b{name}\b", f"DATA.AUTOBATCH.{key}", text)
    for remedy, key in _REMEDIES.items():
        text = text.replace(remedy, key)
    return text


@contextmanager
def messages_in_keys(mode: Mode) -> Iterator[None]:
    """Rewrite log lines and errors of the library inside the context."""

    def rewrite(record: logging.LogRecord) -> bool:
        record.msg, record.args = in_keys(record.getMessage(), mode), None
        return True

    logger = logging.getLogger("linnaeus.autobatch")
    logger.addFilter(rewrite)
    try:
        yield
    except Exception as error:
        if isinstance(error, LinnaeusError):
            error.args = (in_keys(str(error), mode),)
        notes = getattr(error, "__notes__", [])
        notes[:] = [in_keys(note, mode) for note in notes]
        raise
    finally:
        logger.removeFilter(rewrite)
