"""The text of `--help`."""

from __future__ import annotations

from collections.abc import Sequence

from linnaeus.config.keys import NODES
from linnaeus.config.presets import available, expanded

_USAGE = """\
Linnaeus trains image classifiers from a configuration, with the largest batch size that is safe in memory.

usage: linnaeus [train] [--cfg FILE] [group=preset ...] [KEY VALUE | KEY=VALUE ...]
       python -m linnaeus.train [--cfg FILE] [group=preset ...] [KEY VALUE | KEY=VALUE ...]
       torchrun --nproc_per_node=4 -m linnaeus.main --cfg FILE ...
       linnaeus COMMAND [options] ...

commands (linnaeus COMMAND --help):
  train           train; this is what runs without a command, except that `linnaeus` alone prints this text
  analyze         memory, batch size and speed before a run
  plan            time, learning rate and warnings of a few batch sizes that fit
  sweep           a run for each combination of values, compared
  compare         runs side by side: what differs, metrics and learning curves
  evaluate        a trained run on labelled data: accuracy per rank and class, confusions, calibration
  predict         classes of images, by a trained run
  export          a trained run as safetensors, ONNX, torch.export or timm files

options:
  --cfg FILE      read a YAML file; it needs only the keys that differ from the defaults, and may begin with a
                  Hydra `defaults:` list. Of several files the later one wins
  --config-dir DIR, --config-name NAME
                  a folder of groups and files of your own; a file of it, as with --cfg
  --print-config  print the whole configuration, resolved, and exit
  --origin        with --print-config: where each value comes from
  -m, --multirun  the command sweep: -m KEY=a,b is sweep KEY=a,b
  --launcher slurm --slurm KEY=VALUE ...
                  submit this as a job of SLURM, with these options of sbatch, such as partition=gpu nodes=2
                  gpus-per-node=4 time=4:00:00; all commands take it. --dry-run prints the job's script
  --opts          may come before the overrides; changes nothing
  --version       print the version of Linnaeus and exit
  --install-completion [SHELL], --show-completion [SHELL]
                  completion of commands, keys and presets with TAB, in bash, zsh and fish
  -h, --help      print this text and exit

Keys can be set in four ways. A later one in this list wins, and of two overrides the last one:
  group=name      a preset that ships with the package, or a file of yours in --config-dir
  --cfg FILE      a file
  KEY VALUE       an override, such as DATA.BATCH_SIZE 64
  KEY=VALUE       the same in Hydra's spelling; ~KEY goes back to the default
"""

_REST = """\
MODEL, DATA.DATASET, LOSS and OPTIMIZER also take a class of your own:
  MODEL._target_=my_package.MyModel MODEL.width=64

examples:
  python -m linnaeus.train DATA.AUTOBATCH.ENABLED True DATA.AUTOBATCH.TARGET_MEMORY_FRACTION 0.85
  python -m linnaeus.train --cfg my_exp.yaml TRAIN.EPOCHS=5 TRAIN.AMP bf16
  python -m linnaeus.train model=resnet50 data=imagefolder DATA.DATASET.ROOT /data/birds
  python -m linnaeus.train --cfg my_exp.yaml --print-config

exit codes: 0 done, 2 configuration, 3 no batch size fits, or out of memory, 130 interrupted, 1 anything else
"""


def help_text(folders: Sequence[str] = ()) -> str:
    """Usage, the ways to set a key, the top-level nodes, the presets, examples and exit codes.

    Args:
        folders: those of `--config-dir`, whose groups are listed too.
    """
    nodes = {path[0]: doc for path, doc in NODES.items() if len(path) == 1}
    presets = {group: ", ".join(names) for group, names in available().items()}
    own = []
    for folder in folders:
        groups = {group: ", ".join(names) for group, names in available(expanded(folder)).items()}
        own += ["", f"of your own in {folder}:", *_table(groups)]
    return "\n".join(
        [
            _USAGE,
            "nodes (--print-config shows every key):",
            *_table(nodes),
            "",
            "presets (group=name):",
            *_table(presets),
            *own,
            "",
            _REST,
        ]
    )


def _table(rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    return [f"  {name:<{width}}  {text}" for name, text in rows.items()]
