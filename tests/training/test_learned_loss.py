"""A loss with parameters of its own: they train as the model's do, on one process and on several."""

import os
from itertools import product

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from linnaeus.config.schema import OptimizerConfig, TrainConfig
from linnaeus.data.batch import Batch
from linnaeus.data.bundle import DataBundle, collate_pairs
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.training.build import assemble
from linnaeus.training.ddp import wrap
from tests.helpers.bits import bits
from tests.helpers.processes import compute, group_of
from tests.helpers.runs import assert_same_bits, checkpoint_of
from tests.helpers.searches import prepared
from tests.helpers.small_runs import PLAIN

CPU = torch.device("cpu")
NUM_FEATURES, NUM_CLASSES, EFFECTIVE_BATCH, NUM_STEPS = 5, 3, 24, 6


class Learned(nn.Module):
    """Cross-entropy of logits with a learned temperature, and their distance from learned centers."""

    def __init__(self, of_rank=0.0, num_classes=NUM_CLASSES):
        super().__init__()
        self.log_t = nn.Parameter(torch.tensor(0.5 + of_rank * int(os.environ.get("RANK", "0"))))
        self.centers = nn.Parameter(torch.eye(num_classes))
        self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, outputs, targets):
        logits = outputs if isinstance(outputs, Tensor) else outputs[0]
        labels = targets[:, 0]
        distance = functional.mse_loss(logits, self.centers.to(logits.dtype)[labels])
        return functional.cross_entropy(logits * self.log_t.exp(), labels) + distance


LOSS = f"LOSS._target_={__name__}.Learned"
NODE = {"_target_": f"{__name__}.Learned"}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))


def assembled(world, **changes):
    taxonomy = Taxonomy((Level("one", tuple(map(str, range(NUM_CLASSES)))),))
    rows = torch.utils.data.TensorDataset(torch.zeros(8, 1))
    data = DataBundle(rows, rows, taxonomy, 1, (1, 1), collate_pairs)
    model = {"_target_": f"{__name__}.make_model"}
    return assemble(model, NODE, SGD, TrainConfig(**changes), data, world)


def effective_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(EFFECTIVE_BATCH, NUM_FEATURES, generator=generator)
    return Batch(inputs, torch.randint(NUM_CLASSES, (EFFECTIVE_BATCH, 1), generator=generator))


# --- against a plain loop ---

SPLITS = list(product((2, 1), (1, 3), (None, 0.2)))
"""Processes, micro-batches, the norm to clip to."""
SGD = OptimizerConfig(NAME="momentum", LR=0.1, WEIGHT_DECAY=0.1)


def trained(world, num_micro, clip):
    parts = assembled(world, CLIP_GRAD_NORM=clip)
    step = parts.train_step
    step.model = wrap(parts.model, world)
    for seed in range(NUM_STEPS):
        mine = [
            part[world.rank :: world.world_size].chunk(num_micro)
            for part in effective_batch(seed)[:2]
        ]
        step([Batch(*pair) for pair in zip(*mine, strict=True)], num_micro)
        assert all(parameter.grad is None for parameter in parts.criterion.parameters())
    return {**parts.model.state_dict(), **parts.criterion.state_dict()}


def by_hand(clip, *, learns=True):
    """A plain loop of torch over whole batches."""
    model, loss = make_model(), Learned()
    loss.requires_grad_(learns)
    own = [loss.log_t, loss.centers]
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed}]
    groups += [{"params": own, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1)
    for seed in range(NUM_STEPS):
        inputs, targets = effective_batch(seed)[:2]
        loss(model(inputs), targets).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_([*model.parameters(), *own], clip)
        optimizer.step()
        optimizer.zero_grad()
    return {**model.state_dict(), **loss.state_dict()}


def work(rank, folder):
    results = {}
    for world_size in (2, 1):
        if rank < world_size:
            with group_of(world_size, rank, folder) as world:
                for split in SPLITS:
                    if split[0] == world_size:
                        results[split] = trained(world, *split[1:])
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return compute(__name__, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.e2e
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_it_trains_as_in_a_plain_loop(ranks, split):
    world_size, _, clip = split
    expected = by_hand(clip)
    for rank in range(world_size):
        torch.testing.assert_close(ranks[rank][split], expected, rtol=1e-5, atol=1e-6)
        assert_same_bits(ranks[rank][split], ranks[0][split])
    unlearned = by_hand(clip, learns=False)
    for name in ("log_t", "centers"):
        moved = (expected[name] - unlearned[name]).abs().max()
        assert moved > 0.03, "the comparison would not tell"


# --- the group of its parameters ---


@pytest.mark.parametrize(
    "options",
    [
        "MODEL.FREEZE=backbone TRAIN.UNFREEZE_EPOCH=2",
        "MODEL.NAME=test_vit OPTIMIZER.LAYER_DECAY=0.5",
        "~OPTIMIZER OPTIMIZER._target_=torch.optim.AdamW OPTIMIZER.lr=0.1",
    ],
)
def test_they_have_the_optimizers_rate_and_do_not_decay(options):
    classes = f"DATA.DATASET.NUM_CLASSES=[{NUM_CLASSES}]"
    images = ("DATA.DATASET.NAME=synthetic", classes, "DATA.IMG_SIZE=32")
    _, parts = prepared(*images, "MODEL.NAME=test_resnet", LOSS, *options.split())
    *others, last = parts.optimizer.param_groups
    assert (last["lr"], last.get("lr_scale", 1.0)) == (others[0]["lr"], 1.0)
    assert last["weight_decay"] == 0
    assert {*last["params"]} == {parts.criterion.log_t, parts.criterion.centers}


# --- whole runs ---

RUN = (*PLAIN, LOSS, "TRAIN.EMA.ENABLED=True", "TRAIN.CLIP_GRAD_NORM=1")


@pytest.mark.e2e
def test_a_searched_and_resumed_run_is_one_with_its_size_by_hand(run, tmp_path):
    options = (*RUN, "DATA.DATASET.length=96")
    run(*options, "EXPERIMENT.NAME=whole").ok()
    options += ("DATA.AUTOBATCH.ENABLED=True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=32")
    assert run(*options, "DATA.DATASET.interrupt_after=150").code == 130
    halfway = checkpoint_of(tmp_path / "runs/plain")
    assert 0 < halfway["progress"]["step"] < 9
    run(*options, "TRAIN.AUTO_RESUME=True").ok()
    whole, resumed = (
        checkpoint_of(tmp_path / "runs" / name)["state"] for name in ("whole", "plain")
    )
    assert bits(whole) == bits(resumed)
    assert not torch.equal(halfway["state"]["criterion"]["log_t"], whole["criterion"]["log_t"])


@pytest.mark.e2e
def test_all_ranks_begin_with_rank_0s(torchrun, tmp_path):
    for name, of_rank in (("equal", 0), ("other", 1)):
        torchrun(2, *RUN, f"LOSS.of_rank={of_rank}.0", f"EXPERIMENT.NAME={name}").ok()
    equal, other = (checkpoint_of(tmp_path / "runs" / name)["state"] for name in ("equal", "other"))
    assert bits(equal) == bits(other)
