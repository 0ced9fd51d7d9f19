"""What the commands beside training share: options, the way to an exit code, tables, pictures."""
