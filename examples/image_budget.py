"""Train on images of mixed sizes in batches of bounded pixels: python examples/image_budget.py."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from linnaeus import BudgetBatchSampler, find_budget


def collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Pad images (3, height, width) to squares of the longest side of all."""
    side = max(max(image.shape[1:]) for image, _ in samples)
    images = torch.zeros(len(samples), 3, side, side)
    for place, (image, _) in zip(images, samples, strict=True):
        place[:, : image.shape[1], : image.shape[2]] = image
    return images, torch.tensor([label for _, label in samples])


def random_images(number: int) -> list[tuple[Tensor, int]]:
    """Images of 24 to 256 pixels a side, whose color depends on their class."""
    sides = (24 + (232 * torch.rand(number, 2) ** 3).int()).tolist()
    return [(torch.randn(3, *pair) + label % 2, label % 2) for label, pair in enumerate(sides)]


def network() -> nn.Module:
    """A network for images of any size."""
    layers = nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2))


def run(num_steps: int, limit_gb: float = 1.0) -> list[float]:
    """Find the budget, train, and return the losses."""
    torch.manual_seed(0)
    samples, model = random_images(200), network()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), list[float]()

    def step(batch: tuple[Tensor, Tensor]) -> float:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    cost = [max(image.shape[1:]) ** 2 for image, _ in samples]
    options = {"cost": cost, "padded": True, "unit": "pixels", "memory_limit_gb": limit_gb}
    found = find_budget(step, samples, collate, state=(model, optimizer), **options)
    sampler = BudgetBatchSampler(found.costs, found.budget, padded=True)
    loader = DataLoader(samples, batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
    while len(losses) < num_steps:
        sampler.set_epoch(len(losses))
        losses += map(step, loader)
    print(f"{found.budget} pixels: losses {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    run(10)
