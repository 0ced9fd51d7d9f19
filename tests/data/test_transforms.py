import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import PIL
import pytest
import timm
import torch
from packaging.version import Version
from PIL import Image, ImageOps
from timm.data import create_transform, resolve_data_config
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from linnaeus.config.load import load_config
from linnaeus.config.schema import AugmentConfig, DataConfig, DatasetConfig, ModelConfig
from linnaeus.data.bundle import as_size
from linnaeus.data.transforms import (
    Normalise,
    Preprocessing,
    ResizeCenterCrop,
    ThroughPillow,
    build_transforms,
)
from linnaeus.models.preprocessing import with_preprocessing
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.rng import seed_generators

IMAGE = torch.randint(
    0, 256, (3, 40, 60), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
OFF = AugmentConfig(CROP_SCALE=[1.0, 1.0])


def transform(size=(16, 16), train=True, channels=3, **changes):
    for_training, for_validation = build_transforms(replace(OFF, **changes), size, channels)
    return for_training if train else for_validation.transform()


def results(pipeline, image=IMAGE, tries=20):
    seed_generators(0)
    return [pipeline(image) for _ in range(tries)]


def num_different(pipeline, image=IMAGE):
    return len({tuple(result.flatten().tolist()) for result in results(pipeline, image)})


@pytest.mark.parametrize(
    "changes",
    [
        {"HFLIP": 0.5},
        {"VFLIP": 0.5},
        {"BLUR": 0.5},
        {"ROTATION": 20.0},
        {"COLOR_JITTER": 0.4},
        {"POLICY": "randaugment"},
        {"POLICY": "augmix-m5-w3"},
        {"HUE": 0.3},
        {"GRAYSCALE": 0.5},
    ],
)
def test_each_augmentation_changes_training_and_not_validation(changes):
    for channels in (3,) if changes.keys() & {"HUE", "GRAYSCALE"} else (1, 3):
        image = IMAGE[:channels]
        train = transform(channels=channels, **changes)
        assert num_different(train, image) > 1
        assert num_different(transform(channels=channels, train=False, **changes), image) == 1
        for result in results(train, image):
            assert (result.shape, result.dtype) == ((channels, 16, 16), torch.uint8)


def test_an_error_of_a_policy_is_not_silent():
    policy = ThroughPillow(lambda image: image.convert("no mode of Pillow"))
    with pytest.raises(ValueError, match="mode"):
        policy(IMAGE)
    if Version(PIL.__version__) >= Version("13"):  # one of timm's operations without effect
        assert torch.equal(ThroughPillow(partial(ImageOps.posterize, bits=0))(IMAGE), IMAGE)


class Albumentation:
    """A transform with the calls of albumentations, which has generators of its own."""

    def __init__(self, size=None, tensor=False):
        self.size = size
        self.tensor = tensor
        self.set_random_seed(None)

    def set_random_seed(self, seed):
        self.random_generator = np.random.default_rng(seed)

    def __call__(self, *args, force_apply=False, **data):
        if args:
            raise KeyError("You have to pass data to augmentations as named arguments")
        image = data["image"]
        assert image.flags.c_contiguous
        drawn = self.random_generator.integers(0, 256, image.shape[2], dtype=np.uint8)
        image = (image ^ drawn)[:, : self.size]
        image = torch.from_numpy(image).permute(2, 0, 1) if self.tensor else image
        return {"image": image[..., 0] if image.shape[-1] == 1 else image}


def half(image):
    return image / 2


def noise(image):
    return image ^ np.random.randint(256)


V2 = "torchvision.transforms.v2"


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "node",
    [
        {"_target_": f"{V2}.RandomChoice", "transforms": [{"_target_": f"{V2}.RandomInvert"}]},
        {"_target_": f"{__name__}.Albumentation"},
        {"_target_": f"{__name__}.Albumentation", "tensor": True},
        {"_target_": "hydra.utils.get_method", "path": f"{__name__}.noise"},
    ],
)
def test_own_transforms_are_seeded_with_the_sample(node, channels):
    pipeline, image = transform(channels=channels, TRAIN=[node]), IMAGE[:channels]
    before = torch.get_rng_state()
    transform(channels=channels, TRAIN=[node])
    assert torch.equal(before, torch.get_rng_state())  # trying it draws nothing
    seen = []
    for seed in (1, 2, 3, 4, 5, 1):
        seed_generators(seed)
        seen.append(pipeline(image))
        assert (seen[-1].shape, seen[-1].dtype) == ((channels, 16, 16), torch.uint8)
    assert torch.equal(seen[0], seen[-1])
    assert not all(torch.equal(seen[0], each) for each in seen)


def test_own_transforms_get_pixels_as_albumentations_orders_them():
    image = torch.arange(48, dtype=torch.uint8).reshape(3, 4, 4)
    pipeline = transform((4, 4), TRAIN=[{"_target_": f"{__name__}.Albumentation"}])
    (found,) = results(pipeline, image, tries=1)
    drawn = found[:, 0, 0] ^ image[:, 0, 0]
    assert torch.equal(found, image ^ drawn[:, None, None])


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": f"{__name__}.Albumentation", "size": 8},  # another shape
        {"_target_": "hydra.utils.get_method", "path": f"{__name__}.half"},  # another type
        {"_target_": "builtins.dict"},  # not callable
    ],
)
def test_unusable_transforms_are_refused_before_training(node):
    with pytest.raises(ConfigError, match=r"DATA\.AUGMENT\.TRAIN\.1"):
        transform(TRAIN=[{"_target_": f"{V2}.RandomInvert"}, node])


@pytest.mark.parametrize("node", ["{size: 3}", "RandomInvert"])
def test_an_entry_that_names_no_transform_is_refused(node):
    with pytest.raises(ConfigError, match=r"DATA\.AUGMENT\.TRAIN"):
        load_config([f"DATA.AUGMENT.TRAIN=[{node}]"])


def test_normalisation_is_that_of_torchvision_bit_for_bit():
    """Of fractions too, which are not divided by 255 once more."""
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    for image in (IMAGE, IMAGE / 255, (IMAGE / 255).half()):
        fractions = functional.to_dtype(image, torch.float32, scale=True)
        expected = functional.normalize(fractions, mean, std)
        assert torch.equal(Normalise(mean, std)(image), expected)
        assert not torch.equal(Normalise(mean, mean)(image), expected)
        torch.testing.assert_close(expected, Normalise(mean, std)(IMAGE), rtol=0, atol=3e-3)


def test_statistics_of_colours_become_those_of_grey():
    """What Pillow's grey image of a colour has for a mean, by its own weights."""
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    found = build_transforms(replace(OFF, MEAN=mean, STD=std), (40, 60), 1)[1]
    colour = Image.new("RGB", (1, 1), tuple(round(255 * value) for value in mean))
    assert found.mean == pytest.approx([colour.convert("L").getpixel((0, 0)) / 255], abs=0.003)
    assert found.std == pytest.approx([0.2256], abs=0.0001)


def policy_of_timm(name):
    return create_transform(
        (3, 40, 60),
        is_training=True,
        auto_augment=name,
        color_jitter=None,
        interpolation="bilinear",
        mean=(0.5,) * 3,
        separate=True,
    )[1]


@pytest.mark.parametrize(
    ("name", "channels"),
    [("randaugment", 1), ("randaugment", 3), ("trivialaugment", 3), ("rand-m9-n3", 3), ("3a", 3)],
)
def test_policies_are_those_of_their_libraries_on_pillow_images(name, channels):
    own = {"randaugment": v2.RandAugment, "trivialaugment": v2.TrivialAugmentWide}
    theirs = own[name]() if name in own else policy_of_timm(name)
    ours, image = transform((40, 60), channels=channels, POLICY=name), IMAGE[:channels]
    changed = []
    for seed in range(12):
        seed_generators(seed)
        found = ours(image)
        seed_generators(seed)
        expected = functional.pil_to_tensor(theirs(functional.to_pil_image(image)))
        assert torch.equal(found, expected)
        changed.append(not torch.equal(found, image))
    assert sum(changed) > 4


def test_a_policy_that_nobody_knows_is_refused():
    with pytest.raises(ConfigError, match=r"DATA\.AUGMENT\.POLICY"):
        load_config(["DATA.AUGMENT.POLICY=rand-x"])
    with pytest.raises(ConfigError, match=r"DATA\.AUGMENT\.POLICY"):
        transform(POLICY="augmix-q3")


@pytest.mark.parametrize(
    "changes",
    [
        {"HFLIP": 0.5, "VFLIP": 0.5, "COLOR_JITTER": 0.4},
        {"HFLIP": 0.5, "POLICY": "rand-m9-inc1"},
        {"ROTATION": 20.0, "POLICY": "randaugment"},
        {"RESIZE": "letterbox", "HFLIP": 0.5},
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_pillow_images_are_augmented_as_tensors_are(changes, channels):
    size = (40, 60) if "RESIZE" not in changes else (60, 60)
    pipeline, image = transform(size, channels=channels, **changes), IMAGE[:channels]
    before = image.clone()
    pillow = functional.to_pil_image(image)
    found, expected = (results(pipeline, each) for each in (pillow, image))
    assert all(map(torch.equal, found, expected))
    assert not all(torch.equal(each, expected[0]) for each in expected)
    assert torch.equal(functional.pil_to_tensor(pillow), before)
    assert torch.equal(image, before)


def test_small_pillow_images_are_cropped_as_by_timm():
    ours = transform((24, 32), CROP_SCALE=[0.2, 0.9], CROP_RATIO=[0.5, 2.0], HFLIP=0.5)
    timms = RandomResizedCropAndInterpolation((24, 32), (0.2, 0.9), (0.5, 2.0), "bilinear")
    mirrored = 0
    for width in (90, 500):
        image = photograph(width, 60)
        for seed in range(8):
            seed_generators(seed)
            found = ours(image).int()
            seed_generators(seed)
            expected = functional.pil_to_tensor(timms(image)).int()
            near = [int((found - each).abs().max()) for each in (expected, expected.flip(-1))]
            assert min(near) <= (0 if width == 90 else 2)
            assert max(near) > 2, "a negative control"
            mirrored += near[1] < near[0]
    assert 0 < mirrored < 16


# Resizing.

WEIGHTS = (
    "resnet50.a1_in1k",
    "vit_base_patch16_224.augreg2_in21k_ft_in1k",
    "efficientnet_b0.ra_in1k",
    "resnet18.tv_in1k",
    "inception_v3.tf_in1k",
    "eva02_base_patch14_448.mim_in22k_ft_in22k_in1k",
    "vit_small_patch14_dinov2.lvd142m",
)


def photograph(width, height):
    """Smooth patches of colour."""
    patches = np.random.default_rng(width).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(patches).resize((width, height), Image.Resampling.BICUBIC)


def noise_image(width, height):
    """Shows the order of the passes: bicubic values that overshoot are cut off after each."""
    generator = np.random.default_rng(0)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("name", WEIGHTS)
def test_validation_sees_what_timm_shows_the_weights(name):
    """The source of the expected pictures is timm's own evaluation transform."""
    cfg = resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    timms = create_transform(**cfg, is_training=False)
    data, _ = with_preprocessing(
        DataConfig(DATASET=DatasetConfig(NAME="imagefolder")), ModelConfig(name, PRETRAINED=True)
    )
    own = build_transforms(data.AUGMENT, as_size(data.IMG_SIZE, (0, 0)), 3)[1]
    plain = build_transforms(AugmentConfig(), own.size, 3)[1]
    std = 255 * torch.tensor(cfg["std"]).view(3, 1, 1)
    for size in ((500, 375), (375, 500), (1024, 683), (300, 300), (900, 200)):
        image = photograph(*size)
        expected = timms(image) * std
        found, otherwise = (
            each.normalise()(each.transform()(image)) * std for each in (own, plain)
        )
        assert float((found - expected).abs().max()) <= 2.01
        assert float((found - expected).abs().mean()) <= 0.05
        assert float((otherwise - expected).abs().mean()) > 0.5 or own.crop_fraction == 1.0


@pytest.mark.parametrize("mode", ["crop", "squash", "letterbox"])
@pytest.mark.parametrize("size", [(224, 224), (160, 224)])
@pytest.mark.parametrize("fraction", [1.0, 0.95])
def test_each_mode_of_resizing_is_that_of_timm(mode, size, fraction):
    timms = create_transform(
        (3, *size),
        crop_pct=fraction,
        crop_mode={"crop": "center", "letterbox": "border"}.get(mode, mode),
        interpolation="bicubic",
        mean=(0.2, 0.4, 0.6),
        normalize=False,
    )
    own = ResizeCenterCrop(size, fraction, mode, "bicubic", (0.2, 0.4, 0.6))
    images = [photograph(*shape) for shape in ((500, 375), (375, 500), (60, 900), (31, 47))]
    # Before Pillow 13, its passes had another order.
    is_exact = Version(PIL.__version__) >= Version("13")
    if is_exact:
        images += [noise_image(*shape) for shape in itertools.product((40, 100, 320), repeat=2)]
    for image in images:
        difference = (own(functional.pil_to_tensor(image)).int() - timms(image).int()).abs()
        assert int(difference.max()) <= 2, image.size
        assert float(difference.float().mean()) <= 0.02 or not is_exact


def whole(image, side, fraction):
    """Resize all of the image, then crop."""
    target = math.floor(side / fraction)
    resized = [int(target * edge / min(image.shape[-2:])) for edge in image.shape[-2:]]
    image = functional.resize_image(image, resized, antialias=True)
    return functional.center_crop_image(image, [side, side])


def test_files_with_few_keys_are_resized_and_cropped():
    content = {"channels": 3, "size": [32, 32], "crop_fraction": 0.875}
    resize = Preprocessing.from_dict(content | {"mean": [0.5] * 3, "std": [0.5] * 3}).transform()
    image = photograph(90, 60)
    expected = whole(functional.pil_to_tensor(image), 32, 0.875)
    assert torch.equal(resize(image), expected)
    fractions = resize(functional.pil_to_tensor(image) / 255)
    torch.testing.assert_close(255 * fractions, expected.float(), rtol=0, atol=1.5)


class Largest(TorchDispatchMode):
    """Number of values of the largest tensor that torch makes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.numel = max(self.numel, made.numel())
        return made


def test_of_a_thin_image_only_what_is_seen_is_resized():
    """The image of 1 x 8000 pixels has less than 1 MB, and was 1.2 GB when it was resized as a whole."""
    thin = torch.zeros(3, 1, 8000, dtype=torch.uint8)
    thin[:, :, 4000:] = 200
    with Largest() as largest:
        found = ResizeCenterCrop((224, 224))(thin)
    assert largest.numel <= 2 * found.numel()
    assert (int(found.min()), int(found.max())) == (0, 200)
    assert math.isclose(float(found.float().mean()), 100, abs_tol=1)
    with Largest() as largest:
        whole(thin[:, :, 3950:4050], 224, 1.0)
    assert largest.numel > 2 * found.numel()


def test_training_crops_with_the_interpolation_of_validation():
    image = functional.pil_to_tensor(photograph(90, 60))
    for scale in ([0.3, 0.9], [1.0, 1.0]):
        first, second, same = (
            results(transform(CROP_SCALE=scale, INTERPOLATION=interpolation), image, 1)[0]
            for interpolation in ("bilinear", "bicubic", None)
        )
        assert not torch.equal(first, second)
        assert torch.equal(first, same)


@pytest.mark.parametrize("scale", [[0.08, 1.0], [0.3, 0.3]])
def test_the_size_to_decode_follows_from_the_crop(scale):
    pipeline = transform((48, 32), CROP_SCALE=scale)
    crop = pipeline.steps[0]
    for seed in range(20):
        seed_generators(seed)
        height, width = pipeline.min_size(3000, 4000)
        _, _, rows, columns = crop.draw(3000, 4000)
        assert rows * height / 3000 == pytest.approx(2 * 48)
        assert columns * width / 4000 == pytest.approx(2 * 32)
    assert pipeline.min_size(191, 4000) == (191, 4000), "no scale is small enough"
