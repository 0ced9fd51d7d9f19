"""Completion of `linnaeus` command lines in the shell: `linnaeus --install-completion`."""

SHELLS = ("bash", "zsh", "fish")
