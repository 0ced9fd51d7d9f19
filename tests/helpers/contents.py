"""Contents of checkpoints for tests that need no training."""

import torch

from linnaeus.autobatch.state.rng import rng_state
from linnaeus.training.checkpoint import TrainingProgress


def whole(epoch=1, step=0, **more):
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
