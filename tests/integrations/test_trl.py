"""`autobatch` for the trainers of TRL."""

from functools import partial

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl")

import trl
from transformers import Trainer

from linnaeus.integrations.transformers import autobatch, check_supported
from linnaeus.integrations.transformers.data import trial_data
from linnaeus.runtime.errors import AutoBatchError
from tests.helpers.ledger import room
from tests.integrations.hugging import compared, trainer, trl_trainer

pytestmark = pytest.mark.filterwarnings(
    "default::FutureWarning", "default::DeprecationWarning", "default::UserWarning"
)

CASES = {
    "SFT": {
        "bf16": True,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
    },
    "SFT, packed": {"packing": True, "packing_strategy": "wrapped", "max_length": 64},
    "DPO": {},
    "Reward": {},
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_the_size_given_by_hand(case):
    name, options = case.partition(",")[0], CASES[case]
    make, search = partial(trl_trainer, name), room(150, max_batch_size=16)
    found, differing = compared(make, search, **options)
    size, result = found.args.per_device_train_batch_size, found.autobatch_results["train"]
    assert size == result.batch_size >= 2
    assert ("val" in found.autobatch_results) == ("eval_strategy" in options)
    assert differing == []
    assert found.state.log_history[0]["num_tokens"] > 0, "counts of the trials would be in it"


def test_batches_of_a_budget_of_tokens_need_input_ids():
    made = autobatch(trl_trainer("SFT"), budget="tokens", max_batch_size=500)
    made.train()
    sizes = [batch["input_ids"].numel() for batch in made.get_train_dataloader()]
    assert made.args.per_device_train_batch_size == 500
    assert max(sizes) <= 500
    with pytest.raises(AutoBatchError, match="input_ids"):
        autobatch(trl_trainer("Reward"), budget="tokens").train()


@pytest.mark.parametrize("name", ["SFT", "DPO", "Reward"])
def test_the_worst_batch_is_that_of_the_longest_texts(name):
    look, _ = trial_data(trl_trainer(name), "train", None, 1.0)
    batch = look.batch(2)
    assert batch["input_ids"].shape[-1] == 128
    own = batch["attention_mask"].sum(-1)[:2].tolist()
    assert own == sorted(own, reverse=True)
    assert own[0] == 128


def test_trainers_whose_size_cannot_be_found_are_refused_by_name():
    """Building one would need generation and more. Subclasses of those that can be searched can be, too."""
    made = trainer(type("Own", (Trainer,), {}))
    made.__class__ = type("Own", (trl.SFTTrainer,), {})
    check_supported(made)
    names = ("KTOTrainer", "GRPOTrainer", "RLOOTrainer", "DistillationTrainer")
    known = [getattr(trl, name) for name in names if hasattr(trl, name)]
    for kind in (*known, type("New", (Trainer,), {"__module__": "trl.experimental.new"})):
        made.__class__ = type("Own", (kind,), {})
        with pytest.raises(AutoBatchError, match=kind.__name__):
            autobatch(made)
