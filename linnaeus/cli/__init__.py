"""The commands, and what they have in common: options, measuring, tables, pictures."""
