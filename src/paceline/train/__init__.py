"""The one-shape step, the optimizer and the loop that drives them."""
