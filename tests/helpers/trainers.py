"""The trainer of a run, built for the sizes that a search has found."""

from contextlib import contextmanager
from functools import partial

from linnaeus.batch_plan.effective_batch import Facts
from linnaeus.batch_plan.plan import plan_batches
from linnaeus.data.loader import build_loaders
from linnaeus.runtime.console import ProgressBar
from linnaeus.runtime.signals import StopRequest
from linnaeus.training.ddp import wrap
from linnaeus.training.resume import resumed_nodes
from linnaeus.training.schedule import Schedule
from linnaeus.training.stop import StopAgreement


@contextmanager
def building(
    kind,
    config,
    data,
    assembly,
    world,
    sizes,
    checkpoints,
):
    """A trainer of one process, with its loaders until the context ends.

    Args:
        kind: its class.
        config: as after the search; the number of samples is read from it.
        data: with as many samples.
        assembly: what is trained.
        world: this process alone.
        sizes: samples of a micro-batch in `train`, and of a batch in `val`, 8 where that is left out.
        checkpoints: takes the checkpoints.
    """
    facts = Facts(sizes["train"], 1, config.DATA.DATASET.NUM_SAMPLES, config.OPTIMIZER.LR)
    plan = plan_batches(config.TRAIN, config.OPTIMIZER, config.SCHEDULE, facts)
    with build_loaders(
        data,
        config.DATA,
        world,
        sizes=plan.micro_batches,
        batch_size_val=sizes.get("val", 8),
        seed=0,
    ) as loaders:
        yield kind(
            config.TRAIN,
            plan,
            world,
            assembly,
            loaders=loaders,
            schedule=Schedule(
                config.SCHEDULE,
                assembly.optimizer,
                steps_per_epoch=plan.steps_per_epoch,
                warmup_steps=plan.warmup_steps,
            ),
            checkpoints=checkpoints,
            progress_bar=ProgressBar(None),
            stop=StopAgreement(world, StopRequest()),
            checkpoint_extras={
                "autobatch": {},
                "config": resumed_nodes(config),
                "model_spec": {},
                "plan": plan.as_dict(),
            },
            wrap=partial(wrap, world=world),
        )
