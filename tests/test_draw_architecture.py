"""The picture of the parts is that of the imports, and it has no arrow too many."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "draw_architecture.py"))


def test_the_page_has_the_graph_of_the_present_imports(tool: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert f"{tool['BEGIN']}{tool['drawing']()}{tool['END']}" in page, (
        "run `python tools/draw_architecture.py --write`"
    )


def test_an_arrow_that_a_longer_path_implies_is_left_out(tool: dict[str, Any]) -> None:
    graph = {"a": set(), "b": {"a"}, "c": {"a", "b"}, "d": {"a", "b", "c"}, "e": {"a"}}
    assert tool["without_detours"](graph) == {"a": set(), "b": {"a"}, "c": {"b"}, "d": {"c"}, "e": {"a"}}


def test_parts_that_import_each_other_are_an_error(tool: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a, b"):
        tool["without_detours"]({"a": {"b"}, "b": {"a"}, "c": {"a"}})


def test_parts_are_folders_and_modules(tool: dict[str, Any], tmp_path: Path) -> None:
    package = tmp_path / "linnaeus"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "errors.py").write_text("import os\n")
    (package / "data" / "__init__.py").write_text("from linnaeus.errors import Error\n")
    (package / "data" / "loader.py").write_text("def f():\n    from linnaeus import data, log\n")
    (package / "log.py").write_text("import linnaeus.errors\n")
    assert tool["read_graph"](package) == {"errors": set(), "data": {"errors", "log"}, "log": {"errors"}}
    assert "  log --> data" in tool["drawing"](package)
