"""Train on the digits of scikit-learn with Lightning and AutoBatch; nothing is downloaded.

    python examples/lightning_digits.py
    python examples/lightning_digits.py --devices 2 --effective-batch-size 256

The first line is the size found, the second the accuracy on held-out digits. This small network needs little
memory, so `--max-batch-size` bounds the search. Lower `--memory-limit-gb` to let memory bound it.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from linnaeus.integrations.lightning import AutoBatch

NUM_KEPT_BACK = 297


class Digits(LightningModule):
    """A small network for images of 8 x 8 pixels."""

    def __init__(self, batch_size: int = 8, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2048, 10),
        )
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        samples = TensorDataset(images, torch.tensor(digits.target))
        self.kept_back = torch.utils.data.Subset(samples, range(NUM_KEPT_BACK))
        self.samples = torch.utils.data.Subset(samples, range(NUM_KEPT_BACK, len(samples)))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return the loss, shape ()."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        """Log the accuracy."""
        images, labels = batch
        correct = (self.layers(images).argmax(dim=1) == labels).float()
        self.log("accuracy", correct.mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with a learning rate that grows with the square root of the samples per optimizer step."""
        trainer = self.trainer
        samples = self.hparams["batch_size"] * trainer.accumulate_grad_batches * trainer.world_size
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"] * (samples / 64) ** 0.5)

    def train_dataloader(self) -> DataLoader[Sequence[Tensor]]:
        """Batches of the size in the hyperparameters, which AutoBatch sets."""
        return DataLoader(self.samples, self.hparams["batch_size"], shuffle=True)

    def val_dataloader(self) -> DataLoader[Sequence[Tensor]]:
        """The digits that were kept back, in batches of the same size."""
        return DataLoader(self.kept_back, self.hparams["batch_size"])


def main(argv: Sequence[str] | None = None) -> Trainer:
    """Read the arguments, train, print, and return the trainer."""
    parser = argparse.ArgumentParser(description="Train on digits with Lightning and AutoBatch.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--devices", type=int, default=1, help="number of ranks")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--max-batch-size", type=int, default=64)
    parser.add_argument(
        "--effective-batch-size", type=int, help="samples per optimizer step of all ranks"
    )
    parser.add_argument("--memory-limit-gb", type=float)
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    seed_everything(0, verbose=False)
    autobatch = AutoBatch(
        target_memory_fraction=0.85,
        max_batch_size=options.max_batch_size,
        memory_limit_gb=options.memory_limit_gb,
        effective_batch_size=options.effective_batch_size,
    )
    trainer = Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        max_epochs=options.epochs,
        strategy="ddp" if options.devices > 1 else "auto",
        callbacks=[autobatch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits())
    if trainer.is_global_zero:
        result = autobatch.results["train"]
        print(
            f"batch size {autobatch.batch_size} (limited by {result.limited_by}): {len(result.trials)} trials"
        )
        print(f"accuracy {trainer.callback_metrics['accuracy']:.2f}, {trainer.global_step} steps")
    return trainer


if __name__ == "__main__":
    main()
