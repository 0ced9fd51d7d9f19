"""What a user reads about ranks, resumed sizes, predictions and memory."""

import logging
import os
import re
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore

from linnaeus.autobatch import predict_memory
from linnaeus.autobatch.memory import host
from linnaeus.autobatch.memory.device import GIB, device_memory
from linnaeus.autobatch.memory.host import CpuMemory
from linnaeus.autobatch.predict.gpus import device_that_would_do
from linnaeus.autobatch.predict.trace import trace
from linnaeus.autobatch.ranks.collectives import collectives_refused
from linnaeus.autobatch.ranks.group import check_equal, members
from linnaeus.autobatch.ranks.heartbeat import BEAT_S, SILENCE_LOOKS
from linnaeus.autobatch.ranks.protocol import RankStatus, search_on_ranks
from linnaeus.autobatch.ranks.single_rank import check_can_step_alone
from linnaeus.autobatch.settings import SearchSettings
from linnaeus.runtime.distributed import JobControl, agree_on_attempt
from linnaeus.size_search.searches import find_sizes
from tests.helpers.messages import error_of
from tests.helpers.planes import ScriptedClock, control_planes, ranks
from tests.helpers.searches import OWN_DATA, OWN_MODEL, prepared, result


def of_ranks():
    messages = {}
    main, other = control_planes(limit_s=SILENCE_LOOKS * BEAT_S)
    other.update("train: trying batch size 128")
    for _ in range(SILENCE_LOOKS + 1):
        main.look()
    messages["a silent rank"] = error_of(main.check).replace(str(os.getpid()), "<pid>")
    main, _ = control_planes(kind=partial(JobControl, minutes=0.5))
    main.declare_hang(0, "a collective has taken too long")
    messages["a collective of a run that hangs"] = error_of(main.check)
    main, other = control_planes()
    main.update("train: trying batch size 128")
    messages["a rank that never ends"] = error_of(RankStatus(control=other).gather, None)
    main, other = control_planes()
    messages["a rank that has not begun its search"] = error_of(check_equal, main, {})
    for rank in (0, 1):
        messages[f"what rank {rank} waits for in vain"] = error_of(
            agree_on_attempt, HashStore(), rank, 3, 600, ScriptedClock()
        )
    return messages


def of_groups():
    messages = {"no process group": error_of(members, 5)}
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=2)
    try:
        messages["no group"] = error_of(members, 5)
        messages["a group of others"] = error_of(members, dist.GroupMember.NON_GROUP_MEMBER)
        with collectives_refused():
            messages["a collective"] = error_of(dist.all_reduce, torch.ones(1))
    finally:
        dist.destroy_process_group()
    sharded = type("DeepSpeedEngine", (nn.Linear,), {})(1, 1)
    messages["state that no rank can step alone"] = error_of(check_can_step_alone, (sharded,))
    return messages


def of_predictions(said):
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step_with(look):
        def step(batch):
            loss = layer(batch).sum()
            look(loss, batch)
            loss.backward()
            optimizer.step()

        return step

    def nothing(loss, batch):
        pass

    def rows(n):
        return torch.randn(n, 8)

    def error(look=nothing, **arguments):
        good = {"step": step_with(look), "make_batch": rows, "state": (layer, optimizer)}
        line = f"line {look.__code__.co_firstlineno} of"
        return error_of(predict_memory, **{**good, **arguments}).replace(line, "line N of")

    looks = {
        "a decision": lambda loss, batch: loss.item() > 0,
        "unknown places": lambda loss, batch: batch[batch * loss > 0],
        "an array of NumPy": lambda loss, batch: loss.detach().numpy(),
        "a tensor outside state": lambda loss, batch: batch * torch.ones(8),
        "operations that depend on the batch": lambda loss, batch: [
            part * 2 for part in batch.split(4)
        ],
    }
    messages = {title: error(look) for title, look in looks.items()}
    messages["an optimizer outside state"] = error(state=(layer,))
    said()
    prediction = predict_memory(step_with(nothing), lambda n: rows(16), state=(layer, optimizer))
    messages["a batch that ignores its size"] = said()
    messages["a wrong size"] = error_of(prediction.peak_bytes, 2.5)
    lazy = nn.LazyLinear(10)
    messages["a lazy layer"] = error_of(trace, step_with(nothing), rows, 8, state=lazy)
    messages["a device larger than any"] = device_that_would_do(1000 * GIB)
    return messages


def of_memory(monkeypatch):
    """The figures of the process are left out: they differ from machine to machine."""
    with CpuMemory(torch.device("cpu")).cap(1):
        above = re.sub(r"\d+ MiB", "N MiB", error_of(torch.ones, 1))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        patch.setattr(host, "PROCESS", Path("/proc/none"))
        return {"above the cap": above, "macOS": error_of(device_memory, torch.device("cpu"))}


def test_messages_of_ranks(golden, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("linnaeus"), "propagate", True)
    caplog.set_level(logging.INFO, "linnaeus")

    def said():
        text = "\n".join(dict.fromkeys(record.getMessage() for record in caplog.records))
        caplog.clear()
        return text

    def fits_less(plane):
        verdicts = result(16, (16, "fits")), result(8, (16, "oom"), (8, "fits"), rank=1)
        finder = SimpleNamespace(find=lambda: verdicts[plane.rank])
        options = {"found": result(16, (16, "fits")), "size": 16}
        search_on_ranks(lambda *_: nullcontext(finder), SearchSettings(), plane, **options)

    messages = {**of_ranks(), **of_groups()}
    said()
    ranks(fits_less, fits_less)
    messages["a rank that fits less"] = next(
        line for line in said().splitlines() if "fits no more" in line
    )
    quiet = [f"DATA.AUTOBATCH.LOG_LEVEL{suffix}=ERROR" for suffix in ("", "_VAL")]
    find_sizes(
        prepared(OWN_MODEL, OWN_DATA, "DATA.AUTOBATCH.MAX_BATCH_SIZE=4", *quiet)[0], {"train": 9}
    )
    messages["a checkpoint's size that is not kept"] = said()
    messages |= of_predictions(said) | of_memory(monkeypatch)
    golden("autobatch_ranks", messages, TORCH=torch.__version__)
