"""One file per verb: each wires the stages in the order data moves and computes nothing."""
