"""Tracking with Weights & Biases, TensorBoard and MLflow."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from typing import Any

from linnaeus.config.schema import ExperimentConfig
from linnaeus.runtime.errors import ConfigError, LinnaeusError, first_line
from linnaeus.runtime.files import LOGS
from linnaeus.training.resume import flat

logger = logging.getLogger("linnaeus.training.tracking")


class Tracker:
    """Passes a run's metrics to loggers by name, in addition to the run's files. Drops a logger that fails.

    The end of its context closes the run, after an exception with exit code 1. Methods that a logger does not
    override do nothing.
    """

    _loggers: Mapping[str, Tracker] = {}

    def __init__(self, **loggers: Tracker) -> None:
        self._loggers = loggers

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Metrics at an optimizer step."""
        self._each("log", values, step=step)

    def summarise(self, values: Mapping[str, Any]) -> None:
        """The run's final metrics."""
        self._each("summarise", values)

    def finish(self, exit_code: int) -> None:
        """Close the run."""
        self._each("finish", exit_code)

    def _each(self, method: str, *arguments: Any, **options: Any) -> None:
        for name, tracker in self._loggers.items():
            try:
                getattr(tracker, method)(*arguments, **options)
            except LinnaeusError:  # such as a full disk
                raise
            except Exception as error:
                self._loggers = {k: other for k, other in self._loggers.items() if k != name}
                logger.warning(
                    "warning: %s records no more of this run: %s", name, first_line(error)
                )
                with suppress(Exception):
                    tracker.finish(1)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish(0 if kind is None else 1)


class _WandbTracker(Tracker):
    """One Weights & Biases run. Its client's own process ends on the SIGTERM that a whole job gets."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(values), step=step)

    def summarise(self, values: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(values))

    def finish(self, exit_code: int) -> None:
        """Close the run, and say how to upload one that was recorded offline."""
        import wandb

        if self._run.settings.mode == "offline":
            logger.info(
                "W&B recorded offline; upload with: wandb sync %s", Path(self._run.dir).parent
            )
        try:
            self._run.finish(exit_code=exit_code)
        except (
            Exception
        ):  # its process has ended: at exit it would speak to that, and print a traceback
            wandb.teardown(exit_code)
            raise


class _TensorBoardTracker(Tracker):
    """Event files. TensorBoard drops earlier records of the steps that a run repeats."""

    def __init__(self, folder: Path, config: Mapping[str, Any], num_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=num_steps + 1)
        code = indent(json.dumps(config, indent=1), "    ")  # Markdown takes it as code
        self._writer.add_text("config", code, num_steps)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a killed run has the records of its checkpoint

    def finish(self, exit_code: int) -> None:
        self._writer.close()


class _MlflowTracker(Tracker):
    """The active run of MLflow; a tag finds the run of an earlier process.

    MLflow takes no metric back: where steps are repeated, it has their values twice.
    """

    def __init__(self, node: ExperimentConfig, run_id: str, config: Mapping[str, Any]) -> None:
        os.environ.setdefault(
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"
        )  # training waits for each answer
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        import mlflow

        folder, tag = mlflow.set_experiment(node.WANDB.PROJECT).experiment_id, "linnaeus.run"
        found = mlflow.search_runs([folder], f"tags.`{tag}` = '{run_id}'", output_format="list")
        if found:
            mlflow.start_run(run_id=found[0].info.run_id)
            return
        mlflow.start_run(run_name=node.NAME, tags={tag: run_id})
        mlflow.log_params({key: value[:6000] for key, value in flat(config).items()})

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        import mlflow

        named = {re.sub(r"[^\w./ -]", "_", name): value for name, value in values.items()}
        mlflow.log_metrics(named, step=step)

    def finish(self, exit_code: int) -> None:
        import mlflow

        mlflow.end_run("FAILED" if exit_code else "FINISHED")


def check_loggers(names: Iterable[str]) -> None:
    """Raise `ConfigError` for a logger whose package is not installed."""
    for name in {"tensorboard", "mlflow"}.intersection(names):
        if find_spec(name) is None:
            raise ConfigError(
                f"EXPERIMENT.LOGGERS: {name} is not installed: pip install 'linnaeus[{name}]'"
            )


def start_tracking(
    node: ExperimentConfig,
    *,
    run_id: str,
    folder: Path,
    config: Mapping[str, Any],
    num_steps: int = 0,
) -> Tracker:
    """Open the run's loggers, on rank 0; `ConfigError` if one cannot be opened.

    Args:
        node: the node EXPERIMENT.
        run_id: of the run; the same id continues the W&B run or MLflow run of an earlier process.
        folder: of the run.
        config: the resolved configuration.
        num_steps: optimizer steps done so far.
    """
    openers: Mapping[str, Callable[[], Tracker]] = {
        "wandb": lambda: _start_wandb(node, run_id, folder / LOGS, config),
        "tensorboard": lambda: _TensorBoardTracker(
            folder / LOGS / "tensorboard", config, num_steps
        ),
        "mlflow": lambda: _MlflowTracker(node, run_id, config),
    }
    loggers: dict[str, Tracker] = {}
    for name in dict.fromkeys([*node.LOGGERS, *["wandb"] * node.WANDB.ENABLED]):
        try:
            loggers[name] = openers[name]()
        except Exception as error:
            raise ConfigError(
                f"EXPERIMENT.LOGGERS: {name} cannot record: {first_line(error)}"
            ) from error
    return Tracker(**loggers)


def _start_wandb(
    node: ExperimentConfig, run_id: str, folder: Path, config: Mapping[str, Any]
) -> Tracker:
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
    folder.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(console="off", silent=True, init_timeout=30)
    init = partial(
        wandb.init,
        project=node.WANDB.PROJECT,
        entity=node.WANDB.ENTITY,
        group=node.WANDB.GROUP,
        tags=node.WANDB.TAGS,
        name=node.NAME,
        dir=str(folder),
        config=dict(config),
        id=run_id,
        resume="allow",
        settings=settings,
    )
    if os.environ.get("WANDB_MODE", "online") != "online":  # set by the user
        return _WandbTracker(init())
    try:
        if _has_credentials():
            return _WandbTracker(init())
        logger.info("W&B: no API key, so the run is recorded offline (`wandb login` stores one)")
    except wandb.errors.Error as error:
        reason = str(error).partition("\n")[0]
        logger.warning("W&B cannot be reached (%s), so the run is recorded offline", reason)
        wandb.teardown()  # the client's service still holds the id of the run that it could not open
    return _WandbTracker(init(mode="offline"))


def _has_credentials() -> bool:
    """Return whether W&B finds an API key, without asking for one on the terminal."""
    import wandb

    if "prompt" in inspect.signature(wandb.login).parameters:
        return bool(wandb.login(prompt=False, verify=False))
    return wandb.api.api_key is not None  # older clients
