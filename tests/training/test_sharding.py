"""Sharded training: real processes that share a model train it as those that have copies of it do."""

import dataclasses
from collections import Counter
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Dataset

from linnaeus.autobatch.nest import local
from linnaeus.config.load import load_config
from linnaeus.data.batch import Batch
from linnaeus.data.datasets import build_data
from linnaeus.data.loader import SeededBatches
from linnaeus.runtime.distributed import World
from linnaeus.runtime.rng import seed_all
from linnaeus.training.build import assemble
from linnaeus.training.ddp import wrap
from linnaeus.training.sharding import check_sharding, reshard
from tests.helpers.messages import error_of, raised
from tests.helpers.processes import compute, group_of

pytestmark = [pytest.mark.e2e]

NUM_STEPS, FEW, SAMPLES, NUM_SAMPLES = 20, 6, 4, 64
WAYS = {4: ("none", "full", "hybrid"), 3: ("none", "full"), 2: ("none", "full")}
"""By the number of ranks, how they share the model; `hybrid` is on two nodes."""


class Words(Dataset):
    """Rows of 8 words; the class follows from them."""

    classes = ("a", "b", "c")

    def __init__(self, split):
        generator = torch.Generator().manual_seed(len(split))
        self.rows = torch.randint(23, (NUM_SAMPLES, 8), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index], int(self.rows[index].sum()) % 3


Block = nn.TransformerEncoderLayer


class Scalar(nn.Linear):
    """With a parameter that has no dimension."""

    def __init__(self, num_classes):
        super().__init__(8, num_classes)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return super().forward(x.float()) * self.temperature


class Gpt(nn.Module):
    """Odd sizes, a parameter of one element and one that no step uses; words and outputs share weights."""

    def __init__(self, num_classes, width=10):
        super().__init__()
        self.words, self.out = nn.Embedding(23, width), nn.Linear(width, 23, bias=False)
        self.out.weight = self.words.weight
        self.blocks = nn.Sequential(*(Block(width, 2, 21, 0.0, batch_first=True) for _ in range(2)))
        self.scale, self.unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(5, 3))
        self.head = nn.Linear(23, num_classes)

    def forward(self, x):
        return self.head(self.out(self.blocks(self.words(x))[:, -1] * self.scale).tanh())


class TiedBlocks(Gpt):
    """Its blocks share a layer, which belongs to neither alone."""

    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.blocks[1].linear1 = self.blocks[0].linear1


COMMON = ("EXPERIMENT.DEVICE=cpu", "OPTIMIZER.NAME=sgd", "OPTIMIZER.LR=0.1", "TRAIN.EMA.DECAY=0.9")
IMAGES = (
    "DATA.DATASET.NAME=synthetic",
    f"DATA.DATASET.NUM_SAMPLES={NUM_SAMPLES}",
    "DATA.IMG_SIZE=32",
    "DATA.DATASET.NUM_CLASSES=[2,6]",
)
VIT = (*IMAGES, "MODEL.NAME=test_vit", "MODEL.KWARGS={depth: 2}")
RESNET = (*IMAGES, "MODEL.NAME=test_resnet")
GPT = (
    f"MODEL._target_={__name__}.Gpt",
    f"DATA.DATASET._target_={__name__}.Words",
    "DIST.FIND_UNUSED_PARAMETERS=True",
)
ADAM = ("OPTIMIZER.NAME=adamw", "OPTIMIZER.LR=0.01", "OPTIMIZER.KWARGS={eps: 0.01}")
EMA, TWICE, CLIP = (
    "TRAIN.EMA.ENABLED=True",
    "TRAIN.ACCUMULATION_STEPS=2",
    "TRAIN.CLIP_GRAD_NORM=0.1",
)
BF16 = "DIST.PARAM_DTYPE=bf16"
CASES = {
    "vit, float32": VIT,
    "vit, frozen, checkpointing, clipped": (
        *VIT,
        CLIP,
        "MODEL.FREEZE=backbone.blocks.0.*",
        "TRAIN.GRADIENT_CHECKPOINTING=True",
    ),
    "resnet, accumulated, mixed, average": (*RESNET, EMA, TWICE, "DATA.AUGMENT.MIXUP=0.8"),
    "gpt, tied, Adam, clipped": (*GPT, *ADAM, CLIP),
}
ROUNDED = {
    "parameters": (*VIT, BF16),
    "sums": (*VIT, "DIST.REDUCE_DTYPE=bf16"),
}
"""With bfloat16 in one place; compared with float32, which is the first of `CASES`."""
PLACED = {
    "default": GPT,
    "kept": (*GPT, "DIST.RESHARD_AFTER_FORWARD=False"),
    "root": (*GPT, "DIST.SHARD_BLOCKS=[]"),
    "name": (*GPT, "DIST.SHARD_BLOCKS=['blocks.1','hea*']"),
}
"""Which parts are gathered at once, and until when; none changes a result."""


WRONG = {
    "a pattern without a match": (*GPT, "DIST.SHARD_BLOCKS=[Linear, layer.*]"),
    "BatchNorm": (*RESNET, BF16),
    "a scalar": (*GPT, f"MODEL._target_={__name__}.Scalar"),
    "a loss that learns": (*GPT, "LOSS._target_=tests.training.test_learned_loss.Learned"),
    "weights tied across blocks": (*GPT, f"MODEL._target_={__name__}.TiedBlocks"),
}


def whole(model):
    """All tensors of a model, on every rank."""
    state = {} if model is None else model.state_dict()
    whole_ones = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.items()}
    return {name: tensor.clone() for name, tensor in whole_ones.items()}


def names_of_gathered(model):
    """First parts of the names of the parameters that are whole."""
    return {
        name.partition(".")[0] for name, value in model.named_parameters() if local(value) is value
    }


def trained(world, how, *argv, num_steps=FEW):
    """The tensors at the start and in the end, the loss of each step; what a validation leaves gathered."""
    config = load_config([*COMMON, *argv, f"DIST.SHARDING={how}"]).config
    seed_all(0)
    data = build_data(config.DATA, seed=0)
    nodes = config.MODEL, config.LOSS, config.OPTIMIZER
    parts = assemble(*nodes, config.TRAIN, data, world, sharding=config.DIST)
    model, num_batches = parts.model, config.TRAIN.ACCUMULATION_STEPS or 1
    start = whole(model)
    wrapped = wrap(model, world, find_unused_parameters=config.DIST.FIND_UNUSED_PARAMETERS)
    step = dataclasses.replace(parts.train_step, model=wrapped.train())
    batches = SeededBatches(data.train, data.collate, 0, data.on_device, 1)

    def batch(number):
        first = (number * world.world_size + world.rank) * SAMPLES
        made = batches.__getitems__([(0, (first + i) % NUM_SAMPLES) for i in range(SAMPLES)])
        tensors, floating = data.on_device(made), torch.get_default_dtype()
        return Batch(*(t.to(floating) if t.is_floating_point() else t for t in tensors))

    numbers = range(num_steps * num_batches)
    losses = [
        step([batch(number) for number in numbers[first : first + num_batches]], num_batches)
        for first in numbers[::num_batches]
    ]
    with torch.no_grad():
        model.eval()(batch(0).inputs)
    gathered = [names_of_gathered(model)]
    reshard(model)
    return {
        "start": start,
        "end": whole(model),
        "average": whole(parts.ema and parts.ema.module),
        "losses": world.mean(torch.stack(losses)).float(),
        "elements": sum(local(parameter).numel() for parameter in model.parameters()),
        "gathered": [*gathered, names_of_gathered(model)],
        "modules": Counter(type(m).__name__ for m in model.modules() if isinstance(m, FSDPModule)),
    }


@contextmanager
def double():
    """In double precision, no training is so unstable that rounding shows."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def work(rank, folder):
    """All that one process computes, with as many as there are results for."""
    num_ranks = int((Path(folder) / "num_ranks").read_text())
    results = {}
    with group_of(num_ranks, rank, folder) as world:
        two_nodes = dataclasses.replace(world, local_world_size=num_ranks // 2)
        for (name, argv), how in product(CASES.items(), WAYS[num_ranks]):
            with nullcontext() if name == "vit, float32" else double():
                results[name, how] = trained(
                    two_nodes if how == "hybrid" else world,
                    how,
                    *argv,
                    num_steps=NUM_STEPS if num_ranks > 2 else FEW,
                )
        if num_ranks == 2:
            results |= {
                name: trained(world, "full", *argv) for name, argv in (ROUNDED | PLACED).items()
            }
            results["wrong"] = {
                name: raised(trained, world, "full", *argv) for name, argv in WRONG.items()
            }
    return results


def results_of(num_ranks, folder):
    (folder / "num_ranks").write_text(str(num_ranks))
    return compute(__name__, num_ranks, folder)[-1]  # whose BatchNorm follows rank 0


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What the second of two ranks has computed."""
    return results_of(2, tmp_path_factory.mktemp("ranks"))


def difference(found, expected):
    """The largest relative difference of a tensor, by norms."""
    assert found.keys() == expected.keys()
    pairs = [(found[name].double(), value.double()) for name, value in expected.items()]
    return max((float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs), default=0.0)


def assert_same_training(results, name, how):
    found, expected = results[name, how], results[name, "none"]
    assert difference(found["start"], expected["start"]) == 0
    most = 1e-5 if name == "vit, float32" else 1e-9
    for part in ("end", "average"):
        assert difference(found[part], expected[part]) < most, (name, how, part)
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=0)
    assert difference(found["end"], found["start"]) > 1e-3, "it has trained"
    assert found["elements"] < 0.6 * expected["elements"]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_that_share_a_model_train_it_as_with_copies(two, name):
    assert_same_training(two, name, "full")


def test_settings_of_a_case_change_its_losses(two):
    """Else the test above could not tell."""
    plain, other = (two[name, "full"]["losses"] for name in list(CASES)[:2])
    assert float(((plain - other) / plain).abs().max()) > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_more_ranks_that_share_a_model_train_it_as_with_copies(tmp_path, num_ranks):
    """In float64: in float32 four ranks differ by 2e-5 in a loss of 20 steps, by rounding."""
    results = results_of(num_ranks, tmp_path)
    for name, how in product(CASES.keys() - {"vit, float32"}, WAYS[num_ranks][1:]):
        assert_same_training(results, name, how)


@pytest.mark.parametrize("name", ROUNDED)
def test_bfloat16_stays_near_and_is_another_format(two, name):
    exact, found = two["vit, float32", "full"]["losses"], two[name]["losses"]
    assert 1e-5 < float(((found - exact).abs() / exact).max()) < 0.05


def test_the_choice_of_what_to_gather_changes_no_result(two):
    modules = {name: two[name]["modules"] for name in PLACED}
    block = "FSDPTransformerEncoderLayer"
    assert modules["default"] == modules["kept"] == {"FSDPGpt": 1, block: 2}
    assert modules["name"] == {"FSDPGpt": 1, block: 1, "FSDPLinear": 1}
    assert modules["root"] == {"FSDPGpt": 1}
    for name in PLACED:
        assert difference(two[name]["end"], two["default"]["end"]) < 1e-6
    parts = {"words", "scale", "unused", "head"}  # `out` is `words`
    assert two["default"]["gathered"] == [parts, set()], "after a pass without a backward pass"
    assert two["kept"]["gathered"] == [parts | {"blocks"}, set()]


# --- mistakes ---

REFUSED = (
    "TRAIN.COMPILE=True",
    "TRAIN.CHANNELS_LAST=True",
    "TRAIN.UNFREEZE_EPOCH=2",
    "TRAIN.ON_OUT_OF_MEMORY=split",
    "DIST.CPU_OFFLOAD=True",
)


def test_messages(golden, two, tmp_path):
    config = load_config(["DIST.SHARDING=hybrid", *REFUSED]).config
    ranks = World(torch.device("cpu"), 0, 2, 2)
    together = error_of(check_sharding, config.DIST, config.TRAIN, ranks)
    check_sharding(config.DIST, config.TRAIN, World(torch.device("cpu")))
    check_sharding(load_config([*REFUSED[:-1]]).config.DIST, config.TRAIN, ranks)
    unknown = error_of(load_config, ["DIST.SHARDING=ful"])
    golden("sharding", {"keys": together, "a typo": unknown, **two["wrong"]}, here=__name__)
