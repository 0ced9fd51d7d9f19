"""A model that is slow until its folder holds a file named `quick`, so that a test can disturb its run."""

import time
from pathlib import Path

import torch


class Linear(torch.nn.Linear):
    """Logits for images of 3 × 8 × 8; each training step takes half a second."""

    def __init__(self, num_classes):
        super().__init__(3 * 8 * 8, num_classes)

    def forward(self, images):
        if self.training and not Path("quick").exists():
            time.sleep(0.5)
        return super().forward(images.flatten(1))
