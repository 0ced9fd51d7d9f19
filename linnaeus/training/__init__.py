"""The training step and the validation step, their parts, and the loop around them."""
