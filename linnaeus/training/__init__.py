"""The training step and the validation step, what they need, and the loop around them."""
