"""A search with Optuna's ask and tell: which runs to start next, and which of them are not worth their time.

The study is a file in the sweep's folder. A trial is told once its run has ended, so that a search that was
killed goes on: a trial that nobody has told of has a run that goes on, or one that is to be resumed.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linnaeus.commands.compare.history import is_smaller_better, read_history
from linnaeus.commands.compare.results import Row
from linnaeus.commands.sweep.grid import Combination
from linnaeus.commands.sweep.options import PlannedRun
from linnaeus.commands.sweep.space import Axis, Space
from linnaeus.errors import ConfigError

STUDY = "study.journal"
JOBS_ON_SLURM = 4
"""Trials at once on SLURM by default: the more at once, the less each can learn from the others."""
PRUNED = "pruned"


@dataclass(frozen=True)
class SearchPlan:
    """What to search, before there is a study.

    Attributes:
        space: the values of each key.
        num_trials: runs in all, those of earlier calls and failed ones included.
        plan: the run of a point; raises `ConfigError` for one that cannot be.
        seed: of the sampler.
        metric: that is searched for its best; None for the one that decides which checkpoint is best.
        prune: whether to end runs that are worse than the median of the others after as many epochs.
        warmup_epochs: no run ends earlier.
    """

    space: Space
    num_trials: int
    plan: Callable[[Combination], PlannedRun]
    seed: int
    metric: str | None
    prune: bool
    warmup_epochs: int


class Search:
    """A study in a file, seen as a source of runs.

    Args:
        folder: of the sweep; it exists, and no other process searches in it.
        plan: what to search.

    Raises:
        ConfigError: Optuna is not installed, or the file has another search.
    """

    def __init__(self, folder: Path, plan: SearchPlan) -> None:
        self._plan = plan
        self._optuna = _import()
        self._study = self._open(folder / STUDY)
        self._numbers: dict[Path, list[int]] = {}
        """The trials of each run: the sampler may ask for the same point again."""

    @property
    def num_left(self) -> int:
        """Trials that have not been asked for."""
        return max(self._plan.num_trials - len(self._study.get_trials(deepcopy=False)), 0)

    @property
    def num_trials(self) -> int:
        """Runs in all."""
        return self._plan.num_trials

    def earlier(self) -> list[PlannedRun]:
        """The runs of the trials that the study has."""
        return list(self._add(self._study.get_trials(deepcopy=False)))

    def more(self, count: int) -> list[PlannedRun]:
        """Ask for so many trials; fewer runs where points come again, or none is left.

        Raises:
            ConfigError: a point that is no configuration.
        """
        distributions = {axis.key: self._distribution(axis) for axis in self._plan.space.axes}
        asked = [self._study.ask(distributions) for _ in range(min(count, self.num_left))]
        return list(self._add(self._study.get_trials(deepcopy=False)[trial.number] for trial in asked))

    def told(self, row: Row) -> bool:
        """Tell the study how a run that does not go on has ended; returns whether that is the end of it.

        A run that was interrupted, but not by the search, is to be resumed.
        """
        states = self._optuna.trial.TrialState
        trials = [self._study.get_trials(deepcopy=False)[number] for number in self._numbers[row.folder]]
        row.pruned = any(trial.user_attrs.get(PRUNED) for trial in trials)
        name, sign = _goal(row.metrics, self._plan.metric)
        value = row.result.get("metrics", {}).get(name)
        for trial in trials:
            if trial.state.is_finished():
                continue
            if row.status == "finished" and value is not None:
                self._study.tell(trial.number, sign * value)
            elif row.pruned:
                self._study.tell(trial.number, state=states.PRUNED)
            elif row.outcome is not None and not row.outcome.was_interrupted:
                self._study.tell(trial.number, state=states.FAIL)
            else:
                return False
        return True

    def prunes(self, folder: Path) -> bool:
        """Look at the validations of a run; returns whether it is to end, the first time only."""
        frozen = self._study.get_trials(deepcopy=False)[self._numbers[folder][0]]
        if not self._plan.prune or frozen.state.is_finished() or frozen.user_attrs.get(PRUNED):
            return False
        trial = self._optuna.trial.Trial(self._study, frozen._trial_id)
        history = read_history(folder)
        name, sign = _goal(history.points, self._plan.metric)
        for epoch, value in history.finite(name):
            if epoch in frozen.intermediate_values:
                continue
            trial.report(sign * value, epoch)
            if trial.should_prune():
                trial.set_user_attr(PRUNED, True)
                return True
        return False

    def best(self) -> str | None:
        """The best finished trial in words; None without one."""
        if not any(trial.value is not None for trial in self._study.get_trials(deepcopy=False)):
            return None
        best = self._study.best_trial
        found = self._plan.space.combination(self._texts(best.params)).title
        return f"{found} with {abs(best.value):.4f}"

    def _add(self, trials: Iterable[Any]) -> Iterable[PlannedRun]:
        """The runs of trials, each run once."""
        for trial in trials:
            planned = self._plan.plan(self._plan.space.combination(self._texts(trial.params)))
            numbers = self._numbers.setdefault(planned.folder, [])
            numbers.append(trial.number)
            if len(numbers) == 1:
                yield planned

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
        """The study of a file, which is made where there is none."""
        optuna, plan = self._optuna, self._plan
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            backend = optuna.storages.journal.JournalFileBackend(str(path))
            storage = optuna.storages.JournalStorage(backend)
            smaller_is_better = plan.metric is not None and is_smaller_better(plan.metric)
            study = optuna.create_study(
                storage=storage, study_name=path.parent.name, load_if_exists=True,
                direction="minimize" if smaller_is_better else "maximize",
            )  # fmt: skip
            # A study that goes on must not draw the same points again.
            study.sampler = optuna.samplers.TPESampler(seed=plan.seed + len(study.trials))
            study.pruner = optuna.pruners.MedianPruner(n_warmup_steps=plan.warmup_epochs + 1)
        own = f"{plan.metric}\n{plan.space.line.overrides}\n{plan.space.line.presets}\n{plan.space.axes}"
        asked = hashlib.sha256(own.encode()).hexdigest()
        if study.user_attrs.setdefault("asked", asked) != asked:
            raise ConfigError(
                f"EXPERIMENT.NAME: {path} is the study of a search with other keys, values or metric; give "
                "this one another name"
            )
        study.set_user_attr("asked", asked)
        return study


def _import() -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "--search optuna: needs Optuna, which is not installed: pip install 'linnaeus[sweep]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _goal(metrics: Iterable[str], wanted: str | None) -> tuple[str, int]:
    """The metric that the study is told, and its sign; for the headline of a run larger is better."""
    top1 = [name for name in metrics if name.startswith("top1/")]
    if wanted is not None or top1:
        return wanted or top1[-1], 1
    return "loss", -1
