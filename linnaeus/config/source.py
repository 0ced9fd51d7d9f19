"""A source of configurations for Hydra: the files of one command line, with a mark in place of each value.

Hydra's documented plugins make it known: https://hydra.cc/docs/advanced/plugins/overview
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from hydra import version
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from linnaeus.config.keys import names_in, node_of


class Source(ConfigSource):  # type: ignore[misc]
    """Serves the files of one command line.

    Attributes:
        files: reads the files; None where no command line is being composed.
        served: paths of the files that Hydra asked for.
        is_draft: whether `???` in a defaults list is no problem yet.
    """

    files: ClassVar[Any] = None
    served: ClassVar[set[str]] = set()
    is_draft: ClassVar[bool] = False

    @classmethod
    @contextmanager
    def of(cls, files: Any) -> Iterator[None]:
        """Serve these files to Hydra, and leave a program around that uses Hydra as it is."""
        for plugin in (cls, _Place):
            Plugins.instance().register(plugin)
        cls.files, cls.served = files, set()
        around, base = GlobalHydra.instance().hydra, version.getbase()
        GlobalHydra.instance().clear()
        try:
            yield
        finally:
            cls.files = None
            GlobalHydra.instance().hydra = around
            if isinstance(base, version.Version):
                version.VersionBase.instance().setbase(base)

    @staticmethod
    def scheme() -> str:
        """Return how places of this source begin."""
        return "linnaeus"

    def available(self) -> bool:
        """Return that there always is a source."""
        return True

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a file as Hydra composes it."""
        file = self.files.get(config_path)
        self.served.add(config_path)
        content = self.files.marked(file.tree)
        if "hydra" in content:  # no settings of Hydra itself
            content["\0hydra"] = content.pop("hydra")
        if file.defaults is not None:
            content["defaults"] = _draft(file.defaults) if self.is_draft else file.defaults
        header = {"package": file.package or node_of(config_path.rpartition("/")[0])}
        return ConfigResult("linnaeus", config_path, OmegaConf.create(content), header)

    def is_group(self, config_path: str) -> bool:
        """Return whether there is a folder of this name."""
        return any((folder / config_path).is_dir() for folder in self.files.folders)

    def is_config(self, config_path: str) -> bool:
        """Return whether there is a file of this name."""
        return self.files.get(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names to choose from in a group."""
        return names_in(config_path, self.files.folders)


class _Place(SearchPathPlugin):  # type: ignore[misc]
    """Adds the source to Hydra's search path, while files are served."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if Source.files is not None:
            search_path.append("linnaeus", f"{Source.scheme()}://")


def _draft(defaults: Any) -> Any:
    """A defaults list without the choices that it leaves to the command line."""
    if not isinstance(defaults, list):
        return defaults
    return [
        {group: None if name == "???" else name for group, name in entry.items()}
        if isinstance(entry, dict)
        else entry
        for entry in defaults
    ]
