"""The values in the text of an override, by Hydra's grammar: `a,b`, `choice(a,b)`, `range(start,stop,step)`,
`sort(...)`, `shuffle(...)` and `tag(...)`. A list in brackets and a quoted text are one value.

https://hydra.cc/docs/advanced/override_grammar/extended/
"""

from __future__ import annotations

import math
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString, RangeSweep, Transformer
from hydra.errors import HydraException

from linnaeus.config.overrides import parsed, read_value


def sweep_values(text: str) -> list[str]:
    """Return the values in a text, each as typed alone; equal ones count once.

    >>> sweep_values("none,linear"), sweep_values("range(1,2,0.4)")
    (['none', 'linear'], ['1', '1.4', '1.8'])
    >>> sweep_values("[2,6]"), sweep_values("'a,b'")
    (['[2,6]'], ["'a,b'"])

    Raises:
        ValueError: the text is a list whose values cannot be told.
    """
    try:
        override = parsed(text)
    except (HydraException, RecursionError):
        if "," in text and not text.startswith("["):
            raise ValueError(
                f"{text!r} cannot be read as a list of values; quotes make it one text: \"'{text}'\""
            ) from None
        return [text]
    if not override.is_sweep_override():
        return [text]
    value = override.value()
    try:
        if isinstance(
            value, RangeSweep
        ):  # Hydra adds the step up, so that 0.1 four times is less than 0.4
            start, stop, step = (
                float(number or 0) for number in (value.start, value.stop, value.step)
            )
            count = math.ceil((stop - start) / step - 1e-9) if step else 0
            found = [_typed(start + number * step) for number in range(count)]
        else:
            found = [
                _typed(value) for value in override.sweep_iterator(transformer=Transformer.identity)
            ]
    except HydraException:
        found = []
    if not found:
        raise ValueError(
            f"{text!r} has no list of values; give them one by one (a,b,c) or as range(start,stop,step)"
        )
    return list(dict.fromkeys(found))


def _typed(value: Any) -> str:
    """Return an element of a list as typed alone."""
    if type(value) is str:
        try:
            is_same = read_value(value) == value
        except ValueError:
            is_same = False
        if not is_same:  # it was typed with escapes
            value = QuotedString(value, Quote.single)
    if isinstance(value, QuotedString):
        return str(value.with_quotes())
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, list | dict):
        return str(Transformer.encode(value))
    return "null" if value is None else str(value)
