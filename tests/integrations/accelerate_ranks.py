"""Training loops with accelerate on each process, as a program: what each scenario gave, as JSON.

python -m tests.integrations.accelerate_ranks FOLDER SCENARIO...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from linnaeus.autobatch import snapshot
from linnaeus.autobatch.memory.process import held_bytes
from linnaeus.integrations.accelerate import find_batch_size
from linnaeus.utils.autobatch import auto_find_batch_size

MIB = 2**20
WIDTH = 4096
LARGEST = 1024


class Wide(nn.Module):
    """A model of little more than half a MiB of activations a sample, with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(16, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.enter(x))
        for _ in range(16):
            hidden = torch.sin(hidden * 1.01)
        result: torch.Tensor = self.leave(nn.functional.dropout(hidden, 0.1, self.training))
        return result


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 16, generator=generator)
    return TensorDataset(x, (x[:, 0].abs() * 2).long().clamp(max=3))


def limit_gb(num_mib: float) -> float:
    """So much beyond what this process holds; less on later ranks."""
    rank = PartialState().process_index
    return (held_bytes() + num_mib / (1 + 0.4 * rank) * MIB) / 2**30 / 0.8


def fresh(**options: Any) -> Accelerator:
    """An accelerator as at the start of a process whose group is there."""
    for state in (AcceleratorState, GradientState):
        state._shared_state.clear()
    return Accelerator(cpu=True, **options)


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = Wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)


def train(accelerator: Accelerator, batch_size: int, *built: Any, num_steps: int = 4) -> dict[str, Any]:
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
        "weights": list(accelerator.unwrap_model(model).state_dict().values()), "sizes": sizes,
        "losses": losses, "lr": optimizer.param_groups[0]["lr"], "random": torch.rand(3).tolist(),
        "models": len(accelerator._models), "step": accelerator.step,
    }  # fmt: skip


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    weights = zip(found.pop("weights"), expected.pop("weights"), strict=True)
    return all(torch.equal(a, b) for a, b in weights) and found == expected


def compared(
    options: dict[str, Any], run: Callable[[Accelerator], tuple[int, dict[str, Any]]]
) -> dict[str, Any]:
    """The size found, and whether the run was that of a run with this size by hand."""
    torch.manual_seed(7)
    size, found = run(fresh(**options))
    torch.manual_seed(7)
    expected = train(fresh(**options), size)
    sizes = set(found["sizes"])
    return {"size": size, "sizes": sorted(sizes), "same": same(found, expected)}


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def find_first() -> Any:
    """The size is found once everything is prepared, and training begins after that."""

    def run(accelerator: Accelerator) -> tuple[int, dict[str, Any]]:
        model, optimizer, scheduler = parts()
        prepared = accelerator.prepare(model, optimizer)
        size = find_batch_size(
            accelerator, *prepared, loss_of, dataset(), tolerance=0.1, memory_limit_gb=limit_gb(100),
            max_batch_size=LARGEST,
        )  # fmt: skip
        accelerator.free_memory()
        return size, train(accelerator, size, model, optimizer, scheduler)

    return compared({"gradient_accumulation_steps": 2, "mixed_precision": "bf16"}, run)


def not_restored() -> Any:
    """The negative control."""
    restore = snapshot.set_rng_state
    snapshot.set_rng_state = lambda state, device: None  # type: ignore[attr-defined]
    try:
        return find_first()
    finally:
        snapshot.set_rng_state = restore  # type: ignore[attr-defined]


def lengths() -> Any:
    """The lengths of the batches that trials ran, of samples that differ in it."""
    accelerator, seen = fresh(), set[int]()
    model, optimizer, _ = parts()

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen.add(batch.shape[1])
        return model(batch[:, :16]).sum()

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        longest = max(map(len, samples))
        return torch.stack([nn.functional.pad(sample, (0, longest - len(sample))) for sample in samples])

    samples = [torch.ones(16 + index % 3 + 40 * (index == 555)) for index in range(1000)]
    search = {"collate_fn": collate, "memory_limit_gb": 8.0, "max_batch_size": 4}
    find_batch_size(accelerator, *accelerator.prepare(model, optimizer), loss, samples, **search)
    return sorted(seen)


def attempt(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        return [type(error).__name__, str(error)]


def attempted(data: Any = None, **options: Any) -> Any:
    """The error of a search."""
    accelerator = fresh(**options)
    prepared = accelerator.prepare(*parts()[:2])
    return attempt(lambda: find_batch_size(accelerator, *prepared, loss_of, data or dataset()))


class Broken:
    """A dataset that process 1 cannot read; with one process, none can."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if PartialState().process_index == PartialState().num_processes - 1:
            raise KeyError("mine")
        return dataset()[index]


def errors() -> Any:
    found = {
        "broken": attempted(Broken()),
        "split": attempted(dataloader_config=DataLoaderConfiguration(split_batches=True)),
        "stream": attempted(iter(dataset())),
    }
    kind = AcceleratorState._shared_state["distributed_type"]
    accelerator = fresh()
    accelerator.state.distributed_type = DistributedType.FSDP
    try:
        found["sharded"] = attempt(
            lambda: find_batch_size(accelerator, nn.Linear(1, 1), None, loss_of, dataset())
        )
    finally:
        accelerator.state.distributed_type = kind
    return found


def main(folder: Path, names: list[str]) -> None:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    torch.set_num_threads(1)
    auto_find_batch_size(lambda x: None, torch.ones, max_batch_size=2, memory_limit_gb=8.0, group=False)
    for precision in ("no", "bf16"):  # loads what training needs, so that limits are exact
        train(fresh(mixed_precision=precision), 8)
    found: dict[str, Any] = {"num_processes": accelerator.num_processes}
    for name in names:
        found[name] = attempt(globals()[name])
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        found[f"{name}: processes"] = [PartialState().num_processes, world_size]
        (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
