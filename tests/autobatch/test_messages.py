"""What a search says: its errors, warnings, lines, and the sentence about its result."""

import dataclasses
import itertools
import logging
import re
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn

from linnaeus.autobatch import BudgetBatchSampler, auto_find_batch_size, find_budget, longest
from linnaeus.autobatch.finder import BatchSizeFinder, _warn_once
from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.observer import SearchLimits, SearchLog, nothing_fits
from linnaeus.autobatch.ranks.protocol import RankStatus
from linnaeus.autobatch.result import Timing
from linnaeus.autobatch.search import TrialRecord, find_largest
from linnaeus.autobatch.settings import SearchSettings
from linnaeus.size_search.keys import in_keys, messages_in_keys
from linnaeus.size_search.report import SearchProgress, summary
from tests.helpers import searches
from tests.helpers.consoles import terminal
from tests.helpers.ledger import limit_with_room_for
from tests.helpers.messages import raised

MIB = 1024**2


def step(batch):
    torch.empty_like(batch)


def make_batch(size):
    """One MiB a sample."""
    return torch.empty(size, MIB // 4)


def why_nothing_fits(is_limited=False, **instead):
    """Why a search on a card of two GiB found nothing."""
    total = GIB if is_limited else 2 * GIB
    found = {
        "mode": "train",
        "limits": SearchLimits(600, 800, int(0.8 * total), 0.8, total, "x" * is_limited),
        "device": torch.device("cuda", 0),
        "trials": (TrialRecord(600, "oom", None, 0.1),),
        "limited_by": "memory",
        "min_batch_size": 600,
        "held_bytes": GIB // 4,
        "outside": "<others>",
        **instead,
    }
    return nothing_fits(**found)


def in_a_run():
    """A search of validation as the framework makes it, so that messages name keys."""
    settings = SearchSettings(0.9, 600, 800)
    with (
        messages_in_keys("val"),
        BatchSizeFinder(
            step, make_batch, settings, device="cpu", mode="val", train_once=refuse
        ) as finder,
    ):
        finder.find()


def refuse():
    raise MemoryError("out of memory")


def pad(samples):
    return torch.zeros(len(samples), max(map(len, samples)))


class Data(list):
    """Samples with columns, as `datasets` has them."""

    column_names = ["input_ids", "length"]  # noqa: RUF012


def of_calls(function, right, wrong):
    """The error for each of the wrong arguments."""
    for arguments in wrong:
        title = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        yield f"{function.__name__}: {title}", raised(function, **{**right, **arguments})


def bad_arguments():
    yield from of_calls(
        auto_find_batch_size,
        {"step": step, "make_batch": make_batch, "device": "cpu"},
        [
            {"target_memory_fraction": "0.8"},
            {"target_memory_fraction": 1.01},
            {"strategy": "magic"},
            {"step": 3},
            {"observer": print},
            {"max_batch_size": True},
            {"bounds": [3]},
            {"bounds": {3: 4}},
            {"bounds": {"max_batch_size": 4096}},
            {"phases": [print, 3]},
            {"state": {"model": 1}},
            {"state": (3,)},
            {"min_batch_size": 20, "max_batch_size": 7},
            {"min_batch_size": 20, "bounds": {"dataset": 7}},
            {"max_batch_size": None, "strategy": "binary"},
        ],
    )
    lazy = (nn.Sequential(nn.LazyLinear(3)),)
    yield "lazy layers", raised(auto_find_batch_size, step, make_batch, state=lazy)
    yield from of_calls(
        longest,
        {"dataset": Data([{"input_ids": [1]}] * 3), "n": 1},
        [
            {"length": "tokens"},
            {"length": [1, 2]},
            {"length": [1, "long", 2]},
            {"dataset": []},
        ],
    )
    texts = [torch.ones(each) for each in (3, 7)]
    yield from of_calls(
        find_budget,
        {"step": step, "dataset": texts, "collate": torch.cat, "device": "cpu"},
        [
            {"cost": [3, 2.5]},
            {"cost": [3, 0]},
            {"dataset": {"text": 1}},
            {"dataset": []},
        ],
    )
    yield "a collate function that pads", raised(find_budget, step, texts, pad, device="cpu")
    yield from of_calls(
        BudgetBatchSampler,
        {"costs": [3, 7, 4, 4, 4], "budget": 7},
        [
            {"budget": 6},
            {"num_replicas": 2, "rank": 2},
            {"num_replicas": 6},
        ],
    )
    bounds = {"min_size": 9, "max_size": 15, "multiple_of": 8}
    yield "no multiple within the bounds", raised(find_largest, int, budget_bytes=1, **bounds)


class Forgetful:
    """Its `load_state_dict` leaves out what a step changes."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        pass


def of_an_object_that_is_not_restored():
    average = Forgetful()

    def count(batch):
        average.count += 1

    options = {"state": (average,), "max_batch_size": 4, "device": "cpu"}
    return raised(auto_find_batch_size, count, make_batch, **options)


def summaries():
    early = dataclasses.replace(
        searches.result(16),
        certified=False,
        limited_by="max_trials",
        budget_bytes=GIB,
        total_bytes=2 * GIB,
        seconds=0.9,
    )

    def result(*trials, **more):
        return dataclasses.replace(early, trials=trials, **more)

    def trial(size, status="fits"):
        return TrialRecord(size, status, None if status == "oom" else size, 0.5)

    proof = {"certified": True}
    yield "no larger trial", summary(result(trial(16), within=31.0))
    kernel = result(trial(16), trial(20, "kernel"), within=3 / 16, limited_by="kernel")
    yield "kernel", summary(kernel)
    yield "far", summary(result(trial(16), trial(129, "oom"), within=7.0, limited_by="timeout"))
    for limit in ("memory", "max_batch_size"):
        yield limit, summary(result(trial(16), mode="val", limited_by=limit, **proof))
    steps = result(trial(8), trial(16), limited_by="steps_per_epoch", **proof)
    yield "steps_per_epoch", summary(steps)
    yield "and the largest", summary(dataclasses.replace(steps, max_batch_size=512))
    yield "throughput", summary(result(limited_by="throughput", total_is_limit=True, **proof))


def shown(log):
    """What a watcher of a search is told."""
    log.search_started(SearchLimits(1, 512, GIB, 0.8, 2 * GIB, "MEMORY_LIMIT_GB"))
    for size, status, purpose in ((1, None, "warm-up"), (16, 0.5, "trial"), (64, None, "trial")):
        log.trial_started(size, purpose)
        if purpose == "trial":
            peak_bytes = None if status is None else int(status * GIB)
            log.trial_finished(
                TrialRecord(size, "fits" if status else "oom", peak_bytes, 0.25), GIB
            )
    log.trial_started(16, "confirmation")
    log.trial_finished(TrialRecord(16, "over", int(1.25 * GIB), 0.25), GIB)
    for samples_per_s in (200.0, 0.0):
        log.trial_started(8, "timing")
        log.size_timed(Timing(8, 0.04, samples_per_s))


def test_messages(golden, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "linnaeus.autobatch")
    console, output = terminal(monkeypatch)
    told = []
    monkeypatch.setattr("linnaeus.autobatch.finder.time", SimpleNamespace(monotonic=lambda: 0.0))
    messages = dict([*bad_arguments(), *summaries()])
    messages["object that is not restored"] = of_an_object_that_is_not_restored()
    caplog.clear()
    shown(SearchLog("val"))
    messages["log of a search"] = "\n".join(caplog.messages)
    shown(SearchProgress("train", RankStatus(told.append), console))
    messages["rows on a terminal"] = re.sub(r"\x1b\[[0-9;]*m", "", output.getvalue())
    messages["status of a search"] = "\n".join(told)
    beside = SearchLimits(600, 800, GIB // 2, 1.0, 2 * GIB)
    over = (TrialRecord(400, "over", 2 * GIB, 0.1),)
    for title, instead in {
        "nothing fits": {},
        "nothing fits beside others": {"limits": beside},
        "nothing fits within a limit": {"is_limited": True},
        "a limit below what is held": {"is_limited": True, "held_bytes": GIB},
        "the trials ran out": {"limited_by": "max_trials", "trials": over},
        "a budget of tokens": {"unit": "tokens"},
        "a validation": {"mode": "val"},
        "a validation that is full before the first sample": {"mode": "val", "held_bytes": 2 * GIB},
    }.items():
        messages[title] = why_nothing_fits(**instead)
    messages["nothing fits in a run"] = in_keys(why_nothing_fits(True, min_batch_size=1), "train")
    messages["training before a validation"] = raised(in_a_run)
    kept = []
    _warn_once.cache_clear()
    caplog.clear()
    search = partial(auto_find_batch_size, device="cpu", memory_limit_gb=limit_with_room_for(200))
    full = {"max_batch_size": 64, "target_memory_fraction": 1.0}
    search(lambda batch: None, lambda size: size, **full)
    messages["a batch that ignores its size"] = raised(
        partial(search, step), lambda size: make_batch(4), **full
    )
    bounds = {"max_batch_size": 8, "target_memory_fraction": 0.97}
    cache = {}
    search(lambda batch: cache.setdefault(len(batch), make_batch(20)), make_batch, **bounds)
    messages["warnings"] = "\n".join(text for text in caplog.messages if "warning" in text)
    leaking = partial(search, lambda batch: kept.append(make_batch(8)))
    caplog.clear()
    draw = itertools.cycle([1, 2, 3])
    bounds["max_batch_size"] = 30
    search(lambda batch: torch.empty(next(draw) * len(batch) * MIB // 4), make_batch, **bounds)
    messages["memory that varies"] = caplog.messages[-1]
    messages["leak"] = raised(leaking, make_batch, **{**bounds, "max_batch_size": 8})
    golden("autobatch", messages)
