"""Peak memory of a step on a GPU, predicted from a trace without one."""
