"""Training loops with accelerate on one rank and on two, for `tests.helpers.processes`."""

import os
import weakref
from functools import partial

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from linnaeus.integrations.accelerate import budget_loader, find_batch_size
from linnaeus.utils.autobatch import auto_find_batch_size
from tests.helpers.bits import bits, differences
from tests.helpers.ledger import room
from tests.helpers.processes import join_as_torchrun

WIDTH = 4096
LARGEST = 1024


class Wide(nn.Module):
    """A model of little more than half a MiB of activations a sample, with BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 4)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        hidden = self.norm(self.enter(x))
        for _ in range(16):
            hidden = torch.sin(hidden * 1.01)
        return self.leave(nn.functional.dropout(hidden, 0.1, self.training))


def dataset():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 16, generator=generator)
    return TensorDataset(x, (x[:, 0].abs() * 2).long().clamp(max=3))


def fresh(**options):
    """An accelerator as at the start of a process whose group is there."""
    for state in (AcceleratorState, GradientState):
        state._shared_state.clear()
    return Accelerator(cpu=True, **options)


def parts():
    model = Wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)


def train(accelerator, batch_size, *built, num_steps=4):
    """So many optimizer steps; everything that a search could have left its mark on."""
    model, optimizer, scheduler = built or parts()
    loader = DataLoader(dataset(), batch_size=batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    sizes, losses = [], []
    while len(losses) < num_steps:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            sizes.append(len(x))
            if accelerator.sync_gradients:
                losses += [accelerator.gather(loss.detach()[None]).tolist()]
            if len(losses) == num_steps:
                break
    return {
        "weights": list(accelerator.unwrap_model(model).state_dict().values()),
        "sizes": sizes,
        "losses": losses,
        "lr": optimizer.param_groups[0]["lr"],
        "random": torch.rand(3).tolist(),
        "models": len(accelerator._models),
        "step": accelerator.step,
    }


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def find_first():
    """The size found, and whether training after the search is that of a run with this size by hand."""
    options = {"gradient_accumulation_steps": 2, "mixed_precision": "bf16"}
    torch.manual_seed(7)
    accelerator, (model, optimizer, scheduler) = fresh(**options), parts()
    prepared = accelerator.prepare(model, optimizer)
    # Several ranks hold more when their search begins: buffers of DDP and of the first collectives.
    extra_mib = 100 + 100 * (accelerator.num_processes > 1)
    search = room(
        extra_mib / (1 + 0.4 * accelerator.process_index), max_batch_size=LARGEST, tolerance=0.1
    )
    size = find_batch_size(accelerator, *prepared, loss_of, dataset(), **search)
    accelerator.free_memory()
    found = train(accelerator, size, model, optimizer, scheduler)
    torch.manual_seed(7)
    expected = train(fresh(**options), size)
    return {
        "size": size,
        "sizes": sorted(set(found["sizes"])),
        "same": differences(found, expected) == [],
    }


def trials():
    """The lengths of batches, and whether the last one is held when the optimizer steps, as in a loop."""
    accelerator, lengths, held, batches = fresh(), set(), [], []
    model, optimizer = accelerator.prepare(*parts()[:2])
    optimizer.optimizer.register_step_pre_hook(
        lambda *_: held.append(bool(batches) and batches[-1]() is not None)
    )

    def loss(model, batch):
        lengths.add(batch.shape[1])
        batches.append(weakref.ref(batch))
        return model(batch[:, :16]).sum()

    samples = [torch.ones(16 + index % 3 + 40 * (index == 555)) for index in range(1000)]
    search = {"collate_fn": partial(pad_sequence, batch_first=True), "max_batch_size": 4}
    find_batch_size(accelerator, model, optimizer, loss, samples, **search)
    return {"lengths": sorted(lengths), "held": held[-1]}


def within():
    """The batches of two epochs within a budget, and whether the search has left a trace."""
    accelerator, (model, optimizer, _) = fresh(gradient_accumulation_steps=2), parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    before = bits(model.state_dict())
    samples = [torch.ones(10 + index * 7 % 50, 16) for index in range(200)]

    def loss(model, batch):
        return model(batch.flatten(0, 1)).sum()

    plain = DataLoader(samples, collate_fn=pad_sequence, num_workers=0)
    loader = budget_loader(accelerator, model, optimizer, loss, plain, cost=len, max_batch_size=500)
    same = bits(model.state_dict()) == before
    shapes = [[tuple(batch.shape[:2][::-1]) for batch in loader] for _ in range(2)]
    return {"budget": loader.batch_sampler.budget, "shapes": shapes, "same": same}


class Broken:
    """A dataset that the last process cannot read."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if PartialState().process_index == PartialState().num_processes - 1:
            raise KeyError("mine")
        return dataset()[index]


def broken():
    """The error of a search on a dataset that the last process cannot read."""
    accelerator = fresh()
    try:
        find_batch_size(accelerator, *accelerator.prepare(*parts()[:2]), loss_of, Broken())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def work(rank, folder):
    """Of two ranks if the environment says so, else of one."""
    num_ranks = int(os.environ.get("NUM_RANKS", "1"))
    if num_ranks > 1:
        join_as_torchrun(rank, num_ranks, folder)
    auto_find_batch_size(
        lambda x: None, torch.ones, max_batch_size=2, memory_limit_gb=8.0, group=False
    )
    for precision in ("no", "bf16"):  # loads what training needs, so that limits are exact
        train(fresh(mixed_precision=precision), 8)
    own = {} if num_ranks > 1 else {"trials": trials()}
    return {"found": find_first(), "broken": broken(), "within": within(), **own}
