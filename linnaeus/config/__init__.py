"""Configuration: the schema, the command line, files and presets."""
