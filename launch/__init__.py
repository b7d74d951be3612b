"""One process before the ranks: checks and prepares what it can, starts them, and turns their
outcome into a code."""
