"""Every configuration key: one field each, with its default, meaning, unit and check.

Nodes and keys are upper case and nested. A default that follows another key is an interpolation, as in YAML.
`MODEL`, `DATA.DATASET`, `LOSS` and `OPTIMIZER` may be replaced by a node with `_target_`; they are typed
`Any` for that reason, and hold either the dataclass or a plain dict.
"""

# ruff: noqa: RUF009 (`key` is `dataclasses.field` with a doc and checks)
from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any

from linnaeus.autobatch.settings import SearchSettings

PLUGGABLE = ("MODEL", "DATA.DATASET", "LOSS", "OPTIMIZER")
"""The nodes that a `_target_` may replace."""

WEIGHT_FILES = (".json", ".yaml", ".yml")
"""Endings of the files that LOSS.CLASS_WEIGHTS takes."""

WEIGHTINGS = ("balanced", "effective")
"""Values of LOSS.CLASS_WEIGHTS that count the training samples of each class."""

MAX_PIXELS = 178_956_970
"""Pixels above which Pillow takes an image for a decompression bomb."""

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def key(
    default: Any,
    doc: str,
    *,
    unit: str | None = None,
    choices: tuple[str, ...] | None = None,
    check: Callable[[Any], str | None] | None = None,
    **bounds: float,
) -> Any:
    """Declare one configuration key.

    Args:
        default: the value, a zero-argument callable that makes it, or an interpolation.
        doc: one sentence for the reference and for `--help`.
        unit: unit of the value, when it has one.
        choices: the allowed strings; in a list, of each element.
        check: returns the mistake in a value, or None.
        bounds: `ge`, `gt`, `le` or `lt`; in a list, of each element. `None` is not checked.
    """
    metadata = {"doc": doc, "unit": unit, "choices": choices, "bounds": bounds, "check": check}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def _search_key(setting: str, doc: str | None = None, *, unit: str | None = None) -> Any:
    """Declare the key of one of `SearchSettings`, by default with its sentence."""
    declared = SearchSettings.__dataclass_fields__[setting]
    bounds = {
        name: bound for name, bound in declared.metadata["bounds"].items() if math.isfinite(bound)
    }
    choices = declared.metadata["choices"]
    return key(
        declared.default, doc or declared.metadata["doc"], unit=unit, choices=choices, **bounds
    )


def _image_size(value: Any) -> str | None:
    """An image size is a positive whole number, or [height, width]."""
    sides = value if isinstance(value, list) else [value]
    if value is None or (
        len(sides) in (1, 2) and all(type(side) is int and side > 0 for side in sides)
    ):
        return None
    return "must be a positive whole number or [height, width]"


def _run_name(value: str | None) -> str | None:
    """A run's folder lies inside the output folder, and logs can hold its name."""
    if value is None:
        return None
    path = PurePath(value)
    is_inside = path.parts and not path.is_absolute() and ".." not in path.parts
    if is_inside and value.isprintable() and value.strip() not in ("", "null"):
        return None
    return "must be the name of a folder inside EXPERIMENT.OUTPUT_DIR, in printable characters"


def _not_empty(value: list[Any] | None) -> str | None:
    return "must have at least one element" if value == [] else None


def _fit(value: list[str]) -> str | None:
    if value and len({*value}) == len(value) and "none" not in value[1:]:
        return None
    return "must have at least one element, each once, and `none` only as the first"


def _freeze(value: Any) -> str | None:
    patterns = value if isinstance(value, list) else [value]
    if patterns and all(isinstance(pattern, str) and pattern.strip() for pattern in patterns):
        return None
    return "must be none, backbone, or patterns of parameter names such as backbone.layer1.*"


def _separator(value: str | None) -> str | None:
    return "must have at least one character" if value == "" else None


def _colour(value: list[int]) -> str | None:
    return None if len(value) in (1, 3) else "must be [grey] or [red, green, blue]"


def _crop_scale(value: list[float] | None) -> str | None:
    if value is None or (len(value) == 2 and value[0] <= value[1]):
        return None
    return "must be [low, high] with low <= high"


def _policy(value: str) -> str | None:
    own = ("none", "randaugment", "trivialaugment")
    if value in own or re.fullmatch(r"(rand|augmix|(original|v0)r?)(-[a-z]+[\d.]+)*|3a", value):
        return None
    return f"must be {', '.join(own)} or a policy of timm, such as rand-m9-mstd0.5-inc1 or 3a"


def _transforms(value: list[Any]) -> str | None:
    names = [node.get("_target_") if isinstance(node, dict) else None for node in value]
    if all(isinstance(name, str) and all(map(str.isidentifier, name.split("."))) for name in names):
        return None
    return "each must be a mapping {_target_: dotted path of a transform, argument: value, ...}"


def _weights_source(value: str | None) -> str | None:
    if value in (None, *WEIGHTINGS) or PurePath(str(value)).suffix.lower() in WEIGHT_FILES:
        return None
    return f"must be {', '.join(WEIGHTINGS)} or a file with the ending {', '.join(WEIGHT_FILES)}"


def _pos_weight(value: Any) -> str | None:
    if value in (None, "balanced") or (type(value) in (int, float) and 0 < value < math.inf):
        return None
    return "must be `balanced` or a number above 0"


def _profile(value: list[int] | None) -> str | None:
    if value is None or (len(value) == 2 and value[0] <= value[1]):
        return None
    return "must be [first, last] with first <= last"


def _steps_or_fraction(value: float | None) -> str | None:
    if value is None or value < 1 or value.is_integer():
        return None
    return "must be a whole number of optimizer steps, or a fraction of an epoch below 1"


def _milestones(value: list[list[int]]) -> str | None:
    starts = [pair[0] for pair in value if pair]
    if all(len(pair) == 2 and pair[0] >= 1 and pair[1] >= 1 for pair in value) and all(
        a < b for a, b in pairwise(starts)
    ):
        return None
    return "must be pairs [at, size] of whole numbers >= 1, with each `at` above the one before it"


def _sides(value: list[list[int]]) -> str | None:
    sides = [pair[-1] for pair in value if pair]
    is_growing = _milestones(value) is None and sides == sorted({*sides})
    if not value or (is_growing and value[0][0] == 1):
        return None
    return "must be pairs [epoch, side]: the first epoch is 1, and epochs and sides grow"


@dataclass
class WandbConfig:
    """Weights & Biases."""

    ENABLED: bool = key(False, "record the run with Weights & Biases, as `wandb` in LOGGERS does")
    PROJECT: str = key("linnaeus", "project, or experiment of MLflow, in which the run is recorded")
    ENTITY: str | None = key(
        None, "user or team that owns the project; null is the account's default"
    )
    GROUP: str | None = key(None, "group of runs that this run belongs to; null is no group")
    TAGS: list[str] = key(list, "tags of the run")


@dataclass
class ExperimentConfig:
    """Name, place and identity of the run."""

    NAME: str | None = key(
        None,
        "name of the run, and of its folder in OUTPUT_DIR; null is the name of the last `--cfg` file without "
        "its ending, else of the manifest or the image folder, else of the dataset",
        check=_run_name,
    )
    OUTPUT_DIR: str = key("runs", "folder that holds the folders of all runs")
    SEED: int = key(0, "seed of initial weights, sample order and augmentation", ge=0, lt=2**63)
    DEVICE: str = key(
        "auto", "torch device such as `cpu`, `cuda` or `cuda:1`; `auto` prefers an accelerator"
    )
    MATMUL_PRECISION: str = key(
        "high",
        "precision of float32 matrix products on an accelerator, as for torch's "
        "`set_float32_matmul_precision`: `high` is TF32 on CUDA, `highest` is float32",
        choices=("highest", "high", "medium"),
    )
    CUDNN_BENCHMARK: bool = key(
        False, "let cuDNN time its convolutions for each new shape and take the fastest"
    )
    LOGGERS: list[str] = key(
        list,
        "loggers of the metrics, in addition to `metrics.jsonl`",
        choices=("wandb", "tensorboard", "mlflow"),
    )
    WANDB: WandbConfig = key(WandbConfig, "Weights & Biases")

    @property
    def folder(self) -> Path:
        """The run directory."""
        return Path(self.OUTPUT_DIR) / str(self.NAME)


@dataclass
class DatasetConfig:
    """Source of the samples and their labels."""

    NAME: str = key(
        "digits",
        "kind of dataset",
        choices=(
            "digits",
            "fashion_mnist",
            "synthetic",
            "imagefolder",
            "manifest",
            "huggingface",
            "webdataset",
        ),
    )
    ROOT: str | None = key(
        None,
        "folder of the images (`imagefolder`) or of tar files (`webdataset`), folder that relative paths "
        "start from (`manifest`; null: the manifest's own folder), folder of the four files of "
        "`fashion_mnist` (null: from Debian's package), or for `huggingface` a folder of "
        "`save_to_disk`, Parquet files, or a name on the hub, with a colon before the name of a subset",
    )
    TRAIN: str | None = key(
        None,
        "training folder or manifest file, relative to ROOT, split of `huggingface`, or pattern of tar files "
        "of `webdataset`; null is `train.csv`, or the folder `train` (`Training`, `train2017`, ...) where "
        "ROOT has splits, else ROOT itself",
    )
    VAL: str | None = key(
        None,
        "as TRAIN, for validation; null is `val` or `val.csv` where it exists, else a test split, else "
        "samples are held out of the training data",
    )
    TEST: str | None = key(
        None,
        "as TRAIN, for the test split, on which the best checkpoint is evaluated at the end; null is `test` "
        "or `test.csv` if it exists beside a validation split",
    )
    SPLIT_COLUMN: str | None = key(
        None,
        "manifest column with the split of each row, or with its fold if FOLD is set; null is a "
        "column such as `split`, `subset` or `is_valid` whose values are splits",
    )
    ALLOW_COARSE: bool | None = key(
        None,
        "images in a coarser folder than others (`imagefolder`) have unknown finer levels; False refuses "
        "them, null refuses a level that most images lack",
    )
    VAL_FRACTION: float = key(
        0.2, "fraction held out if the data has no validation split", gt=0, lt=1
    )
    GROUP_COLUMN: str | None = key(
        None,
        "manifest column of groups, such as locations or individuals; each group is held out as a whole",
    )
    FOLD: int | None = key(
        None,
        "fold of cross-validation that is held out, 0 to NUM_FOLDS - 1, or the number in the column of folds "
        "that SPLIT_COLUMN names; null holds out VAL_FRACTION",
        ge=0,
    )
    NUM_FOLDS: int = key(5, "folds of the cross-validation that FOLD counts", ge=2)
    IMAGE_COLUMN: str | None = key(
        None,
        "column that holds the image paths, or their names without the ending; null is the first column of "
        "images (`huggingface`), or `image`, or else the first one with a usual name such as `path`, "
        "`filename`, `image_id` or `id`",
    )
    LEVELS: list[str] | None = key(
        None,
        "names of the taxonomy's levels, coarse to fine; null takes them from the data",
        check=_not_empty,
    )
    LABEL_SEPARATOR: str | None = key(
        None,
        "separator of the names in a cell of a manifest where an image has several labels, "
        "such as `;`; null is one label for each image and level",
        check=_separator,
    )
    CHANNELS: int = key(
        3,
        "channels of an image; files are converted to 1 (grey) or 3 (RGB), and need any other number "
        "themselves",
        gt=0,
    )
    NUM_CLASSES: list[int] = key(
        lambda: [4, 16],
        "classes per level of `synthetic`, coarse to fine",
        ge=2,
        check=_not_empty,
    )
    NUM_SAMPLES: int = key(1024, "training samples of `synthetic`", gt=0)
    NUM_SAMPLES_VAL: int = key(256, "validation samples of `synthetic`", gt=0)
    NOISE: float = key(
        64.0, "standard deviation of the noise of `synthetic`, on the 0-255 scale", ge=0
    )
    UNKNOWN_FRACTION: float = key(
        0.0,
        "fraction of the training samples of `digits`, `fashion_mnist` and `synthetic` whose label is "
        "known down to a random level above the finest only",
        ge=0,
        lt=1,
    )


IMAGE_FILES = ("imagefolder", "manifest", "huggingface", "webdataset")
"""Kinds of datasets that are photographs more often than not."""
DATASET_KEYS = {
    "ROOT": (*IMAGE_FILES, "fashion_mnist"),
    **dict.fromkeys(("TRAIN", "VAL", "TEST", "FOLD", "NUM_FOLDS"), IMAGE_FILES),
    "VAL_FRACTION": (*IMAGE_FILES, "digits"),
    "ALLOW_COARSE": ("imagefolder",),
    **dict.fromkeys(
        ("SPLIT_COLUMN", "GROUP_COLUMN", "IMAGE_COLUMN", "LABEL_SEPARATOR"), IMAGE_FILES[1:]
    ),
    "CHANNELS": (*IMAGE_FILES, "synthetic"),
    **dict.fromkeys(("NUM_CLASSES", "NUM_SAMPLES", "NUM_SAMPLES_VAL", "NOISE"), ("synthetic",)),
    "UNKNOWN_FRACTION": ("digits", "fashion_mnist", "synthetic"),
}
"""The kinds of dataset that read a key; all read the others."""


@dataclass
class AugmentConfig:
    """Training augmentation, and how both splits are resized and normalized (torchvision v2)."""

    CROP_SCALE: list[float] | None = key(
        None,
        "area of a random crop as a fraction of the image's, [low, high]; [1, 1] is a center crop; null is "
        "[0.35, 1] for image files, else [0.8, 1]",
        gt=0,
        le=1,
        check=_crop_scale,
    )
    CROP_RATIO: list[float] = key(
        lambda: [0.75, 4 / 3],
        "width over height of a random crop, [low, high]",
        gt=0,
        check=_crop_scale,
    )
    HFLIP: float | None = key(
        None,
        "probability of a horizontal flip; null is 0.5 for image files, else 0",
        ge=0,
        le=1,
    )
    VFLIP: float = key(0.0, "probability of a vertical flip", ge=0, le=1)
    ROTATION: float = key(
        0.0, "largest random rotation to either side", unit="degrees", ge=0, le=180
    )
    COLOR_JITTER: float = key(
        0.0, "strength of random changes of brightness, contrast and saturation", ge=0
    )
    HUE: float = key(0.0, "strength of random changes of hue, in turns", ge=0, le=0.5)
    GRAYSCALE: float = key(0.0, "probability that the colors become gray", ge=0, le=1)
    BLUR: float = key(
        0.0, "probability of a Gaussian blur, with a deviation of 0.1 to 2 pixels", ge=0, le=1
    )
    POLICY: str = key(
        "none",
        "`randaugment` or `trivialaugment` of torchvision, or a policy of timm, such as "
        "`rand-m9-mstd0.5-inc1`, `augmix-m3-w3`, `original` or `3a`",
        check=_policy,
    )
    ERASING: float = key(0.0, "probability that a random rectangle is erased", ge=0, le=1)
    ERASING_MODE: str = key(
        "const",
        "fill of an erased rectangle: MEAN (`const`), one random color (`rand`) or noise (`pixel`)",
        choices=("const", "rand", "pixel"),
    )
    ERASING_COUNT: int = key(1, "largest number of erased rectangles in an image", ge=1)
    TRAIN: list[Any] = key(
        list,
        "your own transforms, after the others, on uint8 [channels, height, width]: `_target_` nodes of "
        "torchvision v2, of albumentations, or of a callable from a tensor to a tensor",
        check=_transforms,
    )
    REPEATS: int = key(
        1,
        "times that a sample occurs in an epoch, with new augmentation each time; an epoch keeps its length "
        "and has that part of the samples",
        ge=1,
    )
    MIXUP: float = key(
        0.0,
        "alpha of Mixup, which blends pairs of images of a micro-batch; 0 is off. Where CUTMIX is on "
        "too, each batch takes one of both at random",
        ge=0,
    )
    CUTMIX: float = key(
        0.0, "alpha of CutMix, which pastes a rectangle of another image; 0 is off", ge=0
    )
    MIX_PROB: float = key(1.0, "probability that a batch is mixed", ge=0, le=1)
    MIX_SWITCH: float = key(
        0.5, "where MIXUP and CUTMIX are on: probability of CUTMIX, for a mixed batch", ge=0, le=1
    )
    CUTMIX_MINMAX: list[float] | None = key(
        None,
        "sides of CutMix's rectangle as fractions of the image's, [low, high]; null draws its area with the "
        "alpha CUTMIX",
        ge=0,
        le=1,
        check=_crop_scale,
    )
    MIX_OFF_EPOCHS: int = key(0, "last epochs, without MIXUP and CUTMIX", unit="epochs", ge=0)
    INTERPOLATION: str | None = key(
        None,
        "how images are resized; null takes the weights' own, else bilinear",
        choices=("bilinear", "bicubic"),
    )
    CROP_FRACTION: float | None = key(
        None,
        "fraction of the side that validation's center crop keeps; null takes the weights' own, else 1",
        gt=0,
        le=1,
    )
    RESIZE: str | None = key(
        None,
        "validation's images: `crop` keeps their aspect ratio and cuts the longer side, `squash` gives "
        "it up, `letterbox` keeps it and pads with MEAN; null is as the weights were trained, else crop",
        choices=("crop", "squash", "letterbox"),
    )
    MEAN: list[float] | None = key(
        None,
        "mean of each channel, on the 0-1 scale; null takes the pretrained weights' own, else 0.5 for "
        "each; for grey images, three values here and in STD become one",
    )
    STD: list[float] | None = key(
        None, "standard deviation of each channel; null as for MEAN", gt=0
    )


@dataclass
class AutoBatchConfig:
    """The search for the largest memory-safe batch size."""

    ENABLED: bool = key(
        False, "search for the training batch size, which replaces `DATA.BATCH_SIZE`"
    )
    ENABLED_VAL: bool = key(
        "${DATA.AUTOBATCH.ENABLED}", "the same for validation, `DATA.BATCH_SIZE_VAL`"
    )
    TARGET_MEMORY_FRACTION: float = _search_key("target_memory_fraction")
    TARGET_MEMORY_FRACTION_VAL: float = key(
        "${DATA.AUTOBATCH.TARGET_MEMORY_FRACTION}",
        "TARGET_MEMORY_FRACTION of validation",
        gt=0,
        le=1,
    )
    MIN_BATCH_SIZE: int = _search_key("min_batch_size")
    MIN_BATCH_SIZE_VAL: int = key(
        "${DATA.AUTOBATCH.MIN_BATCH_SIZE}", "MIN_BATCH_SIZE of validation", ge=1
    )
    MAX_BATCH_SIZE: int | None = _search_key(
        "max_batch_size", "largest size; null: as data and memory allow"
    )
    MAX_BATCH_SIZE_VAL: int | None = key(
        "${DATA.AUTOBATCH.MAX_BATCH_SIZE} * 2", "MAX_BATCH_SIZE of validation", ge=1
    )
    MIN_STEPS_PER_EPOCH: int = key(
        10,
        "optimizer steps that an epoch keeps at least, which bounds the training size; MIN_BATCH_SIZE wins "
        "over it, and TRAIN.EFFECTIVE_BATCH_SIZE and TRAIN.BATCH_SCHEDULE set the steps instead; 1 is no "
        "bound",
        ge=1,
    )
    START: int | None = _search_key(
        "start",
        "size to try first, such as an earlier result; null: in a sweep the size of its newest run",
    )
    START_VAL: int | None = _search_key("start", "START of validation")
    STEPS_PER_TRIAL: int = _search_key("steps_per_trial")
    STEPS_PER_TRIAL_VAL: int = key(
        "${DATA.AUTOBATCH.STEPS_PER_TRIAL}", "validation batches per trial", ge=1
    )
    LOG_LEVEL: str = key(
        "INFO",
        "level of the `linnaeus.autobatch` logger during a search: INFO shows each trial, WARNING "
        "none",
        choices=_LOG_LEVELS,
    )
    LOG_LEVEL_VAL: str = key(
        "${DATA.AUTOBATCH.LOG_LEVEL}", "LOG_LEVEL of validation", choices=_LOG_LEVELS
    )
    OBJECTIVE: str = _search_key("objective")
    STRATEGY: str = _search_key("strategy")
    TOLERANCE: float = _search_key("tolerance")
    MULTIPLE_OF: int = _search_key("multiple_of")
    REPEATS: int = _search_key("repeats")
    MEMORY_LIMIT_GB: float | None = _search_key(
        "memory_limit_gb",
        "each rank may hold TARGET_MEMORY_FRACTION of this at most, regardless of others",
        unit="GiB",
    )
    MAX_TRIALS: int = _search_key("max_trials")
    TIMEOUT_MINUTES: float = _search_key("timeout_minutes", unit="minutes")
    FIT: list[str] = key(
        lambda: ["none"],
        "remedies to switch on in turn until the wanted training size fits: `none`, "
        "`checkpointing` (TRAIN.GRADIENT_CHECKPOINTING True), `shard` (DIST.SHARDING full)",
        choices=("none", "checkpointing", "shard"),
        check=_fit,
    )
    NUM_SPEC_SAMPLES: int = key(
        32, "samples read to find the largest shape, which trials use", ge=1
    )


@dataclass
class DataConfig:
    """Datasets, loading and batch sizes."""

    DATASET: Any = key(DatasetConfig, "the dataset, or a `_target_` node")
    BATCH_SIZE: int = key(
        64,
        "samples of a training micro-batch, per rank; where TRAIN.EFFECTIVE_BATCH_SIZE or "
        "TRAIN.BATCH_SCHEDULE is set, the upper bound of the micro-batch size",
        ge=1,
    )
    BATCH_SIZE_VAL: int = key("${DATA.BATCH_SIZE}", "samples of a validation batch, per rank", ge=1)
    IMG_SIZE: Any = key(
        None,
        "side of a square image, or [height, width]; null takes the weights' own, else the dataset's own "
        "(224 for files)",
        unit="pixels",
        check=_image_size,
    )
    IMG_SIZE_SCHEDULE: list[list[int]] = key(
        list,
        "pairs [epoch, side]: training images are squares of this side from this epoch on, such as "
        "[[1, 128], [20, 176], [28, 224]]; the first epoch must be 1; IMG_SIZE is the last side; empty: "
        "IMG_SIZE throughout",
        unit="pixels",
        check=_sides,
    )
    NUM_WORKERS: int | None = key(
        None,
        "loader processes per rank; 0 loads in the rank itself; null is up to 8, "
        "one for each CPU core, for image files and `_target_` datasets, and 0 for data in memory",
        ge=0,
    )
    PREFETCH_FACTOR: int = key(2, "batches that each loader process prepares ahead", ge=1)
    PIN_MEMORY: bool = key(
        True, "put batches into page-locked host memory, for faster copies (CUDA only)"
    )
    ON_BAD_IMAGE: str = key(
        "raise",
        "a damaged or missing image is an error (`raise`), or is left out after a check of all "
        "files (`skip`)",
        choices=("raise", "skip"),
    )
    DECODE: str = key(
        "fast",
        "`fast` decodes a JPEG file at the smallest scale, down to 1/8, that keeps twice the size of the "
        "model's input; `exact` decodes all pixels",
        choices=("fast", "exact"),
    )
    BACKGROUND: list[int] = key(
        lambda: [255, 255, 255],
        "color behind transparent pixels, [red, green, blue] or [grey]",
        ge=0,
        le=255,
        check=_colour,
    )
    BIT_DEPTH: int | None = key(
        None,
        "significant bits of integers wider than 8 bits; null measures the training files, and is 16 for "
        "the 16-bit images of your own dataset",
        ge=8,
        le=16,
    )
    MAX_PIXELS: int = key(
        MAX_PIXELS, "pixels of the largest image that is read; a larger one is damaged", gt=0
    )
    SAMPLER: str = key(
        "shuffle",
        "training samples of an epoch: `shuffle` takes each once; `balanced` draws as many, with "
        "replacement, each class of the finest level equally often; `sqrt` draws it in proportion to the "
        "square root of its samples",
        choices=("shuffle", "balanced", "sqrt"),
    )
    LIMIT_TRAIN_SAMPLES: int | None = key(
        None,
        "train on this number of random samples, the same in every epoch; null takes all",
        ge=1,
    )
    LIMIT_VAL_SAMPLES: int | None = key(
        None, "validate on this number of random samples, always the same; null takes all", ge=1
    )
    AUGMENT: AugmentConfig = key(AugmentConfig, "augmentation and preprocessing")
    AUTOBATCH: AutoBatchConfig = key(AutoBatchConfig, "the batch-size search")


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA) on a frozen backbone. Adapters and heads train."""

    RANK: int | None = key(None, "rank of the adapters; null trains without them", ge=1)
    ALPHA: float | None = key(None, "adapters are scaled by ALPHA / RANK; null is RANK", gt=0)
    DROPOUT: float = key(0.0, "probability of dropout before an adapter", ge=0, lt=1)
    TARGETS: list[str] = key(
        lambda: ["qkv", "proj"],
        "linear layers of the backbone that get one: ends of their names, or "
        "patterns such as `blocks.*.mlp.fc?`; the default is the attention of timm's ViTs",
        check=_not_empty,
    )


@dataclass
class ModelConfig:
    """The network: a timm backbone with a head for all levels of the taxonomy."""

    NAME: str = key(
        "resnet10t",
        "name of any timm model, with the tag of its weights or not; `hf-hub:OWNER/MODEL` is "
        "one of the Hugging Face hub, `local-dir:FOLDER` one in a folder",
    )
    PRETRAINED: bool = key(False, "start from NAME's weights in timm, on the hub or in its folder")
    HEAD: str = key(
        "independent",
        "`independent` has a linear layer for each level; `marginal` has one over "
        "the finest classes, and the probability of a coarser class is the sum over the classes below it",
        choices=("independent", "marginal"),
    )
    WEIGHTS: str | None = key(
        None,
        "start from the weights of another run (its folder), of one of its checkpoints, or of a file "
        "(.pt, .pth or .safetensors); null is random weights, unless PRETRAINED",
    )
    TEACHER: str | None = key(
        None,
        "distill from this frozen model: a run (its folder, a checkpoint or an export), or a timm model "
        "with weights; see LOSS.DISTILL_WEIGHT",
    )
    FREEZE: Any = key(
        "none",
        "frozen parameters: `none`, `backbone`, or patterns of parameter names such as "
        "`backbone.layer1.*` (one, or a list)",
        check=_freeze,
    )
    LORA: LoraConfig = key(LoraConfig, "low-rank adapters on a frozen backbone")
    DROP_RATE: float = key(0.0, "probability of dropout before the heads", ge=0, lt=1)
    DROP_PATH_RATE: float = key(
        0.0, "probability of stochastic depth, for models that have it", ge=0, lt=1
    )
    KWARGS: dict[str, Any] = key(dict, "further arguments of `timm.create_model`")


@dataclass
class LossConfig:
    """The loss of each level of the taxonomy, averaged over the samples; an unknown label adds 0."""

    NAME: str = key(
        "cross_entropy",
        "kind of loss: `cross_entropy`, `bce` (binary cross-entropy, a mean over the "
        "classes), `focal` (of the softmax's probabilities), or for several labels per image `asymmetric`",
        choices=("cross_entropy", "bce", "focal", "asymmetric"),
    )
    LABEL_SMOOTHING: float = key(0.0, "label smoothing", ge=0, lt=1)
    FOCAL_GAMMA: float = key(2.0, "exponent of `focal`; 0 is cross-entropy", ge=0)
    CLASS_WEIGHTS: str | None = key(
        None,
        "`balanced` weights each class by the inverse of its training samples, `effective` by the inverse of "
        "their effective number; a file (.json, .yaml) gives weights by class name; null is 1 each",
        check=_weights_source,
    )
    EFFECTIVE_BETA: float = key(
        0.999, "beta of `effective`; 0 weights all alike, near 1 it is `balanced`", ge=0, lt=1
    )
    LOGIT_ADJUSTMENT: float = key(
        0.0,
        "multiple of the logarithm of a class's share of the training samples, which `cross_entropy` and "
        "`focal` add to its logit; 1 is balanced softmax",
        ge=0,
    )
    POS_WEIGHT: Any = key(
        None,
        "weight of the present class in `bce`: a number, or `balanced` for absent over present labels of "
        "each class; null is 1",
        check=_pos_weight,
    )
    LEVEL_WEIGHTS: list[float] | None = key(
        None, "weight of each level, coarse to fine; null is 1 each", ge=0
    )
    DISTILL_WEIGHT: float = key(
        0.5, "share of the teacher's soft targets in the loss, with MODEL.TEACHER", ge=0, le=1
    )
    DISTILL_TEMPERATURE: float = key(2.0, "temperature of the soft targets", gt=0)


@dataclass
class OptimizerConfig:
    """A timm optimizer."""

    NAME: str = key("adamw", "any name that timm's optimizer factory knows")
    LR: float = key(2e-3, "peak learning rate, before LR_SCALING", gt=0)
    WEIGHT_DECAY: float = key(0.05, "weight decay; biases and norms have none", ge=0)
    LR_SCALING: str = key(
        "none",
        "LR grows with the effective batch size over BASE_BATCH_SIZE: `linear` (SGD), `sqrt` (Adam) "
        "or `none`",
        choices=("none", "linear", "sqrt"),
    )
    WEIGHT_DECAY_SCALING: str = key(
        "none",
        "WEIGHT_DECAY grows with the square root of the effective batch size over BASE_BATCH_SIZE, "
        "or not",
        choices=("none", "sqrt"),
    )
    BASE_BATCH_SIZE: int = key(
        256, "effective batch size of LR and WEIGHT_DECAY", unit="samples", ge=1
    )
    LAYER_DECAY: float | None = key(
        None,
        "learning rate of a layer as a fraction of the next layer's learning rate; the heads have LR; "
        "null is the same learning rate for all",
        gt=0,
        le=1,
    )
    HEAD_LR_SCALE: float = key(1.0, "learning rate of the heads as a multiple of LR", gt=0)
    KWARGS: dict[str, Any] = key(dict, "further arguments of the optimizer")


SCHEDULES = {
    "cosine": ("MIN_LR_FRACTION",),
    "linear": ("MIN_LR_FRACTION",),
    "constant": (),
    "step": ("STEP_EPOCHS", "GAMMA"),
    "multistep": ("MILESTONES", "GAMMA"),
    "plateau": ("PATIENCE", "GAMMA", "MIN_LR_FRACTION"),
    "wsd": ("DECAY_EPOCHS", "MIN_LR_FRACTION"),
    "onecycle": ("START_LR_FRACTION", "MIN_LR_FRACTION"),
}
"""The schedules, and the keys of SCHEDULE that each reads besides NAME and the warm-up."""


@dataclass
class ScheduleConfig:
    """Learning rate over optimizer steps: warm-up, then a decay."""

    NAME: str = key("cosine", "decay after the warm-up", choices=tuple(SCHEDULES))
    WARMUP_EPOCHS: float | None = key(
        None,
        "length of the linear warm-up; null is none, unless OPTIMIZER.LR_SCALING needs one. "
        "`onecycle` rises along a cosine, and null is 30 % of all optimizer steps",
        unit="epochs",
        ge=0,
    )
    WARMUP_FRACTION: float | None = key(
        None,
        "the warm-up as a fraction of all optimizer steps; overrides WARMUP_EPOCHS",
        ge=0,
        le=1,
    )
    WARMUP_STEPS: int | None = key(
        None, "warm-up in optimizer steps; overrides the two above", ge=0
    )
    MIN_LR_FRACTION: float = key(
        0.01,
        "final learning rate, as a fraction of the peak; with `plateau` the lowest one",
        ge=0,
        le=1,
    )
    STEP_EPOCHS: int | None = key(
        None,
        "`step`: epochs between two drops; null is a third of TRAIN.EPOCHS, rounded up",
        unit="epochs",
        ge=1,
    )
    MILESTONES: list[int] | None = key(
        None,
        "`multistep`: finished epochs at which the learning rate drops; null is half and three quarters of "
        "TRAIN.EPOCHS, rounded up",
        unit="epochs",
        ge=1,
        check=_not_empty,
    )
    GAMMA: float = key(0.1, "`step`, `multistep`, `plateau`: factor of each drop", gt=0, lt=1)
    PATIENCE: int = key(
        5,
        "`plateau`: validations without improvement that are tolerated; the next one lowers "
        "the learning rate. "
        "TRAIN.EARLY_STOPPING sets metric and MIN_DELTA",
        unit="validations",
        ge=0,
    )
    DECAY_EPOCHS: float | None = key(
        None,
        "`wsd`: length of the decay at the end; null is a fifth of the run after the warm-up",
        unit="epochs",
        gt=0,
    )
    START_LR_FRACTION: float = key(
        0.04, "`onecycle`: learning rate of the first step, as a fraction of the peak", gt=0, le=1
    )


@dataclass
class EmaConfig:
    """Average of the weights: exponential, or over the last epochs."""

    ENABLED: bool = key(False, "keep an average of the weights, and validate with it")
    DECAY: float = key(
        0.9998, "fraction of the average that is kept at each optimizer step", gt=0, lt=1
    )
    SWA_EPOCHS: int | None = key(
        None,
        "stochastic weight averaging: average the steps of this number of last epochs equally, and keep the "
        "learning rate at SCHEDULE.MIN_LR_FRACTION in them; null is the exponential average",
        ge=1,
    )
    VALIDATE_RAW: bool = key(
        False, "validate the weights themselves too; the names of these metrics begin with `raw/`"
    )


@dataclass
class BatchScheduleConfig:
    """An effective batch size that changes during training."""

    NAME: str = key(
        "constant",
        "how the effective batch size goes from FIRST to TRAIN.EFFECTIVE_BATCH_SIZE, or to the largest "
        "that fits; `milestones` takes its sizes from MILESTONES",
        choices=("constant", "linear", "exponential", "milestones"),
    )
    FIRST: int | None = key(None, "effective batch size at the start", unit="samples", ge=1)
    UNIT: str = key("epochs", "unit of LENGTH and MILESTONES", choices=("epochs", "steps"))
    LENGTH: int | None = key(
        None,
        "epochs or optimizer steps until the last size is reached; null reaches it in the last epoch",
        ge=1,
    )
    MILESTONES: list[list[int]] = key(
        list,
        "pairs of [epoch or step from 0, effective batch size from there on], such as [[30, 512]]",
        check=_milestones,
    )


@dataclass
class EarlyStoppingConfig:
    """The end of a run whose validation no longer improves."""

    PATIENCE: int | None = key(
        None,
        "validations without an improvement after which the run ends; null trains all epochs",
        unit="validations",
        ge=1,
    )
    METRIC: str | None = key(
        None,
        "validation metric that must improve, such as `loss`; `plateau` watches it too; null "
        "is BEST_METRIC",
    )
    MIN_DELTA: float = key(0.0, "an improvement must be larger than this", ge=0)


@dataclass
class TrainConfig:
    """The training loop and the training step."""

    EPOCHS: int = key(12, "passes over the training data", ge=1)
    MAX_STEPS: int | None = key(
        None,
        "optimizer steps of the whole run, instead of EPOCHS; SCHEDULE ends with them; null trains EPOCHS",
        ge=1,
    )
    OVERFIT_BATCHES: int | None = key(
        None,
        "train on this number of effective batches, the same in every epoch, and validate on them without "
        "augmentation; null takes all data",
        ge=1,
    )
    EARLY_STOPPING: EarlyStoppingConfig = key(EarlyStoppingConfig, "end before the last epoch")
    UNFREEZE_EPOCH: int | None = key(
        None,
        "first epoch, counted from 1, in which the parameters frozen by MODEL.FREEZE train too; null "
        "keeps them frozen",
        ge=1,
    )
    EFFECTIVE_BATCH_SIZE: int | None = key(
        None,
        "samples per optimizer step over all ranks, from which micro-batch size and accumulation "
        "steps follow; null is DATA.BATCH_SIZE x ranks x ACCUMULATION_STEPS",
        unit="samples",
        ge=1,
    )
    ACCUMULATION_STEPS: int = key(
        1,
        "micro-batches per optimizer step, unless EFFECTIVE_BATCH_SIZE or BATCH_SCHEDULE is set",
        ge=1,
    )
    BATCH_SCHEDULE: BatchScheduleConfig = key(
        BatchScheduleConfig, "effective batch size that changes"
    )
    AMP: str = key("off", "type of automatic mixed precision", choices=("off", "bf16", "fp16"))
    CLIP_GRAD_NORM: float | None = key(
        1.0, "largest norm of the whole gradient; null does not clip", gt=0
    )
    EMA: EmaConfig = key(EmaConfig, "average of the weights")
    GRADIENT_CHECKPOINTING: bool = key(
        False, "recompute activations in the backward pass to save memory"
    )
    CHANNELS_LAST: bool = key(False, "use the channels-last memory format for model and images")
    COMPILE: bool = key(False, "compile the model with torch.compile")
    COMPILE_MODE: str = key(
        "default",
        "mode of torch.compile",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    COMPILE_DYNAMIC: bool | None = key(
        None, "compile for all shapes at once; null: after a shape has changed"
    )
    ON_OUT_OF_MEMORY: str = key(
        "raise",
        "when training runs out of memory: `raise` ends the run and lists the contents of the memory; "
        "`split` repeats the optimizer step with micro-batches of half the size, and keeps "
        "these sizes. "
        "With several ranks, `split` ends the run with a checkpoint, and AUTO_RESUME continues so",
        choices=("raise", "split"),
    )
    SYNC_BATCHNORM: bool = key(False, "compute BatchNorm statistics over all ranks")
    DETERMINISTIC: bool = key(False, "use deterministic kernels only")
    LOG_EVERY: int = key(20, "optimizer steps between two lines of training metrics", ge=1)
    PROFILE: list[int] | None = key(
        None,
        "[first, last]: optimizer steps, from 1, that torch's profiler traces to `logs/profile.json.gz`; "
        "null traces none",
        ge=1,
        check=_profile,
    )
    VALIDATE_EVERY: int = key(
        1, "epochs between two validations; the last epoch is always validated", ge=1
    )
    VALIDATE_EVERY_STEPS: float | None = key(
        None,
        "optimizer steps between two validations, in place of VALIDATE_EVERY; a number below 1 is a "
        "fraction of an epoch, whose end is validated too; the last step is always validated",
        gt=0,
        check=_steps_or_fraction,
    )
    BEST_METRIC: str | None = key(
        None,
        "validation metric that selects the best checkpoint, such as `macro/LEVEL` or `loss`; "
        "early stopping and `plateau` watch it too; null is top-1 of the finest level, or the loss",
    )
    CHECKPOINT_EVERY: int = key(
        1, "epochs between two checkpoints; the last epoch always has one", ge=1
    )
    CHECKPOINT_EVERY_STEPS: int | None = key(
        None, "optimizer steps between checkpoints; null: none", ge=1
    )
    KEEP_CHECKPOINTS: int = key(
        0, "checkpoints kept beside `last.pt`, `previous.pt` and `best.pt`", ge=0
    )
    KEEP_BEST: int = key(
        0, "checkpoints of the best validations, kept as `best_STEP.pt` beside `best.pt`", ge=0
    )
    AUTO_RESUME: bool = key(False, "continue from the run's last checkpoint, if there is one")
    CALLBACKS: list[Any] = key(
        list, "`_target_` nodes of objects whose methods the training loop calls"
    )
    RESUME_WITH: str | None = key(
        None,
        "values that a resumed run takes from this configuration instead of its checkpoint: "
        "`lr` takes the learning rate, the weight decay, their scaling and SCHEDULE; null refuses a change",
        choices=("lr",),
    )

    @property
    def most_epochs(self) -> int:
        """Bound on the epochs of the run: an epoch has a step."""
        return self.EPOCHS if self.MAX_STEPS is None else self.MAX_STEPS


@dataclass
class DistConfig:
    """Ranks under torchrun."""

    BACKEND: str = key(
        "auto", "`auto` is nccl on CUDA, else gloo", choices=("auto", "nccl", "gloo")
    )
    FIND_UNUSED_PARAMETERS: bool = key(
        False, "allow steps in which some parameters get no gradient"
    )
    TIMEOUT_MINUTES: float = key(10.0, "timeout of collectives in training", unit="minutes", gt=0)
    START_MINUTES: float = key(30.0, "longest wait for ranks to start", unit="minutes", gt=0)
    SHARDING: str = key(
        "none",
        "`full` gives each rank a part of every parameter, gradient and optimizer state (FSDP2), "
        "`hybrid` does so within a node and keeps a copy on each node, `none` gives each rank all",
        choices=("none", "full", "hybrid"),
    )
    SHARD_BLOCKS: list[str] | None = key(
        None,
        "submodules that are gathered one at a time, by name or class, with wildcards; null takes "
        "repeated submodules of a Sequential or ModuleList",
    )
    PARAM_DTYPE: str = key("fp32", "number format of gathered parameters", choices=("fp32", "bf16"))
    REDUCE_DTYPE: str = key(
        "fp32", "number format in which sharded gradients are summed", choices=("fp32", "bf16")
    )
    RESHARD_AFTER_FORWARD: bool = key(
        True, "free gathered parameters between forward and backward pass"
    )
    CPU_OFFLOAD: bool = key(False, "keep parts of parameters and optimizer state in host memory")


@dataclass
class Config:
    """The whole configuration. Only `run` and the commands see it; every builder gets its own node."""

    EXPERIMENT: ExperimentConfig = key(
        ExperimentConfig, "name, place, seed, device and tracking of the run"
    )
    DATA: DataConfig = key(DataConfig, "dataset, loading, batch sizes and AutoBatch")
    MODEL: Any = key(ModelConfig, "the network, or a `_target_` node")
    LOSS: Any = key(
        LossConfig, "the loss, or a `_target_` node whose value is a mean over the samples"
    )
    OPTIMIZER: Any = key(OptimizerConfig, "the optimizer, or a `_target_` node")
    SCHEDULE: ScheduleConfig = key(ScheduleConfig, "learning rate over the run")
    TRAIN: TrainConfig = key(TrainConfig, "loop, step, precision, checkpoints")
    DIST: DistConfig = key(DistConfig, "ranks and their timeouts")
