"""What all steps of an evaluation need."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from linnaeus.cli.evaluate.options import Options, RunConfig
from linnaeus.dist import World
from linnaeus.inference.trained import TrainedRun


@dataclass(frozen=True)
class Session:
    """What all steps of an evaluation need.

    Attributes:
        options: of the command line.
        run: the configurations.
        trained: the run.
        world: the processes.
        console: rank 0's.
    """

    options: Options
    run: RunConfig
    trained: TrainedRun
    world: World
    console: Console

    @property
    def is_own_dataset(self) -> bool:
        """Whether the dataset is that of the run."""
        return bool(self.run.config.DATA.DATASET == self.run.own.DATA.DATASET)
