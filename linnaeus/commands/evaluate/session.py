"""One evaluation, from a run's folder to its files."""

from __future__ import annotations

import dataclasses
import json
import logging
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console

from linnaeus import __version__
from linnaeus.autobatch.planning import size_origin
from linnaeus.autobatch.report import device_environment
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.autobatch.sizes import SizeSearch, find_evaluation_size
from linnaeus.commands.evaluate.options import Options, RunConfig
from linnaeus.commands.evaluate.output import show
from linnaeus.commands.evaluate.plot import save_plot
from linnaeus.commands.evaluate.results import Evaluation, Logged, files_of
from linnaeus.config.load import with_batch_sizes
from linnaeus.config.schema import Config
from linnaeus.console import ProgressBar, make_console
from linnaeus.data.bundle import as_size, dataset_length
from linnaeus.data.evaluation import EvaluationData, Request, build_evaluation_data
from linnaeus.data.loader import build_loaders
from linnaeus.dist import RankEnded, World, errors_told_first, join
from linnaeus.errors import ConfigError
from linnaeus.inference.evaluate import (
    Outcome,
    assemble_evaluation,
    check_takes_size,
    evaluate,
    evaluated_preprocessing,
)
from linnaeus.inference.figures import distance_of_mistakes, figures_of
from linnaeus.inference.trained import TrainedRun, load_run
from linnaeus.log import close_logging, set_up_logging
from linnaeus.rng import seed_all, set_deterministic
from linnaeus.signals import StopRequest
from linnaeus.training import fingerprint

REPORT_S = 30.0
"""Time between two lines about the progress where there is no progress bar."""
_PARTS = ("val", "valid", "validation", "test", "train")

logger = logging.getLogger("linnaeus.evaluate")


@dataclass(frozen=True)
class _Session:
    """What all steps of an evaluation need.

    Attributes:
        options: of the command line.
        run: the configurations.
        trained: the run.
        world: the processes.
        console: rank 0's.
    """

    options: Options
    run: RunConfig
    trained: TrainedRun
    world: World
    console: Console

    @property
    def is_own_dataset(self) -> bool:
        """Whether the dataset is that of the run."""
        return bool(self.run.config.DATA.DATASET == self.run.own.DATA.DATASET)


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
            world.check_equal(fingerprint.of_configuration(dataclasses.asdict(config)))
            seed_all(config.EXPERIMENT.SEED)
            world.update("reading the run")
            trained = load_run(options.run, checkpoint=options.checkpoint, device=str(world.device))
            _evaluate(_Session(options, run_config, trained, world, console))
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


def _evaluate(session: _Session) -> None:
    world, trained = session.world, session.trained
    data = _data(session)
    output = world.on_main(lambda: _output(session, data))
    if world.is_main:
        for sentence in data.bundle.report:
            logger.info("%s", sentence)
    config, outcome = _measure(session, data)
    if outcome.levels is None:
        return
    taxonomy = trained.spec.taxonomy
    evaluation = Evaluation(
        checkpoint=_checkpoint(trained),
        data=_describe(session, data) | {"samples": dataset_length(data.bundle.val)}
        | {"left_out": data.num_left_out},
        settings=_settings(config, world),
        versions={
            "linnaeus": __version__, "torch": torch.__version__, "timm": timm.__version__,
            "python": platform.python_version(),
        },
        metrics=outcome.metrics,
        levels=figures_of(taxonomy, outcome.levels),
        distance=None if taxonomy is None else distance_of_mistakes(taxonomy, outcome.levels[-1]),
        logged=_logged(session, config, outcome, data),
        seconds=outcome.seconds,
        notes=data.bundle.report,
    )  # fmt: skip
    _write(evaluation, output, session)


def _data(session: _Session) -> EvaluationData:
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


def _measure(session: _Session, data: EvaluationData) -> tuple[Config, Outcome]:
    """Find the batch size where that is asked for, and run over the data."""
    config, world = session.run.config, session.world
    assembly, metrics = assemble_evaluation(session.trained, config.LOSS, config.TRAIN)
    found: AutoBatchResult | None = None
    if config.DATA.AUTOBATCH.ENABLED_VAL:
        search = SizeSearch(
            config.DATA, config.TRAIN, data.bundle, assembly, world, config.EXPERIMENT.SEED,
            console=session.console if world.is_main else None,
        )  # fmt: skip
        found = find_evaluation_size(search)
        config = with_batch_sizes(config, val=found.batch_size)
        logger.info("AutoBatch: DATA.BATCH_SIZE_VAL %d", found.batch_size)
    size = config.DATA.BATCH_SIZE_VAL
    loaders = build_loaders(
        data.bundle, sizes=lambda epoch, skip: iter(()), batch_size_val=size, data_config=config.DATA,
        seed=config.EXPERIMENT.SEED, rank=world.rank, world_size=world.world_size, device=world.device,
        local_world_size=world.local_world_size,
    )  # fmt: skip
    num_samples = dataset_length(data.bundle.val)
    num_batches = len(range(0, len(range(world.rank, num_samples, world.world_size)), size))
    world.update("evaluating")
    with closing(loaders), ProgressBar(session.console if world.is_main else None) as bar:
        bar.start("evaluating", num_batches)
        outcome = evaluate(
            assembly.validation_step, metrics, loaders.val, world,
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


# What is said about the evaluation.


def _checkpoint(trained: TrainedRun) -> dict[str, Any]:
    progress = trained.content["progress"]
    folder = trained.folder
    name = trained.checkpoint.name if folder is None else f"{folder.name}/{trained.checkpoint.name}"
    return {
        "name": name,
        "file": str(trained.checkpoint.resolve()),
        "run": None if folder is None else str(folder.resolve()),
        "epoch": progress["epoch"],
        "step": progress["step"],
        "model": trained.spec.node.get("NAME", trained.spec.node.get("_target_")),
        "ema": bool(trained.content.get("config", {}).get("TRAIN", {}).get("EMA", {}).get("ENABLED")),
    }


def _describe(session: _Session, data: EvaluationData) -> dict[str, Any]:
    """What tells this data, as the model sees it, from other data."""
    dataset, preprocessing = session.run.config.DATA.DATASET, data.bundle.preprocessing
    return {
        "source": data.source,
        "part": data.part,
        "dataset": dict(dataset) if isinstance(dataset, Mapping) else dataclasses.asdict(dataset),
        "image_size": None if preprocessing is None else list(preprocessing.size),
        "crop_fraction": None if preprocessing is None else preprocessing.crop_fraction,
    }


def _settings(config: Config, world: World) -> dict[str, Any]:
    return {
        "batch_size_val": config.DATA.BATCH_SIZE_VAL,
        "processes": world.world_size,
        **{name: value for name, value in device_environment(world.device).items() if name != "python"},
        "amp": config.TRAIN.AMP,
        "channels_last": config.TRAIN.CHANNELS_LAST,
        "compile": config.TRAIN.COMPILE,
    }


def _logged(session: _Session, config: Config, outcome: Outcome, data: EvaluationData) -> Logged | None:
    """The comparison with the figures in the checkpoint; None where they are not of this data and state."""
    content, own = session.trained.content, session.run.own
    progress = content["progress"]
    was_validated = progress["epoch"] % own.TRAIN.VALIDATE_EVERY == 0 or progress["epoch"] == own.TRAIN.EPOCHS
    if not session.is_own_dataset or data.num_left_out or progress["samples"] or not was_validated:
        return None
    if not progress["metrics"]:
        return None
    return Logged.of(progress["metrics"], outcome.metrics, _other_settings(session, config, data))


def _other_settings(session: _Session, config: Config, data: EvaluationData) -> list[str]:
    """What is not as it was in training, of all that the last digits of the figures depend on."""
    content, own, world = session.trained.content, session.run.own, session.world
    before: dict[str, Any] = {
        "DATA.BATCH_SIZE_VAL": own.DATA.BATCH_SIZE_VAL if session.trained.folder is not None else None,
        "TRAIN.AMP": own.TRAIN.AMP,
        "TRAIN.CHANNELS_LAST": own.TRAIN.CHANNELS_LAST,
        "TRAIN.COMPILE": own.TRAIN.COMPILE,
        "DATA.ON_BAD_IMAGE": own.DATA.ON_BAD_IMAGE,
        "processes": content.get("plan", {}).get("WORLD_SIZE"),
    }
    now: dict[str, Any] = {
        "DATA.BATCH_SIZE_VAL": config.DATA.BATCH_SIZE_VAL,
        "TRAIN.AMP": config.TRAIN.AMP,
        "TRAIN.CHANNELS_LAST": config.TRAIN.CHANNELS_LAST,
        "TRAIN.COMPILE": config.TRAIN.COMPILE,
        "DATA.ON_BAD_IMAGE": config.DATA.ON_BAD_IMAGE,
        "processes": world.world_size,
    }
    trained_with, preprocessing = session.trained.spec.preprocessing, data.bundle.preprocessing
    if trained_with is not None and preprocessing is not None:
        before |= {"image size": trained_with.size, "crop fraction": trained_with.crop_fraction}
        now |= {"image size": preprocessing.size, "crop fraction": preprocessing.crop_fraction}
    environment = device_environment(world.device) | {"device": world.device.type}
    saved = json.loads(content.get("searched_for", "{}")).get("environment", {})
    for name in ("device", "device_name", "torch"):
        before[name], now[name] = saved.get(name), environment[name]
    return [
        f"{name} {now[name]} ({'not known' if value is None else value} in the run)"
        for name, value in before.items()
        if value != now[name]
    ]


# Files.


def _output(session: _Session, data: EvaluationData) -> Path:
    """The beginning of the files' names; never that of an evaluation of other data.

    Raises:
        ConfigError: `--output` names the files of such an evaluation, or they cannot be written.
    """
    wanted, trained = session.options.output, session.trained
    describes = json.loads(json.dumps(_describe(session, data)))
    if wanted is not None and not wanted.is_dir():
        other = _other_data(wanted, describes)
        if other is not None:
            raise ConfigError(
                f"--output: {files_of(wanted)[0]} holds an evaluation of other data ({other}); choose "
                "another name, or remove the file"
            )
        return _made(wanted)
    folder = wanted or (trained.folder or trained.checkpoint.parent) / "evaluations"
    stem = folder / _name(session, data)
    path, number = stem, 1
    while _other_data(path, describes) is not None:
        number += 1
        path = stem.with_name(f"{stem.name}_{number}")
    return _made(path)


def _made(path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--output: {path.parent} cannot be made: {error.strerror}; choose another folder"
        ) from error
    return path


def _name(session: _Session, data: EvaluationData) -> str:
    checkpoint = session.options.checkpoint
    names = [checkpoint if checkpoint in ("best", "last") else Path(checkpoint).stem]
    if session.options.run.is_file():
        names = [session.options.run.stem]
    if not session.is_own_dataset:
        source = Path(data.source)
        is_part = source.name in _PARTS and source.parent.name
        names.append(f"{source.parent.name}_{source.name}" if is_part else source.stem or data.source)
    trained_with, preprocessing = session.trained.spec.preprocessing, data.bundle.preprocessing
    if trained_with is not None and preprocessing is not None and trained_with.size != preprocessing.size:
        names.append("x".join(map(str, preprocessing.size)))
    return re.sub(r"[^\w.-]+", "_", "_".join(names))


def _other_data(path: Path, describes: Mapping[str, Any]) -> str | None:
    """What the evaluation in these files was made on, if that is other data; None where there is none."""
    file = files_of(path)[0]
    if not file.exists():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))["data"]
        is_same = {name: data.get(name) for name in describes} == describes
        return None if is_same else str(data.get("source"))
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return "not an evaluation"


def _write(evaluation: Evaluation, output: Path, session: _Session) -> None:
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
    logger.info("%.1f samples/s", evaluation.data["samples"] / max(evaluation.seconds, 1e-9))
    logger.info("written: %s", ", ".join(map(str, written)))
