"""Contents of checkpoints for tests that need no training."""

from __future__ import annotations

from typing import Any

import torch

from linnaeus.autobatch.state.rng import rng_state
from linnaeus.training.checkpoint import TrainingProgress


def whole(epoch: int = 1, step: int = 0, **more: Any) -> dict[str, Any]:
    """All that a checkpoint must have, and no state."""
    return {
        "progress": vars(TrainingProgress(epoch, step=step)),
        "rng": [rng_state(torch.device("cpu"))],
        "autobatch": {},
        "config": {},
        "model_spec": {},
        "run": "",
        "headline": "loss",
        "plan": {},
        "schedule": {},
        "train_loss": [],
        "callbacks": [],
        **more,
    }
