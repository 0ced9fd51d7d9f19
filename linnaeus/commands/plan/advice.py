"""What training itself would make of a size: its batch plan."""

from __future__ import annotations

from linnaeus.batching.plan import BatchPlan, Facts, plan_batches
from linnaeus.batching.sizes import SizeLimits, max_samples_per_rank
from linnaeus.config.schema import Config, OptimizerConfig
from linnaeus.models.build import batchnorm_kind
from linnaeus.training.build import Assembly
from linnaeus.training.optim import peak_values


def batch_plan(
    config: Config, assembly: Assembly, *, size: int, world_size: int, num_samples: int
) -> BatchPlan:
    """The batch plan of a run for which a size fits: learning rate, steps, warnings.

    Args:
        config: of the run.
        assembly: the model and the optimizer that were timed.
        size: samples per process and forward pass that fit.
        world_size: processes of the run.
        num_samples: of the training data.

    Raises:
        ConfigError: the sizes that the configuration asks for cannot be had.
        DataError: fewer training samples than processes.
    """
    learning_rate, weight_decay = peak_values(assembly.optimizer)
    node, model = config.OPTIMIZER, config.MODEL
    own_optimizer = node if isinstance(node, OptimizerConfig) else None
    facts = Facts(
        max_micro_batch_size=size,
        world_size=world_size,
        num_samples=num_samples,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        optimizer=str(node["_target_"]) if own_optimizer is None else own_optimizer.NAME,
        batchnorm=_batchnorm(config, assembly, world_size),
        pretrained=bool(model.get("pretrained") if isinstance(model, dict) else model.WEIGHTS),
    )
    return plan_batches(config.TRAIN, own_optimizer, config.SCHEDULE, facts)


def max_micro_batch_size(
    config: Config, assembly: Assembly, *, world_size: int, num_samples: int
) -> int | None:
    """The most samples per process that the configuration asks for; None where it is whatever fits.

    Raises:
        ConfigError: lists every size that cannot be had.
    """
    batchnorm = _batchnorm(config, assembly, world_size) == "local"
    limits = SizeLimits(config.DATA.AUTOBATCH.MAX_BATCH_SIZE, world_size, num_samples, batchnorm=batchnorm)
    return max_samples_per_rank(config.TRAIN, limits)


def _batchnorm(config: Config, assembly: Assembly, world_size: int) -> str:
    kind = batchnorm_kind(assembly.model)
    is_to_be_synchronised = config.TRAIN.SYNC_BATCHNORM and world_size > 1
    return "synchronised" if kind == "local" and is_to_be_synchronised else kind
