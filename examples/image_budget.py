"""Train on images of mixed sizes, padded in each batch, in batches of a bounded number of pixels.

python examples/image_budget.py
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from linnaeus import BudgetBatchSampler, find_budget

Sample = tuple[Tensor, int]
"""An image (3, height, width) and its class."""


def collate(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Pad images to squares of the longest side of all."""
    side = max(max(image.shape[1:]) for image, _ in samples)
    images = torch.zeros(len(samples), 3, side, side)
    for place, (image, _) in zip(images, samples, strict=True):
        place[:, : image.shape[1], : image.shape[2]] = image
    return images, torch.tensor([label for _, label in samples])


def cost(sample: Sample) -> int:
    """Pixels of the square that an image is padded to."""
    return max(sample[0].shape[1:]) ** 2


def random_image(number: int) -> Sample:
    """An image of 24 to 256 pixels a side, whose color depends on its class."""
    height, width = (24 + (232 * torch.rand(2) ** 3).int()).tolist()
    return torch.randn(3, height, width) + number % 2, number % 2


class ConvNet(nn.Sequential):
    """A small network for images of any size."""

    def __init__(self) -> None:
        first, second = nn.Conv2d(3, 16, 3, 2), nn.Conv2d(16, 32, 3, 2)
        pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2))
        super().__init__(first, nn.ReLU(), second, nn.ReLU(), *pool)


def run(num_steps: int, limit_gb: float = 1.0) -> list[float]:
    """Find the budget, train, and return the losses."""
    torch.manual_seed(0)
    samples, model = [random_image(number) for number in range(200)], ConvNet()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), list[float]()

    def step(batch: tuple[Tensor, Tensor]) -> float:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

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
