"""`linnaeus average`: average the last checkpoints of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from linnaeus.cli.parser import CommandParser, RunOptions, option, read_count
from linnaeus.config.schema import Config
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.files import CONFIG
from linnaeus.runtime.signals import StopRequest


@dataclass
class AverageOptions(RunOptions):
    """Options of `linnaeus average`."""

    last: int = option(
        "number of newest checkpoints to average; 1 only measures BatchNorm statistics again; default 5",
        "N",
        read_count,
        5,
    )
    device: str = option("auto, cpu, cuda, cuda:1, ...", "DEVICE", default="auto")


def read(argv: Sequence[str]) -> tuple[AverageOptions, Config]:
    """Parse the tokens after `average` and return the arguments of `run`.

    Raises:
        ConfigError: lists all problems.
    """
    from linnaeus.config.instantiate import check_targets, targets
    from linnaeus.config.load import load_config, read_run_config

    options, words, problems = PARSER.words(argv)
    problems += [f"RUN: name only one run; leave out {word}" for word in words]
    file = options.run / CONFIG
    if not problems and not file.is_file():
        problems.append(f"RUN: {options.run} is not a run directory: it has no {CONFIG}")
    if problems:
        raise ConfigError(problems)
    config = load_config([], read_run_config(file)).config
    check_targets(
        dict(targets(config.DATA.DATASET, ("DATA", "DATASET")))
        | dict(targets(config.DATA.AUGMENT.TRAIN, ("DATA", "AUGMENT", "TRAIN"))),
        file,
        trust_code=options.trust_code,
    )
    return options, config


def run(options: AverageOptions, config: Config) -> int:
    """Average the checkpoints and print their names. Return the exit code, 0.

    Raises:
        LinnaeusError: an error that the user can fix; the message says how.
    """
    from linnaeus.inference.average import average_checkpoints
    from linnaeus.runtime.distributed import World, resolve_device

    with StopRequest().listening():
        world = World(resolve_device(options.device))
        path, files = average_checkpoints(
            options.run, options.last, config, world, trust_code=options.trust_code
        )
    print(f"{path}: the average of {', '.join(file.name for file in files)}")
    print(f"linnaeus evaluate {options.run} --checkpoint {path.name}")
    return 0


PARSER = CommandParser(
    "average",
    AverageOptions,
    words="RUN [options]",
    description="""\
Averages the weights of a run's last checkpoints, which often predicts better than any one of them, and writes
RUN/checkpoints/average.pt. TRAIN.KEEP_CHECKPOINTS keeps the checkpoints during training. BatchNorm statistics
are measured again, in one epoch of the training data.
""",
    details="""\
examples:
  linnaeus average runs/birds
  linnaeus average runs/birds --last 3 --device cuda
  linnaeus average runs/birds --last 1

exit codes: 0 done, 1 a checkpoint or the data cannot be read, 2 option, 130 Ctrl-C, 143 SIGTERM
""",
)
