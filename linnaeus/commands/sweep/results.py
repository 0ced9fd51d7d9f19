"""The results of a sweep: those of any runs, in the order of its grid."""

from __future__ import annotations

from dataclasses import dataclass

from linnaeus.commands.compare.results import Comparison, Row
from linnaeus.commands.compare.runs import RunStatus

__all__ = ["Row", "RunStatus", "Sweep"]


@dataclass
class Sweep(Comparison):
    """All runs of a sweep, begun or not."""

    def with_status(self, *wanted: RunStatus) -> list[Row]:
        """The rows with one of these statuses."""
        return [row for row in self.rows if row.status in wanted]
