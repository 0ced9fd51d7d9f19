"""Configuration: the schema, the command line, files and presets."""

from linnaeus.config.help import help_text
from linnaeus.config.load import LoadedConfig, load_config, save_config, to_yaml, with_batch_sizes
from linnaeus.config.schema import Config

__all__ = ["Config", "LoadedConfig", "help_text", "load_config", "save_config", "to_yaml", "with_batch_sizes"]
