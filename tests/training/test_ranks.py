"""The same figures everywhere: what several real processes compute is what one computes."""

from itertools import product

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as functional
from torch import nn

from linnaeus.data.batch import Batch
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.models.hierarchical import HierarchicalClassifier
from linnaeus.runtime.distributed import World
from linnaeus.training.accuracy import ClassificationMetrics
from linnaeus.training.checkpoint import broadcast_state, load_checkpoint
from linnaeus.training.ddp import distribute_batchnorm, wrap
from linnaeus.training.losses import TaxonomicCrossEntropy
from linnaeus.training.precision import Precision
from linnaeus.training.step import TrainStep, ValidationStep
from tests.helpers.bits import bits
from tests.helpers.processes import compute, group_of
from tests.helpers.small_runs import NAME
from tests.test_resume import RESUMABLE, interrupted

pytestmark = [pytest.mark.e2e]

CPU = torch.device("cpu")
WORLD_SIZES = (3, 2, 1)


# --- what the processes do: three are started once, and form groups of three, two and one ---


def work(rank, folder):
    """All that one process computes."""
    results = {}
    for world_size in WORLD_SIZES:
        if rank < world_size:
            with group_of(world_size, rank, folder) as world:
                results |= gradients(world)
                results |= validations(world)
                if world_size == 3:
                    results["statistics"] = distributed(world)
                    results["state"] = broadcast_state(make_state() if rank == 0 else None, world)
                    results["read"] = read_on_main(world)
                    results |= {
                        how: two_passes(world, wrapper) for how, wrapper in WRAPPERS.items()
                    }
                if world_size == 2:
                    results |= metrics_of_two(world)
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each process has computed, by rank."""
    return compute(__name__, max(WORLD_SIZES), tmp_path_factory.mktemp("ranks"))


# --- what rank 0 reads for all ranks ---

LARGE = np.arange(2**18).astype("S9")
"""It travels over the process group, and small values do not."""


def read_on_main(world):
    large = world.on_main(lambda: {"paths": LARGE, "name": "birds"})
    return [large["paths"].tobytes(), large["name"], large["paths"].flags.writeable]


def test_arrays_that_rank_0_reads_arrive_whole_on_all_ranks(ranks):
    assert [results["read"] for results in ranks] == [[LARGE.tobytes(), "birds", True]] * 3


# --- the gradient of an effective batch ---

LEVELS, NUM_CLASSES, NUM_FEATURES = ("family", "species"), (3, 8), 5
EFFECTIVE_BATCH, ACCUMULATION_STEPS = 24, (1, 4)
SPLITS = list(product(WORLD_SIZES, ACCUMULATION_STEPS))
LEVEL_WEIGHTS, SMOOTHING = (1.0, 3.0), 0.1


class MeanOverKnownLabels(TaxonomicCrossEntropy):
    """The loss that depends on how a batch is split."""

    def _sum(self, logits, target, level):
        known = (target != -1).sum().clamp(min=1)
        return super()._sum(logits, target, level) * len(target) / known


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.LayerNorm(16), nn.Tanh())
    return HierarchicalClassifier(backbone, 16, NUM_CLASSES).to(dtype)


def effective_batch(dtype=torch.float32):
    """Most of the first samples' labels are unknown; one whole micro-batch has none at the finer level."""
    generator = torch.Generator().manual_seed(1)
    size = (EFFECTIVE_BATCH,)
    inputs = torch.randn(*size, NUM_FEATURES, generator=generator).to(dtype)
    columns = [torch.randint(0, count, size, generator=generator) for count in NUM_CLASSES]
    targets = torch.stack(columns, 1)
    targets[:12, 1] = targets[1:20:3, 0] = targets[13::7, 1] = -1
    return Batch(inputs, targets)


def gradients(world):
    """The gradient of one optimizer step and its loss, for each split and each loss."""
    results = {}
    for kind, steps in product((TaxonomicCrossEntropy, MeanOverKnownLabels), ACCUMULATION_STEPS):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        optimizer.register_step_pre_hook(
            lambda *_, model=model, found=found: found.extend(
                p.grad.clone() for p in model.parameters()
            )
        )
        step = TrainStep(
            wrap(model, world),
            kind(LEVELS, LEVEL_WEIGHTS, SMOOTHING),
            optimizer,
            torch.amp.GradScaler("cpu", enabled=False),
            Precision(CPU),
        )
        mine = [part[world.rank :: world.world_size].chunk(steps) for part in effective_batch()[:2]]
        loss = world.mean(step([Batch(*parts) for parts in zip(*mine, strict=True)], steps))
        results[kind.__name__, world.world_size, steps] = found, float(loss)
    return results


def by_hand():
    """The gradient and the loss of the whole effective batch, in double precision."""
    inputs, targets, _ = effective_batch(torch.float64)
    model = make_model(torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    for logits, labels, weight in zip(model(inputs), targets.T, LEVEL_WEIGHTS, strict=True):
        for sample, label in zip(logits, labels, strict=True):
            if label >= 0:
                one = functional.cross_entropy(sample, label, label_smoothing=SMOOTHING)
                loss = loss + weight / sum(LEVEL_WEIGHTS) * one / EFFECTIVE_BATCH
    return list(torch.autograd.grad(loss, list(model.parameters()))), float(loss.detach())


def largest_error(found, expected):
    """The largest relative error of a parameter's gradient, by norms."""
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def test_no_split_of_an_effective_batch_changes_gradient_or_loss(ranks):
    gradient, loss = by_hand()
    for world_size, steps in SPLITS:
        for rank in range(world_size):
            found, found_loss = ranks[rank]["TaxonomicCrossEntropy", world_size, steps]
            assert largest_error(found, gradient) < 1e-6, (world_size, steps)
            assert found_loss == pytest.approx(loss, rel=1e-6)


def test_a_mean_over_known_labels_changes_with_the_split(ranks):
    """Else the test above could not tell."""
    whole, _ = ranks[0]["MeanOverKnownLabels", 1, 1]
    for split in SPLITS[:-2]:
        found, _ = ranks[0]["MeanOverKnownLabels", *split]
        assert largest_error(found, whole) > 1e-3, split


# --- the metrics of a validation ---

VAL_BATCH_SIZES = (5, 24)
SETS = Taxonomy((Level("tag", tuple("abcd")),), separator=";")
SEVEN = Taxonomy(
    tuple(Level(f"level{i}", tuple(f"{i}.{j}" for j in range(4 + i))) for i in range(7))
)


def validations(world):
    """The metrics of a validation pass without classes, for each batch size."""
    results = {}
    criterion = TaxonomicCrossEntropy(LEVELS, LEVEL_WEIGHTS, SMOOTHING)
    for size in VAL_BATCH_SIZES:
        metrics = ClassificationMetrics(None)
        step = ValidationStep(make_model().eval(), criterion, Precision(CPU), metrics.update)
        mine = [part[world.rank :: world.world_size].split(size) for part in effective_batch()[:2]]
        for parts in zip(*mine, strict=True):
            step(Batch(*parts))
        results["validation", world.world_size, size] = metrics.compute(world)
    return results


def fill(metrics, sets, rank):
    """One process's share of 13 samples: with labels in seven levels, and with several, some unknown."""
    generator = torch.Generator().manual_seed(2)
    counts = SEVEN.num_classes.values()
    logits = [torch.randn(13, count, generator=generator) for count in counts]
    targets = torch.stack(
        [torch.randint(-1, count, (13,), generator=generator) for count in counts], 1
    )
    tags = torch.randint(-1, 2, (13, 4), generator=generator).float()
    # An eighth is added up without rounding.
    rows, loss = slice(rank, None, 2), torch.tensor((1 + rank) / 8)
    metrics.update([level[rows] for level in logits], targets[rows], loss)
    sets.update(logits[0][rows].round(decimals=1), tags[rows], loss)  # some are equal


def metrics_of_two(world):
    """The values; a validation that one process broke off."""
    metrics, sets = ClassificationMetrics(SEVEN), ClassificationMetrics(SETS)
    fill(metrics, sets, world.rank)
    return {
        "values": [metrics.compute(world), metrics.compute(world), sets.compute(world)],
        "aborted": [metrics.compute(world, aborted=world.rank == rank) for rank in (0, 1)],
    }


def test_validation_gives_the_training_loss_for_any_split(ranks):
    _, loss = by_hand()
    for world_size, size in product(WORLD_SIZES, VAL_BATCH_SIZES):
        for rank in range(world_size):
            found = ranks[rank]["validation", world_size, size]
            assert found == {"loss": pytest.approx(loss, rel=1e-6)}, (world_size, size)


def test_two_processes_compute_the_metrics_of_one(ranks):
    alone, sets = ClassificationMetrics(SEVEN), ClassificationMetrics(SETS)
    for rank in (0, 1):
        fill(alone, sets, rank)
    expected = alone.compute(World(CPU))
    assert len(expected) == 1 + 3 * 7 + 5
    for rank in (0, 1):
        # The metrics keep their own states.
        assert ranks[rank]["values"] == [expected, expected, sets.compute(World(CPU))]


def test_one_process_that_breaks_off_leaves_no_process_a_result(ranks):
    assert [ranks[rank]["aborted"] for rank in (0, 1)] == [[None, None]] * 2


# --- state that only rank 0 has ---


def make_state():
    """Tensors of several types, shapes and layouts, among plain values."""
    image = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(7))
    image.flatten()[:3] = torch.tensor([torch.nan, torch.inf, -0.0])
    model = {"image": image.to(memory_format=torch.channels_last), "empty": torch.zeros(0, 4)}
    return {"model": model, "flags": image > 0, "pair": (torch.tensor([2**40]), [2.5, None])}


def test_every_rank_gets_every_bit_and_the_layout(ranks):
    expected = bits(make_state())
    for results in ranks:
        received = results["state"]
        assert bits(received) == expected
        assert received["model"]["image"].is_contiguous(memory_format=torch.channels_last)
    received["flags"][0, 0, 0, 0] ^= True
    assert bits(received) != expected  # the comparison sees a single bit


# --- the first step of a process ---

WRAPPERS = {
    "ours": wrap,
    "torch's": lambda model, world: nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True
    ),
}


def two_passes(world, wrapper):
    """All gradients of the same batch, in the first and the second backward pass of a wrapper."""
    torch.manual_seed(world.rank)
    model = timm.create_model("test_resnet", num_classes=5)
    inputs, wrapped, found = torch.randn(4, 3, 32, 32), wrapper(model, world), []
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(inputs).square().mean().backward()
        found.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    return found


def test_the_first_step_of_a_process_rounds_as_the_later_ones(ranks):
    for results in ranks:
        assert torch.equal(*results["ours"])
        assert not torch.equal(*results["torch's"])


# --- BatchNorm's running statistics ---


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4), nn.BatchNorm1d(4)
    )


def statistics(module):
    """All running statistics, in one vector."""
    found = [buffer for name, buffer in module.named_buffers() if "running" in name]
    return torch.cat([buffer.flatten() for buffer in found]).clone()


def distributed(world):
    """The statistics of a model and of one in place of its average: before, after, and after twice."""
    modules = [normalised(), normalised()]
    for number, module in enumerate(modules):
        generator = torch.Generator().manual_seed(10 * number + world.rank)
        module(torch.randn(8, 3, generator=generator) + world.rank)
    found = [[statistics(module) for module in modules]]
    for _ in range(2):
        distribute_batchnorm(*modules, world)
        found.append([statistics(module) for module in modules])
    return found


def test_statistics_are_averaged_and_rank_0_gives_the_ema_ones(ranks):
    """Doing so again changes no bit: in float32, a third of a + a + a is not always a."""
    before, after, again = zip(*(results["statistics"] for results in ranks), strict=True)
    own = torch.stack([model for model, _ in before])
    assert (own[0] - own[1]).abs().max() > 0.01
    mean = after[0][0]
    torch.testing.assert_close(mean, own.mean(0))
    assert not torch.equal((mean + mean + mean) / 3, mean), "these statistics would not tell"
    for found in (*after, *again):
        assert bits(found) == bits([mean, before[0][1]])


# --- whole runs ---

RESUMED = {
    "BatchNorm": ("MODEL.norm=BatchNorm1d", "TRAIN.AMP=fp16"),
    # Statistics differ between ranks until a checkpoint is written.
    "sharded": ("DIST.SHARDING=full", "MODEL.norm=BatchNorm1d", "TRAIN.CHECKPOINT_EVERY_STEPS=1"),
}


@pytest.mark.parametrize("options", RESUMED.values(), ids=RESUMED)
def test_two_ranks_go_on_bit_for_bit(torchrun, tmp_path, options):
    own = (2, *RESUMABLE, *options)
    torchrun(*own, f"{NAME}whole").ok()
    assert torchrun(*own, f"{NAME}parts", interrupted(80)).code != 0
    torchrun(*own, f"{NAME}parts").ok()
    whole, parts = (
        load_checkpoint(tmp_path / "runs" / name / "checkpoints/last.pt")["state"]
        for name in ("whole", "parts")
    )
    assert bits(whole) == bits(parts)
