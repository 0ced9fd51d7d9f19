"""Train on handwritten digits with accelerate, at the maximum batch size.

    python examples/accelerate_digits.py --cpu --memory-limit-gb 1.0
    torchrun --nproc_per_node=2 examples/accelerate_digits.py --cpu --memory-limit-gb 1.0

prints, with other numbers on another machine:

    epoch 1  loss 0.344  accuracy 0.84
    epoch 2  loss 0.203  accuracy 0.92
    epoch 3  loss 0.101  accuracy 0.94
    trained with batch size 232 per rank

Needs `pip install linnaeus[accelerate]`; the digits come with scikit-learn.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from linnaeus.integrations.accelerate import find_batch_size


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Images of 8 × 8 pixels, four fifths of them for training."""
    content = load_digits()
    images = torch.tensor(content.images, dtype=torch.float32)[:, None] / 16
    dataset = TensorDataset(images, torch.tensor(content.target))
    return tuple(random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0)))


def network() -> nn.Module:
    """A small convolutional network, with large activations."""
    return nn.Sequential(
        nn.Conv2d(1, 128, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(128, 128, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(128 * 16, 10),
    )


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of images and labels."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def main(argv: list[str] | None = None) -> int:
    """Train, and return the batch size of each rank."""
    parser = argparse.ArgumentParser(description="Train on digits with accelerate.")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--memory-limit-gb", type=float, help="GiB that a process may hold 80 %% of"
    )
    options = parser.parse_args(argv)
    accelerator = Accelerator(cpu=options.cpu)
    train_set, test_set = digits()

    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    batch_size = find_batch_size(
        accelerator, model, optimizer, loss_of, train_set, memory_limit_gb=options.memory_limit_gb
    )
    loader = DataLoader(train_set, batch_size=batch_size, shuffle=True)
    loader, test_loader = accelerator.prepare(loader, DataLoader(test_set, batch_size=batch_size))
    for epoch in range(1, options.epochs + 1):
        model.train()
        for batch in loader:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        right = []
        with torch.no_grad():
            for images, labels in test_loader:
                right.append(accelerator.gather_for_metrics(model(images).argmax(1) == labels))
        accuracy = torch.cat(right).float().mean().item()
        accelerator.print(f"epoch {epoch}  loss {loss:.3f}  accuracy {accuracy:.2f}")
    accelerator.print(f"trained with batch size {batch_size} per rank")
    return batch_size


if __name__ == "__main__":
    main()
