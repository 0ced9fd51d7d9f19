"""Tracking with Weights & Biases, or a tracker that does nothing."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from linnaeus.config.schema import WandbConfig

logger = logging.getLogger("linnaeus.training.tracking")


class Tracker:
    """Takes a run's figures, beside the run's own files. This one does nothing with them.

    The end of its context closes the run, after an exception with exit code 1.
    """

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Metrics at an optimizer step."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table of values."""

    def summarise(self, values: Mapping[str, Any]) -> None:
        """The run's final figures."""

    def finish(self, exit_code: int) -> None:
        """Close the run."""

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish(0 if kind is None else 1)


class _WandbTracker(Tracker):
    """One Weights & Biases run, as `wandb.init` returns it.

    The client hands its records to a process of its own, which ends on SIGTERM. A batch system sends that to
    all processes of a job; the training that was asked to stop must still be able to.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._is_lost = False

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        with self._unless_lost():
            self._run.log(dict(values), step=step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        import wandb

        table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        # It goes with the next metrics; by itself it would use up a step that metrics then cannot have.
        with self._unless_lost():
            self._run.log({name: table}, commit=False)

    def summarise(self, values: Mapping[str, Any]) -> None:
        with self._unless_lost():
            self._run.summary.update(dict(values))

    def finish(self, exit_code: int) -> None:
        """Close the run, and say how to upload one that was recorded offline."""
        folder = Path(self._run.dir).parent
        offline = self._run.settings.mode == "offline"
        with self._unless_lost():
            self._run.finish(exit_code=exit_code)
        if self._is_lost:  # it would speak to its ended process at exit, and print a traceback
            import wandb

            with self._unless_lost():
                wandb.teardown(exit_code)
        if offline:
            logger.info("W&B recorded offline; upload with: wandb sync %s", folder)

    @contextmanager
    def _unless_lost(self) -> Iterator[None]:
        """Go on, after one warning, where the client's own process has ended."""
        try:
            yield
        except Exception as error:
            # The second class has no place that all versions of the client share.
            if not isinstance(error, ConnectionError) and type(error).__name__ != "MailboxClosedError":
                raise
            if not self._is_lost:
                logger.warning("warning: W&B's process has ended (%s); it records no more of this run", error)
            self._is_lost = True


def start_tracking(
    node: WandbConfig, *, name: str, run_id: str, folder: Path, config: Mapping[str, Any]
) -> Tracker:
    """Open the run's tracker, on rank 0.

    Args:
        node: the node `EXPERIMENT.WANDB`.
        name: name of the run.
        run_id: of the run; that of an earlier process continues its W&B run.
        folder: folder of W&B's own files.
        config: the resolved configuration.
    """
    if not node.ENABLED:
        return Tracker()
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
    folder.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(console="off", silent=True, init_timeout=30)
    init = partial(
        wandb.init, project=node.PROJECT, entity=node.ENTITY, group=node.GROUP, tags=node.TAGS, name=name,
        dir=str(folder), config=dict(config), id=run_id, resume="allow", settings=settings,
    )  # fmt: skip
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
    """Whether W&B finds an API key, without asking for one on the terminal."""
    import wandb

    if "prompt" in inspect.signature(wandb.login).parameters:
        return bool(wandb.login(prompt=False, verify=False))
    return wandb.api.api_key is not None  # older clients
