"""The callback for Lightning, in one process, against Lightning itself."""

import logging
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch import Callback, callbacks
from torch.utils.data import DataLoader, IterableDataset

from linnaeus.integrations.lightning import AutoBatch
from tests.helpers.bits import differences
from tests.helpers.ledger import Ledger, room
from tests.integrations.lightning_runs import (
    COSTS,
    WIDTH,
    Bare,
    Data,
    InHyperparameters,
    Large,
    Made,
    Manual,
    Needy,
    Net,
    Several,
    Single,
    Within,
    compared,
    data,
    fit,
    loader,
    trainer_for,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, such as those about workers

LARGE = 20
SMALL = {"max_batch_size": LARGE, "steps_per_trial": 2}
"""Arguments of a search of two or three trials."""


def small(**options):
    return AutoBatch(**{**SMALL, **options})


def average():
    return [callbacks.EMAWeightAveraging(decay=0.9)]


CASES = {
    "hyperparameter, bf16, accumulation": (
        InHyperparameters,
        {"precision": "bf16-mixed", "accumulate_grad_batches": 3},
    ),
    "data module": (lambda size: Bare(), {"given": Data}),
    "manual": (Manual, {}),
    "needy": (Needy, {}),
    "several loaders, average": (Several, {"others": average}),
}
"""What makes the module for a batch size, and options of `compared`."""


@pytest.mark.parametrize(("module", "options"), CASES.values(), ids=CASES)
def test_training_is_that_of_a_run_with_the_size_by_hand(module, options):
    callback, searched, differing = compared(module, SMALL, **options)
    assert callback.batch_size == LARGE
    assert searched["progress"]["epoch_progress"]["total"]["completed"] >= 1
    assert differing == []


def test_what_is_not_the_same_is_seen():
    four, six = (fit(Net(size)) for size in (4, 6))
    assert {"weights", "optimizers", "logs", "progress", "random numbers"} <= {
        *differences(four, six)
    }


# --- sizes ---


def test_validation_gets_its_own_size_if_possible_and_requested():
    class FixedValidation(Data):
        def val_dataloader(self):
            return loader(5, 10)

    own = {"val_options": {"max_batch_size": 30}}
    cases = ((Data, own, 30), (FixedValidation, {}, 7), (Data, {"val": False}, 7))
    for kind, options, found in cases:
        data_module, callback = kind(4, 7), small(**options)
        fit(Bare(), data_module, callbacks=[callback])
        assert (data_module.batch_size, data_module.val_batch_size) == (LARGE, found)
        assert ("val" in callback.results) == (found == 30)


def test_the_data_bound_the_size():
    """One more than the samples is never tried."""
    callback = small()
    fit(Bare(), Made(lambda size: loader(size, 9)), callbacks=[callback])
    assert (callback.batch_size, callback.results["train"].limited_by) == (9, "dataset")
    callback = small()
    fit(Net(), callbacks=[callback], limit_train_batches=0.2)  # of 96 samples
    assert callback.batch_size == 19


def test_the_batch_size_divides_the_effective_batch():
    search = {"effective_batch_size": 72, "multiple_of": 24, "max_batch_size": 50}
    callback, searched, differing = compared(Net, search)
    assert (callback.batch_size, searched["accumulate"], differing) == (24, 3, [])
    first = callback.results["train"]
    fit(Net(), callbacks=[callback])
    assert callback.results["train"] is not first, "a second fit searches again"


def test_training_takes_the_memory_that_the_search_measured():
    options = {"precision": "bf16-mixed", "accumulate_grad_batches": 3}
    fit(Net(mib=1.0))
    callback = AutoBatch(**room(120), max_batch_size=90, val=False)
    fit(Large(), callbacks=[*average(), callback], **options)
    result = callback.results["train"]
    assert (result.limited_by, result.certified) == ("memory", True)
    taken = []
    for size in (result.batch_size, round(result.batch_size * 1.05) + 1):
        module = Large(size)
        averaged = sum(tensor.nbytes for tensor in module.state_dict().values())
        with Ledger() as ledger:
            fit(module, callbacks=average(), limit_val_batches=0, **options)
        taken.append(ledger.peak_bytes - averaged)
    fits, too_large = taken
    assert fits == pytest.approx(result.peak_bytes - result.held_bytes, rel=0.005)
    assert too_large > result.budget_bytes - result.held_bytes


def test_a_validation_limit_holds_for_training_if_size_is_shared():
    callback, module = small(val_options={"max_batch_size": 16}, effective_batch_size=64), Net()
    fit(module, callbacks=[callback])
    assert callback.batch_size == module.batch_size == callback.results["val"].batch_size == 16


def test_batches_of_a_stream_are_made_by_a_function():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(list(data()))

    sizes = []

    def make_batch(size):
        sizes.append(size)
        return torch.ones(size, 16), torch.zeros(size, dtype=torch.int64)

    def given(size, *_):
        return Made(lambda size: DataLoader(Stream(), size), size)

    search = {**SMALL, "make_batch": make_batch}
    *_, differing = compared(lambda size: Bare(), search, given, max_steps=6)
    assert LARGE in sizes
    assert differing == []


# --- samples that differ in length, and limits of Lightning ---


class Plain(Net):
    """Its schedule does not end with the run."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def test_trials_run_the_longest_samples_that_were_looked_at():
    """Most texts are not looked at, and the longest are few: larger ones may be among the others."""
    lengths = [int(1 / (1e-3 + index * 7919 % 9000 / 9000)) for index in range(8999, -1, -1)]
    trials = set()  # a search puts attributes of the module back

    class Texts(Plain):
        def train_dataloader(self):
            texts = [torch.ones(length) for length in lengths]
            pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
            return DataLoader(texts, self.batch_size, num_workers=1, collate_fn=pad)

        def training_step(self, batch, batch_idx):
            trials.add(tuple(batch.shape))
            return self.net(batch[:, :1].expand(-1, 16)).sum()

    module, callback = Texts(), small(val=False)
    fit(module, callbacks=[callback], max_epochs=1, limit_train_batches=1)
    result = callback.results["train"]
    assert max(trials)[1] > 10 * max(lengths[:LARGE])
    assert result.limited_by == "unread_samples"
    assert 8 < module.batch_size == result.batch_size < LARGE


def test_no_validation_step_is_needed_and_no_file_is_written(tmp_path):
    class NoValidation(Net):
        validation_step = None

    callback = small()
    fit(NoValidation(), callbacks=[callback], default_root_dir=tmp_path)
    assert set(callback.results) == {"train"}
    assert not list(tmp_path.iterdir())


# --- what comes later, and the host ---


def test_what_a_whole_loop_keeps_is_counted():
    class Keeping(Plain):
        """Keeps a quarter of a MiB of each sample of training, and half of one of validation."""

        def __init__(self):
            super().__init__()
            self.kept = []

        def loss(self, batch):
            width = 2**16 if self.training else 2**17
            self.kept.append(batch[0].new_ones(len(batch[0]), width))
            return super().loss(batch)

        def on_validation_epoch_end(self):
            assert len(self.kept) == 16 + 16, "nothing of the trials is left"

        def train_dataloader(self):
            return loader(self.batch_size, 64)

        val_dataloader = train_dataloader

    callback = AutoBatch(**room(100), max_batch_size=4, min_batch_size=4)
    fit(Keeping(), callbacks=[callback], num_sanity_val_steps=0, max_epochs=1)
    for mode, kept_mib in (("train", 16), ("val", 32)):
        result = callback.results[mode]
        grown_mib = (result.peak_bytes - result.held_bytes) / 2**20
        assert kept_mib <= grown_mib < kept_mib + 2


class Backbone(Plain):
    """Most of its parameters are frozen at first."""

    def __init__(self, batch_size=4):
        super().__init__(batch_size)
        self.backbone = torch.nn.Linear(WIDTH, 2**16)

    def loss(self, batch):
        return super().loss(batch) + self.backbone(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(filter(lambda each: each.requires_grad, self.parameters()))


def test_layers_unfrozen_later_by_a_callback_train_in_trials():
    grown = []
    for others in ([], [callbacks.BackboneFinetuning(1)]):
        callback, module = AutoBatch(max_batch_size=4, min_batch_size=4, val=False), Backbone()
        fit(module, callbacks=[*others, callback], max_epochs=1)
        assert module.backbone.weight.requires_grad == (not others)
        result = callback.results["train"]
        grown.append(result.peak_bytes - result.held_bytes)
    assert grown[0] == pytest.approx(grown[1], rel=0.01)


def test_frozen_parameters_and_a_much_larger_step_are_logged(caplog):
    caplog.set_level(logging.INFO, "linnaeus.autobatch")
    for num_frozen in (0, 17 * 2**16):
        module = Backbone()
        module.backbone.requires_grad_(not num_frozen)
        fit(module, callbacks=[small()], max_epochs=1, limit_train_batches=1)
        lines = [each.message for each in caplog.records if "frozen" in each.message]
        assert [str(num_frozen) in line for line in lines] == [True] * bool(num_frozen)
    assert "learning rate" in caplog.text


def test_accumulation_that_a_schedule_begins_later_is_in_trials():
    calls = []

    class Counted(Plain):
        def training_step(self, batch, batch_idx):
            calls[-1] += 1
            return super().training_step(batch, batch_idx)

    for others in ([], [callbacks.GradientAccumulationScheduler({1: 4})]):
        calls.append(-1)  # the step of the training itself does not count
        callback = AutoBatch(max_batch_size=4, min_batch_size=4)
        fit(Counted(), callbacks=[*others, callback], max_epochs=1, limit_train_batches=1)
    assert calls[1] == 2 * calls[0] > 0


def test_shared_memory_bounds_the_size_where_there_are_workers(monkeypatch):
    sample_bytes = 4 * WIDTH + 8
    usage = SimpleNamespace(free=2 * 5 * 7 * sample_bytes)
    monkeypatch.setattr("linnaeus.autobatch.memory.loader.shutil.disk_usage", lambda path: usage)
    callback, given = small(), Made(lambda size: loader(size, num_workers=1))
    fit(Bare(), given, callbacks=[callback], max_epochs=1, limit_train_batches=1)
    assert (callback.batch_size, callback.results["train"].limited_by) == (7, "host_memory")


# --- resumption ---


def checkpoint(folder, module):
    """Of a run of two epochs with batches of 12, after the first."""
    path = folder / "first.ckpt"

    class Save(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

    fit(module, callbacks=[small(max_batch_size=12), Save()])
    return path


def test_batches_of_a_cost_are_those_of_the_budget_by_hand():
    options = {"accumulate_grad_batches": 3}
    callback = AutoBatch(cost=COSTS, **room(120))
    found = fit(Single(mib=1.0), callbacks=[callback], **options)
    result, budget = callback.results["train"], callback.batch_size
    assert (result.limited_by, result.batch_size) == ("memory", budget)
    assert max(COSTS) <= budget < sum(COSTS)
    by_hand = fit(Within(budget, mib=1.0), **options)
    by_hand["attributes"].pop("budget")
    assert differences(found, by_hand) == []
    num_batches = len(found["sizes"]) // 2
    epochs = found["sizes"][:num_batches], found["sizes"][num_batches:]
    assert [sum(epoch) for epoch in epochs] == [len(COSTS)] * 2
    assert epochs[0] != epochs[1], "each epoch has its own batches"


def test_a_cost_takes_loaders_that_fit_was_given_and_resumes(tmp_path):
    class Constant(Plain, Single):
        """Without a schedule that ends."""

    given = loader(4)
    callback, module = AutoBatch(cost=COSTS, max_batch_size=5), Constant()
    trainer = trainer_for([callback], max_epochs=1)
    trainer.fit(module, given)
    assert max(module.sizes) == 5, "max_batch_size bounds the samples"
    assert callback.results["train"].limited_by == "dataset"
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed, again = AutoBatch(cost=COSTS), Constant()
    fit(again, given, callbacks=[resumed], ckpt=tmp_path / "last.ckpt")
    assert [trial.size for trial in resumed.results["train"].trials] == [callback.batch_size]
    assert sum(again.sizes) == len(COSTS)


def test_a_resumed_run_uses_the_size_of_the_earlier_one(tmp_path):
    """Whatever is fastest."""
    path = checkpoint(tmp_path, Net())
    callback = small(max_batch_size=60, objective="throughput")
    module = Net.load_from_checkpoint(path, weights_only=False)
    resumed = fit(module, callbacks=[callback], ckpt=path)
    assert callback.batch_size == 12
    assert {trial.size for trial in callback.results["train"].trials} == {12}
    assert callback.results["train"].timings == ()
    assert differences(resumed, fit(Net(12), ckpt=path)) == []


def test_a_size_of_the_earlier_run_is_replaced_if_unusable(tmp_path, caplog):
    class FailsAbove(Plain):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) > 10:
                raise torch.OutOfMemoryError("out of memory")
            return super().training_step(batch, batch_idx)

    path = checkpoint(tmp_path, Plain())
    callback = small(max_batch_size=11)
    fit(FailsAbove(), callbacks=[callback], ckpt=path)
    assert callback.batch_size == 10
    assert max(trial.size for trial in callback.results["train"].trials) == 11
    assert " 12," in caplog.text


# --- what Lightning's own tests of its finder ask for ---


def test_all_that_hold_the_size_get_it():
    module, data_module = InHyperparameters(), Data()
    module.batch_size = 7
    fit(module, data_module, callbacks=[small(val=False)])
    assert (module.batch_size, module.hparams.batch_size, data_module.batch_size) == (LARGE,) * 3
    assert module.hparams_initial.batch_size == LARGE


def test_lightnings_command_line_configures_the_callback():
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    own = {"max_batch_size": 20, "val_options": {"max_batch_size": 16}}
    callback = {"class_path": "linnaeus.integrations.lightning.AutoBatch", "init_args": own}
    config = {"trainer": {"accelerator": "cpu", "callbacks": [callback]}}
    cli = LightningCLI(Net, run=False, args=config, save_config_callback=None)
    (found,) = (each for each in cli.trainer.callbacks if isinstance(each, AutoBatch))
    sizes = {mode: options["max_batch_size"] for mode, options in found._options.items()}
    assert sizes == {"train": 20, "val": 16}


def test_nothing_is_searched_in_a_fast_run_nor_in_validation():
    module, callback = Net(), small()
    trainer_for([callback], fast_dev_run=True).fit(module)
    trainer_for([callback]).validate(module)
    assert (callback.batch_size, module.batch_size) == (None, 4)
