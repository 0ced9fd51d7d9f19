"""The reference page holds every key, and Markdown that stays in its cells."""

from __future__ import annotations

from linnaeus.autobatch import search
from linnaeus.config import schema
from linnaeus.config.keys import KEYS, NODES, dotted
from linnaeus.config.reference import reference


def test_every_key_has_a_row_with_its_meaning_and_every_group_a_heading() -> None:
    lines = reference().splitlines()
    for path in NODES:
        assert any(line == f"{'#' * (len(path) + 1)} {dotted(path)}" for line in lines)
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == len(KEYS)
    for key in KEYS.values():
        assert any(row.startswith(f"| `{key.path[-1]}` |") and key.doc.split("|")[0] in row for row in rows)


def test_every_row_has_four_cells() -> None:
    assert all(line.count("|") == 5 for line in reference().splitlines() if line.startswith("| `"))


def test_bounds_choices_and_units_are_told() -> None:
    page = reference()
    assert "| `TARGET_MEMORY_FRACTION` | `0.8` | number > 0 and ≤ 1 |" in page
    assert "`memory`, `throughput`" in page
    assert "(GiB)" in page
    assert "`${DATA.AUTOBATCH.MAX_BATCH_SIZE} * 2`" in page


def test_the_strategies_to_choose_from_are_those_of_the_search() -> None:
    assert tuple(search.STRATEGIES) == schema.STRATEGIES
