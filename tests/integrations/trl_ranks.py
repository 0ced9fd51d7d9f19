"""Searches of TRL's trainers on several ranks, for `tests.helpers.processes`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("trl")

from tests.integrations.hugging import trl_trainer
from tests.integrations.hugging_ranks import compared, join, room


def work(rank: int, folder: str) -> dict[str, Any]:
    """SFT in full; DPO and Reward with small sizes."""
    join(rank, folder)
    small = {**room(rank, 300), "max_batch_size": 2}
    return {
        "SFT": compared(partial(trl_trainer, "SFT"), rank, room(rank, 150)),
        "DPO": compared(partial(trl_trainer, "DPO"), rank, small),
        "Reward": compared(partial(trl_trainer, "Reward"), rank, small),
    }
