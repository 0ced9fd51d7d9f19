"""The callback for Lightning, in one process, against Lightning itself."""

from __future__ import annotations

import logging
import runpy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader

from linnaeus.autobatch import snapshot
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
    ("options", "average"), [({"accumulate_grad_batches": 3}, False), ({"precision": "bf16-mixed"}, True)]
)
def test_training_takes_the_memory_that_the_search_measured(options: dict[str, Any], average: bool) -> None:
    def others() -> list[Callback]:
        return [EMAWeightAveraging(decay=0.9)] if average else []

    fit(Net(mib=1.0))
    callback = AutoBatch(**room(120), max_batch_size=90, val=False)
    fit(Large(), callbacks=[*others(), callback], **options)
    result = callback.results["train"]
    assert result.limited_by == "memory"
    assert result.certified
    assert {trial.size for trial in result.trials} >= {result.batch_size, result.batch_size + 1}
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
    fit(LargeValidation(), max_epochs=1)
    callback = AutoBatch(**room(120), max_batch_size=8, val_options={"max_batch_size": 150})
    fit(LargeValidation(), callbacks=[callback], max_epochs=1)
    result = callback.results["val"]
    assert result.limited_by == "memory"
    module = LargeValidation(8, result.batch_size)
    with Ledger() as ledger:
        fit(module, max_epochs=1)
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


def test_validation_is_left_alone_where_it_does_not_follow_or_is_not_asked_for() -> None:
    class FixedValidation(Data):
        def val_dataloader(self) -> Any:
            return DataLoader(data(10), 5)

    for kind, options in ((FixedValidation, {}), (Data, {"val": False})):
        data_module, callback = kind(4, 7), small(**options)
        fit(Bare(), data_module, callbacks=[callback])
        assert (data_module.batch_size, data_module.val_batch_size) == (LARGE, 7)
        assert set(callback.results) == {"train"}


@pytest.mark.parametrize(
    ("num_samples", "drop_last", "found", "limited_by"),
    [(9, False, 9, "dataset"), (41, False, 19, "last_batch"), (41, True, LARGE, "max_batch_size")],
)
def test_the_data_bound_the_size(num_samples: int, drop_last: bool, found: int, limited_by: str) -> None:
    """One more than the samples is never tried, and BatchNorm gets no last batch of one sample."""
    callback = small()
    fit(Bare(), DataLoader(data(num_samples), 4, drop_last=drop_last), callbacks=[callback])
    assert (callback.batch_size, callback.results["train"].limited_by) == (found, limited_by)


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


@pytest.mark.parametrize(
    ("options", "size", "steps"),
    [
        ({"effective_batch_size": 76}, 4, 19),  # 19 would leave one sample of 96 in the last batch
        ({"effective_batch_size": 33}, 11, 3),
        ({"effective_batch_size": 72, "min_batch_size": 33, "max_batch_size": 50}, 36, 2),
        ({"effective_batch_size": 72, "multiple_of": 24, "max_batch_size": 50}, 24, 3),
    ],
)
def test_the_batch_size_divides_the_effective_batch(options: dict[str, Any], size: int, steps: int) -> None:
    callback = small(val=False, **options)
    searched = fit(Net(), callbacks=[callback])
    assert (callback.batch_size, searched["accumulate"]) == (size, steps)


def test_a_limit_of_validation_holds_for_training_where_they_share_the_size() -> None:
    callback, module = small(val_options={"max_batch_size": 16}, effective_batch_size=64), Net()
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


@pytest.mark.parametrize("rule", [None, "linear"])
def test_accumulation_and_the_learning_rate_follow_the_effective_batch(
    rule: Literal["linear"] | None,
) -> None:
    base, rate = (None, 0.05) if rule is None else (20, 0.05 * (60 / 20))
    callback = small(effective_batch_size=60, scale_lr=rule, base_batch_size=base)
    searched = fit(Net(), callbacks=[callback])
    by_hand = fit(Net(LARGE, lr=rate), accumulate_grad_batches=3)
    assert searched["accumulate"] == 3
    assert differences(searched, by_hand) == []


def test_a_second_fit_searches_again_and_does_not_scale_the_learning_rate_again() -> None:
    callback, module = small(effective_batch_size=40, scale_lr="linear", base_batch_size=20, val=False), Net()
    trainer, results = trainer_for([callback]), []
    for num_epochs in (2, 3):
        trainer.fit_loop.max_epochs = num_epochs
        trainer.fit(module)
        results.append(callback.results["train"])
        assert (module.batch_size, module.hparams.lr) == (LARGE, 0.1)
    assert results[0] is not results[1]


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


@pytest.mark.usefixtures("few_timed_steps")
def test_a_resumed_run_uses_the_size_of_the_earlier_one(tmp_path: Path) -> None:
    """Whatever is fastest; the learning rate is not scaled again."""
    scaling = {"scale_lr": "linear", "base_batch_size": 6}
    path = checkpoint(tmp_path, max_batch_size=12, **scaling)
    saved = torch.load(path, weights_only=True)["callbacks"]["AutoBatch"]
    assert saved["sizes"] == {"train": 12}
    callback = small(max_batch_size=60, objective="throughput", **scaling)
    module = Net.load_from_checkpoint(path, weights_only=False)
    resumed = fit(module, callbacks=[callback], ckpt=path)
    assert callback.batch_size == 12
    assert {trial.size for trial in callback.results["train"].trials} == {12}
    assert callback.results["train"].timings == ()
    assert module.hparams.lr == 0.1
    assert differences(resumed, fit(Net(12, lr=0.1), ckpt=path)) == []


class FailsAbove(Plain):
    """Memory runs out above ten samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) > 10:
            raise torch.OutOfMemoryError("out of memory")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("kind", "limit", "expected"), [(FailsAbove, 60, 10), (Plain, 8, 8)])
def test_a_size_of_the_earlier_run_that_does_not_fit_or_is_not_allowed_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[Net], limit: int, expected: int
) -> None:
    path = checkpoint(tmp_path, Plain(), max_batch_size=12)
    callback = small(max_batch_size=limit)
    fit(kind(), callbacks=[callback], ckpt=path)
    assert callback.batch_size == expected
    assert "12" in caplog.text
    assert ("max_batch_size" in caplog.text) == (kind is Plain)


class Capped(Net):
    def train_dataloader(self) -> Any:
        return loader(min(16, self.batch_size))

    def val_dataloader(self) -> Any:
        return DataLoader(data(NUM_VAL), min(9, self.batch_size))


def test_a_limited_loader_is_searched_within_its_limit() -> None:
    """Validation may take less of a shared size."""
    callback, module = small(max_batch_size=16), Capped()
    searched = fit(module, callbacks=[callback])
    assert callback.batch_size == module.batch_size == max(searched["sizes"]) == 16


# --- what Lightning's own tests of its finder ask for; see the table in docs/lightning.md ---


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


def test_all_that_hold_the_size_get_it() -> None:
    module, data_module = InHyperparameters(), Data()
    module.batch_size = 7
    fit(module, data_module, callbacks=[small(val=False)])
    assert (module.batch_size, module.hparams.batch_size, data_module.batch_size) == (LARGE,) * 3
    assert module.hparams_initial.batch_size == LARGE


@pytest.mark.parametrize(("strategy", "found"), [("power", 8), ("binsearch", 10), ("guided", 10)])
def test_the_strategies_of_lightning_are_there(
    strategy: str, found: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "linnaeus.autobatch")
    module, callback = FailsAbove(), small(strategy=strategy, val=False)
    fit(module, callbacks=[callback])
    assert callback.batch_size == module.batch_size == found
    assert set(module.sizes) <= {found, 96 % found}, "loaders follow"
    trials = callback.results["train"].trials
    assert all(f"trial {number}: " in caplog.text for number in range(1, len(trials) + 1))


def test_an_error_that_is_not_about_memory_is_raised_as_it_is_and_leaves_the_size() -> None:
    class Broken(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError("sample")

    module = Broken()
    trainer = trainer_for([small()])
    with pytest.raises(ZeroDivisionError, match="sample"):
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


def test_the_search_is_not_seen_by_loggers_and_callbacks(tmp_path: Path) -> None:
    class Count(Callback):
        num_batches = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.num_batches += 1

    class Direct(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.logger.log_metrics({"direct": 1.0}, step=batch_idx)
            return super().training_step(batch, batch_idx)

    count, logger = Count(), Recorder()
    fit(Direct(), callbacks=[small(val=False), count], logger=logger, default_root_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
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


# --- the page and the example ---


def test_the_example_trains_at_the_size_that_it_finds(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(ROOT / "examples" / "lightning_digits.py"))["main"]
    trainer = main(["--epochs", "1", "--accelerator", "cpu", "--max-batch-size", "50"])
    found, accuracy = capsys.readouterr().out.splitlines()[-2:]
    assert found.split()[2] == "50"
    assert accuracy.split()[-2] == "30"
    assert trainer.train_dataloader.batch_size == 50
