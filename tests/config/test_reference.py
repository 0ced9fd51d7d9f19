"""The reference page holds every key, and Markdown that stays in its cells."""

import runpy

from linnaeus.config.keys import KEYS, dotted
from tests.helpers.forks import ROOT

reference = runpy.run_path(str(ROOT / "tools" / "keys_page.py"))["reference"]


def test_every_row_has_four_cells_and_an_anchor():
    page = reference()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert {row.count("|") for row in rows} == {5}
    for name in map(dotted, KEYS):
        assert page.count(f'id="{name}" href="#{name}">{name}</a>') == 1
    assert any("`memory`" in row and "`throughput`" in row for row in rows)  # the choices
    assert any("`0.8`" in row and "> 0" in row and "≤ 1" in row for row in rows)  # the bounds


def test_the_page_holds_the_table_of_this_schema():
    assert (ROOT / "docs" / "keys.md").read_text() == reference(), (
        "run `python tools/keys_page.py --write`"
    )
