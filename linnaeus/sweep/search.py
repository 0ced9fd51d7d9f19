"""A search with Optuna, in the workers: ask for a trial, train it, tell how it ended.

The study is a journal in the sweep's folder, which Optuna makes for several processes on one file system. It
maximizes the best validation of a run; a loss is negated. A trial that is neither told nor had by a living
process is taken over like any other run.
"""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnaeus.config.dump import to_yaml
from linnaeus.metrics import score
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.files import STUDY
from linnaeus.runtime.run_folder import TRIAL, RunFolder, State, read_result, read_state
from linnaeus.runtime.signals import StopRequest
from linnaeus.sweep.folder import Sweep, SweepRun, plan_run
from linnaeus.sweep.space import Axis, Space, read_space

if TYPE_CHECKING:
    from linnaeus.training.callbacks import CallbackState

WARMUP_FRACTION = 0.25
"""No run is pruned in this fraction of the epochs."""
MIN_EPOCHS_LEFT = 2
"""A run with fewer epochs left is not pruned: its result is worth more than the time."""

logger = logging.getLogger("linnaeus.sweep")


class Study:
    """The study of a sweep's folder, made if there is none.

    Args:
        sweep: a search.

    Raises:
        ConfigError: the file is damaged.
        ImportError: Optuna is not installed.
    """

    def __init__(self, sweep: Sweep) -> None:
        import optuna  # here: `compare` reads this module without

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.sweep, self.optuna = sweep, optuna
        self.space: Space = read_space(sweep.argv, is_search=True)
        self._states = optuna.trial.TrialState
        path = str(sweep.folder / STUDY)
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            journal = optuna.storages.journal
            self.study = optuna.create_study(
                storage=optuna.storages.JournalStorage(journal.JournalFileBackend(path)),
                study_name="sweep",
                load_if_exists=True,
                direction="maximize",
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"EXPERIMENT.NAME: {path} is damaged; give the search another name"
            ) from error
        self._asking = journal.JournalFileSymlinkLock(str(sweep.folder / "asking"))

    def check_configuration(self) -> None:
        """Refuse to resume with another configuration: files on the command line are read for each trial.

        Raises:
            ConfigError: a file has changed since the search began.
        """
        corner = plan_run(next(self.space.corners()))
        if to_yaml(corner) != self.sweep.runs[0]["config"]:
            raise ConfigError(
                f"EXPERIMENT.NAME: {self.sweep.folder}: the configuration has changed since this search "
                "began, and a search cannot mix the results of two; give the new one another name"
            )

    def trials(self) -> list[Any]:
        """Return the trials by their numbers."""
        found: list[Any] = self.study.get_trials(deepcopy=False)
        return found

    def runs(self) -> Iterator[tuple[Any, SweepRun]]:
        """The trials that have a run, with it."""
        for trial in self.trials():
            if len(trial.params) == len(self.space.axes):
                yield trial, self._run_of(trial.params)

    def open_trials(self) -> Iterator[tuple[int, SweepRun]]:
        """The trials that have not been told how they ended, with their runs."""
        self.tell_ended()
        for trial, run in self.runs():
            if not trial.state.is_finished():
                yield trial.number, run

    def tell_ended(self) -> None:
        """Tell the study of all runs that have ended; one that was interrupted resumes later."""
        for trial, run in self.runs():
            if not trial.state.is_finished():
                self._tell(trial.number, run, read_state(run.folder))

    def ask(self) -> tuple[int, SweepRun] | None:
        """Ask for a trial; None if there are enough.

        Raises:
            ConfigError: see `check_configuration`.
        """
        self._asking.acquire()
        try:
            trials = self.trials()
            for trial in trials:  # killed while they were requested
                if not trial.state.is_finished() and len(trial.params) < len(self.space.axes):
                    self.study.tell(trial.number, state=self._states.FAIL)
            if len(trials) >= (Sweep.read(self.sweep.folder).trials or 0):
                return None
            # Another seed for each trial, whichever worker asks. `constant_liar` keeps the sampler away from
            # points that are being run.
            seed = plan_run(next(self.space.corners())).EXPERIMENT.SEED + len(trials)
            self.study.sampler = self.optuna.samplers.TPESampler(seed=seed, constant_liar=True)
            trial = self.study.ask({axis.key: self._distribution(axis) for axis in self.space.axes})
        finally:
            with suppress(RuntimeError):  # taken away after 30 s in which this process stood still
                self._asking.release()
        return trial.number, self._run_of(trial.params)

    def config_of(self, run: SweepRun) -> str:
        """Return the configuration of a trial's run, as YAML.

        Raises:
            ConfigError: lists everything that is wrong with it.
        """
        return to_yaml(plan_run(self.space.combination(run.values)))

    def _tell(self, number: int, run: SweepRun, state: State) -> None:
        value, told = None, self._states.FAIL
        if state.status == "finished":
            result = read_result(run.folder)
            metric = self.sweep.metric or result.get("headline", "")
            if (best := result.get("best", {}).get(metric)) is not None:
                value, told = score(metric, best), None
        elif state.status == "pruned":
            told = self._states.PRUNED
        elif state.status != "failed":
            return
        with suppress(
            self.optuna.exceptions.UpdateFinishedTrialError
        ):  # by another worker, just now
            self.study.tell(number, value, state=told, skip_if_finished=True)

    def best(self) -> str | None:
        """Return the best finished trial in words; None without one."""
        if not any(trial.state == self._states.COMPLETE for trial in self.trials()):
            return None
        best = self.study.best_trial
        run = self._run_of(best.params)
        metric = self.sweep.metric or read_result(run.folder).get("headline", "")
        return f"{run.title} with {score(metric, best.value):.4f}"

    def report(
        self, number: int, values: Mapping[str, float], headline: str, epoch: int, num_epochs: int
    ) -> bool:
        """Report a validation of a trial; returns whether to end its run.

        Without `--metric` the headline is compared. `epoch` counts the epochs trained so far.

        Raises:
            ConfigError: the run does not have the metric of the search.
        """
        goal = self.sweep.metric or headline
        if goal not in values:
            missing = repr(self.sweep.metric) if self.sweep.metric else "a top-1 accuracy"
            raise ConfigError(
                f"--metric: no run has {missing}; they have {', '.join(values)}. The search needs "
                "another EXPERIMENT.NAME"
            )
        self.study.pruner = self.optuna.pruners.MedianPruner(
            n_warmup_steps=max(int(num_epochs * WARMUP_FRACTION), 1) + 1
        )
        frozen = self.trials()[number]
        # The id is private, but no public call makes a `Trial` that another process has requested.
        trial = self.optuna.trial.Trial(self.study, frozen._trial_id)
        if frozen.state.is_finished() or epoch in frozen.intermediate_values:
            return False
        trial.report(score(goal, values[goal]), epoch)
        return self.sweep.prune and num_epochs - epoch >= MIN_EPOCHS_LEFT and trial.should_prune()

    def _run_of(self, params: Mapping[str, Any]) -> SweepRun:
        texts = {axis.key: axis.text(params[axis.key]) for axis in self.space.axes}
        return SweepRun(self.sweep.folder / self.space.combination(texts).name, texts, "")

    def _distribution(self, axis: Axis) -> Any:
        kinds = self.optuna.distributions
        if axis.choices:
            return kinds.CategoricalDistribution(axis.choices)
        if axis.is_whole:
            return kinds.IntDistribution(int(axis.low), int(axis.high), axis.is_log)
        return kinds.FloatDistribution(axis.low, axis.high, axis.is_log)


class Pruning:
    """A callback that reports a trial's validations to the study, and stops the run where it is pruned.

    Args:
        folder: of the run.
        stop: the request that ends it.
        headline: the metric that is reported.
        num_epochs: of the run.
    """

    def __init__(
        self, folder: RunFolder, stop: StopRequest, headline: str, num_epochs: int
    ) -> None:
        sweep, _, number = os.environ[TRIAL].rpartition(":")
        self._study, self._number = Study(Sweep.read(Path(sweep))), int(number)
        self._folder, self._stop = folder, stop
        self._headline, self._num_epochs = headline, num_epochs

    def on_validation_end(self, state: CallbackState) -> None:
        """Report; raises `ConfigError` as `Study.report` does."""
        metrics, epoch = dict(state.metrics), state.epoch
        if self._study.report(self._number, metrics, self._headline, epoch, self._num_epochs):
            self._folder.pruned = f"after epoch {epoch}, worse than the median of the others"
            self._stop.stop_signal = self._stop.stop_signal or signal.SIGTERM
            logger.info("pruned %s", self._folder.pruned)
