"""State that only rank 0 has arrives bit for bit on the other ranks."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from linnaeus import nest
from linnaeus.dist import World
from linnaeus.training import transfer
from tests.helpers import forks
from tests.helpers.forks import ROOT
from tests.helpers.processes import group_of


def make_state() -> dict[str, Any]:
    """Tensors of several types, shapes and layouts, among plain values; more than 1000 bytes together."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(1500, generator=generator)
    noise[3], noise[4], noise[5] = torch.nan, torch.inf, -0.0
    return {
        "model": OrderedDict(
            weight=noise,
            image=torch.randn(2, 3, 5, 4, generator=generator).to(memory_format=torch.channels_last),
            half=noise[:7].bfloat16(),
            flags=noise > 0,
            complex=torch.randn(3, dtype=torch.complex64, generator=generator),
            view=torch.randn(6, 8, generator=generator)[::2, 1::3],
            expanded=torch.ones(3, 1).expand(3, 5),
            empty=torch.zeros(0, 4),
        ),
        "optimizer": {"state": {0: {"step": torch.tensor(5.0), "count": 2**40 * torch.ones(2).long()}}},
        "scaler": {"scale": 65536.0, "none": None, "text": "a", "pair": (1, [2.5])},
    }


def bits(state: Any) -> list[Any]:
    """Every leaf in a form that `==` compares bit by bit."""
    return [
        (tuple(leaf.shape), str(leaf.dtype), leaf.contiguous().reshape(-1).view(torch.uint8).tolist())
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in nest.leaves(state)
    ]


def send(rank: int, folder: str) -> None:
    """One rank's part of a transfer from rank 0."""
    transfer.CHUNK_BYTES = 1000
    with group_of(3, rank, folder) as world:
        state = make_state() if rank == 0 else None
        received = transfer.broadcast_state(state, world)
        assert (received is state) == (rank == 0)
        torch.save(received, f"{folder}/rank{rank}.pt")


@pytest.mark.distributed
def test_every_rank_gets_every_bit_and_the_layout(tmp_path: Path) -> None:
    with (tmp_path / "output.txt").open("w") as output:
        processes = [
            forks.start(
                ["-c", f"from {__name__} import *; send({rank}, {str(tmp_path)!r})"], cwd=ROOT,
                stdout=output, stderr=output,
            )
            for rank in range(3)
        ]  # fmt: skip
        codes = [process.wait(120) for process in processes]
        assert codes == [0] * 3, (tmp_path / "output.txt").read_text()
    state = make_state()
    for rank in (1, 2):
        received = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        assert bits(received) == bits(state)
        assert received["model"].keys() == state["model"].keys()
        assert received["model"]["image"].is_contiguous(memory_format=torch.channels_last)
        received["model"]["flags"][0] ^= True
        assert bits(received) != bits(state)  # the comparison sees a single bit


def test_alone_there_is_nothing_to_send() -> None:
    state = make_state()
    assert transfer.broadcast_state(state, World(torch.device("cpu"))) is state
