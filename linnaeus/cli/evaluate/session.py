"""One evaluation, from a run's folder to its files."""

from __future__ import annotations

import dataclasses
import logging
import math
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import timm
import torch
from rich.console import Console

from linnaeus import __version__
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.cli.evaluate.context import Session
from linnaeus.cli.evaluate.describe import (
    compare_with_training,
    describe_checkpoint,
    describe_data,
    describe_settings,
)
from linnaeus.cli.evaluate.names import choose_output
from linnaeus.cli.evaluate.options import Options, RunConfig
from linnaeus.cli.evaluate.output import show
from linnaeus.cli.evaluate.plot import save_plot
from linnaeus.cli.evaluate.results import Evaluation, files_of
from linnaeus.config.load import with_batch_sizes
from linnaeus.config.schema import Config
from linnaeus.console import ProgressBar, make_console
from linnaeus.data.bundle import as_size, dataset_length
from linnaeus.data.evaluation import EvaluationData, Request, build_evaluation_data
from linnaeus.data.loader import build_val_loader
from linnaeus.dist import RankEnded, World, errors_told_first, join
from linnaeus.inference.evaluate import (
    Outcome,
    assemble_evaluation,
    check_takes_size,
    evaluate,
    evaluated_preprocessing,
)
from linnaeus.inference.figures import distance_of_mistakes, figures_of
from linnaeus.inference.trained import load_run
from linnaeus.log import close_logging, set_up_logging
from linnaeus.rng import seed_all, set_deterministic
from linnaeus.signals import StopRequest
from linnaeus.sizing.planning import size_origin
from linnaeus.sizing.sizes import SizeSearch
from linnaeus.training.build import configuration_facts

REPORT_S = 30.0
"""Time between two lines about the progress where there is no progress bar."""

logger = logging.getLogger("linnaeus.evaluate")


def run(options: Options, run_config: RunConfig) -> int:
    """Evaluate, write the files and show the figures; returns the exit code, 0.

    Raises:
        LinnaeusError: something that the user can mend; the message says how.
    """
    config = run_config.config
    set_deterministic(config.TRAIN.DETERMINISTIC)
    try:
        with (
            StopRequest().listening(),
            join(config.EXPERIMENT.DEVICE, config.DIST) as world,
            _logging(world) as console,
            errors_told_first(world),
        ):
            world.check_equal(configuration_facts(dataclasses.asdict(config)))
            seed_all(config.EXPERIMENT.SEED)
            world.update("reading the run")
            trained = load_run(options.run, checkpoint=options.checkpoint, device=str(world.device))
            _evaluate(Session(options, run_config, trained, world, console))
    except RankEnded as ended:
        ended.leave()
    return 0


@contextmanager
def _logging(world: World) -> Iterator[Console]:
    console = make_console()
    set_up_logging(None, rank=world.rank, console=console)
    try:
        yield console
    finally:
        close_logging()


def _evaluate(session: Session) -> None:
    world, trained = session.world, session.trained
    data = _data(session)
    output = world.on_main(lambda: choose_output(session, data))
    if world.is_main:
        for sentence in data.bundle.report:
            logger.info("%s", sentence)
    config, outcome = _measure(session, data)
    if outcome.levels is None:
        return
    taxonomy = trained.spec.taxonomy
    evaluation = Evaluation(
        checkpoint=describe_checkpoint(trained),
        data=describe_data(session, data) | {"samples": dataset_length(data.bundle.val)}
        | {"left_out": data.num_left_out},
        settings=describe_settings(config, world),
        versions={
            "linnaeus": __version__, "torch": torch.__version__, "timm": timm.__version__,
            "python": platform.python_version(),
        },
        metrics=outcome.metrics,
        levels=figures_of(taxonomy, outcome.levels),
        distance=None if taxonomy is None else distance_of_mistakes(taxonomy, outcome.levels[-1]),
        logged=compare_with_training(session, config, outcome, data),
        duration_s=outcome.duration_s,
        notes=data.bundle.report,
    )  # fmt: skip
    _write(evaluation, output, session)


def _data(session: Session) -> EvaluationData:
    """The samples to evaluate, preprocessed for the model."""
    trained, world = session.trained, session.world
    config, own = session.run.config.DATA, session.run.own.DATA
    size = None
    if config.IMG_SIZE != own.IMG_SIZE and config.IMG_SIZE is not None:
        size = as_size(config.IMG_SIZE, (0, 0))
    crop = config.AUGMENT.CROP_FRACTION
    crop_fraction = None if crop == own.AUGMENT.CROP_FRACTION else crop
    preprocessing = evaluated_preprocessing(trained, size, crop_fraction)
    if preprocessing is not None:
        check_takes_size(trained, preprocessing)
    world.update("building the data")
    request = Request(
        config, trained.spec.index, preprocessing, session.run.config.EXPERIMENT.SEED,
        is_own=session.is_own_dataset, skips_unknown=session.options.unknown == "skip",
    )  # fmt: skip
    data = build_evaluation_data(request, world.on_main)
    world.check_equal({"samples to evaluate": dataset_length(data.bundle.val)})
    return data


def _measure(session: Session, data: EvaluationData) -> tuple[Config, Outcome]:
    """Find the batch size where that is asked for, and run over the data."""
    config, world = session.run.config, session.world
    assembly, metrics = assemble_evaluation(session.trained, config.LOSS, config.TRAIN)
    found: AutoBatchResult | None = None
    if config.DATA.AUTOBATCH.ENABLED_VAL:
        search = SizeSearch(
            config.DATA, config.TRAIN, data.bundle, assembly, world, config.EXPERIMENT.SEED,
            console=session.console if world.is_main else None,
        )  # fmt: skip
        with search.on_ranks("val") as search_all:
            found = search_all()
        config = with_batch_sizes(config, val=found.batch_size)
        logger.info("AutoBatch: DATA.BATCH_SIZE_VAL %d", found.batch_size)
    size = config.DATA.BATCH_SIZE_VAL
    loader = build_val_loader(
        data.bundle, batch_size=size, data_config=config.DATA, seed=config.EXPERIMENT.SEED, rank=world.rank,
        world_size=world.world_size, device=world.device, local_world_size=world.local_world_size,
    )  # fmt: skip
    num_samples = len(range(world.rank, dataset_length(data.bundle.val), world.world_size))
    world.update("evaluating")
    with closing(loader), ProgressBar(session.console if world.is_main else None) as bar:
        bar.start("evaluating", math.ceil(num_samples / size))
        outcome = evaluate(
            assembly.validation_step, metrics, loader, world,
            size_origin("val", config.DATA, found), _progress(bar),
        )  # fmt: skip
    return config, outcome


def _progress(bar: ProgressBar) -> Callable[[], None]:
    """Advances the bar by a batch; where no bar is shown, a line is logged from time to time."""
    last = time.monotonic()

    def advance() -> None:
        nonlocal last
        bar.advance(1)
        if time.monotonic() - last >= REPORT_S:
            last = time.monotonic()
            bar.describe({})

    return advance


def _write(evaluation: Evaluation, output: Path, session: Session) -> None:
    figures, classes, picture = files_of(output)
    evaluation.save(figures)
    written = [figures]
    if evaluation.levels:
        evaluation.save(classes)
        written.append(classes)
    if any(level.num_samples for level in evaluation.levels):
        picture = session.options.plot or picture
        save_plot(evaluation, picture)
        written.append(picture)
    show(evaluation, session.console)
    logger.info("%.1f samples/s", evaluation.data["samples"] / max(evaluation.duration_s, 1e-9))
    logger.info("written: %s", ", ".join(map(str, written)))
