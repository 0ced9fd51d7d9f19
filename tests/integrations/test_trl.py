"""`autobatch` for the trainers of TRL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("trl")

import trl
from transformers import Trainer

from linnaeus.errors import AutoBatchError
from linnaeus.integrations import transformers_trial
from linnaeus.integrations.transformers import autobatch, check_supported
from linnaeus.integrations.transformers_data import training_data
from tests.helpers.ledger import limit_with_room_for
from tests.helpers.processes import compute
from tests.integrations.hugging import Calls, differences, outcome, trainer, trl_trainer

pytestmark = [
    pytest.mark.filterwarnings("default::FutureWarning", "default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::UserWarning"),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def room(extra_mib: float = 150, **options: Any) -> dict[str, Any]:
    """Arguments that leave so much above what the process holds."""
    limit_gb = limit_with_room_for(extra_mib)
    return {"target_memory_fraction": 1.0, "memory_limit_gb": limit_gb, "max_batch_size": 64, **options}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT": ("SFT", {}),
    "SFT, bf16, accumulation": ("SFT", {"bf16": True, "gradient_accumulation_steps": 2}),
    "SFT, evaluation": ("SFT", {"eval_strategy": "steps", "eval_steps": 2}),
    "SFT, packed": ("SFT", {"packing": True, "packing_strategy": "wrapped", "max_length": 64}),
    "DPO": ("DPO", {}),
    "Reward": ("Reward", {}),
}


@pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)
def test_training_is_that_of_the_size_given_by_hand(name: str, options: dict[str, Any]) -> None:
    calls, other_calls = Calls(), Calls()
    found = trl_trainer(name, **options)
    found.add_callback(calls)
    autobatch(found, **room(max_batch_size=16)).train()
    size, result = found.args.per_device_train_batch_size, found.autobatch_results["train"]
    assert result.batch_size == size
    assert result.limited_by in ("memory", "max_batch_size")
    assert size >= 2
    assert ("val" in found.autobatch_results) == ("eval_strategy" in options)
    ours = outcome(found, calls)
    sizes = {"per_device_train_batch_size": size}
    sizes["per_device_eval_batch_size"] = found.args.per_device_eval_batch_size
    other = trl_trainer(name, **{**options, **sizes})
    other.add_callback(other_calls)
    other.train()
    assert differences(ours, outcome(other, other_calls)) == []
    assert ours["log"][0]["num_tokens"] > 0, "counts of the trials would be in it"


def test_metrics_of_trials_that_stay_are_noticed() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_trial._Kept, "restore", lambda self: None)
        found = trl_trainer("SFT")
        autobatch(found, **room(max_batch_size=4, min_batch_size=4)).train()
    ours = outcome(found)
    other = trl_trainer("SFT", per_device_train_batch_size=4)
    other.train()
    assert "log" in differences(ours, outcome(other))


@pytest.mark.parametrize(
    ("name", "longest"), [("SFT", [128, 127]), ("DPO", [128, 127]), ("Reward", [128, 127])]
)
def test_the_worst_batch_is_that_of_the_longest_texts(name: str, longest: list[int]) -> None:
    made = trl_trainer(name)
    data = training_data(made, None, None)
    batch = data.collate(data.longest(2))
    assert batch["input_ids"].shape[-1] == longest[0]
    own = batch["attention_mask"].sum(-1)[:2].tolist()
    assert sorted(own, reverse=True) == own
    assert own[0] == 128


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("KTOTrainer", "it pairs the samples of its dataset for one batch size when it is built"),
        ("GRPOTrainer", "its steps generate completions"),
        ("RLOOTrainer", "its steps generate completions"),
        ("DistillationTrainer", "its steps generate completions"),
    ],
)
def test_trainers_whose_size_cannot_be_found_are_refused_by_name(name: str, reason: str) -> None:
    kind = getattr(trl, name)
    made = trainer(type("Own", (Trainer,), {}))
    made.__class__ = type("Own", (kind,), {})  # building one would need generation and more
    with pytest.raises(AutoBatchError, match=f"cannot search the batch size of {name}: {reason}"):
        autobatch(made)


def test_other_trainers_of_trl_are_refused_and_own_subclasses_are_not() -> None:
    made = trainer(type("Own", (Trainer,), {}))
    made.__class__ = type("NewTrainer", (Trainer,), {"__module__": "trl.experimental.new"})
    with pytest.raises(
        AutoBatchError, match="NewTrainer: only TRL's SFTTrainer, DPOTrainer and RewardTrainer are"
    ):
        autobatch(made)
    made.__class__ = type("Own", (trl.SFTTrainer,), {})
    check_supported(made)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `trl_ranks.work` gives on each of two ranks."""
    return compute("tests.integrations.trl_ranks", 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", ["SFT", "DPO", "Reward"])
def test_two_ranks_agree_and_train_as_by_hand(ranks: list[dict[str, Any]], name: str) -> None:
    results = [rank[name] for rank in ranks]
    assert [result["differences"] for result in results] == [[], []]
    assert results[0]["size"] == results[1]["size"] >= 2
    assert results[0]["weights"] == results[1]["weights"]
    assert [result["ran"][-1] for result in results] == [results[0]["size"]] * 2
