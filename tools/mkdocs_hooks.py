"""What `mkdocs build` does to the pages under docs/: it fills in the reference of all configuration keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from linnaeus.config.reference import reference

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the keys into the page about them, which in the repository only says how to see them."""
    return reference() if page.file.src_uri == "keys.md" else markdown
