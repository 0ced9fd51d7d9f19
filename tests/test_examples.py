import json
import runpy
from pathlib import Path

import pytest
import torch

from tests.helpers.ledger import limit_with_room_for
from tests.helpers.runs import assert_same_bits

EXAMPLES = Path(__file__).parents[1] / "examples"


def loaded(name):
    """The functions and classes of an example."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.mark.e2e
def test_the_search_leaves_no_trace_in_the_training_that_follows():
    run = loaded("gpt")["run"]
    run("cpu", 1, 1, None)  # everything is imported when the limit is taken
    searched = run("cpu", 5, None, limit_with_room_for(32) / 0.8)
    assert searched.batch_size > 1
    plain = run("cpu", 5, searched.batch_size, None)
    assert plain.losses == searched.losses
    assert plain.losses[-1] < plain.losses[0]
    assert_same_bits(plain.model.state_dict(), searched.model.state_dict())


LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
}


@pytest.mark.integrations
def test_the_memory_of_a_language_model(tmp_path, capsys):
    """What saves memory leaves room for more samples."""
    pytest.importorskip("peft")
    main = loaded("llm_memory")["main"]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    remedies = ["--lora"], ["--checkpointing"], ["--sequence", "128"]
    plain, *better = (
        main([str(config), "--sequence", "256", "--gib", "2", *words]) for words in ([], *remedies)
    )
    assert 0 < plain < min(better)
    assert f"batch size {plain}," in capsys.readouterr().out
    assert main([str(config), "--gib", "0.1"]) is None


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["token", "graph", "image"])
def test_batches_within_a_budget_train_a_model(name):
    run = loaded(f"{name}_budget")["run"]
    losses = run(4 if name == "token" else 12, limit_with_room_for(128) / 0.8)
    assert losses[-1] < losses[0]


def test_a_token_counts_alike_in_whatever_batch_it_is():
    """One step with all texts is that of these texts in micro-batches of unequal size."""
    example = loaded("token_budget")
    texts = [torch.arange(1, length) for length in (90, 7, 5, 60)]
    weights = []
    for parts in ([texts], [texts[:1], texts[1:]]):
        torch.manual_seed(0)
        model = example["GPT"]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        example["train_step"](model, optimizer, [example["collate"](part) for part in parts])
        weights.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    torch.testing.assert_close(*weights)
