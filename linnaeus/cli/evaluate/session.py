"""One evaluation, from a run's folder to its files."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from rich.console import Console

from linnaeus import __version__
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.cli.arguments import naming_options
from linnaeus.cli.evaluate.options import EvaluateOptions
from linnaeus.cli.evaluate.report import Evaluation
from linnaeus.cli.evaluate.samples import sample_table, write_samples
from linnaeus.cli.parser import unwritable
from linnaeus.cli.plots import draw_evaluation
from linnaeus.config.dump import with_batch_sizes
from linnaeus.config.schema import Config
from linnaeus.data.bundle import as_size, dataset_length
from linnaeus.data.image_files import ImageFiles
from linnaeus.data.loader import build_val_loader, with_num_workers
from linnaeus.data.split_file import SPLIT_FILE
from linnaeus.inference.evaluate import (
    Outcome,
    assemble_evaluation,
    check_takes_size,
    evaluate,
    evaluated_preprocessing,
)
from linnaeus.inference.evaluation_data import (
    EvaluationData,
    EvaluationRequest,
    build_evaluation_data,
)
from linnaeus.inference.figures import LevelFigures, distance_of_mistakes
from linnaeus.inference.trained import TrainedRun
from linnaeus.runtime.console import ProgressBar, make_console
from linnaeus.runtime.distributed import RankEnded, World, join, report_errors_to_all_ranks
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.log import close_logging, set_up_logging
from linnaeus.runtime.rng import deterministic, kernels, seed_all
from linnaeus.runtime.signals import StopRequest
from linnaeus.runtime.words import counted
from linnaeus.size_search.planned_sizes import size_origin
from linnaeus.size_search.report import device_environment
from linnaeus.size_search.searches import SizeSearch
from linnaeus.training.build import configuration_facts

_RESIZING = ("crop_fraction", "interpolation", "resize")
"""Attributes of a `Preprocessing` that a key of DATA.AUGMENT with the same name sets."""
MAX_LEVELS = 4
"""Levels that are drawn: the finest ones."""
logger = logging.getLogger("linnaeus.evaluate")


@dataclass(frozen=True)
class Session:
    """Shared objects of an evaluation; the console is rank 0's."""

    options: EvaluateOptions
    config: Config
    own: Config
    trained: TrainedRun
    world: World
    console: Console

    @property
    def is_own_dataset(self) -> bool:
        """Whether the dataset is the run's own."""
        return bool(self.config.DATA.DATASET == self.own.DATA.DATASET)


def run(options: EvaluateOptions, config: Config, own: Config) -> int:
    """Evaluate, write the files and show the metrics; returns the exit code, 0.

    `own` is the configuration of the run, `config` includes the changes of the command line.

    Raises:
        LinnaeusError: an error that the user can fix; the message says how.
    """
    console = make_console()
    try:
        with (
            naming_options(),
            deterministic(config.TRAIN.DETERMINISTIC),
            StopRequest().listening(),
            join(config.EXPERIMENT.DEVICE, config.DIST) as world,
            kernels(config.EXPERIMENT, world.device),
            report_errors_to_all_ranks(world),
        ):
            set_up_logging(None, rank=world.rank, console=console)
            world.check_equal(configuration_facts(dataclasses.asdict(config)))
            seed_all(config.EXPERIMENT.SEED)
            world.update("reading the run")
            trained = options.load(options.run, str(world.device))
            _evaluate(Session(options, config, own, trained, world, console))
    except RankEnded as ended:
        ended.leave()
    finally:
        close_logging()
    return 0


def _evaluate(session: Session) -> None:
    world, trained = session.world, session.trained
    data = _data(session)
    dataset, preprocessing = session.config.DATA.DATASET, data.bundle.preprocessing
    about_data = {  # identifies this data, with its preprocessing
        "source": data.source,
        "part": data.part,
        "dataset": dict(dataset) if isinstance(dataset, Mapping) else dataclasses.asdict(dataset),
        "image_size": preprocessing and list(preprocessing.size),
        **{name: preprocessing and getattr(preprocessing, name) for name in _RESIZING},
    }
    output = world.on_main(lambda: _output(session, data, about_data))
    files = _files(session, data)
    if world.is_main:
        for sentence in data.bundle.report:
            logger.info("%s", sentence)
    config, outcome = _measure(session, data)
    if outcome.levels is None:  # not rank 0
        return
    taxonomy, progress, folder = trained.spec.taxonomy, trained.content["progress"], trained.folder
    file = trained.checkpoint
    about = {
        "checkpoint": {
            "name": file.name if folder is None else f"{folder.name}/{file.name}",
            "file": str(file.resolve()),
            "run": None if folder is None else str(folder.resolve()),
            "epoch": progress["epoch"],
            "step": progress["step"],
        },
        "data": about_data
        | {"samples": dataset_length(data.bundle.val), "left_out": data.num_left_out},
        "settings": {
            "batch_size_val": config.DATA.BATCH_SIZE_VAL,
            "processes": world.world_size,
            **device_environment(world.device),
            "amp": config.TRAIN.AMP,
            "channels_last": config.TRAIN.CHANNELS_LAST,
            "compile": config.TRAIN.COMPILE,
        },
        "version": __version__,
        "notes": data.bundle.report,
        "duration_s": outcome.duration_s,
    }
    finest = outcome.levels[-1] if outcome.levels else None
    distance = None
    if taxonomy is not None and isinstance(finest, LevelFigures):
        distance = distance_of_mistakes(taxonomy, finest)
    logged = _logged(session, data)
    evaluation = Evaluation(about, outcome.metrics, outcome.levels, distance, logged)
    _write(evaluation, output, session)
    if outcome.samples is not None and (path := session.options.samples) is not None:
        assert taxonomy is not None
        assert trained.spec.preprocessing is not None  # as they are image files
        table = sample_table(outcome.samples, files, taxonomy)
        sheet = write_samples(table, taxonomy, trained.spec.preprocessing, path)
        logger.info("samples: %s, %s", path, sheet)


def _files(session: Session, data: EvaluationData) -> list[str]:
    """Return the image files, for `--samples`; `ConfigError` if there is none."""
    samples, taxonomy = data.bundle.val, session.trained.spec.taxonomy
    if session.options.samples is None:
        return []
    if not isinstance(samples, ImageFiles) or taxonomy is None or taxonomy.is_multilabel:
        raise ConfigError("--samples: is for image files with one label per level; leave it out")
    return samples.files


def _data(session: Session) -> EvaluationData:
    """Return the samples to evaluate, preprocessed for the model."""
    trained, world = session.trained, session.world
    config, own = session.config.DATA, session.own.DATA
    changes: dict[str, Any] = {
        name: getattr(config.AUGMENT, name.upper())
        for name in _RESIZING
        if getattr(config.AUGMENT, name.upper()) not in (None, getattr(own.AUGMENT, name.upper()))
    }
    if config.IMG_SIZE not in (None, own.IMG_SIZE):
        changes["size"] = as_size(config.IMG_SIZE, (0, 0))
    preprocessing = evaluated_preprocessing(trained, changes)
    if preprocessing is not None:
        check_takes_size(trained, preprocessing)
    world.update("building the data")
    request = EvaluationRequest(
        config,
        trained.spec.index,
        preprocessing,
        session.config.EXPERIMENT.SEED,
        is_run_dataset=session.is_own_dataset,
        skip_unknown=session.options.unknown == "skip",
        split_file=None if trained.folder is None else trained.folder / SPLIT_FILE,
    )
    data = build_evaluation_data(request, world.on_main)
    world.check_equal({"samples to evaluate": dataset_length(data.bundle.val)})
    return data


def _measure(session: Session, data: EvaluationData) -> tuple[Config, Outcome]:
    """Find the batch size if requested, and run over the data."""
    config, world = session.config, session.world
    loading = with_num_workers(config.DATA, data.bundle, world)
    config = dataclasses.replace(config, DATA=loading)
    assembly, metrics = assemble_evaluation(session.trained, config.LOSS, config.TRAIN)
    found: AutoBatchResult | None = None
    if config.DATA.AUTOBATCH.ENABLED_VAL:
        search = SizeSearch(
            config.DATA,
            config.TRAIN,
            data.bundle,
            assembly,
            world,
            config.EXPERIMENT.SEED,
            console=session.console if world.is_main else None,
        )
        with search.on_ranks("val") as search_all:
            found = search_all()
        config = with_batch_sizes(config, val=found.batch_size)
        logger.info("AutoBatch: DATA.BATCH_SIZE_VAL %d", found.batch_size)
    size = config.DATA.BATCH_SIZE_VAL
    loader = build_val_loader(
        data.bundle, config.DATA, world, batch_size=size, seed=config.EXPERIMENT.SEED
    )
    num_samples = len(range(world.rank, dataset_length(data.bundle.val), world.world_size))
    world.update("evaluating")
    logger.info("evaluating %s, %d at a time", counted(num_samples, "sample"), size)
    with closing(loader), ProgressBar(session.console if world.is_main else None) as bar:
        bar.start("evaluating", math.ceil(num_samples / size))
        origin = size_origin("val", config.DATA, found)
        outcome = evaluate(
            assembly.validation_step, metrics, loader, world, origin, lambda: bar.advance(1)
        )
    return config, outcome


def _write(evaluation: Evaluation, output: Path, session: Session) -> None:
    written = [_file(output, ".json")]
    if evaluation.levels:
        written.append(_file(output, "_classes.csv"))
    for path in written:
        evaluation.save(path)
    if any(level.num_samples for level in evaluation.levels):
        written.append(_file(output, ".png"))
        levels = [level for level in evaluation.levels if level.num_samples][-MAX_LEVELS:]
        title = f"{evaluation.about['checkpoint']['name']} on {evaluation.data_title}"
        draw_evaluation(levels, title, written[-1])
    evaluation.show(session.console)
    about = evaluation.about
    logger.info("%.1f samples/s", about["data"]["samples"] / max(about["duration_s"], 1e-9))
    logger.info("written: %s", ", ".join(map(str, written)))


def _file(output: Path, ending: str) -> Path:
    return output.with_name(output.name + ending)


def _logged(session: Session, data: EvaluationData) -> dict[str, float] | None:
    """Return the metrics of training in the checkpoint; None where they are not of this data and state."""
    progress, own = session.trained.content["progress"], session.own
    is_whole = own.DATA.LIMIT_VAL_SAMPLES is None and own.TRAIN.OVERFIT_BATCHES is None
    is_comparable = session.is_own_dataset and not data.num_left_out and is_whole
    was_validated = progress["validated"] == progress["step"]
    values = {k: v for k, v in progress["metrics"].items() if not k.startswith("raw/")}
    return values or None if is_comparable and was_validated else None


def _output(session: Session, data: EvaluationData, about_data: dict[str, Any]) -> Path:
    """Return the beginning of the files' names.

    It is the name of the checkpoint. Where data or preprocessing are not the run's own, the name of the data
    and a number follow, which tells such evaluations apart.

    Raises:
        ConfigError: the files cannot be written.
    """
    options, trained = session.options, session.trained
    path = options.output
    if path is None:
        name = trained.checkpoint.stem
        is_own = session.is_own_dataset and data.bundle.preprocessing == trained.spec.preprocessing
        if not is_own:
            number = crc32(json.dumps(about_data, sort_keys=True, default=str).encode())
            source = Path(data.source)
            title = source.stem if source.is_file() else source.name
            name += f"_{title[-100:]}_{number:08x}"
        path = (trained.folder or trained.checkpoint.parent) / "evaluations" / name
    for file in (path, options.samples):
        if file is not None:
            with suppress(OSError):  # the check reports the reason
                file.parent.mkdir(parents=True, exist_ok=True)
    if problems := unwritable({"--output": _file(path, ".json"), "--samples": options.samples}):
        raise ConfigError(problems)
    return path
