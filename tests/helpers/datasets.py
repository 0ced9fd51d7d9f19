"""A user's datasets, right and wrong ones, for `_target_`, and image files."""

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset


class Samples(Dataset):
    """Tensors with whatever targets and attributes a test asks for."""

    def __init__(
        self,
        split,
        targets=None,
        length=6,
        shape=(3, 4, 4),
        **attributes,
    ):
        self.split = split
        self.targets = targets
        self.length = length
        self.shape = shape
        for name, value in attributes.items():
            setattr(self, name, value)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        target = index % 2 if self.targets is None else self.targets
        return torch.full(self.shape, float(index)), target


class TorchvisionStyle(Dataset):
    """Split chosen by `train`; Pillow images; class names in `classes`."""

    classes = ("zero", "one", ("two", "deux"))

    def __init__(self, root, train=True, mode="RGB", even=True):
        self.root, self.train, self.mode, self.even = root, train, mode, even

    def __len__(self):
        return 30 if self.train else 12

    def __getitem__(self, index):
        width = 20 if self.even else 20 + index
        return Image.new("RGB", (width, 10), (index * 8, 0, 0)).convert(self.mode), index % 3


class Stream(IterableDataset):
    def __init__(self, split): ...

    def __iter__(self):
        return iter(())


class Strange(Dataset):
    """Takes neither `split` nor `train`."""

    def __init__(self, root=""): ...


def failing_at_once(split):
    raise KeyError(f"no key for {split}")


def single_items(split):
    return [{"image": torch.zeros(3), "label": 1}] * 4


def different_classes(split):
    return Samples(split, classes=["a", "b"] if split == "train" else ["b", "a"])


def wrong_collate(split):
    return Samples(split, num_classes=2, collate_fn=lambda samples: [1, 2, 3])


def picture(seed=0, size=(24, 32), block=8):
    """Coloured blocks: not flat, and kind to lossy compression. The size is height and width."""
    shape = (size[0] // block, size[1] // block, 3)
    fields = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(fields.repeat(block, axis=0).repeat(block, axis=1))


def write_image(path, seed=0, mode="RGB", **options):
    """Write a picture in the format of the path's ending, and make the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(seed).convert(mode).save(path, **options)
    return path
