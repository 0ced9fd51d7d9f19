"""Small trainers of transformers and TRL that need no download, and what a run of them leaves behind."""

import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

pytest.importorskip("transformers")

from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from linnaeus.autobatch.state.rng import rng_state
from linnaeus.integrations.transformers import autobatch
from linnaeus.runtime.rng import seed_all
from tests.helpers.bits import bits, differences

NUM_SAMPLES, LONGEST, VOCABULARY = 200, 128, 128
SIZES = {"n_positions": LONGEST, "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
TIMED = ("runtime", "per_second", "_time")
"""Parts of the names in a log that say how long something took."""

for name in ("transformers", "trl", "datasets", "accelerate"):
    logging.getLogger(name).setLevel(logging.ERROR)


def tokens(index):
    """16 to 128 tokens; the longest are few."""
    return [3 + (index + place) % 97 for place in range(16 + index * 37 % (LONGEST - 15))]


def text(row):
    """The words of these tokens."""
    return "".join(f" w{token}" for token in row)


class Text(Dataset[dict[str, Any]]):
    """Sequences of 16 to 128 tokens."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        if index >= NUM_SAMPLES:
            raise IndexError(index)
        return {"input_ids": tokens(index)}


def collate(samples):
    """Pads to the longest."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids, labels = (torch.full((len(samples), longest), fill) for fill in (2, -100))
    for row, sample in enumerate(samples):
        ids[row, : len(sample["input_ids"])] = labels[row, : len(sample["input_ids"])] = (
            torch.tensor(sample["input_ids"])
        )
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


def model(kind=GPT2LMHeadModel, **config):
    torch.manual_seed(0)
    return kind(GPT2Config(**{**SIZES, **TOKENS, **config}))


def tokenizer():
    """A tokenizer of words: `w7` is token 7."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<bos>": 0, "<eos>": 1, "<pad>": 2, **{f"w{n}": n for n in range(3, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
    )


def arguments(kind=TrainingArguments, **options):
    """Three steps on the CPU that write nothing but what they are asked for."""
    own = {
        "output_dir": "unused",
        "per_device_train_batch_size": 8,
        "use_cpu": True,
        "report_to": [],
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 1,
        "learning_rate": 1e-3,
    }
    return kind(**{**own, **options})


def trainer(kind=Trainer, callbacks=None, **options):
    """A trainer of a small GPT-2 on `Text`."""
    seed_all(0)
    data = {"train_dataset": Text(), "eval_dataset": Text(), "data_collator": collate}
    return kind(model(), arguments(**options), callbacks=callbacks, **data)


def trl_trainer(name, **options):
    """A trainer of TRL on tokenized data of its own form."""
    import datasets
    import trl

    seed_all(0)
    rows = [tokens(index) for index in range(NUM_SAMPLES)]
    others = [row[: len(row) // 2 + 4] for row in rows]
    data = {
        "SFT": {"input_ids": rows},
        "DPO": {
            "prompt": [text(row[:8]) for row in rows],
            "chosen": [text(row[8:]) for row in rows],
            "rejected": [text(row) for row in others],
        },
        "Reward": {"chosen_ids": rows, "rejected_ids": others},
    }[name]
    kind, own = getattr(trl, f"{name}Trainer"), {"max_length": LONGEST, "bf16": False}
    pretrained = model(GPT2ForSequenceClassification, num_labels=1) if name == "Reward" else model()
    reference = {"ref_model": model()} if name == "DPO" else {}
    return kind(
        pretrained,
        args=arguments(getattr(trl, f"{name}Config"), **{**own, **options}),
        train_dataset=datasets.Dataset.from_dict(data),
        processing_class=tokenizer(),
        **reference,
        eval_dataset=datasets.Dataset.from_dict(data) if "eval_strategy" in options else None,
    )


class Calls(TrainerCallback):
    """Every call of a callback, with step, sizes and random numbers."""

    def __init__(self):
        self.seen = []


def _watch(name):
    def called(self, args, state, control, **rest):
        sizes = (
            args.per_device_train_batch_size,
            args.per_device_eval_batch_size,
            state.train_batch_size,
        )
        numbers = bits(rng_state(torch.device("cpu")))
        self.seen.append((name, state.global_step, state.max_steps, sizes, numbers))

    return called


for _name in vars(TrainerCallback):
    if _name.startswith("on_") and _name != "on_init_end":
        setattr(Calls, _name, _watch(_name))


def outcome(trained, calls=None):
    """All that a run leaves: weights, optimizer, schedule, logs, counts, random numbers and calls."""
    own, state = vars(trained), trained.state
    return {
        "weights": [value.clone() for value in trained.model.state_dict().values()],
        "optimizer": trained.optimizer.state_dict(),
        "schedule": {
            key: value for key, value in trained.lr_scheduler.state_dict().items() if key[0] != "_"
        },
        "log": [
            {key: value for key, value in entry.items() if not any(part in key for part in TIMED)}
            for entry in state.log_history
        ],
        "state": [
            state.global_step,
            state.max_steps,
            state.train_batch_size,
            state.epoch,
            state.total_flos,
        ],
        "random": [random.random(), float(np.random.rand()), torch.rand(3)],
        "calls": [] if calls is None else calls.seen,
        "mode": trained.model.training,
        "attributes": sorted(set(own) - {"autobatch_results", "_inner_training_loop"}),
        "model attributes": sorted(vars(trained.model)),
        "own": [own.get(name) for name in ("shapes", "total")],  # of a `Recorder`
    }


class Recorder(Trainer):
    """A trainer of one's own that logs, remembers the shape of each training batch, and draws numbers."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.shapes = []
        self.total = torch.zeros(())

    def create_optimizer(self, *arguments):
        torch.rand(())
        return super().create_optimizer(*arguments)

    def compute_loss(self, model, inputs, *arguments, **options):
        self.log({"number": len(self.shapes)})
        self.shapes += [tuple(inputs["input_ids"].shape)] if model.training else []
        self.total += torch.rand(())
        return super().compute_loss(model, inputs, *arguments, **options)


FOUND = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
)


def compared(make, search, **options):
    """A trainer that has searched and trained, and what differs with its sizes by hand."""

    def train(made):
        calls = Calls()
        made.add_callback(calls)
        made.train()
        return outcome(made, calls)

    found = autobatch(make(**options), **search)
    ours = train(found)
    sizes = {name: getattr(found.args, name) for name in FOUND}
    return found, differences(ours, train(make(**{**options, **sizes})))
