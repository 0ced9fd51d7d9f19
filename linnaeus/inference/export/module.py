"""The model as it is exported: images in, one named output per level out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from linnaeus.data.taxonomy import Taxonomy
from linnaeus.errors import LinnaeusError, first_line
from linnaeus.training.losses import gives_log_probabilities, log_probabilities, logits_per_level


class ExportModule(nn.Module):
    """A model whose outputs have names.

    Args:
        model: the trained model.
        taxonomy: levels; None where there are no classes: then the outputs are the model's own.
        probabilities: whether to give probabilities, and not the model's own logits or log-probabilities.
    """

    def __init__(self, model: nn.Module, taxonomy: Taxonomy | None, *, probabilities: bool) -> None:
        super().__init__()
        self.model = model
        self._names = None if taxonomy is None else taxonomy.names
        self._probabilities = probabilities
        self._are_logs = gives_log_probabilities(model)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """{name of the level: [B, classes]} of images [B, C, H, W]."""
        outputs = self.model(images)
        if self._names is None:
            return _named(outputs)
        logits = dict(zip(self._names, logits_per_level(outputs, self._names), strict=True))
        if not self._probabilities:
            return logits
        return {
            name: log_probabilities(level, are_logs=self._are_logs).exp() for name, level in logits.items()
        }


def _named(outputs: Any) -> dict[str, Tensor]:
    if isinstance(outputs, Tensor):
        return {"output": outputs}
    if isinstance(outputs, Mapping):
        return {str(name): value for name, value in outputs.items()}
    if isinstance(outputs, Sequence):
        return {f"output_{position}": value for position, value in enumerate(outputs)}
    raise LinnaeusError(f"MODEL: it gives a {type(outputs).__name__}; only tensors can be exported")


@torch.no_grad()
def traced(module: ExportModule, images: Tensor) -> ExportedProgram:
    """The computation on batches of any size.

    Args:
        module: in eval mode.
        images: an example [B, C, H, W] with B of at least 2.

    Raises:
        LinnaeusError: the model cannot be traced.
    """
    try:
        return torch.export.export(module, (images,), dynamic_shapes={"images": {0: Dim("batch")}})
    except Exception as error:  # whatever a user's model does
        raise LinnaeusError(
            f"the model cannot be traced by torch.export ({type(error).__name__}: {first_line(error)}); "
            "--format safetensors exports its weights"
        ) from error
