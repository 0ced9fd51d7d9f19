"""Measures sizes and speeds: one search for each mode and fraction, timings, and the effect of remedies."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch.utils.hooks import RemovableHandle

from linnaeus.autobatch.finder import BatchSizeFinder
from linnaeus.autobatch.memory.device import GIB, device_memory
from linnaeus.autobatch.ranks.protocol import RankStatus
from linnaeus.autobatch.result import AutoBatchResult, Mode
from linnaeus.autobatch.search import Candidates
from linnaeus.autobatch.settings import SearchSettings
from linnaeus.autobatch.throughput import rungs
from linnaeus.batch_plan.effective_batch import Facts, max_samples_per_rank
from linnaeus.batch_plan.plan import plan_batches
from linnaeus.cli.analyze.options import Options
from linnaeus.cli.analyze.results import Analysis, Breakdown, Goal, Remedy, Row, Speeds, timed_size
from linnaeus.config.instantiate import is_target
from linnaeus.config.schema import Config
from linnaeus.data.bundle import DataBundle, dataset_length
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import AutoBatchError, ConfigError, LinnaeusError
from linnaeus.runtime.words import counted
from linnaeus.size_search.keys import in_keys
from linnaeus.size_search.report import device_environment
from linnaeus.size_search.searches import SizeSearch
from linnaeus.training.build import Assembly, assemble, plan_facts
from linnaeus.training.out_of_memory import StateBytes, state_bytes

logger = logging.getLogger("linnaeus.analysis")
FURTHER_TRIALS = 3
FURTHER_TOLERANCE = 0.05
"""Of the search of each fraction but the first: many fractions are to cost little more than one."""


@dataclass(frozen=True)
class Setup:
    """What there is to measure with: the status is told what is tried, the console shows the trials."""

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


def measure_sizes(setup: Setup, options: Options, analysis: Analysis) -> None:
    """Search every mode and fraction, time sizes and try remedies."""
    search, config = setup.search(), setup.config
    plan = None
    if options.throughput:
        analysis.goal = goal = Goal(
            dataset_length=options.dataset_length or dataset_length(setup.data.train),
            epochs=config.TRAIN.EPOCHS,
            world_size=options.world_size[0],
            noise_scale=options.noise_scale,
            time_budget_s=options.time_budget,
        )
        facts = plan_facts(
            search.assembly,
            config.MODEL,
            config.TRAIN,
            max_micro_batch_size=config.DATA.AUTOBATCH.MAX_BATCH_SIZE or goal.dataset_length,
            world_size=goal.world_size,
            num_samples=goal.dataset_length,
            min_steps_per_epoch=config.DATA.AUTOBATCH.MIN_STEPS_PER_EPOCH,
        )
        search = replace(search, max_samples_per_rank=max_samples_per_rank(config.TRAIN, facts))
        plan = partial(planned, config, facts, goal)
    analysis.environment = {
        **device_environment(search.world.device),
        "total_bytes": device_memory(search.world.device).total_bytes,
        **run_settings(config.MODEL, search),
    }
    logger.info("%s", device_sentence(analysis.environment))
    for mode in options.modes:
        _measure_mode(
            search, mode, options, analysis, setup.status, plan if mode == "train" else None
        )
    if options.remedies:
        del search
        gc.collect()
        try_remedies(
            setup, analysis, partial(run_sizes, timed=options.throughput), common_changes(setup)
        )


def _measure_mode(
    search: SizeSearch,
    mode: Mode,
    options: Options,
    analysis: Analysis,
    status: RankStatus,
    plan: Callable[[int], dict[str, Any]] | None,
) -> None:
    """Search every fraction of one mode, the largest first. One at which nothing fits has the reason."""
    rows = [Row(mode, fraction) for fraction in sorted(options.fractions, reverse=True)]
    try:
        state, largest = StateBytes(), None
        with (
            count_after_steps(state, search.assembly, search.world.device),
            search.finder(mode, status) as finder,
        ):
            for row in rows:
                analysis.rows.append(row)
                found = _find(finder, row, is_first=largest is None)
                largest = largest or found
                if row.peak_bytes is not None:
                    held_bytes = finder.held_bytes
                    row.breakdown = break_down(
                        mode, state, peak_bytes=row.peak_bytes, held_bytes=held_bytes
                    )
                size = "nothing fits" if row.batch_size is None else f"batch size {row.batch_size}"
                logger.info(
                    "%s, %s: %s, %s", mode, row.memory, size, counted(len(row.trials), "trial")
                )
            if largest is not None:
                rates: dict[int, float | None] = {}
                if plan is not None:
                    minutes = search.config.AUTOBATCH.TIMEOUT_MINUTES
                    _time_sizes(
                        finder, rates, largest, options.sizes, minutes, plan, analysis.speeds
                    )
                for row in rows:
                    if row.batch_size is not None:
                        row.samples_per_s = _rate(finder, rates, row.batch_size)
    except AutoBatchError as error:  # the bounds leave no size to try
        analysis.rows += [replace(row, reason=str(error)) for row in rows]


def _find(finder: BatchSizeFinder, row: Row, *, is_first: bool) -> AutoBatchResult | None:
    """Search the fraction of a row, and fill the row even when the search is interrupted.

    The first fraction is searched as training would search it, those below it with a few trials, which start
    from what the earlier ones have shown. So their sizes may remain uncertified.
    """
    num_before = len(finder.trials)
    settings = replace(
        finder.settings, target_memory_fraction=row.memory_fraction, objective="memory", start=None
    )
    row.limited_by = "interrupted"
    try:
        result = finder.find(settings) if is_first else _find_quickly(finder, settings)
        row.batch_size, row.certified, row.limited_by = (
            result.batch_size,
            result.certified,
            result.limited_by,
        )
    except AutoBatchError as error:
        row.limited_by, row.reason, result = None, in_keys(str(error), row.mode), None
    except KeyboardInterrupt:
        fitting = (trial.size for trial in finder.trials if trial.fits(finder.budget_bytes))
        row.batch_size = max(fitting, default=None)
        raise
    finally:
        row.budget_bytes = finder.budget_bytes or None
        row.trials = tuple(finder.trials[num_before:])
        # Of the last trial of the size, which the search of an earlier fraction may have run.
        peaks = [trial.peak_bytes for trial in finder.trials if trial.size == row.batch_size]
        row.peak_bytes = peaks[-1] if peaks else None
    return result


def _find_quickly(finder: BatchSizeFinder, settings: SearchSettings) -> AutoBatchResult:
    quick = replace(
        settings, strategy="guided", tolerance=FURTHER_TOLERANCE, max_trials=FURTHER_TRIALS
    )
    try:
        result = finder.find(quick, confirm=False)
    except AutoBatchError:  # nothing has fitted yet, and a row needs a size
        result = finder.find(replace(quick, max_trials=SearchSettings.max_trials), confirm=False)
    # The bound on trials here is not DATA.AUTOBATCH.MAX_TRIALS, so it must not be reported as that.
    return replace(result, limited_by="memory") if result.limited_by == "max_trials" else result


def _rate(finder: BatchSizeFinder, rates: dict[int, float | None], size: int) -> float | None:
    """Samples per second of a size, timed once; None when something else takes its memory now."""
    if size not in rates:
        timing = finder.time(size)
        rates[size] = timing.samples_per_s if math.isfinite(timing.seconds_per_step) else None
    return rates[size]


def _time_sizes(
    finder: BatchSizeFinder,
    rates: dict[int, float | None],
    largest: AutoBatchResult,
    sizes: list[int] | None,
    timeout_minutes: float,
    plan: Callable[[int], dict[str, Any]],
    speeds: Speeds,
) -> None:
    """Time training sizes, the largest first, and add them to the rates and speeds.

    Without sizes to time beside the largest, until smaller ones only cost or the timeout is over.
    """
    top = largest.batch_size

    def add(size: int) -> None:
        run = plan(size)
        size = run["batch_size"]  # the micro-batch size of training
        rate = _rate(finder, rates, size)
        if rate is None:
            speeds.left_out[size] = "does not fit any more: something else takes memory now"
        else:
            speeds.sizes[size] = timed_size(rate=rate, **run)

    if sizes is not None:
        reason = f"training takes {finder.min_size} to {top} (limited by {largest.limited_by})"
        speeds.left_out |= {size: reason for size in sizes if not finder.min_size <= size <= top}
        for size in sorted({top, *sizes} - speeds.left_out.keys(), reverse=True):
            add(size)
        return
    for timing in reversed(
        finder.prefer_throughput(largest, timeout_minutes=timeout_minutes).timings
    ):
        fits = math.isfinite(timing.seconds_per_step)
        rates[timing.batch_size] = timing.samples_per_s if fits else None
        add(timing.batch_size)
    # A smaller batch needs fewer samples to the same loss, and so may be worth its lower speed.
    if speeds.sizes and speeds.recommended.relative_seconds is not None:
        for rung in rungs(list(Candidates(finder.min_size, top, finder.settings.multiple_of))):
            if speeds.recommended.batch_size > min(speeds.sizes):
                break
            if rung < min(speeds.sizes):
                add(rung)


def planned(config: Config, facts: Facts, goal: Goal, size: int) -> dict[str, Any]:
    """Arguments of `timed_size` for the run that the batch plan makes of the largest size that fits."""
    plan: dict[str, Any] = {
        "batch_size": size,
        "accumulation_steps": config.TRAIN.ACCUMULATION_STEPS,
    }
    try:
        facts = replace(facts, max_micro_batch_size=size)
        found = plan_batches(config.TRAIN, config.OPTIMIZER, config.SCHEDULE, facts)
    except ConfigError as error:
        return {**plan, "goal": goal, "warnings": tuple(error.problems)}
    names = ("accumulation_steps", "learning_rate", "warmup_steps", "total_steps", "warnings")
    plan = {name: getattr(found, name) for name in names}
    return {**plan, "goal": goal, "batch_size": found.micro_batch_size}


def count_after_steps(
    state: StateBytes, assembly: Assembly, device: torch.device
) -> RemovableHandle:
    """Count bytes after each optimizer step, before the gradients are cleared, until the context ends."""
    return assembly.optimizer.register_step_post_hook(
        lambda *_: vars(state).update(vars(state_bytes(assembly, device)))
    )


def break_down(
    mode: Mode, state: StateBytes, *, peak_bytes: int, held_bytes: int, has_buckets: bool = False
) -> Breakdown:
    """Split a peak, of which `held_bytes` were held between the trials, without the buckets of gradients.

    >>> parts = break_down("train", StateBytes(100, 4, 0, 100, 200), peak_bytes=1500, held_bytes=600)
    >>> parts.activations, parts.rest
    (600, 496)

    A training trial allocates the optimizer state; in validation it is there from the start. With buckets
    (of DistributedDataParallel), whose views they are, gradients are there in validation too.
    """
    gradients = state.gradients if mode == "train" or has_buckets else 0
    kept = state.parameters + state.buffers + state.average
    if mode == "val":
        kept += state.optimizer_state
    allocated = gradients + (state.optimizer_state if mode == "train" else 0)
    activations = peak_bytes - held_bytes - allocated
    counts = asdict(replace(state, gradients=gradients))
    return Breakdown(**counts, activations=activations, rest=held_bytes - kept)


# Remedies, at the sizes to paste. Measured ones have the unchanged configuration beside them, so that before
# and after come from a process in the same state: on the CPU it does not give back all memory that it took.


Run = Callable[[Setup, Sequence[Row], int], Sequence[dict[str, Any]]]
"""Runs the training sizes of rows, each divided by a number; gives attributes of `Remedy` for each row."""


def try_remedies(
    setup: Setup, analysis: Analysis, run: Run, changes: Iterable[dict[str, Any]]
) -> None:
    """Find the effect of each change of keys at each training size to paste.

    Rows get a remedy as soon as it is known. What `run` raises is the reason why there is no peak.
    """
    rows = [
        row for row in analysis.chosen_rows() if row.mode == "train" and row.batch_size is not None
    ]
    if not rows:
        return
    before = [row.peak_bytes for row in rows]
    if not analysis.is_predicted:  # otherwise the same would be predicted again
        logger.info("remedies: measuring the configuration as it is again")
        before = [found.get("peak_bytes") for found in run(setup, rows, 1)]
    for keys in changes:
        logger.info("remedies: %s", ", ".join(keys))
        setup.status.update(f"remedies: {', '.join(keys)}")
        config = setup.config
        for key, value in keys.items():
            node, name = key.split(".")
            config = replace(config, **{node: replace(getattr(config, node), **{name: value})})
        divisor = config.TRAIN.ACCUMULATION_STEPS // setup.config.TRAIN.ACCUMULATION_STEPS
        try:
            found = run(replace(setup, config=config), rows, divisor)
        except Exception as error:  # a user's model may not take every precision
            logger.debug("a remedy failed", exc_info=True)
            kind = "" if isinstance(error, LinnaeusError) else f"{type(error).__name__}: "
            found = [{"reason": f"{kind}{' '.join(str(error).split())}"}] * len(rows)
        for row, peak_bytes, effect in zip(rows, before, found, strict=True):
            size = max(1, (row.batch_size or 0) // divisor)
            row.remedies.append(Remedy(keys, size, peak_bytes, **effect))


def common_changes(setup: Setup) -> Iterator[dict[str, Any]]:
    """The remedies that change something, in order, as keys with their new values."""
    train, device = setup.config.TRAIN, setup.world.device
    if train.AMP == "off" and (
        device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        yield {"TRAIN.AMP": "bf16"}
    if not train.GRADIENT_CHECKPOINTING:
        yield {"TRAIN.GRADIENT_CHECKPOINTING": True}
    yield {"TRAIN.ACCUMULATION_STEPS": 2 * train.ACCUMULATION_STEPS}


def run_sizes(
    setup: Setup, rows: Sequence[Row], divisor: int, *, timed: bool
) -> list[dict[str, Any]]:
    """Measure the sizes of rows under a configuration."""
    found = list[dict[str, Any]]()
    try:
        with setup.search().finder("train", setup.status) as finder:
            for row in rows:
                size = max(1, (row.batch_size or 0) // divisor)
                peak_bytes = finder.measure(size).peak_bytes
                if peak_bytes is None:
                    found.append({"reason": f"needs more than {finder.budget_bytes / GIB:.3f} GiB"})
                else:
                    speed = finder.time(size).samples_per_s if timed else 0.0
                    found.append({"peak_bytes": peak_bytes, "samples_per_s": speed or None})
    finally:
        gc.collect()
    return found


# The environment in which the figures hold.


def run_settings(model_node: Any, search: SizeSearch) -> dict[str, Any]:
    """The settings that memory depends on."""
    train, taxonomy = search.train, search.data.taxonomy
    parameters = list(search.assembly.model.parameters())
    freezing = search.assembly.freezing
    dtypes = ", ".join(sorted({str(each.dtype).removeprefix("torch.") for each in parameters}))
    return {
        "memory_limit_gb": search.config.AUTOBATCH.MEMORY_LIMIT_GB,
        "model": str(model_node["_target_"] if is_target(model_node) else model_node.NAME),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "frozen_parameters": 0 if freezing.ends_within(train.EPOCHS) else freezing.num_elements,
        "precision": dtypes if train.AMP == "off" else f"{train.AMP} autocast over {dtypes}",
        "optimizer": type(search.assembly.optimizer).__name__,
        "image_size": None if search.data.img_size is None else list(search.data.img_size),
        "num_classes": None if taxonomy is None else list(taxonomy.num_classes.values()),
        "gradient_checkpointing": train.GRADIENT_CHECKPOINTING,
        "accumulation_steps": train.ACCUMULATION_STEPS,
        "ema": train.EMA.ENABLED,
    }


def device_sentence(environment: Mapping[str, Any]) -> str:
    """The device, and what is measured on it."""
    limit = environment["memory_limit_gb"]
    return (
        f"measured on {environment['device']} ({environment['device_name']}) with "
        f"{environment['total_bytes'] / GIB:.1f} GiB{'' if limit is None else f', taken as {limit:g} GiB'}, "
        f"torch {environment['torch']}; {settings_sentence(environment)}"
    )


def settings_sentence(environment: Mapping[str, Any]) -> str:
    """What is run, for people: of `run_settings` all that memory depends on; what is off is left out."""
    size, classes = environment["image_size"], environment["num_classes"]
    num_steps = environment["accumulation_steps"]
    parts = {
        environment["model"]: True,
        f"{environment['parameters']:,} parameters": True,
        f"{environment['frozen_parameters']:,} of them frozen": environment["frozen_parameters"]
        > 0,
        f"{'×'.join(map(str, size or []))} pixels": size is not None,
        f"{' + '.join(map(str, classes or []))} classes": classes is not None,
        environment["precision"]: True,
        environment["optimizer"]: True,
        "gradient checkpointing": environment["gradient_checkpointing"],
        f"{num_steps} accumulation steps": num_steps > 1,
        "EMA": environment["ema"],
    }
    return ", ".join(part for part, applies in parts.items() if applies)
