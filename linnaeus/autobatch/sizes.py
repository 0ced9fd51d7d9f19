"""The searches of a training run: both modes, with the run's own steps, batches and bounds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

from linnaeus.assembly import Assembly
from linnaeus.autobatch.find import AutoBatchResult, Mode, auto_find_batch_size
from linnaeus.autobatch.protocol import Status
from linnaeus.config.schema import AutoBatchConfig, DataConfig
from linnaeus.data.batch import Batch, BatchSpec
from linnaeus.data.bounds import max_batch_size_for
from linnaeus.data.bundle import DataBundle
from linnaeus.dist import World

logger = logging.getLogger("linnaeus.autobatch")


def modes_to_search(config: AutoBatchConfig) -> list[Mode]:
    """The modes that the configuration asks for; training first, since its state is resident in both."""
    wanted: list[tuple[Mode, bool]] = [("train", config.ENABLED), ("val", config.ENABLED_VAL)]
    return [mode for mode, enabled in wanted if enabled]


def find_sizes(
    config: DataConfig,
    bundle: DataBundle,
    assembly: Assembly,
    world: World,
    status: Status,
    *,
    accumulation_steps: int,
    seed: int,
) -> dict[str, Any]:
    """Search every mode that the configuration asks for, on this process alone.

    Args:
        config: the DATA node.
        bundle: the datasets.
        assembly: the unwrapped model and its steps.
        world: for the bounds; no collective runs.
        status: told what is being tried.
        accumulation_steps: micro-batches per optimizer step; a trial runs two of them at most, which hold as
            much as any number.
        seed: chooses the samples that batches are made from.

    Returns:
        The results as `autobatch.json` has them, by mode.

    Raises:
        AutoBatchError: no size fits.
    """
    num_micro_batches = min(accumulation_steps, 2)
    results: dict[str, Any] = {}
    for mode in modes_to_search(config.AUTOBATCH):
        logger.setLevel(_setting(config.AUTOBATCH, "LOG_LEVEL", mode))
        dataset = bundle.train if mode == "train" else bundle.val
        spec = BatchSpec.from_dataset(dataset, bundle.collate, config.AUTOBATCH.NUM_SPEC_SAMPLES, seed)
        bounds = max_batch_size_for(
            bundle, train=mode == "train", bytes_per_sample=spec.bytes_per_sample, data_config=config,
            device=world.device, world_size=world.world_size, local_world_size=world.local_world_size,
        )  # fmt: skip
        make_batch = partial(_batches, spec, world, num=num_micro_batches if mode == "train" else 1)
        step = (
            partial(_train, assembly, num_micro_batches) if mode == "train" else partial(_validate, assembly)
        )
        result = _search(config.AUTOBATCH, mode, step, make_batch, assembly, world, bounds, status)
        results[mode] = result.as_dict()
    assembly.metrics.reset()
    return results


def _search(
    config: AutoBatchConfig, mode: Mode, step: Any, make_batch: Any, assembly: Assembly, world: World,
    bounds: dict[str, int], status: Status,
) -> AutoBatchResult:  # fmt: skip
    def announce(size: int) -> None:
        status.text = f"{mode}: trying batch size {size}"
        logger.debug(status.text)

    return auto_find_batch_size(
        step,
        make_batch,
        state=assembly.state,
        mode=mode,
        device=world.device,
        target_memory_fraction=_setting(config, "TARGET_MEMORY_FRACTION", mode),
        min_batch_size=_setting(config, "MIN_BATCH_SIZE", mode),
        max_batch_size=_setting(config, "MAX_BATCH_SIZE", mode),
        steps_per_trial=_setting(config, "STEPS_PER_TRIAL", mode),
        strategy=config.STRATEGY,
        multiple_of=config.MULTIPLE_OF,
        memory_limit_gb=config.MEMORY_LIMIT_GB,
        max_trials=config.MAX_TRIALS,
        timeout_minutes=config.TIMEOUT_MINUTES,
        bounds=bounds,
        on_start=announce,
    )


def _setting(config: AutoBatchConfig, name: str, mode: Mode) -> Any:
    return getattr(config, name if mode == "train" else f"{name}_VAL")


def _batches(spec: BatchSpec, world: World, size: int, *, num: int) -> Iterator[Batch]:
    """Made one by one: a micro-batch is gone before the next one comes, as in training."""
    return (spec.make(size, world.device) for _ in range(num))


def _train(assembly: Assembly, num_micro_batches: int, batches: Iterator[Batch]) -> None:
    assembly.train_step(batches, num_micro_batches)


def _validate(assembly: Assembly, batches: Iterator[Batch]) -> None:
    assembly.validation_step(next(batches))
