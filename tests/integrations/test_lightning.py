"""The callback for Lightning, in one process, against Lightning itself."""

from __future__ import annotations

import logging
import re
import runpy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, strategies
from lightning.pytorch.callbacks import EMAWeightAveraging, GradientAccumulationScheduler
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from linnaeus.autobatch import snapshot
from linnaeus.errors import AutoBatchError
from linnaeus.integrations import lightning_loaders, lightning_steps
from linnaeus.integrations.lightning import AutoBatch
from linnaeus.integrations.lightning_steps import _kept
from tests.helpers.forks import ROOT
from tests.helpers.ledger import Ledger
from tests.integrations.lightning_runs import (
    CASES,
    NUM_VAL,
    Bare,
    Case,
    Data,
    InHyperparameters,
    Manual,
    Net,
    Recorder,
    data,
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


# --- sizes ---


def test_the_size_found_runs_within_the_limit_and_the_next_does_not() -> None:
    fit(Net(mib=1.0))  # loads what the limit counts on
    callback = AutoBatch(**room(80), max_batch_size=90, val=False)
    fit(Net(mib=1.0), callbacks=[callback])
    result = callback.results["train"]
    assert result.limited_by == "memory"
    assert result.certified
    assert 25 <= result.batch_size <= 60, "between one and three MiB a sample"
    assert {trial.size for trial in result.trials} >= {result.batch_size, result.batch_size + 1}


class Large(Net):
    """With parameters, gradients and optimizer state that take memory as well."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__(batch_size, mib=1.0)
        self.layer = torch.nn.Linear(1024, 1024)

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + 1e-3 * self.layer.weight.square().mean()


class LargeValidation(Large):
    """Two MiB for each sample of validation, which has a size of its own."""

    def __init__(self, batch_size: int = 4, val_batch_size: int = 4) -> None:
        super().__init__(batch_size)
        self.val_batch_size = val_batch_size

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ballast = torch.ones(len(batch[0]), 2**18)
        self.log("val_loss", (ballast * 2).mean())

    def val_dataloader(self) -> Any:
        return DataLoader(data(200), self.val_batch_size)


@pytest.mark.parametrize(
    ("options", "average"),
    [({}, False), ({"accumulate_grad_batches": 3}, False), ({"precision": "bf16-mixed"}, True)],
)
def test_training_takes_the_memory_that_the_search_measured(options: dict[str, Any], average: bool) -> None:
    def others() -> list[Callback]:
        return [EMAWeightAveraging(decay=0.9)] if average else []

    fit(Net(mib=1.0))
    callback = AutoBatch(**room(120), max_batch_size=90, val=False)
    fit(Large(), callbacks=[*others(), callback], **options)
    result = callback.results["train"]
    assert result.limited_by == "memory"
    taken = {}
    for size in (result.batch_size, round(result.batch_size * 1.05) + 1):
        module = Large(size)
        copied = sum(tensor.nbytes for tensor in module.state_dict().values()) if average else 0
        with Ledger() as ledger:
            fit(module, callbacks=others(), limit_val_batches=0, **options)
        taken[size] = ledger.peak_bytes - copied
    fits, too_large = taken.values()
    assert fits == pytest.approx(result.peak_bytes - result.held_bytes, rel=0.005)
    assert too_large > result.budget_bytes - result.held_bytes


def test_validation_takes_the_memory_that_the_search_measured() -> None:
    fit(LargeValidation())
    callback = AutoBatch(**room(120), max_batch_size=8, val_options={"max_batch_size": 150})
    fit(LargeValidation(), callbacks=[callback])
    result = callback.results["val"]
    assert result.limited_by == "memory"
    module = LargeValidation(8, result.batch_size)
    with Ledger() as ledger:
        fit(module)
    # The search counts the optimizer's state, which is there before its trials, as held.
    state_bytes = 2 * sum(parameter.nbytes for parameter in module.parameters())
    assert ledger.peak_bytes - state_bytes == pytest.approx(result.peak_bytes - result.held_bytes, rel=0.02)


def test_validation_has_its_own_size_where_it_has_its_own_attribute() -> None:
    data_module = Data()
    callback = small(val_options={"max_batch_size": 30})
    fit(Bare(), data_module, callbacks=[callback])
    assert (data_module.batch_size, data_module.val_batch_size) == (LARGE, 30)
    assert (callback.batch_size, callback.val_batch_size) == (LARGE, 30)
    assert callback.results["val"].mode == "val"


def test_an_attribute_that_validation_does_not_follow_is_left_alone() -> None:
    class Fixed(Data):
        def val_dataloader(self) -> Any:
            return DataLoader(data(10), 5)

    data_module = Fixed(4, 7)
    fit(Bare(), data_module, callbacks=[small()])
    assert (data_module.batch_size, data_module.val_batch_size) == (LARGE, 7)


def test_validation_is_left_alone_where_asked() -> None:
    data_module = Data()
    callback = small(val=False)
    fit(Bare(), data_module, callbacks=[callback])
    assert data_module.val_batch_size == 2
    assert set(callback.results) == {"train"}


class HeavyValidation(Net):
    """Validation takes many times the memory of training."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ballast = torch.ones(len(batch[0]), 2**20)
        self.log("val_loss", self.loss(batch) + 0 * ballast.sum())


def test_a_size_shared_with_validation_fits_in_both(caplog: pytest.LogCaptureFixture) -> None:
    fit(HeavyValidation())
    callback = AutoBatch(**room(60), max_batch_size=30)
    module = HeavyValidation()
    fit(module, callbacks=[callback])
    assert callback.results["train"].batch_size == 30
    assert callback.batch_size == module.batch_size == callback.results["val"].batch_size < 30
    assert "validation fits at batch size" in caplog.text


@pytest.mark.usefixtures("few_timed_steps")
def test_the_size_may_be_chosen_by_speed() -> None:
    callback = small(val=False, objective="throughput")
    searched = fit(Net(), callbacks=[callback])
    assert callback.results["train"].timings
    assert differences(searched, fit(Net(callback.batch_size or 0))) == []


def test_one_more_than_the_samples_is_never_tried() -> None:
    callback = AutoBatch(max_batch_size=500)
    fit(Bare(), loader(4), callbacks=[callback])
    assert callback.batch_size == 96
    assert callback.results["train"].limited_by == "dataset"


def test_no_last_batch_is_left_with_one_sample_where_there_is_batchnorm() -> None:
    callback = small()
    searched = fit(Bare(), DataLoader(data(41), 4), callbacks=[callback])
    assert callback.batch_size == 19
    assert callback.results["train"].limited_by == "last_batch"
    assert searched["sizes"][:3] == [19, 19, 3]
    dropping = small()
    fit(Bare(), DataLoader(data(41), 4, drop_last=True), callbacks=[dropping])
    assert dropping.batch_size == LARGE


def test_a_size_that_validation_lowers_leaves_no_last_batch_of_one_sample() -> None:
    class Nineteen(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if len(batch[0]) > 19:
                raise torch.OutOfMemoryError("out of memory")
            super().validation_step(batch, batch_idx)

    callback = small()
    searched = fit(Nineteen(), callbacks=[callback])
    assert callback.results["val"].batch_size == 19
    assert 96 % 19 == 1
    assert callback.batch_size == 18
    assert 18 in {trial.size for trial in callback.results["train"].trials}
    assert set(searched["sizes"]) == {18, 96 % 18}


def test_a_size_below_the_smallest_asked_for_is_refused_and_not_used() -> None:
    with pytest.raises(AutoBatchError, match=r"each batch size from 20 to 20 .* drop_last=True"):
        fit(Bare(), DataLoader(data(41), 4), callbacks=[small(min_batch_size=20)])
    callback = small(min_batch_size=19)
    fit(Bare(), DataLoader(data(41), 4), callbacks=[callback])
    assert callback.batch_size == 19


def test_the_parts_of_an_effective_batch_leave_no_last_batch_of_one_sample() -> None:
    callback = small(effective_batch_size=76, val=False)
    searched = fit(Net(), callbacks=[callback])
    assert (callback.batch_size, searched["accumulate"]) == (4, 19), "19 would leave one sample of 96"
    with pytest.raises(AutoBatchError, match=r"effective_batch_size is 19.* BatchNorm .*last batch"):
        fit(Net(), callbacks=[small(effective_batch_size=19, val=False)])
    module = Net()
    module.net[1] = torch.nn.LayerNorm(32)
    callback = small(effective_batch_size=19, val=False)
    fit(module, callbacks=[callback])
    assert callback.batch_size == 19


def test_a_part_of_an_effective_batch_below_the_smallest_asked_for_is_refused() -> None:
    with pytest.raises(AutoBatchError, match=r"effective_batch_size is 33.* at least 12 samples"):
        fit(Net(), callbacks=[small(effective_batch_size=33, min_batch_size=12, val=False)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_batch_size": 33, "max_batch_size": 50}, r"no divisor of 64 has at least 33 .* at most 50"),
        (
            {"multiple_of": 24, "max_batch_size": 50},
            r"no divisor of 64 is a multiple of 24.*; 48 or 72 would",
        ),
    ],
)
def test_an_effective_batch_without_a_divisor_within_the_bounds_is_refused_before_the_search(
    options: dict[str, int], message: str
) -> None:
    callback, module = small(effective_batch_size=64, val=False, **options), Net()
    with pytest.raises(AutoBatchError, match=f"effective_batch_size is 64.*{message}"):
        fit(module, callbacks=[callback])
    assert callback.results == {}
    callback = small(effective_batch_size=72, val=False, **options)
    searched = fit(Net(), callbacks=[callback])
    sizes = {"min_batch_size": (36, 2), "multiple_of": (24, 3)}
    assert (callback.batch_size, searched["accumulate"]) == sizes[next(iter(options))]


@pytest.mark.parametrize("effective_batch_size", [None, 64])
def test_a_limit_of_validation_holds_for_training_where_they_share_the_size(
    effective_batch_size: int | None,
) -> None:
    options = {"val_options": {"max_batch_size": 16}, "effective_batch_size": effective_batch_size}
    callback, module = small(**options), Net()
    fit(module, callbacks=[callback])
    assert callback.batch_size == module.batch_size == callback.results["val"].batch_size == 16
    callback = small(val_options={"max_batch_size": 2048})
    fit(Net(), callbacks=[callback])
    assert callback.batch_size == LARGE, "a larger limit of validation is none of training"


class Lengths(Net):
    """Two loaders of validation, of 5 and of 30 samples, of which 12 fit at once."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if len(batch[0]) > 12:
            raise torch.OutOfMemoryError("out of memory")

    def val_dataloader(self) -> Any:
        return [DataLoader(data(5), self.batch_size), DataLoader(data(30), self.batch_size)]


def test_a_shared_size_fits_in_the_longest_loader_of_validation() -> None:
    callback = small()
    fit(Lengths(), callbacks=[callback])
    assert callback.batch_size == 12


def test_batches_of_trials_may_be_made_by_a_function() -> None:
    sizes: list[int] = []

    def make_batch(size: int) -> Any:
        sizes.append(size)
        return torch.ones(size, 16), torch.zeros(size, dtype=torch.int64)

    callback = small(make_batch=make_batch)
    fit(Net(), callbacks=[callback])
    assert LARGE in sizes
    assert callback.batch_size == LARGE


# --- accumulation and the learning rate ---


@pytest.mark.parametrize(
    ("rule", "rate"), [(None, 0.05), ("linear", 0.05 * (60 / 20)), ("sqrt", 0.05 * (60 / 20) ** 0.5)]
)
def test_accumulation_and_the_learning_rate_follow_the_effective_batch(
    rule: Literal["linear", "sqrt"] | None, rate: float
) -> None:
    base = None if rule is None else 20
    callback = small(effective_batch_size=60, scale_lr=rule, base_batch_size=base)
    searched = fit(Net(), callbacks=[callback])
    by_hand = fit(Net(LARGE, lr=rate), accumulate_grad_batches=3)
    assert searched["accumulate"] == 3
    assert differences(searched, by_hand) == []


def test_the_batch_size_divides_the_effective_batch() -> None:
    callback = small(effective_batch_size=33, val=False)
    searched = fit(Net(), callbacks=[callback])
    assert (callback.batch_size, searched["accumulate"]) == (11, 3)


def test_an_effective_batch_that_hardly_divides_is_named_with_better_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(AutoBatchError, match=r"part that divides it is 1; 81 or 84 would .* BatchNorm"):
        fit(Net(), callbacks=[small(effective_batch_size=83, val=False)])
    module = Net()
    module.net[1] = torch.nn.LayerNorm(32)
    searched = fit(module, callbacks=[small(effective_batch_size=83, val=False)])
    assert searched["accumulate"] == 83
    assert "83 accumulation steps are slow" in caplog.text


def test_an_effective_batch_above_an_epoch_is_refused() -> None:
    with pytest.raises(AutoBatchError, match="effective_batch_size is 97, above what one epoch holds, 96"):
        fit(Net(), callbacks=[small(effective_batch_size=97)])


def test_a_second_fit_does_not_scale_the_learning_rate_again() -> None:
    callback, module = small(effective_batch_size=40, scale_lr="linear", base_batch_size=20, val=False), Net()
    for _ in range(2):
        fit(module, callbacks=[callback])
        assert module.hparams.lr == 0.1


def test_a_second_fit_of_a_trainer_searches_again() -> None:
    callback, module = small(val=False), Net()
    trainer = trainer_for([callback])
    trainer.fit(module)
    first = callback.results
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module)
    assert callback.results["train"] is not first["train"]
    assert module.batch_size == LARGE


# --- resumption ---


def checkpoint(folder: Path, module: Any = None, **options: Any) -> Path:
    """Of a run of two epochs, after the first."""
    path = folder / "first.ckpt"

    class Save(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

    fit(module or Net(), callbacks=[small(**options), Save()])
    return path


class Plain(Net):
    """Its schedule does not end with the run."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def test_a_resumed_run_uses_the_size_of_the_earlier_one(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, max_batch_size=12)
    saved = torch.load(path, weights_only=True)["callbacks"]["AutoBatch"]
    assert saved["sizes"] == {"train": 12}
    callback = small(max_batch_size=60)
    resumed = fit(Net(), callbacks=[callback], ckpt=path)
    assert callback.batch_size == 12
    assert {trial.size for trial in callback.results["train"].trials} == {12}
    assert differences(resumed, fit(Net(12), ckpt=path)) == []


def test_a_size_of_the_earlier_run_that_no_longer_fits_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint(tmp_path, Plain(), max_batch_size=60)
    fit(Plain(mib=1.0))
    callback = AutoBatch(**room(60), max_batch_size=60)
    fit(Plain(mib=1.0), callbacks=[callback], ckpt=path)
    assert callback.batch_size is not None
    assert callback.batch_size < 60
    assert "batch size 60 of the run that is resumed no longer fits" in caplog.text


@pytest.mark.usefixtures("few_timed_steps")
def test_the_size_of_the_earlier_run_is_kept_whatever_is_fastest(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, max_batch_size=12)
    callback = small(objective="throughput", val=False)
    fit(Net(), callbacks=[callback], ckpt=path)
    assert callback.batch_size == 12
    assert callback.results["train"].timings == ()


def test_a_size_of_the_earlier_run_that_is_no_longer_allowed_is_not_said_not_to_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint(tmp_path, Plain(), max_batch_size=12)
    fit(Plain(), callbacks=[small(max_batch_size=8)], ckpt=path)
    assert (
        "batch size 12 of the run that is resumed is above max_batch_size, 8; going on with 8" in caplog.text
    )
    assert "no longer fits" not in caplog.text


def test_a_resumed_run_does_not_scale_the_learning_rate_again(tmp_path: Path) -> None:
    scaling = {"scale_lr": "linear", "base_batch_size": 10}
    path = checkpoint(tmp_path, **scaling)
    module = Net.load_from_checkpoint(path, weights_only=False)
    assert module.hparams.lr == 0.1
    fit(module, callbacks=[small(**scaling)], ckpt=path)
    assert module.hparams.lr == 0.1


# --- refusals ---


class Fixed(Net):
    def train_dataloader(self) -> Any:
        return loader(8)


class Odd(Net):
    def train_dataloader(self) -> Any:
        return loader(self.batch_size + 1)


class Capped(Net):
    def train_dataloader(self) -> Any:
        return loader(min(16, self.batch_size))


class CappedValidation(Net):
    def val_dataloader(self) -> Any:
        return DataLoader(data(NUM_VAL), min(16, self.batch_size))


class Growing(Net):
    def val_dataloader(self) -> Any:
        return DataLoader(data(NUM_VAL), self.batch_size + (self.batch_size > 16))


class Iterating(Net):
    def training_step(self, dataloader_iter: Any) -> Any:
        return self.loss(next(dataloader_iter)[0])


def batch_sampler() -> Any:
    class OfMyOwn(BatchSampler):
        pass

    return OfMyOwn(SequentialSampler(data()), 4, False)


REFUSED: dict[str, tuple[Callable[[], Any], tuple[Any, ...], dict[str, Any], dict[str, Any], str]] = {
    "no attribute": (
        lambda: Net(), (), {"batch_arg_name": "size"}, {}, r"neither Net .* have size.*batch_arg_name",
    ),
    "a fixed size": (Fixed, (), {}, {}, r"the same batch size whatever batch_size is"),
    "an odd size": (Odd, (), {}, {}, r"of batch size 5 where the attribute is 4, and of 9"),
    "a limited size": (
        Capped, (), {}, {}, r"of batch size 16 where batch_size is 20, not of 20 .*neither proportional",
    ),
    "a growing size": (Growing, (), {}, {}, r"val_dataloader.* of batch size 21 where batch_size is 20"),
    "a plain batch sampler": (
        Bare, (DataLoader(data(), batch_sampler=BatchSampler(SequentialSampler(data()), 4, False)),), {}, {},
        r"has a batch sampler of its own, BatchSampler",
    ),
    "a batch sampler": (
        Bare, (DataLoader(data(), batch_sampler=batch_sampler()),), {}, {}, r"batch sampler .*, OfMyOwn",
    ),
    "batches of the dataset": (Bare, (DataLoader(data(), batch_size=None),), {}, {}, r"batch_size=None"),
    "no loader": (Bare, ([data()[:4]],), {}, {}, r"is no DataLoader"),
    "unequal loaders": (Bare, ([loader(4), loader(8)],), {}, {}, r"different batch sizes, \[4, 8\]"),
    "an iterator": (Iterating, (), {}, {}, r"dataloader_iter"),
    "no rate": (
        Net, (), {"scale_lr": "sqrt", "base_batch_size": 2, "lr_arg_name": "rate"}, {}, r"have rate.*lr_arg",
    ),
    "accumulation by hand": (Manual, (), {"effective_batch_size": 8}, {}, r"Manual optimizes manually"),
    "a schedule of accumulation": (
        Net, (), {"effective_batch_size": 8}, {"callbacks": [GradientAccumulationScheduler({0: 2})]},
        r"GradientAccumulationScheduler",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_searched_is_refused_by_name(name: str) -> None:
    module, given, arguments, options, message = REFUSED[name]
    options = dict(options)
    others = options.pop("callbacks", [])
    with pytest.raises(AutoBatchError, match=message):
        fit(module(), *given, callbacks=[*others, small(**arguments)], **options)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_batchsize": 3}, TypeError, "no argument 'max_batchsize'; it takes .*max_batch_size.* val,"),
        ({"val_options": {"mode": "val"}}, TypeError, "val_options takes no 'mode'"),
        ({"val_options": {"max_size": 3}}, TypeError, "val_options has no argument 'max_size'"),
        ({"start": 2}, TypeError, "takes no 'start'"),
        ({"bounds": {"dataset": 2}}, TypeError, "takes no 'bounds'"),
        ({"predict": True}, TypeError, "takes no 'predict'"),
        ({"scale_lr": "cubic", "base_batch_size": 1}, ValueError, "scale_lr is 'cubic'.*'linear', 'sqrt'"),
        ({"scale_lr": "linear"}, ValueError, "needs base_batch_size"),
        ({"effective_batch_size": 0}, ValueError, "effective_batch_size is 0"),
        ({"val_options": 3}, TypeError, "val_options is an int; it must be a dictionary"),
        ({"make_batch": 3}, TypeError, "^make_batch is an int; it must be a function"),
        ({"make_val_batch": 3}, TypeError, "^make_val_batch is an int; it must be a function"),
        ({"batch_arg_name": 3}, TypeError, "^batch_arg_name is an int; it must be text"),
        ({"val_batch_arg_name": None}, TypeError, "val_batch_arg_name is None; it must be text"),
        ({"lr_arg_name": 3}, TypeError, "lr_arg_name is an int; it must be text"),
        ({"val": 3}, TypeError, "val is an int; it must be True or False"),
        ({"base_batch_size": 3}, ValueError, "base_batch_size is given, but scale_lr"),
        ({"val": False, "val_options": {"tolerance": 0.1}}, ValueError, "val_options is given, but val is"),
        ({"target_memory_fraction": "x"}, TypeError, "^target_memory_fraction is 'x'"),
        ({"max_batch_size": 4, "min_batch_size": 5}, ValueError, "max_batch_size is 4; .* min_batch_size, 5"),
        ({"val_options": {"tolerance": 1}}, ValueError, "val_options: tolerance is 1"),
        ({"min_batch_size": 5, "val_options": {"max_batch_size": 4}}, ValueError, "val_options: max_batch"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AutoBatch(**arguments)


@pytest.mark.parametrize("name", ["FSDPStrategy", "ModelParallelStrategy"])
def test_a_strategy_whose_ranks_cannot_step_alone_is_refused(name: str) -> None:
    trainer = trainer_for()
    trainer._accelerator_connector.strategy = getattr(strategies, name)()
    with pytest.raises(AutoBatchError, match=f"the strategy {name} cannot be searched"):
        small().setup(trainer, Net(), "fit")


def test_validation_may_take_less_of_a_shared_size() -> None:
    callback = small()
    fit(CappedValidation(), callbacks=[callback])
    assert callback.batch_size == LARGE


def test_a_limited_loader_is_searched_within_its_limit() -> None:
    callback, module = small(max_batch_size=16), Capped()
    searched = fit(module, callbacks=[callback])
    assert callback.batch_size == module.batch_size == max(searched["sizes"]) == 16


def test_a_size_that_cannot_be_set_is_refused() -> None:
    class NoSetter(Net):
        size = property(lambda self: 4)

    with pytest.raises(AutoBatchError, match="size of NoSetter cannot be set"):
        fit(NoSetter(), callbacks=[small(batch_arg_name="size")])


def test_an_option_out_of_range_is_named_before_training() -> None:
    module = Net()
    with pytest.raises(ValueError, match="target_memory_fraction is 2"):
        fit(module, callbacks=[AutoBatch(target_memory_fraction=2)])
    assert module.batch_size == 4


# --- what Lightning's own tests of its finder ask for; see the table in docs/lightning.md ---


class FailsAbove(Net):
    """Memory runs out above ten samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) > 10:
            raise torch.OutOfMemoryError("out of memory")
        return super().training_step(batch, batch_idx)


def test_the_trainer_is_as_before_but_for_the_size() -> None:
    module, callback = Net(), small(val=False)
    seen: dict[str, Any] = {}

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            seen.update(
                callbacks=list(trainer.callbacks), loggers=list(trainer.loggers), step=trainer.global_step,
                epoch=trainer.current_epoch, max_steps=trainer.max_steps, stop=trainer.should_stop,
                limits=(trainer.limit_train_batches, trainer.limit_val_batches),
                loaders=(trainer.train_dataloader.batch_size, trainer.val_dataloaders.batch_size),
                logged=dict(trainer.logged_metrics), stepping=trainer.estimated_stepping_batches,
            )  # fmt: skip

    look, logger = Look(), Recorder()
    trainer = trainer_for([callback, look], logger=logger)
    trainer.fit(module)
    assert seen == {
        "callbacks": [callback, look], "loggers": [logger], "step": 0, "epoch": 0, "max_steps": -1,
        "stop": False, "limits": (1.0, 1.0), "loaders": (LARGE, LARGE), "logged": {}, "stepping": 10,
    }  # fmt: skip
    assert "_setup_model" not in vars(trainer.strategy)


def test_an_attribute_and_a_hyperparameter_are_both_set() -> None:
    module = InHyperparameters()
    module.batch_size = 7
    fit(module, callbacks=[small(val=False)])
    assert (module.batch_size, module.hparams.batch_size) == (LARGE, LARGE)
    assert module.hparams_initial.batch_size == LARGE


def test_both_a_module_and_its_data_module_get_the_size() -> None:
    module, data_module = Net(), Data()
    fit(module, data_module, callbacks=[small(val=False)])
    assert (module.batch_size, data_module.batch_size) == (LARGE, LARGE)


@pytest.mark.parametrize("strategy", ["power", "binsearch"])
def test_the_strategies_of_lightning_are_there(strategy: str) -> None:
    callback = small(strategy=strategy, val=False)
    fit(FailsAbove(), callbacks=[callback])
    assert callback.batch_size == {"power": 8, "binsearch": 10}[strategy]


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="strategy is 'ball'; it must be one of 'guided'"):
        fit(Net(), callbacks=[AutoBatch(strategy="ball")])


def test_no_trials_are_refused() -> None:
    with pytest.raises(ValueError, match="max_trials is 0; it must be at least 1"):
        fit(Net(), callbacks=[AutoBatch(max_trials=0)])


def test_each_trial_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "linnaeus.autobatch")
    callback = small(val=False)
    fit(Net(), callbacks=[callback])
    for number, trial in enumerate(callback.results["train"].trials, start=1):
        assert f"train, trial {number}: batch size {trial.size} fits" in caplog.text
    assert "AutoBatch: batch size 20 " in caplog.text


def test_with_few_trials_the_best_so_far_is_used() -> None:
    callback = AutoBatch(strategy="power", max_trials=2, max_batch_size=64, val=False)
    fit(Net(), callbacks=[callback])
    assert callback.results["train"].limited_by == "max_trials"
    assert callback.batch_size == max(trial.size for trial in callback.results["train"].trials)


def test_after_a_failure_loaders_have_the_size_that_fits() -> None:
    module, callback = FailsAbove(), small(val=False)
    fit(module, callbacks=[callback])
    assert callback.batch_size == module.batch_size == 10
    assert set(module.sizes) <= {10, 96 % 10}


def test_an_error_that_is_not_about_memory_is_raised_as_it_is_and_leaves_the_size() -> None:
    class Broken(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError("a bad sample")

    module = Broken()
    trainer = trainer_for([small()])
    with pytest.raises(ZeroDivisionError, match="a bad sample"):
        trainer.fit(module)
    assert module.batch_size == 4
    assert "_setup_model" not in vars(trainer.strategy)
    assert len(trainer.callbacks) == 1


def test_nothing_is_searched_in_a_fast_run_nor_in_validation() -> None:
    module, callback = Net(), small()
    trainer = trainer_for([callback], fast_dev_run=True)
    trainer.fit(module)
    trainer_for([callback]).validate(module)
    assert (callback.batch_size, module.batch_size) == (None, 4)


def test_no_file_is_written(tmp_path: Path) -> None:
    fit(Net(), callbacks=[small(val=False)], default_root_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_search_is_not_seen_by_loggers_and_callbacks() -> None:
    class Count(Callback):
        num_batches = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.num_batches += 1

    class Direct(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.logger.log_metrics({"direct": 1.0}, step=batch_idx)
            return super().training_step(batch, batch_idx)

    count, logger = Count(), Recorder()
    fit(Direct(), callbacks=[small(val=False), count], logger=logger)
    assert count.num_batches == 10
    assert sum("direct" in row[1] for row in logger.rows if isinstance(row, tuple)) == 10


def test_the_older_package_name_works_too() -> None:
    older = pytest.importorskip("pytorch_lightning")

    class Older(older.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size, self.layer = 4, torch.nn.Linear(16, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            return loader(self.batch_size)

    module = Older()
    older.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, callbacks=[small()],
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(module)  # fmt: skip
    assert module.batch_size == LARGE


def test_generators_that_are_not_looked_for_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fit(Bare(), Data(), callbacks=[small(val=False)])
    assert "are not put back" not in caplog.text
    monkeypatch.setattr(lightning_loaders, "MAX_OBJECTS", 3)
    fit(Bare(), Data(), callbacks=[small(val=False)])
    assert "hold more than 3 objects; random number generators" in caplog.text


# --- the page and the example ---


def test_each_row_of_the_table_names_tests_that_are_there() -> None:
    page = (ROOT / "docs" / "lightning.md").read_text()
    table = page.partition("## Beside Lightning's own finder")[2].partition("## Example")[0]
    rows = [row.split("|") for row in table.splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 15
    here = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("test_lightning*.py")))
    for *_, named, _ in rows:
        names = re.findall(r"`([\w.]+)`", named)
        assert names, named
        for name in names:
            begin, _, end = name.partition("...")
            assert re.search(rf"def {begin}\w*{end}\w*\(" if "..." in name else rf"def {name}\(", here), name


def test_the_options_of_the_page_are_those_of_the_callback() -> None:
    page = (ROOT / "docs" / "lightning.md").read_text()
    own = set(AutoBatch.__init__.__kwdefaults__ or {})
    table = page.partition("## Options")[2].partition("## What it refuses")[0]
    assert own <= set(re.findall(r"`(\w+)`", table))


def test_the_example_trains_at_the_size_that_it_finds(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(ROOT / "examples" / "lightning_digits.py"))["main"]
    trainer = main(["--epochs", "1", "--accelerator", "cpu", "--max-batch-size", "50"])
    found, accuracy = capsys.readouterr().out.splitlines()[-2:]
    assert found.startswith("batch size 50 (limited by max_batch_size): ")
    assert accuracy.endswith(", 30 steps")
    assert trainer.train_dataloader.batch_size == 50
