from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from linnaeus.config.schema import AugmentConfig
from linnaeus.data.transforms import (
    Normalise,
    Pipeline,
    ThroughPillow,
    Transform,
    build_transforms,
)

IMAGE = torch.randint(
    0, 256, (3, 40, 60), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
OFF = AugmentConfig(CROP_SCALE=[1.0, 1.0])


def transform(
    size: tuple[int, int] = (16, 16), train: bool = True, channels: int = 3, **changes: Any
) -> Transform:
    for_training, for_validation = build_transforms(replace(OFF, **changes), size, channels)
    return for_training if train else for_validation.transform()


def results(
    pipeline: Transform, image: torch.Tensor = IMAGE, tries: int = 20
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [pipeline(image.clone()) for _ in range(tries)]


def num_different(pipeline: Transform, image: torch.Tensor = IMAGE) -> int:
    return len({tuple(result.flatten().tolist()) for result in results(pipeline, image)})


@pytest.mark.parametrize(
    "changes",
    [
        {"CROP_SCALE": [0.3, 0.9]},
        {"HFLIP": 0.5},
        {"ROTATION": 20.0},
        {"COLOR_JITTER": 0.4},
        {"POLICY": "randaugment"},
        {"POLICY": "trivialaugment"},
        {"ERASING": 0.5},
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_each_augmentation_changes_training_and_not_validation(
    changes: dict[str, Any], channels: int
) -> None:
    image = IMAGE[:channels]
    train = transform(channels=channels, **changes)
    assert num_different(train, image) > 1
    assert num_different(transform(channels=channels, train=False, **changes), image) == 1
    for result in results(train, image):
        assert result.shape == (channels, 16, 16)
        assert result.dtype == torch.float32
        assert result.isfinite().all()


def test_normalisation_is_that_of_torchvision_bit_for_bit() -> None:
    """Of fractions too, which are not divided by 255 once more."""
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    for image in (IMAGE, IMAGE / 255, (IMAGE / 255).half()):
        expected = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])(
            image
        )
        assert torch.equal(Normalise(mean, std)(image), expected)
        assert not torch.equal(Normalise(mean, mean)(image), expected)
        torch.testing.assert_close(expected, Normalise(mean, std)(IMAGE), rtol=0, atol=3e-3)


def test_statistics_of_colours_become_those_of_grey() -> None:
    """What Pillow's grey image of a colour has for a mean, by its own weights."""
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    grey = torch.full((1, 40, 60), 128, dtype=torch.uint8)
    colour = Image.new("RGB", (1, 1), tuple(round(255 * value) for value in mean))
    expected = (128 / 255 - colour.convert("L").getpixel((0, 0)) / 255) / 0.2256
    shown = transform((40, 60), channels=1, MEAN=mean, STD=std)(grey)
    assert shown.shape == (1, 40, 60)
    assert float(shown.mean()) == pytest.approx(expected, abs=0.01)
    assert float(shown.mean()) != pytest.approx((128 / 255 - 0.5) / 0.5, abs=0.01)


@pytest.mark.parametrize("kind", [v2.RandAugment, v2.TrivialAugmentWide])
@pytest.mark.parametrize("channels", [1, 3])
def test_policies_are_those_of_torchvision_on_pillow_images(kind: Any, channels: int) -> None:
    image = IMAGE[:channels]
    through, other = ThroughPillow(kind()), []
    for seed in range(12):
        torch.manual_seed(seed)
        found = through(image)
        torch.manual_seed(seed)
        expected = kind()(functional.to_pil_image(image))
        assert torch.equal(found, functional.pil_to_tensor(expected))
        assert found.is_contiguous()
        other.append(not torch.equal(found, image))
    assert sum(other) > 4


def test_the_image_that_comes_in_is_not_changed() -> None:
    before = IMAGE.clone()
    results(transform((40, 60), ERASING=1.0))
    assert torch.equal(IMAGE, before)


@pytest.mark.parametrize("scale", [[0.08, 1.0], [0.3, 0.3]])
def test_the_size_to_decode_follows_from_the_crop(scale: list[float]) -> None:
    pipeline = transform((48, 32), CROP_SCALE=scale)
    assert isinstance(pipeline, Pipeline)
    crop: Any = pipeline.pixels[0]
    sizes = set()
    for seed in range(20):
        torch.manual_seed(seed)
        height, width = pipeline.smallest(3000, 4000)
        taken = crop.make_params([torch.empty(3, 3000, 4000, device="meta")])
        assert taken["height"] * height / 3000 == pytest.approx(2 * 48)
        assert taken["width"] * width / 4000 == pytest.approx(2 * 32)
        sizes.add((height, width))
    assert len(sizes) == 20
    assert pipeline.smallest(191, 4000) == (191, 4000), "no scale is small enough"


def test_a_centre_crop_needs_twice_its_size() -> None:
    for fraction, size in ((1.0, (96, 64)), (0.5, (192, 128))):
        pipeline = transform((48, 32), train=False, CROP_FRACTION=fraction)
        assert isinstance(pipeline, Pipeline)
        assert pipeline.smallest(3000, 4000) == size
