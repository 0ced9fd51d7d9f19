"""The configuration keys in which runs differ. Pure: nothing is read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from linnaeus.config.keys import KEYS, dotted

Flat = Mapping[str, Any]
"""A configuration as values by dotted key."""

SEED = "EXPERIMENT.SEED"
"""Runs that differ in it alone are repetitions of one measurement."""
DATASET = "DATA.DATASET."
LOSS = "LOSS."
IGNORED = frozenset({
    "EXPERIMENT.NAME", "EXPERIMENT.OUTPUT_DIR", "TRAIN.AUTO_RESUME", "DATA.AUTOBATCH.START",
    "DATA.AUTOBATCH.START_VAL",
})  # fmt: skip
"""Where a run is and whether it may be resumed: no result depends on it, and a sweep sets it by itself."""
SEARCHED_BY_SWITCH = {
    "DATA.BATCH_SIZE": "DATA.AUTOBATCH.ENABLED",
    "DATA.BATCH_SIZE_VAL": "DATA.AUTOBATCH.ENABLED_VAL",
}
"""Batch-size keys, each with the switch that makes AutoBatch write it: then a result, not a setting."""
OF_TRAINING_ALONE = frozenset({"DATA.DATASET.NUM_SAMPLES"})
"""Keys of the dataset that leave validation as it is."""

_ABSENT = object()
_REFERENCE = re.compile(r"\$\{(?P<key>[\w.]+)\}(?: \* (?P<factor>\d+))?")
_DEFAULTS = {dotted(path): key.default for path, key in KEYS.items()}


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a nested configuration by dotted key; an empty group has none.

    >>> flattened({"A": {"B": 1, "C": {}}, "D": [2]})
    {'A.B': 1, 'D': [2]}
    """
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": inner for key, inner in flattened(value).items()}
        else:
            flat[str(name)] = value
    return flat


def settings_of(flat: Flat) -> dict[str, Any]:
    """What somebody has chosen of a configuration: without sizes that were found, and without places."""
    found = {key for key, switch in SEARCHED_BY_SWITCH.items() if flat.get(switch) is True}
    return {key: value for key, value in flat.items() if key not in IGNORED and key not in found}


def differing_keys(runs: Sequence[Flat]) -> list[str]:
    """The keys in which runs differ, in the order of their configurations.

    A key that a run does not have, because an older version has written it, counts as the key's default. A
    key that follows another one, as validation's batch size does, is left out where it does so in all runs.

    Args:
        runs: settings of each run.

    >>> differing_keys([{"OPTIMIZER.LR": 0.1, "TRAIN.AMP": "off"}, {"OPTIMIZER.LR": 0.2}])
    ['OPTIMIZER.LR']
    """
    keys = list(dict.fromkeys(key for run in runs for key in run))
    known = [key for key in _DEFAULTS if key in keys]
    ordered = [*known, *(key for key in keys if key not in _DEFAULTS)]
    differing = [key for key in ordered if len({_comparable(run, key) for run in runs} - {None}) > 1]
    return [key for key in differing if not _follows(key, differing, runs)]


def shown(run: Flat, key: str) -> str:
    """The value of a key as it is typed on a command line; empty where the run has none."""
    value = run.get(key, _ABSENT)
    if value is _ABSENT:
        return ""
    return "null" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def _comparable(run: Flat, key: str) -> str | None:
    """Equal texts for equal values; None where nothing is known of the value."""
    value = run.get(key, _ABSENT)
    if value is _ABSENT:
        if key in SEARCHED_BY_SWITCH:
            return None
        value = _DEFAULTS.get(key, _ABSENT)
        if isinstance(value, str) and _REFERENCE.match(value):
            return None
        if value is _ABSENT:
            return "absent"
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = float(value) if abs(value) < 2**53 else value  # 1 is 1.0
    return json.dumps(value, sort_keys=True, default=str)


def _follows(key: str, differing: Sequence[str], runs: Sequence[Flat]) -> bool:
    """Whether a key has its default in all runs, and this is the value of another key that differs."""
    default = _DEFAULTS.get(key)
    match = _REFERENCE.fullmatch(default) if isinstance(default, str) else None
    if match is None or match["key"] not in differing:
        return False

    def is_default(run: Flat) -> bool:
        origin = run.get(match["key"])
        if isinstance(origin, (int, float)) and match["factor"]:
            origin *= int(match["factor"])
        return key not in run or _text(run[key]) == _text(origin)

    return all(map(is_default, runs))


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key; the whole key where another one ends so too.

    >>> short_names(["OPTIMIZER.LR", "MODEL.NAME", "OPTIMIZER.NAME"])
    {'OPTIMIZER.LR': 'LR', 'MODEL.NAME': 'MODEL.NAME', 'OPTIMIZER.NAME': 'OPTIMIZER.NAME'}
    """
    last = {key: key.rpartition(".")[2] for key in keys}
    names = list(last.values())
    return {key: name if names.count(name) == 1 else key for key, name in last.items()}
