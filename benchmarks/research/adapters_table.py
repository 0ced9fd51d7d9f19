"""Search in the loops of Lightning, transformers, accelerate and in an own one, train, and compare by hand.

    python -m benchmarks.research.adapters_table

Each case trains a few steps with the size that it finds, and again with this size and no search: weights,
optimizer state and random numbers must have the same bits, and the peak, what the process held before and its
tensors, must be below the limit. In percent of it, `resident` is the peak of the whole process.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from linnaeus import auto_find_batch_size, longest
from linnaeus.autobatch import nest
from linnaeus.autobatch.memory.host import status_bytes
from linnaeus.integrations.accelerate import find_batch_size
from linnaeus.integrations.lightning import AutoBatch
from linnaeus.integrations.transformers import autobatch
from tests.helpers.bits import differences
from tests.helpers.ledger import Ledger, held_bytes, room
from tests.integrations import hugging
from tests.integrations.lightning_runs import Bare, Data, Manual, Net, data, fit


class Padded(Net):
    def train_dataloader(self) -> Any:
        return DataLoader(hugging.Text(), self.batch_size, shuffle=True, collate_fn=hugging.collate)

    def loss(self, batch: Any) -> torch.Tensor:
        tokens = batch["input_ids"].float()
        return (
            super().loss((tokens[:, :16], tokens[:, 0].long() % 4))
            + 0 * tokens.repeat(1, 2000).sum()
        )


class WithSetup(Data):
    def setup(self, stage: str) -> None:
        self.dataset = data(300)


def lightning(
    size: Any, search: Any, kind: Any = Net, setup: Any = None, **options: Any
) -> tuple[Any, Any]:
    module, given = kind(size), (setup(size),) if setup else ()
    module.mib = 2.0  # of activations for each sample
    callbacks = [AutoBatch(**search, val=False)] if search else []
    found = fit(module, *given, callbacks=callbacks, limit_val_batches=0, **options)
    return (given[0] if given else module).batch_size, found


def transformers(size: Any, search: Any, **options: Any) -> tuple[Any, Any]:
    train, val = size if isinstance(size, tuple) else (size, size)
    sizes = {"per_device_train_batch_size": train, "per_device_eval_batch_size": val}
    made = hugging.trainer(**sizes, **options)
    (autobatch(made, **search) if search else made).train()
    return tuple(getattr(made.args, name) for name in sizes), hugging.outcome(made)


def loop(size: Any, search: Any, with_accelerate: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, rows, accelerator = hugging.model(), hugging.Text(), Accelerator(cpu=True)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if with_accelerate:
        model, optimizer = accelerator.prepare(model, optimizer)

    def step(batch: Any) -> None:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()

    if search and with_accelerate:
        parts = (accelerator, model, optimizer, lambda model, batch: model(**batch).loss)
        size = find_batch_size(*parts, rows, collate_fn=hugging.collate, **search)
    elif search:
        worst = longest(rows, 200)
        own = {
            "make_batch": lambda size: hugging.collate(worst[:size]),
            "state": (model, optimizer),
        }
        size = auto_find_batch_size(step, **own, **search).batch_size
    for batch in islice(DataLoader(rows, size, shuffle=True, collate_fn=hugging.collate), 4):
        step(batch)
    return size, {"parts": [model.state_dict(), optimizer.state_dict()], "random": torch.rand(3)}


CASES: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "Lightning, automatic": lightning,
    "Lightning, manual": partial(lightning, kind=Manual),
    "Lightning, accumulation": partial(lightning, accumulate_grad_batches=3),
    "Lightning, data module": partial(lightning, kind=lambda size: Bare(), setup=WithSetup),
    "Lightning, lengths": partial(lightning, kind=Padded),
    "transformers, padding": transformers,
    "transformers, by length": partial(transformers, train_sampling_strategy="group_by_length"),
    "transformers, evaluation": partial(transformers, eval_strategy="steps", eval_steps=2),
    "accelerate": partial(loop, with_accelerate=True),
    "own loop": partial(loop, with_accelerate=False),
}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    print(f"{'on the CPU':26}{'size':>12}{'peak':>8}{'resident':>10}  within  same bits")
    for name, case in CASES.items():
        with contextlib.redirect_stdout(io.StringIO()):
            case(2, {"max_batch_size": 2})  # loads what would count as memory of the search
            search = room(100, max_batch_size=512)
            limit_bytes = search["memory_limit_gb"] * 2**30
            size, found = case(2, search)
            before = held_bytes() - nest.num_bytes(found)
            Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of the resident set
            with Ledger() as ledger:
                _, by_hand = case(size, None)
        figures = [
            100 * num / limit_bytes for num in (before + ledger.peak_bytes, status_bytes("VmHWM"))
        ]
        yes = [
            "yes" if each else "NO" for each in (figures[0] <= 100, not differences(found, by_hand))
        ]
        print(
            f"{name:26}{size!s:>12}{figures[0]:8.1f}{figures[1]:10.1f}  {yes[0]:6}  {yes[1]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
