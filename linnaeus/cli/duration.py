"""Lengths of time as people write them."""

from __future__ import annotations

import math
import re

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def read_duration(text: str) -> float:
    """Seconds in a length of time.

    >>> read_duration("90s"), read_duration("1.5h"), read_duration("2h30m")
    (90.0, 5400.0, 9000.0)

    Raises:
        ValueError: it is something else.
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text or not 0 < seconds < math.inf:
        raise ValueError(f"{text!r} is not a length of time; give one such as 90s, 30m, 2h or 1d")
    return float(seconds)


def show_duration(seconds: float) -> str:
    """A length of time in its two largest units.

    >>> show_duration(0.25), show_duration(72), show_duration(5400), show_duration(200_000)
    ('0.25 s', '1 m 12 s', '1 h 30 m', '2 d 8 h')
    """
    for unit, below in (("d", "h"), ("h", "m"), ("m", "s")):
        whole = round(seconds / UNITS[below])
        per_unit = UNITS[unit] // UNITS[below]
        if seconds >= 60 and whole >= per_unit:
            return f"{whole // per_unit} {unit} {whole % per_unit} {below}"
    return f"{seconds:.3g} s"
