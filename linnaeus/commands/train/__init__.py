"""Training as a command, which the program runs when its first word names no other one."""
