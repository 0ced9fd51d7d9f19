"""Whether loader processes can use a dataset: it must not hold objects of one process alone."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

from torch import Tensor


def reason_against_sharing(dataset: Any) -> str | None:
    """Say why several processes cannot share a dataset; None if they can.

    Forked processes get open files, connections and locks of the dataset as they are, and then read
    each other's bytes or wait forever. These cannot be pickled, so that pickling finds them.
    """
    try:
        with Path(os.devnull).open("wb") as nowhere:
            _Pickler(nowhere, protocol=5, buffer_callback=lambda _: None).dump(dataset)
    except Exception as error:  # a class may raise anything from its own methods
        return " ".join(str(error).split()) or type(error).__name__
    return None


class _Pickler(pickle.Pickler):
    """Does not copy the elements of tensors."""

    def reducer_override(self, value: Any) -> Any:
        """Refuse a tensor on a device, which a forked process cannot use."""
        if not isinstance(value, Tensor):
            return NotImplemented
        if value.device.type != "cpu":
            raise pickle.PicklingError(f"it holds a tensor on {value.device}")
        return int, ()
