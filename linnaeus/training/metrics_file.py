"""The metrics of a run as a JSONL file."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from linnaeus.runtime.files import not_written, write_atomically


class MetricsFile:
    """`metrics.jsonl`: one JSON object per line, each with `step`, `epoch` (from 1), `split` and `time`.

    Of a validation within an epoch, `epoch` is the number of epochs trained, such as 1.25.

    Args:
        path: the file; lines are appended. None writes nothing.
        check: called before each line; raises where the folder is not the run's any more.
        last_step: optimizer steps done so far. Lines of later steps are removed: a run that was killed after
            its last checkpoint repeats these steps.
        within_epoch: whether the validation after the last step is still to come; its line is removed too.

    Lines that are no record, such as one that was cut off, are removed too.

    Raises:
        LinnaeusError: the file cannot be written, such as on a full disk.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        last_step: int = 0,
        within_epoch: bool = False,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        def is_kept(line: bytes) -> bool:
            try:
                record = json.loads(line)
                is_repeated = within_epoch and record["split"] == "val"
                return bool(record["step"] <= last_step - is_repeated)
            except (ValueError, RecursionError, LookupError, TypeError):
                return False

        self._file: TextIO | None = None
        self._check = check
        if path is None:
            return
        self._path = path
        try:
            if path.exists():
                kept = b"".join(
                    line + b"\n" for line in path.read_bytes().splitlines() if is_kept(line)
                )
                write_atomically(path, lambda file: file.write(kept))
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise not_written(path, error) from error

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # of a line that the disk has not taken
            if self._file is not None:
                self._file.close()

    def write(self, *, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        """Append one line and flush it. Values that are not finite are written as null.

        Raises:
            LinnaeusError: the file cannot be written, such as on a full disk.
        """
        if self._file is None:
            return
        self._check()
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        record: dict[str, Any] = {
            "step": step,
            "epoch": epoch,
            "split": split,
            "time": time.time(),
            **finite,
        }
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise not_written(self._path, error) from error
