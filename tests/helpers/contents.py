"""Contents of checkpoints for tests that need no training."""

from __future__ import annotations

from typing import Any

import torch

from linnaeus.autobatch.state.rng import rng_state


def whole(epoch: int = 1, step: int = 0, **more: Any) -> dict[str, Any]:
    """All that a checkpoint must have, and no state."""
    return {
        "progress": {"epoch": epoch, "samples": 0, "step": step},
        "rng": [rng_state(torch.device("cpu"))],
        "autobatch": {},
        **more,
    }
