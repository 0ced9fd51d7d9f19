"""Models and how they are trained: what `compare.py` and `benchmarks/research/gpu_truth.py` measure."""

import dataclasses
from functools import partial

import timm
import torch
from torch import nn
from torch.nn import functional

from linnaeus.config.schema import DistConfig
from linnaeus.runtime.distributed import World
from linnaeus.training.sharding import shard

FORMATS = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "fused AdamW": partial(torch.optim.AdamW, fused=True),
}
FEATURES = ("channels-last", "checkpointing", "accumulation", "no-grad")


class Layer(nn.ModuleDict):
    """A layer of `Gpt`."""

    def __init__(self, width, heads):
        super().__init__(
            {
                "norm1": nn.LayerNorm(width),
                "qkv": nn.Linear(width, 3 * width),
                "out": nn.Linear(width, width),
                "norm2": nn.LayerNorm(width),
                "up": nn.Linear(width, 4 * width),
                "down": nn.Linear(4 * width, width),
            }
        )
        self.heads = heads

    def forward(self, z):
        q, k, v = (
            self["qkv"](self["norm1"](z)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        z = z + self["out"](y.transpose(1, 2).flatten(2))
        result = z + self["down"](functional.gelu(self["up"](self["norm2"](z))))
        return result


class Gpt(nn.Module):
    """A decoder of sequences of 512 tokens."""

    def __init__(self, width=384, depth=6, heads=6, words=8192):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x):
        z = self.words(x)
        for block in self.blocks:
            z = block(z)
        logits = self.head(self.norm(z))
        return logits


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, of timm or `gpt`, and how it is trained.

    One with shards is that of rank 0, inside `fake_job`; `bf16` is then the format of gathered parameters.
    """

    model: str
    format: str
    optimizer: str
    features: tuple[str, ...] = ()
    shards: int = 0

    def built(self):
        """The model, on the CPU."""
        torch.manual_seed(0)
        model = Gpt() if self.model == "gpt" else timm.create_model(self.model)
        if "checkpointing" in self.features:
            model.set_grad_checkpointing(True)
        return model.train()


class Training:
    """The training of a case on a device: `step(batch)` is what is searched, predicted and trained.

    Args:
        model: the case's, if it has been built before.
    """

    def __init__(self, case, device="cuda", model=None):
        self.case, self.device = case, device
        self.model = model or case.built()
        if case.shards:
            kind = "bf16" if case.format == "bf16" else "fp32"
            world = World(
                torch.device(device), world_size=case.shards, local_world_size=case.shards
            )
            config = DistConfig(SHARDING="full", PARAM_DTYPE=kind)
            shard(self.model, config, world, with_average=False)
        self.model.to(device)
        self._size = getattr(self.model, "default_cfg", {}).get("input_size")
        if "channels-last" in case.features:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.optimizer = OPTIMIZERS[case.optimizer](self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cuda", enabled=case.format == "fp16")

    @property
    def state(self):
        return self.model, self.optimizer, self.scaler

    def batch(self, size, device=None):
        with torch.device(device or self.device):
            if self._size is None:
                tokens = torch.zeros(size, 512, dtype=torch.long)
                return tokens, torch.zeros_like(tokens)
            images = torch.zeros(size, *self._size)
            if "channels-last" in self.case.features:
                images = images.to(memory_format=torch.channels_last)
            return images, torch.zeros(size, dtype=torch.long)

    def step(self, batch):
        is_gathered_in_it = self.case.shards and self.case.format == "bf16"
        dtype = None if is_gathered_in_it else FORMATS[self.case.format]
        for _ in range(2 if "accumulation" in self.case.features else 1):
            with torch.autocast("cuda", dtype, enabled=dtype is not None):
                if "no-grad" in self.case.features:
                    with torch.no_grad():
                        self.model(batch[0])
                    return
                loss = functional.cross_entropy(
                    self.model(batch[0]).flatten(0, -2), batch[1].flatten()
                )
            self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
