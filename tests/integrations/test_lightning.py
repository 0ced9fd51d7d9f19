"""The callback for Lightning, in one process, against Lightning itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch import LightningModule, Trainer

from linnaeus.autobatch import snapshot
from linnaeus.errors import AutoBatchError
from linnaeus.integrations import lightning_loaders, lightning_steps
from linnaeus.integrations.lightning import AutoBatch
from linnaeus.integrations.lightning_steps import _kept
from tests.integrations.lightning_runs import (
    CASES,
    Bare,
    Case,
    Data,
    Net,
    differences,
    fit,
    loader,
    room,
    trainer_for,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, such as those about workers

LARGE = 20


def small(**options: Any) -> AutoBatch:
    """A search of two or three trials."""
    return AutoBatch(**{"max_batch_size": LARGE, "steps_per_trial": 2, **options})


def searched_and_by_hand(case: Case, callback: AutoBatch) -> tuple[dict[str, Any], dict[str, Any]]:
    """The outcome with the search, and that with the size that it found."""
    module, given, options = case
    options = dict(options)
    others = options.pop("callbacks", list)
    searched = fit(module(4), *as_tuple(given(4)), callbacks=[*others(), callback], **options)
    assert callback.batch_size is not None
    sizes = callback.batch_size, callback.val_batch_size or callback.batch_size
    by_hand = given(sizes[0]) if given is not Data else Data(*sizes)
    plain = fit(module(sizes[0]), *as_tuple(by_hand), callbacks=others(), **options)
    return searched, plain


def as_tuple(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_a_run_with_the_size_by_hand(name: str) -> None:
    callback = small()
    searched, by_hand = searched_and_by_hand(CASES[name], callback)
    assert callback.batch_size == LARGE
    assert searched["progress"]["epoch_progress"]["total"]["completed"] >= 1
    assert differences(searched, by_hand) == []


def without_counters(library: Any, part: Any) -> Callable[[], None]:
    return (lambda: None) if type(part).__name__ == "_AutomaticOptimization" else _kept(library, part)


def forget(target: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(target, name, value)


@pytest.mark.parametrize(
    ("forgotten", "case", "seen"),
    [
        (forget(snapshot, "set_rng_state", lambda *_: None), "attribute", "random numbers"),
        (forget(lightning_steps, "_kept", without_counters), "attribute", "progress"),
        (forget(lightning_loaders.DataState, "restore", lambda self: None), "data module", "weights"),
        (forget(lightning_steps, "_nothing_fetched", lambda _: nullcontext()), "stream", "logs"),
        (forget(lightning_steps, "_own_optimizers", lambda module: []), "needy", "weights"),
    ],
    ids=["generators", "loops", "datasets", "streams", "optimizers"],
)  # fmt: skip
def test_what_is_not_put_back_is_seen(
    forgotten: Callable[[pytest.MonkeyPatch], None], case: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten(monkeypatch)
    searched, by_hand = searched_and_by_hand(CASES[case], small())
    assert seen in differences(searched, by_hand)
