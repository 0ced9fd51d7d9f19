"""Description of a trained model beside its weights: part of each checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from linnaeus.autobatch.state.rng import preserved_generators
from linnaeus.config.instantiate import check_targets, is_target, targets
from linnaeus.config.keys import TARGET, dotted
from linnaeus.config.schema import LoraConfig, ModelConfig
from linnaeus.data.bundle import DataBundle
from linnaeus.data.taxonomy import LabelIndex, Taxonomy
from linnaeus.data.transforms import Preprocessing
from linnaeus.models.build import build_model
from linnaeus.models.timm_source import find_source
from linnaeus.runtime.errors import TrustError

MODEL_FILE = "model.json"
"""Name of the file in a run's folder that shows its `ModelSpec` to people and to other programs."""

_OF_THE_DATA = ("num_classes", "in_chans", "img_size")
"""Arguments of `timm.create_model` that follow from the run's data."""


@dataclass(frozen=True)
class ModelSpec:
    """A model without its weights: architecture, inputs and meaning of its outputs.

    Attributes:
        node: the MODEL node as plain values, without the folder or the hub's name of a model.
        index: the classes and the labels of their names; None where the dataset declared no classes.
        in_chans: channels of an input; None where inputs are not images.
        img_size: height and width of an input, in pixels; None where inputs are not images.
        preprocessing: how an image file becomes an input; None where the dataset gave tensors.
        file: the file that the spec was read from; None where the user's configuration made it.
    """

    node: Mapping[str, Any]
    index: LabelIndex | None
    in_chans: int | None
    img_size: tuple[int, int] | None
    preprocessing: Preprocessing | None
    file: Path | None = field(default=None, compare=False)

    @classmethod
    def of(cls, node: Any, data: DataBundle) -> ModelSpec:
        """Return the spec of the model that a MODEL node and the run's data make."""
        plain = dict(node) if is_target(node) else dataclasses.asdict(node) | {"TEACHER": None}
        if not is_target(node) and ":" in node.NAME:  # the folder or the hub may not be there later
            source = find_source(node.NAME)
            given = {
                name: value for name, value in source.arguments.items() if name not in _OF_THE_DATA
            }
            plain |= {"NAME": source.architecture, "KWARGS": given | plain["KWARGS"]}
        index = data.index
        if index is None and data.taxonomy is not None:
            index = LabelIndex.of(data.taxonomy)
        return cls(plain, index, data.in_chans, data.img_size, data.preprocessing)

    @property
    def taxonomy(self) -> Taxonomy | None:
        """Levels and classes; None where the dataset declared none."""
        return None if self.index is None else self.index.taxonomy

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint or a JSON file; `from_dict` reads them."""
        preprocessing = (
            None if self.preprocessing is None else dataclasses.asdict(self.preprocessing)
        )
        return {
            "model": dict(self.node),
            "taxonomy": None if self.index is None else self.index.as_dict(),
            "in_chans": self.in_chans,
            "img_size": None if self.img_size is None else list(self.img_size),
            "preprocessing": preprocessing,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], file: Path) -> ModelSpec:
        """Load the result of `as_dict` from a file.

        Raises:
            LookupError, TypeError, ValueError, DataError: it is something else.
        """
        preprocessing, taxonomy, size = (
            content["preprocessing"],
            content["taxonomy"],
            content["img_size"],
        )
        return cls(
            node=content["model"],
            index=None if taxonomy is None else LabelIndex.from_dict(taxonomy),
            in_chans=content["in_chans"],
            img_size=None if size is None else (size[0], size[1]),
            preprocessing=None if preprocessing is None else Preprocessing.from_dict(preprocessing),
            file=file,
        )

    def build(self, *, trust_code: bool = False) -> nn.Module:
        """Return the network on the CPU, with random weights; the global random generators stay as they are.

        Args:
            trust_code: whether code that the file names may run. A `_target_` in an argument of a
                `.safetensors` file never runs.

        Raises:
            ConfigError: it cannot be built, such as a user's own module that is not there.
            TrustError: the file names code that may not run, or a place to fetch a model from.
        """
        node: Any = self.node
        if self.file is not None:
            self._check_trusted(self.file, trust_code)
        if not is_target(node):
            known = {field.name for field in dataclasses.fields(ModelConfig)}
            values = {name: value for name, value in node.items() if name in known}
            node = ModelConfig(**{**values, "LORA": LoraConfig(**values.get("LORA", {}))})
        with preserved_generators():
            model, _ = build_model(
                node,
                taxonomy=self.taxonomy,
                in_chans=self.in_chans,
                img_size=self.img_size,
                load_weights=False,
            )
        return model

    def nested_targets(self) -> list[str]:
        """Return the `_target_`s in arguments of the model, as `key name`."""
        found = targets(self.node, ("MODEL",))
        return [f"{dotted(key)} {name!r:.200}" for key, name in found if len(key) > 2]

    def _check_trusted(self, file: Path, trust_code: bool) -> None:
        """Refuse code of the file, and a model that would have to be fetched."""
        if file.suffix == ".safetensors" and (nested := self.nested_targets()):
            outer = f"{self.node.get(TARGET, self.node.get('NAME'))!r:.200}"
            raise TrustError(
                f"{file}: arguments of {outer} contain `_target_` ({', '.join(nested)}), which a "
                ".safetensors file must not have; load the run directory or a checkpoint"
            )
        check_targets(dict(targets(self.node, ("MODEL",))), file, trust_code=trust_code)
        if not is_target(self.node) and ":" in self.node["NAME"]:
            raise TrustError(
                f"{file}: MODEL.NAME {self.node['NAME']!r:.200} would download a model; a run's file may "
                "only name a timm architecture"
            )
