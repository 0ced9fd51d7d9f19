"""Batch sizes for GPUs that need not be there: both steps traced once, and all sizes from these traces."""

from __future__ import annotations

import gc
import logging
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.predict.gpus import ASSUMED_BASE_BYTES, Gpu
from linnaeus.autobatch.predict.prediction import MARGIN, measured_base_bytes
from linnaeus.autobatch.result import Mode
from linnaeus.cli.analyze.fitting import curve, fill, largest_size
from linnaeus.cli.analyze.options import Options
from linnaeus.cli.analyze.remedies import Change, Outcome, common_changes, show_so_far, try_remedies, why
from linnaeus.cli.analyze.results import Analysis, Predicted, Row, limit_words
from linnaeus.cli.analyze.traced import META, build_on_meta, predicted_step
from linnaeus.cli.environment import run_settings, settings_sentence
from linnaeus.cli.measure import Speeds
from linnaeus.cli.session import Setup
from linnaeus.config.instantiate import is_target
from linnaeus.config.schema import Config
from linnaeus.data.datasets import build_data
from linnaeus.dist import World, resolve_device
from linnaeus.errors import AutoBatchError, ConfigError
from linnaeus.sizing.sizes import SizeSearch
from linnaeus.words import counted

logger = logging.getLogger("linnaeus.analysis")
ACCURACY = (
    "compared with training steps of timm models in float32 with SGD on a card of 40 GB: median error 1.0 %, "
    "nine of ten within 5.9 %, 98 % need less than 1.15 times the prediction; see docs/prediction.md"
)
"""How good predictions are; the figures are those of that page."""
ALIGNED_PIXELS = 32
"""A smaller image has the next smaller multiple of this as its side."""
_PLAIN_OPTIMIZERS = frozenset({"sgd", "nesterov", "momentum"})


@dataclass(frozen=True)
class Target:
    """What to predict for.

    Attributes:
        gpus: the devices.
        base_bytes: in use on each beside the allocator.
        is_measured: whether the base was measured on this machine's device.
    """

    gpus: Sequence[Gpu]
    base_bytes: int
    is_measured: bool


def target_of(options: Options, config: Config) -> Target:
    """The devices that the options name, or else this machine's GPU with what is in use on it now.

    Raises:
        ConfigError: the options name none, and there is none or it is not to be used.
    """
    if gpus := [*options.gpu, *options.device_memory_gb]:
        return Target(list(dict.fromkeys(gpus)), ASSUMED_BASE_BYTES, is_measured=False)
    name = config.EXPERIMENT.DEVICE
    if not torch.cuda.is_available() or name == "cpu":
        here = "EXPERIMENT.DEVICE is cpu" if torch.cuda.is_available() else "this machine has no GPU"
        raise ConfigError(
            f"--predict: {here}; say what to predict for with --gpu NAME, such as rtx-4090, or with "
            "--device-memory-gb X"
        )
    device = resolve_device(name, local_rank=0)
    with torch.cuda.device(device):
        base_bytes = measured_base_bytes() or 0
    gpu = Gpu(torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1])
    return Target([gpu], base_bytes, is_measured=True)


def world_of(options: Options) -> World:
    """The processes of the run, on a device that computes nothing."""
    num = options.world_size or 1
    return World(META, world_size=num, local_world_size=num)


def predict_sizes(setup: Setup, options: Options, target: Target, analysis: Analysis) -> None:
    """Predict the size for every device, mode and fraction.

    Raises:
        ConfigError: a node that cannot be built, or a step that cannot be traced.
    """
    search = build_on_meta(setup)
    environment = _environment(setup, search, target)
    environment["not_compared"] = _not_compared(setup.config, environment, options.modes)
    logger.info("%s", _sentence(environment))
    if environment["not_compared"]:
        logger.info(
            "not compared with a GPU: %s; see docs/prediction.md", ", ".join(environment["not_compared"])
        )
    for mode in options.modes:
        analysis.speeds[mode] = Speeds()
        rows = _rows(mode, options, target)
        setup.status.update(f"{mode}: tracing the step")
        try:
            step = predicted_step(search, mode, target.base_bytes)
        except AutoBatchError as error:  # the bounds leave no size
            rows = [replace(row, reason=str(error)) for row in rows]
        else:
            for row in rows:
                fill(row, step, setup.config.DATA.AUTOBATCH.MEMORY_LIMIT_GB)
            analysis.curves[mode] = curve(step, rows)
        analysis.environment = environment  # from now on there is something to write
        analysis.rows += rows
    if options.remedies:
        show_so_far(setup, analysis)
        del search
        gc.collect()
        try_remedies(setup, analysis, _run(target), _changes)


def _rows(mode: Mode, options: Options, target: Target) -> list[Row]:
    """Of each device, the largest fraction comes first."""
    return [
        Row(mode, fraction, predicted=Predicted(gpu.name, gpu.total_bytes, MARGIN))
        for gpu in target.gpus
        for fraction in sorted(options.fractions, reverse=True)
    ]


def _environment(setup: Setup, search: SizeSearch, target: Target) -> dict[str, Any]:
    """What the figures hold for, and what they come from."""
    return {
        "predicted": True,
        "devices": [{"name": gpu.name, "total_bytes": gpu.total_bytes} for gpu in target.gpus],
        "base_bytes": target.base_bytes,
        "base": "measured" if target.is_measured else "assumed",
        "margin": MARGIN,
        "accuracy": ACCURACY,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "world_size": setup.world.world_size,
        **run_settings(setup.config.MODEL, search),
    }


def _not_compared(config: Config, environment: dict[str, Any], modes: Sequence[Mode]) -> list[str]:
    """What of the configuration no measurement on a GPU stands behind."""
    settings = {
        "a model of your own": is_target(config.MODEL),
        environment["precision"]: environment["precision"] != "float32",
        environment["optimizer"]: environment["optimizer"] != "SGD",
        "gradient checkpointing": environment["gradient_checkpointing"],
        "accumulation": environment["accumulation_steps"] > 1,
        "EMA": environment["ema"],
        "channels-last": config.TRAIN.CHANNELS_LAST,
        "gradient buckets": environment["world_size"] > 1,
        "validation": "val" in modes,
    }
    return [name for name, applies in settings.items() if applies]


def _sentence(environment: dict[str, Any]) -> str:
    devices = ", ".join(
        name if name.endswith("GiB") else f"{name} ({total_bytes / GIB:.2f} GiB)"
        for name, total_bytes in (device.values() for device in environment["devices"])
    )
    num = environment["world_size"]
    processes = "" if num == 1 else f", {counted(num, 'process')}"
    return (
        f"predicted, not measured, for {devices}{limit_words(environment)}; "
        f"{environment['base_bytes'] / GIB:.2f} GiB in use beside the allocator ({environment['base']}), "
        f"margin {environment['margin'] - 1:.0%}{processes}, torch "
        f"{environment['torch']}; {settings_sentence(environment)}"
    )


def _run(target: Target) -> Callable[[Setup, Mode, Sequence[int]], dict[int, Outcome]]:
    """Predicts sizes of a mode under a configuration. Where it cannot run, each size gets the reason."""

    def run(setup: Setup, mode: Mode, sizes: Sequence[int]) -> dict[int, Outcome]:
        try:
            config = setup.config  # perhaps with images of another size
            setup = replace(setup, data=build_data(config.DATA, seed=config.EXPERIMENT.SEED))
            step = predicted_step(build_on_meta(setup), mode, target.base_bytes)
        except Exception as error:  # a user's model may not take every precision
            logger.debug("a remedy failed", exc_info=True)
            return dict.fromkeys(sizes, Outcome(reason=why(error)))

        def largest(row: Row) -> int | None:
            return largest_size(step, row.budget_bytes or 0, step.prediction.safe_bytes)

        return {size: Outcome(step.prediction.peak_bytes(size), largest=largest) for size in sizes}

    return run


def _changes(setup: Setup, mode: Mode) -> Iterator[Change]:
    """The remedies of a measured analysis, and two more."""
    yield from common_changes(setup, mode)

    optimizer = setup.config.OPTIMIZER
    obstacle = None
    if is_target(optimizer):
        obstacle = f"OPTIMIZER is a class of your own, {optimizer['_target_']}"
    elif optimizer.NAME.lower() in _PLAIN_OPTIMIZERS:
        obstacle = f"OPTIMIZER.NAME is {optimizer.NAME} already"
    # The arguments of another optimizer are not those of SGD.
    keys = {"OPTIMIZER.NAME": "sgd", **({} if obstacle or not optimizer.KWARGS else {"OPTIMIZER.KWARGS": {}})}
    yield Change("optimizer", keys, obstacle)

    size = setup.data.img_size
    smaller = None if size is None else [_smaller(side) for side in size]
    if smaller is None or min(smaller) < ALIGNED_PIXELS:
        yield Change("image_size", {"DATA.IMG_SIZE": None}, "there is no smaller image to try")
    else:
        side: Any = smaller[0] if smaller[0] == smaller[1] else smaller
        yield Change("image_size", {"DATA.IMG_SIZE": side}, None)


def _smaller(side: int) -> int:
    """The next smaller multiple of 32 pixels.

    >>> _smaller(224), _smaller(300)
    (192, 288)
    """
    return (side - 1) // ALIGNED_PIXELS * ALIGNED_PIXELS
