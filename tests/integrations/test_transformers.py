"""`autobatch` for the `Trainer` of transformers: what it finds, and that training is none the wiser."""

import runpy
from functools import partial

import pytest
import torch
from torch.utils.data import IterableDataset, Subset

pytest.importorskip("datasets")  # peft alone brings transformers

from transformers import Trainer

from linnaeus.integrations.transformers import autobatch, size_in_checkpoint, trial
from linnaeus.integrations.transformers.data import trial_data
from linnaeus.runtime.errors import AutoBatchError
from tests.helpers.bits import differences
from tests.helpers.children import ROOT
from tests.helpers.ledger import Ledger, limit_with_room_for, room
from tests.helpers.processes import compute
from tests.integrations import hugging
from tests.integrations.hugging import (
    LONGEST,
    Calls,
    Recorder,
    Text,
    collate,
    compared,
    outcome,
    trainer,
)

pytestmark = [
    pytest.mark.filterwarnings("default::FutureWarning", "default::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


recorder = partial(trainer, Recorder)


def within_memory(**search):
    return {**room(50, max_batch_size=128), **search}


CASES = {
    "bf16, accumulation, grouped by length": {
        "bf16": True,
        "gradient_accumulation_steps": 3,
        "train_sampling_strategy": "group_by_length",
    },
    "checkpointing, evaluation, neftune, label smoothing": {
        "gradient_checkpointing": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "max_grad_norm": 0.0,
        "neftune_noise_alpha": 5.0,
        "label_smoothing_factor": 0.1,
        "dataloader_drop_last": True,
        "include_num_input_tokens_seen": "all",
    },
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_training_is_that_of_the_size_given_by_hand(options):
    found, differing = compared(recorder, within_memory(), **options)
    result, size = found.autobatch_results["train"], found.args.per_device_train_batch_size
    assert (result.limited_by, result.certified) == ("memory", True)
    assert 2 <= result.batch_size == found.state.train_batch_size == size < 128
    assert differing == []
    assert found.shapes[0][0] == size
    assert ("val" in found.autobatch_results) == ("eval_strategy" in options)


FOUR = {"min_batch_size": 4, "max_batch_size": 4}


class WithParts(Recorder):
    """With an optimizer, a schedule, and another model, in evaluation mode, that it trains."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.judges = {"one": torch.nn.Linear(1, 1).eval()}
        self.judge_optimizer = torch.optim.Adam(self.judges["one"].parameters(), lr=0.1)

    def training_step(self, *arguments):
        assert not self.judges["one"].training
        self.judges["one"](torch.ones(1, 1)).sum().backward()
        self.judge_optimizer.step()
        return super().training_step(*arguments)


def test_a_trainer_with_parts_of_its_own_trains_twice_as_by_hand():
    outcomes = []
    for searches in (True, False):
        made = trainer(WithParts, per_device_train_batch_size=4)
        if searches:
            autobatch(made, **FOUR)
        made.train()
        made.args.max_steps = 5
        made.train()
        judge = [part.state_dict() for part in (made.judges["one"], made.judge_optimizer)]
        outcomes.append({**outcome(made), "judge": judge})
    assert differences(*outcomes) == []


def test_what_is_not_the_same_is_seen():
    found = []
    for size in (4, 5):
        calls = Calls()
        made = recorder(callbacks=[calls], per_device_train_batch_size=size)
        made.train()
        found.append(outcome(made, calls))
    assert {"weights", "optimizer", "log", "random", "calls", "own"} <= {*differences(*found)}


def test_training_takes_no_more_memory_than_a_trial_of_its_size():
    peaks, options = [], {"bf16": True, "gradient_accumulation_steps": 4}
    for is_trial in (False, True):
        made = trainer(per_device_train_batch_size=16, **options)
        made.train_dataset = Subset(Text(), [58] * 200)  # one of the longest
        with Ledger() as ledger:
            if not is_trial:
                made.train()
            else:
                with trial.rehearsal(made) as steps:
                    look, _ = trial_data(made, "train", None, 1.0)
                    for _ in range(2):
                        steps.train(steps.batches(look.batch(16), 4))
        peaks.append(ledger.peak_bytes)
    assert peaks[0] <= peaks[1] <= 1.002 * peaks[0]


def test_the_effective_batch_is_made_up_of_the_size_found():
    search = within_memory(effective_batch_size=48, max_batch_size=20)
    found, differing = compared(recorder, search)
    size = found.args.per_device_train_batch_size
    assert size <= found.autobatch_results["train"].batch_size <= 20
    assert size * found.args.gradient_accumulation_steps == 48
    assert differing == []


def test_an_option_decides_on_evaluation_and_data_bound_sizes():
    without = trainer(eval_strategy="steps", eval_steps=3)
    autobatch(without, max_batch_size=6, evaluation=False).train()
    assert [*without.autobatch_results] == ["train"]
    assert without.args.per_device_eval_batch_size == 8
    made = trainer()
    made.train_dataset = Subset(Text(), range(5))
    made.eval_dataset = {"few": Subset(Text(), range(3)), "many": Text()}
    autobatch(made, max_batch_size=6, evaluation=True).train()
    train, val = made.autobatch_results["train"], made.autobatch_results["val"]
    assert (made.args.per_device_train_batch_size, train.limited_by) == (5, "dataset")
    assert made.args.per_device_eval_batch_size == val.batch_size == 6
    assert made.evaluate()["eval_many_loss"] > 0


def test_evaluation_counts_the_outputs_that_metrics_get():
    made = trainer(eval_strategy="steps", eval_steps=3)
    made.compute_metrics = lambda prediction: {"number": len(prediction.predictions)}
    autobatch(made, **FOUR, eval_options=room(150, max_batch_size=64)).train()
    result = made.autobatch_results["val"]
    assert result.batch_size == 64
    with Ledger() as ledger:
        made.evaluate()
    measured_bytes = (result.peak_bytes or 0) - result.held_bytes
    assert 0.9 * measured_bytes < ledger.peak_bytes <= 1.02 * measured_bytes


def test_a_new_model_is_searched_again():
    """As in `hyperparameter_search`."""
    widths = iter([32, 32, 256])
    made = Trainer(
        model_init=lambda: hugging.model(n_embd=next(widths)),
        args=hugging.arguments(),
        train_dataset=Text(),
        data_collator=collate,
    )
    autobatch(made, **room(100, max_batch_size=32))
    sizes = []
    for _ in range(2):
        made.train()
        sizes.append(made.args.per_device_train_batch_size)
    assert sizes[1] < sizes[0] == 32


def test_a_resumed_run_keeps_the_size_of_its_checkpoint(tmp_path):
    options = {
        "output_dir": str(tmp_path),
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4,
    }
    whole = autobatch(recorder(**options), **within_memory(max_batch_size=9))
    whole.train()
    checkpoint = str(tmp_path / "checkpoint-2")
    ours = outcome(whole)
    resumed = autobatch(recorder(**options), **within_memory())
    resumed.train(resume_from_checkpoint=checkpoint)
    result = resumed.autobatch_results["train"]
    assert [trial.size for trial in result.trials] == [9], "it is run once"
    assert result.batch_size == resumed.args.per_device_train_batch_size == 9
    again = outcome(resumed)
    other = recorder(per_device_train_batch_size=9, **options)
    other.train(resume_from_checkpoint=checkpoint)
    assert differences(again, outcome(other)) == []
    assert not {"weights", "schedule"} & {*differences(ours, again)}
    assert size_in_checkpoint(str(tmp_path)) is None


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_batches_of_a_budget_of_tokens_hold_every_sample_once(tmp_path, strategy):
    """Resumed within an epoch, or at its end, where it is evaluated."""
    options = {
        "output_dir": str(tmp_path),
        "save_strategy": strategy,
        "save_steps": 3,
        "max_steps": -1,
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "epoch",
    }
    search = {"budget": "tokens", "eval_options": {"max_batch_size": 4}}
    whole = autobatch(recorder(**options), **search, **room(50))
    whole.train()
    result, budget = whole.autobatch_results["train"], whole.args.per_device_train_batch_size
    assert (result.limited_by, result.batch_size) == ("memory", budget)
    assert LONGEST <= budget < 200 * LONGEST
    assert whole.args.per_device_eval_batch_size == 4
    num_batches = len(whole.get_train_dataloader())
    assert all(rows * tokens <= budget for rows, tokens in whole.shapes)
    epochs = whole.shapes[-2 * num_batches : -num_batches], whole.shapes[-num_batches:]
    assert [sum(rows for rows, _ in epoch) for epoch in epochs] == [200, 200]
    assert epochs[0] != epochs[1]
    num_steps = -(-num_batches // 2)
    assert whole.state.global_step == whole.state.max_steps == 2 * num_steps
    step = num_steps if strategy == "epoch" else 3
    resumed = autobatch(recorder(**options), **search, **room(80))
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert resumed.args.per_device_train_batch_size == budget
    differing = differences(outcome(whole), outcome(resumed))
    assert not {"weights", "optimizer", "schedule"} & {*differing}


def test_a_stream_needs_samples_and_trains_as_by_hand():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(Text())

    def make(**options):
        made = trainer(**options)
        made.train_dataset = Stream()
        return made

    made, differing = compared(make, within_memory(samples=[Text()[112], Text()[0]]))
    assert made.args.per_device_train_batch_size > 8
    assert differing == []


def test_a_search_that_fails_leaves_the_trainer_as_it_was():
    made = autobatch(recorder(), memory_limit_gb=0.2)
    with pytest.raises(AutoBatchError, match="GiB"):
        made.train()
    assert made.args.per_device_train_batch_size == 8
    assert made.optimizer is None
    del made._inner_training_loop
    made.train()
    ours = outcome(made)
    other = recorder()
    other.train()
    assert differences(ours, outcome(other)) == []


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What `hugging_ranks.work` gives on each of two ranks."""
    return compute("tests.integrations.hugging_ranks", 2, tmp_path_factory.mktemp("ranks"))


def test_two_ranks_use_the_smaller_size_and_train_as_by_hand(ranks):
    results = [rank["compared"] for rank in ranks]
    assert [result["differences"] for result in results] == [[], []]
    assert results[0]["size"] == results[1]["size"] >= 2
    assert results[0]["weights"] == results[1]["weights"]
    for result in results:
        assert {size for size, _ in result["shapes"]} == {result["size"]}
        assert result["limited_by"] == "memory"


def test_two_ranks_share_the_batches_of_a_budget_out(ranks):
    (budget, *_), (other, *_) = (rank["budget"] for rank in ranks)
    shares = [rank["budget"][1] for rank in ranks]
    assert budget == other == 1000
    assert len(shares[0]) == len(shares[1])
    assert sum(rows for share in shares for rows, _ in share) == 200
    assert all(rows * tokens <= budget for share in shares for rows, tokens in share)


def test_on_two_ranks_an_error_of_one_ends_both_with_its_cause(ranks):
    other, own = (rank["broken data"] for rank in ranks)
    assert own.startswith("FileNotFoundError: ")
    assert other.endswith(f" rank 1: {own}")


def test_the_example_trains_at_the_size_that_it_finds(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(ROOT / "examples" / "transformers_tiny.py"))["main"]
    limit_gb = str(limit_with_room_for(60) / 0.8)
    found = main(["--steps", "2", "--memory-limit-gb", limit_gb])
    assert f" {found.args.per_device_train_batch_size} " in capsys.readouterr().out
