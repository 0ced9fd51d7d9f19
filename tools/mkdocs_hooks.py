"""What `mkdocs build` does to the pages under docs/: it fills in the reference of all configuration keys."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from linnaeus.config.reference import reference


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the page about the keys, which in the repository only says where to find them."""
    return reference() if page.file.src_uri == "configuration.md" else markdown
