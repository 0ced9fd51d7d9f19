"""Folders of runs as training leaves them, made without training: their weights are random."""

import dataclasses

import torch

from linnaeus.config.schema import ModelConfig
from linnaeus.data.taxonomy import LabelIndex, Level, Taxonomy
from linnaeus.data.transforms import Preprocessing
from linnaeus.models.model_spec import ModelSpec
from tests.helpers import datasets
from tests.helpers.contents import whole

BIRDS = Taxonomy(
    (
        Level("order", ("Passeriformes", "Piciformes")),
        Level(
            "species",
            ("Corvus [cf] corax", "Parus, major", 'Picus "v" [/sp]', "Jynx\ntorquilla", "Sitta"),
        ),
    ),
    ((0, 0, 1, 1, 0),),
)
PLAIN = Taxonomy(
    (
        Level("order", ("Passeriformes", "Piciformes")),
        Level("species", ("corax", "major", "viridis")),
    ),
    ((0, 0, 1),),
)
ONE_LEVEL = Taxonomy((Level("class", ("cat", "dog", "eel")),))


def spec_of(
    name="test_resnet",
    *,
    taxonomy=BIRDS,
    channels=3,
    size=(32, 32),
    node=None,
    is_of_files=True,
    resizing=None,
    **model,
):
    preprocessing = Preprocessing(
        channels,
        size,
        0.9,
        (0.5, 0.4, 0.3)[:channels],
        (0.2, 0.3, 0.25)[:channels],
        **(resizing or {"resize": "crop"}),
    )
    return ModelSpec(
        node=dict(node)
        if node is not None
        else dataclasses.asdict(ModelConfig(NAME=name, **model)),
        index=None if taxonomy is None else LabelIndex.of(taxonomy),
        in_chans=channels,
        img_size=size,
        preprocessing=preprocessing if is_of_files else None,
    )


def save_run(folder, spec, *, seed=0, **content):
    """Write a run's folder with `best.pt` and `last.pt`, whose weights differ; gives the folder."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "EXPERIMENT: {NAME: birds}\nDATA: {DATASET: {NAME: imagefolder, ROOT: nowhere}}\n"
    )
    for name, offset in (("best.pt", 0), ("last.pt", 1)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + offset)
            model = spec.build()
        randomise(model, seed + offset)
        save_checkpoint(
            folder / "checkpoints" / name, spec, {"model": model.state_dict()}, **content
        )
    return folder


def save_checkpoint(path, spec, state, **content):
    entries = {"rng": [], "config": {"TRAIN": {"AMP": "off"}}, "state": state}
    own = {} if spec is None else {"model_spec": spec.as_dict()}
    torch.save(whole(step=1, **entries | own | content), path)


def randomise(model, seed=0):
    """Weights and statistics with which outputs depend on the image and on every layer."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.startswith(("heads.", "layers.species")):
                tensor.copy_(noise)
            elif tensor.ndim == 1:
                tensor.add_(0.1 * noise.abs())
            else:
                tensor.add_(0.02 * noise)


def write_images(folder, number, size=(40, 52)):
    """PNG files of coloured blocks, `000.png` and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{position:03}.png" for position in range(number)]
    for position, path in enumerate(paths):
        picture(position, size).save(path)
    return paths


def picture(seed, size=(40, 52)):
    return datasets.picture(seed, size, block=4)


class Flat(torch.nn.Module):
    """A user's model: levels by name in a dictionary. It keeps its other arguments in `extra`."""

    def __init__(
        self,
        num_classes,
        in_chans,
        img_size,
        extra=None,
    ):
        super().__init__()
        self.extra = extra
        size = in_chans * img_size[0] * img_size[1]
        layers = {name: torch.nn.Linear(size, count) for name, count in num_classes.items()}
        self.layers = torch.nn.ModuleDict(layers)

    def forward(self, images):
        return {name: layer(images.flatten(1)) for name, layer in self.layers.items()}


class Untraceable(Flat):
    def forward(self, images):
        return super().forward(images if images.sum().item() else -images)
