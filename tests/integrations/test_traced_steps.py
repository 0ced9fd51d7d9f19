"""Ordinary training steps of other people's models can be predicted."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from benchmarks.research import traced_steps
from linnaeus.autobatch.predict.trace import UntraceableError

REFUSED = {
    "confident examples by their scores": "nonzero",
    "LBFGS with a closure": "local_scalar_dense",
    "accuracy by torchmetrics": "bincount",
    "CTC of speech": "ctc_loss",
    "experts chosen by scores, in a loop": "nonzero",
}
"""Steps that need values which depend on weights, or operations that torch lacks on `meta`."""
QUICK = (
    "llama with an attention mask",
    "llama with checkpointing, no mask",
    "bert, masked words",
    "opt, Adafactor of transformers",
    "llama with LoRA and checkpointing",
    *REFUSED,
)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of names that transformers will remove
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in traced_steps.STEPS
    ],
)
def test_an_ordinary_step_is_traced_or_refused_by_the_operation(name):
    if name.startswith("mixtral") and torch.__version__ < "2.15":
        pytest.skip("torch before 2.15 refuses experts in float32 on `meta`")
    if name in REFUSED:
        with pytest.raises(UntraceableError, match=f"{REFUSED[name]}.*line"):
            traced_steps.quietly(traced_steps.predicted, name)
    else:
        assert traced_steps.quietly(traced_steps.predicted, name)[0] > 0
