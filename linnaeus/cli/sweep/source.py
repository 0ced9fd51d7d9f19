"""Where the runs of a sweep come from: all combinations of a grid, or a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from linnaeus.errors import ConfigError

if TYPE_CHECKING:
    from linnaeus.cli.compare.runs import Row
    from linnaeus.cli.sweep.options import PlannedRun


class UnknownMetricError(ConfigError):
    """The runs of a search do not have its metric: they are of no use to it."""


class Source:
    """The runs of a grid, which are all known from the start. `Search` chooses its runs one by one.

    Args:
        runs: in their order.
    """

    def __init__(self, runs: Sequence[PlannedRun]) -> None:
        self._runs = list(runs)

    @property
    def num_runs(self) -> int:
        """Runs in all."""
        return len(self._runs)

    @property
    def num_left(self) -> int:
        """Runs that are still to be chosen."""
        return 0

    def earlier(self) -> list[PlannedRun]:
        """The runs that are known already."""
        return self._runs

    def more(self, count: int) -> list[PlannedRun]:
        """Choose so many runs, or fewer if no more are left."""
        return []

    def record_end(self, row: Row) -> bool:
        """Note how a run has ended; returns whether that is final: it is neither resumed nor repeated."""
        return row.status == "finished"

    def prunes(self, row: Row) -> bool:
        """Look at the validations of a running run; returns whether to end it, at most once True."""
        return False
