"""Compare the images per second of our training loader with torchvision's and timm's, in one run.

    python benchmarks/loader.py

All three read the same generated JPEG files, of 500 x 375 pixels and then of 4000 x 3000 (12 megapixels), and
make normalised float32 batches on the CPU:

* ours: `build_data` and `build_loaders`, as a run uses them, with DATA.DECODE fast;
* torchvision's: `ImageFolder` with v2 transforms on Pillow images, torch's `DataLoader`, and `v2.MixUp` in
  its collate function, as in torchvision's guide;
* timm's: `create_dataset`, `create_loader` (with its prefetcher on the CPU) and `FastCollateMixup`.

They take turns of a few batches each in this process, without workers, so that the load of the machine
affects all alike; CPU time counts. The result is the median, over turns, of the ratio of speeds:
above 1, ours is faster. The goals: at least 1.3 for 500 pixels, and 3.5 for 12 megapixels.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import timm
import torch
import torchvision
from PIL import Image, ImageFilter
from timm.data import FastCollateMixup, create_dataset, create_loader
from torch.utils.data import DataLoader, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from linnaeus.config.load import load_config
from linnaeus.data.datasets import build_data
from linnaeus.data.loader import build_loaders
from linnaeus.runtime.distributed import World

NUM_CLASSES = 10
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
SCALE = (0.08, 1.0)
TIMM_POLICY = "rand-m9-p1.0"
"""Two operations for each image, as torchvision's RandAugment; timm's own default skips half of them."""

Loader = Iterator[Any]
Case = tuple[bool, bool]
"""Whether RandAugment is on, and Mixup."""
CASES: dict[str, Case] = {
    "crop and flip": (False, False),
    "with RandAugment": (True, False),
    "with Mixup": (False, True),
    "with both": (True, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=256, help="small files")
    parser.add_argument("--large", type=int, default=16, help="files of 12 megapixels")
    parser.add_argument("--turns", type=int, default=9, help="turns of each loader")
    parser.add_argument("--batches", type=int, default=2, help="batches in one turn")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--img-size", type=int, default=224)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"$ python benchmarks/loader.py {' '.join(sys.argv[1:])}".rstrip())
    print(
        f"torch {torch.__version__}, torchvision {torchvision.__version__}, timm {timm.__version__}, "
        f"Pillow {PIL.__version__}, Python {platform.python_version()}; {arguments.turns} turns of "
        f"{arguments.batches} batches of {arguments.img_size} pixels"
    )
    for scale, num_images in ((1, arguments.images), (8, arguments.large)):
        arguments.images = num_images
        arguments.batch_size = min(arguments.batch_size, num_images // 2)
        with tempfile.TemporaryDirectory() as folder:
            write_images(Path(folder) / "train", num_images, scale)
            write_images(Path(folder) / "val", NUM_CLASSES, 1)
            size = sum(file.stat().st_size for file in Path(folder, "train").rglob("*.jpg"))
            print(
                f"\n{500 * scale} x {375 * scale} pixels, {size / num_images / 2**20:.2f} MiB a file, "
                f"batches of {arguments.batch_size}\n"
                f"{'images/s':18s} {'ours':>8s} {'torchvision':>12s} {'timm':>8s}   "
                "ours/torchvision   ours/timm"
            )
            for name in CASES if scale == 1 else ("crop and flip",):
                report(name, measure(Path(folder), CASES[name], arguments), arguments)


def measure(folder: Path, case: Case, arguments: argparse.Namespace) -> list[list[float]]:
    """Seconds of each turn of each loader, in the order ours, torchvision's, timm's."""
    made = [make(folder, case, arguments) for make in (ours, torchvisions, timms)]
    check_alike([next(loader) for loader in made], mixes=case[1])
    turns = []
    for number in range(arguments.turns + 1):
        seconds = [0.0] * len(made)
        for position in range(len(made)):  # another one begins each turn
            which = (position + number) % len(made)
            seconds[which] = timed(made[which], arguments.batches)
        turns.append(seconds)
    for loader in made:
        loader.close()  # type: ignore[attr-defined]
    return turns[1:]  # the first warms up


def timed(loader: Loader, num_batches: int) -> float:
    started = time.process_time()
    for _ in range(num_batches):
        next(loader)
    return time.process_time() - started


def report(name: str, turns: list[list[float]], arguments: argparse.Namespace) -> None:
    images = arguments.batches * arguments.batch_size
    speeds = [images / statistics.median(turn[which] for turn in turns) for which in range(3)]
    ratios = [statistics.median(turn[which] / turn[0] for turn in turns) for which in (1, 2)]
    print(
        f"{name:18s} {speeds[0]:8.1f} {speeds[1]:12.1f} {speeds[2]:8.1f}   {ratios[0]:16.2f} "
        f"{ratios[1]:11.2f}",
        flush=True,
    )


def check_alike(batches: list[Any], *, mixes: bool) -> None:
    """All loaders make the same kind of batch."""
    for images, targets in batches:
        assert images.dtype == torch.float32
        assert images.shape == batches[0][0].shape
        assert abs(images.mean()) < 1
        assert targets.is_floating_point() == mixes


# --- the loaders, each without an end ---


def ours(folder: Path, case: Case, arguments: argparse.Namespace) -> Loader:
    policy, mixup = case
    size = arguments.batch_size
    config = load_config(
        [
            "DATA.DATASET.NAME=imagefolder",
            f"DATA.DATASET.ROOT={folder}",
            f"DATA.IMG_SIZE={arguments.img_size}",
            f"DATA.AUGMENT.CROP_SCALE={list(SCALE)}",
            "DATA.AUGMENT.HFLIP=0.5",
            f"DATA.AUGMENT.MEAN={MEAN}",
            f"DATA.AUGMENT.STD={STD}",
            f"DATA.AUGMENT.POLICY={'randaugment' if policy else 'none'}",
            f"DATA.AUGMENT.MIXUP={1.0 if mixup else 0.0}",
            "DATA.NUM_WORKERS=0",
        ]
    ).config
    data = build_data(config.DATA, seed=0)
    with build_loaders(
        data,
        config.DATA,
        World(torch.device("cpu")),
        sizes=lambda epoch, skip: iter([size] * (arguments.images // size)),
        batch_size_val=size,
        seed=0,
    ) as loaders:
        epoch = 0
        while True:
            loaders.train.set_epoch(epoch)
            yield from map(data.on_device, loaders.train)
            epoch += 1


def torchvisions(folder: Path, case: Case, arguments: argparse.Namespace) -> Loader:
    policy, mixup = case
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(arguments.img_size, SCALE, antialias=True),
            v2.RandomHorizontalFlip(0.5),
            *([v2.RandAugment()] if policy else []),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    mix = v2.MixUp(num_classes=NUM_CLASSES)

    def collate(samples: list[Any]) -> Any:
        return mix(*default_collate(samples)) if mixup else default_collate(samples)

    loader = DataLoader(
        ImageFolder(str(folder / "train"), transform),
        arguments.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
    )
    while True:
        yield from loader


def timms(folder: Path, case: Case, arguments: argparse.Namespace) -> Loader:
    policy, mixup = case
    collate: Callable[..., Any] | None = None
    if mixup:
        collate = FastCollateMixup(mixup_alpha=1.0, label_smoothing=0.0, num_classes=NUM_CLASSES)
    size = arguments.img_size
    loader = create_loader(
        create_dataset("", str(folder), split="train"),
        input_size=(3, size, size),
        batch_size=arguments.batch_size,
        is_training=True,
        use_prefetcher=True,
        scale=SCALE,
        hflip=0.5,
        color_jitter=None,
        auto_augment=TIMM_POLICY if policy else None,
        interpolation="bilinear",
        mean=MEAN,
        std=STD,
        num_workers=0,
        collate_fn=collate,
        device=torch.device("cpu"),
        pin_memory=False,
        persistent_workers=False,
    )
    while True:
        yield from loader


# --- the files ---


def write_images(folder: Path, num_images: int, scale: int) -> None:
    """JPEG files with the spectrum of photographs, where power falls with frequency.

    Large ones resolve half of their pixels to either side, as the color filter of a sensor does.
    """
    generator = np.random.default_rng(0)
    for number in range(num_images):
        path = folder / f"class{number % NUM_CLASSES}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        resolved = max(1, scale // 2)
        image = photo(generator, 500 * resolved, 375 * resolved)
        image = image.resize((500 * scale, 375 * scale), Image.Resampling.BICUBIC)
        image.save(path, quality=90)


def photo(generator: np.random.Generator, width: int, height: int) -> Image.Image:
    """Noise of the spectrum 1/f in each channel, and an edge."""
    frequencies = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :])
    frequencies[0, 0] = 1.0
    shared = generator.standard_normal((height, width))
    planes = []
    for _ in range(3):
        noise = 0.8 * shared + 0.2 * generator.standard_normal((height, width))
        plane = np.fft.irfft2(np.fft.rfft2(noise) / frequencies, s=(height, width))
        plane[:, : width // 3] += plane.std()
        planes.append(128 + 50 * (plane - plane.mean()) / plane.std())
    pixels = np.stack(planes, axis=-1).clip(0, 255).astype(np.uint8)
    return Image.fromarray(pixels).filter(ImageFilter.SMOOTH)


if __name__ == "__main__":
    main()
