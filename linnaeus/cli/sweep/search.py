"""A search with Optuna's ask and tell: which runs to start next, and which of them to prune.

The study is a file in the sweep's folder. A trial is told once its run has ended, so that a search that was
killed can continue: the run of a trial without a result is either running, or to be resumed.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from linnaeus.cli.compare.runs import Comparison, History, Row, is_smaller_better
from linnaeus.cli.sweep.folder import is_asked
from linnaeus.cli.sweep.grid import Combination
from linnaeus.cli.sweep.options import PlannedRun
from linnaeus.cli.sweep.source import Source, UnknownMetricError
from linnaeus.cli.sweep.space import Axis, Space
from linnaeus.errors import ConfigError
from linnaeus.files import ASKED, STUDY

JOBS_ON_SLURM = 4
"""Trials at once on SLURM by default: the more at once, the less each can learn from the others."""
MIN_EPOCHS_LEFT = 2
"""A run with fewer epochs left is not pruned: its result is worth more than the time."""
PRUNED = "pruned"
"""Attribute of a trial whose run the search has asked to end."""
GOAL = "goal"
"""Attribute of the study: the metric that it is told, where `--metric` names none."""
logger = logging.getLogger("linnaeus.sweep")


@dataclass(frozen=True)
class SearchPlan:
    """What to search, before there is a study.

    Attributes:
        space: the values of each key.
        num_trials: trials in all, including those of earlier calls, failed ones and repeated points.
        plan: the run of a point; raises `ConfigError` for an invalid configuration.
        seed: of the sampler.
        metric: to optimise; None for the one that decides which checkpoint is best.
        prune: whether to end runs that are worse than the median of the others after as many epochs.
        warmup_epochs: no run is pruned in these first epochs.
    """

    space: Space
    num_trials: int
    plan: Callable[[Combination], PlannedRun]
    seed: int
    metric: str | None
    prune: bool
    warmup_epochs: int


class Search(Source):
    """A study in a file, as a source of runs.

    Args:
        folder: of the sweep; it exists, and no other process searches in it.
        plan: what to search.

    Raises:
        ConfigError: Optuna is not installed, or the file holds another search or is damaged.
    """

    def __init__(self, folder: Path, plan: SearchPlan) -> None:
        self._plan = plan
        self._optuna = _import()
        self._states = self._optuna.trial.TrialState
        self._study = self._open(folder / STUDY)
        self._numbers: dict[Path, list[int]] = {}
        """The trials of each run: the sampler may ask for the same point again."""
        self._num_epochs: dict[Path, int] = {}
        self._seen: dict[Path, History] = {}
        """The validations of each run that the study knows."""

    @property
    def num_left(self) -> int:
        """Trials that have not been asked for."""
        return max(self._plan.num_trials - len(self._trials()), 0)

    @property
    def num_runs(self) -> int:
        """Runs in all, at most."""
        return self._plan.num_trials

    def earlier(self) -> list[PlannedRun]:
        """The runs of the trials that the study has.

        Raises:
            ConfigError: a run has been started with another configuration, so its result does not count here.
        """
        runs = list(self._add(self._trials()))
        for run in runs:
            if (run.folder / ASKED).exists() and not is_asked(run.folder, run.config):
                raise ConfigError(
                    f"EXPERIMENT.NAME: {run.folder / ASKED} is another configuration, and a search cannot "
                    "mix the results of two; give this search another name"
                )
        return runs

    def more(self, count: int) -> list[PlannedRun]:
        """Ask for trials until there are so many new runs, or no trial is left."""
        distributions = {axis.key: self._distribution(axis) for axis in self._plan.space.axes}
        runs: list[PlannedRun] = []
        while len(runs) < count and self.num_left:
            number = self._study.ask(distributions).number
            runs += self._add([self._trials()[number]])
        return runs

    def record_end(self, row: Row) -> bool:
        """Tell the study how a run has ended; returns whether that is final.

        A run that was interrupted, but not by the search, is to be resumed.
        """
        trials = [self._trials()[number] for number in self._numbers[row.folder]]
        row.pruned = any(trial.user_attrs.get(PRUNED) for trial in trials)
        unfinished = [trial for trial in trials if not trial.state.is_finished()]
        if not unfinished:
            return True
        self._check_metric(row)
        if row.status == "finished" and self._goal is None:
            self._study.set_user_attr(GOAL, row.headline)
        self._report(unfinished[0], row.history)
        value = row.result.get("metrics", {}).get(self._goal)
        if row.status == "finished" and value is not None:
            how = {"values": self._sign * value}
        elif row.pruned:
            how = {"state": self._states.PRUNED}
        elif row.outcome is not None and not row.outcome.was_interrupted:
            how = {"state": self._states.FAIL}
        else:
            return False
        for trial in unfinished:
            self._study.tell(trial.number, **how)
        return True

    def prunes(self, row: Row) -> bool:
        """Report new validations of a run to the study; returns whether to end the run, at most once True.

        Raises:
            UnknownMetricError: the run does not have the wanted metric.
        """
        history = row.history
        if self._seen.get(row.folder) is history:
            return False
        self._seen[row.folder] = history
        self._check_metric(row)
        if not self._plan.prune:
            return False
        frozen = self._trials()[self._numbers[row.folder][0]]
        if frozen.state.is_finished() or frozen.user_attrs.get(PRUNED):
            return False
        trial = self._report(frozen, history)
        has_time = self._num_epochs[row.folder] - history.epoch >= MIN_EPOCHS_LEFT
        if not has_time or not trial.should_prune():
            return False
        trial.set_user_attr(PRUNED, True)
        return True

    def best(self) -> str | None:
        """The best finished trial in words; None without one."""
        if not any(trial.state == self._states.COMPLETE for trial in self._trials()):
            return None
        best = self._study.best_trial
        found = self._plan.space.combination(self._texts(best.params)).title
        return f"{found} with {self._sign * best.value:.4f}"

    @property
    def _goal(self) -> str | None:
        """The metric that the study is told: the wanted one, or what decides which checkpoint is best.

        That is known, and then the same for all runs, once a run has finished.
        """
        return self._plan.metric or self._study.user_attrs.get(GOAL)

    @property
    def _sign(self) -> int:
        """Factor of the metric in the study. Without a wanted metric, the study makes its values large."""
        goal = None if self._plan.metric else self._goal
        return -1 if goal is not None and is_smaller_better(goal) else 1

    def _check_metric(self, row: Row) -> None:
        """Raise `UnknownMetricError` for a metric that the runs lack: the search would learn nothing."""
        problem = Comparison([row], self._plan.metric).unknown_metric
        if row.metrics and problem is not None:
            raise UnknownMetricError(
                f"--metric: {problem}; the search ends its active runs and needs another EXPERIMENT.NAME"
            )

    def _trials(self) -> Any:
        """The trials of the study by their numbers."""
        return self._study.get_trials(deepcopy=False)

    def _add(self, trials: Iterable[Any]) -> Iterator[PlannedRun]:
        """The runs of trials, each run once; a trial whose run has ended already gets the same result."""
        for trial in trials:
            planned = self._planned(trial)
            if planned is None:
                continue
            numbers = self._numbers.setdefault(planned.folder, [])
            numbers.append(trial.number)
            first = self._trials()[numbers[0]]
            if len(numbers) == 1:
                self._num_epochs[planned.folder] = planned.config.TRAIN.EPOCHS
                yield planned
            elif first.state.is_finished() and not trial.state.is_finished():
                value = first.value if first.state == self._states.COMPLETE else None
                self._study.tell(trial.number, value, state=first.state)

    def _planned(self, trial: Any) -> PlannedRun | None:
        """The run of a trial; one that cannot have a run has failed."""
        problem = "the search was killed while it chose the values"
        if len(trial.params) == len(self._plan.space.axes):
            point = self._plan.space.combination(self._texts(trial.params))
            try:
                return self._plan.plan(point)
            except ConfigError as error:
                problem = f"{point.title}: {'; '.join(error.problems)}"
        if not trial.state.is_finished():
            logger.warning("trial %d is left out: %s", trial.number, problem)
            self._study.tell(trial.number, state=self._states.FAIL)
        return None

    def _report(self, frozen: Any, history: History) -> Any:
        """Report the validations that the study does not have; returns the trial."""
        # The id is private, but no public call makes a `Trial` of one that another process has asked for.
        trial = self._optuna.trial.Trial(self._study, frozen._trial_id)
        for epoch, value in history.finite(self._goal) if self._goal else ():
            if epoch not in frozen.intermediate_values:
                trial.report(self._sign * value, epoch)
        return trial

    def _texts(self, params: Mapping[str, Any]) -> dict[str, str]:
        return {axis.key: axis.text(params[axis.key]) for axis in self._plan.space.axes}

    def _distribution(self, axis: Axis) -> Any:
        kinds = self._optuna.distributions
        if axis.choices:
            return kinds.CategoricalDistribution(axis.choices)
        if axis.is_whole:
            return kinds.IntDistribution(int(axis.low), int(axis.high), axis.is_log, int(axis.step or 1))
        return kinds.FloatDistribution(axis.low, axis.high, axis.is_log, axis.step)

    def _open(self, path: Path) -> Any:
        """The study of a file; a new one if there is no file."""
        optuna, plan = self._optuna, self._plan
        smaller_is_better = plan.metric is not None and is_smaller_better(plan.metric)
        direction = "minimize" if smaller_is_better else "maximize"
        _drop_unfinished_line(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            try:
                backend = optuna.storages.journal.JournalFileBackend(str(path))
                study = optuna.create_study(
                    storage=optuna.storages.JournalStorage(backend), study_name="sweep", load_if_exists=True,
                    direction=direction,
                )  # fmt: skip
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ConfigError(f"EXPERIMENT.NAME: {path} is damaged: {error!r}") from error
            # Another seed, so that a continued study does not draw the same points again. `constant_liar`
            # keeps the sampler away from points that are being run, and is not the default before Optuna 5.
            study.sampler = optuna.samplers.TPESampler(seed=plan.seed + len(study.trials), constant_liar=True)
            study.pruner = optuna.pruners.MedianPruner(n_warmup_steps=plan.warmup_epochs + 1)
        is_default = direction == "maximize" and plan.metric == study.user_attrs.get(GOAL)
        asked = json.dumps(
            [None if is_default else plan.metric, sorted(astuple(axis) for axis in plan.space.axes)]
        )
        if study.user_attrs.get("asked", asked) != asked or study.direction.name.lower() != direction:
            raise ConfigError(
                f"EXPERIMENT.NAME: {path} is the study of a search with other keys, values or metric, or "
                "with the opposite direction of the metric; give this one another name"
            )
        study.set_user_attr("asked", asked)
        return study


def _drop_unfinished_line(path: Path) -> None:
    """Delete the end of a journal that was killed while it wrote; Optuna would append to it."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def _import() -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "--search optuna: needs Optuna, which is not installed: pip install 'linnaeus[sweep]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
