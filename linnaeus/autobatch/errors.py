"""Errors of a search; `linnaeus.runtime.errors` adds the errors of a run."""

from __future__ import annotations


class LinnaeusError(Exception):
    """Base of all errors with a message meant for the user."""

    exit_code = 1


class AutoBatchError(LinnaeusError):
    """Raised where no batch size fits, a trial cannot be undone, or a rank fails."""

    exit_code = 3


class TooSmallError(AutoBatchError):
    """Raised on every rank: the wanted size does not fit; `largest` is the largest that does, or None."""

    def __init__(self, reason: str, largest: int | None) -> None:
        super().__init__(reason)
        self.largest = largest

    def __reduce__(self) -> tuple[type, tuple[str, int | None]]:
        return type(self), (str(self), self.largest)
