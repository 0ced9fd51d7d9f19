"""The reference page holds every key."""

import runpy

from tests.helpers.children import ROOT


def test_the_page_holds_the_table_of_this_schema():
    reference = runpy.run_path(str(ROOT / "tools" / "keys_page.py"))["reference"]
    page = (ROOT / "docs" / "keys.md").read_text()
    assert page == reference(), "run `python tools/keys_page.py --write`"
