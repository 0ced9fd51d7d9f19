"""Training, the default command."""
