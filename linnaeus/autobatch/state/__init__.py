"""Undo the changes of trials bit for bit."""
