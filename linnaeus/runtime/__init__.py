"""Ranks, files, console, log and signals of a program."""
