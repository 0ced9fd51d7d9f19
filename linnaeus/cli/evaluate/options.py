"""The command line of `linnaeus evaluate`. Imports torch only for a checkpoint without a run directory."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from linnaeus.cli.parser import CheckpointOptions, CommandParser, choice, option, read_columns
from linnaeus.config.keys import KEYS, dotted
from linnaeus.config.overrides import CommandLine, parse_command_line, typed_keys
from linnaeus.config.schema import Config
from linnaeus.runtime.errors import ConfigError, LinnaeusError
from linnaeus.runtime.files import CHECKPOINTS

if TYPE_CHECKING:
    from linnaeus.config.files import File

DESCRIPTION = """\
Evaluates a trained run on labeled data, with the run's classes, preprocessing and validation step.

RUN is a run directory or one of its checkpoints. Without overrides, the command evaluates the run's own
validation data and reproduces the logged metrics. DATA.DATASET selects other data, with classes matched by
name.
"""
_SETTABLE = (
    "DATA.DATASET",
    "DATA.IMG_SIZE",
    "DATA.AUGMENT.CROP_FRACTION",
    "DATA.AUGMENT.INTERPOLATION",
    "DATA.AUGMENT.RESIZE",
    "DATA.BATCH_SIZE_VAL",
    "DATA.NUM_WORKERS",
    "DATA.PREFETCH_FACTOR",
    "DATA.PIN_MEMORY",
    "DATA.ON_BAD_IMAGE",
    "DATA.AUTOBATCH",
    "TRAIN.AMP",
    "TRAIN.CHANNELS_LAST",
    "TRAIN.COMPILE",
    "TRAIN.DETERMINISTIC",
    "TRAIN.COMPILE_MODE",
    "TRAIN.COMPILE_DYNAMIC",
    "EXPERIMENT.DEVICE",
    "EXPERIMENT.MATMUL_PRECISION",
    "DIST",
)
"""Keys and nodes that an evaluation may set."""
_NOT_SEARCHED = ("DATA.AUTOBATCH.ENABLED=False", "DATA.AUTOBATCH.ENABLED_VAL=False")
"""Use the run's batch size unless the command line asks for a search."""

DETAILS = f"""\
Keys that can be set (of DATA.AUTOBATCH, only the keys for validation). The run sets all others:
{textwrap.fill(", ".join(_SETTABLE), 106, initial_indent="  ", subsequent_indent="  ")}

examples:
  linnaeus evaluate runs/birds
  linnaeus evaluate runs/birds --samples samples.csv
  linnaeus evaluate runs/birds DATA.DATASET.ROOT=/data/birds2026 --unknown skip
  linnaeus evaluate runs/birds --checkpoint last DATA.DATASET.NAME=manifest DATA.DATASET.VAL=/data/test.csv
  linnaeus evaluate runs/birds DATA.AUTOBATCH.ENABLED_VAL=True TRAIN.AMP=bf16
  torchrun --nproc_per_node=4 -m linnaeus.main evaluate runs/birds

exit codes: 0 done, 2 configuration or option, 3 no batch size fits, or out of memory, 130 interrupted,
143 terminated (nothing is written), 1 any other error
"""


def _read_output(text: str) -> Path:
    path = Path(text).expanduser()
    return path.with_suffix("") if path.suffix == ".json" else path


@dataclass
class EvaluateOptions(CheckpointOptions):
    """Options of `linnaeus evaluate`. `output` has no file extension."""

    output: Path | None = option(
        "path prefix of the output files; default RUN/evaluations/<checkpoint>",
        "DIR/PREFIX",
        _read_output,
    )
    samples: Path | None = option(
        "write every sample, the highest loss first, as .csv or .parquet: path, loss, labels, predictions; "
        "worst.png beside it shows the first 36 images",
        "FILE",
        partial(read_columns, ".csv"),
    )
    unknown: str = choice(
        "samples of classes that the run does not have: stop with an error, or skip and count them; "
        "default error",
        ("error", "skip"),
        "error",
    )


def read(argv: Sequence[str]) -> str | tuple[EvaluateOptions, Config, Config]:
    """Read the tokens after `evaluate`. Return a text to print, or the arguments of the session's `run`.

    Raises:
        ConfigError: lists all mistakes in the options and the configuration.
    """
    # Imported here, so that shell completion does not wait for OmegaConf and YAML.
    from linnaeus.config.dump import to_yaml
    from linnaeus.config.instantiate import check_targets, targets
    from linnaeus.config.load import load_config

    options, tokens, problems = PARSER.words(argv)
    line = parse_command_line(tokens)
    problems += _not_taken(line)
    if problems:
        raise ConfigError([*problems, *line.problems])
    base = _base(options)
    own = load_config(_NOT_SEARCHED, base).config
    loaded = load_config([*_NOT_SEARCHED, *_without_own_dataset(line, own), *tokens], base)
    if loaded.print_config:
        return to_yaml(loaded.config)
    config = loaded.config
    built = [*targets(config.DATA.DATASET, ("DATA", "DATASET")), *targets(config.LOSS, ("LOSS",))]
    of_file = {key: name for key, name in built if not loaded.is_on_command_line(key)}
    check_targets(of_file, Path(base.name), trust_code=options.trust_code)
    return options, config, own


def _not_taken(line: CommandLine) -> list[str]:
    """Return a sentence for each file, preset or key that an evaluation does not take."""
    named = [*dict.fromkeys(name for name, _ in line.sources), *line.groups]
    problems = [
        f"{name}: a trained run takes no configuration files or presets; set keys instead"
        for name in named
    ]
    for path in typed_keys(line.overrides):
        key = dotted(path)
        if (*path[:-1], f"{path[-1]}_VAL") in KEYS:
            problems.append(f"{key}: is for training; set {key}_VAL for an evaluation")
        elif any(f"{key}.".startswith(f"{name}.") for name in _SETTABLE):
            continue
        elif any(known[: len(path)] == path for known in KEYS):
            problems.append(
                f"{key}: belongs to the trained run and cannot be changed for an evaluation; leave it out"
            )
    return problems


def _base(options: EvaluateOptions) -> File:
    """Return the file with the run's configuration: `config.yaml` or a checkpoint."""
    from linnaeus.config.files import File
    from linnaeus.config.load import read_run_config
    from linnaeus.config.values import escape

    path = options.run
    folder = path.parent.parent if path.is_file() and path.parent.name == CHECKPOINTS else path
    file = folder / "config.yaml"
    if file.is_file():
        return read_run_config(file)
    from linnaeus.training.checkpoint import load_checkpoint
    from linnaeus.training.saved_run import find_checkpoint_file

    try:
        checkpoint = find_checkpoint_file(path, options.checkpoint or "best")
        nodes = load_checkpoint(checkpoint, mmap=True).get("config")
    except LinnaeusError as error:
        raise ConfigError(f"RUN: {error}") from error
    if not isinstance(nodes, Mapping):
        raise ConfigError(f"{checkpoint}: holds no configuration, so it cannot be evaluated")
    return File(str(checkpoint), escape(nodes))


def _without_own_dataset(line: CommandLine, own: Config) -> list[str]:
    """Drop the run's dataset if the command line names another NAME or `_target_`.

    The run's paths, columns and arguments do not apply to such a dataset.
    """
    dataset = own.DATA.DATASET
    own_kind = dict(dataset) if isinstance(dataset, Mapping) else {"NAME": dataset.NAME}
    typed = typed_keys(line.overrides)
    is_other = any(
        typed.get(("DATA", "DATASET", name)) not in (None, own_kind.get(name))
        for name in ("NAME", "_target_")
    )
    return ["~DATA.DATASET"] if is_other else []


PARSER = CommandParser(
    "evaluate",
    EvaluateOptions,
    description=DESCRIPTION,
    details=DETAILS,
    print_config="print the configuration of the evaluation, and exit",
)
