"""Low-rank adapters: what trains, what is written, and what a run needs for it."""

import shutil
import sys

import pytest
import torch

from linnaeus.inference.trained import load_run
from linnaeus.models.weights import read_weights
from tests.helpers.runs import SMALL, assert_same_bits, weights

pytest.importorskip("peft")
OPTIONS = (*SMALL, "MODEL.NAME=test_vit", "MODEL.LORA.RANK=4", "MODEL.LORA.ALPHA=8")


def test_adapters_train_resume_and_are_merged(run, tmp_path):
    options = (
        *OPTIONS,
        "MODEL.LORA.DROPOUT=0.1",
        "TRAIN.EMA.ENABLED=True",
        "TRAIN.GRADIENT_CHECKPOINTING=True",
        "OPTIMIZER.LAYER_DECAY=0.7",
        "TRAIN.CHECKPOINT_EVERY_STEPS=1",
        "TRAIN.KEEP_CHECKPOINTS=99",
        "TRAIN.AUTO_RESUME=True",
        "TRAIN.EPOCHS=1",
        "DATA.DATASET.NUM_SAMPLES=48",
    )
    outcome = run(*options, "EXPERIMENT.NAME=whole")
    assert outcome.code == 0, outcome.err
    whole, resumed = tmp_path / "runs/whole", tmp_path / "runs/resumed"
    first, last = weights(whole, "step_00000001.pt"), weights(whole)
    changed = {name for name in last if not torch.equal(first[name], last[name])}
    assert changed == {name for name in last if ".lora_" in name or name.startswith("heads.")}
    adapted = {name.split(".")[-4] for name in changed if "lora" in name}
    assert adapted == {"qkv", "proj"}
    (resumed / "checkpoints").mkdir(parents=True)
    shutil.copy(whole / "checkpoints/step_00000002.pt", resumed / "checkpoints/last.pt")
    assert run(*options, "EXPERIMENT.NAME=resumed").code == 0
    assert_same_bits(last, weights(resumed))
    trained = load_run(whole, checkpoint="last", device="cpu")
    file = trained.export("safetensors", tmp_path / "merged.safetensors").path
    merged = load_run(file, device="cpu")
    assert not any("lora" in name or "base_layer" in name for name in merged.model.state_dict())
    images = torch.randn(8, 3, 32, 32)
    with torch.no_grad():
        for found, expected in zip(merged.model(images), trained.model(images), strict=True):
            assert (found - expected).norm() <= 1e-5 * expected.norm()
    own = dict(merged.model.get_submodule("backbone").state_dict())
    saved = read_weights(str(whole / "checkpoints/last.pt"), own)
    assert_same_bits(saved.backbone, own)


def test_a_run_that_cannot_be_adapted_ends_with_one_error(run, monkeypatch):
    for wrong, named in (
        (("MODEL.FREEZE=backbone",), "MODEL.FREEZE"),
        (("MODEL.LORA.TARGETS=[qvk]",), "fc1"),
        (("MODEL.LORA.RANK=null", "MODEL.LORA.ALPHA=4"), "MODEL.LORA.RANK"),
    ):
        outcome = run(*OPTIONS, *wrong)
        assert (outcome.code, named in outcome.err, "Traceback" in outcome.err) == (2, True, False)
    monkeypatch.setitem(sys.modules, "peft", None)
    outcome = run(*OPTIONS, "DATA.DATASET.NAME=imagefolder", "DATA.DATASET.ROOT=.")
    assert (outcome.code, "linnaeus[lora]" in outcome.err) == (2, True)
