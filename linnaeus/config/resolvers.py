"""What `${...}` may hold beside keys: arithmetic, and Hydra's `${now:...}` and `${hydra:...}`.

OmegaConf keeps resolvers for the whole process. Ours have names of their own, which `renamed` puts into a
text, so that those of a program around Linnaeus that uses Hydra stay as they are.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from omegaconf import DictConfig, OmegaConf

NUMBER = "linnaeus.number"
_HYDRAS = re.compile(r"(?<!\\)((?:\\\\)*\$\{)\s*(now|hydra)\s*:")


def renamed(text: str) -> str:
    """The text with our resolvers in place of Hydra's.

    >>> renamed("run-${now:%Y}"), renamed("\\\\${now:%Y}")
    ('run-${linnaeus.now:%Y}', '\\\\${now:%Y}')
    """
    return _HYDRAS.sub(r"\1linnaeus.\2:", text)


def register(number: Callable[[str, str], Any], chosen: Mapping[str, str]) -> None:
    """Register the resolvers with OmegaConf, or replace them.

    Args:
        number: evaluates arithmetic, and gives the result the type that its second argument names.
        chosen: the name chosen in each group.
    """

    def hydra(name: str, *, _root_: DictConfig) -> str:
        return _hydra(name, chosen, _root_)

    OmegaConf.register_new_resolver(NUMBER, number, replace=True)
    OmegaConf.register_new_resolver("linnaeus.now", lambda form: moment().strftime(form), replace=True)
    OmegaConf.register_new_resolver("linnaeus.hydra", hydra, replace=True)


@functools.cache
def moment() -> datetime:
    """The moment of this process, the same in all ranks of one machine: the one at which torchrun started.

    Raises:
        ValueError: the ranks are started by several programs, which know of no common moment.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return datetime.now()
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("GROUP_WORLD_SIZE") == "1":
        import psutil

        return datetime.fromtimestamp(psutil.Process(os.getppid()).create_time())
    raise ValueError(
        "these processes were not all started by one torchrun, so each would take another moment; let the "
        "shell put it in: EXPERIMENT.NAME=run-$(date +%F)"
    )


def _hydra(name: str, chosen: Mapping[str, str], root: DictConfig) -> str:
    """The value of `${hydra:NAME}`."""
    values: dict[str, Callable[[], str]] = {
        "runtime.cwd": os.getcwd,
        "job.name": lambda: str(root.EXPERIMENT.NAME),
        "run.dir": lambda: f"{root.EXPERIMENT.OUTPUT_DIR}/{root.EXPERIMENT.NAME}",
        "runtime.output_dir": lambda: f"{root.EXPERIMENT.OUTPUT_DIR}/{root.EXPERIMENT.NAME}",
        **{f"runtime.choices.{group}": functools.partial(str, chosen[group]) for group in chosen},
    }
    if name in values:
        return values[name]()
    if name.startswith("runtime.choices."):
        raise ValueError(f"nothing is chosen in the group {name.removeprefix('runtime.choices.')}")
    known = ", ".join(f"hydra:{known}" for known in values if not known.startswith("runtime.choices."))
    raise ValueError(f"there is no hydra:{name} here; there are {known} and hydra:runtime.choices.GROUP")
