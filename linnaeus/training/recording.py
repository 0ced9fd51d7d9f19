"""The record of a run: its configuration, metrics and result as files, and its loggers."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from linnaeus.autobatch.result import Mode
from linnaeus.batch_plan.plan import BatchPlan
from linnaeus.config.dump import save_config
from linnaeus.config.schema import Config
from linnaeus.data.contact_sheet import draw_samples
from linnaeus.data.split_file import SPLIT_FILE, save_split
from linnaeus.data.user_dataset import UserDataset
from linnaeus.models.model_spec import MODEL_FILE
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import DataError
from linnaeus.runtime.files import AUTOBATCH, CONFIG, LOGS, METRICS, RESULT, write_text_atomically
from linnaeus.runtime.run_folder import RunFolder, stopped_reason
from linnaeus.training.metrics_file import MetricsFile
from linnaeus.training.report import report_result, save_result
from linnaeus.training.tracking import Tracker, start_tracking

if TYPE_CHECKING:
    from linnaeus.training.setup import Setup
    from linnaeus.training.trainer import FitResult

logger = logging.getLogger("linnaeus.run")


class Recording:
    """The record of a trainer: this one takes no files.

    Attributes:
        run_id: of the run; None before `open`.
        is_open: whether `open` was called.
    """

    run_id: str | None = None
    is_open = True

    def open(self) -> None:
        """Open the files, once. Collective."""

    def write(self, split: str, values: Mapping[str, float], *, epoch: float, step: int) -> None:
        """Record the metrics of a split after an optimizer step."""


@dataclass
class RunRecording(Recording):
    """The record of a run in its folder, inside of the context.

    It opens after the first optimizer step: a failure before leaves nothing behind.

    Attributes:
        config: with the batch sizes found.
        setup: data, and how far the run had come before this process.
        plan: the batch plan.
        extras: further entries of each checkpoint; some are files too.
    """

    config: Config
    world: World
    folder: RunFolder
    setup: Setup
    plan: BatchPlan
    extras: dict[str, Any]

    def __post_init__(self) -> None:
        self.is_open = False
        self._stack = ExitStack()
        self._tracker, self._metrics = Tracker(), MetricsFile(None)

    def __enter__(self) -> RunRecording:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def open(self) -> None:
        """Name the run, open its files and loggers, and write the first records."""
        if self.is_open:
            return
        self.run_id, self.is_open = self.folder.begin(), True
        if not self.world.is_main:
            return
        path, progress = self.folder.path, self.setup.progress
        chosen = {**self.plan.as_dict(), "NUM_WORKERS": self.setup.loading.NUM_WORKERS}
        self._metrics = self._stack.enter_context(
            MetricsFile(
                path / METRICS,
                last_step=progress.step,
                within_epoch=progress.validated != progress.step,
                check=self.folder.check,
            )
        )
        self._tracker = self._stack.enter_context(
            start_tracking(
                self.config.EXPERIMENT,
                run_id=self.run_id,
                folder=path,
                num_steps=progress.step,
                config={**dataclasses.asdict(self.config), "PLAN": chosen},
            )
        )
        (path / RESULT).unlink(missing_ok=True)  # left over from the run being resumed
        self._save_searches()
        save_split(self.setup.data, path / SPLIT_FILE)
        self._draw_samples(path / LOGS / "samples.png")
        save_config(self.config, path / CONFIG, {"RUN": self.run_id, **chosen})
        text = json.dumps(self.extras["model_spec"], indent=1, ensure_ascii=False)
        write_text_atomically(path / MODEL_FILE, text + "\n")

    def _draw_samples(self, sheet: Path) -> None:
        """Draw training samples, once.

        Custom datasets are skipped: reading them early could change their state.
        """
        data = self.setup.data
        if isinstance(data.train, UserDataset) or data.taxonomy is None or sheet.exists():
            return
        try:
            draw_samples(data, sheet, self.config.EXPERIMENT.SEED)
        except DataError as error:
            logger.warning("warning: %s is not drawn: %s", sheet, error)

    def _save_searches(self) -> None:
        """Send the sizes found to the loggers and write `autobatch.json`; nothing where there were none."""
        results = self.extras["autobatch"]
        for mode, result in results.items():
            self._tracker.summarise({f"autobatch/{mode}_batch_size": result["batch_size"]})
        if results:
            content = {mode: results.get(mode) for mode in get_args(Mode)}
            if sides := self.extras["sides"]:
                content["sides"] = sides
            content["environment"] = self.extras["environment"]
            write_text_atomically(
                self.folder.path / AUTOBATCH, json.dumps(content, indent=2) + "\n"
            )

    def write(self, split: str, values: Mapping[str, float], *, epoch: float, step: int) -> None:
        """Append to `metrics.jsonl` and send to the loggers."""
        self._metrics.write(step=step, epoch=epoch, split=split, values=values)
        self._tracker.log({f"{split}/{name}": value for name, value in values.items()}, step=step)

    def finish(self, result: FitResult, plan: BatchPlan) -> None:
        """Report the result, and write it where the run is complete.

        Args:
            result: of the run.
            plan: with smaller micro-batches than `self.plan` where memory ran out.
        """
        path, data = self.folder.path, self.config.DATA
        report_result(result, plan, data.BATCH_SIZE_VAL, path, self._tracker)
        if result.stop_signal:
            self.folder.end(128 + result.stop_signal, stopped_reason(path, result.stop_signal))
        elif self.folder.claim is not None:
            self.folder.check()
            save_result(result, plan, path / RESULT, self.folder.claim.id)
            self.folder.end(0)
