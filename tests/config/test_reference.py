"""The reference page holds every key, and Markdown that stays in its cells."""

from __future__ import annotations

import runpy
from types import SimpleNamespace

from linnaeus.autobatch import search
from linnaeus.config import schema
from linnaeus.config.keys import KEYS, NODES, dotted
from linnaeus.config.reference import reference
from tests.helpers.forks import ROOT

TOP = [path[0] for path in NODES if len(path) == 1]


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


def test_every_row_can_be_linked_to_and_found_by_the_whole_name() -> None:
    page = reference()
    for path in KEYS:
        name = dotted(path)
        assert page.count(f'id="{name}" href="#{name}">{name}</a>') == 1


def test_the_site_shows_the_keys_and_what_the_repository_says_beside_them() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="configuration.md"))
    other = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    hook = runpy.run_path(str(ROOT / "tools" / "mkdocs_hooks.py"))["on_page_markdown"]
    shown = hook(text, page, None, None)
    headings = [line for line in shown.splitlines() if line.startswith("## ")]
    assert headings[: len(headings) - len(TOP)] == [
        line for line in text.splitlines() if line.startswith("## ")
    ]
    assert headings[-len(TOP) :] == [f"## {name}" for name in TOP]
    assert shown.startswith(reference().partition("\n## ")[0])
    assert hook(text, other, None, None) == text


def test_the_strategies_to_choose_from_are_those_of_the_search() -> None:
    assert tuple(search.STRATEGIES) == schema.STRATEGIES
