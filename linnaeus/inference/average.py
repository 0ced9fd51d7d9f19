"""Average of a run's last checkpoints, with BatchNorm statistics measured again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm  # no public class is the base of all
from torch.optim.swa_utils import AveragedModel

from linnaeus.config.schema import Config
from linnaeus.data.bundle import dataset_length
from linnaeus.data.datasets import build_data
from linnaeus.data.loader import build_loaders, with_num_workers
from linnaeus.models.freeze import build_freezing
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.files import write_atomically
from linnaeus.training.precision import build_precision
from linnaeus.training.saved_run import find_checkpoint_file, read_run


def average_checkpoints(
    run: Path, number: int, config: Config, world: World, *, trust_code: bool = False
) -> tuple[Path, list[Path]]:
    """Average the weights of a run's last checkpoints equally, and write `average.pt` beside them.

    With TRAIN.EMA, the EMA weights are averaged. BatchNorm statistics become the means over one epoch of the
    training data, in batches of DATA.BATCH_SIZE. All other entries are copied from the newest checkpoint.

    Args:
        run: the run directory.
        number: number of checkpoints.
        config: configuration of the run.
        world: a world of one rank.
        trust_code: as for `load_run`.

    Returns:
        The file written, and the files averaged, the newest last.

    Raises:
        LinnaeusError: the run has fewer checkpoints, or one of them or the data cannot be read.
    """
    last = find_checkpoint_file(run, "last")
    kept = sorted(last.parent.glob("step_*.pt"))  # zero-padded: sorts by step
    files = [last] if number == 1 else kept[-number:]
    if len(files) < number:
        raise ConfigError(
            f"--last: {number}, but {last.parent} has {len(files)} numbered checkpoints; train with "
            f"TRAIN.KEEP_CHECKPOINTS={number}, or name a smaller number"
        )
    average = None
    for file in files:
        saved = read_run(file, trust_code=trust_code)
        average = average or AveragedModel(saved.model)
        average.update_parameters(saved.model)
    assert average is not None
    model = average.module.to(world.device)
    freezing = build_freezing(config.MODEL, model, config.TRAIN.UNFREEZE_EPOCH)
    if not freezing.ends_within(config.TRAIN.most_epochs):
        freezing.freeze()
    # `torch.optim.swa_utils.update_bn` also resets layers that are frozen.
    layers = [
        layer
        for layer in model.train().modules()
        if isinstance(layer, _BatchNorm) and layer.training and layer.track_running_stats
    ]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a mean over all batches
    with torch.no_grad():
        for inputs in _training_inputs(config, world) if layers else ():
            model(inputs)
    content = saved.content | {
        "state": {"model": model.cpu().state_dict(), "criterion": saved.criterion_state},
        "progress": saved.content["progress"] | {"metrics": {}},  # of the checkpoint's own weights
    }
    path = last.with_name("average.pt")
    write_atomically(path, lambda file: torch.save(content, file))
    return path, files


def _training_inputs(config: Config, world: World) -> Iterator[Any]:
    """Yield the inputs of one epoch on the device, in whole batches: a single sample has no variance."""
    seed = config.EXPERIMENT.SEED
    data = build_data(config.DATA, seed=seed)
    num_samples = dataset_length(data.train)
    size = min(config.DATA.BATCH_SIZE, num_samples)
    precision = build_precision(config.TRAIN, world.device, data.on_device)
    with (
        build_loaders(
            data,
            with_num_workers(config.DATA, data, world),
            world,
            sizes=lambda *_: repeat(size, num_samples // size),
            batch_size_val=1,
            seed=seed,
            mixed_epochs=0,
        ) as loaders,
        precision.autocast(),
    ):
        for batch in loaders.train:
            yield precision.place(batch)[0]
