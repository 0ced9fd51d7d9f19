"""The memory of fine-tuning language models, from configurations alone."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

from transformers import GPT2Config, LlamaConfig, T5Config, ViTConfig

from linnaeus.autobatch.predict.gpus import GIB
from linnaeus.integrations.language import LanguagePrediction, predict_language_model
from tests.helpers.predictions import content_of
from tests.helpers.runs import Run

pytestmark = pytest.mark.filterwarnings("ignore")
SEQUENCE, VOCABULARY, BASE = 64, 1024, 600 << 20
LLAMA: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
}
CONFIGS = {
    "llama": LlamaConfig(**LLAMA),
    # Its positions are as many bytes as the logits of the traced batches.
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=8192, vocab_size=VOCABULARY),
    "t5": T5Config(
        d_model=64,
        d_ff=128,
        d_kv=16,
        num_heads=4,
        num_layers=2,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
    ),
}


@functools.cache
def predicted(name: str = "llama", **options: Any) -> LanguagePrediction:
    return predict_language_model(CONFIGS[name], sequence=SEQUENCE, base_bytes=BASE, **options)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_parts_are_those_of_the_peak(name: str, method: str) -> None:
    found = predicted(name, method=method)
    assert (found.num_trained < found.num_parameters / 2) == (method == "lora")
    width = 2 if method == "lora" else 4
    for n in (1, 8, 4096):
        parts = found.parts(n)
        assert sum(parts.values()) == found.prediction.peak_bytes(n)
        assert min(parts.values()) >= 0
        assert parts["parameters"] == pytest.approx(width * found.num_parameters, rel=0.1)
        assert parts["optimizer_state"] == pytest.approx(8 * found.num_trained, rel=0.01)
        assert parts["rest"] >= BASE
    assert parts["activations"] > 500 * found.parts(8)["activations"]
    # Copies in float32 of the logits, of their softmax and of its gradient.
    assert parts["logits"] >= 8 * 4096 * SEQUENCE * VOCABULARY


def test_gradients_are_there_when_they_are_at_the_peak() -> None:
    found = predicted("llama", checkpointing=True)
    early, late = (found.parts(n)["gradients"] for n in (4096, 1))
    # In some versions the peak comes before the last gradient, that of the embedding.
    assert 0.75 < late / (4 * found.num_trained) < 1.01
    assert early < 100, "there is the loss alone"


def test_what_saves_memory() -> None:
    n = 512
    plain = predicted().prediction.peak_bytes(n)
    short = predict_language_model(CONFIGS["llama"], sequence=SEQUENCE // 2, base_bytes=BASE)
    for other in (
        predicted(checkpointing=True),
        predicted(method="lora"),
        predicted(dtype="bfloat16"),
        short,
    ):
        assert other.prediction.peak_bytes(n) < plain
        assert (other.prediction.largest(GIB) or 0) >= (predicted().prediction.largest(GIB) or 0)
    few, many = (predicted(method="lora", lora_rank=rank).num_trained for rank in (4, 16))
    assert many == 4 * few


def folder_with(path: Path, config: dict[str, Any]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return str(path)


def test_a_configuration_is_found_by_its_folder_or_file(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "tiny", LLAMA)
    for given in (folder, Path(folder, "config.json")):
        same = predict_language_model(given, sequence=SEQUENCE, base_bytes=BASE)
        assert same.prediction.peak_bytes(3) == predicted().prediction.peak_bytes(3)


def test_wrong_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = CONFIGS["llama"]
    with pytest.raises(ValueError, match=r"'qlora'.*'lora'"):
        predict_language_model(llama, method="qlora")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'no/such'.*config\.json"):
        predict_language_model("no/such")
    with pytest.raises(ValueError, match=r"8193.*8192 positions"):
        predict_language_model(llama, sequence=8193)
    quantised = {
        "bnb_4bit_compute_dtype": "bfloat16",
        "load_in_4bit": True,
        "quant_method": "bitsandbytes",
    }
    with pytest.raises(ValueError, match="quantization_config"):
        predict_language_model(LlamaConfig(**LLAMA, quantization_config=quantised))
    with pytest.raises(TypeError, match="config is a dict"):
        predict_language_model(LLAMA)
    with pytest.raises(ValueError, match="'vit'"):
        predict_language_model(ViTConfig())
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match="pip install peft"):
        predict_language_model(llama, method="lora")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install transformers"):
        predict_language_model(llama)


def test_the_command(run: Run, tmp_path: Path) -> None:
    argv = (
        "analyze",
        "--hf",
        folder_with(tmp_path / "tiny", LLAMA),
        "--sequence",
        "64",
        "--fractions",
        "0.9",
    )
    outcome = run(*argv, "--device-memory-gb", "1,2")
    small, large = content_of(outcome)["results"]
    assert 0 < small["safe_batch_size"] < small["batch_size"] < large["batch_size"]
    assert outcome.out.count("tiny") == 1
    assert "DATA:" not in outcome.out, "there is no configuration to paste into"
    for row in (small, large):
        assert sum(row["breakdown"].values()) == row["peak_bytes"]
        assert [remedy["keys"] for remedy in row["remedies"]] == [
            {"--checkpointing": True},
            {"--sequence": 32},
            {"--dtype": "bfloat16"},
            {"--method": "lora"},
        ]
        saved = [remedy["saved_bytes"] for remedy in row["remedies"]]
        assert saved[2] >= 0, (
            "bfloat16 saves nothing where the step of torch 2.11 computes in float32"
        )
        assert min(saved[:2] + saved[3:]) > 0
        assert all(
            remedy["safe_batch_size"] >= row["safe_batch_size"] for remedy in row["remedies"]
        )


def test_the_command_where_nothing_fits(run: Run, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "tiny", {**LLAMA, "num_hidden_layers": 4})
    argv = (
        "--method",
        "lora",
        "--sequence",
        "8192",
        "--checkpointing",
        "--device-memory-gb",
        "0.5,0.51",
    )
    outcome = run("analyze", "--hf", folder, *argv, "--fractions", "1")
    assert outcome.code == 3
    assert "Traceback" not in outcome.err
    assert "would do" in outcome.err
    for row in json.loads(Path("batch_sizes.json").read_text())["results"]:
        assert row["batch_size"] is None
        assert sum(row["breakdown"].values()) > row["budget_bytes"]
        assert [(each["keys"], each["batch_size"]) for each in row["remedies"]] == [
            ({"--sequence": 4096}, 1)
        ]


def test_the_command_refuses(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path / "tiny", {**LLAMA, "num_attention_heads": 3})
    for model in (folder, "no/such"):
        outcome = run("analyze", "--hf", model, "--gpu", "t4")
        assert (outcome.code, "--hf" in outcome.err, "Traceback" in outcome.err) == (2, True, False)
    monkeypatch.setitem(sys.modules, "peft", None)
    outcome = run("analyze", "--hf", "llama", "--method", "lora", "--gpu", "t4")
    assert (outcome.code, "pip install peft" in outcome.err) == (2, True)
