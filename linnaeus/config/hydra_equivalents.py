"""What to type instead of options and keys of Hydra that mean nothing here; one sentence each."""

from __future__ import annotations

HYDRA_OPTIONS = {
    "--multirun": "`linnaeus sweep` runs a grid of values: linnaeus sweep DATA.BATCH_SIZE=32,64",
    "--run": "leave it out: without a command, Linnaeus trains",
    "--info": "--print-config --origin prints every value and where it comes from",
    "--resolve": "leave it out: --print-config prints resolved values",
    "--package": "leave it out: --print-config prints the whole configuration",
    "--hydra-help": "--help explains the options, and docs/configuration.md what is different from Hydra",
    "--config-path": "--config-dir DIR adds a folder of groups and files of your own",
    "--shell-completion": "linnaeus --install-completion bash",
    "--experimental-rerun": "--cfg runs/NAME/config.yaml runs it again",
    "-c": "--print-config prints the configuration",
}
"""Options of Hydra, each with what to type instead."""

SHORT = {
    "-m": "--multirun", "-r": "--run", "-i": "--info", "-p": "--package", "-cp": "--config-path",
    "-sc": "--shell-completion",
}  # fmt: skip
"""Short spellings of them."""

TAKE_VALUES = frozenset({"--package", "-p", "--config-path", "-cp", "--experimental-rerun", "-c"})
"""Those that are followed by a value."""

CFG_VALUES = ("job", "hydra", "all")
"""What Hydra's `--cfg` takes."""

_KEYS = {
    "hydra.run": "the folder of a run is EXPERIMENT.OUTPUT_DIR/EXPERIMENT.NAME: set these two",
    "hydra.sweep": "`linnaeus sweep` writes below EXPERIMENT.OUTPUT_DIR/EXPERIMENT.NAME: set these two",
    "hydra.output_subdir": "the configuration is always written to config.yaml in the folder of the run",
    "hydra.job.name": "set EXPERIMENT.NAME",
    "hydra.job.chdir": "leave it out: a run stays in the folder in which it was started",
    "hydra.searchpath": "--config-dir DIR adds a folder of groups and files of your own",
    "hydra.mode": "`linnaeus sweep` runs a grid of values",
    "hydra.sweeper": "`linnaeus sweep` runs a grid of values",
    "hydra.launcher": "leave it out: `linnaeus sweep` runs one after the other",
    "hydra.verbose": "DATA.AUTOBATCH.LOG_LEVEL is the level of a search's messages; no other can be set",
    "hydra.job_logging": "leave it out: a run writes its log to logs/ in its folder",
    "hydra.hydra_logging": "leave it out: a run writes its log to logs/ in its folder",
}
_NO_COUNTERPART = "leave it out: settings of Hydra itself have no counterpart here"


def is_hydra_key(key: str) -> bool:
    """Whether a key or group is one of Hydra's own settings: `hydra.run.dir`, `hydra/launcher`."""
    return key.split("@")[0].replace("/", ".").partition(".")[0] == "hydra"


def why_no_effect(key: str, origin: str) -> str:
    """What to do instead of setting one of Hydra's own keys or groups; the predicate of a sentence.

    >>> why_no_effect("hydra.job.name", "command line")
    'has no effect here (command line); set EXPERIMENT.NAME'
    """
    parts = key.split("@")[0].replace("/", ".").split(".")
    names = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    hint = next((_KEYS[name] for name in names if name in _KEYS), _NO_COUNTERPART)
    return f"has no effect here ({origin}); {hint}"


def hydra_option_hint(name: str) -> str | None:
    """What to type instead of an option of Hydra's, as a predicate; None for other options."""
    hint = HYDRA_OPTIONS.get(SHORT.get(name, name))
    return f"is an option of Hydra's; {hint}" if hint else None
