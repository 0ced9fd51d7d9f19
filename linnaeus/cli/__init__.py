"""The commands, and their shared parts: options, measuring, tables, pictures."""
