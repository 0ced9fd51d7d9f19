"""Searches of TRL's trainers on several ranks, for `tests.helpers.processes`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("trl")

from tests.integrations.hugging import trl_trainer
from tests.integrations.hugging_ranks import compared, join, room


def work(rank: int, folder: str) -> dict[str, Any]:
    join(rank, folder)
    small = {**room(rank, 300), "max_batch_size": 2}
    return {name: compared(partial(trl_trainer, name), rank, small) for name in ("SFT", "DPO")}
