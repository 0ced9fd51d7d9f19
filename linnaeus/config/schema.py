"""Every configuration key: its default, meaning, unit and check, in one field each.

Nodes and keys are upper case and nested. A default that follows another key is an interpolation, written as a
user would write it in YAML. `MODEL`, `DATA.DATASET`, `LOSS` and `OPTIMIZER` may be replaced by a node with
`_target_`; they are typed `Any` here for that reason and hold either the dataclass or a plain dict.
"""

# ruff: noqa: RUF009 (`key` is `dataclasses.field` with a doc and checks)
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePath
from typing import Any

PLUGGABLE = ("MODEL", "DATA.DATASET", "LOSS", "OPTIMIZER")
"""The nodes that a `_target_` may replace."""


def key(
    default: Any,
    doc: str,
    *,
    unit: str | None = None,
    choices: Sequence[str] | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    check: Callable[[Any], str | None] | None = None,
) -> Any:
    """Declare one configuration key.

    Args:
        default: the value, a zero-argument callable that makes it, or an interpolation.
        doc: one sentence for the reference and for `--help`.
        unit: unit of the value, when it has one.
        choices: the allowed strings.
        ge, gt, le, lt: bounds; for a list they hold for each element. `None` values are not checked.
        check: returns what is wrong with the value, or None.
    """
    bounds = {
        name: bound for name, bound in (("ge", ge), ("gt", gt), ("le", le), ("lt", lt)) if bound is not None
    }
    metadata: Mapping[str, Any] = {
        "doc": doc,
        "unit": unit,
        "choices": tuple(choices) if choices else None,
        "bounds": bounds,
        "check": check,
    }
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def _image_size(value: Any) -> str | None:
    """An image size is one positive whole number, or [height, width]."""
    sides = value if isinstance(value, list) else [value]
    if value is None or (len(sides) in (1, 2) and all(type(side) is int and side > 0 for side in sides)):
        return None
    return "must be a positive whole number or [height, width]"


def _run_name(value: str) -> str | None:
    """The run's files stay inside the output folder."""
    path = PurePath(value)
    if value.strip() and path.parts and not path.is_absolute() and ".." not in path.parts:
        return None
    return "must be the name of a folder inside EXPERIMENT.OUTPUT_DIR"


def _not_empty(value: list[Any] | None) -> str | None:
    return "must have at least one element" if value == [] else None


def _crop_scale(value: list[float]) -> str | None:
    return None if len(value) == 2 and value[0] <= value[1] else "must be [low, high] with low <= high"


def _milestones(value: list[list[int]]) -> str | None:
    starts = [pair[0] for pair in value if pair]
    if all(len(pair) == 2 and pair[0] >= 1 and pair[1] >= 1 for pair in value) and all(
        a < b for a, b in pairwise(starts)
    ):
        return None
    return "must be pairs [at, size] of whole numbers >= 1, with each `at` above the one before it"


@dataclass
class WandbConfig:
    """Weights & Biases."""

    ENABLED: bool = key(False, "record the run with Weights & Biases")
    PROJECT: str = key("linnaeus", "project that the run belongs to")
    ENTITY: str | None = key(None, "user or team; null is the account's default")
    GROUP: str | None = key(None, "group that the run belongs to")
    TAGS: list[str] = key(list, "tags of the run")


@dataclass
class ExperimentConfig:
    """Name, place and identity of the run."""

    NAME: str = key("digits", "name of the run and of its folder", check=_run_name)
    OUTPUT_DIR: str = key("runs", "folder that holds the folders of all runs")
    SEED: int = key(0, "seed of initialisation, shuffling and augmentation", ge=0)
    DEVICE: str = key("auto", "`auto`, or a torch device such as `cpu`, `cuda` or `cuda:1`")
    WANDB: WandbConfig = key(WandbConfig, "Weights & Biases")


@dataclass
class DatasetConfig:
    """Where the samples and their labels come from."""

    NAME: str = key("digits", "kind of dataset", choices=("digits", "synthetic", "imagefolder", "manifest"))
    ROOT: str | None = key(
        None, "folder of an `imagefolder`; folder that a manifest's image paths start from"
    )
    TRAIN: str | None = key(
        None, "training subfolder or manifest, relative to ROOT; null is `train` or `train.csv`"
    )
    VAL: str | None = key(
        None, "validation subfolder or manifest; null is `val`/`val.csv` where it exists, else a split"
    )
    VAL_FRACTION: float = key(0.2, "share held out for validation where the data has no split", gt=0, lt=1)
    FOLDER_NAMES: str = key(
        "auto",
        "how folder names give labels: nested, each level a rank, or inat2021, `00000_Animalia_Chordata_...`",
        choices=("auto", "nested", "inat2021"),
    )
    IMAGE_COLUMN: str = key("image", "manifest column with the image path")
    RANKS: list[str] | None = key(
        None, "names of the ranks, coarse to fine; null takes them from the data", check=_not_empty
    )
    CHANNELS: int = key(
        3, "channels of `synthetic` images, and what decoded images are converted to (1 or 3)", gt=0
    )
    NUM_CLASSES: list[int] = key(
        lambda: [4, 16], "classes of each `synthetic` rank, coarse to fine", ge=2, check=_not_empty
    )
    NUM_SAMPLES: int = key(1024, "training samples of `synthetic`", gt=0)
    NUM_SAMPLES_VAL: int = key(256, "validation samples of `synthetic`", gt=0)


@dataclass
class AugmentConfig:
    """Training augmentation, and the normalisation of both splits (torchvision v2)."""

    CROP_SCALE: list[float] = key(
        lambda: [0.8, 1.0],
        "share of the image's area that a random crop keeps",
        gt=0,
        le=1,
        check=_crop_scale,
    )
    HFLIP: float = key(0.0, "probability of a horizontal flip", ge=0, le=1)
    ROTATION: float = key(0.0, "largest rotation either way", unit="degrees", ge=0, le=180)
    COLOR_JITTER: float = key(0.0, "strength of brightness, contrast and saturation jitter", ge=0)
    POLICY: str = key("none", "automatic policy", choices=("none", "randaugment", "trivialaugment"))
    ERASING: float = key(0.0, "probability of random erasing", ge=0, le=1)
    CROP_FRACTION: float = key(
        1.0, "share of the resized image that the validation centre crop keeps", gt=0, le=1
    )
    MEAN: list[float] | None = key(None, "per-channel mean on the 0-1 scale; null is 0.5 each")
    STD: list[float] | None = key(None, "per-channel standard deviation; null is 0.5 each", gt=0)


@dataclass
class AutoBatchConfig:
    """The search for the largest memory-safe batch size."""

    ENABLED: bool = key(False, "search for the training batch size; overwrites `DATA.BATCH_SIZE`")
    ENABLED_VAL: bool = key(
        "${DATA.AUTOBATCH.ENABLED}", "search for the validation size; overwrites `DATA.BATCH_SIZE_VAL`"
    )
    TARGET_MEMORY_FRACTION: float = key(
        0.8, "fraction of the device's total memory that may be in use", gt=0, le=1
    )
    TARGET_MEMORY_FRACTION_VAL: float = key(
        "${DATA.AUTOBATCH.TARGET_MEMORY_FRACTION}", "the same for validation", gt=0, le=1
    )
    MIN_BATCH_SIZE: int = key(1, "smallest size tried, inclusive", ge=1)
    MIN_BATCH_SIZE_VAL: int = key("${DATA.AUTOBATCH.MIN_BATCH_SIZE}", "the same for validation", ge=1)
    MAX_BATCH_SIZE: int = key(512, "largest size tried, inclusive", ge=1)
    MAX_BATCH_SIZE_VAL: int = key("${DATA.AUTOBATCH.MAX_BATCH_SIZE} * 2", "the same for validation", ge=1)
    STEPS_PER_TRIAL: int = key(2, "optimizer steps that one trial runs", ge=1)
    STEPS_PER_TRIAL_VAL: int = key(
        "${DATA.AUTOBATCH.STEPS_PER_TRIAL}", "validation batches that one trial runs", ge=1
    )
    LOG_LEVEL: str = key(
        "INFO", "level of the `linnaeus.autobatch` logger", choices=("DEBUG", "INFO", "WARNING", "ERROR")
    )
    LOG_LEVEL_VAL: str = key(
        "${DATA.AUTOBATCH.LOG_LEVEL}",
        "the same for validation",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
    )
    OBJECTIVE: str = key(
        "memory",
        "`memory`: the largest size that fits; `throughput`: the smallest within 5 % of the best images/s",
        choices=("memory", "throughput"),
    )
    STRATEGY: str = key("guided", "how sizes are chosen", choices=("guided", "binary", "power", "binsearch"))
    MULTIPLE_OF: int = key(1, "only multiples of this are tried; sizes below it stay exact", ge=1)
    MEMORY_LIMIT_GB: float | None = key(
        None, "treat the device as if it had no more than this", unit="GiB", gt=0
    )
    MAX_TRIALS: int = key(25, "bound on trials; the best certified size so far is used", ge=1)
    TIMEOUT_MINUTES: float = key(
        60.0, "how long other ranks wait for the search, and its own deadline", unit="minutes", gt=0
    )
    NUM_SPEC_SAMPLES: int = key(32, "samples looked at for the shape of a batch; the largest is used", ge=1)


@dataclass
class DataConfig:
    """Datasets, loading and batch sizes."""

    DATASET: Any = key(DatasetConfig, "the dataset, or a `_target_` node")
    BATCH_SIZE: int = key(
        64, "training samples per process and micro-batch; the most that fits where "
        "TRAIN.EFFECTIVE_BATCH_SIZE or TRAIN.BATCH_SCHEDULE is set", ge=1,
    )  # fmt: skip
    BATCH_SIZE_VAL: int = key("${DATA.BATCH_SIZE}", "validation samples per process and batch", ge=1)
    IMG_SIZE: Any = key(
        None, "side of the image, or [height, width]; null is the dataset's own size (224 for files)",
        unit="pixels", check=_image_size,
    )  # fmt: skip
    NUM_WORKERS: int = key(0, "loader processes per rank; 0 loads in the training process", ge=0)
    PREFETCH_FACTOR: int = key(2, "batches that each worker holds ready", ge=1)
    PIN_MEMORY: bool = key(True, "page-locked host memory for batches (CUDA only)")
    ON_BAD_IMAGE: str = key("raise", "what a damaged or missing image does", choices=("raise", "skip"))
    AUGMENT: AugmentConfig = key(AugmentConfig, "augmentation and normalisation")
    AUTOBATCH: AutoBatchConfig = key(AutoBatchConfig, "the batch-size search")


@dataclass
class ModelConfig:
    """The network: a timm backbone with one linear head per rank."""

    NAME: str = key("resnet10t", "any timm model")
    WEIGHTS: str | None = key(None, "local file with backbone weights (.pt, .pth or .safetensors)")
    DROP_RATE: float = key(0.0, "dropout before the heads", ge=0, lt=1)
    DROP_PATH_RATE: float = key(0.0, "stochastic depth, for models that have it", ge=0, lt=1)
    KWARGS: dict[str, Any] = key(dict, "further arguments for `timm.create_model`")


@dataclass
class LossConfig:
    """Cross-entropy per rank; unknown labels are ignored."""

    NAME: str = key("cross_entropy", "kind of loss", choices=("cross_entropy",))
    LABEL_SMOOTHING: float = key(0.0, "label smoothing", ge=0, lt=1)
    RANK_WEIGHTS: list[float] | None = key(None, "weight of each rank, coarse to fine; null is 1 each", ge=0)


@dataclass
class OptimizerConfig:
    """A timm optimizer."""

    NAME: str = key("adamw", "any name that timm's optimizer factory knows")
    LR: float = key(2e-3, "peak learning rate", gt=0)
    WEIGHT_DECAY: float = key(0.05, "weight decay; biases and norms are left out", ge=0)
    LR_SCALING: str = key(
        "none",
        "how LR follows the effective batch over BASE_BATCH_SIZE: `linear` (SGD) or `sqrt` (Adam)",
        choices=("none", "linear", "sqrt"),
    )
    WEIGHT_DECAY_SCALING: str = key(
        "none", "how WEIGHT_DECAY follows the effective batch", choices=("none", "sqrt")
    )
    BASE_BATCH_SIZE: int = key(
        256, "effective batch that LR and WEIGHT_DECAY were tuned for", unit="samples", ge=1
    )
    KWARGS: dict[str, Any] = key(dict, "further arguments for the optimizer")


@dataclass
class ScheduleConfig:
    """Learning rate over optimizer steps: warm-up, then a decay."""

    NAME: str = key("cosine", "decay after the warm-up", choices=("cosine", "linear", "constant"))
    WARMUP_EPOCHS: float | None = key(
        None, "length of the linear warm-up; null is none, unless OPTIMIZER.LR_SCALING calls for one",
        unit="epochs", ge=0,
    )  # fmt: skip
    WARMUP_FRACTION: float | None = key(
        None, "the same as a share of all optimizer steps; wins over WARMUP_EPOCHS", ge=0, le=1
    )
    WARMUP_STEPS: int | None = key(None, "the same in optimizer steps; wins over both", ge=0)
    MIN_LR_FRACTION: float = key(0.01, "rate at the end, as a share of the peak", ge=0, le=1)


@dataclass
class EmaConfig:
    """Exponential moving average of the weights."""

    ENABLED: bool = key(False, "keep an average of the weights, and validate it")
    DECAY: float = key(0.9998, "decay per optimizer step", gt=0, lt=1)


@dataclass
class BatchScheduleConfig:
    """An effective batch that changes while training goes on."""

    NAME: str = key(
        "constant",
        "how the effective batch goes from FIRST to LAST; `milestones` takes its sizes from MILESTONES",
        choices=("constant", "linear", "exponential", "milestones"),
    )
    FIRST: int | None = key(None, "effective batch at the start", unit="samples", ge=1)
    LAST: int | None = key(
        None, "effective batch in the end; null is what it would be without a schedule", unit="samples", ge=1
    )
    UNIT: str = key("epochs", "what LENGTH and MILESTONES count", choices=("epochs", "steps"))
    LENGTH: int | None = key(
        None, "after how many epochs or optimizer steps LAST is reached; null is the last epoch", ge=1
    )
    MILESTONES: list[list[int]] = key(
        list,
        "pairs of [epoch or step, counted from 0, effective batch from there on], such as [[30, 512]]",
        check=_milestones,
    )


@dataclass
class TrainConfig:
    """The training loop and the training step."""

    EPOCHS: int = key(12, "passes over the training data", ge=1)
    EFFECTIVE_BATCH_SIZE: int | None = key(
        None, "samples per optimizer step over all processes; micro-batch and accumulation follow from it; "
        "null is DATA.BATCH_SIZE x processes x ACCUMULATION_STEPS", unit="samples", ge=1,
    )  # fmt: skip
    ACCUMULATION_STEPS: int = key(
        1,
        "micro-batches per optimizer step, where neither EFFECTIVE_BATCH_SIZE nor BATCH_SCHEDULE is set",
        ge=1,
    )
    BATCH_SCHEDULE: BatchScheduleConfig = key(BatchScheduleConfig, "effective batch that changes")
    AMP: str = key("off", "automatic mixed precision", choices=("off", "bf16", "fp16"))
    CLIP_GRAD_NORM: float | None = key(
        1.0, "largest norm of all gradients together; null does not clip", gt=0
    )
    EMA: EmaConfig = key(EmaConfig, "average of the weights")
    GRADIENT_CHECKPOINTING: bool = key(False, "recompute activations in the backward pass to save memory")
    CHANNELS_LAST: bool = key(False, "channels-last memory format")
    COMPILE: bool = key(False, "torch.compile the model")
    SYNC_BATCHNORM: bool = key(False, "BatchNorm statistics over all processes")
    DETERMINISTIC: bool = key(False, "only deterministic kernels")
    LOG_EVERY: int = key(20, "optimizer steps between two lines of training metrics", ge=1)
    VALIDATE_EVERY: int = key(1, "epochs between two validations; the last epoch is always validated", ge=1)
    CHECKPOINT_EVERY: int = key(1, "epochs between two checkpoints; the last epoch always has one", ge=1)
    AUTO_RESUME: bool = key(False, "continue from the run's last checkpoint where there is one")


@dataclass
class DistConfig:
    """Processes under torchrun."""

    BACKEND: str = key("auto", "`auto` is nccl on CUDA and gloo elsewhere", choices=("auto", "nccl", "gloo"))
    FIND_UNUSED_PARAMETERS: bool = key(False, "for models that leave parameters out of some steps")
    TIMEOUT_MINUTES: float = key(10.0, "timeout of ordinary collectives", unit="minutes", gt=0)


@dataclass
class Config:
    """The whole configuration. Only `linnaeus.main` sees it; every builder gets its own node."""

    EXPERIMENT: ExperimentConfig = key(ExperimentConfig, "name, place, seed, device and tracking of the run")
    DATA: DataConfig = key(DataConfig, "dataset, loading, batch sizes and AutoBatch")
    MODEL: Any = key(ModelConfig, "the network, or a `_target_` node")
    LOSS: Any = key(LossConfig, "the loss, or a `_target_` node")
    OPTIMIZER: Any = key(OptimizerConfig, "the optimizer, or a `_target_` node")
    SCHEDULE: ScheduleConfig = key(ScheduleConfig, "learning rate over the run")
    TRAIN: TrainConfig = key(TrainConfig, "loop, step, precision, checkpoints")
    DIST: DistConfig = key(DistConfig, "processes and their timeouts")
