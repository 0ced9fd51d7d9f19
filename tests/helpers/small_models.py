"""Small models of timm for two levels of a taxonomy."""

import torch

from linnaeus.config.schema import ModelConfig
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.models.build import build_model
from linnaeus.models.hierarchical import HierarchicalClassifier

ONE_LEVEL = Taxonomy((Level("species", ("lion", "lynx", "wolf")),))
TWO_LEVELS = Taxonomy(
    (Level("family", ("cats", "dogs")), Level("species", ("lion", "lynx", "wolf"))), ((0, 0, 1),)
)


def built(
    name="test_resnet",
    *,
    taxonomy=TWO_LEVELS,
    seed=0,
    in_chans=3,
    img_size=(32, 32),
    **changes,
):
    """A model with the weights of a seed, and the line about its weights."""
    torch.manual_seed(seed)
    model, line = build_model(
        ModelConfig(NAME=name, **changes), taxonomy=taxonomy, in_chans=in_chans, img_size=img_size
    )
    assert isinstance(model, HierarchicalClassifier)
    return model, line


def build(name="test_resnet", **options):
    """The model alone, of larger images; options as for `built`."""
    return built(name, **{"img_size": (64, 64), **options})[0]
