"""`DATA.AUTOBATCH.FIT`: remedies that are enabled one by one until the wanted batch size fits."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from linnaeus.autobatch.errors import AutoBatchError, TooSmallError
from linnaeus.config.schema import Config
from linnaeus.models.build import set_gradient_checkpointing
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import ConfigError
from linnaeus.size_search.planned_sizes import PlannedSizes
from linnaeus.size_search.searches import SizeSearch
from linnaeus.training.sharding import check_sharding

_REMEDIES: dict[str, tuple[str, str, Any]] = {
    "checkpointing": ("TRAIN", "GRADIENT_CHECKPOINTING", True),
    "shard": ("DIST", "SHARDING", "full"),
}

logger = logging.getLogger("linnaeus.run")


class FitAttempts:
    """The attempts to make the wanted batch size fit; each enables one more remedy of FIT.

    The caller builds model and data from `config`, searches inside of `next`, and stops when `record` returns
    sizes. A resumed run has the remedies of its checkpoint alone.

    Args:
        config: of the run.
        world: the ranks.
        checkpoint: entries of the checkpoint of the run being resumed; None without one.

    Attributes:
        config: of the current attempt.
    """

    def __init__(self, config: Config, world: World, checkpoint: Mapping[str, Any] | None) -> None:
        names = config.DATA.AUTOBATCH.FIT if config.DATA.AUTOBATCH.ENABLED else ["none"]
        names = names if checkpoint is None else names[:1]
        if "shard" in names and not world.is_distributed:
            raise ConfigError("DATA.AUTOBATCH.FIT: shard needs several ranks, started by torchrun")
        check_sharding(_with_remedies(config, names).DIST, config.TRAIN, world)
        self._tried = [*(checkpoint or {}).get("autobatch", {}).get("train", {}).get("fit", ())]
        self._is_listed = checkpoint is None and names != ["none"]
        # Samples per second, remedy and configuration of the attempt before checkpointing.
        self._rival: tuple[float, str, Config] | None = None
        self._remedy, *self._left = names
        earlier = [entry["remedy"] for entry in self._tried]  # the last one was in use
        self.config = _with_remedies(
            config, earlier[: earlier.index(earlier[-1]) + 1] if earlier else names[:1]
        )

    @contextmanager
    def next(self, search: SizeSearch) -> Iterator[SizeSearch]:
        """Give the search of this attempt; a `TooSmallError` enables the next remedy and ends the context."""
        if "checkpointing" in self._left:
            set_gradient_checkpointing(
                search.assembly.model
            )  # a model without it raises before the search
            set_gradient_checkpointing(search.assembly.model, enable=False)
        smallest = search.config.AUTOBATCH.MIN_BATCH_SIZE
        wanted = smallest if smallest > 1 else search.max_samples_per_rank or 1
        if self._is_listed:
            self._tried.append({"remedy": self._remedy, "batch_size": None, "wanted": wanted})
        try:
            yield dataclasses.replace(search, wanted=wanted if self._left else None)
        except TooSmallError as error:
            self._tried[-1]["batch_size"] = error.largest
            self._enable_next(f"{wanted} samples do not fit ({str(error).partition('. ')[0]})")
        except AutoBatchError as error:
            tried = ", ".join(entry["remedy"] for entry in self._tried)
            error.args = (
                f"{error} DATA.AUTOBATCH.FIT has tried {tried}." if tried else str(error),
            )
            raise

    def record(self, sizes: PlannedSizes) -> PlannedSizes | None:
        """Return the sizes with all attempts; None if another one is to compare the speed."""
        result = sizes.found.get("train")
        if not self._tried or result is None:
            return sizes
        speeds = {timing.batch_size: timing.samples_per_s for timing in result.timings}
        speed = speeds.get(result.batch_size, 0.0)
        self._tried[-1] |= {
            "batch_size": result.batch_size,
            **({"samples_per_s": speed} if speed else {}),
        }
        if self._rival is not None and self._rival[0] >= speed:
            (before, self._remedy, self.config), self._rival, self._left = self._rival, None, []
            logger.info(
                "AutoBatch: %.4g samples per second, %.4g without checkpointing", speed, before
            )
            return None
        if speed and self._left[:1] == ["checkpointing"]:
            self._rival = (speed, self._remedy, self.config)
            self._enable_next(f"to compare with {speed:.4g} samples per second")
            return None
        sizes.found["train"] = dataclasses.replace(result, fit=tuple(self._tried))
        return sizes

    def _enable_next(self, why: str) -> None:
        self._remedy, *self._left = self._left
        self.config = _with_remedies(self.config, [self._remedy])
        setting = "{}.{} {}".format(*_REMEDIES[self._remedy])
        logger.info("AutoBatch: %s: %s (DATA.AUTOBATCH.FIT)", why, setting)


def _with_remedies(config: Config, remedies: Iterable[str]) -> Config:
    for node, key, value in (_REMEDIES[name] for name in remedies if name != "none"):
        changed: dict[str, Any] = {node: dataclasses.replace(getattr(config, node), **{key: value})}
        config = dataclasses.replace(config, **changed)
    return config
