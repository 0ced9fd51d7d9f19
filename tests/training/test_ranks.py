"""The same figures everywhere: what several real processes compute is what one computes."""

from itertools import product

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as functional
from torch import nn
from torch.profiler import profile
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.functional.classification import multilabel_average_precision, multilabel_f1_score

from linnaeus.data.batch import Batch
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.models.hierarchical import HierarchicalClassifier
from linnaeus.runtime.distributed import World
from linnaeus.training.accuracy import ClassificationMetrics
from linnaeus.training.checkpoint import broadcast_state
from linnaeus.training.ddp import distribute_batchnorm, wrap
from linnaeus.training.ema import Ema
from linnaeus.training.losses import TaxonomicCrossEntropy
from linnaeus.training.precision import Precision
from linnaeus.training.step import TrainStep, ValidationStep
from tests.helpers.bits import bits
from tests.helpers.processes import compute, group_of

pytestmark = [pytest.mark.distributed, pytest.mark.e2e]

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
                    results["three"] = distributed(world)
                    results["state"] = transferred(world)
                    results["read"] = read_on_main(world)
                    results |= {("passes", how): two_passes(world, how) for how in WRAPPERS}
                if world_size == 2:
                    results |= metrics_of_seven_levels(world)
                    results["sets"] = fill_sets(ClassificationMetrics(SETS), rank, 2).compute(world)
                    results["distributed"] = distributed(world)
                    results |= {
                        ("stops", stops): trained(world, stops=stops) for stops in (False, True)
                    }
    return results


def num_collectives(function):
    """How many collectives of the process group a call runs."""
    with profile() as profiler:
        function()
    return sum(event.count for event in profiler.key_averages() if event.key.startswith("c10d::"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each process has computed, by rank."""
    return compute(__name__, max(WORLD_SIZES), tmp_path_factory.mktemp("ranks"))


def plain_step(model, criterion, optimizer, **options):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return TrainStep(model, criterion, optimizer, scaler, Precision(CPU), **options)


# --- what rank 0 reads for all ranks ---


def read_on_main(world):
    """A large value, which travels over the process group, and a small one, which does not."""
    large = world.on_main(lambda: {"paths": np.arange(2**18).astype("S9"), "name": "birds"})
    small = world.on_main(lambda: {"name": "birds"})
    return [large["paths"].tobytes(), large["name"], large["paths"].flags.writeable, small]


def test_arrays_that_rank_0_reads_arrive_whole_on_all_ranks(ranks):
    expected = [np.arange(2**18).astype("S9").tobytes(), "birds", True, {"name": "birds"}]
    assert [results["read"] for results in ranks] == [expected] * 3


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
    inputs = torch.randn(EFFECTIVE_BATCH, NUM_FEATURES, generator=generator).to(dtype)
    columns = [
        torch.randint(0, count, (EFFECTIVE_BATCH,), generator=generator) for count in NUM_CLASSES
    ]
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
        step = plain_step(wrap(model, world), kind(LEVELS, LEVEL_WEIGHTS, SMOOTHING), optimizer)
        mine = [part[world.rank :: world.world_size].chunk(steps) for part in effective_batch()[:2]]
        loss = world.mean(step([Batch(*parts) for parts in zip(*mine, strict=True)], steps))
        results[kind.__name__, world.world_size, steps] = found, float(loss)
    return results


def by_hand():
    """The gradient and the loss of the whole effective batch, in double precision."""
    inputs, targets, _ = effective_batch(torch.float64)
    model = make_model(torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    for level, logits in enumerate(model(inputs)):
        for sample, label in zip(logits, targets[:, level], strict=True):
            if label >= 0:
                one = functional.cross_entropy(sample[None], label[None], label_smoothing=SMOOTHING)
                loss = loss + LEVEL_WEIGHTS[level] / sum(LEVEL_WEIGHTS) * one / EFFECTIVE_BATCH
    return list(torch.autograd.grad(loss, list(model.parameters()))), float(loss.detach())


def largest_error(found, expected):
    """The largest relative error of a parameter's gradient, by norms."""
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def test_no_split_of_an_effective_batch_changes_its_gradient_or_its_loss(ranks):
    gradient, loss = by_hand()
    for world_size, steps in SPLITS:
        for rank in range(world_size):
            found, found_loss = ranks[rank]["TaxonomicCrossEntropy", world_size, steps]
            assert largest_error(found, gradient) < 1e-6, (world_size, steps)
            assert found_loss == pytest.approx(loss, rel=1e-6)


def test_a_mean_over_the_known_labels_has_another_gradient_for_each_split(ranks):
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
    """The loss of a validation pass, for each batch size and each loss."""
    results = {}
    for kind, size in product((TaxonomicCrossEntropy, MeanOverKnownLabels), VAL_BATCH_SIZES):
        metrics = ClassificationMetrics(None)
        step = ValidationStep(
            make_model().eval(),
            kind(LEVELS, LEVEL_WEIGHTS, SMOOTHING),
            Precision(CPU),
            metrics.update,
        )
        mine = [part[world.rank :: world.world_size].split(size) for part in effective_batch()[:2]]
        for parts in zip(*mine, strict=True):
            step(Batch(*parts))
        values = metrics.compute(world)
        results["validation", kind.__name__, world.world_size, size] = values["loss"]
    return results


def fill(metrics, rank, world_size):
    """One process's share of 13 samples with labels in seven levels."""
    generator = torch.Generator().manual_seed(2)
    counts = SEVEN.num_classes.values()
    logits = [torch.randn(13, count, generator=generator) for count in counts]
    targets = torch.stack(
        [torch.randint(-1, count, (13,), generator=generator) for count in counts], 1
    )
    rows = slice(rank, None, world_size)
    # An eighth is added up without rounding.
    metrics.update([level[rows] for level in logits], targets[rows], torch.tensor((1 + rank) / 8))


def metrics_of_seven_levels(world):
    """The values and the number of collectives; a validation that one process broke off; exact sums."""
    metrics = ClassificationMetrics(SEVEN)
    fill(metrics, world.rank, world.world_size)
    by_itself = MulticlassAccuracy(4)
    by_itself.update(torch.eye(4), torch.arange(4))
    return {
        "values": metrics.compute(world),
        "again": metrics.compute(world),
        "collectives": num_collectives(lambda: metrics.compute(world)),
        "collectives of torchmetrics": num_collectives(by_itself.compute),
        "aborted": [
            metrics.compute(world, aborted=world.rank == rank) for rank in range(world.world_size)
        ],
        "sum": world.reduce(torch.tensor([2**52 - 1, world.rank], dtype=torch.float64)).tolist(),
    }


def fill_sets(metrics, rank, world_size):
    """One process's share of 13 samples with several labels, some unknown; probabilities are often equal."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(13, 4, generator=generator).round(decimals=1)
    targets = (
        torch.randint(-1, 2, (13, 4), generator=generator)
        .float()
        .clamp_max(torch.tensor([1, 1, 1, 0]))
    )
    rows = slice(rank, None, world_size)
    metrics.update(logits[rows], targets[rows], torch.tensor((1 + rank) / 8))
    metrics.seen = logits.sigmoid(), targets.int()
    return metrics


def test_the_validation_loss_is_that_of_training_for_any_batches_and_processes(ranks):
    _, loss = by_hand()
    for world_size, size in product(WORLD_SIZES, VAL_BATCH_SIZES):
        for rank in range(world_size):
            found = ranks[rank]["validation", "TaxonomicCrossEntropy", world_size, size]
            assert found == pytest.approx(loss, rel=1e-6), (world_size, size)
    of_known = [ranks[0]["validation", "MeanOverKnownLabels", 1, size] for size in VAL_BATCH_SIZES]
    assert max(of_known) - min(of_known) > 1e-3, (
        "the samples would not tell a mean over known labels"
    )


def test_seven_levels_cost_at_most_two_collectives(ranks):
    for rank in (0, 1):
        assert 1 <= ranks[rank]["collectives"] <= 2
        assert ranks[rank]["collectives of torchmetrics"] > 2, (
            "else nothing would have been counted"
        )


def test_two_processes_compute_the_metrics_of_one(ranks):
    alone = ClassificationMetrics(SEVEN)
    for rank in (0, 1):
        fill(alone, rank, 2)
    expected = alone.compute(World(CPU))
    assert len(expected) == 1 + 3 * 7 + 5
    for rank in (0, 1):
        assert ranks[rank]["values"] == expected
        assert ranks[rank]["again"] == expected, "the metrics keep their own states"


def test_several_labels_on_two_processes_have_the_figures_of_torchmetrics(
    ranks,
):
    metrics = fill_sets(ClassificationMetrics(SETS), 0, 1)
    scores, targets = (each[:, :3] for each in metrics.seen)  # the fourth class has no sample
    for function, name in (
        (multilabel_average_precision, "map/tag"),
        (multilabel_f1_score, "f1/tag"),
    ):
        expected = float(function(scores, targets, 3, ignore_index=-1))
        assert ranks[0]["sets"][name] == pytest.approx(expected, abs=1e-6)
    alone = metrics.compute(World(CPU))
    assert ranks[0]["sets"] == ranks[1]["sets"]
    assert {**alone, "loss": 0} == {**ranks[0]["sets"], "loss": 0}


def test_one_process_that_breaks_off_leaves_no_process_a_result(ranks):
    assert [ranks[rank]["aborted"] for rank in (0, 1)] == [[None, None]] * 2


def test_sums_over_the_processes_are_exact(ranks):
    assert [ranks[rank]["sum"] for rank in (0, 1)] == [[2**53 - 2, 1]] * 2


# --- state that only rank 0 has ---


def make_state():
    """Tensors of several types, shapes and layouts, among plain values."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(1500, generator=generator)
    noise[3], noise[4], noise[5] = torch.nan, torch.inf, -0.0
    return {
        "model": {
            "weight": noise,
            "image": torch.randn(2, 3, 5, 4, generator=generator).to(
                memory_format=torch.channels_last
            ),
            "half": noise[:7].bfloat16(),
            "flags": noise > 0,
            "empty": torch.zeros(0, 4),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(5.0), "count": 2**40 * torch.ones(2).long()}}
        },
        "scaler": {"scale": 65536.0, "none": None, "text": "a", "pair": (1, [2.5])},
    }


def transferred(world):
    return broadcast_state(make_state() if world.is_main else None, world)


def test_every_rank_gets_every_bit_and_the_layout(ranks):
    state = make_state()
    for rank in range(3):
        received = ranks[rank]["state"]
        assert bits(received) == bits(state)
        assert received["model"]["image"].is_contiguous(memory_format=torch.channels_last)
    received["model"]["flags"][0] ^= True
    assert bits(received) != bits(state)  # the comparison sees a single bit
    assert broadcast_state(state, World(CPU)) is state


# --- the first step of a process ---

WRAPPERS = {
    "ours": wrap,
    "torch's": lambda model, world: nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True
    ),
}


def two_passes(world, how):
    """All gradients of the same batch, in the first and the second backward pass of a wrapper."""
    torch.manual_seed(world.rank)
    model = timm.create_model("test_resnet", num_classes=5)
    inputs = torch.randn(4, 3, 32, 32)
    wrapper, found = WRAPPERS[how](model, world), []
    for _ in range(2):
        wrapper.zero_grad()
        wrapper(inputs).square().mean().backward()
        found.append(
            torch.cat([parameter.grad.flatten().clone() for parameter in model.parameters()])
        )
    return found


def test_the_first_step_of_a_process_rounds_as_the_later_ones(ranks):
    for results in ranks:
        first, second = results["passes", "ours"]
        assert torch.equal(first, second)
        assert not torch.equal(*results["passes", "torch's"])


# --- BatchNorm's running statistics ---


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4), nn.BatchNorm1d(4)
    )


def make_batch(rank, number):
    generator = torch.Generator().manual_seed(10 * number + rank)
    targets = torch.randint(0, 4, (8,), generator=generator)
    return Batch(torch.randn(8, 3, generator=generator) + rank, targets)


def statistics(module):
    """All running statistics, in one vector."""
    found = [buffer for name, buffer in module.named_buffers() if "running" in name]
    return torch.cat([buffer.flatten() for buffer in found]).clone()


def distributed(world):
    """The statistics of a model and of another in the place of its average: before, after, after it again."""
    model, average = normalised(), normalised()
    for module, number in ((model, 0), (average, 1)):
        module(make_batch(world.rank, number).inputs)
    before = [statistics(module) for module in (model, average)]
    collectives = num_collectives(lambda: distribute_batchnorm(model, average, world))
    after = [statistics(module) for module in (model, average)]
    distribute_batchnorm(model, average, world)
    again = [statistics(module) for module in (model, average)]
    return {"before": before, "after": after, "again": again, "count": collectives}


def trained(world, *, stops):
    """The state after four steps and a validation; if it stops, rank 0's is loaded in the middle."""
    model = normalised()
    ema = Ema(model, 0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = plain_step(wrap(model, world), nn.CrossEntropyLoss(), optimizer, callbacks={"EMA": ema})
    for number in range(4):
        if stops and number == 2:
            for part in (model, ema):
                part.load_state_dict(world.broadcast(part.state_dict()))
        step([make_batch(world.rank, 2 * number + micro) for micro in (0, 1)], 2)
    results = {"live": statistics(model)}
    distribute_batchnorm(model, ema.module, world)
    return results | {
        f"{kind} {k}": v
        for kind, m in (("", model), ("ema", ema.module))
        for k, v in m.state_dict().items()
    }


def test_statistics_are_averaged_and_rank_0_gives_those_of_the_ema(ranks):
    zero, one = (results["distributed"] for results in ranks[:2])
    before = torch.stack([zero["before"][0], one["before"][0]])
    assert (before[0] - before[1]).abs().max() > 0.01
    after = torch.stack([zero["after"][0], one["after"][0]])
    torch.testing.assert_close(after, before.mean(0).expand(2, -1))
    assert torch.equal(after[0], after[1])
    assert torch.equal(zero["after"][1], zero["before"][1])
    assert torch.equal(one["after"][1], zero["before"][1])
    assert zero["count"] == one["count"] == 2, "one collective for each model"


def test_distributing_again_changes_no_bit(ranks):
    """In float32, a third of a + a + a is not always a."""
    for results in ranks[:3]:
        for after, again in zip(results["three"]["after"], results["three"]["again"], strict=True):
            assert torch.equal(after, again)
    after = ranks[0]["three"]["after"][0]
    assert not torch.equal((after + after + after) / 3, after), "these statistics would not tell"


def test_a_stop_within_an_epoch_changes_no_bit(ranks):
    for results in ranks[:2]:
        on, stopped = results["stops", False], results["stops", True]
        assert all(torch.equal(tensor, stopped[name]) for name, tensor in on.items())
    live = [results["stops", False]["live"] for results in ranks[:2]]
    assert not torch.equal(*live), "the ranks have seen the same samples"
