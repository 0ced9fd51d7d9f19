"""What `mkdocs build` adds to the pages under docs/: the reference of all configuration keys."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from linnaeus.config.reference import reference


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page that is made from the schema."""
    files.append(File.generated(config, "configuration.md", content=reference()))
    return files
