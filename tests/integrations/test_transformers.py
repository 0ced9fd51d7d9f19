"""`autobatch` for the `Trainer` of transformers: what it finds, and that training is none the wiser."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import runpy
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from torch import Tensor

pytest.importorskip("transformers")

import datasets
from transformers import Trainer, TrainerCallback, ViTConfig, ViTForImageClassification, default_data_collator

from linnaeus.errors import AutoBatchError
from linnaeus.integrations import transformers_data, transformers_trial
from linnaeus.integrations.common import SET_BY_TRAINER, search_options
from linnaeus.integrations.transformers import autobatch, size_in_checkpoint
from tests.helpers.forks import ROOT
from tests.helpers.ledger import Ledger, limit_with_room_for
from tests.helpers.processes import compute
from tests.integrations import hugging
from tests.integrations.hugging import Calls, Text, collate, differences, outcome, trainer

pytestmark = [
    pytest.mark.filterwarnings("default::FutureWarning", "default::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def room(extra_mib: float = 80) -> dict[str, Any]:
    """Arguments that leave so much above what the process holds."""
    limit_gb = limit_with_room_for(extra_mib)
    return {"target_memory_fraction": 1.0, "memory_limit_gb": limit_gb, "max_batch_size": 128}


class Recorder(Trainer):
    """A trainer of one's own that remembers the shape of each batch, and draws a number for each."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.shapes: list[tuple[int, ...]] = []
        self.total = torch.zeros(())

    def create_optimizer(self, *arguments: Any) -> Any:
        torch.rand(())
        return super().create_optimizer(*arguments)

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        self.shapes.append(tuple(inputs["input_ids"].shape))
        self.total += torch.rand(())
        return super().compute_loss(model, inputs, *arguments, **options)


def left_by(made: Any, calls: Calls | None = None) -> dict[str, Any]:
    """What a run of a `Recorder` leaves."""
    return {**outcome(made, calls), "shapes": [*made.shapes], "total": made.total.clone()}


def searched(calls: Calls | None = None, search: dict[str, Any] | None = None, **options: Any) -> Any:
    """A trainer that has searched and trained."""
    made = trainer(Recorder, callbacks=None if calls is None else [calls], **options)
    autobatch(made, **{**room(), **(search or {})}).train()
    return made


def by_hand(found: Any, calls: Calls | None = None, **options: Any) -> Any:
    """A trainer that was given the sizes that another has found."""
    names = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
    sizes = {name: getattr(found.args, name) for name in names}
    made = trainer(Recorder, callbacks=None if calls is None else [calls], **{**options, **sizes})
    made.train()
    return made


MIXED = {"bf16": True, "gradient_accumulation_steps": 3, "train_sampling_strategy": "group_by_length"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16, accumulation, grouped by length": MIXED,
    "checkpointing, evaluation": {
        "activation_checkpointing": True, "eval_strategy": "steps", "eval_steps": 2, "max_grad_norm": 0.0
    },
    "neftune, label smoothing, average of losses": {
        "neftune_noise_alpha": 5.0, "label_smoothing_factor": 0.1, "dataloader_drop_last": True,
        "include_num_input_tokens_seen": "all",
    },
}  # fmt: skip


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_training_is_that_of_the_size_given_by_hand(options: dict[str, Any]) -> None:
    calls, other_calls = Calls(), Calls()
    found = searched(calls, **options)
    result, size = found.autobatch_results["train"], found.args.per_device_train_batch_size
    assert result.limited_by == "memory"
    assert result.certified
    assert 2 <= result.batch_size == size < 128
    ours = left_by(found, calls)
    assert differences(ours, left_by(by_hand(found, other_calls, **options), other_calls)) == []
    assert ours["shapes"][0][0] == size
    assert ("val" in found.autobatch_results) == ("eval_strategy" in options)
    assert ours["state"][2] == size


class Logger(Recorder):
    """A trainer that logs in each micro-batch."""

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        self.log({"size": len(self.shapes)})
        return super().compute_loss(*arguments, **options)


@pytest.mark.parametrize("is_silent", [True, False])
def test_what_a_step_logs_in_a_trial_reaches_no_callback(
    is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_silent:
        monkeypatch.setattr(transformers_trial, "_silent", lambda trainer: contextlib.nullcontext())
    runs = []
    for is_search in (True, False):
        calls = Calls()
        made = trainer(Logger, callbacks=[calls], per_device_train_batch_size=4)
        if is_search:
            autobatch(made, min_batch_size=4, max_batch_size=4)
        made.train()
        runs.append(left_by(made, calls))
    assert differences(*runs) == ([] if is_silent else ["calls"])
    logged = [entry["size"] for entry in runs[0]["log"] if "size" in entry]
    assert logged == [0, 1, 2]


class WithModules(Recorder):
    """A trainer with an average of the model, and another model with an optimizer of its own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.averages = {"ema": copy.deepcopy(self.model).eval()}
        self.judge = torch.nn.Linear(1, 1)
        self.judge_optimizer = torch.optim.Adam(self.judge.parameters(), lr=0.1)
        self.seen = types.SimpleNamespace(modes=[])  # of a kind that is not put back

    def training_step(self, model: Any, *arguments: Any) -> Any:
        loss = super().training_step(model, *arguments)
        ema = self.averages["ema"]
        self.seen.modes.append(ema.training)
        for mean, parameter in zip(ema.parameters(), self.model.parameters(), strict=True):
            mean.data.lerp_(parameter.detach() + 1, 0.1)
        self.judge(torch.ones(1, 1)).sum().backward()
        self.judge_optimizer.step()
        return loss


def held_by(made: Any) -> dict[str, Any]:
    """What a run of `WithModules` leaves."""
    moments = made.judge_optimizer.state_dict()["state"].values()
    return {
        **left_by(made), "ema": [*made.averages["ema"].parameters()],
        "judge": [*made.judge.parameters()], "moments of the judge": [[*each.values()] for each in moments],
    }  # fmt: skip


@pytest.mark.parametrize("is_found", [True, False])
def test_modules_and_optimizers_of_the_trainer_are_put_back(
    is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_found:
        monkeypatch.setattr(
            transformers_trial, "held_by", lambda made: (torch.nn.ModuleList(), [made.judge_optimizer])
        )
    runs = []
    for is_search in (True, False):
        made = trainer(WithModules, per_device_train_batch_size=4)
        if is_search:
            autobatch(made, min_batch_size=4, max_batch_size=4)
        made.train()
        runs.append(held_by(made))
        assert made.seen.modes.count(False) == len(made.seen.modes) >= (5 if is_search and is_found else 3)
    assert differences(*runs) == ([] if is_found else ["ema"])


def test_an_optimizer_elsewhere_is_refused_with_a_remedy_that_exists() -> None:
    judge = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(judge.parameters(), lr=0.1)

    class Elsewhere(Trainer):
        def training_step(self, *arguments: Any) -> Any:
            judge(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            return super().training_step(*arguments)

    with pytest.raises(
        AutoBatchError, match=r"uses an optimizer, SGD, .* in an attribute of the trainer"
    ) as caught:
        autobatch(trainer(Elsewhere), **room()).train()
    assert "state=(" not in str(caught.value)


class WithOptimizer(Recorder):
    """A trainer with an optimizer and a schedule of one's own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)


def trained_twice(made: Any) -> dict[str, Any]:
    made.train()
    made.args.max_steps = 5
    made.train()
    return left_by(made)


def with_model_init() -> Any:
    made = trainer(Recorder, per_device_train_batch_size=4)
    return Recorder(
        model_init=lambda: hugging.model(), args=made.args, train_dataset=Text(), data_collator=collate
    )  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [lambda: trainer(WithOptimizer, per_device_train_batch_size=4), with_model_init],
    ids=["an optimizer of one's own", "model_init"],
)
def test_trainers_that_are_built_otherwise_train_as_by_hand_time_after_time(make: Callable[[], Any]) -> None:
    found = make()
    autobatch(found, max_batch_size=4, min_batch_size=4)
    ours = trained_twice(found)
    assert len(found.shapes) == 3 + 5
    assert found.autobatch_results["train"].batch_size == 4
    assert differences(ours, trained_twice(make())) == []


def leave_the_mark(content: dict[str, Any], before: dict[str, Any]) -> None:
    """Put back all that accelerate has set on a model but one attribute."""
    mark = content["_is_accelerate_prepared"]
    content.clear()
    content.update(before, _is_accelerate_prepared=mark)


@pytest.mark.parametrize(
    ("place", "name", "instead", "expected"),
    [
        (transformers_trial, "set_rng_state", lambda *_: None, "random"),
        (transformers_trial, "refill", leave_the_mark, "weights"),
        (transformers_trial._Kept, "restore", lambda *_: None, "shapes"),
    ],
    ids=["random numbers", "the model's attributes", "the trainer's attributes"],
)
def test_what_is_not_put_back_is_noticed(place: Any, name: str, instead: Any, expected: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, instead)
        found = searched(search={"max_batch_size": 4, "min_batch_size": 4}, bf16=True)
    assert expected in differences(left_by(found), left_by(by_hand(found, bf16=True)))


def test_trials_run_the_longest_samples_through_the_trainers_collator() -> None:
    batches: list[list[int]] = []
    num_in_search: list[int] = []

    def watched(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        batches.append([len(sample["input_ids"]) for sample in samples])
        return collate(samples)

    class Begun(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            num_in_search.append(len(batches))

    made = trainer(callbacks=[Begun()])
    made.data_collator = watched
    autobatch(made, **room(), effective_batch_size=None)
    made.train()
    in_search, trials = batches[: num_in_search[0]], made.autobatch_results["train"].trials
    lengths = sorted((len(Text()[index]["input_ids"]) for index in range(len(Text()))), reverse=True)
    assert len(in_search) >= 2 * len(trials) - 4
    warm_up = {1}
    assert {len(batch) for batch in in_search} == {trial.size for trial in trials} | warm_up
    assert all(batch == lengths[: len(batch)] for batch in in_search)
    in_training = batches[num_in_search[0] :]
    assert len(in_training) >= 3
    assert any(batch != lengths[: len(batch)] for batch in in_training)


class LongText(Text):
    """All samples are as long as the longest."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)["input_ids"]
        return {"input_ids": (row * 8)[: hugging.LONGEST]}


@pytest.mark.parametrize(
    "options", [{}, {"bf16": True, "gradient_accumulation_steps": 4}], ids=["plain", "bf16, accumulation"]
)
def test_training_takes_no_more_memory_than_a_trial_of_its_size(options: dict[str, Any]) -> None:
    peaks, steps = [], options.get("gradient_accumulation_steps", 1)
    for is_trial in (False, True):
        made = trainer(per_device_train_batch_size=16, **options)
        made.train_dataset = LongText()
        with Ledger() as ledger:
            if not is_trial:
                made.train()
            else:
                with transformers_trial.Rehearsal(made) as rehearsal:
                    data = transformers_data.training_data(made, None, None)
                    make = rehearsal.batch_maker(data.longest(16), data.collate, lambda _: steps)
                    for _ in range(2):
                        rehearsal.train(make(16))
        peaks.append(ledger.peak_bytes)
    assert peaks[0] <= peaks[1] <= 1.002 * peaks[0]


@pytest.mark.parametrize(("effective", "at_most"), [(48, 20), (96, 128)])
def test_the_effective_batch_is_made_up_of_the_size_found(effective: int, at_most: int) -> None:
    search = {"effective_batch_size": effective, "max_batch_size": at_most}
    found = searched(search=search)
    args = found.args
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == effective
    assert args.per_device_train_batch_size <= found.autobatch_results["train"].batch_size <= at_most
    assert args.gradient_accumulation_steps > 1
    assert differences(outcome(found), outcome(by_hand(found))) == []


def test_an_effective_batch_that_divides_badly_is_warned_of_or_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    search: dict[str, Any] = {"effective_batch_size": 17, "max_batch_size": 4}
    with caplog.at_level(logging.WARNING, "linnaeus.autobatch"):
        found = searched(search=search)
    assert found.args.gradient_accumulation_steps == 17
    assert "17 accumulation steps are slow: effective_batch_size is 17" in caplog.text
    with pytest.raises(
        AutoBatchError, match=r"no divisor of 17 has at least 2 samples and at most 4, .* would do"
    ):
        searched(search={**search, "min_batch_size": 2})


def test_a_divisor_lies_within_the_bounds_or_is_asked_for_at_once() -> None:
    made = trainer()
    for search, wanted in [
        (
            {"min_batch_size": 20, "max_batch_size": 30},
            r"no divisor of 64 has at least 20 samples and at most 30, .*; 63 or 66 would",
        ),
        ({"multiple_of": 24}, "no divisor of 64 is a multiple of 24 .*; 48 or 72 would do"),
    ]:
        with pytest.raises(AutoBatchError, match=wanted):
            autobatch(made, effective_batch_size=64, **search)
    autobatch(made, effective_batch_size=66, min_batch_size=20, max_batch_size=30)


def test_the_size_of_an_effective_batch_is_a_multiple_of_what_was_asked_for() -> None:
    # 30 divides 120 too, and is no multiple of 8.
    search = {**room(600), "effective_batch_size": 120, "multiple_of": 8, "max_batch_size": 32}
    found = searched(search=search)
    assert found.autobatch_results["train"].batch_size == 32
    assert (found.args.per_device_train_batch_size, found.args.gradient_accumulation_steps) == (24, 5)


def test_an_effective_batch_is_no_larger_than_an_epoch() -> None:
    small: dict[str, Any] = {"min_batch_size": 4, "max_batch_size": 4}
    with pytest.raises(AutoBatchError, match="is 204, above what one epoch holds, 200 samples; lower it"):
        searched(search={"effective_batch_size": 204, **small})
    assert searched(search={"effective_batch_size": 200, **small}).args.gradient_accumulation_steps == 50


def test_evaluation_is_searched_where_it_takes_place_or_is_asked_for() -> None:
    small: dict[str, Any] = {"max_batch_size": 6}
    without = searched(search={**small, "evaluation": False}, eval_strategy="steps", eval_steps=3)
    assert [*without.autobatch_results] == ["train"]
    assert without.args.per_device_eval_batch_size == 8
    made = trainer(Recorder)
    made.eval_dataset = {"few": torch.utils.data.Subset(Text(), range(3)), "many": Text()}
    autobatch(made, **{**room(), **small, "evaluation": True}).train()
    result = made.autobatch_results["val"]
    assert made.args.per_device_eval_batch_size == result.batch_size == 6
    assert made.evaluate()["eval_many_loss"] > 0


def test_a_batch_has_no_more_samples_than_the_dataset() -> None:
    made = trainer()
    made.train_dataset = torch.utils.data.Subset(Text(), range(5))
    autobatch(made, **room()).train()
    assert made.args.per_device_train_batch_size == 5
    assert made.autobatch_results["train"].limited_by == "dataset"


def test_a_resumed_run_keeps_the_size_of_its_checkpoint(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4,
    }
    whole = searched(search={"max_batch_size": 9}, **options)
    checkpoint = str(tmp_path / "checkpoint-2")
    assert size_in_checkpoint(checkpoint) == 9
    ours = left_by(whole)
    resumed = trainer(Recorder, **options)
    autobatch(resumed, **room()).train(resume_from_checkpoint=checkpoint)
    result = resumed.autobatch_results["train"]
    assert [trial.size for trial in result.trials] == [9], "it is run once"
    assert result.batch_size == resumed.args.per_device_train_batch_size == 9
    again = left_by(resumed)
    by_hand = trainer(Recorder, per_device_train_batch_size=9, **options)
    by_hand.train(resume_from_checkpoint=checkpoint)
    assert differences(again, left_by(by_hand)) == []
    assert not {"weights", "schedule"} & {*differences(ours, again)}
    assert size_in_checkpoint(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("search", "reason"),
    [
        (lambda: {**room(60), "min_batch_size": 4, "objective": "throughput"}, "that no longer fits"),
        (lambda: {**room(), "max_batch_size": 7}, "limited by max_batch_size"),
        (lambda: {**room(), "effective_batch_size": 6}, "limited by effective_batch"),
    ],
    ids=["memory", "max_batch_size", "effective_batch"],
)
def test_a_resumed_run_whose_size_no_longer_fits_goes_on_with_a_smaller_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, search: Callable[[], dict[str, Any]], reason: str
) -> None:
    options = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer(Recorder, per_device_train_batch_size=96, **options).train()
    resumed = trainer(Recorder, **options)
    with caplog.at_level(logging.WARNING, "linnaeus.autobatch"):
        autobatch(resumed, **search()).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    size = resumed.args.per_device_train_batch_size
    assert 1 <= size < 96
    assert resumed.shapes[0][0] == size
    assert f"the run that is resumed had batch size 96; going on with {size}: {reason}" in caplog.text


class Rows(Text):
    """Text that says which samples are read."""

    def __init__(self) -> None:
        self.read: set[int] = set()

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.add(index)
        return super().__getitem__(index)


def test_stored_lengths_are_used() -> None:
    rows = Rows()
    lengths = [len(Text()[index]["input_ids"]) for index in range(len(rows))]
    made = trainer()
    made.train_dataset = rows
    data = transformers_data.training_data(made, lengths, None)
    assert [len(sample["input_ids"]) for sample in data.longest(3)] == sorted(lengths)[:-4:-1]
    assert len(rows.read) == 3
    table = datasets.Dataset.from_dict(
        {"input_ids": [Text()[index]["input_ids"] for index in range(20)], "length": list(range(20)),
         "tokens": list(range(20, 0, -1))}
    )  # fmt: skip
    made.train_dataset = table
    column = transformers_data.training_data(made, None, None).longest(2)
    assert column == [{"input_ids": Text()[index]["input_ids"]} for index in (19, 18)]
    assert (
        transformers_data.training_data(made, "tokens", None).longest(1)[0]["input_ids"]
        == table[0]["input_ids"]
    )
    by_function = transformers_data.training_data(made, lambda row: -row["length"], None)
    assert by_function.longest(1)[0]["input_ids"] == table[0]["input_ids"]
    with pytest.raises(
        ValueError, match="length is 'words'; the dataset's columns are 'input_ids', 'length'"
    ):
        transformers_data.training_data(made, "words", None).longest(1)


def test_lengths_that_the_sampler_has_read_are_not_read_again() -> None:
    rows = Rows()
    lengths = [len(Text()[index]["input_ids"]) for index in range(len(rows))]
    made = trainer(train_sampling_strategy="group_by_length")
    made.train_dataset = rows
    data = transformers_data.training_data(made, None, None)
    assert rows.read >= {*range(len(rows))}, "the sampler reads them all"
    rows.read.clear()
    assert [len(sample["input_ids"]) for sample in data.longest(3)] == sorted(lengths)[:-4:-1]
    assert len(rows.read) == 3


def test_an_image_counts_as_one_size_and_is_not_looked_for() -> None:
    class Images(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            self.read.add(index)
            return {"pixel_values": torch.full((3, 16, 16), float(index)), "labels": index % 3}

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=16,
        patch_size=8, num_labels=3,
    )  # fmt: skip
    images = Images()
    made = Trainer(ViTForImageClassification(config), hugging.arguments(), train_dataset=images)
    samples = transformers_data.training_data(made, None, None).longest(3)
    assert [float(sample["pixel_values"][0, 0, 0]) for sample in samples] == [0, 1, 2]
    assert images.read == {0, 1, 2}
    autobatch(made, **{**room(), "max_batch_size": 16}).train()
    assert made.args.per_device_train_batch_size == 16


def test_for_an_encoder_and_a_decoder_the_longest_target_joins() -> None:
    class Pairs(Text):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {**super().__getitem__(index), "labels": [index] * (90 if index == 7 else 5)}

    made = trainer()
    made.train_dataset = Pairs()
    made.model.config.is_encoder_decoder = True
    samples = transformers_data.training_data(made, None, None).longest(3)
    assert len(samples[0]["labels"]) == 90
    assert [len(sample["input_ids"]) for sample in samples[1:]] == [128, 128]


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (Text()[index] for index in range(len(Text())))


def test_a_stream_needs_samples_and_trains_as_by_hand() -> None:
    made = trainer()
    made.train_dataset = Stream()
    with pytest.raises(AutoBatchError, match=r"train_dataset is a Stream.*autobatch\(trainer, samples="):
        autobatch(made, **room()).train()
    made = trainer()
    made.train_dataset = Stream()
    autobatch(made, **room(), samples=[Text()[112], Text()[0]]).train()
    ours = outcome(made)
    other = trainer(per_device_train_batch_size=made.args.per_device_train_batch_size)
    other.train_dataset = Stream()
    other.train()
    assert made.args.per_device_train_batch_size > 8
    assert differences(ours, outcome(other)) == []


def test_a_search_that_fails_leaves_the_trainer_as_it_was() -> None:
    made = trainer(Recorder)
    autobatch(made, **{**room(), "memory_limit_gb": 0.2})
    with pytest.raises(AutoBatchError, match="no batch size fits"):
        made.train()
    assert made.args.per_device_train_batch_size == 8
    assert made.optimizer is None
    del made._inner_training_loop
    made.train()
    ours = left_by(made)
    other = trainer(Recorder)
    other.train()
    assert differences(ours, left_by(other)) == []


def test_an_error_of_the_step_is_raised_as_it_is() -> None:
    class Broken(Trainer):
        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            raise KeyError("labels of another kind")

    with pytest.raises(KeyError, match="labels of another kind"):
        autobatch(trainer(Broken), **room()).train()


class FixedLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=4, collate_fn=collate)


def set_to(name: str, value: Any) -> Callable[[Any], None]:
    return lambda made: setattr(made.args if hasattr(made.args, name) else made, name, value)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (set_to("auto_find_batch_size", True), "auto_find_batch_size is True"),
        (set_to("is_deepspeed_enabled", True), "with DeepSpeed"),
        (set_to("is_fsdp_enabled", True), "with FSDP"),
        (set_to("is_model_parallel", True), "on several devices"),
        (set_to("_n_gpu", 2), "DataParallel on several GPUs in one process; start it with torchrun"),
        (set_to("optim", "galore_adamw_layerwise"), "optim='galore_adamw_layerwise'"),
        (set_to("train_sampling_strategy", "batch_rebalance"), "train_sampling_strategy='batch_rebalance'"),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(change: Callable[[Any], None], error: str) -> None:
    made = trainer()
    change(made)
    with pytest.raises((AutoBatchError, ValueError)) as caught:
        autobatch(made)
    assert error in str(caught.value)


def test_arguments_are_checked_at_once() -> None:
    made = trainer()
    with pytest.raises(TypeError, match="trainer is a list; it must be a transformers"):
        autobatch([])
    with pytest.raises(TypeError, match="has no argument 'max_size'; it takes "):
        autobatch(made, max_size=3)
    with pytest.raises(TypeError, match=r"autobatch\(\) takes no 'make_batch': the integration sets it"):
        autobatch(made, make_batch=3)
    with pytest.raises(TypeError, match="eval_options has no argument 'length'; it takes max_batch_size, "):
        autobatch(made, eval_options={"length": "tokens"})
    with pytest.raises(ValueError, match=r"eval_options\['max_batch_size'\] is 0; it must be at least 1"):
        autobatch(made, eval_options={"max_batch_size": 0})
    with pytest.raises(ValueError, match="effective_batch_size is 0; it must be at least 1"):
        autobatch(made, effective_batch_size=0)
    with pytest.raises(AutoBatchError, match="of FixedLoader makes batches of 4"):
        autobatch(trainer(FixedLoader), **room()).train()
    made.args.predict_with_generate = True
    with pytest.raises(AutoBatchError, match="predict_with_generate"):
        autobatch(made, **{**room(), "max_batch_size": 1}, evaluation=True).train()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"samples": []}, "^samples is empty; it must hold at least one sample"),
        ({"samples": 3}, "^samples is an int; it must be a list of samples"),
        ({"samples": {"input_ids": [1]}}, "^samples is a dict; it must be a list of samples"),
        ({"eval_samples": []}, "^eval_samples is empty"),
        ({"eval_options": 3}, "^eval_options is an int; it must be a dictionary"),
        ({"evaluation": "x"}, "^evaluation is 'x'; it must be True, False or None"),
        ({"evaluation": 1}, "^evaluation is 1; it must be True, False or None"),
    ],
)
def test_a_wrong_argument_is_named_at_once(wrong: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        autobatch(trainer(), **wrong)


def test_a_class_and_evaluation_of_nothing_are_refused() -> None:
    with pytest.raises(TypeError, match="trainer is the class Trainer; it must be an object of it"):
        autobatch(Trainer)
    made = trainer()
    made.eval_dataset = None
    with pytest.raises(ValueError, match="evaluation is True, but the trainer has no eval_dataset"):
        autobatch(made, evaluation=True)


def test_samples_of_which_no_batch_can_be_made_are_named() -> None:
    good = {"input_ids": [5, 6, 7]}
    with pytest.raises(AutoBatchError, match=r"no batch can be made of samples\[1\]: KeyError: 'input_ids'"):
        autobatch(trainer(), **room(), samples=[good, {"foo": 1}]).train()
    small = {**room(), "max_batch_size": 2}
    with pytest.raises(AutoBatchError, match=r"no batch can be made of eval_samples\[0\]: KeyError"):
        autobatch(trainer(), **small, evaluation=True, eval_samples=[{"foo": 1}]).train()
    made = trainer()
    made.data_collator = default_data_collator
    with pytest.raises(AutoBatchError, match=r"samples\[0\]: it has nothing that the model takes"):
        autobatch(made, **room(), samples=[{"foo": 1}]).train()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `hugging_ranks.trainers` gives on each of two ranks."""
    return compute("tests.integrations.hugging_ranks", 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", ["plain", "mixed"])
def test_two_ranks_agree_on_the_smaller_size_and_train_as_by_hand(
    ranks: list[dict[str, Any]], case: str
) -> None:
    results = [rank[case] for rank in ranks]
    assert [result["differences"] for result in results] == [[], []]
    assert results[0]["size"] == results[1]["size"] >= 2
    assert results[0]["weights"] == results[1]["weights"]
    for result in results:
        assert {size for size, _ in result["shapes"]} == {result["size"]}
        assert result["limited_by"] == ("memory" if case == "plain" else "max_batch_size")
        assert result["ran"][-1] == result["size"]


def test_on_two_ranks_an_error_of_one_ends_both_with_its_cause(ranks: list[dict[str, Any]]) -> None:
    own, told = ranks[1]["broken"], ranks[0]["broken"]
    assert own == "ValueError: rank 1 is broken"
    assert told == "AutoBatchError: AutoBatch: rank 1: ValueError: rank 1 is broken"


def test_on_two_ranks_an_error_while_one_prepares_ends_both_with_its_cause(
    ranks: list[dict[str, Any]],
) -> None:
    own, told = ranks[1]["broken data"], ranks[0]["broken data"]
    assert own == "FileNotFoundError: rank 1 has no data"
    assert told == "AutoBatchError: AutoBatch: rank 1: FileNotFoundError: rank 1 has no data"


def test_on_two_ranks_the_checkpoint_that_rank_0_sees_counts(ranks: list[dict[str, Any]]) -> None:
    # Tried by rank 0, then by every rank, and used.
    assert [rank["resumed"] for rank in ranks] == [[5, 5, 5], [5, 5, 5]]


def test_on_two_ranks_a_collective_of_ones_own_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert "the step runs a collective, allreduce" in ranks[0]["collective"]
    assert "AutoBatch: rank 0: the step runs a collective, allreduce" in ranks[1]["collective"]


# --- the page and the example ---


def test_the_example_trains_at_the_size_that_it_finds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(ROOT / "examples" / "transformers_tiny.py"))["main"]
    limit_gb = str(limit_with_room_for(60) / 0.8)
    found = main(["--steps", "2", "--memory-limit-gb", limit_gb])
    size = found.args.per_device_train_batch_size
    assert f"train: batch size {size} (limited by memory)" in capsys.readouterr().out
    ours = outcome(found)
    other = main(["--steps", "2", "--batch-size", str(size)])
    assert differences(ours, outcome(other)) == []


def test_the_page_names_each_argument_and_each_refused_trainer() -> None:
    page = (ROOT / "docs" / "transformers.md").read_text()
    own = {*inspect.signature(autobatch).parameters} - {"trainer", "options"}
    names = own | search_options() | SET_BY_TRAINER
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
    assert [name for name in ("KTOTrainer", "GRPOTrainer", "RLOOTrainer") if f"`{name}`" not in page] == []
