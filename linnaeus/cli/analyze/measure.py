"""Measures sizes and speeds: one search for each variant, mode and fraction."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from linnaeus.autobatch.finder import BatchSizeFinder
from linnaeus.autobatch.memory.device import GIB, device_memory
from linnaeus.autobatch.ranks.protocol import RankStatus
from linnaeus.autobatch.result import Mode, Timing
from linnaeus.autobatch.settings import SearchSettings
from linnaeus.cli.analyze.options import CONFIGURED, VARIANTS, AnalyzeOptions
from linnaeus.cli.analyze.results import Analysis, Row
from linnaeus.config.instantiate import is_target
from linnaeus.config.schema import Config
from linnaeus.data.batch import Batch, BatchSpec
from linnaeus.data.bundle import DataBundle, Resized
from linnaeus.data.datasets import build_data
from linnaeus.models.build import check_takes_sides
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import AutoBatchError, ConfigError, LinnaeusError
from linnaeus.runtime.words import counted
from linnaeus.size_search.keys import in_keys
from linnaeus.size_search.report import SearchProgress, device_environment
from linnaeus.size_search.searches import SizeSearch
from linnaeus.training.build import assemble

logger = logging.getLogger("linnaeus.analysis")
_STEP = 32
"""Sides that `--axis img_size` tries are multiples of this, or of the model's patch."""
_LARGEST = 8192
"""No larger side is tried."""
FURTHER_TOLERANCE = 0.05
"""Of the search of each fraction but the first: many fractions are to cost little more than one."""


@dataclass(frozen=True)
class Setup:
    """Shared objects of all measurements: the status line, and the console that shows the trials."""

    config: Config
    data: DataBundle
    world: World
    status: RankStatus
    console: Console

    def search(self) -> SizeSearch:
        """Build the model, its steps and their searches; `ConfigError` if a node cannot be built."""
        config, data, world = self.config, self.data, self.world
        assembly = assemble(
            config.MODEL,
            config.LOSS,
            config.OPTIMIZER,
            config.TRAIN,
            data,
            world,
            sharding=config.DIST,
        )
        return SizeSearch(
            config.DATA,
            config.TRAIN,
            data,
            assembly,
            world,
            config.EXPERIMENT.SEED,
            console=self.console,
        )


class _SideProgress(SearchProgress):
    """Shows sizes that are sides; the table of the analysis has the speed, in samples per second."""

    def __init__(self, mode: Mode, status: RankStatus, console: Console | None) -> None:
        super().__init__(mode, status, console)
        self.unit = "pixels"

    def size_timed(self, timing: Timing) -> None:
        """Log nothing."""


@dataclass(frozen=True)
class SideSearch(SizeSearch):
    """Searches for the largest side of images in batches of one size: its sizes are sides in pixels."""

    batch_size: int = 64
    step: int = _STEP

    def settings(self, mode: Mode) -> SearchSettings:
        """Sides are multiples of the step. The configured one is tried first."""
        return replace(
            super().settings(mode),
            multiple_of=self.step,
            min_batch_size=self.step,
            max_batch_size=_LARGEST,
            start=max(self.data.img_size or (self.step,)),
        )

    def batches(self, spec: BatchSpec, size: int, num_batches: int = 1) -> Iterator[Batch]:
        """Batches of images of this side."""
        for batch in super().batches(spec, self.batch_size, num_batches):
            pixel = batch.inputs[..., :1, :1]
            yield batch._replace(inputs=pixel.expand(*pixel.shape[:2], size, size).contiguous())

    def _bounds(self, mode: Mode, spec: BatchSpec) -> dict[str, int]:
        return {}

    def _observer(self, mode: Mode, status: RankStatus) -> SearchProgress:
        self._progress.setdefault(mode, _SideProgress(mode, status, self.console))
        return super()._observer(mode, status)


def side_search(setup: Setup, batch_size: int) -> SideSearch:
    """The search of `--axis img_size`; `ConfigError` if data or model have no size that can change."""
    data = setup.data
    if data.in_chans is None or data.preprocessing is None:
        raise ConfigError("--axis: img_size needs images, but the dataset gives tensors")
    resized = (Resized(0, data.preprocessing.size[0], data.train),)
    search = replace(setup, data=replace(data, resized=resized)).search()
    backbone: Any = getattr(search.assembly.model, "backbone", search.assembly.model)
    patch = getattr(getattr(backbone, "patch_embed", None), "patch_size", (1,))[0]
    step = _STEP if _STEP % patch == 0 else patch
    sides = (step, 2 * step)
    check_takes_sides(search.assembly.model, "the model", data.in_chans, sides, "--axis")
    return SideSearch(**vars(search), batch_size=batch_size, step=step)


def measure_sizes(setup: Setup, options: AnalyzeOptions, analysis: Analysis) -> None:
    """Search and time every variant, mode and fraction; a variant that cannot run has the reason."""
    for name in (CONFIGURED, *options.variants):
        try:
            if options.axis:
                search: SizeSearch = side_search(setup, options.batch_size)
            else:
                search = with_variant(setup, name).search()
            if name == CONFIGURED:
                analysis.environment = environment_of(setup, search)
                logger.info("measured: %s", sentence(analysis.environment))
            for mode in options.modes:
                _measure_mode(search, mode, name, options, analysis, setup.status)
            del search
        except Exception as error:
            add_reason(analysis, options, name, error)
        gc.collect()


def add_reason(analysis: Analysis, options: AnalyzeOptions, name: str, error: Exception) -> None:
    """Add the rows of a variant that cannot run, such as a model that has no checkpointing.

    Raises:
        Exception: the original error, if the unchanged configuration fails.
    """
    if name == CONFIGURED:
        raise error
    logger.debug("a variant failed", exc_info=True)
    text = str(error.problems[0] if isinstance(error, ConfigError) else error)
    kind = "" if isinstance(error, LinnaeusError) else f"{type(error).__name__}: "
    reason = f"{name}: {kind}{' '.join(text.split())}"
    known = {(row.mode, row.variant) for row in analysis.rows}
    for mode in options.modes:
        if (mode, name) not in known:
            analysis.rows += [
                Row(mode, fraction, name, limited_by="failed", reason=reason)
                for fraction in options.fractions
            ]


def with_variant(setup: Setup, name: str) -> Setup:
    """Change one thing of the configuration.

    Raises:
        ConfigError: it is so already, or cannot be changed.
    """
    if name == CONFIGURED:
        return setup
    key, value = VARIANTS[name]
    node, field = key.split(".")
    before = getattr(getattr(setup.config, node), field)
    if key == "DATA.IMG_SIZE":
        if setup.data.img_size is None:
            raise ConfigError("the data has no image size")
        value = [max(side // 2, 1) for side in setup.data.img_size]
    if before == value:
        raise ConfigError(f"{key} is {value} already")
    config = replace(setup.config, **{node: replace(getattr(setup.config, node), **{field: value})})
    data = build_data(config.DATA, seed=config.EXPERIMENT.SEED) if node == "DATA" else setup.data
    logger.info("variant %s: %s=%s", name, key, value)
    return replace(setup, config=config, data=data)


def _measure_mode(
    search: SizeSearch,
    mode: Mode,
    variant: str,
    options: AnalyzeOptions,
    analysis: Analysis,
    status: RankStatus,
) -> None:
    """Search every fraction of one mode, the largest first, and time the sizes found."""
    rows = [Row(mode, fraction, variant) for fraction in sorted(options.fractions, reverse=True)]
    try:
        has_found = False
        with search.finder(mode, status) as finder:
            for row in rows:
                analysis.rows.append(row)
                has_found |= _find(finder, row, is_first=not has_found)
                trials = counted(len(row.trials), "trial")
                name = "side" if options.axis else "batch size"
                logger.info("%s, %s: %s %s, %s", mode, row.memory, name, row.batch_size, trials)
            time = functools.cache(finder.time)
            for row in rows:
                if row.batch_size is not None:
                    # Not finite, or 0: something else takes its memory now.
                    timing = time(row.batch_size)
                    row.samples_per_s = timing.samples_per_s or None
                    if options.axis:
                        row.img_size, row.batch_size = row.batch_size, options.batch_size
                        row.samples_per_s = row.batch_size / timing.seconds_per_step
            analysis.compare_speeds()
    except AutoBatchError as error:  # the bounds leave no size to try
        analysis.rows += [replace(row, reason=str(error)) for row in rows]


def _find(finder: BatchSizeFinder, row: Row, *, is_first: bool) -> bool:
    """Search the fraction of a row, and fill the row even when the search is interrupted.

    The first fraction is searched as in training. The smaller ones are searched more coarsely, from earlier
    results, so their sizes may remain uncertified. Returns whether a size fits.
    """
    num_before = len(finder.trials)
    settings = replace(
        finder.settings, target_memory_fraction=row.memory_fraction, objective="memory"
    )
    if not is_first:
        settings = replace(settings, strategy="guided", tolerance=FURTHER_TOLERANCE, start=None)
    row.limited_by = "interrupted"
    try:
        result = finder.find(settings, confirm=is_first)
        row.batch_size, row.certified = result.batch_size, result.certified
        row.limited_by = result.limited_by
        # Of the last trial of the size, which the search of an earlier fraction may have run.
        row.peak_bytes = [t.peak_bytes for t in finder.trials if t.size == row.batch_size][-1]
    except AutoBatchError as error:
        row.limited_by, row.reason = None, in_keys(str(error), row.mode)
    finally:
        row.budget_bytes = finder.budget_bytes or None
        row.trials = tuple(finder.trials[num_before:])
    return row.batch_size is not None


# The environment in which the results hold.


def environment_of(setup: Setup, search: SizeSearch) -> dict[str, Any]:
    """Return the device, its memory or the limit, and the settings of a run."""
    limit_gb = search.config.AUTOBATCH.MEMORY_LIMIT_GB
    total_bytes = device_memory(search.world.device).total_bytes
    return {
        **device_environment(search.world.device),
        "total_bytes": total_bytes if limit_gb is None else min(int(limit_gb * GIB), total_bytes),
        **run_settings(setup.config.MODEL, search),
    }


def run_settings(model_node: Any, search: SizeSearch) -> dict[str, Any]:
    """Return the settings that memory depends on."""
    train, model = search.train, search.assembly.model
    dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}))
    return {
        "model": str(model_node["_target_"] if is_target(model_node) else model_node.NAME),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "precision": dtypes if train.AMP == "off" else f"{train.AMP} autocast over {dtypes}",
        "optimizer": type(search.assembly.optimizer).__name__,
        "image_size": None if search.data.img_size is None else list(search.data.img_size),
        "gradient_checkpointing": train.GRADIENT_CHECKPOINTING,
        "accumulation_steps": train.ACCUMULATION_STEPS,
        "ema": train.EMA.ENABLED,
    }


def sentence(environment: Mapping[str, Any]) -> str:
    """Describe the measured step and device, for people."""
    pixels = "×".join(map(str, environment["image_size"] or []))
    where = environment["device_name"]
    if "total_bytes" in environment:
        where += f" with {environment['total_bytes'] / GIB:.3g} GiB"
    return (
        f"{environment['model']}, {environment['parameters']:,} parameters, {environment['precision']}, "
        f"{environment['optimizer']}{pixels and f', {pixels} pixels'}; {where}, torch "
        f"{environment['torch']}"
    )
