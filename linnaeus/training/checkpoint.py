"""Checkpoints: written atomically, and read once, without running code from them."""

from __future__ import annotations

import logging
import math
import pickle
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from linnaeus.autobatch import nest
from linnaeus.autobatch.memory.interface import empty_cache
from linnaeus.config.schema import EarlyStoppingConfig
from linnaeus.metrics import sort_key
from linnaeus.models.shards import (
    METADATA,
    ShardsReader,
    ShardsWriter,
    is_placeholder,
    named,
    replaced,
)
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import (
    CheckpointError,
    ConfigError,
    LinnaeusError,
    first_detail,
    first_line,
)
from linnaeus.runtime.files import why_not_written, write_atomically
from linnaeus.runtime.words import counted
from linnaeus.training.ema import Ema
from linnaeus.training.losses import is_rebuilt_from_config
from linnaeus.training.sharding import fill_part

logger = logging.getLogger("linnaeus.checkpoint")

REMEDY = "Choose another EXPERIMENT.NAME or set TRAIN.AUTO_RESUME False"

_NUMBERED = re.compile(r"(step|best)_[0-9]{8,}\.pt")

_ENTRIES = ("model", "criterion", "optimizer", "scaler", "ema")

_REQUIRED = (
    "progress",
    "rng",
    "autobatch",
    "config",
    "model_spec",
    "run",
    "headline",
    "plan",
    "schedule",
    "train_loss",
    "callbacks",
)
"""Names that every checkpoint of a run has."""

_DECIDE_PARAMETERS = ("MODEL", "LOSS", "TRAIN.UNFREEZE_EPOCH")
"""Keys that decide which parameters there are, and which of them train."""

_OWN_VALUES = ("lr", "weight_decay")
"""Values of an optimizer's groups that come from the configuration and not from a checkpoint. The others are
equal in both, or belong to the optimizer's state, such as a count of steps."""


@dataclass
class TrainingProgress:
    """Progress of training; part of every checkpoint.

    Attributes:
        epoch: number of finished epochs.
        samples: samples of the current epoch that have been trained on, over all ranks.
        step: number of optimizer steps done.
        validated: the optimizer step of the last validation.
        best: headline metric and negated loss, where larger is better, and optimizer step of the best
            validations so far, the best one first.
        metrics: metrics of the last validation.
        best_metrics: the best value of each metric so far, where one was finite.
        seconds: time spent in training steps, loading included, validation not.
        best_epoch: the epoch of `best`; None if unknown.
        watched_best: best value of the metric that early stopping watches, where larger is better.
        num_stale: validations since the last improvement.
    """

    epoch: int = 0
    samples: int = 0
    step: int = 0
    best: list[tuple[float, float, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    best_epoch: int | None = None
    watched_best: float = -math.inf
    num_stale: int = 0
    best_metrics: dict[str, float] = field(default_factory=dict)
    validated: int = 0

    @property
    def current_epoch(self) -> int:
        """Number of the epoch of the last step, from 1."""
        return self.epoch + (self.samples > 0)

    @property
    def best_steps(self) -> list[int]:
        """The optimizer steps of the best validations, the best one first."""
        return [int(step) for *_, step in self.best]

    def rank(self, metric: str, values: Mapping[str, float], keep: int) -> None:
        """Add a validation to the best ones and keep at most `keep` of them; see `sort_key`."""
        entry = sort_key(metric, values, self.step)
        if entry is None:
            return
        self.best = sorted([*self.best, entry], reverse=True)[:keep]
        if self.best[0] is entry:
            self.best_epoch = self.current_epoch

    def watch(self, value: float, min_delta: float) -> None:
        """Count a validation for early stopping: larger is better, by more than `min_delta`."""
        self.num_stale += 1
        if value > self.watched_best + min_delta:
            self.watched_best, self.num_stale = value, 0

    def early_stop_reason(self, node: EarlyStoppingConfig) -> str:
        """Return a sentence on why training ends before its last epoch; empty where it continues."""
        is_known = self.validated == self.step
        if node.PATIENCE is None or self.num_stale < node.PATIENCE or not is_known:
            return ""
        metric = f" of {node.METRIC}" if node.METRIC else ""
        stale = counted(self.num_stale, "validation")
        return f"stopped early after epoch {self.current_epoch}: no improvement{metric} for {stale}"


@dataclass(frozen=True)
class TrainingState:
    """The objects whose state a checkpoint holds.

    Attributes:
        model: without DistributedDataParallel, so that a checkpoint does not depend on the number of ranks.
        ema: None without EMA.
    """

    model: nn.Module
    criterion: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: Ema | None

    @property
    def state(self) -> tuple[Any, ...]:
        """The objects: everything whose state a step may change."""
        return (self.model, self.criterion, self.optimizer, self.scaler, self.ema)

    def state_dict(self) -> dict[str, Any]:
        """The state of each object, by attribute."""
        parts = zip(_ENTRIES, self.state, strict=True)
        return {name: part.state_dict() for name, part in parts if part is not None}

    def load_state_dict(self, state: Mapping[str, Any], changes: Sequence[str] = ()) -> None:
        """Restore the result of `state_dict`, but for the values that come from the configuration.

        These are learning rate, weight decay, and the weights of a loss that learns nothing. A gradient
        scaler that was off starts over, like a new average.

        Args:
            state: the state; the optimizer may keep its tensors.
            changes: how the configuration differs from the checkpoint's, for the error's message.

        Raises:
            ConfigError: it belongs to another model or another configuration.
        """
        state = {
            "ema": {"module": state.get("model"), "num_updates": 0},
            **state,
        }  # a new one begins now
        groups = self.optimizer.param_groups
        own_values = [
            {name: group[name] for name in _OWN_VALUES if name in group} for group in groups
        ]
        restored = dict(zip(_ENTRIES, self.state, strict=True))
        if is_rebuilt_from_config(self.criterion):
            del restored["criterion"]
        if state.get("scaler") == {}:  # of a run without fp16
            del restored["scaler"]
        for name, target in restored.items():
            try:
                if target is not None:
                    target.load_state_dict(state[name])
            except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
                reason = ", ".join(changes) or first_detail(error)
                raise ConfigError(
                    f"EXPERIMENT.NAME: the checkpoint's {name} does not fit: {reason}. {REMEDY}"
                ) from error
        for group, values in zip(self.optimizer.param_groups, own_values, strict=True):
            group.update(values)

    @property
    def optimized(self) -> list[str]:
        """The parameters that the optimizer updates, by name, in the order of its state."""
        parts = {"": self.model, "criterion.": self.criterion}
        names = {
            id(parameter): f"{prefix}{name}"
            for prefix, part in parts.items()
            for name, parameter in part.named_parameters()
        }
        groups = self.optimizer.param_groups
        return [names.get(id(each), "") for group in groups for each in group["params"]]


class Checkpoint:
    """A checkpoint that rank 0 has read. The small entries are on every rank.

    Args:
        entries: all but the state.
        state: the state of model, optimizer, gradient scaler and average on rank 0; nothing elsewhere.
        reader: of its shards, where they are not read yet.

    Attributes:
        changes: how this configuration differs from the checkpoint's, as text.
    """

    def __init__(
        self, entries: dict[str, Any], state: dict[str, Any], reader: ShardsReader | None = None
    ) -> None:
        self.entries = entries
        self.changes: list[str] = []
        self._state, self._reader = state, reader

    @property
    def config(self) -> Mapping[str, Any]:
        """The nodes that it was written with."""
        return self.entries["config"]  # type: ignore[no-any-return]

    def restore(self, target: TrainingState, world: World) -> None:
        """Load the state on every rank and free it. Collective; call once.

        Args:
            target: the objects of this run.
            world: the ranks.

        Raises:
            CheckpointError: it belongs to another model or another configuration; the same on every rank.
        """
        state, self._state = self._state, {}
        changes = [each for each in self.changes if each.startswith(_DECIDE_PARAMETERS)]
        if self.entries.get("optimized", target.optimized) != target.optimized:
            raise ConfigError(
                "EXPERIMENT.NAME: the checkpoint's optimizer updates different parameters: "
                f"{', '.join(changes) or 'MODEL and OPTIMIZER decide which'}. {REMEDY}"
            )
        changed = [change for change in self.changes if change.startswith("LOSS")]
        if changed and state.get("criterion") and not is_rebuilt_from_config(target.criterion):
            raise ConfigError(
                "EXPERIMENT.NAME: the checkpoint holds the state of your LOSS with other settings: "
                f"{', '.join(changed)}. {REMEDY}"
            )
        if isinstance(target.model, FSDPModule):
            target.load_state_dict(local_shards_of(target, state, self._reader, world), changes)
        else:
            world.on_main(partial(target.load_state_dict, state, changes))
            state = broadcast_state(state, world)
            if not world.is_main:
                target.load_state_dict(state)
        del state
        empty_cache(
            world.device
        )  # of the buffers of the broadcast: AutoBatch measured without them
        for change in self.changes:
            logger.warning("warning: resumed with another %s", change)


class CheckpointFolder:
    """`last.pt`, the one before it in `previous.pt`, `best.pt`, and numbered ones on request.

    A new checkpoint is written to `pending.pt` first. A process that is killed at any moment leaves at least
    one of `last.pt`, `previous.pt` and `pending.pt` whole, even where `last.pt` was damaged before. One of
    several ranks that fails writes `failed_rank.pt`, while rank 0 may still write another one. As a context
    manager it waits for the file that is being written in the background.

    Of a sharded run a file names a folder `shards_<step>` beside it, which was whole before the file was
    written. Folders that no file names are deleted, once every file can be read. A `last.pt` that cannot be
    read does not take the place of the `previous.pt` that the run resumed from.

    Args:
        folder: the run's `checkpoints/`.
        keep: number of the last checkpoints that are kept as `step_<number>.pt`.
        keep_best: whether to keep the checkpoints of the best validations as `best_<number>.pt`.
        background: copy the content to the host and return while a thread writes it. The next call and the
            end of the context wait for the thread, and raise its error.
        is_sharded: leave tensors in the files that are read until each rank takes its part of them.
        check: called before a file is written; raises where the folder is not the run's any more.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 0,
        keep_best: bool = False,
        background: bool = False,
        is_sharded: bool = False,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self.folder = folder
        self.pending = folder / "pending.pt"
        self.last = folder / "last.pt"
        self.previous = folder / "previous.pt"
        self.best = folder / "best.pt"
        self.failed_rank = folder / "failed_rank.pt"
        self._keep, self._keep_best = keep, keep_best
        self._background, self._is_sharded, self._check = background, is_sharded, check
        # In a thread in any case: an exception of a signal handler, which runs in the main thread, inside
        # `torch.save` becomes an error of the file or aborts the process. Here it only ends the waiting.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._unreadable: set[Path] = set()  # by this process: their shards, if any, are not known
        self._keeps_previous = False  # `last.pt` is damaged, and the run resumes from an older file

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.wait()
        except LinnaeusError as error:
            if kind is None:
                raise
            logger.error("%s", error)  # the exception under way is the one to report
        finally:
            self._writer.shutdown()

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises:
            CheckpointError: the disk did not take it; the checkpoints before it are kept.
        """
        if self._writing is not None:
            # Not without limit: a signal that comes as the waiting begins would be handled at its end only.
            while futures.wait([self._writing], timeout=1.0).not_done:
                pass
            writing, self._writing = self._writing, None
            writing.result()

    def save(self, content: dict[str, Any], *, is_best: bool = False) -> None:
        """Write `last.pt`, and with `is_best` also `best.pt`.

        Raises:
            CheckpointError: the disk does not take it, or did not take the one before it; the checkpoints
                that there are stay.
        """
        self.wait()
        if self._background:
            content = nest.map_leaves(_copied_to_host, content)
        self._writing = self._writer.submit(self._write, content, is_best)
        if not self._background:
            self.wait()

    def save_shards(self, state: dict[str, Any], step: int, world: World) -> dict[str, Any]:
        """Write each rank's part of a sharded state into a new folder. Every rank must call this.

        Args:
            state: of the objects on this rank.
            step: number of optimizer steps done; part of the folder's name.
            world: the ranks.

        Returns:
            The entries `state` and `shards` of the checkpoint, for `save`.

        Raises:
            CheckpointError: a rank does not see the folder, or the disk does not take it; on every rank.
        """

        def make_folder() -> Path:
            self.wait()
            self._check()
            with self._explained(self.last, state):
                self.folder.mkdir(parents=True, exist_ok=True)
                folder = self.folder / f"shards_{step:08d}"
                while (
                    folder.exists()
                ):  # of an earlier checkpoint after this step, which may be in use
                    folder = folder.with_name(f"{folder.name}_")
                folder.mkdir()
            return folder

        folder = world.on_main(make_folder)
        seen = [True] if world.control is None else world.control.gather(folder.is_dir())
        if not all(seen):
            raise CheckpointError(
                f"{folder} is not seen by rank {seen.index(False)}: the checkpoints of a sharded run need a "
                "folder on a file system that all ranks share (EXPERIMENT.OUTPUT_DIR)"
            )
        shards = {name: value for name, value in named(state).items() if isinstance(value, DTensor)}
        try:
            dcp.save(shards, storage_writer=ShardsWriter(folder), process_group=world.host_group)
        except CheckpointException as error:
            with self._explained(folder, state):
                raise next(iter(error.failures.values()))[0] from error
        checksum = zlib.crc32((folder / METADATA).read_bytes()) if world.is_main else 0
        outline = {n: torch.empty(v.shape, dtype=v.dtype, device="meta") for n, v in shards.items()}
        return {
            "state": replaced(state, outline),
            "shards": {"folder": folder.name, "checksum": checksum},
        }

    def _delete_unused_shards(self) -> None:
        """Delete the folders of shards that no checkpoint names; none while a file cannot be read."""
        unused = {path.name for path in self.folder.glob("shards_*")}
        for path in self.folder.glob("*.pt") if unused else ():
            try:
                unused.discard(load_checkpoint(path, mmap=True).get("shards", {}).get("folder"))
            except CheckpointError as error:
                if path not in self._unreadable:
                    self._unreadable.add(path)
                    logger.warning(
                        "%s; no shards are deleted until this file is readable or removed", error
                    )
                return
        for name in unused:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def save_for_next_attempt(self, content: dict[str, Any]) -> None:
        """Write `failed_rank.pt`, which the next attempt resumes from; any one rank may.

        Raises:
            CheckpointError: this rank does not see the run's folder, or the disk does not take it.
        """
        with self._explained(self.failed_rank, content):
            self.folder.mkdir(exist_ok=True)
            write_atomically(self.failed_rank, partial(torch.save, content))

    def _write(self, content: dict[str, Any], is_best: bool) -> None:
        self._check()
        with self._explained(self.last, content):
            self.folder.mkdir(parents=True, exist_ok=True)
            # `best.pt` is copied before `pending.pt` gets its name: found after a kill, it has its copy.
            write_atomically(
                self.pending,
                lambda file: torch.save(content, file),
                before_replacing=partial(_copy, self.best) if is_best else None,
            )
            if self.last.exists() and not self._keeps_previous:
                self.last.replace(self.previous)
            self._keeps_previous = False
            self.pending.replace(self.last)
            if self._keep:
                newest = self.folder / f"step_{content['progress']['step']:08d}.pt"
                _copy(newest, self.last)
                numbered = (
                    self._numbered()
                )  # those before the newest: the user went back to an earlier one
                kept = numbered[numbered.index(newest) :][: self._keep]
                for path in set(numbered) - set(kept):
                    path.unlink()
            progress = TrainingProgress(**content["progress"])
            if self._keep_best and progress.step in progress.best_steps:
                kept_best = [self.folder / f"best_{step:08d}.pt" for step in progress.best_steps]
                _copy(self.folder / f"best_{progress.step:08d}.pt", self.last)
                for path in set(self._numbered("best")) - set(kept_best):
                    path.unlink()
            self._delete_unused_shards()

    @contextmanager
    def _explained(self, path: Path, content: dict[str, Any]) -> Iterator[None]:
        """Context in which a file is written; raises `CheckpointError` where that fails."""
        try:
            yield
        except OSError as error:
            reason = why_not_written(error, self.folder, nest.num_bytes(content))
            raise CheckpointError(
                f"{path} cannot be written: {reason}; earlier checkpoints are kept"
            ) from error
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(f"{path} cannot be written: {first_line(error)}") from error

    def _numbered(self, kind: str = "step") -> list[Path]:
        """The numbered checkpoints, the last step first. Files of other names are the user's."""
        found = self.folder.glob(f"{kind}_*.pt")
        paths = [path for path in found if _NUMBERED.fullmatch(path.name)]
        return sorted(paths, key=lambda path: -int(path.stem.rpartition("_")[2]))

    def _newest_first(self) -> Iterator[Path]:
        """The existing checkpoints, the last step first; `best.pt` comes last, for where others are gone."""
        # `pending.pt` gets its name when it is whole, and `last.pt` takes its place at once. The first
        # numbered one is a copy of `last.pt`.
        newest, *numbered = self._numbered() or [self.last]
        names = (self.pending, self.last, newest, self.previous, *numbered, self.best)
        return (path for path in dict.fromkeys(names) if path.exists())

    def read_latest(self) -> dict[str, Any] | None:
        """The newest checkpoint that can be read, as `load_checkpoint` returns it; None if there is none.

        Raises:
            CheckpointError: there are checkpoints, but none can be read.
        """
        reasons = []
        for path in self._newest_first():
            try:
                content = load_checkpoint(path, mmap=self._is_sharded, check=True)
            except CheckpointError as error:
                reasons.append(str(error))
                continue
            for reason in reasons:
                logger.warning("%s; %s is taken instead", reason, path.name)
            self._keeps_previous = path not in (self.pending, self.last)
            return content
        if reasons:
            raise CheckpointError(
                f"{reasons[0]}. No other checkpoint in {self.folder} can be read either; delete them or "
                "choose another EXPERIMENT.NAME to start over"
            )
        return None

    def load_latest(self, world: World) -> Checkpoint | None:
        """Broadcast the result of `read_latest` on rank 0; others need no access to the file. Collective.

        Raises:
            CheckpointError: the same on every rank.
        """

        def read() -> dict[str, Any] | None:
            for leftover in self.folder.glob(
                ".*.tmp"
            ):  # of a process that was killed while writing
                leftover.unlink()
            if self.failed_rank.exists():
                self.failed_rank.replace(self.pending)
            self._delete_unused_shards()
            return self.read_latest()

        return self._load(read, world)

    def load_best(self, world: World) -> Checkpoint | None:
        """The best checkpoint; None if there is none. Otherwise as `load_latest`."""
        self.wait()

        def read() -> dict[str, Any] | None:
            if not self.best.exists():
                return None
            return load_checkpoint(self.best, mmap=self._is_sharded, check=True)

        return self._load(read, world)

    def _load(self, read: Callable[[], dict[str, Any] | None], world: World) -> Checkpoint | None:
        state: dict[str, Any] = {}

        def read_on_main() -> dict[str, Any] | None:
            content = read()
            if content is not None:
                state.update(content.pop("state", {}))
            return content

        content = world.on_main(read_on_main)
        if content is None:
            return None
        shards = content.pop("shards", None)
        return Checkpoint(
            content, state, None if shards is None else ShardsReader(self.last, shards)
        )


def _copy(path: Path, source: Path) -> None:
    """Copy a checkpoint, atomically. A link would change with its source where users copy over that."""
    with source.open("rb") as file:
        write_atomically(path, partial(shutil.copyfileobj, file))


def load_checkpoint(path: Path, *, mmap: bool = False, check: bool | None = None) -> dict[str, Any]:
    """Read a checkpoint onto the CPU; only tensors and plain values are accepted (`weights_only`).

    Args:
        path: the file.
        mmap: read tensors only when they are used, and those in shards not at all: `state` has tensors on
            `meta` instead, and `shards` stays.
        check: compare the checksums of all tensors first, which torch does not do: 0.7 s for each GiB. By
            default unless `mmap`, which notices no damage.

    Raises:
        CheckpointError: the file is damaged, no checkpoint, or has entries that a run cannot use.
    """
    try:
        if check if check is not None else not mmap:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        if isinstance(content, dict) and "shards" in content:
            reader = ShardsReader(path, content["shards"])
            if not mmap:
                content["state"] = reader.read_whole(content["state"])
                del content["shards"]
            elif check:
                reader.check()
    except OSError as error:
        of_shards = f" ({error.filename})" if error.filename not in (None, str(path)) else ""
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}{of_shards}"
        ) from error
    except Exception as error:  # torch reports damage with many kinds of exceptions
        holds_code = isinstance(
            error, pickle.UnpicklingError
        )  # torch's message advises to trust the file
        reason = "it holds more than tensors and plain values" if holds_code else first_line(error)
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint of Linnaeus: {reason}"
        ) from error
    names = content.keys() if isinstance(content, dict) else set()
    if missing := [name for name in _REQUIRED if name not in names]:
        raise CheckpointError(
            f"{path} is not a checkpoint of Linnaeus: it has no {missing[0]} (to load only weights, "
            "set MODEL.WEIGHTS)"
        )
    if content["progress"].keys() != vars(TrainingProgress()).keys():
        raise CheckpointError(
            f"{path} is of another version of Linnaeus: its progress is {content['progress']!r:.200}"
        )
    return content  # type: ignore[no-any-return]


def broadcast_state(state: Any, world: World) -> Any:
    """Rank 0's nest on every rank, bit for bit and laid out alike in memory. Every rank must call this.

    Args:
        state: nest of dense tensors on the host and of values that can be pickled; used on rank 0 alone.
        world: the ranks.

    Returns:
        The nest: on rank 0 `state` itself, on the other ranks a copy of it.
    """
    if not world.is_distributed:
        return state
    shapes = world.broadcast(nest.map_leaves(partial(_empty, device="meta"), state))
    if not world.is_main:
        state = nest.map_leaves(partial(_empty, device="cpu"), shapes)
    for shape, tensor in zip(nest.tensors(shapes), nest.tensors(state), strict=True):
        whole = (
            tensor if tensor.stride() == shape.stride() else tensor.clone()
        )  # of a view or an expansion
        content = whole.detach().as_strided((whole.numel(),), (1,)).view(torch.uint8)
        if len(content):
            torch_dist.broadcast(content, src=0, group=world.host_group)
    return state


def local_shards_of(
    target: TrainingState, state: dict[str, Any], reader: ShardsReader | None, world: World
) -> dict[str, Any]:
    """Return rank 0's state on every rank, with the local shards of its sharded tensors. Collective.

    Args:
        target: the sharded objects of this run. Their parameters take their values now.
        state: used on rank 0 alone, from which whole tensors are broadcast one by one.
        reader: of the shards, where the checkpoint is of a sharded run: its `state` has tensors on `meta`.
        world: the ranks.

    Raises:
        CheckpointError: a rank cannot read the shards.
    """
    own = named({name: part for name, part in target.state_dict().items() if name != "optimizer"})
    parameters = [
        parameter for group in target.optimizer.param_groups for parameter in group["params"]
    ]
    own |= {f"optimizer.state.{number}": parameter for number, parameter in enumerate(parameters)}

    def place(name: str, value: Any) -> Any:
        """Return the sharded parameter of a value or of an optimizer moment; None if it is not sharded."""
        found = own.get(name, own.get(name.rpartition(".")[0]))
        return (
            found
            if isinstance(found, DTensor) and found.shape == getattr(value, "shape", None)
            else None
        )

    state = {
        name: state[name]
        for name in _ENTRIES
        if name in state and getattr(target, name) is not None
    }
    whole = {name: value for name, value in named(state).items() if place(name, value) is not None}
    state = world.broadcast(
        replaced(state, {name: value.to("meta") for name, value in whole.items()})
    )
    parts = {
        name: own[name].detach()
        if name in own
        else torch.empty_like(place(name, value), dtype=value.dtype)
        for name, value in named(state).items()
        if is_placeholder(value) and place(name, value) is not None
    }
    if reader is None:
        for name, part in parts.items():
            fill_part(part, broadcast_state(whole.get(name), world))
    else:
        try:
            dcp.load(dict(parts), storage_reader=reader, process_group=world.host_group)
        except CheckpointException as error:
            rank, (reason, _) = next(iter(error.failures.items()))
            raise CheckpointError(
                f"{reader.folder} cannot be read by rank {rank}: {first_line(reason)}"
            ) from error
    return replaced(state, parts)  # type: ignore[no-any-return]


def _copied_to_host(leaf: Any) -> Any:
    is_copied = isinstance(leaf, Tensor) and not leaf.is_meta
    return leaf.detach().to("cpu", copy=True) if is_copied else leaf


def _empty(leaf: Any, device: str) -> Any:
    return torch.empty_like(leaf, device=device) if isinstance(leaf, Tensor) else leaf
