"""Inputs of a batch plan besides the configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """Inputs of a batch plan that are not in the configuration.

    Attributes:
        max_micro_batch_size: most samples that one forward pass of a rank may take.
        world_size: number of ranks.
        num_samples: number of training samples.
        learning_rate: the optimizer's peak learning rate, before scaling.
        weight_decay: the optimizer's weight decay, before scaling.
        batchnorm: `none`, `local` (each rank normalises its own micro-batches) or `synchronised` over all
            ranks.
        pretrained: whether training starts from pretrained weights.
        pretrained_key: the key that names those weights.
        batch_size_key: the key that bounds the batch size; another one where AutoBatch chose it.
    """

    max_micro_batch_size: int
    world_size: int
    num_samples: int
    learning_rate: float
    weight_decay: float = 0.0
    batchnorm: str = "none"
    pretrained: bool = False
    pretrained_key: str = "MODEL.WEIGHTS"
    batch_size_key: str = "DATA.BATCH_SIZE"

    @property
    def epoch_samples_per_rank(self) -> int:
        """Samples that each rank sees in an epoch."""
        return self.num_samples // self.world_size
