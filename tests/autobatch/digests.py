"""The search of a run under torchrun, with a hash of the rank's state before and after."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch

from linnaeus.autobatch.sizes import SizeSearch, find_sizes
from linnaeus.config.load import load_config
from linnaeus.config.schema import DistConfig
from linnaeus.data.datasets import build_data
from linnaeus.dist import join
from linnaeus.rng import rng_state, seed_all
from linnaeus.training.build import Assembly, assemble


def digest(assembly: Assembly) -> str:
    """Of parameters, buffers, optimizer, scaler, average, gradients and random number generators."""
    sha = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            sha.update(value.contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b"")
        elif isinstance(value, dict):
            for key in value:
                sha.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for element in value:
                add(element)
        else:
            sha.update(repr(value).encode())

    for part in assembly.state:
        if part is not None:
            add(part.state_dict())
    add([parameter.grad for parameter in assembly.model.parameters()])
    add(rng_state(torch.device("cpu")))
    return sha.hexdigest()


def main() -> None:
    config = load_config(sys.argv[1:]).config
    with join("cpu", DistConfig(TIMEOUT_MINUTES=2)) as world:
        seed_all(0)
        data = build_data(config.DATA, seed=0)
        assembly = assemble(config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, data, world)
        before = digest(assembly)
        found = find_sizes(SizeSearch(config.DATA, config.TRAIN, data, assembly, world, seed=0))
        sizes = {mode: result.batch_size for mode, result in found.items()}
        # One write, so that the lines of the ranks do not mix.
        line = json.dumps({"rank": world.rank, **sizes, "before": before, "after": digest(assembly)})
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
