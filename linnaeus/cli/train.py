"""`linnaeus train`, the default command, and the help of plain `linnaeus`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from linnaeus.cli.main import COMMANDS
from linnaeus.cli.parser import CommandParser, Options, option, read_path, read_request
from linnaeus.config.keys import NODES, available
from linnaeus.config.schema import Config
from linnaeus.runtime.signals import leaving_at_once


def _table(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items())


DESCRIPTION = f"""\
Trains image classifiers from a configuration, at the maximum memory-safe batch size.

commands (linnaeus COMMAND --help):
{_table(COMMANDS)}
"""
DETAILS = f"""\
Sources of keys. A later line of this list wins over an earlier one:
  default           the value that --print-config shows for a key that is not set
  model=resnet50    a preset, or your own file in --config-dir, in a group named like a node
  --cfg FILE        a file, or --config-name NAME; the last one wins
  +experiment=name  your own file in a group of another name
  KEY VALUE         an override, such as DATA.BATCH_SIZE 64, or KEY=VALUE; the last one wins. ~KEY restores
                    the default

nodes (--print-config shows every key):
{_table({path[0]: doc for path, doc in NODES.items() if len(path) == 1})}

presets (group=name):
{_table({group: ", ".join(names) for group, names in available().items()})}

MODEL, DATA.DATASET, LOSS and OPTIMIZER also take your own class:
  MODEL._target_=my_package.MyModel MODEL.width=64

examples:
  linnaeus train DATA.AUTOBATCH.ENABLED True DATA.AUTOBATCH.TARGET_MEMORY_FRACTION 0.85
  linnaeus train --cfg my_exp.yaml TRAIN.EPOCHS=5 TRAIN.AMP bf16
  linnaeus train model=resnet50 data=imagefolder DATA.DATASET.ROOT /data/birds
  linnaeus train --cfg my_exp.yaml --print-config
  linnaeus train --cfg my_exp.yaml --dry-run
  linnaeus train --cfg my_exp.yaml --preview samples.png
  torchrun --nproc_per_node=4 -m linnaeus.main train --cfg my_exp.yaml
  linnaeus train --cfg my_exp.yaml --launcher slurm --slurm gpus-per-node=4 time=4:00:00

exit codes: 0 done, 2 configuration, 3 no batch size fits or out of memory, 130 interrupted, 1 any other error
"""


def read(argv: Sequence[str]) -> str | tuple[TrainOptions, Config]:
    """Read the tokens after `train`. Return a text to print, or the arguments of `run`.

    Raises:
        ConfigError: lists all mistakes.
    """
    return read_request(PARSER, argv, references=True)


def run(options: TrainOptions, config: Config) -> int:
    """Train, or draw the preview.

    Returns:
        The exit code: 0 done, 128 and the signal's number (130 for Ctrl-C) if stopped.

    Raises:
        LinnaeusError: an error that the user can fix; the message says how.
    """
    if options.preview is not None:
        draw_preview(config, options.preview)
        return 0
    with leaving_at_once():
        from linnaeus.run import run as train
        from linnaeus.runtime.distributed import RankEnded

    try:
        stop_signal = train(config, dry_run=options.dry_run).stop_signal
    except RankEnded as ended:
        ended.leave()
    return 128 + stop_signal if stop_signal else 0


def draw_preview(config: Config, path: Path) -> None:
    """Draw the first augmented training samples with their labels.

    Raises:
        ConfigError: the samples are not images with classes.
    """
    from linnaeus.data.contact_sheet import draw_samples
    from linnaeus.data.datasets import build_data
    from linnaeus.models.preprocessing import with_preprocessing

    node, _ = with_preprocessing(config.DATA, config.MODEL)
    draw_samples(build_data(node, seed=config.EXPERIMENT.SEED), path, config.EXPERIMENT.SEED)
    print(f"picture: {path.resolve()}")


@dataclass
class TrainOptions(Options):
    """Options that are not configuration keys."""

    multirun: bool = option("same as the command sweep: -m KEY=a,b is sweep KEY=a,b", short="-m")
    preview: Path | None = option(
        "draw 36 augmented training samples with their labels as .png, without training",
        "FILE",
        partial(read_path, (".png",)),
    )
    dry_run: bool = option(
        "take one training step and validate one batch without writing files; with --launcher slurm: print "
        "the job script",
        launches=True,
        not_with={"--preview": "trains nothing"},
    )
    version: bool = option("print the version of Linnaeus and exit")


PARSER = CommandParser(
    "[train]",
    TrainOptions,
    description=DESCRIPTION,
    details=DETAILS,
    print_config="print the whole configuration, resolved, and exit",
)
