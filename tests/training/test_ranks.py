"""The same figures everywhere: what several real processes compute is what one computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
import torch.nn.functional as functional
from torch import Tensor, nn

from linnaeus.data.batch import Batch
from linnaeus.dist import World, wrap
from linnaeus.models.hierarchical import HierarchicalClassifier
from linnaeus.training.losses import TaxonomicCrossEntropy
from linnaeus.training.step import Precision, TrainStep
from tests import forks
from tests.forks import ROOT

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")
WORLD_SIZES = (1, 2, 4)
Results = dict[Any, Any]


# --- what the processes do: four are started once, and form groups of four, two and one ---


@contextmanager
def group_of(world_size: int, rank: int, folder: str) -> Iterator[World]:
    if world_size == 1:
        yield World(CPU)
        return
    store = torch_dist.FileStore(f"{folder}/store{world_size}", world_size)
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        yield World(CPU, rank, world_size, world_size)
    finally:
        torch_dist.destroy_process_group()


def work(rank: int, folder: str) -> None:
    """All that one process computes."""
    torch.set_num_threads(1)
    results: Results = {}
    for world_size in WORLD_SIZES[::-1]:
        if rank < world_size:
            with group_of(world_size, rank, folder) as world:
                results |= gradients(world)
    torch.save(results, f"{folder}/rank{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """What each process has computed, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    log = folder / "output.txt"
    with log.open("w") as output:
        processes = [
            forks.start(
                ["-c", f"from {__name__} import work; work({rank}, {str(folder)!r})"], cwd=ROOT,
                stdout=output, stderr=output,
            )
            for rank in range(max(WORLD_SIZES))
        ]  # fmt: skip
        codes = [process.wait(120) for process in processes]
    assert not any(codes), log.read_text()
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(max(WORLD_SIZES))]


# --- the gradient of an effective batch ---

LEVELS, NUM_CLASSES, NUM_FEATURES = ("family", "species"), (3, 8), 5
EFFECTIVE_BATCH, ACCUMULATION_STEPS = 32, (1, 2, 4)
SPLITS = list(product(WORLD_SIZES, ACCUMULATION_STEPS))
LOSSES = {"plain": ((1.0, 1.0), 0.0), "weighted and smoothed": ((1.0, 3.0), 0.1)}


class MeanOverKnownLabels(TaxonomicCrossEntropy):
    """The loss that depends on how a batch is split."""

    def _level_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super()._level_loss(logits, labels) * len(labels) / (labels != -1).sum().clamp(min=1)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.LayerNorm(16), nn.Tanh())
    return HierarchicalClassifier(backbone, 16, NUM_CLASSES).to(dtype)


def effective_batch(dtype: torch.dtype = torch.float32) -> Batch:
    """Most of the first samples' labels are unknown; one whole micro-batch has none at the finer level."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(EFFECTIVE_BATCH, NUM_FEATURES, generator=generator).to(dtype)
    columns = [torch.randint(0, count, (EFFECTIVE_BATCH,), generator=generator) for count in NUM_CLASSES]
    targets = torch.stack(columns, 1)
    targets[:12, 1] = targets[1:20:3, 0] = targets[13::7, 1] = -1
    return Batch(inputs, targets)


def gradients(world: World) -> Results:
    """The gradient of one optimizer step and its loss, for each split and each loss."""
    results: Results = {}
    for kind, (name, (weights, smoothing)), steps in product(
        (TaxonomicCrossEntropy, MeanOverKnownLabels), LOSSES.items(), ACCUMULATION_STEPS
    ):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found: list[Tensor] = []
        optimizer.register_step_pre_hook(
            lambda *_, model=model, found=found: found.extend(p.grad.clone() for p in model.parameters())
        )
        step = TrainStep(
            wrap(model, world), kind(LEVELS, weights, smoothing), optimizer,
            torch.amp.GradScaler("cpu", enabled=False), Precision(CPU),
        )  # fmt: skip
        mine = [part[world.rank :: world.world_size].chunk(steps) for part in effective_batch()]
        loss = world.mean(step([Batch(*parts) for parts in zip(*mine, strict=True)], steps))
        results[kind.__name__, name, world.world_size, steps] = found, float(loss)
    return results


def by_hand(name: str) -> tuple[list[Tensor], float]:
    """The gradient and the loss of the whole effective batch, in double precision."""
    (inputs, targets), (weights, smoothing) = effective_batch(torch.float64), LOSSES[name]
    model = make_model(torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    for level, logits in enumerate(model(inputs)):
        for sample, label in zip(logits, targets[:, level], strict=True):
            if label >= 0:
                one = functional.cross_entropy(sample[None], label[None], label_smoothing=smoothing)
                loss = loss + weights[level] / sum(weights) * one / EFFECTIVE_BATCH
    return list(torch.autograd.grad(loss, list(model.parameters()))), float(loss.detach())


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative error of a parameter's gradient, by norms."""
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("name", LOSSES)
def test_no_split_of_an_effective_batch_changes_its_gradient_or_its_loss(
    ranks: list[Results], name: str
) -> None:
    gradient, loss = by_hand(name)
    for world_size, steps in SPLITS:
        for rank in range(world_size):
            found, found_loss = ranks[rank]["TaxonomicCrossEntropy", name, world_size, steps]
            assert largest_error(found, gradient) < 1e-6, (world_size, steps)
            assert found_loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_over_the_known_labels_has_another_gradient_for_each_split(
    ranks: list[Results], name: str
) -> None:
    """Else the test above could not tell."""
    whole, _ = ranks[0]["MeanOverKnownLabels", name, 1, 1]
    for split in SPLITS[1:]:
        found, _ = ranks[0]["MeanOverKnownLabels", name, *split]
        assert largest_error(found, whole) > 1e-3, split
