"""The ranks of a run: a single one, or as many as torchrun started."""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import psutil
import torch
import torch.distributed as torch_dist

from linnaeus.autobatch.ranks.exchange import (
    FAREWELL_S,
    REPORT_S,
    Failure,
    JobFailedError,
    Keys,
    first_difference,
)
from linnaeus.autobatch.ranks.heartbeat import SILENCE_LOOKS, ControlPlane
from linnaeus.autobatch.ranks.single_rank import group_of_this_rank
from linnaeus.runtime.errors import ConfigError, LinnaeusError, first_line
from linnaeus.runtime.signals import Interrupted, ignore_signals

T = TypeVar("T")

logger = logging.getLogger("linnaeus.runtime.distributed")

_MOST_BYTES = 1 << 20
"""Of a value that travels over the store."""
_ANSWER_S = 10.0
"""Timeout of one request to the store, in seconds."""
_OVERDUE = re.compile("gloo.*Timed out|timeout caused pair closure|wait timeout")
"""Messages of gloo and the store about a collective that has timed out."""
_LONG = "a collective has taken too long"


class DistSettings(Protocol):
    """The keys of `DIST` that joining a job needs."""

    BACKEND: str
    START_MINUTES: float
    TIMEOUT_MINUTES: float
    CPU_OFFLOAD: bool


class Hang(Failure):
    """The failure of a rank that hangs: its error shows where."""


class JobControl(ControlPlane):
    """The control plane of a run: it ends this process wherever that hangs, and others that are silent.

    Args:
        minutes: `DIST.TIMEOUT_MINUTES`.
        store, rank, world_size, options: as for `ControlPlane`.
    """

    communicates = True

    def __init__(self, *arguments: Any, minutes: float, **options: Any) -> None:
        super().__init__(*arguments, limit_s=minutes * 60, **options)
        self._limit = f"DIST.TIMEOUT_MINUTES {minutes:g}"

    def declare_hang(self, rank: int, why: str) -> Failure:
        """Publish that a rank, or its collective, hangs; return the first failure.

        Silent ranks of this launcher are aborted: faulthandler, where it is on, prints their stacks.
        """
        hang = Hang(rank, self.last_heard(f"{why} ({self._limit})"))
        first: Failure = self.keys.put_first("failure", hang)
        for each, (_, looks) in self.watched.items():
            beat = self.beat_of(each)
            if looks < SILENCE_LOOKS or not beat.is_on_this_machine():
                continue
            with suppress(psutil.Error):
                process = psutil.Process(beat.pid)
                # A process of another parent has got the number by now.
                if process.ppid() == os.getppid():
                    process.send_signal(signal.SIGABRT)
                    process.resume()
        return first

    def end_process(self, failure: Failure) -> None:
        """End this process, which hangs, with the first failure of the job."""
        _print(self.rank, f"rank {failure.rank}: {failure.message}")
        faulthandler.dump_traceback()  # where the main thread hangs
        if failure.rank == self.rank:
            _write_error_file(failure)
        _leave(failure.exit_code)


@dataclass(frozen=True)
class World:
    """Rank, world size, device and process groups of this process.

    Objects that decide how a run continues travel over the control plane. Waiting there has no timeout, and
    the failure of another rank is raised as a `LinnaeusError` with its message and exit code. Sums and
    checkpoints use `host_group`. A single rank has none of the following.

    Attributes:
        control: the control plane.
        host_group: gloo process group for tensors and objects on the host.
        single_rank_group: process group with this rank as its only member.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    control: ControlPlane | None = None
    host_group: torch_dist.ProcessGroup | None = None
    single_rank_group: torch_dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the run's files."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there are other ranks."""
        return self.world_size > 1

    def __str__(self) -> str:
        """The device, and the rank of several, for people."""
        name = "the CPU" if self.device.type == "cpu" else str(self.device)
        if self.device.type == "cuda":
            name += f" ({torch.cuda.get_device_name(self.device)})"
        return f"{name}, rank {self.rank} of {self.world_size}" if self.is_distributed else name

    def update(self, doing: str | Callable[[], str]) -> None:
        """Set the activity shown if this rank fails or hangs. The heartbeat thread evaluates a callable."""
        if self.control is not None:
            self.control.update(doing)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank. It must be picklable."""
        return value if self.control is None else self.control.broadcast(value)

    def on_main(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0 and return its result on every rank.

        The result may hold large arrays of NumPy, which travel over `host_group` without a copy.
        """
        if self.control is None or not self.is_distributed:
            return function()
        result, buffers = function() if self.is_main else None, list[pickle.PickleBuffer]()
        packed = bytearray(pickle.dumps(result, protocol=5, buffer_callback=buffers.append))
        views: list[Any] = [packed, *(buffer.raw() for buffer in buffers)]
        sizes = [len(view) for view in views]
        if sum(sizes) < _MOST_BYTES:
            views, sizes = [], []
        small, sizes = self.broadcast((None if sizes else result, sizes))
        if not sizes:
            return small  # type: ignore[no-any-return]
        if not self.is_main:
            views = [bytearray(size) for size in sizes]
        for view in views:
            if len(view):
                part = torch.frombuffer(view, dtype=torch.uint8)
                torch_dist.broadcast(part, src=0, group=self.host_group)
        return result if self.is_main else pickle.loads(views[0], buffers=views[1:])  # type: ignore[return-value]

    def check_equal(self, facts: Mapping[str, Any]) -> None:
        """Compare facts, by names such as `training samples`, that must be the same on every rank.

        Raises:
            LinnaeusError: a fact differs; on every rank, with the facts, the rank and both values.
        """
        rows = [facts] if self.control is None else self.control.gather(dict(facts))
        if (found := first_difference(rows)) is not None:
            rank, different = found
            listed = "; ".join(
                f"{name}: {main} and {other}" for name, (main, other) in different.items()
            )
            raise LinnaeusError(
                f"ranks 0 and {rank} differ in their training: {listed}. All ranks need the same command, "
                "files, environment and version of Linnaeus"
            )

    def is_cause(self, error: BaseException) -> bool:
        """Return whether this rank's error came first, as far as this rank knows."""
        if self.control is None:
            return True
        with suppress(torch_dist.DistError, TimeoutError):  # the store may have gone, or not answer
            return _in_thread(partial(_cause, self.control, error), _ANSWER_S) is None
        return False

    def gather_on_host(self, value: Any) -> list[Any] | None:
        """The picklable values of all ranks on rank 0, None on the others; uses the host group."""
        if not self.is_distributed:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.is_main else None
        torch_dist.gather_object(value, values, dst=0, group=self.host_group)
        return values

    def reduce(self, values: torch.Tensor, how: str = "SUM") -> torch.Tensor:
        """The sum (or `MAX`, as in `ReduceOp`) of the tensors of all ranks, on each; it overwrites them."""
        if self.is_distributed:
            group = self.host_group if values.device.type == "cpu" else None
            torch_dist.all_reduce(values, getattr(torch_dist.ReduceOp, how), group)
        return values

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over the ranks, as for `reduce`."""
        return self.reduce(values) / self.world_size


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of the rank with this local rank, by the name in `EXPERIMENT.DEVICE`.

    Raises:
        ConfigError: when torch does not know the device, or the machine does not have it.
    """
    problem = f"EXPERIMENT.DEVICE: {name!r} "
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        name = accelerator.type if accelerator else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            problem + "is not a torch device; use auto, cpu, cuda or cuda:0"
        ) from None
    if device.type == "cpu":
        return device
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None or current.type != device.type:
        raise ConfigError(problem + "is not available on this machine; use auto or cpu")
    index, count = (
        local_rank if device.index is None else device.index,
        torch.accelerator.device_count(),
    )
    if index >= count:
        raise ConfigError(
            problem
            + f"needs device {index}, but this machine has {count}; start at most {count} ranks "
            "per node or use cpu"
        )
    return torch.device(device.type, index)


@contextmanager
def join(device_name: str, config: DistSettings) -> Iterator[World]:
    """Join the process group that torchrun describes in the environment, if any, and leave it on exit.

    After an error it is not left: that may wait for ranks that wait for this one.

    Raises:
        ConfigError: this machine does not have the device, or tasks of SLURM run without torchrun.
        LinnaeusError: a rank has not started in time; or on leaving, another rank has failed.
    """
    device = resolve_device(device_name, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        _refuse_tasks_without_torchrun()
        yield World(device)
        return
    rank, world_size = _rank_and_world_size()
    if world_size == 1:
        yield World(device)
        return
    faulthandler.enable()
    world = World(device, rank, world_size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    with report_errors_to_all_ranks(world):
        control = _meet(rank, world_size, config)
    with control:
        world = replace(world, control=control)
        with report_errors_to_all_ranks(world):
            control.update("joining the process group")
            host_group, single_rank_group = _make_groups(device, control, config)
        yield replace(world, host_group=host_group, single_rank_group=single_rank_group)
        with suppress(torch_dist.DistError):  # the launcher, which hosts the store, may have ended
            control.broadcast(None)  # a barrier: all heartbeats outlive rank 0's monitoring
            control.collect(None)  # rank 0 leaves last: it may host the store
    torch_dist.destroy_process_group()


def _meet(rank: int, world_size: int, config: DistSettings) -> ControlPlane:
    """Return the control plane of this attempt, once all ranks have joined.

    It uses torchrun's own store, where it has one, else rank 0's. torch's rendezvous is not used: some
    versions put a count of restarts before the keys, which differs between nodes.

    Raises:
        LinnaeusError: a rank has not come within `DIST.START_MINUTES`, or the store does not answer.
    """
    limit_s = config.START_MINUTES * 60
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    def meet() -> ControlPlane:
        store = torch_dist.TCPStore(
            host,
            port,
            is_master=rank == 0 and not is_torchruns,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
        attempt = agree_on_attempt(store, rank, world_size, limit_s)
        own = torch_dist.PrefixStore(f"{attempt}/linnaeus", store)
        return JobControl(own, rank, world_size, minutes=config.TIMEOUT_MINUTES)

    try:
        return _in_thread(meet, limit_s + _ANSWER_S)
    except (TimeoutError, torch_dist.DistError) as error:
        raise LinnaeusError(
            f"the store at {host}:{port} (MASTER_ADDR, MASTER_PORT) cannot be used: {first_line(error)}. See "
            "whether torchrun, or rank 0, runs, whether another program uses the port, and "
            f"DIST.START_MINUTES {config.START_MINUTES:g}"
        ) from None


def _make_groups(
    device: torch.device, control: ControlPlane, config: DistSettings
) -> tuple[torch_dist.ProcessGroup | None, torch_dist.ProcessGroup]:
    """Initialize the default process group; return the host group and the group of this rank alone."""
    backend = (
        config.BACKEND if config.BACKEND != "auto" else "nccl" if device.type == "cuda" else "gloo"
    )
    timeout = timedelta(minutes=config.TIMEOUT_MINUTES)

    def make() -> tuple[Any, torch_dist.ProcessGroup]:
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index or 0)  # each thread has its own
        torch_dist.init_process_group(  # with `device_id`, torch would refuse the group of a single rank
            backend if not config.CPU_OFFLOAD else f"cpu:gloo,{device.type}:{backend}",
            store=control.store.clone(),
            timeout=timeout,
            rank=control.rank,
            world_size=control.world_size,
        )
        group: Any = torch_dist.group.WORLD
        if backend == "nccl":
            if torch.__version__ >= "2.15":  # that of 2.14 has the method, but not for NCCL
                group.register_abort_hook(0, partial(control.declare_hang, control.rank, _LONG))
            group = torch_dist.new_group(None, timeout, "gloo")
        return group, group_of_this_rank(backend, timeout)

    return _in_thread(make, math.inf, control.check)  # the process group has its timeout


def _in_thread(
    function: Callable[[], T], limit_s: float, check: Callable[[], object] = lambda: None
) -> T:
    """Call a function that waits in C++ in a thread, while this thread handles signals.

    Call `check` meanwhile. An error in it ends the wait.

    Raises:
        TimeoutError: it takes longer than `limit_s`; its thread runs as long as the process.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="start", daemon=True).start()
    deadline = time.monotonic() + limit_s
    while not wait([future], 0.1).done:
        check()
        if time.monotonic() > deadline:
            raise TimeoutError("no answer")
    return future.result()


def agree_on_attempt(
    store: torch_dist.Store, rank: int, world_size: int, limit_s: float, clock: Any = time
) -> str:
    """Return a name that all ranks of this attempt share, and that no earlier attempt had.

    The store may outlive an attempt that a launcher has restarted, and each node's launcher counts its own
    restarts. So each rank publishes a random token, and rank 0 publishes the set of tokens. A rank joins once
    its token is in the set. Rank 0's token is the name.

    Raises:
        LinnaeusError: a rank has not come within `limit_s`.
    """
    keys = Keys(torch_dist.PrefixStore("linnaeus", store))
    token, told, other_ranks = uuid.uuid4().hex, dict[int, str](), range(1, world_size)
    started = reported = clock.monotonic()
    if rank:
        keys.put(f"token/{rank}", token)
    while True:
        if rank == 0:
            tokens = {0: token} | {other: keys.get(f"token/{other}") for other in other_ranks}
            # A token of an earlier attempt is replaced when its rank has restarted.
            if tokens != told:
                keys.put("attempt", told := tokens)
            late = ", ".join(
                str(other) for other in other_ranks if not keys.exist([f"joined/{token}/{other}"])
            )
        else:
            told = keys.get("attempt") or {}
            late = "" if told.get(rank) == token else "0"
            if not late:
                keys.put(f"joined/{told[0]}/{rank}", True)
        if not late:
            return told[0]
        now = clock.monotonic()
        if now - started > limit_s:
            raise LinnaeusError(
                f"rank {late} has not started within {limit_s / 60:.3g} minutes; check that its process "
                "runs, or raise DIST.START_MINUTES"
            )
        if rank == 0 and now - reported > REPORT_S:
            reported = now
            print(
                f"[rank 0] waiting for rank {late} to start", file=sys.stderr, flush=True
            )  # no log yet
        clock.sleep(0.05)


@contextmanager
def report_errors_to_all_ranks(world: World) -> Iterator[None]:
    """Print an error, and report it to the other ranks and to torchrun, before anything is cleaned up.

    Cleaning up may hang while other ranks wait in a collective. A single rank raises its errors as they
    are.

    Raises:
        RankEnded: there was an error, and all know it.
    """
    try:
        yield
    except BaseException as error:
        if world.is_distributed:
            ignore_signals()  # torchrun sends SIGTERM to all ranks as soon as one has died
        # For the log file; the console gets it in a better form.
        logger.debug("ended by %s", type(error).__name__, exc_info=True)
        if not world.is_distributed:
            raise
        raise RankEnded(_tell(world.rank, world.control, error)) from error


class RankEnded(SystemExit):
    """A rank has ended with an error that has been printed; its `code` is the exit code."""

    def leave(self) -> NoReturn:
        """End this process without waiting for threads of the process group, which wait for other ranks."""
        _leave(self.code if isinstance(self.code, int) else 1)


def _tell(rank: int, control: ControlPlane | None, error: BaseException) -> int:
    """Report an error, or the failure of another rank that has caused it, and return the exit code.

    It is printed first, then written to torchrun's error file and published, which may take `FAREWELL_S`.
    """
    cause = None
    with suppress(torch_dist.DistError, TimeoutError):  # the store may have gone, or not answer
        if control is not None:
            cause = _in_thread(partial(_cause, control, error), _ANSWER_S)
    if isinstance(error, JobFailedError) and error.__cause__ is not None:
        error = error.__cause__  # of a joint step
    is_ours = isinstance(error, LinnaeusError | Interrupted)
    if cause is None:
        cause = Failure.of(rank, error)
    if isinstance(cause, Hang) or (cause.rank == rank and not is_ours):
        traceback.print_exception(error)
    _print(rank, cause.message if cause.rank == rank else f"rank {cause.rank}: {cause.message}")
    if cause.rank == rank:
        _write_error_file(cause, error)
    with suppress(torch_dist.DistError, TimeoutError):
        if control is not None:
            _in_thread(partial(control.fail, cause), FAREWELL_S + _ANSWER_S)
    return cause.exit_code


def _cause(control: ControlPlane, error: BaseException) -> Failure | None:
    """Return the first failure of the job; None where this error is the first."""
    failure = control.cause_of(error)
    if failure is None and isinstance(error, RuntimeError) and _OVERDUE.search(str(error)):
        return control.declare_hang(control.rank, f"{_LONG}: {first_line(error)}")
    return failure


def _write_error_file(cause: Failure, error: BaseException | None = None) -> None:
    """Write the file from which torchrun shows the first error of the job."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    is_ours = isinstance(error, LinnaeusError | Interrupted | None)
    shown = cause.message if is_ours else "".join(traceback.format_exception(error))
    extra = {
        "py_callstack": shown,
        "timestamp": str(int(time.time())),
    }  # torchrun prints the former
    with suppress(OSError):
        Path(path).write_text(
            json.dumps({"message": {"message": cause.message, "extraInfo": extra}})
        )


def _print(rank: int, text: str) -> None:
    print(f"[rank {rank}] {text}", file=sys.stderr, flush=True)


def _leave(exit_code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def _rank_and_world_size() -> tuple[int, int]:
    """Return rank and world size from the launcher's environment.

    Raises:
        ConfigError: it does not fit together.
    """
    told = {
        name: os.environ.get(name, "")
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
    }
    rank, world_size, port = (
        int(text) if text.isdecimal() else -1 for text in list(told.values())[:3]
    )
    if 0 <= rank < world_size and port >= 0 and told["MASTER_ADDR"]:
        return rank, world_size
    listed = ", ".join(f"{name}={value or None}" for name, value in told.items())
    raise ConfigError(
        f"the environment says {listed}; RANK must lie below WORLD_SIZE, and the others say where rank 0 "
        "is. torchrun sets them; unset RANK and WORLD_SIZE for a single process"
    )


def _refuse_tasks_without_torchrun() -> None:
    """Refuse tasks of srun, which would all train the same run side by side.

    In the shell of sbatch or salloc, SLURM_STEP_NUM_TASKS is unset, 1, or set by the submitting step.
    """
    in_step = int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1)
    if in_step > 1 and int(os.environ.get("SLURM_NTASKS") or in_step) > 1:
        raise ConfigError(
            f"SLURM has started {in_step} tasks of one step, but they do not communicate. `linnaeus "
            "train ... --launcher slurm` submits a job whose nodes start their processes with torchrun; "
            "--dry-run prints its script. For tasks that train different runs, unset SLURM_STEP_NUM_TASKS"
        )
